"""The model runner: runs scheduled steps with the parameters, the caches and the jitted functions.

Every array on the device has its final size from the start.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np
from jaxtyping import Array

from mmjax.engine.device.batch import BatchBuilder
from mmjax.engine.device.encoder import EncoderCall, EncoderRows
from mmjax.engine.device.mesh import Call, Placement, SampleKind
from mmjax.engine.device.padding import PaddingCounter
from mmjax.engine.device.precomputed import WriteCall
from mmjax.engine.device.programs import Programs
from mmjax.engine.device.prompt_calls import PromptCall
from mmjax.engine.device.sample_tables import SampleTables, make_tables
from mmjax.engine.device.sampler import SampleOutput
from mmjax.engine.scheduling.buckets import (
    Buckets,
    SampleBucket,
    Sizes,
    StepBucket,
    next_bucket,
    split_calls,
)
from mmjax.engine.scheduling.outputs import (
    ModelRunnerOutput,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from mmjax.engine.scheduling.request import EncoderItem
from mmjax.layers.module import Params
from mmjax.system.logger import get_logger
from mmjax.transport.messages import TokenLogprobs
from mmjax.weights.adapter import fill_slot

logger = get_logger(__name__)


class InFlight(NamedTuple):
    """A step that was dispatched to the device."""

    sampled: list[ScheduledRequest]
    """Requests whose tokens it samples, in the order of their rows."""
    drawn: Array | SampleOutput
    """The sample; if nothing is sampled, an array that is ready once the step has run."""
    encoded: Array | None
    """Ready once its items are encoded; None: it has none."""
    reports: "Sequence[PromptReport]" = ()
    tables: SampleTables | None = None
    """Of a step that is not sampled yet: some of its masks are awaited."""
    late: Collection[str] = ()
    """Requests whose mask did not come in time: what was sampled for them is nobody's token."""


class PromptReport(NamedTuple):
    """Log-probabilities of tokens of one request's prompt."""

    scheduled: ScheduledRequest
    token_ids: np.ndarray
    """int32[tokens]: those behind the window's; some may have no logit."""
    drawn: Sequence[SampleOutput]
    """Their rows, in order."""


class ModelRunner:
    """Holds the device's arrays, and runs steps over them."""

    def __init__(
        self,
        programs: Programs,
        params: Params,
        *,
        num_blocks: int,
        block_size: int,
        max_blocks: int,
        has_spans: bool,
        placement: Placement,
        max_encoder_blocks: int = 0,
    ) -> None:
        self.buckets = programs.buckets
        self.ready = programs.buckets
        """The sizes that calls may have."""
        self.prepare: Callable[[Sizes], None] | None = None
        """Compiles the programs of sizes that are not compiled yet; None: those of `ready` are."""
        self._steps = self.buckets.steps
        self.rows = EncoderRows(programs.num_encoder_rows, programs.num_extra_rows)
        self._programs = programs
        self._params = params
        self._placement = placement
        self._encoder_calls = programs.encoder_calls
        self._num_blocks = num_blocks
        self._builder = BatchBuilder(
            num_blocks=num_blocks,
            block_size=block_size,
            max_blocks=max_blocks,
            max_num_seqs=self.buckets.sample[-1],
            rows_of=self.rows.get,
            has_spans=has_spans,
            max_encoder_blocks=max_encoder_blocks,
            has_adapters=programs.adapted is not None,
        )
        self._empty_tables = {
            num_rows: programs.empty_tables(num_rows) for num_rows in self.buckets.sample
        }
        self._no_tables = {
            num_rows: placement.put(tables) for num_rows, tables in self._empty_tables.items()
        }
        """For samples that need none; they stay on the device."""
        self._padding = PaddingCounter()
        self._encoded: Array | None = None
        """Ready once the last encoder call has run."""
        self._is_leading = False
        """Whether every call is broadcast to following processes."""
        self._has_tower_adapters = programs.adapted is not None and programs.adapted.has_towers
        self._make_arrays()

    def reset(self) -> None:
        """Reallocate all caches, after a failed step."""
        self._broadcast(Call.RESET)
        self.rows.reset()
        # The device has no room for both, and the exception's traceback may refer to the old ones.
        for array in jax.tree.leaves((self._state, self._pool, self._previous, self._adapters)):
            array.delete()
        self._make_arrays()

    def _make_arrays(self) -> None:
        self._state, self._pool, self._previous = self._programs.make_arrays(self._num_blocks)
        if self._programs.num_extra_rows:
            self._pool = self._programs.write_extra(params=self._params, pool=self._pool)
        self._adapters = self._programs.make_adapters()
        if self._adapters is not None:
            # Compiles it: no load will.
            self._run_load(0, {})

    # ---- one step ------------------------------------------------------------------------------

    def dispatch(self, output: SchedulerOutput) -> InFlight | None:
        """Encode, compute and sample without waiting for the device; None for an empty step.

        Tokens in flight are those of the previous dispatch's sample. A step that `awaits_masks` is
        computed, and not sampled: call `sample` when the one before was read.
        """
        for identifier in output.freed_identifiers:
            self.rows.free(identifier)
        for slot, adapter in output.adapter_loads:
            self._broadcast(Call.LOAD_ADAPTER, slot)
            self._run_load(slot, adapter.arrays)
        self._encoded = None
        self._encode_items(output.encoder_items)
        if not output.requests:
            return None
        bucket = self.ready.step_bucket(
            output.num_tokens,
            len(output.requests),
            has_spans=self._builder.needs_spans(output.requests),
            num_states=self._builder.count_states(output.requests),
            has_adapters=output.has_adapters,
        )
        logger.debug(
            "step: %d requests in %s, %d items encoded",
            *(len(output.requests), bucket, len(output.encoder_items)),
        )
        self._padding.add(bucket, output.num_tokens)
        packed, is_plain = self._builder.build(output.requests, bucket)
        rest = self._run_step(bucket, packed)
        reports = self._report_prompts(output.requests)
        sampled = [scheduled for scheduled in output.requests if scheduled.samples]
        if not sampled:
            return InFlight(sampled, rest, self._encoded, reports)
        size = next_bucket(self.ready.sample, len(sampled))
        tables = None if is_plain else make_tables(sampled, self._empty_tables[size])
        if output.awaits_masks:
            return InFlight(sampled, rest, self._encoded, reports, tables)
        drawn = self._run_sample(size, is_plain, rest, tables)
        return InFlight(sampled, drawn, self._encoded, reports)

    def sample(self, in_flight: InFlight, late: Collection[str] = ()) -> InFlight:
        """Sample a step that awaited masks; the requests that are `late` get no token."""
        rest = in_flight.drawn
        assert in_flight.tables is not None, "the step was sampled"
        assert not isinstance(rest, SampleOutput), "the step was sampled"
        masks = in_flight.tables.masks
        for row, scheduled in enumerate(in_flight.sampled):
            if scheduled.awaits_mask and scheduled.request.request_id not in late:
                masks[row] = scheduled.request.logit_rules.allowed_bits
        drawn = self._run_sample(len(masks), False, rest, in_flight.tables)
        return in_flight._replace(drawn=drawn, tables=None, late=late)

    def wait_encoded(self, in_flight: InFlight) -> None:
        """Wait for a step's items."""
        if in_flight.encoded is not None:
            jax.block_until_ready(in_flight.encoded)

    def read(self, in_flight: InFlight) -> ModelRunnerOutput:
        """Wait for a step, and return its sampled tokens."""
        output: ModelRunnerOutput = {}
        if in_flight.sampled:
            output = _read(in_flight.sampled, jax.device_get(in_flight.drawn))
        else:
            jax.block_until_ready(in_flight.drawn)
        for request_id in in_flight.late:
            del output[request_id]
        for report in in_flight.reports:
            logprobs = _read_report(report, self._programs.vocab_size)
            request_id = report.scheduled.request.request_id
            token = output.get(request_id, SampledToken())
            output[request_id] = msgspec.structs.replace(token, prompt_logprobs=logprobs)
        return output

    def _run_step(self, bucket: StepBucket, packed: np.ndarray) -> Array:
        if self._is_leading:
            self._broadcast(Call.STEP, self._steps.index(bucket))
        self._prepare(steps=(bucket,))
        self._state, rest = self._programs.step(
            bucket,
            params=self._params,
            state=self._state,
            pool=self._pool,
            previous=self._previous,
            packed=self._placement.put(packed),
            adapters=self._adapters if bucket.has_adapters else None,
        )
        return rest

    def _run_load(self, slot: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write an adapter to its slot; what it does not adapt is zero there."""
        assert self._adapters is not None, "the engine has no adapters"
        values = {
            name: fill_slot(name, arrays.get(name), leaf.shape, leaf.dtype)
            for name, leaf in self._adapters.items()
        }
        on_device = self._placement.put((np.int32(slot), values))
        self._adapters = self._programs.load_adapter(self._adapters, *on_device)

    def _report_prompts(self, requests: Sequence[ScheduledRequest]) -> list[PromptReport]:
        """Compute the log-probabilities of the prompts' tokens that the step's rows predict."""
        reports, first_row = [], 0
        for scheduled in requests:
            request = scheduled.request
            token_ids = request.prompt_between(scheduled.start + 1, scheduled.end + 1)
            if request.reports_prompt and len(token_ids):
                slot = request.adapter_slot
                drawn = list(self._report_tokens(first_row, token_ids, slot))
                reports.append(PromptReport(scheduled, token_ids, drawn))
            first_row += scheduled.num_tokens
        return reports

    def _report_tokens(
        self, row: int, token_ids: np.ndarray, adapter_slot: int
    ) -> Iterator[SampleOutput]:
        """Report tokens that rows from `row` on predict, in as many samples as that takes."""
        known = np.minimum(token_ids, self._programs.vocab_size - 1)
        start = 0
        for size, number in split_calls(self.ready.sample, len(token_ids)):
            chosen = slice(start, start + number)
            rows = np.arange(row + start, row + start + number, dtype=np.int32)
            packed = self._builder.build_reports(rows, known[chosen], adapter_slot)
            yield self._run_reports(size, packed)
            start += number

    def _run_reports(self, num_rows: int, packed: np.ndarray) -> SampleOutput:
        self._broadcast(Call.SAMPLE, num_rows, SampleKind.REPORTS)
        drawn = self._call_sample(num_rows, self._placement.put(packed), None, is_plain=False)
        assert isinstance(drawn, SampleOutput), "log-probabilities are of a full sample"
        return drawn

    def _run_sample(
        self, num_rows: int, is_plain: bool, rest: Array, tables: SampleTables | None = None
    ) -> Array | SampleOutput:
        self._broadcast(Call.SAMPLE, num_rows, _kind_of(tables, is_plain=is_plain))
        drawn = self._call_sample(num_rows, rest, tables, is_plain=is_plain)
        self._previous = drawn.token_ids if isinstance(drawn, SampleOutput) else drawn
        return drawn

    def _call_sample(
        self, num_rows: int, packed: Array, tables: SampleTables | None, *, is_plain: bool
    ) -> Array | SampleOutput:
        bucket = SampleBucket(num_rows, is_plain)
        self._prepare(sample=(bucket,))
        on_device = self._no_tables[num_rows]
        for name, table in () if tables is None else tables._asdict().items():
            if table is not None:
                on_device = on_device._replace(**{name: self._placement.put(table)})
        return self._programs.sample(
            bucket,
            params=self._params,
            hidden=self._state.hidden,
            packed=packed,
            tables=on_device,
            previous=self._previous,
            adapters=self._adapters,
        )

    def _run_encode(self, call: EncoderCall) -> None:
        size = len(next(iter(call.inputs.values())))
        self._broadcast(Call.ENCODE, size)
        self._prepare(encode=(size,))
        on_device = self._placement.put(call.inputs, self._encoder_calls.sharding(size))
        rows = self._placement.put(call.dst_rows)
        self._pool, self._encoded = self._programs.encode(
            size,
            params=self._params,
            pool=self._pool,
            inputs=on_device,
            dst_rows=rows,
            adapters=self._adapters if self._has_tower_adapters else None,
        )

    def _run_write(self, call: WriteCall) -> None:
        size = len(call.dst_rows)
        self._broadcast(Call.WRITE, size)
        self._prepare(write=(size,))
        embeds, rows = self._placement.put(tuple(call))
        self._pool = self._programs.write_rows(size, pool=self._pool, embeds=embeds, dst_rows=rows)

    def _run_encode_prompts(self, call: PromptCall) -> None:
        size = len(call.token_ids)
        self._broadcast(Call.ENCODE_PROMPTS, size)
        self._prepare(prompts=(size,))
        on_device = self._placement.put(call._asdict())
        self._pool, self._encoded = self._programs.encode_prompts(
            size, params=self._params, pool=self._pool, **on_device
        )

    def _prepare(self, **sizes: Any) -> None:
        if self.prepare is not None:
            self.prepare(Sizes(**sizes))

    def _encode_items(self, items: Sequence[EncoderItem]) -> None:
        """Encode, or write, the items that are not in the pool yet; then prompts with items."""
        new = [item for item in items if item.identifier not in self.rows]
        places = {item.identifier: self._allocate_rows(item) for item in new}
        encoded = [item for item in new if item.embeds is None and item.prompt is None]
        if encoded:
            rows = [places[item.identifier] for item in encoded]
            for call in self._encoder_calls.fill(encoded, rows, self.ready.encode):
                self._run_encode(call)
        written = [item for item in new if item.embeds is not None]
        if written:
            rows = [places[item.identifier] for item in written]
            for write in self._programs.precomputed.fill(written, rows, self.ready.write):
                self._run_write(write)
        states = [item for item in new if item.prompt is not None]
        prompt_calls = self._programs.prompt_calls
        for prompt_call in prompt_calls.fill(states, self.rows.get, self.ready.prompts):
            self._run_encode_prompts(prompt_call)

    def _allocate_rows(self, item: EncoderItem) -> np.ndarray:
        """Return where each of an item's outputs goes."""
        if item.rows is None:
            return self.rows.allocate(item.identifier, item.num_embeds)
        num_outputs = self._encoder_calls.count_outputs(item)
        return self.rows.allocate_chosen(item.identifier, item.rows, num_outputs)

    # ---- several processes ---------------------------------------------------------------------

    def wait(self) -> None:
        """Broadcast that there is no call, so that the followers' collective does not time out."""
        self._broadcast(Call.WAIT)

    def end(self) -> None:
        """Broadcast the end to the followers, and log what of the steps was padding."""
        self._broadcast(Call.END)
        self._is_leading = False
        for line in self._padding.describe():
            logger.info("%s", line)
        self._padding = PaddingCounter()

    def follow(self) -> None:
        """Make every call that the leader broadcasts, on its arrays, until it ends."""
        rest: Array | None = None
        while True:
            call, first, second = self._placement.receive_call()
            if call is Call.END:
                return
            if call is Call.RESET:
                self.reset()
            elif call is Call.ENCODE:
                self._run_encode(self._encoder_calls.empty(first))
            elif call is Call.WRITE:
                self._run_write(self._programs.precomputed.empty(first))
            elif call is Call.ENCODE_PROMPTS:
                self._run_encode_prompts(self._programs.prompt_calls.empty(first))
            elif call is Call.LOAD_ADAPTER:
                self._run_load(first, {})
            elif call is Call.STEP:
                bucket = self._steps[first]
                rest = self._run_step(bucket, self._builder.empty_step(bucket)[0])
            elif call is Call.SAMPLE:
                assert rest is not None, "a sample follows a step"
                self._follow_sample(first, SampleKind(second), rest)

    def _follow_sample(self, num_rows: int, kind: SampleKind, rest: Array) -> None:
        if kind is SampleKind.REPORTS:
            self._run_reports(num_rows, np.zeros(self._programs.sample_layout.size, np.int32))
            return
        empty = self._empty_tables[num_rows]
        tables = SampleTables(
            empty.history if SampleKind.HISTORY in kind else None,
            empty.masks if SampleKind.MASKS in kind else None,
            empty.edits if SampleKind.EDITS in kind else None,
        )
        self._run_sample(num_rows, kind is SampleKind.PLAIN, rest, tables)

    def _broadcast(self, call: Call, first: int = 0, second: int = 0) -> None:
        if self._is_leading:
            self._placement.broadcast_call(call, first, second)

    # ---- warm-up -------------------------------------------------------------------------------

    def warm_up(self, buckets: Buckets) -> None:
        """Run the programs of `buckets` on padding; compiles those that are not compiled."""
        for call in self._warm_up_calls(buckets):
            jax.block_until_ready(call())

    def lead(self) -> None:
        """Broadcast every call from now on, if there are processes that follow this one."""
        self._is_leading = self._placement.is_shared and self._placement.is_leader
        self.wait()

    def _warm_up_calls(self, buckets: Buckets) -> Iterator[Callable[[], Any]]:
        for bucket in buckets.encode:
            yield partial(self._run_encode, self._encoder_calls.empty(bucket))
        for size in buckets.write:
            yield partial(self._run_write, self._programs.precomputed.empty(size))
        for size in buckets.prompts:
            yield partial(self._run_encode_prompts, self._programs.prompt_calls.empty(size))
        for bucket in reversed(buckets.steps):
            yield partial(self._warm_up_step, bucket)
        for size in buckets.sample:
            for is_plain in (True, False):
                yield partial(self._warm_up_sample, buckets.steps[0], size, is_plain)

    def _warm_up_step(self, bucket: StepBucket) -> Array:
        packed, _ = self._builder.empty_step(bucket)
        return self._run_step(bucket, packed)

    def _warm_up_sample(self, bucket: StepBucket, num_rows: int, is_plain: bool) -> Any:
        rest = self._warm_up_step(bucket)
        return jax.device_get(self._run_sample(num_rows, is_plain, rest))


def _kind_of(tables: SampleTables | None, *, is_plain: bool) -> SampleKind:
    kind = SampleKind.PLAIN if is_plain else SampleKind.FULL
    if tables is None:
        return kind
    flags = (SampleKind.HISTORY, SampleKind.MASKS, SampleKind.EDITS)
    for flag, table in zip(flags, tables, strict=True):
        kind |= SampleKind.FULL if table is None else flag
    return kind


def _read(
    sampled: Sequence[ScheduledRequest], drawn: np.ndarray | SampleOutput
) -> ModelRunnerOutput:
    """Return each request's token, with log-probabilities where it asked for them."""
    if not isinstance(drawn, SampleOutput):
        tokens = drawn.tolist()
        return {
            scheduled.request.request_id: SampledToken(tokens[row])
            for row, scheduled in enumerate(sampled)
        }
    tokens = drawn.token_ids.tolist()
    output: ModelRunnerOutput = {}
    for row, scheduled in enumerate(sampled):
        num_wanted = scheduled.request.sampling_params.logprobs
        logprobs = None
        if num_wanted is not None:
            logprobs = _read_row(drawn, row, tokens[row], num_wanted)
        output[scheduled.request.request_id] = SampledToken(tokens[row], logprobs)
    return output


def _read_report(report: PromptReport, vocab_size: int) -> list[TokenLogprobs | None]:
    """Return the log-probabilities of each token; None for one that has no logit."""
    num_wanted = report.scheduled.request.sampling_params.prompt_logprobs or 0
    token_ids = report.token_ids.tolist()
    logprobs: list[TokenLogprobs | None] = []
    for drawn in jax.device_get(report.drawn):
        part = token_ids[len(logprobs) : len(logprobs) + len(drawn.ranks)]
        logprobs += [
            _read_row(drawn, row, token_id, num_wanted) if token_id < vocab_size else None
            for row, token_id in enumerate(part)
        ]
    return logprobs


def _read_row(drawn: SampleOutput, row: int, token_id: int, num_wanted: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_ids=[token_id, *drawn.top_token_ids[row, :num_wanted].tolist()],
        logprobs=[float(drawn.logprobs[row]), *drawn.top_logprobs[row, :num_wanted].tolist()],
        sampled_rank=int(drawn.ranks[row]),
    )
