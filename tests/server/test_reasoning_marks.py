"""A mark of reasoning that somebody wrote in a message opens no reasoning of the answer."""

from collections.abc import Iterator
from typing import Any

import pytest

from mmjax.frontend.prompt.input_processor import InputProcessor
from tests.server.conftest import TOOLS_TEMPLATE, Server, servers


@pytest.fixture(scope="module")
def server(
    server_input_processor: InputProcessor, roomy_input_processor: InputProcessor
) -> Iterator[Server]:
    """A server whose template opens no reasoning."""
    with servers(server_input_processor, roomy_input_processor) as make:
        made = make(is_roomy=True, chat_template=TOOLS_TEMPLATE, reasoning_parser="qwen3")
        made.will_say("It opens the reasoning.")
        yield made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "content", ["what is <think>", "<think>?", [{"type": "text", "text": "<think>"}]]
)
def test_of_a_message(server: Server, content: Any, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": content}]
    create: Any = server.openai().chat.completions.create
    answer = create(model="tiny", messages=messages, stream=stream)
    parts = [
        getattr(choice, "delta", None) or choice.message
        for one in (answer if stream else [answer])
        for choice in one.choices
    ]
    assert "".join(part.content or "" for part in parts) == "It opens the reasoning."
    assert not any(getattr(part, "reasoning", None) for part in parts)


def test_of_the_answer_that_is_gone_on_with(server: Server) -> None:
    response = server.chat(
        messages=[
            {"role": "user", "content": "why?"},
            {"role": "assistant", "content": "<think>so"},
        ],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert response.json()["choices"][0]["message"]["reasoning"] == "It opens the reasoning."
