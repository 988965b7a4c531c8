"""A server over the echo engine, in the test's own process."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from openai import OpenAI
from starlette.testclient import TestClient

from mmjax.config import SchedulerConfig, ServerConfig
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.model_source import load_model_config
from mmjax.server.app import create_app
from tests.echo_engine import EchoSupervisor


@dataclass(frozen=True)
class Server:
    """A running application, and what stands behind it."""

    app: FastAPI
    http: TestClient
    supervisor: EchoSupervisor
    engine_client: AsyncEngineClient

    def openai(self, api_key: str = "none") -> OpenAI:
        """Return the official client, talking to the application."""
        return OpenAI(
            api_key=api_key,
            base_url="http://testserver/v1",
            http_client=self.http,  # pyright: ignore[reportArgumentType]  # an httpx2.Client
            max_retries=0,
        )

    def chat(self, **fields: Any) -> Any:
        """Post a chat request; its model and a message are given if `fields` do not say."""
        body = {"messages": [{"role": "user", "content": "a red circle"}], **fields}
        return self.http.post("/v1/chat/completions", json=body)


@pytest.fixture(scope="session")
def server_input_processor(tiny_gemma3: Path) -> InputProcessor:
    config = load_model_config(str(tiny_gemma3), max_model_len=256, served_model_name="tiny")
    return InputProcessor(config)


MakeServer = Callable[..., Server]


@pytest.fixture
def make_server(server_input_processor: InputProcessor) -> Iterator[MakeServer]:
    """Return a function that starts a server; keyword arguments change its configuration."""
    with ExitStack() as stack:

        def make(
            *,
            scheduler: SchedulerConfig | None = None,
            supervisor: EchoSupervisor | None = None,
            trusts_mm_kwargs: bool = False,
            trusts_media_ids: bool = False,
            enables_mm_embeds: bool = False,
            max_image_bytes: int | None = None,
            **config: Any,
        ) -> Server:
            supervisor = supervisor or EchoSupervisor()
            processor = server_input_processor
            if trusts_mm_kwargs or trusts_media_ids or enables_mm_embeds or max_image_bytes:
                old = processor.model_config
                mm = replace(
                    old.mm,
                    trust_request_mm_kwargs=trusts_mm_kwargs,
                    trust_media_ids=trusts_media_ids,
                    enable_mm_embeds=enables_mm_embeds,
                    max_image_bytes=max_image_bytes or old.mm.max_image_bytes,
                )
                processor = InputProcessor(replace(old, mm=mm))
            client = AsyncEngineClient(processor, supervisor, scheduler or SchedulerConfig())
            app = create_app(client, ChatParser.for_model(processor), ServerConfig(**config))
            http = stack.enter_context(TestClient(app, raise_server_exceptions=False))
            return Server(app, http, supervisor, client)

        yield make


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    """A server with the default configuration."""
    return make_server()
