"""A server over the echo engine, in the test's own process."""

import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI, OpenAI
from starlette.testclient import TestClient

from mmjax.config.engine_config import LoRAConfig, SchedulerConfig, ServerConfig
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from mmjax.server.app import create_app
from tests.echo_engine import EchoSupervisor

T = TypeVar("T")

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
}
"""Routes that generate, and the least that each is asked."""

TOOLS_TEMPLATE = """{{ bos_token }}{% if tools %}tools: {{ tools | tojson }}{% endif -%}
{% for message in messages %}{{ '<start_of_turn>' + message.role + '\n' -}}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{ '<start_of_image>' }}{% else %}{{ part.text }}{% endif -%}
{% endfor %}{% endif -%}
{% for call in message.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}{{ '<end_of_turn>\n' }}{% endfor -%}
{% if style is defined %}style: {{ style }}{% endif -%}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
"""A template with tools, calls and an option of its own."""
TOOLS: dict[str, Any] = {
    "is_roomy": True,
    "chat_template": TOOLS_TEMPLATE,
    "enable_auto_tool_choice": True,
}
"""The configuration of a server that reads calls."""


def events_of(response: Any) -> list[Any]:
    """Return the JSON of a stream's events, without "[DONE]"."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = response.text.split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def http_scope(path: str, *, method: str = "POST", **headers: str) -> dict[str, Any]:
    """Return the ASGI scope of a request, as of a server."""
    given = {"content-type": "application/json", **headers}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("testserver", 80),
        "state": {},
    }


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
            http_client=self.http,
            max_retries=0,
        )

    def async_openai(self, api_key: str = "none") -> AsyncOpenAI:
        """Return the official asyncio client; use it in `in_loop`."""
        return AsyncOpenAI(
            api_key=api_key,
            base_url="http://testserver/v1",
            http_client=httpx2.AsyncClient(
                transport=httpx2.ASGITransport(app=self.app, raise_app_exceptions=False),
                base_url="http://testserver",
            ),
            max_retries=0,
        )

    def in_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine function in the application's own event loop."""
        assert self.http.portal is not None
        return self.http.portal.call(work)

    def will_say(self, text: str | None) -> None:
        """Let the engine answer with `text` from now on, instead of an echo."""
        self.supervisor.engine.answer = (
            None
            if text is None
            else self.engine_client.input_processor.tokenizer.encode(text, add_special_tokens=False)
        )

    def chat(self, **fields: Any) -> Any:
        """Post a chat request; its model and a message are given if `fields` do not say."""
        body = {"messages": [{"role": "user", "content": "a red circle"}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def end_behind_a_step(self) -> None:
        """Let the engine end in the middle of the next answer."""
        step, num_steps = self.supervisor.engine.step, 0

        def step_then_end() -> list[Any]:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 2:
                self.supervisor.die(restarts=False)
                return []
            return step()

        self.supervisor.engine.step = step_then_end  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def server_input_processor(tiny_gemma3: Path) -> InputProcessor:
    config = load_model_config(str(tiny_gemma3), max_model_len=256, served_model_name="tiny")
    return InputProcessor(config)


@pytest.fixture(scope="session")
def roomy_input_processor(tiny_gemma3: Path) -> InputProcessor:
    """Has room for tools in a prompt."""
    config = load_model_config(str(tiny_gemma3), max_model_len=4096, served_model_name="tiny")
    return InputProcessor(config)


MakeServer = Callable[..., Server]


@pytest.fixture
def make_server(
    server_input_processor: InputProcessor, roomy_input_processor: InputProcessor
) -> Iterator[MakeServer]:
    """Return a function that starts a server; keyword arguments change its configuration."""
    with servers(server_input_processor, roomy_input_processor) as make:
        yield make


@contextmanager
def servers(normal: InputProcessor, roomy: InputProcessor) -> Iterator[MakeServer]:
    """Yield the function; the servers end with the context."""
    with ExitStack() as stack:

        def make(
            *,
            scheduler: SchedulerConfig | None = None,
            supervisor: EchoSupervisor | None = None,
            trusts_mm_kwargs: bool = False,
            trusts_media_ids: bool = False,
            enables_mm_embeds: bool = False,
            max_image_bytes: int | None = None,
            chat_template: str | None = None,
            lora: LoRAConfig | None = None,
            is_roomy: bool = False,
            names: tuple[str, ...] = (),
            **config: Any,
        ) -> Server:
            supervisor = supervisor or EchoSupervisor()
            processor = roomy if is_roomy else normal
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
            if names:
                named = replace(processor.model_config, served_model_name=names)
                processor = InputProcessor(named)
            client = AsyncEngineClient(
                processor, supervisor, scheduler or SchedulerConfig(), lora=lora
            )
            parser = ChatParser.for_model(processor)
            if chat_template is not None:
                parser = replace(parser, template=ChatTemplate(chat_template, processor.tokenizer))
            app = create_app(client, parser, ServerConfig(**config), lora)
            http = stack.enter_context(TestClient(app, raise_server_exceptions=False))
            return Server(app, http, supervisor, client)

        yield make


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serve an application in a thread; yield its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        # Connections wait in the listener's queue until it serves.
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def tool_server(
    server_input_processor: InputProcessor, roomy_input_processor: InputProcessor
) -> Iterator[Server]:
    """A server that reads calls; one for a module."""
    with servers(server_input_processor, roomy_input_processor) as make:
        yield make(**TOOLS)


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    """A server with the default configuration."""
    return make_server()
