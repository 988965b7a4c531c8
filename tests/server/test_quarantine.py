"""A request that ends the engine tells its client so, wherever its error is read."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from mmjax.errors import InternalError
from mmjax.frontend.engine_client.suspects import EngineExit
from mmjax.server.openai.errors import error_body
from tests.echo_engine import EchoEngine, EchoSupervisor
from tests.server.conftest import BODIES, MakeServer, events_of


def crash_after(
    num_steps: int, supervisors: Sequence[EchoSupervisor], patch: pytest.MonkeyPatch
) -> None:
    """Let every step after so many end its engine, which is there again at once."""
    step, num_left = EchoEngine.step, num_steps

    def step_or_die(engine: EchoEngine) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left >= 0 or not engine.running:
            return step(engine)
        supervisor = next(one for one in supervisors if one.engine is engine)
        engine_exit = EngineExit(cause="crash", request_ids=tuple(engine.running))
        supervisor.die(restarts=True, engine_exit=engine_exit)
        asyncio.get_running_loop().call_soon(supervisor.become_ready)
        return []

    patch.setattr(EchoEngine, "step", step_or_die)


def check(error: dict[str, Any]) -> None:
    assert error["code"] == "request_quarantined"
    assert "change the prompt" in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_the_client_reads_why_its_request_failed(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    server = make_server()
    crash_after(0, [server.supervisor], monkeypatch)
    for _ in range(2):
        response = server.http.post(path, json=BODIES[path])
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        check(response.json()["error"])
        # OpenAI's clients send a 500 again, which is refused.
        assert response.headers["x-should-retry"] == "false"
        assert server.supervisor.num_restarts == 2


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_says_why_it_ends(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    server = make_server()
    crash_after(1, [server.supervisor], monkeypatch)
    response = server.http.post(path, json={**BODIES[path], "stream": True})
    event = events_of(response)[-1]
    last = event.get("response", event)
    check(last["error"])
    if path == "/v1/responses":
        kept = server.http.get(f"{path}/{last['id']}").json()
        assert kept["status"] == "failed"
        check(kept["error"])


def test_an_internal_error_tells_nothing() -> None:
    info = error_body(InternalError("at 0x7f3a")).error
    assert info.code == "internal_error"
    assert "0x7f3a" not in info.message
