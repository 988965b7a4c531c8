"""A client leaves while its clip is transcribed: the engine stops, and others have its room."""

import time
from collections.abc import Iterator
from contextlib import suppress

import httpx2
import pytest

from mmjax.config.engine_config import SchedulerConfig, ServerConfig
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from mmjax.server.app import create_app
from mmjax.server.openai.transcripts import service
from tests.echo_engine import EchoSupervisor
from tests.families.whisper import WHISPER
from tests.server.conftest import listening
from tests.server.test_transcripts import ROUTE, WAV

NUM_WORDS = 25


@pytest.fixture
def served(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[str, EchoSupervisor, AsyncEngineClient]]:
    """A slow engine's server, with room for one clip, and its address."""
    monkeypatch.setattr(service, "MAX_SECONDS_AT_ONCE", 31)
    config = load_model_config(str(WHISPER.path()), served_model_name="tiny", max_model_len=64)
    processor, supervisor = InputProcessor(config), EchoSupervisor(delay_s=0.1)
    supervisor.engine.answer = processor.tokenizer.encode(" red" * NUM_WORDS)
    client = AsyncEngineClient(processor, supervisor, SchedulerConfig())
    app = create_app(client, ChatParser.for_model(processor), ServerConfig())
    with listening(app) as address:
        yield address, supervisor, client


def wait_until_idle(supervisor: EchoSupervisor, client: AsyncEngineClient) -> None:
    deadline = time.monotonic() + 20
    while supervisor.engine.running or client.num_requests:
        assert time.monotonic() < deadline, "the engine goes on for nobody"
        time.sleep(0.02)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_nothing_goes_on(served: tuple[str, EchoSupervisor, AsyncEngineClient], is_streamed: bool):
    address, supervisor, client = served
    form = {
        "data": {"language": "en", "stream": str(is_streamed).lower()},
        "files": {"file": ("clip.wav", WAV)},
    }
    with httpx2.Client(base_url=address, timeout=1.5) as http:
        for _ in range(2):
            # Of a stream some events have come by then.
            with suppress(httpx2.TimeoutException), http.stream("POST", ROUTE, **form) as answer:
                next(answer.iter_lines())
            wait_until_idle(supervisor, client)
    assert len(supervisor.engine.aborted) == 2
    supervisor.delay_s = 0.0
    with httpx2.Client(base_url=address, timeout=20) as http:
        whole = http.post(ROUTE, data={"language": "en"}, files=form["files"])
    assert whole.json()["text"] == " ".join(["red"] * NUM_WORDS)
