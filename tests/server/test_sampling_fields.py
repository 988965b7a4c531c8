"""Sampling fields of a body, on their way to the engine and back."""

from typing import Any

import pytest

from tests.server.conftest import Server

SCHEMA = {"type": "object", "properties": {"colour": {"type": "string"}}}


def added(server: Server, **fields: Any) -> Any:
    """Post a chat, and return the message that the engine got."""
    answer = server.chat(max_tokens=3, **fields)
    assert answer.status_code == 200, answer.text
    return server.supervisor.engine.added[-1]


def test_every_field_reaches_the_engine(server: Server) -> None:
    message = added(
        server,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"5": -100, "7": 2.5},
        allowed_token_ids=[9, 5, 9],
        bad_words=["red", "blue circle"],
        prompt_logprobs=2,
        n=2,
    )
    params = message.sampling_params
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert params.repetition_penalty == 1.5
    assert params.logit_bias == {5: -100.0, 7: 2.5}
    assert params.allowed_token_ids == (5, 9)
    assert len(message.bad_words_token_ids) >= 2
    first, second = server.supervisor.engine.added[-2:]
    assert {first.sampling_params.prompt_logprobs, second.sampling_params.prompt_logprobs} == {
        2,
        None,
    }, "a prompt's are computed once"


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"response_format": {"type": "json_object"}}, '"object"'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
                }
            },
            "colour",
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "colour"),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "[a-z]+"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "blue"),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, '"x"'),
    ],
    ids=str,
)
def test_a_structure_becomes_a_grammar(server: Server, fields: dict[str, Any], part: str) -> None:
    assert part in (added(server, **fields).grammar or "")
    body = {"prompt": "red", "max_tokens": 3, **fields}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    assert part in (server.supervisor.engine.added[-1].grammar or "")


def test_a_text_has_none(server: Server) -> None:
    assert added(server, response_format={"type": "text"}).grammar is None
    assert added(server, structured_outputs=None, response_format=None).grammar is None
