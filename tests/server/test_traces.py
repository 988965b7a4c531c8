"""Traces of requests: one span each, its stages within it, in the client's own trace."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from mmjax.server import traces
from tests.echo_engine import REFUSED_TOKEN
from tests.server.conftest import MakeServer, Server
from tests.test_serve import image_message

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
PARENT = f"00-{TRACE_ID:032x}-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces, "make_provider", lambda endpoint: provider)
    yield exporter
    provider.shutdown()


@pytest.fixture
def traced(make_server: MakeServer, exporter: InMemorySpanExporter) -> Server:
    return make_server(otlp_traces_endpoint="http://collector/v1/traces")


def spans(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """Return the request's span, and those of its stages."""
    (whole,) = [span for span in exporter.get_finished_spans() if span.name == "llm_request"]
    return whole, [span for span in exporter.get_finished_spans() if span is not whole]


def test_a_request_is_a_span_of_the_clients_trace(
    traced: Server, exporter: InMemorySpanExporter
) -> None:
    answer = traced.http.post(
        "/v1/chat/completions",
        json={"messages": [image_message(5)], "max_tokens": 4, "n": 2, "ignore_eos": True},
        headers={"traceparent": PARENT},
    )
    assert answer.status_code == 200
    whole, stages = spans(exporter)
    assert whole.context is not None
    assert whole.context.trace_id == TRACE_ID
    assert whole.parent is not None
    assert whole.parent.span_id == 0xB7AD6B7169203331
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.request.id"] == answer.json()["id"]
    assert whole.attributes["gen_ai.usage.completion_tokens"] == 8
    usage = answer.json()["usage"]
    assert whole.attributes["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert {"fetch", "tokenize", "process"} <= {span.name for span in stages}
    for span in stages:
        assert span.parent is not None
        assert span.parent.span_id == whole.context.span_id
        assert span.start_time is not None
        assert span.end_time is not None
        assert whole.start_time is not None
        assert whole.start_time <= span.start_time <= span.end_time


def test_a_request_without_a_trace_begins_one(
    traced: Server, exporter: InMemorySpanExporter
) -> None:
    for number, header in enumerate(("", "garbage", f"{PARENT}x")):
        exporter.clear()
        assert traced.http.post(
            "/v1/completions",
            json={"prompt": f"red {number}", "max_tokens": 2},
            headers={"traceparent": header},
        ).is_success
        whole, _ = spans(exporter)
        assert whole.parent is None


def test_a_request_that_fails_says_so(traced: Server, exporter: InMemorySpanExporter) -> None:
    answer = traced.http.post("/v1/completions", json={"prompt": [5, REFUSED_TOKEN]})
    assert answer.status_code == 400
    whole, _ = spans(exporter)
    assert whole.status.status_code is StatusCode.ERROR


def test_a_server_without_traces_loads_none_of_it() -> None:
    script = "import mmjax.server.app, sys; print('opentelemetry.sdk.trace' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"]
