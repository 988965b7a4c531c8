"""One request and several replicas, which say what a script has: no engine, no HTTP."""

import asyncio
import copy
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.deploy.exchange import Exchange, Patience
from mmjax.deploy.replica import (
    ForwardedRequest,
    NotHeld,
    ReplicaLostError,
    ResponseEnd,
    ResponseHead,
    ResponseItem,
    ResponsePart,
)
from mmjax.errors import (
    AnswerNotHeldError,
    CapacityError,
    EngineUnavailableError,
    RequestError,
    RequestTimeoutError,
)
from mmjax.server.openai.continuation import EventMark
from mmjax.server.openai.streaming import DONE, KEEP_ALIVE

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"content-length", b"9")]
JSON = [(b"content-type", b"application/json"), (b"retry-after", b"3")]
PATIENT = Patience(first_pause_s=0.01, longest_pause_s=0.02)
EAGER = PATIENT._replace(refused_s=0.2, lost_s=0.4, question_s=0.2)

Step = ResponseItem | Exception | float
"""What a replica says; a number: for how long it says nothing."""


def refusal(status: int, replica: str = "a") -> list[Step]:
    body = json.dumps(
        {"error": {"message": f"no: {status}", "type": "t", "param": None, "code": "c"}}
    )
    return [
        ResponseHead(replica, status, JSON),
        ResponsePart(body.encode(), None),
        ResponseEnd(True),
    ]


def tokens(first: int, last: int) -> list[Step]:
    """The events of some tokens."""
    return [
        ResponsePart(f"data: {i}\n\n".encode(), EventMark((0, 0), i, 1, [i], [], 0))
        for i in range(first, last)
    ]


def stream(first: int = 1, last: int = 4, *, replica: str = "a") -> list[Step]:
    """A stream's events, whole."""
    parts = tokens(first, last)
    return [ResponseHead(replica, 200, STREAM), *parts, ResponsePart(DONE, None), ResponseEnd(True)]


def cut(steps: list[Step], number: int, how: Exception | None = None) -> list[Step]:
    """The first steps, and then a death."""
    return [*steps[:number], how or ReplicaLostError()]


@dataclass
class Scripted:
    """Replicas that say what the next script has; the last one is said again and again."""

    scripts: list[list[Step]]
    requests: list[ForwardedRequest] = field(default_factory=list)
    avoided: list[list[str]] = field(default_factory=list)
    keys: list[list[str]] = field(default_factory=list)

    async def respond(
        self, request: ForwardedRequest, *, keys: list[str], avoided: list[str]
    ) -> AsyncGenerator[ResponseItem, None]:
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        # A copy, as over a network: the front goes on to change it.
        self.requests.append(copy.deepcopy(request))
        self.avoided.append(avoided)
        self.keys.append(keys)
        for step in script:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, int | float):
                await asyncio.sleep(step)
            else:
                yield step


@dataclass
class Client:
    """What came to the client."""

    messages: list[Any] = field(default_factory=list)

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(one["body"] for one in self.messages[1:])

    @property
    def is_whole(self) -> bool:
        """Whether it is one response, which has ended."""
        kinds = [one["type"] for one in self.messages]
        starts = ["http.response.start"] + ["http.response.body"] * (len(kinds) - 1)
        more = [one["more_body"] for one in self.messages[1:]]
        return kinds == starts and more == [True] * (len(more) - 1) + [False]


def ask(
    *scripts: list[Step],
    path: str = "/v1/chat/completions",
    body: bytes = b"{}",
    timeout_s: float = 0.0,
    keep_alive_s: float = 0.0,
    patience: Patience = PATIENT,
    held_key: str | None = None,
    last_event: int = 0,
    keys: Sequence[str] = (),
) -> tuple[Client, Scripted]:
    """Send a request to replicas that say `scripts`, one after the other."""
    client, replicas = Client(), Scripted(list(scripts))
    request = ForwardedRequest("POST" if body else "GET", path, b"", [], body, "key", 0)

    async def run() -> None:
        await Exchange(
            replicas,
            request._replace(held_key=held_key),
            list(keys),
            client.send,
            last_event=last_event,
            timeout_s=timeout_s,
            keep_alive_s=keep_alive_s,
            patience=patience,
        ).run()

    asyncio.run(run())
    return client, replicas


def errors_of(client: Client) -> list[Any]:
    """Return the error events of a stream."""
    lines = [line for line in client.body.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


# ---- refusals -----------------------------------------------------------------------------------


def test_a_request_waits_while_all_engines_restart() -> None:
    client, replicas = ask(
        refusal(503, "a"), refusal(503, "b"), refusal(503, "a"), refusal(503, "b"), stream()
    )
    assert client.status == 200
    assert client.is_whole
    # Each is asked once, and then again after a pause.
    assert replicas.avoided == [[], ["a"], ["a", "b"], [], ["b"]]


def test_it_waits_no_longer_than_it_has_patience() -> None:
    start = time.monotonic()
    client, _ = ask(refusal(503, "a"), patience=EAGER)
    assert client.status == 503
    assert (b"retry-after", b"3") in client.messages[0]["headers"]
    assert json.loads(client.body)["error"]["message"] == "no: 503"
    assert client.is_whole
    assert time.monotonic() - start >= EAGER.refused_s


def test_a_question_without_a_body_does_not_wait() -> None:
    client, replicas = ask(refusal(503, "a"), refusal(503, "b"), refusal(503, "a"), body=b"")
    assert client.status == 503
    assert len(replicas.requests) == 3


def test_a_new_request_is_refused_where_all_are_full() -> None:
    client, replicas = ask(refusal(429, "a"), refusal(429, "b"), refusal(429, "a"), stream())
    assert client.status == 429
    assert len(replicas.requests) == 3


@pytest.mark.parametrize(
    "refused",
    [refusal(429, "b"), [CapacityError("full")], [EngineUnavailableError("none is there")]],
    ids=["replica", "router", "no replica"],
)
@pytest.mark.parametrize("shown", [0, 1, 3])
def test_one_that_a_replica_has_had_waits_for_room(refused: list[Step], shown: int) -> None:
    script = [cut(stream(), shown), refused, refused, refused, stream(max(1, shown))]
    client, replicas = ask(*script)
    assert client.status == 200
    assert client.is_whole
    assert client.body == b"data: 1\n\ndata: 2\n\ndata: 3\n\n" + DONE
    assert len(replicas.requests) == 5


def test_the_time_to_wait_counts_from_the_loss() -> None:
    """Not from the request's beginning, however long its stream was already."""
    patience = PATIENT._replace(lost_s=2.0)
    long: list[Step] = [*stream()[:2], patience.lost_s + 0.1, ReplicaLostError()]
    client, _ = ask(long, refusal(503, "b"), refusal(503, "b"), stream(2), patience=patience)
    assert client.body.endswith(DONE)
    assert not errors_of(client)


@pytest.mark.parametrize("status", [429, 503])
def test_a_stream_that_no_replica_takes_ends_with_its_refusal(status: int) -> None:
    client, _ = ask(cut(stream(), 2), refusal(status, "b"), patience=EAGER)
    assert client.is_whole
    assert client.body.endswith(DONE)
    (error,) = errors_of(client)
    assert error["error"]["message"] == f"no: {status}"


def test_a_stream_that_the_next_replica_finds_wrong_ends_with_its_error() -> None:
    """Such as one with a picture by its id, which only the dead replica had."""
    client, replicas = ask(cut(stream(), 2), refusal(400, "b"))
    (error,) = errors_of(client)
    assert error == {"error": {"message": "no: 400", "type": "t", "param": None, "code": "c"}}
    assert client.body.endswith(DONE)
    assert client.is_whole
    assert len(replicas.requests) == 2


def test_a_response_ends_with_an_event_of_its_own_kind() -> None:
    client, _ = ask(cut(stream(), 2), refusal(400, "b"), path="/v1/responses")
    assert client.body.endswith(b"\n\n")
    kind, data = client.body.decode().rstrip().split("\n")[-2:]
    assert kind == "event: error"
    assert json.loads(data[6:]) == {
        "type": "error",
        "code": "c",
        "message": "no: 400",
        "param": None,
    }
    assert DONE not in client.body


def test_what_is_no_error_of_openais_is_an_internal_one() -> None:
    strange: list[Step] = [
        ResponseHead("b", 502, JSON),
        ResponsePart(b"<html>", None),
        ResponseEnd(True),
    ]
    client, _ = ask(cut(stream(), 2), strange)
    assert errors_of(client)[0]["error"]["code"] == "internal_error"


# ---- losses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", [1, 2, 3, 4])
def test_the_next_replica_is_told_what_the_client_has(shown: int) -> None:
    client, replicas = ask(cut(stream(), shown), stream(shown))
    assert client.body == b"data: 1\n\ndata: 2\n\ndata: 3\n\n" + DONE
    second = replicas.requests[1]
    assert second.attempt == 1
    assert second.sent is not None
    assert second.sent.token_ids.get((0, 0), []) == list(range(1, shown))
    assert second.age_s >= 0


def test_a_loss_after_the_last_event_is_none() -> None:
    client, replicas = ask(cut(stream(), 5))
    assert client.is_whole
    assert client.body.endswith(DONE)
    assert len(replicas.requests) == 1


@pytest.mark.parametrize("how", [ResponseEnd(False), ReplicaLostError()], ids=["engine", "all"])
def test_a_replica_that_has_lost_it_is_avoided(how: Step) -> None:
    lost: list[Step] = [*stream()[:2], how]
    client, replicas = ask(lost, stream(2, replica="b"))
    assert client.is_whole
    assert replicas.avoided == [[], ["a"]]


def test_deadlines_count_on() -> None:
    _, replicas = ask([*stream()[:2], 0.1, ReplicaLostError()], stream(2))
    assert replicas.requests[1].age_s >= replicas.requests[0].age_s + 0.1


def test_a_silent_gap_has_comments() -> None:
    late: list[Step] = [stream()[0], 0.12, *stream(2)[1:]]
    client, _ = ask(cut(stream(), 2), late, keep_alive_s=0.05)
    assert KEEP_ALIVE in client.body
    assert client.body.replace(KEEP_ALIVE, b"") == b"data: 1\n\ndata: 2\n\ndata: 3\n\n" + DONE


def test_pauses_have_comments() -> None:
    client, _ = ask(cut(stream(), 2), refusal(503), refusal(503), stream(2), keep_alive_s=60.0)
    assert KEEP_ALIVE in client.body


def test_a_gap_does_not_last_for_ever() -> None:
    client, _ = ask(cut(stream(), 2), [60.0], patience=EAGER)
    assert client.is_whole
    assert errors_of(client)[0]["error"]["code"] == "engine_unavailable"


def test_a_stream_that_goes_on_has_no_limit_of_the_fronts() -> None:
    slow: list[Step] = [stream()[0], *tokens(2, 3), 2.1, *stream(3)[1:]]
    client, _ = ask(cut(stream(), 2), slow, timeout_s=2.0)
    assert not errors_of(client)
    assert client.body.endswith(DONE)


def test_a_request_that_no_replica_begins_times_out() -> None:
    with pytest.raises(RequestTimeoutError):
        ask([60.0], timeout_s=0.1)
    with pytest.raises(RequestTimeoutError):
        ask([60.0], body=b"", patience=EAGER)


# ---- answers that a replica holds ---------------------------------------------------------------


def not_held(replica: str) -> list[Step]:
    return [NotHeld(replica)]


def test_every_replica_is_asked_for_it_once_before_one_computes_it() -> None:
    searches = [not_held("a"), not_held("b"), not_held("a")]
    client, replicas = ask(*searches, stream(), held_key="k", keys=["picture"])
    assert client.is_whole
    assert [one.is_search for one in replicas.requests] == [True, True, True, False]
    assert replicas.avoided == [[], ["a"], ["a", "b"], []]
    assert replicas.keys == [[], [], [], ["picture"]], "a search makes nobody an owner"


def test_a_request_without_a_key_is_not_searched() -> None:
    client, replicas = ask(stream())
    assert not any(one.is_search for one in replicas.requests)
    assert b"id: " not in client.body


@pytest.mark.parametrize("last_event", range(5))
def test_events_that_the_client_has_are_left_out(last_event: int) -> None:
    client, _ = ask(not_held("a"), stream(replica="b"), held_key="k", last_event=last_event)
    events = [b"id: %d\ndata: %d\n\n" % (i, i) for i in (1, 2, 3)] + [b"id: 4\n" + DONE]
    assert client.body == b"".join(events[last_event:])
    assert client.is_whole


@pytest.mark.parametrize("shown", [1, 2, 3, 4])
def test_one_that_is_lost_goes_on_from_all_of_its_tokens(shown: int) -> None:
    """Those that the client has from another front, too."""
    client, replicas = ask(cut(stream(), shown), stream(shown), held_key="k", last_event=1)
    assert client.body == b"id: 2\ndata: 2\n\nid: 3\ndata: 3\n\nid: 4\n" + DONE
    second = replicas.requests[1]
    assert not second.is_search
    assert second.sent is not None
    assert second.sent.token_ids.get((0, 0), []) == list(range(1, shown))


def test_the_rest_of_what_nobody_holds_is_refused() -> None:
    with pytest.raises(AnswerNotHeldError):
        ask(not_held("a"), not_held("a"), stream(), held_key="k", last_event=2)


# ---- any of it ----------------------------------------------------------------------------------

Kind = Literal["stream", "whole", "not held", 400, 404, 429, 503]


def script_of(kind: Kind, cut_at: int | None, replica: str) -> Sequence[Step]:
    steps: list[Step]
    if isinstance(kind, int):
        steps = refusal(kind, replica)
    elif kind == "not held":
        steps = not_held(replica)
    elif kind == "whole":
        steps = [ResponseHead(replica, 200, JSON), ResponsePart(b"{}", None), ResponseEnd(True)]
    else:
        steps = stream(replica=replica)
    return steps if cut_at is None else cut(steps, cut_at)


SCRIPTS = st.builds(
    script_of,
    st.sampled_from(["stream", "whole", "not held", 400, 404, 429, 503]),
    st.none() | st.integers(0, 5),
    st.sampled_from("abc"),
)


@given(
    st.lists(SCRIPTS, min_size=1, max_size=6),
    st.sampled_from(["/v1/responses", "/v1/models"]),
    st.integers(0, 2),
)
def test_every_request_gets_one_whole_response_or_one_error(
    scripts: list[list[Step]], path: str, last_event: int
) -> None:
    client, replicas = Client(), Scripted([*scripts, refusal(400)])
    request = ForwardedRequest("POST", path, b"", [], b"{}", "key", 0, held_key="k")
    options: Any = {"timeout_s": 0.0, "keep_alive_s": 1.0, "patience": PATIENT}
    options["last_event"] = last_event

    async def run() -> None:
        try:
            await Exchange(replicas, request, [], client.send, **options).run()
        except RequestError:
            assert client.messages == []
        else:
            assert client.is_whole

    asyncio.run(run())
    assert len(replicas.requests) <= len(scripts) + 1
