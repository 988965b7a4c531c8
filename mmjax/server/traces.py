"""`--otlp-traces-endpoint`: an OpenTelemetry trace of each request, with its stages as spans.

Needs `mmjax[otel]`, and is imported only with that flag.
"""

import time
from collections import Counter
from itertools import accumulate

from opentelemetry import context as otel_context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Receive, Scope, Send

from mmjax import __version__
from mmjax.frontend.engine_client.request_stream import EndReason, RequestObserver
from mmjax.frontend.output.outputs import FinishedSequence
from mmjax.frontend.requests.request import ProcessedRequest

_SPAN_NAME = "llm_request"
"""vLLM's; so are the names of the attributes."""
_HEADERS = (b"traceparent", b"tracestate")
_NS = 10**9


def make_provider(endpoint: str) -> TracerProvider:
    """Return a provider that sends to `endpoint`, in a thread of its own."""
    resource = Resource.create({"service.name": "mmjax", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


def join_trace(app: ASGIApp) -> ASGIApp:
    """Take the client's trace from its `traceparent` header: middleware."""
    propagator = TraceContextTextMapPropagator()

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        carrier = {
            name.decode(): value.decode("latin-1") for name, value in headers if name in _HEADERS
        }
        token = otel_context.attach(propagator.extract(carrier))
        try:
            await app(scope, receive, send)
        finally:
            otel_context.detach(token)

    return call


class RequestTracer(RequestObserver):
    """Makes a span for each request, when its times are known.

    It is a child of the client's span, if a `traceparent` header names one. Its own children are
    the stages, laid one behind the other: of those that take turns, only the sum is known.
    """

    middleware = staticmethod(join_trace)

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("mmjax", __version__)
        self._model_name = model_name
        self._num_tokens: Counter[str] = Counter()
        """request_id -> tokens of its finished sequences."""

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def on_finished(self, sequence: FinishedSequence) -> None:
        """Make the span, with the request's last sequence."""
        request = sequence.request
        self._num_tokens[request.request_id] += sequence.num_tokens
        if sequence.is_last:
            self._make_span(request, None)

    def on_broken_off(self, request: ProcessedRequest, reason: EndReason) -> None:
        """Make the span of a request without an end."""
        self._make_span(request, reason)

    def _make_span(self, request: ProcessedRequest, reason: EndReason | None) -> None:
        now = time.monotonic()
        # Spans have times of day.
        offset_ns = time.time_ns() - int(now * _NS)
        start_ns = offset_ns + int(request.times.arrived_at * _NS)
        span = self._tracer.start_span(
            _SPAN_NAME,
            kind=SpanKind.SERVER,
            start_time=start_ns,
            attributes=self._attributes(request, now),
        )
        if reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        stages = [(name, int(s * _NS)) for name, s in request.times.by_stage().items() if s > 0]
        ends = accumulate(duration for _, duration in stages)
        parent = set_span_in_context(span)
        for (name, duration_ns), end_ns in zip(stages, ends, strict=True):
            stage = self._tracer.start_span(
                name, context=parent, start_time=start_ns + end_ns - duration_ns
            )
            stage.end(start_ns + end_ns)
        span.end(offset_ns + int(now * _NS))

    def _attributes(self, request: ProcessedRequest, now: float) -> dict[str, str | int | float]:
        params, times = request.messages[0].sampling_params, request.times
        return {
            "gen_ai.request.id": request.request_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.n": len(request.messages),
            "gen_ai.request.max_tokens": params.max_tokens or 0,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": self._num_tokens.pop(request.request_id, 0),
            "gen_ai.latency.time_in_queue": times.queue,
            "gen_ai.latency.time_to_first_token": max(0.0, times.first_token_at - times.arrived_at),
            "gen_ai.latency.time_in_model_prefill": times.prefill + times.encode,
            "gen_ai.latency.time_in_model_decode": times.generate,
            "gen_ai.latency.e2e": now - times.arrived_at,
        }
