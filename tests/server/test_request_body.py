"""A body's work is bounded before it is done, and a wrong one costs no more than a right one."""

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from mmjax.errors import RequestValueError, ShuttingDownError
from mmjax.server.openai import request_body
from mmjax.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
)
from mmjax.server.openai.request_body import JsonScan, RequestReader, parse
from mmjax.server.openai.responses_api.protocol import ResponsesRequest
from mmjax.server.openai.tokenization import TokenizeRequest
from tests.server.conftest import Server

MANY = 30_000
MESSAGES = [{"role": "user", "content": "a"}]


def chat_with(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, **fields}


WORST: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "unknown fields": (ChatCompletionRequest, chat_with(**dict.fromkeys(map(str, range(MANY)), 1))),
    "unknown fields of a message": (
        ChatCompletionRequest,
        {"messages": [dict.fromkeys(map(str, range(MANY)), 1)]},
    ),
    "messages of a wrong type": (ChatCompletionRequest, {"messages": [1] * MANY}),
    "messages without a role": (ChatCompletionRequest, {"messages": [{}] * MANY}),
    "too many messages": (ChatCompletionRequest, {"messages": MESSAGES * MANY}),
    "parts of a wrong type": (
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": [1] * MANY}]},
    ),
    "prompt of texts": (CompletionRequest, {"prompt": ["x"] * MANY}),
    "prompt of texts, then ids": (CompletionRequest, {"prompt": ["x", *[1] * MANY]}),
    "prompt of floats": (CompletionRequest, {"prompt": [1.5] * MANY}),
    "prompt of negative ids": (CompletionRequest, {"prompt": [-1] * MANY}),
    "prompt of nulls": (CompletionRequest, {"prompt": [None] * MANY}),
    "prompt of lists of texts": (CompletionRequest, {"prompt": [["x"] * MANY]}),
    "prompt of objects": (CompletionRequest, {"prompt": [{}] * MANY}),
    "logit_bias": (ChatCompletionRequest, chat_with(logit_bias={str(i): "x" for i in range(MANY)})),
    "names of a dict": (
        ChatCompletionRequest,
        chat_with(chat_template_kwargs={f"{'k' * 300}{i}": 1 for i in range(MANY)}),
    ),
    "metadata": (ChatCompletionRequest, chat_with(metadata={str(i): 1 for i in range(MANY)})),
    **{
        name: (ChatCompletionRequest, chat_with(**{name: [1.5] * MANY}))
        for name in (
            *("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "tools", "functions"),
            *("documents", "modalities"),
        )
    },
}


@pytest.mark.parametrize("name", WORST)
def test_wrong_bodies_make_few_errors(name: str) -> None:
    model, body = WORST[name]
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 2
    with pytest.raises(RequestValueError) as refused:
        parse(json.dumps(body).encode(), model)
    assert refused.value.param is not None
    assert len(refused.value.message) < 1500
    assert refused.value.__context__ is None, "it would keep the whole body"


def test_a_refusal_takes_time_by_the_bodys_length() -> None:
    def seconds(num_keys: int) -> float:
        body = json.dumps(chat_with(**dict.fromkeys(map(str, range(num_keys)), 1))).encode()
        times: list[float] = []
        for _ in range(3):
            start = time.process_time()
            with pytest.raises(RequestValueError):
                parse(body, ChatCompletionRequest)
            times.append(time.process_time() - start)
        return min(times)

    # 8 times as many: linear is 8 times the time, quadratic 64.
    assert seconds(40_000) < 30 * seconds(5_000)


def test_the_first_few_mistakes_are_told(server: Server) -> None:
    response = server.chat(colour=1, shape=2, size=3, weight=4, temperature=7)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == "colour"
    assert error["message"] == (
        "`colour` is not a field that mmjax knows; remove it; "
        "`shape` is not a field that mmjax knows; remove it; "
        "`size` is not a field that mmjax knows; remove it; and 1 more"
    )
    error = server.chat(temperature=-1, top_p=7, n=0, seed="x").json()["error"]
    assert error["message"].startswith("`n`: input should be greater than or equal to 1; `temp")
    assert error["message"].endswith("; and 1 more")


def test_a_misspelt_field_is_told_the_right_one(server: Server) -> None:
    error = server.chat(max_token=4, temprature=0).json()["error"]
    assert error["param"] == "max_token"
    assert error["message"] == (
        "`max_token` is not a field that mmjax knows; do you mean `max_tokens`?; "
        "`temprature` is not a field that mmjax knows; do you mean `temperature`?"
    )


# ---- the scan -------------------------------------------------------------------------------


def some_json(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(7 if depth < 4 else 4):
        case 0:
            return rng.choice([None, True, -1.5e-7, 12345])
        case 1 | 2 | 3:
            signs = ["\\", '"', "[", "{", ",", ":", "a", "\u00e9", "\U0001f600", "\n", "u", "1"]
            return "".join(rng.choices(signs, k=rng.randrange(8)))
        case 4 | 5:
            return [some_json(rng, depth + 1) for _ in range(rng.randrange(5))]
        case _:
            return {f'{i}\\"{i}': some_json(rng, depth + 1) for i in range(rng.randrange(4))}


def count(value: Any) -> tuple[int, int]:
    """Return what a value holds: commas; lists, objects and texts."""
    if isinstance(value, str):
        return 0, 1
    if not isinstance(value, list | dict):
        return 0, 0
    items = list(value) if isinstance(value, list) else [*value, *value.values()]
    counts = [count(item) for item in items]
    return (
        max(len(value) - 1, 0) + sum(item[0] for item in counts),
        1 + sum(item[1] for item in counts),
    )


def scan_in_pieces(text: bytes, rng: random.Random) -> None:
    scan = JsonScan()
    while text:
        size = rng.choice([1, 2, 3, 7, 50, 10_000])
        scan.feed(text[:size])
        text = text[size:]
    scan.feed(b"")


@pytest.mark.parametrize("is_ascii", [True, False])
def test_the_scan_counts_as_a_decoder_does(monkeypatch: pytest.MonkeyPatch, is_ascii: bool) -> None:
    rng = random.Random(7)
    for _ in range(300):
        value = some_json(rng)
        text = json.dumps(value, ensure_ascii=is_ascii).encode()
        num_values, num_nodes = count(value)
        monkeypatch.setattr(request_body, "MAX_VALUES", num_values)
        monkeypatch.setattr(request_body, "MAX_NODES", num_nodes)
        scan_in_pieces(text, rng)
        for name, limit in (("MAX_VALUES", num_values), ("MAX_NODES", num_nodes)):
            if limit:
                monkeypatch.setattr(request_body, name, limit - 1)
                with pytest.raises(RequestValueError, match=f"more than {limit - 1} "):
                    scan_in_pieces(text, rng)
                monkeypatch.setattr(request_body, name, limit)


def scan_by(size: int, text: bytes) -> None:
    scan = JsonScan()
    for start in range(0, len(text), size):
        scan.feed(text[start : start + size])


MIB = 2**20
TOO_MUCH: list[tuple[bytes, str]] = [
    (b"[" * 2**17, "lists, objects and texts"),
    (b'["' + b'","' * 2**17, "lists, objects and texts"),
    (b"[" + b"1," * (2**18 + 1), "262144 values"),
    (b'["' + b"\\n" * (2 * MIB + 1), "backslashes"),
    (b'["' + "\u00e9".encode() * (2 * MIB + 1), "bytes in a text that is not ASCII"),
    (b'["' + b"a" * (4 * MIB) + b"\\u00e9", "bytes in a text that is not ASCII"),
    (b'["' + "\u00e9".encode() * 1000 + b"a" * (4 * MIB), "bytes in a text that is not ASCII"),
    (b"[" + b" " * (4 * MIB), "bytes outside of texts"),
    (b"[" + b"1" * 41, "a number of more than 40 characters"),
    (b"[1." + b"0" * 10**6, "a number of more than 40 characters"),
]


@pytest.mark.parametrize(("text", "match"), TOO_MUCH, ids=lambda value: repr(value)[:40])
@pytest.mark.parametrize("size", [1000, 65_536])
def test_what_is_dear_to_decode_is_refused_before(text: bytes, match: str, size: int) -> None:
    with pytest.raises(RequestValueError, match=match):
        scan_by(size, text)


def test_honest_bodies_pass_the_scan() -> None:
    picture = b"A" * (30 * MIB)
    turns = b'{"role": "user", "content": [{"type": "text", "text": "a\\n\\u00e9"}]}, ' * 4000
    for text in (
        b'{"messages": [{"content": "data:image\\/png;base64,' + picture + b'"}]}',
        b'{"messages": [' + turns + b"]}",
        b'{"prompt": [' + b"128000, " * 2**17 + b"1]}",
    ):
        scan_by(65_536, text)


# ---- reading --------------------------------------------------------------------------------


def request_of(body: bytes, *, is_left: bool = False) -> Request:
    """Return a request whose client sends `body`, and then leaves if `is_left`."""
    messages: Iterator[Any] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        message = next(messages, None)
        if message is None and not is_left:
            await asyncio.Event().wait()
        return message or {"type": "http.disconnect"}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


def test_who_left_while_others_had_their_turn_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[int] = []

    def parse_counted(body: bytes, model: type[Any]) -> Any:
        parsed.append(len(body))
        return parse(body, model)

    monkeypatch.setattr(request_body, "parse", parse_counted)
    body = json.dumps(chat_with(user="a" * 200, stop=["a" * 1000] * 60)).encode()

    async def run() -> list[Any]:
        reader = RequestReader(1.0)
        requests = [request_of(body), *(request_of(body, is_left=True) for _ in range(8))]
        reads = [reader.read(item, ChatCompletionRequest) for item in requests]
        try:
            return await asyncio.gather(*reads, return_exceptions=True)
        finally:
            reader.close()

    first, *others = asyncio.run(run())
    assert isinstance(first, ChatCompletionRequest)
    assert all(isinstance(other, ClientDisconnect) for other in others)
    assert len(parsed) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"messages": [}', "the body is not valid JSON"),
        (b'{"a": NaN}', "the body is not valid JSON"),
        (b"", "the body is empty"),
        (b"[1]", "the body must be a JSON object"),
        (b"[" * 10_000, "recursion limit"),
    ],
)
def test_what_is_no_object_has_no_param(server: Server, content: bytes, message: str) -> None:
    headers = {"content-type": "application/json"}
    response = server.http.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] is None
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("content", [3, {"type": "text"}, True])
def test_wrong_content_says_what_it_may_be(server: Server, content: Any) -> None:
    error = server.chat(messages=[{"role": "user", "content": content}]).json()["error"]
    assert error["param"] == "messages[0].content"
    assert error["message"].endswith("input should be a text or a list of parts")


# ---- OpenAI's fields ------------------------------------------------------------------------

OPENAI_FIELDS = [
    (model, name, "Optional" in str(kind))
    for model, params in (
        (ChatCompletionRequest, chat_create_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
    )
    for name, kind in params.__annotations__.items()
]


@pytest.mark.parametrize(("model", "name", "is_nullable"), OPENAI_FIELDS)
def test_openais_fields_are_known(model: type[BaseModel], name: str, is_nullable: bool) -> None:
    assert name in model.model_fields
    if is_nullable:
        required = {"messages": MESSAGES} if model is ChatCompletionRequest else {"prompt": "a"}
        given = model.model_validate({**required, name: None})
        absent = model.model_validate(required)
        neutral = getattr(model, "NEUTRAL").get(name, ())  # noqa: B009  # of both models
        value = getattr(given, name)
        assert value == getattr(absent, name) or value is None
        assert not neutral or value in neutral


@pytest.mark.parametrize(
    ("model", "required"),
    [
        (ChatCompletionRequest, {"messages": MESSAGES}),
        (CompletionRequest, {"prompt": "a"}),
        (ResponsesRequest, {"input": "a"}),
        (TokenizeRequest, {}),
        (StreamOptions, {}),
    ],
)
def test_null_is_absent(model: type[BaseModel], required: dict[str, Any]) -> None:
    nulls = dict.fromkeys(model.model_fields.keys() - required.keys())
    assert model.model_validate({**nulls, **required}) == model.model_validate(required)


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "timeout"]
)
@pytest.mark.parametrize("value", [True, "1", "NaN"])
def test_what_is_no_number_is_none(server: Server, field: str, value: Any) -> None:
    response = server.chat(**{field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert server.chat(**{field: 1}, max_tokens=2).status_code == 200, "an integer is a number"


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("safety_identifier", "user-1", 200),
        ("prompt_cache_key", "key-1", 200),
        ("verbosity", "medium", 200),
        ("verbosity", "high", 400),
        ("prediction", {"type": "content", "content": "a"}, 200),
        ("audio", {"voice": "alloy", "format": "wav"}, 400),
    ],
)
def test_newer_fields(server: Server, field: str, value: Any, status: int) -> None:
    response = server.chat(**{field: value})
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["param"] == field


def test_the_schema_names_the_bodies(server: Server) -> None:
    schema = server.http.get("/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    reference = body["content"]["application/json"]["schema"]["$ref"]
    assert reference == "#/components/schemas/ChatCompletionRequest"
    text = json.dumps(schema)
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in schema["components"]["schemas"]


async def test_a_body_whose_time_is_over_does_not_hold_up_the_end() -> None:
    reader, is_over, may_end = RequestReader(0.01), asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        try:
            await asyncio.Event().wait()
        finally:
            is_over.set()
            await may_end.wait()
        return {}

    reading = asyncio.create_task(reader.receive(Request({"type": "http"}, receive)))
    await is_over.wait()
    reader.stop()
    may_end.set()
    with pytest.raises(ShuttingDownError):
        await reading
    reader.close()


async def test_a_body_that_comes_as_one_is_counted_as_in_pieces() -> None:
    prompt = "é" + "x" * (request_body.MAX_TEXT_BYTES + request_body.MAX_TEXT_BYTES // 8)
    body = json.dumps({"prompt": prompt}, ensure_ascii=False).encode()

    reader = RequestReader(0)
    with pytest.raises(RequestValueError, match="bytes in a text that is not ASCII"):
        await reader.read_line(body, CompletionRequest)
    reader.close()
