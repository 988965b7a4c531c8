"""A front: where a replica dies, is busy or does not know, another one answers."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.types import Message

from mmjax.config.engine_config import SchedulerConfig
from mmjax.deploy.exchange import MAX_LOST
from mmjax.deploy.router import Room
from mmjax.errors import CapacityError
from tests.deploy.conftest import Deployment, MakeDeployment
from tests.server.conftest import TOOLS_TEMPLATE
from tests.server.test_quarantine import crash_after

PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA"
    "WjR9awAAAABJRU5ErkJggg=="
)


def events(response: Any) -> list[str]:
    """Return a stream's events, without what differs between requests."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [line for line in response.text.split("\n\n") if line and not line.startswith(":")]


def comparable(lines: list[str]) -> list[Any]:
    """Return events without the ids and times of their request."""
    found = []
    for line in lines:
        data = line.rpartition("data: ")[2]
        if data == "[DONE]":
            found.append(data)
            continue
        event = json.loads(data)
        for hidden in (event, event.get("response", {}), event.get("item", {})):
            for name in ("id", "created", "created_at", "completed_at", "item_id", "metrics"):
                hidden.pop(name, None)
        if isinstance(event.get("response"), dict):
            for item in event["response"].get("output", ()):
                item.pop("id", None)
        found.append(event)
    return found


STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0},
    ),
    "sampled": ("/v1/chat/completions", {"stream": True, "temperature": 1, "logprobs": True}),
    "two": ("/v1/chat/completions", {"stream": True, "n": 2, "temperature": 0}),
    "completions": (
        "/v1/completions",
        {"stream": True, "prompt": ["a red circle", "a blue one"], "logprobs": 1, "echo": False},
    ),
    "echo": (
        "/v1/completions",
        {"stream": True, "prompt": "a red circle", "n": 2, "logprobs": 1, "echo": True},
    ),
    "response": ("/v1/responses", {"stream": True, "input": "a red circle"}),
    "response with logprobs": (
        "/v1/responses",
        {
            "stream": True,
            "input": "a red circle",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        },
    ),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_goes_on_wherever_it_is_cut(make_deployment: MakeDeployment, kind: str) -> None:
    """Cut before every item of the stream in turn: its events are those of an unbroken one."""
    path, fields = STREAMS[kind]
    deployment = make_deployment()
    whole = events(deployment.post(path, **fields))
    deployment.tried()
    for num_items in range(len(whole) + 2):
        deployment.replicas.cuts = [num_items]
        lines = events(deployment.post(path, **fields))
        # Answers to several choices at once may come in another order.
        key = json.dumps if kind in ("two", "completions", "echo") else None
        expected, got = comparable(whole), comparable(lines)
        assert (sorted(got, key=key) if key else got) == (
            sorted(expected, key=key) if key else expected
        )
        has_shown_done = not kind.startswith("response") and num_items > len(whole)
        assert len(deployment.tried()) == (1 if has_shown_done else 2)


CALLS = (
    'let me see <tool_call>{"name": "find", "arguments": {"what": "red"}}</tool_call>'
    '<tool_call>{"name": "find", "arguments": {"what": "a circle"}}</tool_call>'
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_calls_go_on_wherever_they_are_cut(make_deployment: MakeDeployment, path: str) -> None:
    """Also in the middle of a call, whose text no event shows as it came."""
    deployment = make_deployment(
        chat_template=TOOLS_TEMPLATE, enable_auto_tool_choice=True, tool_call_parser="hermes"
    )
    deployment.will_say(CALLS)
    find = {"name": "find", "parameters": {"type": "object", "properties": {}}}
    is_chat = path.endswith("completions")
    fields = {
        "tools": [
            {"type": "function", "function": find} if is_chat else find | {"type": "function"}
        ],
        "stream": True,
        "temperature": 0,
        **({} if is_chat else {"input": "a red circle"}),
    }
    whole = called(events(deployment.post(path, **fields)))
    assert [name for name, _ in whole[1]] == ["find", "find"]
    for num_items in range(1, 40, 3):
        deployment.replicas.cuts = [num_items]
        assert called(events(deployment.post(path, **fields))) == whole


def called(lines: list[str]) -> tuple[str, list[list[str]]]:
    """Return a stream's text and calls, each by its name and arguments."""
    text, calls, ids = "", dict[Any, list[str]](), set[str]()
    for line in lines:
        data = line.rpartition("data: ")[2]
        event = {} if data == "[DONE]" else json.loads(data)
        for choice in event.get("choices", ()):
            text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                ids |= {call["id"]} if "id" in call else set()
                found = calls.setdefault(call["index"], ["", ""])
                found[0] += call["function"].get("name") or ""
                found[1] += call["function"]["arguments"]
        item = event.get("item", {})
        match event.get("type"):
            case "response.output_text.delta":
                text += event["delta"]
            case "response.function_call_arguments.delta":
                calls[event["output_index"]][1] += event["delta"]
            case "response.output_item.added" if item["type"] == "function_call":
                ids.add(item["call_id"])
                calls[event["output_index"]] = [item["name"], ""]
            case "response.output_item.done" if item["type"] == "function_call":
                assert item["call_id"] in ids, "the same item"
                assert item["arguments"] == calls[event["output_index"]][1]
    assert len(ids) == len(calls)
    return text, list(calls.values())


def test_the_second_replica_goes_on_from_the_very_tokens(deployment: Deployment) -> None:
    """It samples none of them again, and a request that waits has none."""
    fields: dict[str, Any] = {"stream": True, "return_token_ids": True, "temperature": 1}
    for num_items in (0, 2, 5):
        deployment.replicas.cuts = [num_items]
        lines = events(deployment.post(**fields))
        shown = [
            token_id
            for line in lines[: max(0, num_items - 1)]
            for token_id in json.loads(line[6:])["choices"][0].get("token_ids") or ()
        ]
        second = deployment.engines[int(deployment.tried()[-1])].engine.added[-1]
        assert second.output_token_ids == shown
        assert bool(shown) == (num_items > 2)


def test_all_chunks_of_a_broken_stream_have_one_id_and_time(deployment: Deployment) -> None:
    deployment.replicas.cuts = [3]
    chunks = [json.loads(one[6:]) for one in events(deployment.post(stream=True))[:-1]]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert len(deployment.tried()) == 2


def test_a_stream_survives_two_deaths(deployment: Deployment) -> None:
    whole = comparable(events(deployment.post(stream=True, max_tokens=12)))
    deployment.replicas.cuts = [3, 4]
    assert comparable(events(deployment.post(stream=True, max_tokens=12))) == whole


@pytest.mark.parametrize("num_items", [0, 1, 2])
def test_a_whole_answer_is_asked_for_again(deployment: Deployment, num_items: int) -> None:
    expected = deployment.post().json()["choices"]
    deployment.tried()
    deployment.replicas.cuts = [num_items]
    answer = deployment.post()
    assert answer.status_code == 200
    assert answer.json()["choices"] == expected
    assert len(deployment.tried()) == 2


def test_both_tries_sample_with_one_seed(deployment: Deployment) -> None:
    deployment.replicas.cuts = [1]
    deployment.post(temperature=1)
    seeds = [one.sampling_params.seed for each in deployment.engines for one in each.engine.added]
    assert len(seeds) == 2
    assert seeds[0] == seeds[1] is not None
    deployment.post(temperature=1)
    later = [one.sampling_params.seed for each in deployment.engines for one in each.engine.added]
    assert len(set(later)) == 2, "another request has another one"


def test_a_request_that_ends_every_replica_is_failed(deployment: Deployment) -> None:
    deployment.replicas.cuts = [0] * 9
    refused = deployment.post()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_unavailable"
    assert int(refused.headers["retry-after"]) > 0
    assert len(deployment.tried()) == MAX_LOST
    deployment.replicas.cuts = [2] * 9
    lines = events(deployment.post(stream=True))
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["error"]["code"] == "engine_unavailable"


def test_an_engine_that_is_lost_within_a_stream_is_replaced(
    make_deployment: MakeDeployment,
) -> None:
    """The replica's own P0 lives: it says so, instead of telling the client of an error."""
    deployment = make_deployment(has_deaths=True)
    whole = comparable(events(deployment.post(stream=True)))
    for engine in deployment.engines:
        engine.delay_s = 0.01
    assert deployment.http.portal is not None
    name = deployment.tried()[0]
    engine = deployment.engines[int(name)]

    async def die_soon() -> None:
        async def die() -> None:
            while not any(one.num_sent > 2 for one in engine.engine.running.values()):
                await asyncio.sleep(0.001)
            engine.die(restarts=False)

        engine_tasks.append(asyncio.create_task(die()))

    engine_tasks: list[Any] = []
    deployment.http.portal.call(die_soon)
    assert comparable(events(deployment.post(stream=True))) == whole
    tried = deployment.tried()
    assert tried[0] == name != tried[1]


def test_one_that_is_full_is_passed_over(make_deployment: MakeDeployment) -> None:
    deployment = make_deployment(scheduler=SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=1))
    # More answers at once than a replica takes: each is asked, and the last one's refusal is given.
    refused = deployment.post("/v1/completions", prompt=["a", "b", "c"])
    assert refused.status_code in (400, 429)
    assert len(deployment.tried()) == (2 if refused.status_code == 429 else 1)


def test_a_dead_engines_replica_is_passed_over(make_deployment: MakeDeployment) -> None:
    deployment = make_deployment(has_deaths=True)
    deployment.post(user="u")
    (name,) = deployment.tried()
    assert deployment.http.portal is not None
    deployment.http.portal.call(lambda: _die(deployment, name))
    assert deployment.post(user="u").status_code == 200
    assert deployment.tried() == [name, str(1 - int(name))]
    # The key has moved to who answered.
    assert deployment.post(user="u").status_code == 200


async def _die(deployment: Deployment, name: str) -> None:
    deployment.engines[int(name)].die(restarts=False)


def test_a_response_is_found_wherever_it_is_kept(deployment: Deployment) -> None:
    made = deployment.post("/v1/responses", input="a red circle").json()
    (name,) = deployment.tried()
    kept = f"/v1/responses/{made['id']}"
    assert deployment.http.get(kept).json()["id"] == made["id"]
    followed = deployment.post("/v1/responses", input="and?", previous_response_id=made["id"])
    assert followed.status_code == 200, followed.text
    assert deployment.tried()[-1] == name
    missing = deployment.http.get("/v1/responses/resp_none")
    assert missing.status_code == 404
    assert sorted(set(deployment.tried())) == ["0", "1"]


def test_pictures_go_where_they_are_known(deployment: Deployment) -> None:
    def ask(text: str) -> str:
        part = {"type": "image_url", "image_url": {"url": PICTURE}}
        content = [part, {"type": "text", "text": text}]
        deployment.post(messages=[{"role": "user", "content": content}])
        return deployment.tried()[-1]

    assert len({ask(text) for text in "abcdef"}) == 1


def test_a_front_refuses_what_a_replica_would(make_deployment: MakeDeployment) -> None:
    deployment = make_deployment(api_keys=("secret",), max_request_bytes=1000)
    without = deployment.post()
    assert (without.status_code, without.json()["error"]["code"]) == (401, "invalid_api_key")
    deployment.http.headers["authorization"] = "Bearer secret"
    assert deployment.post(messages="x" * 2000).status_code == 413
    assert deployment.tried() == [], "nothing of it reached a replica"
    assert deployment.post().status_code == 200
    assert deployment.http.get("/health").json() == {"status": "ready"}
    assert deployment.http.get("/ready").status_code == 200


def test_more_requests_than_it_holds_are_refused(make_deployment: MakeDeployment) -> None:
    deployment = make_deployment(max_requests=0)
    refused = deployment.post()
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert int(refused.headers["retry-after"]) > 0


async def body_of(*chunks: bytes) -> AsyncGenerator[Message, None]:
    for chunk in chunks:
        yield {"type": "http.request", "body": chunk, "more_body": True}


async def test_bodies_count_from_their_first_byte() -> None:
    """Else slow ones would be here in any number, and of any size together."""
    room = Room(max_requests=2, max_bytes=10)
    with room.taken(aiter(body_of(b"12345", b"6789")).__anext__) as first:
        await first()
        with room.taken(aiter(body_of(b"12345", b"6")).__anext__) as second:
            await second()
            with pytest.raises(CapacityError), room.taken(second):
                pass
            for receive in (first, second):
                with pytest.raises(CapacityError):
                    await receive()
    with room.taken(aiter(body_of(b"1234567890")).__anext__) as third:
        await third()


def test_a_body_of_the_largest_size_always_has_room(make_deployment: MakeDeployment) -> None:
    deployment = make_deployment(max_body_bytes=1)
    assert deployment.post().status_code == 200


def test_errors_come_through_as_they_are(deployment: Deployment) -> None:
    wrong = deployment.post(temperature="hot")
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "temperature"
    assert deployment.http.get("/nowhere").status_code == 404
    assert deployment.http.put("/v1/models").status_code == 405


def test_a_request_has_one_id_on_its_way(deployment: Deployment) -> None:
    response = deployment.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "hi"}]},
        headers={"x-request-id": "mine"},
    )
    assert response.headers.get_list("x-request-id") == ["mine"]
    (_, forwarded) = deployment.replicas.tries[-1]
    assert [value for name, value in forwarded.headers if name == b"x-request-id"] == [b"mine"]


def test_nothing_over_http_makes_a_request_a_continuation(deployment: Deployment) -> None:
    """Only a front in the replicas' own cluster can: fields of its names are unknown."""
    answers = [
        deployment.post("/v1/chat/completions", **{name: {"key": "k", "attempt": 1}})
        for name in ("continuation", "generated_token_ids", "sent", "key")
    ]
    assert [answer.status_code for answer in answers] == [400] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_ends_an_engine_is_given_to_no_other(
    make_deployment: MakeDeployment, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    deployment = make_deployment(has_deaths=True)
    crash_after(int(stream), deployment.engines, monkeypatch)
    response = deployment.post(stream=stream)
    error = json.loads(events(response)[-2][6:]) if stream else response.json()
    assert error["error"]["code"] == "request_quarantined"
    assert stream or response.status_code == 500
    assert len(deployment.tried()) == 1
