"""Schemas, patterns, tools and sampling fields meant to end what reads them: each fails alone."""

import itertools
import json
import random
from typing import Any

import pytest

from tests.server.conftest import TOOLS_TEMPLATE, MakeServer, Server
from tests.server.test_bad_input import SECRETS, error_of

VOCAB_END = 2**31
NUM_MIXES, NUM_MIXES_SLOW = 150, 5000


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "f", "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def schema(inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": inner}}


BAD: dict[str, list[dict[str, Any]]] = {
    "schemas": [
        {"structured_outputs": {"json": schema({"type": "colour"})}},
        {"structured_outputs": {"json": '{"type": '}},
        {"structured_outputs": {"json": {"$ref": "#/nowhere"}}},
        {"structured_outputs": {"json": {"$ref": "http://127.0.0.1/schema.json"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
    ],
    "patterns": [
        {"structured_outputs": {"regex": "(("}},
        {"structured_outputs": {"regex": "a{5,2}"}},
        {"structured_outputs": {"regex": "(?<=a)b"}},
    ],
    "tools": [
        tool(schema({"type": "string", "pattern": "(("})),
        tool(schema({"type": "something"})),
        tool({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}),
    ],
    "grammars": [
        {"structured_outputs": {"grammar": "start: nothing"}},
        {"structured_outputs": {"grammar": 'root ::= "a'}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"structural_tag": "{}"}},
    ],
}


@pytest.mark.parametrize(
    "bodies",
    BAD.values(),
    ids=[
        "CVE_2025_48942_schemas",
        "CVE_2025_48943_patterns",
        "CVE_2025_48944_tools",
        "CVE_2026_105757_grammars",
    ],
)
def test_what_cannot_be_read_is_its_requests_error(
    make_server: MakeServer, bodies: list[dict[str, Any]]
) -> None:
    server = make_server(is_roomy=True, chat_template=TOOLS_TEMPLATE)
    engine = server.supervisor.engine
    for body, stream in itertools.product(bodies, (False, True)):
        answers = [server.chat(**body, stream=stream)]
        if "tools" not in body:
            fields = {"prompt": "a", **body, "stream": stream}
            answers.append(server.http.post("/v1/completions", json=fields))
        for answer in answers:
            error = error_of(answer)
            wanted = ("structured_outputs", "response_format", "tools")
            assert (error["param"] or "").startswith(wanted), error
            assert len(error["message"]) < 1000
    assert engine.added == []
    assert server.chat(structured_outputs={"regex": "a+"}).status_code == 200
    assert server.supervisor.engine is engine


def test_CVE_2025_48942_not_by_the_responses_api_either(server: Server) -> None:
    for given in ({"type": "json_schema", "name": "a", "schema": {"type": "colour"}}, {"type": 3}):
        body = {"input": "a", "text": {"format": given}}
        error = error_of(server.http.post("/v1/responses", json=body))
        assert (error["param"] or "").startswith("text.format"), error
    assert server.supervisor.engine.added == []


# ---- sampling fields ----------------------------------------------------------------------------

EXTREMES: dict[str, list[Any]] = {
    "temperature": [0, 1e-30, 100, -1, None],
    "top_p": [1e-30, 1, 0, 1.5],
    "top_k": [-1, 0, 1, 2**31 - 1, 2**31],
    "min_p": [0, 1, 1e-30, -0.1],
    "frequency_penalty": [-2, 2, 2.1],
    "presence_penalty": [-2, 2, -3],
    "repetition_penalty": [0.01, 100, 0, 1e9],
    "no_repeat_ngram_size": [0, 1, 64, 65],
    "no_repeat_ngram_window_size": [0, 1, 2**31 - 1, 2**31, -1],
    "logit_bias": [{}, {"5": 100}, {"5": -100}, {"-1": 1}, {str(VOCAB_END): 1}, {"5": 1e30}],
    "allowed_token_ids": [[5], [5, 5], [], [-1], [10**6], list(range(200))],
    "bad_words": [[], ["a"], ["a" * 1024], ["<eos>"], ["\ud800"], ["a"] * 129],
    "prompt_logprobs": [0, 1, 20, 21, -1],
    "logprobs": [True, False, 5],
    "top_logprobs": [0, 20, 21],
    "seed": [0, -(2**63), 2**63 - 1, 2**63],
    "max_tokens": [1, 2**31 - 1, 0, 2**31],
    "min_tokens": [0, 1, 2**31 - 1],
    "stop": [[], "a", ["a"] * 64, "", ["\x00"]],
    "stop_token_ids": [[], [0], [10**6], [-1]],
    "ignore_eos": [True, 1],
    "skip_special_tokens": [False, "no"],
    "n": [1, 2, 64, 65, 0],
    "stream": [True],
}


@pytest.mark.parametrize(
    "count", [NUM_MIXES, pytest.param(NUM_MIXES_SLOW, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    "route",
    ["/v1/chat/completions", "/v1/completions", "/v1/responses"],
    ids=["CVE_2026_44223_chat", "CVE_2026_105922_completions", "PYSEC_2026_4350_responses"],
)
def test_any_mix_of_sampling_fields_is_an_answer_or_an_error_of_its_own(
    server: Server, route: str, count: int
) -> None:
    """Each field at its bounds and beyond, in pairs and more; nobody else is disturbed."""
    rng = random.Random(route)
    statuses = []
    for number in range(count):
        names = rng.sample(sorted(EXTREMES), rng.choice([1, 2, 2, 3]))
        fields = {name: rng.choice(EXTREMES[name]) for name in names}
        if "max_tokens" not in fields or "ignore_eos" in fields:
            fields["max_tokens"] = 2
        response = post(server, route, fields)
        statuses.append(response.status_code)
        assert response.status_code in (200, 400), (fields, response.text)
        assert not SECRETS.search(response.text)
        if response.status_code == 400:
            param = error_of(response)["param"] or ""
            assert any(param.startswith(_name(name, route)) for name in [*fields, "stream"]), fields
        if number % 50 == 0:
            assert server.chat(max_tokens=1).status_code == 200
    assert server.engine_client.num_requests == 0
    assert {200, 400} == set(statuses)


def post(server: Server, route: str, fields: dict[str, Any]) -> Any:
    body: dict[str, Any] = {"prompt": "a", **fields}
    if route == "/v1/completions" and "logprobs" in fields:
        body["logprobs"] = 5
    if route == "/v1/chat/completions":
        body = {"messages": [{"role": "user", "content": "a"}], **fields}
    if route == "/v1/responses":
        body = {"input": "a", **{_name(name, route): value for name, value in fields.items()}}
    # As ASCII: half of a surrogate pair has no other form.
    headers = {"content-type": "application/json"}
    return server.http.post(route, content=json.dumps(body), headers=headers)


def _name(name: str, route: str) -> str:
    is_responses = route == "/v1/responses"
    return "max_output_tokens" if is_responses and name == "max_tokens" else name
