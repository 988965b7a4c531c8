"""What a request may ask of its time and of its place among others."""

import json
import time
from typing import Any

import openai
import pytest

from mmjax.config.engine_config import SchedulerConfig
from tests.echo_engine import EchoSupervisor
from tests.server.conftest import BODIES, MakeServer, Server, events_of

ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 200}


@pytest.fixture
def slow(make_server: MakeServer) -> Server:
    """A server whose every step takes its time, and which gives a request half a second."""
    return make_server(supervisor=EchoSupervisor(delay_s=0.05), request_timeout_s=0.5)


def error_of(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.chat(**ENDLESS, **fields)
    assert response.status_code == 408
    # OpenAI's clients would send it again by themselves.
    assert response.headers["x-should-retry"] == "false"
    assert server.engine_client.num_requests == 0
    assert not server.supervisor.engine.running
    return response.json()["error"]


def test_a_request_beyond_the_servers_time_gets_408(slow: Server) -> None:
    start = time.monotonic()
    error = error_of(slow)
    assert 0.5 <= time.monotonic() - start < 5
    assert (error["code"], error["type"]) == ("request_timeout", "timeout_error")
    assert "--request-timeout" in error["message"]


def test_the_shorter_time_holds(slow: Server, make_server: MakeServer) -> None:
    error_of(slow, timeout=600)
    patient = make_server(supervisor=EchoSupervisor(delay_s=0.05), request_timeout_s=600.0)
    start = time.monotonic()
    error_of(patient, timeout=0.1)
    assert time.monotonic() - start < 300


def test_of_several_answers_none_runs_on(slow: Server) -> None:
    error_of(slow, n=3)


def test_a_stream_beyond_its_time_ends_with_an_error_event(slow: Server) -> None:
    response = slow.chat(**ENDLESS, timeout=0.3, stream=True)
    events = events_of(response)
    assert events[-1]["error"]["code"] == "request_timeout"
    assert events[1]["choices"]
    assert response.text.endswith("data: [DONE]\n\n")
    assert not slow.supervisor.engine.running


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_that_waited_too_long_for_its_first_token_is_408(
    make_server: MakeServer, path: str
) -> None:
    server = make_server(supervisor=EchoSupervisor(delay_s=0.3))
    response = server.http.post(path, json={**BODIES[path], "stream": True, "timeout": 0.05})
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "request_timeout"
    assert server.engine_client.num_requests == 0


def test_a_request_in_time_is_answered(slow: Server) -> None:
    assert slow.chat(max_tokens=1).status_code == 200


def test_the_official_client_raises_at_once(slow: Server) -> None:
    client = slow.openai().with_options(max_retries=5)
    message: Any = {"role": "user", "content": "a"}
    before = len(slow.supervisor.engine.added)
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(
            model="tiny", messages=[message], max_tokens=200, extra_body={"ignore_eos": True}
        )
    assert caught.value.status_code == 408
    assert len(slow.supervisor.engine.added) == before + 1


def test_a_request_that_waits_for_the_start_has_a_deadline_too(make_server: MakeServer) -> None:
    server = make_server(supervisor=EchoSupervisor(is_started_ready=False))
    assert server.chat(timeout=0.1).status_code == 408
    assert server.engine_client.num_requests == 0


@pytest.mark.parametrize("timeout", [0, -1, "soon", float("inf"), 1e9])
def test_a_timeout_is_seconds(server: Server, timeout: Any) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "timeout": timeout})
    headers = {"Content-Type": "application/json"}
    response = server.http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 400


def test_priority_is_for_servers_that_serve_by_it(make_server: MakeServer) -> None:
    first_come = make_server()
    response = first_come.chat(priority=3)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority"
    assert "--scheduling-policy priority" in response.json()["error"]["message"]
    assert first_come.chat(priority=0).status_code == 200
    by_priority = make_server(scheduler=SchedulerConfig(scheduling_policy="priority"))
    assert by_priority.chat(priority=-7).status_code == 200
    assert by_priority.supervisor.engine.added[-1].priority == -7
    assert by_priority.chat(priority=2**40).status_code == 400
