"""A server over the echo engine, with a port, in a thread of the test's process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mmjax.config.engine_config import SchedulerConfig, ServerConfig
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from mmjax.server.app import create_app
from tests.echo_engine import EchoSupervisor
from tests.server.conftest import listening

API_KEY = "a-key"


@pytest.fixture(scope="session")
def echo_address(tiny_gemma3: Path) -> Iterator[str]:
    """The address of a server of `tiny` that wants `API_KEY`, and answers with the prompt."""
    config = load_model_config(str(tiny_gemma3), max_model_len=512, served_model_name="tiny")
    processor = InputProcessor(config)
    client = AsyncEngineClient(processor, EchoSupervisor(), SchedulerConfig())
    app = create_app(client, ChatParser.for_model(processor), ServerConfig(api_keys=(API_KEY,)))
    with listening(app) as address:
        yield address
