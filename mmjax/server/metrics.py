"""`/metrics`: figures for Prometheus, under vLLM's names where vLLM has them, else as `mmjax:`.

No label holds what a client sends, so that their number is bounded; those that name adapters are
of one series.
"""

import asyncio
import time
from collections import Counter as TallyCounter
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

from mmjax.config.engine_config import LoRAConfig
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.engine_client.request_stream import EndReason, RequestObserver
from mmjax.frontend.engine_client.supervisor import EngineLink, EngineState
from mmjax.frontend.output.outputs import FinishedSequence, NewTokens
from mmjax.frontend.requests.request import ProcessedRequest
from mmjax.system.request_times import RequestTimes, Stage
from mmjax.transport.messages import MEMORY_CAUSES, STEP_TOKEN_BOUNDS, Heartbeat

CONTENT_TYPE = CONTENT_TYPE_LATEST

STATUSES = (200, 400, 401, 403, 404, 405, 408, 409, 413, 422, 429, 431, 499, 500, 501, 503)
"""Statuses that are counted by name; all else is "other"."""

_FINISH_REASONS = ("stop", "length", "abort", "error")
_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
_SHORT_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
_LAG_INTERVAL_S = 0.1

_COUNTERS: Mapping[str, str] = {
    "vllm:prompt_tokens": "Prompt tokens.",
    "vllm:prompt_tokens_cached": "Prompt tokens found in the prefix cache.",
    "vllm:generation_tokens": "Generated tokens.",
}
_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("To the first token.", _SECONDS),
    "vllm:inter_token_latency_seconds": ("Between two steps' tokens.", _SHORT_SECONDS),
    "vllm:request_time_per_output_token_seconds": ("Per token.", _SHORT_SECONDS),
    "vllm:e2e_request_latency_seconds": ("From arrival to end.", _SECONDS),
    "vllm:request_queue_time_seconds": ("In queues.", _SECONDS),
    "vllm:request_prefill_time_seconds": ("To compute prompts.", _SECONDS),
    "vllm:request_decode_time_seconds": ("To generate.", _SECONDS),
    "vllm:request_inference_time_seconds": ("Both of these.", _SECONDS),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "vllm:request_generation_tokens": ("Tokens of an answer.", _TOKENS),
    "vllm:request_max_num_generation_tokens": ("Of the longest of its `n` answers.", _TOKENS),
    "vllm:request_prefill_kv_computed_tokens": ("Tokens of a prompt not found cached.", _TOKENS),
    "vllm:request_params_n": ("`n` of a request.", (1, 2, 4, 16)),
    "vllm:request_params_max_tokens": ("`max_tokens` of a request.", _TOKENS),
    "mmjax:event_loop_lag_seconds": (
        "How late the server's loop is.",
        (0.001, 0.01, 0.1, 1.0),
    ),
}
"""Name -> what it is, and the bounds of its buckets."""

_STAGES: Mapping[Stage, tuple[str, str]] = {
    "fetch": (
        "mmjax:image_fetch_time_seconds",
        "Seconds to get a request's images, videos and audio: downloads, or base64.",
    ),
    "decode": ("mmjax:image_decode_time_seconds", "Seconds to decode a request's media."),
    "process": (
        "mmjax:image_process_time_seconds",
        "Seconds to hash a request's media, and to make the model's inputs of them.",
    ),
    "encode": (
        "mmjax:image_encode_time_seconds",
        "Seconds to encode a request's media that no cache had.",
    ),
    "tokenize": (
        "mmjax:request_tokenize_time_seconds",
        "Seconds to render a request's template, and to tokenize.",
    ),
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
    "mmjax:encoder_workers_alive": ("encoder_workers_alive", "Workers that encode for it now."),
    "mmjax:programs_left": ("num_programs_left", "Programs that are not compiled yet."),
}
"""Name -> field of the last heartbeat, and what it is."""

_TOTALS: Mapping[str, tuple[str, str]] = {
    "vllm:prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "mmjax:kv_offload_queries": (
        "kv_offload_queries",
        "Tokens that the device's prefix cache had not, looked up in host memory.",
    ),
    "mmjax:kv_offload_hits": ("kv_offload_hits", "Tokens found in host memory."),
    "mmjax:kv_offload_copied_bytes": (
        "kv_offload_copied_bytes",
        "Of KV blocks copied to host memory.",
    ),
    "mmjax:kv_offload_restored_bytes": (
        "kv_offload_restored_bytes",
        "Of KV blocks copied back from host memory.",
    ),
    "mmjax:kv_offload_copied_seconds": (
        "kv_offload_copied_s",
        "The engine's time for copies to host memory.",
    ),
    "mmjax:kv_offload_restored_seconds": (
        "kv_offload_restored_s",
        "The engine's time for copies back.",
    ),
    "mmjax:kv_files_hits": ("kv_files_hits", "KV blocks read from the directory."),
    "mmjax:kv_files_misses": ("kv_files_misses", "KV blocks that were not there, or not right."),
    "mmjax:kv_files_read_bytes": ("kv_files_read_bytes", "Of KV blocks read."),
    "mmjax:kv_files_written_bytes": ("kv_files_written_bytes", "Of KV blocks written."),
    "vllm:num_preemptions": ("num_preemptions", "Preemptions of requests."),
    "vllm:spec_decode_num_drafts": ("num_drafts", "Guesses of tokens ahead that were verified."),
    "vllm:spec_decode_num_draft_tokens": ("num_draft_tokens", "Their tokens."),
    "vllm:spec_decode_num_accepted_tokens": ("num_accepted_tokens", "The right ones of these."),
    "mmjax:encoder_cache_queries": ("encoder_cache_queries", "Items looked up in it."),
    "mmjax:encoder_cache_hits": ("encoder_cache_hits", "Items whose embeddings were found."),
    "mmjax:encoder_disk_queries": ("encoder_disk_queries", "Items looked up on disk."),
    "mmjax:encoder_disk_hits": ("encoder_disk_hits", "Items whose embeddings were found there."),
    "mmjax:encoder_disk_read_bytes": ("encoder_disk_read_bytes", "Bytes of these."),
    "mmjax:encoder_disk_written_bytes": ("encoder_disk_written_bytes", "Bytes written there."),
    "mmjax:encoder_workers_items": (
        "encoder_workers_items",
        "Items whose embeddings workers gave.",
    ),
    "mmjax:encoder_workers_bytes": ("encoder_workers_bytes", "Bytes of these."),
    "mmjax:encoder_workers_wait_seconds": ("encoder_workers_wait_s", "The items' waits for them."),
    "mmjax:encoder_workers_retries": ("encoder_workers_retries", "Items asked for once more."),
    "mmjax:encoder_workers_fallbacks": (
        "encoder_workers_fallbacks",
        "Items that this engine encoded, since no worker answered.",
    ),
    "mmjax:encoder_workers_refused": ("encoder_workers_refused", "Answers that were not taken."),
    "mmjax:compilations": ("num_compilations", "Programs that a step had to wait for."),
}
"""Name -> field of figures that only grow, over all engine processes, and what it is."""


class Metrics(RequestObserver):
    """The metrics of one server."""

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
        self._num_finished = TallyCounter[str]()
        """request_id -> its finished sequences, of requests that have others."""
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
            lag_s = time.monotonic() - start - _LAG_INTERVAL_S
            self._observe("mmjax:event_loop_lag_seconds", max(0.0, lag_s))

    def count_response(self, status: int) -> None:
        """Count an HTTP response."""
        self._responses[status if status in self._responses else 0].inc()

    # ---- RequestObserver ------------------------------------------------------------------------

    def on_added(self, request: ProcessedRequest) -> None:
        """Observe what a request asks for."""
        num_tokens = len(request.prompt_token_ids)
        self._counters["vllm:prompt_tokens"].inc(num_tokens)
        self._observe("vllm:request_prompt_tokens", num_tokens)
        self._observe("vllm:request_params_n", len(request.messages))
        max_tokens = request.messages[0].sampling_params.max_tokens
        self._observe("vllm:request_params_max_tokens", max_tokens or 0)

    def on_tokens(self, step: Sequence[NewTokens]) -> None:
        """Observe the time that a step's tokens took."""
        self._counters["vllm:generation_tokens"].inc(sum(one.num_tokens for one in step))
        observe = self._histograms["vllm:inter_token_latency_seconds"].observe
        for tokens in step:
            if tokens.is_first:
                self._observe_start(tokens.request.times, tokens.interval_s)
            else:
                observe(tokens.interval_s)

    def on_finished(self, sequence: FinishedSequence) -> None:
        """Observe the times of a whole sequence."""
        times = sequence.request.times
        decode_s = sequence.last_token_at - sequence.first_token_at
        self._success[sequence.finish_reason].inc()
        self._num_finished[sequence.request.request_id] += 1
        # Once, as its prompt: the other sequences find what the first computed.
        if sequence.request_id == sequence.request.messages[0].request_id:
            self._counters["vllm:prompt_tokens_cached"].inc(sequence.num_cached_tokens)
        e2e_s = sequence.last_token_at - times.arrived_at
        inference_s = times.prefill + times.encode + decode_s
        num_computed = len(sequence.request.prompt_token_ids) - sequence.num_cached_tokens
        self._observe("vllm:request_prefill_kv_computed_tokens", num_computed)
        self._observe("vllm:request_generation_tokens", sequence.num_tokens)
        if sequence.is_last:
            del self._num_finished[sequence.request.request_id]
            self._observe("vllm:request_max_num_generation_tokens", sequence.max_num_tokens)
        self._observe("vllm:e2e_request_latency_seconds", e2e_s)
        self._observe("vllm:request_decode_time_seconds", decode_s)
        self._observe("vllm:request_inference_time_seconds", inference_s)
        if sequence.num_tokens > 1:
            tpot_s = decode_s / (sequence.num_tokens - 1)
            self._observe("vllm:request_time_per_output_token_seconds", tpot_s)

    def on_broken_off(self, request: ProcessedRequest, reason: EndReason) -> None:
        """Count the sequences that were aborted, or failed."""
        num_finished = self._num_finished.pop(request.request_id, 0)
        self._success[reason].inc(len(request.messages) - num_finished)

    # ---- parts ----------------------------------------------------------------------------------

    def _observe_start(self, times: RequestTimes, waited_s: float) -> None:
        """Observe what a sequence's first tokens waited for."""
        self._observe("vllm:time_to_first_token_seconds", waited_s)
        self._observe("vllm:request_queue_time_seconds", times.queue)
        self._observe("vllm:request_prefill_time_seconds", times.prefill + times.encode)
        for stage, seconds in times.by_stage().items():
            # A stage that did not occur has no time.
            if stage in _STAGES and seconds:
                self._observe(_STAGES[stage][0], seconds)

    def _make_counters(self, model: str) -> None:
        self._counters = {
            name: Counter(name, text, ("model_name",), registry=self._registry).labels(model)
            for name, text in _COUNTERS.items()
        }
        names = ("model_name", "finished_reason")
        ended = Counter(
            "vllm:request_success", "Ended sequences, by reason.", names, registry=self._registry
        )
        self._success = {reason: ended.labels(model, reason) for reason in _FINISH_REASONS}
        responses = Counter(
            "mmjax:http_responses", "HTTP responses.", ("status",), registry=self._registry
        )
        self._responses = {status: responses.labels(str(status)) for status in STATUSES}
        self._responses[0] = responses.labels("other")

    def _make_histograms(self, model: str) -> None:
        stages = {name: (text, _SHORT_SECONDS) for name, text in _STAGES.values()}
        self._histograms = {
            name: Histogram(
                name, text, ("model_name",), buckets=buckets, registry=self._registry
            ).labels(model)
            for name, (text, buckets) in {**_HISTOGRAMS, **stages}.items()
        }

    def _observe(self, name: str, value: float | int) -> None:
        self._histograms[name].observe(value)


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
        yield self._gauge("mmjax:engine_up", "Whether it serves.", self._client.is_healthy)
        states: dict[tuple[str, ...], bool]
        states = {(state,): supervisor.state == state for state in get_args(EngineState)}
        yield self._gauges("mmjax:engine_state", "1 for the engine's state.", ("state",), states)
        restarts = supervisor.num_restarts
        yield self._counter("mmjax:engine_restarts", "Restarts of the engine process.", restarts)
        yield self._gauge(
            "mmjax:num_requests_processing",
            "Requests whose prompt is processed.",
            self._client.num_processing,
        )
        cache = self._client.input_processor.cache
        if cache is not None:
            info = cache.make_stats()
            yield self._counter("vllm:mm_cache_queries", "Items looked up in it.", info.total)
            yield self._counter("vllm:mm_cache_hits", "Items found in it.", info.hits)
            yield self._gauge("mmjax:processor_cache_bytes", "Of its items.", cache.currsize)
        store = self._client.input_processor.item_store
        if store is not None:
            disk = store.stats
            total = disk.hits + disk.misses
            yield self._counter("mmjax:mm_disk_queries", "Items looked up on disk.", total)
            yield self._counter("mmjax:mm_disk_hits", "Items found there.", disk.hits)
            yield self._counter("mmjax:mm_disk_read_bytes", "Bytes of these.", disk.bytes_read)
            yield self._counter(
                "mmjax:mm_disk_written_bytes", "Bytes written there.", disk.bytes_written
            )
        yield from self._engine_metrics(supervisor)

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
        return self._gauges(
            "mmjax:engine_resident_memory_bytes",
            "Of the engine process, by cause; the sum is all of it.",
            ("cause",),
            {(cause,): memory_bytes.get(cause, 0) for cause in MEMORY_CAUSES},
        )

    def _loras(self, heartbeat: Heartbeat) -> Metric:
        """Return one series, as vLLM has it: routers read which adapters are where."""
        running, waiting = (
            ",".join(sorted(names)) for names in (heartbeat.running_loras, heartbeat.waiting_loras)
        )
        return self._gauges(
            "vllm:lora_requests_info",
            "Adapters that requests run with, and wait with; the value is the time.",
            ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            {(str(self._max_loras), running, waiting): time.time()},
        )

    def _step_tokens(self, totals: Mapping[str, int]) -> Metric:
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
        return self._gauges(name, text, (), {(): value})

    def _gauges(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        values: Mapping[tuple[str, ...], float | int],
    ) -> Metric:
        """Return a value for each of some labels' values."""
        family = GaugeMetricFamily(name, text, labels=("model_name", *labels))
        for shown, value in values.items():
            family.add_metric((self._model, *shown), float(value))
        return family

    def _counter(self, name: str, text: str, value: float | int) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), float(value))
        return family


class _Totals:
    """Sums of P1's figures over its restarts, each of which begins at 0."""

    def __init__(self) -> None:
        self._of_earlier, self._last = TallyCounter[str](), TallyCounter[str]()
        self._num_restarts = 0

    def update(self, heartbeat: Heartbeat | None, num_restarts: int) -> TallyCounter[str]:
        """Return the sums with the last heartbeat's."""
        if num_restarts != self._num_restarts:
            self._num_restarts = num_restarts
            self._of_earlier += self._last
            self._last.clear()
        if heartbeat is not None:
            fields = [field for field, _ in _TOTALS.values()] + ["num_step_tokens"]
            self._last = TallyCounter({field: getattr(heartbeat, field) for field in fields})
            for number, count in enumerate(heartbeat.step_token_counts):
                self._last[f"step_token_counts.{number}"] = count
        return self._of_earlier + self._last
