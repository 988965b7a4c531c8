"""An answer that ends inside a character ends before it, wherever its text or tokens are shown."""

import json
from typing import Any

import pytest

from tests.server.conftest import Server
from tests.server.test_prompt_fields import joined, stream

WHOLE, CUT_OFF = "aé 🎈", "aé "
NUM_MISSED = 2
"""Tokens that are missing, each a byte of the balloon's four."""


@pytest.fixture
def num_tokens(server: Server) -> int:
    """Let the engine answer with the balloon; return after how many tokens it lacks a part."""
    tokenizer: Any = server.engine_client.input_processor.tokenizer
    ids = tokenizer.encode(WHOLE, add_special_tokens=False)
    assert tokenizer.decode(ids[-1:]) == "\ufffd"
    server.supervisor.engine.answer = ids
    return len(ids) - NUM_MISSED


@pytest.mark.parametrize("include", [False, True])
def test_texts(server: Server, num_tokens: int, include: bool) -> None:
    common = {"include_stop_str_in_output": include, "stop": ["never"]}
    body = {"prompt": "a", "max_tokens": num_tokens, **common}
    answer = server.http.post("/v1/completions", json=body).json()
    (streamed,) = joined(stream(server, "/v1/completions", body)).values()
    assert answer["choices"][0]["text"] == streamed["text"] == CUT_OFF
    assert answer["choices"][0]["finish_reason"] == "length"
    chat = server.chat(max_tokens=num_tokens, **common).json()
    assert chat["choices"][0]["message"]["content"] == CUT_OFF
    response = {"input": "a", "max_output_tokens": num_tokens}
    shown = server.http.post("/v1/responses", json=response).json()
    assert shown["output"][0]["content"][0]["text"] == CUT_OFF
    events = stream(server, "/v1/responses", response)
    assert "".join(e["delta"] for e in events if e["type"].endswith("text.delta")) == CUT_OFF


def test_a_text_that_a_stop_token_ends(server: Server, num_tokens: int) -> None:
    ids = server.supervisor.engine.answer
    assert ids is not None
    server.supervisor.engine.answer = [*ids[:num_tokens], 5, *ids[num_tokens:]]
    body = {"prompt": "a", "stop_token_ids": [5]}
    (choice,) = server.http.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["stop_reason"]) == (CUT_OFF, 5)


def test_the_bytes_of_tokens_make_the_text(server: Server, num_tokens: int) -> None:
    answer = server.chat(max_tokens=num_tokens, logprobs=True, top_logprobs=2).json()
    content = answer["choices"][0]["logprobs"]["content"]
    shown = b"".join(bytes(one["bytes"]) for one in content)
    assert shown == WHOLE.encode()[:-NUM_MISSED]
    assert content[-1]["token"] == "\ufffd"


def test_offsets_are_places_of_the_text_streamed_or_not(server: Server, num_tokens: int) -> None:
    body = {"prompt": "a", "max_tokens": num_tokens + NUM_MISSED, "logprobs": 1}
    (choice,) = server.http.post("/v1/completions", json=body).json()["choices"]
    (streamed,) = joined(stream(server, "/v1/completions", body)).values()
    assert choice["text"] == streamed["text"] == WHOLE
    assert choice["logprobs"]["text_offset"][-4:] == [len(CUT_OFF)] * 4
    assert json.dumps(streamed["logprobs"]) == json.dumps(choice["logprobs"])


@pytest.mark.parametrize("is_shown", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_are_places_behind_a_special_token(
    server: Server, echo: bool, is_shown: bool
) -> None:
    """Of one that the text does not show nothing is counted, but of the prompt's, which it does."""
    tokenizer: Any = server.engine_client.input_processor.tokenizer
    mark, prompt = "<start_of_turn>", "<start_of_turn>a"
    server.supervisor.engine.answer = tokenizer.encode(f"b{mark}c", add_special_tokens=False)
    body = {"prompt": prompt, "max_tokens": 3, "logprobs": 1, "echo": echo}
    body["skip_special_tokens"] = not is_shown
    (choice,) = server.http.post("/v1/completions", json=body).json()["choices"]
    shown, text = choice["logprobs"], choice["text"]
    assert text == (prompt if echo else "") + ("b<start_of_turn>c" if is_shown else "bc")
    assert shown["tokens"][-3:] == ["b", mark, "c"]
    assert shown["text_offset"][-3:] == [text.rindex("b"), text.rindex("b") + 1, len(text) - 1]
    (streamed,) = joined(stream(server, "/v1/completions", body)).values()
    assert streamed["logprobs"]["text_offset"] == shown["text_offset"]
