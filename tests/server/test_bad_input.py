"""What goes badly: every mistake is a 4xx in OpenAI's form that names the field, and no more."""

import base64
import io
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from mmjax.config.engine_config import SchedulerConfig
from tests.echo_engine import REFUSED_TOKEN
from tests.kit import IMAGE_SOFT, IMAGE_START
from tests.server.conftest import MakeServer, Server
from tests.server.test_app import data_url, image_message

SECRETS = re.compile(r"0x[0-9a-f]{6,}|Traceback|File \"|<_io|/site-packages/|/tmp/|\bobject at\b")


def error_of(response: Any, status: int = 400) -> dict[str, Any]:
    """Check the form of an error; return its inside."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) in ({"error"}, {"type", "error", "request_id"})  # OpenAI's, Anthropic's
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert not SECRETS.search(response.text)
    return body["error"]


PART, TOOL_CALLS = "messages[0].content[0]", "messages[0].tool_calls"
FTP = {"type": "image_url", "image_url": {"url": "ftp://x"}}
WEATHER = {"type": "function", "function": {"name": "weather"}}
NAMED_X = {"type": "function", "function": {"name": "x"}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CHAT_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "red"}, "messages"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "a", "colour": 1}]}, "messages[0].colour"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, PART + ".image_url"),
    ({"messages": [{"role": "user", "content": [["a"]]}]}, "messages[0].content[0]"),
    ({"messages": [["a"]]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "red " * 300}]}, "messages"),
    ({"messages": [image_message()] * 17}, "messages[16].content[0]"),
    ({"colour": "red"}, "colour"),
    ({"model": ["tiny"]}, "model"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_k": 1.5}, "top_k"),
    ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram_size"),
    ({"n": 10**9}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"mm_processor_kwargs": {"do_pan_and_scan": True}}, "mm_processor_kwargs"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"red": 1}}, "logit_bias"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tool_choice"),
    (
        {"tools": [{"type": "function", "function": {"name": "a"}}], "tool_choice": "none"},
        "tools",
    ),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    *(
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", **rest}}, "tool_choice")
        for rest in (
            {"allowed_tools": {"mode": "none", "tools": [{**WEATHER}]}},
            {"allowed_tools": {"mode": "auto", "tools": []}},
            {"allowed_tools": {"mode": "auto", "tools": 3}},
            {"allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]}},
            {"allowed_tools": {"mode": "required", "tools": [NAMED_X]}},
            {"mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]},
        )
    ),
    (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [WEATHER]},
            }
        },
        "tool_choice",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "a"}}],
            "tool_choice": "required",
            "structured_outputs": {"json_object": True},
        },
        "tool_choice",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
        "response_format.json_schema.x",
    ),
    (
        {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
        "response_format.json_schema",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "colour"}},
            }
        },
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "((("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {"type": "colour"}}}, "structured_outputs.json"),
    (
        {
            "response_format": {"type": "text"},
            "structured_outputs": {"json": {"type": "colour"}},
        },
        "structured_outputs.json",
    ),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": "a", "regex": None, "x": 1}}, "structured_outputs.x"),
    ({"structured_outputs": {"grammar": "what"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": 'start: ("a"' + "b)"}}, "structured_outputs.grammar"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"truncate_prompt_tokens": -5}, "truncate_prompt_tokens"),
    ({"priority": 3}, "priority"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"a": True}}, "chat_template_kwargs.a"),
    ({"chat_template_kwargs": {"a": True, "b": 1}}, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": [FTP]}]}, f"{PART}.image_url.url"),
    ({"tools": [WEATHER], "tool_choice": NAMED_X}, "tool_choice"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, TOOL_CALLS),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"cache_salt": "a\0"}, "cache_salt"),
    ({"functions": [{"name": "a"}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    # What decides of an item's identity or place is never a client's.
    ({"mm_hashes": {"image": ["a"]}}, "mm_hashes"),
    ({"mm_features": []}, "mm_features"),
    ({"mm_placeholders": {}}, "mm_placeholders"),
    ({"multi_modal_data": {"image": []}}, "multi_modal_data"),
    ({"multi_modal_uuids": {"image": ["a"]}}, "multi_modal_uuids"),
    ({"prompt_token_ids": [1]}, "prompt_token_ids"),
    ({"media_io_kwargs": {"video": {"num_frames": 8}}}, "media_io_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_MISTAKES, ids=lambda value: str(value)[:60])
def test_chat_mistakes_name_their_field(server: Server, fields: dict, param: str) -> None:
    error = error_of(_post_raw(server, "/v1/chat/completions", fields))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert server.chat().status_code == 200, "the others are served on"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([["a"]], "`messages[0]`: input should be an object"),
        ([{"role": "user", "content": [["a"]]}], f"`{PART}`: input should be an object or a text"),
        ([{"role": "user", "content": [None]}], f"`{PART}`: input should be an object or a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "is missing; give a URL, such as"),
        ([{"role": "user", "content": [{"type": "file"}]}], "refusal, image_url, input_image"),
    ],
)
def test_messages_say_what_is_expected(server: Server, messages: Any, says: str) -> None:
    message = error_of(server.chat(messages=messages))["message"]
    assert says in message
    assert not re.search("instance of|NoneType|image_pil|video_url|image_embeds", message)


def _post_raw(server: Server, path: str, fields: dict[str, Any]) -> Any:
    body = {"messages": [{"role": "user", "content": "red"}], **fields}
    return server.http.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a"] * 40, "n": 2}, "n"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (
            {"prompt": "a", "truncate_prompt_tokens": 3, "echo": True},
            "truncate_prompt_tokens",
        ),
        ({"prompt": "a", "media_io_kwargs": {"video": {"fps": 1}}}, "media_io_kwargs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "best_of": 3, "n": 2}, "best_of"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": [10**6]}, None),
        ({"prompt": "red " * 300}, "prompt"),
        ({"prompt": f"a {IMAGE_START}"}, None),
        ({"prompt": f"a {IMAGE_SOFT}"}, None),
        ({"prompt": ["a", f"b {IMAGE_SOFT}"]}, None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_completion_mistakes(server: Server, fields: dict, param: str | None) -> None:
    error = error_of(server.http.post("/v1/completions", json=fields))
    assert error["param"] is not None
    if param is not None:
        assert error["param"] == param
    assert server.engine_client.num_requests == 0


def bad_images() -> Iterator[tuple[str, str, int]]:
    good = base64.b64decode(data_url().partition(",")[2])
    buffer = io.BytesIO()
    Image.new("1", (8000, 8000)).save(buffer, "PNG")
    yield "truncated", base64.b64encode(good[:60]).decode(), 422
    yield "empty", "", 422
    yield "text", base64.b64encode(b"this is no image at all").decode(), 422
    yield "not base64", "####", 422
    yield "64 megapixels in few bytes", base64.b64encode(buffer.getvalue()).decode(), 400
    yield "another format", base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n").decode(), 422


@pytest.mark.parametrize(
    ("payload", "status"), [pytest.param(*case, id=name) for name, *case in bad_images()]
)
def test_bad_images(server: Server, payload: str, status: int) -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{payload}"}}
    error = error_of(server.chat(messages=[{"role": "user", "content": [part]}]), status)
    assert error["param"] == "messages[0].content[0].image_url.url"


def test_unknown_models(server: Server) -> None:
    error = error_of(server.chat(model="gpt"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    error_of(server.http.get("/v1/models/gpt"), 404)


@pytest.mark.parametrize("path", ["/v1", "/v1/chat", "/v2", "/v1/chat/completions/"])
def test_unknown_addresses(server: Server, path: str) -> None:
    error_of(server.http.post(path, json={}, follow_redirects=False), 404)


def test_wrong_methods(server: Server) -> None:
    response = server.http.get("/v1/chat/completions")
    message = "this address does not take this method; it takes POST"
    assert error_of(response, 405)["message"] == message
    assert "POST" in response.headers["allow"]
    error_of(server.http.post("/health"), 405)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b"\xff\xfe",
        b'{"messages": [], "messages"',
        b"[" * 100_000,
        b'{"temperature": NaN, "messages": [{"role": "user", "content": "a"}]}',
        b'{"n": ' + b"9" * 5000 + b', "messages": [{"role": "user", "content": "a"}]}',
    ],
    ids=lambda value: repr(value[:20]),
)
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_bodies_that_are_no_request(server: Server, content: bytes, kind: str) -> None:
    headers = {"content-type": kind}
    error_of(server.http.post("/v1/chat/completions", content=content, headers=headers))


def test_large_bodies(make_server: MakeServer) -> None:
    server = make_server(max_request_bytes=1000)
    error = error_of(server.chat(messages=[{"role": "user", "content": "a" * 2000}]), 413)
    assert re.search(r"the body has 2\d{3} bytes, at most 1000 are", error["message"])
    # Without a length: the count says when it is enough.
    chunks = (b"a" * 100 for _ in range(1000))
    headers = {"content-type": "application/json"}
    error = error_of(server.http.post("/v1/chat/completions", content=chunks, headers=headers), 413)
    assert re.search(r"the body has \d+ or more bytes, at most 1000 are", error["message"])
    assert server.chat().status_code == 200


def test_what_the_engine_refuses(server: Server) -> None:
    refused = {"prompt": [5, REFUSED_TOKEN]}
    error = error_of(server.http.post("/v1/completions", json=refused))
    assert error["param"] == "prompt"
    # A stream has sent nothing before its first token: the status is still free.
    response = server.http.post("/v1/completions", json={**refused, "stream": True})
    assert error_of(response)["param"] == "prompt"


def test_faults_of_ours_tell_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("secret at 0x7fffdeadbeef in /tmp/secret")

    monkeypatch.setattr(server.engine_client.input_processor, "prepare", fail)
    for fields in ({}, {"stream": True}):
        caplog.clear()
        response = server.chat(**fields)
        error = error_of(response, 500)
        assert error["code"] == "internal_error"
        assert "secret" not in error["message"]
        # The log has it whole, once, under the id that the client was told.
        assert response.headers["x-request-id"] in error["message"]
        (record,) = [item for item in caplog.records if item.exc_info]
        assert record.name == "mmjax.server.middleware"
        assert "ZeroDivisionError: secret" in caplog.text


def test_overload(make_server: MakeServer) -> None:
    server = make_server(scheduler=SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=1))
    server.engine_client.capacity.enter(1)
    for fields in ({}, {"stream": True}):
        response = server.chat(n=2, **fields)
        error = error_of(response, 429)
        assert error["code"] == "rate_limit_exceeded"
        assert int(response.headers["retry-after"]) >= 1
    server.engine_client.capacity.leave(1)
    assert server.chat(n=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_no_idle_server_could_take_is_400(make_server: MakeServer, stream: bool) -> None:
    server = make_server(scheduler=SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=2))
    error = error_of(server.chat(n=4, stream=stream), 400)
    assert error["param"] == "n"
    assert "takes 3 sequences" in error["message"]
    for body, param in (({"prompt": ["a"] * 2, "n": 2}, "prompt"), ({"prompt": "a", "n": 4}, "n")):
        response = server.http.post("/v1/completions", json={**body, "stream": stream})
        assert error_of(response, 400)["param"] == param
    assert server.chat(n=3).status_code == 200


def test_trust_flags_open_what_they_name(make_server: MakeServer) -> None:
    server = make_server(trusts_mm_kwargs=True, trust_request_chat_template=True)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    body = server.chat(chat_template=template).json()
    assert body["choices"][0]["message"]["content"] == "a red circle"
    message = image_message()
    answer = server.chat(messages=[message], mm_processor_kwargs={"do_pan_and_scan": False})
    assert answer.status_code == 200, answer.text


def test_an_assistants_answer_may_be_sent_back(server: Server) -> None:
    client = server.openai()
    first = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=4
    )
    history: Any = [
        {"role": "user", "content": "a"},
        first.choices[0].message.model_dump(),
        {"role": "user", "content": "b"},
    ]
    again = client.chat.completions.create(model="tiny", messages=history)
    assert again.choices[0].finish_reason == "stop"


def test_neutral_values_are_taken(server: Server) -> None:
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "me",
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "logprobs": False,
        "top_logprobs": 0,
        "store": False,
        "service_tier": "auto",
        "stream_options": None,
        "stop": None,
        "top_k": -1,
        "min_p": 0,
        "request_id": "mine",
    }
    assert server.chat(**neutral).status_code == 200
