"""docs/serving.md says what is so: its examples run, its fields and flags are there."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from mmjax.config.engine_config import SchedulerConfig, ServerConfig, serve_settings
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.server.app import create_app
from mmjax.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from tests.echo_engine import EchoSupervisor
from tests.server.conftest import listening

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
STRUCTURED = PAGE.with_name("structured.md")
EXAMPLES = re.findall(r"(?<!-->\n)```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def address(server_input_processor: InputProcessor) -> Iterator[str]:
    """The address of a server over the echo engine."""
    client = AsyncEngineClient(server_input_processor, EchoSupervisor(), SchedulerConfig())
    app = create_app(client, ChatParser.for_model(server_input_processor), ServerConfig())
    with listening(app) as address:
        yield address


def test_the_examples_run(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(EXAMPLES) >= 4
    program = "\n".join(EXAMPLES).replace("http://127.0.0.1:8000", address)
    # The examples close no client. A collection of garbage may find its socket before it.
    with ExitStack() as clients:
        make = OpenAI.__init__

        def make_and_close(client: OpenAI, **options: Any) -> None:
            make(client, **options)
            clients.callback(client.close)

        monkeypatch.setattr(OpenAI, "__init__", make_and_close)
        exec(compile(program, str(PAGE), "exec"), {})
    shown = capsys.readouterr().out
    assert shown.count("a red circle") >= 3
    assert "image_tokens=0" in shown


def test_the_flags_and_fields_are_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    flags = {one.flag for one in serve_settings().values()}
    assert set(re.findall(r"`(--[a-z0-9-]+)", text)) - flags == set()
    known = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    section = text.partition("## Fields of chat and completions")[2].partition("\n## ")[0]
    section += STRUCTURED.read_text(encoding="utf-8")
    missing = [name for name in sorted(known) if f"`{name}`" not in section]
    assert set(missing) <= OF_OTHERS, missing


OF_OTHERS = {"messages", "model", "prompt"}
"""Fields that say themselves what they are."""
