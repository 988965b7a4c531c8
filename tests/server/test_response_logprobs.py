"""Every token of a response's text has its log-probability, streamed or not."""

from typing import Any

import pytest

from tests.server.conftest import TOOLS, MakeServer, Server


@pytest.mark.parametrize(
    ("says", "fields"),
    [
        ("é€🙂 ok", {}),
        ("it is a red circle", {"extra_body": {"stop": ["red square"]}}),
        ("it is a red square", {"extra_body": {"stop": ["red square"]}}),
        ("ok 🙂", {"max_output_tokens": 5}),
    ],
)
def test_of_tokens_whose_text_comes_later(
    server: Server, says: str, fields: dict[str, Any]
) -> None:
    server.will_say(says)
    create: Any = server.openai().responses.create
    fields = {"model": "tiny", "input": "a", "top_logprobs": 1, **fields}
    whole = create(**fields)
    *events, last = create(stream=True, **fields)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    logprobs = whole.output[0].content[0].logprobs
    assert len(logprobs) == whole.usage.output_tokens == last.response.usage.output_tokens
    expected = [one.token for one in logprobs]
    assert [one.token for event in deltas for one in event.logprobs] == expected
    assert [one.token for one in done.logprobs] == expected
    assert last.response.output[0].content[0].logprobs == logprobs
    assert last.response.output_text == whole.output_text


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("<think>hm</think>ok", ["o", "k", "<eos>"]),
        ('ok<tool_call>{"name": "f", "arguments": {}}</tool_call>', ["o", "k"]),
    ],
)
def test_of_thoughts_and_calls_are_no_messages(
    make_server: MakeServer, says: str, expected: list[str], stream: bool
) -> None:
    server = make_server(**TOOLS, reasoning_parser="qwen3")
    server.will_say(says)
    fields = {"model": "tiny", "input": "a", "tools": [FUNCTION], "top_logprobs": 1}
    create: Any = server.openai().responses.create
    answer = create(**fields, stream=stream)
    response = [*answer][-1].response if stream else answer
    logprobs = response.output[0].content[0].logprobs
    assert [one.token for one in logprobs] == expected
