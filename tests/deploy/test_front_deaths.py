"""A front that dies in the middle of a request: another one takes it up where a replica has it."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from tests.deploy.conftest import Deployment, MakeDeployment
from tests.deploy.test_front import STREAMS, comparable

CHAT = {"messages": [{"role": "user", "content": "a red circle"}]}
KEYED = {"idempotency-key": "mine"}


@dataclass
class Call:
    """A request to a front, and what its client has of the response."""

    front: ASGIApp
    fields: Mapping[str, Any]
    path: str = "/v1/chat/completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    async def run(self, dies_after: int | None = None) -> "Call":
        """Send it; the front dies when it has sent so many messages; 0: when an engine has it."""
        body = [json.dumps(self.fields).encode()]
        has_died = asyncio.Event()

        async def receive() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            if has_died.is_set():
                return
            self.messages.append(message)
            if len(self.messages) == dies_after:
                has_died.set()
                await asyncio.Event().wait()

        running = asyncio.ensure_future(self.front(self._scope(), receive, send))
        if dies_after == 0:
            # A step of the echo engine.
            await asyncio.sleep(0.1)
            has_died.set()
        dying = asyncio.create_task(has_died.wait())
        await asyncio.wait([running, dying], return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        dying.cancel()
        await asyncio.gather(running, dying, return_exceptions=True)
        return self

    def _scope(self) -> dict[str, Any]:
        headers = {"content-type": "application/json", **self.headers}
        return {
            "type": "http",
            "method": "POST",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.messages[1:])

    @property
    def is_whole(self) -> bool:
        return bool(self.messages) and not self.messages[-1].get("more_body", True)

    def events(self) -> list[str]:
        assert self.status == 200, self.body
        lines = self.body.decode().split("\n\n")
        return [line for line in lines if line and not line.startswith(":")]

    def ids(self) -> list[int]:
        firsts = [line.partition("\n")[0] for line in self.events()]
        return [int(one.removeprefix("id: ")) for one in firsts]


@pytest.fixture(params=["its calls run on", "its calls end"])
def slow(make_deployment: MakeDeployment, request: pytest.FixtureRequest) -> Deployment:
    """Two fronts; Ray's calls run on when who made them dies."""
    deployment = make_deployment(api_keys=("a key", "another key"))
    deployment.http.headers["authorization"] = "Bearer a key"
    deployment.replicas.run_on = request.param == "its calls run on"
    for engine in deployment.engines:
        engine.delay_s = 0.02
    return deployment


def run(deployment: Deployment, call: Call, dies_after: int | None = None) -> Call:
    assert deployment.http.portal is not None
    call.headers = {"authorization": "Bearer a key", **call.headers}
    return deployment.http.portal.call(call.run, dies_after)


def num_computed(deployment: Deployment) -> int:
    return sum(len(one.engine.added) for one in deployment.engines)


def test_an_answer_that_is_not_streamed_is_computed_once(slow: Deployment) -> None:
    expected = slow.post().json()["choices"]
    assert not run(slow, Call(slow.front, CHAT, headers=KEYED), dies_after=0).messages
    again = run(slow, Call(slow.other_front, CHAT, headers=KEYED))
    assert json.loads(again.body)["choices"] == expected
    assert num_computed(slow) == 2
    # Also one that came to its end, and was lost on its way to the client.
    once_more = run(slow, Call(slow.front, CHAT, headers=KEYED))
    assert once_more.body == again.body
    assert num_computed(slow) == 2


def test_without_a_key_it_is_computed_again(slow: Deployment) -> None:
    expected = slow.post().json()["choices"]
    run(slow, Call(slow.front, CHAT), dies_after=0)
    again = run(slow, Call(slow.other_front, CHAT))
    assert json.loads(again.body)["choices"] == expected
    assert num_computed(slow) == 3


@pytest.mark.parametrize("kind", ["chat", "sampled", "response"])
@pytest.mark.parametrize("dies_after", [2, 5])
def test_a_stream_goes_on_behind_the_last_event(
    slow: Deployment, kind: str, dies_after: int
) -> None:
    path, fields = STREAMS[kind]
    fields = {"messages": CHAT["messages"], "seed": 5, **fields} if kind != "response" else fields
    whole = run(slow, Call(slow.front, fields, path)).events()
    headers = {"idempotency-key": "k"}
    first = run(slow, Call(slow.front, fields, path, headers), dies_after)
    assert not first.is_whole
    headers["last-event-id"] = str(first.ids()[-1])
    second = run(slow, Call(slow.other_front, fields, path, headers))
    assert second.is_whole
    assert first.ids() + second.ids() == list(range(1, len(whole) + 1))
    lines = [line.partition("\n")[2] for line in first.events() + second.events()]
    assert comparable(lines) == comparable(whole)
    assert num_computed(slow) == 2


def test_a_stream_is_given_from_its_beginning_without_a_last_event(slow: Deployment) -> None:
    fields = {**CHAT, "stream": True}
    first = run(slow, Call(slow.front, fields, headers=KEYED), dies_after=4)
    second = run(slow, Call(slow.other_front, fields, headers=KEYED))
    assert second.events()[: len(first.events())] == first.events()
    assert second.is_whole
    assert num_computed(slow) == 1


def test_a_stream_survives_its_replica_after_its_front(slow: Deployment) -> None:
    fields = {**CHAT, "stream": True}
    whole = run(slow, Call(slow.front, fields)).events()
    first = run(slow, Call(slow.front, fields, headers=KEYED), dies_after=4)
    # The first one that is asked may be the one that does not hold it.
    slow.replicas.cuts = [5, 5]
    headers = {**KEYED, "last-event-id": str(first.ids()[-1])}
    second = run(slow, Call(slow.other_front, fields, headers=headers))
    lines = [line.partition("\n")[2] for line in first.events() + second.events()]
    assert comparable(lines) == comparable(whole)


@pytest.mark.parametrize(
    "other",
    [
        {"headers": {"authorization": "Bearer another key", **KEYED}},
        {"headers": {"idempotency-key": "mine, too"}},
        {"headers": {}},
        {"headers": KEYED, "fields": {**CHAT, "user": "another"}},
        {"headers": KEYED, "fields": {**CHAT, "prompt": "a"}, "path": "/v1/completions"},
    ],
    ids=["API key", "key", "no key", "body", "path"],
)
def test_nobody_gets_an_answer_to_another_request(slow: Deployment, other: dict[str, Any]) -> None:
    mine = run(slow, Call(slow.front, CHAT, headers=KEYED))
    assert mine.status == 200
    other = {"fields": CHAT, **other}
    theirs = run(slow, Call(slow.other_front, **other))
    assert theirs.body != mine.body
    if theirs.status == 200:
        assert json.loads(theirs.body)["id"] != json.loads(mine.body)["id"]
        assert num_computed(slow) == 2


def test_what_is_not_held_is_no_stream_that_goes_on(slow: Deployment) -> None:
    """It would go on another answer, if that is sampled."""
    fields = {**CHAT, "stream": True}
    headers = {**KEYED, "last-event-id": "3"}
    refused = run(slow, Call(slow.front, fields, headers=headers))
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (404, "answer_not_held")
    wrong = run(slow, Call(slow.front, fields, headers={**KEYED, "last-event-id": "three"}))
    assert (wrong.status, json.loads(wrong.body)["error"]["param"]) == (400, "Last-Event-ID")
    assert num_computed(slow) == 0


def test_an_error_is_not_held(slow: Deployment) -> None:
    for _ in range(2):
        refused = run(slow, Call(slow.front, {**CHAT, "temperature": "hot"}, headers=KEYED))
        assert refused.status == 400
    assert [one.is_search for _, one in slow.replicas.tries] == [True, True, True, False] * 2


@pytest.mark.parametrize("has_key", [True, False])
def test_a_kept_response_outlives_its_front(slow: Deployment, has_key: bool) -> None:
    """By its id, from the first event; without a key where the front's calls run on."""
    fields = {"input": "a red circle", "stream": True}
    call = Call(slow.front, fields, "/v1/responses", KEYED if has_key else {})
    first = run(slow, call, dies_after=3)
    response_id = json.loads(first.events()[0].rpartition("data: ")[2])["response"]["id"]
    assert slow.http.portal is not None
    slow.http.portal.call(asyncio.sleep, 0.5)
    kept = slow.http.get(f"/v1/responses/{response_id}").json()
    is_computed = has_key or slow.replicas.run_on
    assert kept["status"] == ("completed" if is_computed else "cancelled")
    assert (
        slow.http.get(
            f"/v1/responses/{response_id}", headers={"authorization": "Bearer another key"}
        ).status_code
        == 404
    )


def test_a_browser_may_come_again(make_deployment: MakeDeployment) -> None:
    deployment = make_deployment(allowed_origins=("https://page.example",))
    asked = deployment.http.options(
        "/v1/chat/completions",
        headers={
            "origin": "https://page.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type, idempotency-key, last-event-id",
        },
    )
    assert asked.status_code == 200, asked.text
