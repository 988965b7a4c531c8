"""`return_metrics`: what an answer took, and which caches had its pictures; nothing unasked."""

from typing import Any

import pytest

from mmjax.system.request_times import RequestTimes
from tests.echo_engine import EchoEngine, EchoSupervisor
from tests.server.conftest import MakeServer, Server
from tests.server.test_app import image_message
from tests.server.test_bad_input import error_of

VLLMS = {
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
}


class TimingEngine(EchoEngine):
    """Tells P1's stages with the first token, and that it encoded all items."""

    def _advance(self, state: Any) -> Any:
        is_first = state.num_sent == 0
        delta = super()._advance(state)
        if not is_first:
            return delta
        times = RequestTimes(queue=0.5, encode=0.25, prefill=0.125)
        encoded = [feature.identifier for feature in state.request.mm_features]
        return type(delta)(
            request_id=delta.request_id,
            new_token_ids=delta.new_token_ids,
            finish_reason=delta.finish_reason,
            num_cached_tokens=delta.num_cached_tokens,
            times=times,
            encoded=encoded,
        )


@pytest.fixture
def timed(make_server: MakeServer) -> Server:
    supervisor = EchoSupervisor()
    supervisor.engine = TimingEngine()
    return make_server(supervisor=supervisor)


def stream(server: Server, **fields: Any) -> list[dict[str, Any]]:
    client = server.openai()
    messages: Any = fields.pop("messages", [{"role": "user", "content": "a red circle"}])
    extra = {"return_metrics": fields.pop("return_metrics", True)}
    chunks = client.chat.completions.create(
        model="tiny", messages=messages, stream=True, extra_body=extra, **fields
    )
    return [chunk.model_dump(exclude_unset=True) for chunk in chunks]


def test_who_does_not_ask_sees_nothing(server: Server) -> None:
    assert "metrics" not in server.chat().json()
    chunks = stream(server, return_metrics=False)
    assert all("metrics" not in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


def test_all_stages_are_told(timed: Server) -> None:
    answer = timed.chat(messages=[image_message()], return_metrics=True).json()
    metrics = answer["metrics"]
    assert metrics.keys() > VLLMS
    assert metrics["time_to_first_token_ms"] == 375.0
    assert metrics["encode_time_ms"] == 250.0
    assert metrics["prefill_time_ms"] == 125.0
    assert metrics["queue_time_ms"] >= 500.0
    for stage in ("fetch", "tokenize", "decode", "process", "generation", "total"):
        assert metrics[f"{stage}_time_ms"] > 0, stage
    num_steps = answer["usage"]["completion_tokens"] - 1
    # Told in thousandths of a millisecond.
    mean = pytest.approx(metrics["generation_time_ms"] / num_steps, rel=0.01, abs=0.001)
    assert metrics["mean_itl_ms"] == mean
    assert metrics["num_cached_tokens"] == 3
    (item,) = metrics["items"]
    assert (item["processing"], item["encoding"]) == ("computed", "computed")
    assert item["num_embeds"] == 4 <= item["length"]


def test_a_picture_again_tells_its_cache(timed: Server) -> None:
    for expected in ("computed", "processor_cache"):
        answer = timed.chat(messages=[image_message()], return_metrics=True).json()
        assert answer["metrics"]["items"][0]["processing"] == expected
    assert answer["metrics"]["decode_time_ms"] == 0.0


def test_a_stream_tells_them_in_its_last_chunk(timed: Server) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = stream(timed, **options)
        *others, last = chunks
        assert all("metrics" not in chunk for chunk in others)
        assert last["choices"] == []
        assert last["metrics"]["time_to_first_token_ms"] == 375.0
        assert ("usage" in last) == bool(options)


def test_one_token_has_no_rate(timed: Server) -> None:
    metrics = timed.chat(max_tokens=1, return_metrics=True).json()["metrics"]
    assert metrics["mean_itl_ms"] is None
    assert metrics["tokens_per_second"] is None


def test_completions(timed: Server) -> None:
    body = {"prompt": "a star", "return_metrics": True}
    answer = timed.http.post("/v1/completions", json=body).json()
    assert answer["metrics"]["prefill_time_ms"] == 125.0
    many = timed.http.post("/v1/completions", json={**body, "prompt": ["a star", "a ring"]})
    assert many.status_code == 400
    assert error_of(many)["param"] == "return_metrics"


def test_clients_that_share_caches_are_not_told_of_them(make_server: MakeServer) -> None:
    server = make_server(api_keys=("alices", "bobs"))
    body = {"messages": [image_message()], "return_metrics": True}
    headers = {"Authorization": "Bearer bobs"}
    answer = server.http.post("/v1/chat/completions", json=body, headers=headers).json()
    (item,) = answer["metrics"]["items"]
    assert (item["processing"], item["encoding"]) == ("hidden", "hidden")
