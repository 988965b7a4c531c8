"""What goes well: chat, completions, streams, models, states, through the official client."""

import asyncio
import base64
import io
import json
from typing import Any, get_args

import msgspec
import pytest
from starlette.responses import Response

from mmjax.errors import CapacityError
from mmjax.frontend.engine_client.supervisor import EngineState
from mmjax.frontend.output.output_processor import OutputProcessor
from mmjax.models.family import FamilyProcessor
from mmjax.server import middleware
from mmjax.server.openai.streaming import KEEP_ALIVE, EventStream
from mmjax.transport.messages import Ready
from tests.kit import draw
from tests.server.conftest import BODIES, MakeServer, Server, events_of, http_scope

PROMPT = "user\na red circle\nmodel\n"
"""What the echo says to "a red circle": the template's text without its control tokens."""


def data_url(seed: int = 0) -> str:
    buffer = io.BytesIO()
    draw(24, 16, seed).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def image_message(seed: int = 0, text: str = "What color?") -> dict[str, Any]:
    return {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": data_url(seed)}},
            {"type": "text", "text": text},
        ],
    }


def test_what_stands_around_a_chats_answer(server: Server) -> None:
    answer = server.chat().json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 0


def test_chat_stream_contract(server: Server) -> None:
    response = server.chat(stream=True, stream_options={"include_usage": True})
    first, *middle, last = events_of(response)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(event["choices"][0]["delta"]) <= {"content"} for event in middle)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in middle) == PROMPT
    reasons = [event["choices"][0]["finish_reason"] for event in middle]
    assert reasons == [None] * (len(middle) - 1) + ["stop"]
    assert all("usage" not in event for event in [first, *middle])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(middle)
    assert len({event["id"] for event in [first, *middle, last]}) == 1
    assert {event["object"] for event in middle} == {"chat.completion.chunk"}
    assert response.headers["cache-control"] == "no-cache"
    assert response.text.endswith("\n\ndata: [DONE]\n\n")


def test_chat_stream_without_usage(server: Server) -> None:
    plain = events_of(server.chat(stream=True))
    assert all("usage" not in event and event["choices"] for event in plain)


def test_n_stop_and_length(server: Server) -> None:
    body = server.chat(n=2, stop=["circle"], seed=3).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for choice in body["choices"]:
        assert choice["message"]["content"] == "user\na red "
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "circle")
    cut = server.chat(max_completion_tokens=2, max_tokens=5).json()
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 2


def test_chat_logprobs(server: Server) -> None:
    body = server.chat(logprobs=True, top_logprobs=2, max_tokens=3).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert content[2]["token"] == "u"
    assert content[2]["bytes"] == list(b"u")
    assert len(content[2]["top_logprobs"]) == 2
    assert server.chat().json()["choices"][0]["logprobs"] is None
    streamed = events_of(server.chat(logprobs=True, stream=True, max_tokens=3))
    assert streamed[1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_token_ids_on_demand(server: Server) -> None:
    body = server.chat(return_token_ids=True).json()
    assert body["choices"][0]["token_ids"][:-1] == body["prompt_token_ids"]
    assert "token_ids" not in server.chat().json()["choices"][0]


def test_completions_of_ids_and_logprobs(server: Server) -> None:
    tokenizer = server.engine_client.input_processor.tokenizer
    ids = tokenizer.encode("a red circle")
    for prompt in (ids, [ids]):
        answer = server.openai().completions.create(model="tiny", prompt=prompt, logprobs=1)
        choice = answer.choices[0]
        assert choice.text == "a red circle"
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert choice.logprobs.text_offset is not None
        assert choice.logprobs.text_offset[2] == len("a ")
        assert len(choice.logprobs.tokens) == len(ids) + 1
    stream = server.openai().completions.create(model="tiny", prompt=ids, logprobs=0, stream=True)
    offsets = [chunk.choices[0].logprobs for chunk in stream]
    assert all(item is not None for item in offsets)


def test_a_model_says_what_it_takes(server: Server) -> None:
    raw = server.http.get("/v1/models").json()["data"][0]
    assert raw["max_model_len"] == 256
    assert raw["capabilities"]["input_modalities"] == ["text", "image"]
    assert raw["capabilities"]["chat_template_content_format"] == "openai"


def test_states(make_server: MakeServer) -> None:
    server = make_server()
    for path in ("/health", "/ready", "/ping"):
        assert server.http.get(path).status_code == 200
    assert set(server.http.get("/version").json()) == {"version"}
    server.supervisor.health = False
    for state in get_args(EngineState):
        server.supervisor.state = state
        server.supervisor.retry_after_s = 17.0 if state == "paused" else None
        # This process lives, whatever becomes of the other: a probe must not end it.
        assert server.http.get("/health").json() == {"status": state}
        response = server.http.get("/ready")
        assert response.status_code == 503
        assert server.http.get("/ping").status_code == server.http.post("/ping").status_code == 503
        assert response.json()["status"] == state
        assert response.json()["reason"]
        assert response.headers["retry-after"] == ("17" if state == "paused" else "1")


@pytest.mark.parametrize(("state", "retry_after_s"), [("paused", 17.0), ("dead", None)])
def test_requests_without_an_engine_are_503(
    server: Server, state: EngineState, retry_after_s: float | None
) -> None:
    server.supervisor.state, server.supervisor.retry_after_s = state, retry_after_s
    response = server.chat()
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) == (retry_after_s or 5)
    assert response.json()["error"]["code"] == "engine_unavailable"


def test_states_tell_how_many_programs_are_left(server: Server) -> None:
    supervisor = server.supervisor
    assert server.http.get("/health").json() == {"status": "ready"}
    supervisor.ready = Ready(num_kv_blocks=1, num_programs=29, num_programs_left=24)
    assert server.http.get("/ready").json()["num_programs_left"] == 24
    supervisor.heartbeat = msgspec.structs.replace(supervisor.engine.stats(), num_programs_left=3)
    for path in ("/health", "/ready"):
        response = server.http.get(path)
        assert (response.status_code, response.json()["num_programs_left"]) == (200, 3)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_nothing_of_a_stream_is_sent_before_its_first_token(
    make_server: MakeServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    process = OutputProcessor.process

    def note_tokens(self: OutputProcessor, delta: Any, outputs: Any) -> None:
        order.append("token")
        process(self, delta, outputs)

    async def send_and_note(self: Any, scope: Any, receive: Any, send: Any) -> None:
        async def note(message: Any) -> None:
            order.append(message["type"])
            await send(message)

        await respond(self, scope, receive, note)

    respond = EventStream.__call__
    monkeypatch.setattr(OutputProcessor, "process", note_tokens)
    monkeypatch.setattr(EventStream, "__call__", send_and_note)
    server = make_server(sse_keep_alive_interval_s=0.01)
    server.supervisor.delay_s = 0.05
    response = server.http.post(path, json={**BODIES[path], "stream": True, "max_tokens": 3})
    assert events_of(response)
    assert order[:3] == ["token", "http.response.start", "http.response.body"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_the_engine_refuses_of_a_stream_is_a_status(server: Server, path: str) -> None:
    def refuse(request: Any) -> None:
        raise CapacityError("full", param="prompt", retry_after_s=7.0)

    server.supervisor.engine.add_request = refuse
    body = BODIES[path] | ({"n": 2} if "chat" in path else {})
    response = server.http.post(path, json={**body, "stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    error = response.json()["error"]
    param = "messages" if "chat" in path else "prompt"
    assert (error["code"], error["param"]) == ("rate_limit_exceeded", param)
    assert server.engine_client.num_requests == 0


def test_streams_are_kept_alive(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's second token waits for the comment, however slow this machine is."""
    sent: list[bytes] = []
    answered: list[Any] = []
    respond, server = EventStream.__call__, make_server(sse_keep_alive_interval_s=0.02)
    step, server.supervisor.delay_s = server.supervisor.engine.step, 0.005

    async def send_and_note(self: Any, scope: Any, receive: Any, send: Any) -> None:
        async def note(message: Any) -> None:
            await send(message)
            sent.append(message.get("body", b""))

        await respond(self, scope, receive, note)

    def wait_for_the_comment() -> list[Any]:
        if answered and KEEP_ALIVE not in sent:
            return []
        outputs = step()
        answered.extend(outputs)
        return outputs

    monkeypatch.setattr(EventStream, "__call__", send_and_note)
    monkeypatch.setattr(server.supervisor.engine, "step", wait_for_the_comment)
    response = server.chat(stream=True, max_tokens=2)
    assert ": keep-alive" in response.text
    assert events_of(response)[-1]["choices"][0]["finish_reason"] == "length"


# ---- clients that leave --------------------------------------------------------------------


async def post_and_leave(server: Server, path: str, body: dict[str, Any]) -> None:
    """Call the application as a server would, and disconnect after a moment."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        while not server.supervisor.engine.running:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    await server.app(http_scope(path), receive, ignore)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delay_s", [0.01, 1000.0], ids=["amid the answer", "before it"])
def test_leaving_aborts(make_server: MakeServer, path: str, stream: bool, delay_s: float) -> None:
    server = make_server()
    server.supervisor.delay_s = delay_s
    body: dict[str, Any] = {"stream": stream, "ignore_eos": True, "max_tokens": 200, "n": 2}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "red"}]
    else:
        body["prompt"] = ["red", "star"]
    engine = server.supervisor.engine
    portal = server.http.portal
    assert portal is not None
    portal.call(post_and_leave, server, path, body)
    portal.call(asyncio.sleep, 0.05)
    assert len(engine.aborted) == (2 if "chat" in path else 4)
    assert not engine.running
    assert server.engine_client.num_requests == 0
    if delay_s < 1:
        assert server.chat().status_code == 200


# ---- parsed answers ------------------------------------------------------------------------------


def test_what_a_processor_makes_of_an_answer_is_sent(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FamilyProcessor,
        "_get_answer_parser",
        lambda *_: lambda token_ids: {"<OD>": {"labels": [str(len(token_ids))]}},
    )
    chat = server.chat(n=2).json()
    counts = {str(chat["usage"]["completion_tokens"] // 2)}
    parsed = [choice["message"]["parsed"] for choice in chat["choices"]]
    assert parsed == [{"<OD>": {"labels": [*counts]}}] * 2
    *events, last = events_of(server.chat(stream=True))
    assert last["choices"][0]["delta"]["parsed"] == parsed[0]
    assert all("parsed" not in event["choices"][0]["delta"] for event in events)
    text = server.openai().completions.create(model="tiny", prompt="a red circle")
    assert text.choices[0].to_dict()["parsed"]


def test_a_text_alone_is_not_parsed(server: Server) -> None:
    assert "parsed" not in server.chat().json()["choices"][0]["message"]
    assert all(
        "parsed" not in event["choices"][0]["delta"]
        for event in events_of(server.chat(stream=True))
    )


@pytest.mark.parametrize("root_path", ["", "/behind/a/proxy"])
def test_probes_have_no_access_line_behind_a_prefix_either(
    root_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(middleware.access_logger, "info", lambda *args: lines.append(args[3]))
    counted: list[int] = []
    app = middleware.log_access(Response(), count=counted.append, quiet_paths={"/ready"})

    async def get(path: str) -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "http_version": "1.1",
            "query_string": b"",
            "root_path": root_path,
            "path": root_path + path,
        }
        await app(scope, never, ignore)

    asyncio.run(get("/ready"))
    asyncio.run(get("/version"))
    assert lines == [f"{root_path}/version"]
    assert counted == [200, 200]


async def never() -> Any:
    raise AssertionError("nothing is read")


async def ignore(message: Any) -> None:
    pass
