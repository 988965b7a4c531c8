"""`/metrics`: figures for Prometheus, under vLLM's names where vLLM has them, else as `mmjax:`.

No label holds what a client sends, so that their number is bounded; those that name adapters are
of one series.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import get_args

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mmjax.cache import BaseMultiModalProcessorCache
from mmjax.config.engine_config import LoRAConfig
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.engine_client.observer import EndReason, FinishedSequence, NewTokens
from mmjax.frontend.engine_client.requests import ProcessedRequest
from mmjax.frontend.engine_client.supervisor import EngineLink, EngineState
from mmjax.requests.request_times import Stage
from mmjax.transport.messages import MEMORY_CAUSES, STEP_TOKEN_BOUNDS, Heartbeat

CONTENT_TYPE = CONTENT_TYPE_LATEST

STATUSES = (200, 400, 401, 403, 404, 405, 408, 409, 413, 422, 429, 431, 499, 500, 501, 503)
"""Statuses that are counted by name; all else is "other"."""

_FINISH_REASONS = ("stop", "length", "abort", "error")
_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
_SHORT_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
_LAGS = (0.001, 0.005, 0.02, 0.1, 1.0)
_LAG_INTERVAL_S = 0.1

_STAGES: Mapping[Stage, tuple[str, str]] = {
    "fetch": ("image_fetch", "Seconds to get a request's images: downloads, or base64."),
    "decode": ("image_decode", "Seconds to decode a request's images."),
    "process": ("image_process", "Seconds to hash, resize and normalise a request's images."),
    "encode": ("image_encode", "Seconds to encode a request's images that no cache had."),
    "tokenize": ("request_tokenize", "Seconds to render a request's template, and to tokenize."),
}
"""Stages that vLLM has no metric of."""

_LAST_GAUGES: Mapping[str, tuple[str, str]] = {
    "vllm:num_requests_running": ("num_running", "Requests in execution."),
    "vllm:num_requests_waiting": ("num_waiting", "Requests that wait for the engine."),
    "vllm:kv_cache_usage_perc": ("kv_cache_usage", "Share of the KV cache in use, from 0 to 1."),
    "mmjax:encoder_cache_usage_perc": (
        "encoder_cache_usage",
        "Share of the encoder cache in use, from 0 to 1.",
    ),
    "mmjax:programs_left": ("num_programs_left", "Programs that are not compiled yet."),
}
"""Name -> field of the last heartbeat, and what it is."""

_TOTALS: Mapping[str, tuple[str, str]] = {
    "vllm:prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "vllm:num_preemptions": ("num_preemptions", "Preemptions of requests."),
    "mmjax:encoder_cache_queries": ("encoder_cache_queries", "Items looked up in it."),
    "mmjax:encoder_cache_hits": ("encoder_cache_hits", "Items whose embeddings were found."),
    "mmjax:compilations": ("num_compilations", "Programs that a step had to wait for."),
}
"""The same of figures that only grow, over all engine processes."""


class Metrics:
    """The metrics of one server; a `RequestObserver`."""

    def __init__(self, client: AsyncEngineClient, lora: LoRAConfig | None = None) -> None:
        """Observe `client`, from now on; `lora`: of its engine."""
        # A second time series for each, of no use.
        disable_created_metrics()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        model = client.input_processor.model_config.public_name
        max_loras = lora.max_loras if lora is not None and lora.enable_lora else 0
        self._registry.register(_EngineCollector(client, model, max_loras))
        self._make_counters(model)
        self._make_histograms(model)
        client.observe(self)

    async def render(self) -> bytes:
        """Return the text of `/metrics`."""
        # In a thread: the cache's lock may be held by another one.
        return await asyncio.to_thread(generate_latest, self._registry)

    async def watch_loop(self) -> None:
        """Measure how late the event loop is, until cancelled."""
        while True:
            start = time.monotonic()
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._lag.observe(max(0.0, time.monotonic() - start - _LAG_INTERVAL_S))

    def count_response(self, status: int) -> None:
        """Count an HTTP response."""
        self._responses[status if status in self._responses else 0].inc()

    # ---- RequestObserver ------------------------------------------------------------------------

    def on_added(self, request: ProcessedRequest) -> None:
        """Observe what a request asks for."""
        params = request.messages[0].sampling_params
        self._prompt_tokens.inc(len(request.prompt_token_ids))
        self._request_prompt_tokens.observe(len(request.prompt_token_ids))
        self._params_n.observe(len(request.messages))
        self._params_max_tokens.observe(params.max_tokens or 0)

    def on_tokens(self, tokens: NewTokens) -> None:
        """Observe the time that a step's tokens took."""
        self._generation_tokens.inc(tokens.num_tokens)
        if not tokens.is_first:
            self._inter_token.observe(tokens.interval_s)
            return
        self._ttft.observe(tokens.interval_s)
        times = tokens.request.times
        self._queue.observe(times.queue)
        self._prefill.observe(times.prefill + times.encode)
        for stage, seconds in times.by_stage().items():
            # A stage that did not occur has no time.
            if stage in self._stages and seconds:
                self._stages[stage].observe(seconds)

    def on_finished(self, sequence: FinishedSequence) -> None:
        """Observe the times of a whole sequence."""
        times = sequence.request.times
        decode_s = sequence.last_token_at - sequence.first_token_at
        self._success[sequence.finish_reason].inc()
        # Once, as its prompt: the other sequences find what the first computed.
        if sequence.request_id == sequence.request.messages[0].request_id:
            self._cached_tokens.inc(sequence.num_cached_tokens)
        self._request_generation_tokens.observe(sequence.num_tokens)
        self._e2e.observe(sequence.last_token_at - times.arrived_at)
        self._decode.observe(decode_s)
        self._inference.observe(times.prefill + times.encode + decode_s)
        if sequence.num_tokens > 1:
            self._tpot.observe(decode_s / (sequence.num_tokens - 1))

    def on_broken_off(self, request: ProcessedRequest, reason: EndReason) -> None:
        """Count a request that was aborted, or failed."""
        self._success[reason].inc()

    # ---- parts ----------------------------------------------------------------------------------

    def _make_counters(self, model: str) -> None:
        def make(name: str, text: str) -> Counter:
            counter = Counter(name, text, ("model_name",), registry=self._registry)
            return counter.labels(model)

        self._prompt_tokens = make("vllm:prompt_tokens", "Prompt tokens.")
        self._cached_tokens = make(
            "vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache."
        )
        self._generation_tokens = make("vllm:generation_tokens", "Generated tokens.")
        ended = Counter(
            "vllm:request_success",
            "Ended sequences, by reason.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._success = {reason: ended.labels(model, reason) for reason in _FINISH_REASONS}
        responses = Counter(
            "mmjax:http_responses", "HTTP responses.", ("status",), registry=self._registry
        )
        self._responses = {status: responses.labels(str(status)) for status in STATUSES}
        self._responses[0] = responses.labels("other")

    def _make_histograms(self, model: str) -> None:
        def make(name: str, text: str, buckets: Sequence[float | int]) -> Histogram:
            histogram = Histogram(
                name, text, ("model_name",), buckets=buckets, registry=self._registry
            )
            return histogram.labels(model)

        of_request = "vllm:request_"
        self._ttft = make("vllm:time_to_first_token_seconds", "To the first token.", _SECONDS)
        self._inter_token = make(
            "vllm:inter_token_latency_seconds", "Between two steps' tokens.", _SHORT_SECONDS
        )
        self._tpot = make(
            f"{of_request}time_per_output_token_seconds", "Per token.", _SHORT_SECONDS
        )
        self._e2e = make("vllm:e2e_request_latency_seconds", "From arrival to end.", _SECONDS)
        self._queue = make(f"{of_request}queue_time_seconds", "In queues.", _SECONDS)
        self._prefill = make(f"{of_request}prefill_time_seconds", "To compute prompts.", _SECONDS)
        self._decode = make(f"{of_request}decode_time_seconds", "To generate.", _SECONDS)
        self._inference = make(f"{of_request}inference_time_seconds", "Both of these.", _SECONDS)
        self._request_prompt_tokens = make(
            f"{of_request}prompt_tokens", "Tokens of a prompt.", _TOKENS
        )
        self._request_generation_tokens = make(
            f"{of_request}generation_tokens", "Tokens of an answer.", _TOKENS
        )
        self._params_n = make(f"{of_request}params_n", "`n` of a request.", (1, 2, 4, 8, 16))
        self._params_max_tokens = make(
            f"{of_request}params_max_tokens", "`max_tokens` of a request.", _TOKENS
        )
        self._stages: dict[Stage, Histogram] = {
            stage: make(f"mmjax:{name}_time_seconds", text, _SHORT_SECONDS)
            for stage, (name, text) in _STAGES.items()
        }
        self._lag = make("mmjax:event_loop_lag_seconds", "How late the server's loop is.", _LAGS)


class _EngineCollector(Collector):
    """Reads P1's last heartbeat, and P0's processor cache, when they are asked for."""

    def __init__(self, client: AsyncEngineClient, model: str, max_loras: int) -> None:
        """`max_loras` 0: the engine has no adapters."""
        self._client = client
        self._model = model
        self._max_loras = max_loras
        self._totals = _Totals()

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: names are not compared with other collectors'."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the current figures; P1's once it has sent some."""
        supervisor = self._client.supervisor
        yield self._gauge("mmjax:engine_up", "Whether it serves.", supervisor.is_healthy)
        states = GaugeMetricFamily(
            "mmjax:engine_state", "1 for the engine's state.", labels=("model_name", "state")
        )
        for state in get_args(EngineState):
            states.add_metric((self._model, state), float(supervisor.state == state))
        yield states
        restarts = supervisor.num_restarts
        yield self._counter("mmjax:engine_restarts", "Restarts of the engine process.", restarts)
        yield self._gauge(
            "mmjax:num_requests_processing",
            "Requests whose prompt is processed.",
            self._client.capacity.num_requests,
        )
        cache = self._client.input_processor.cache
        if cache is not None:
            yield from self._cache_metrics(cache)
        yield from self._engine_metrics(supervisor)

    def _cache_metrics(self, cache: BaseMultiModalProcessorCache) -> Iterator[Metric]:
        info = cache.make_stats()
        yield self._counter("vllm:mm_cache_queries", "Items looked up in it.", info.total)
        yield self._counter("vllm:mm_cache_hits", "Items found in it.", info.hits)
        yield self._gauge("mmjax:processor_cache_bytes", "Of its items.", cache.currsize)

    def _engine_metrics(self, supervisor: EngineLink) -> Iterator[Metric]:
        ready, heartbeat = supervisor.ready, supervisor.heartbeat
        if ready is not None:
            yield InfoMetricFamily(
                "vllm:cache_config",
                "Of the KV cache.",
                {
                    "model_name": self._model,
                    "num_gpu_blocks": str(ready.num_kv_blocks),
                    "block_size": str(ready.block_size),
                },
            )
            yield self._gauge("mmjax:programs", "Compiled, or to come.", ready.num_programs)
        for name, (field, text) in _LAST_GAUGES.items():
            if heartbeat is not None:
                yield self._gauge(name, text, getattr(heartbeat, field))
        if heartbeat is not None and heartbeat.memory_bytes:
            yield self._memory(heartbeat.memory_bytes)
        if heartbeat is not None and self._max_loras:
            yield self._loras(heartbeat)
        totals = self._totals.update(heartbeat, supervisor.num_restarts)
        for name, (field, text) in _TOTALS.items():
            yield self._counter(name, text, totals[field])
        yield self._step_tokens(totals)

    def _memory(self, memory_bytes: Mapping[str, int]) -> Metric:
        family = GaugeMetricFamily(
            "mmjax:engine_resident_memory_bytes",
            "Of the engine process, by cause; the sum is all of it.",
            labels=("model_name", "cause"),
        )
        for cause in MEMORY_CAUSES:
            family.add_metric((self._model, cause), float(memory_bytes.get(cause, 0)))
        return family

    def _loras(self, heartbeat: Heartbeat) -> Metric:
        """Return one series, as vLLM has it: routers read which adapters are where."""
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters that requests run with, and wait with; the value is the time.",
            labels=("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        running, waiting = (
            ",".join(sorted(names)) for names in (heartbeat.running_loras, heartbeat.waiting_loras)
        )
        labels = (self._model, str(self._max_loras), running, waiting)
        family.add_metric(labels, time.time())
        return family

    def _step_tokens(self, totals: Mapping[str, float]) -> Metric:
        bounds = [*map(float, STEP_TOKEN_BOUNDS), float("inf")]
        counts = accumulate(totals[f"step_token_counts.{i}"] for i in range(len(bounds)))
        buckets = [
            (str(bound).replace("inf", "+Inf"), count)
            for bound, count in zip(bounds, counts, strict=True)
        ]
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens of a step.", labels=("model_name",)
        )
        family.add_metric((self._model,), buckets, totals["num_step_tokens"])
        return family

    def _gauge(self, name: str, text: str, value: float | int) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), float(value))
        return family

    def _counter(self, name: str, text: str, value: float | int) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), float(value))
        return family


class _Totals:
    """Sums of P1's figures over its restarts, each of which begins at 0."""

    def __init__(self) -> None:
        self._of_earlier: dict[str, float] = dict.fromkeys(_figures(None), 0.0)
        self._last = dict(self._of_earlier)
        self._num_restarts = 0

    def update(self, heartbeat: Heartbeat | None, num_restarts: int) -> dict[str, float]:
        """Return the sums with the last heartbeat's."""
        if num_restarts != self._num_restarts:
            self._num_restarts = num_restarts
            self._of_earlier = self._add(self._last)
            self._last = dict.fromkeys(self._last, 0.0)
        if heartbeat is not None:
            self._last = _figures(heartbeat)
        return self._add(self._last)

    def _add(self, figures: Mapping[str, float]) -> dict[str, float]:
        return {name: self._of_earlier[name] + value for name, value in figures.items()}


def _figures(heartbeat: Heartbeat | None) -> dict[str, float]:
    """Return the figures that only grow; of None, all 0."""
    fields = [field for field, _ in _TOTALS.values()] + ["num_step_tokens"]
    figures = {field: float(getattr(heartbeat, field, 0)) for field in fields}
    counts = getattr(heartbeat, "step_token_counts", ())
    for number in range(len(STEP_TOKEN_BOUNDS) + 1):
        count = counts[number] if number < len(counts) else 0
        figures[f"step_token_counts.{number}"] = float(count)
    return figures
