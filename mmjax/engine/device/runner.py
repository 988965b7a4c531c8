"""The model runner: runs scheduled steps with the parameters, the caches and the jitted functions.

Every array on the device has its final size from the start.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax
import msgspec
import numpy as np
from jaxtyping import Array

from mmjax.cache.adapter_slots import NO_SLOT
from mmjax.cache.disk_store import DiskStoreStats
from mmjax.cache.stored_rows import StoredRows, UnsavedRows, make_row_key
from mmjax.engine.device.batch import BatchBuilder
from mmjax.engine.device.compilation import CompiledPrograms
from mmjax.engine.device.encoder import EncoderCall, EncoderRows
from mmjax.engine.device.host_pool import HostPool
from mmjax.engine.device.mesh import Call, SampleKind
from mmjax.engine.device.programs import HELD, AlignCall, HostCall, PoolCall, Programs
from mmjax.engine.device.sampler import SampleOutput, SampleTables, make_tables, read_logprobs
from mmjax.engine.scheduling.buckets import (
    ProgramKey,
    SampleBucket,
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
from mmjax.engine.scheduling.request import EncoderItem, Request
from mmjax.layers.cpu.storage import from_storage
from mmjax.layers.module import set_param
from mmjax.system.logger import get_logger
from mmjax.transport.messages import Alignment
from mmjax.weights.adapter import fill_slot

logger = get_logger(__name__)

_AHEAD_TOKENS, _AHEAD_BYTES = 1024, 2**24
"""Of KV blocks whose memory is taken while nothing runs, at most: a few milliseconds."""
_KINDS = (SampleKind.HISTORY, SampleKind.MASKS, SampleKind.EDITS)
"""Of a sample with each of `SampleTables`, in their order."""


class InFlight(NamedTuple):
    """A step that was dispatched to the device."""

    sampled: list[ScheduledRequest]
    """Requests whose tokens it samples, in the order of their rows."""
    drawn: Array | SampleOutput
    """The sample; if nothing is sampled, an array that is ready once the step has run."""
    encoded: Array | None
    """Ready once its items are encoded; None: it has none."""
    reports: "Sequence[PromptReport]" = ()
    alignments: "Sequence[AlignmentReport]" = ()
    unsaved: Sequence[UnsavedRows] = ()
    """Outputs of its encoder calls that are to be kept on disk."""
    found: Collection[str] = ()
    """What `Request.encoded` calls its items whose rows were found on disk."""
    tables: SampleTables | None = None
    """The tables of a step that is not sampled yet, since some of its masks are awaited."""
    pooled: "PooledRows | None" = None
    """Of an engine that samples nothing."""
    late: Collection[str] = ()
    """Requests whose mask did not come in time: what was sampled for them is nobody's token."""


class PooledRows(NamedTuple):
    """States that a step gives for vectors."""

    windows: Sequence[tuple[ScheduledRequest, int]]
    """Whose they are, and how many rows each has."""
    calls: Sequence[tuple[Array, int]]
    """The rows of all, in order, and how many of each array."""


class PromptReport(NamedTuple):
    """Log-probabilities of tokens of one request's prompt."""

    scheduled: ScheduledRequest
    token_ids: np.ndarray
    """int32[tokens]: those behind the window's; some may have no logit."""
    drawn: Sequence[SampleOutput]
    """Their rows, in order."""


class AlignmentReport(NamedTuple):
    """How much the tokens of one request's prompt attend to its encoder's states."""

    request: Request
    weights: Array
    """float32[heads, tokens, states], with padding."""


class ModelRunner:
    """Holds the device's arrays, and runs steps over them."""

    slot_lag: ClassVar[int] = 0
    """As of `BatchBuilder`."""

    def __init__(
        self,
        programs: Programs,
        compiled: CompiledPrograms,
        params: dict[Any, Any],
        *,
        num_blocks: int,
        has_spans: bool,
        host_pool: HostPool | None = None,
    ) -> None:
        """`host_pool`: of the blocks that are copied to host memory; None: none are."""
        self.host_pool = host_pool
        self.stored_rows: StoredRows | None = None
        """None: no encoder outputs are kept on disk."""
        self._disk_stats = DiskStoreStats()
        self._unsaved: UnsavedRows | None = None
        self._found: set[str] = set()
        self.buckets = programs.buckets
        self._keys = self.buckets.keys
        self._places = {key: place for place, key in enumerate(self._keys)}
        self._compiled = compiled
        self.rows = EncoderRows(programs.num_encoder_rows, programs.num_extra_rows)
        self._programs = programs
        self.params = params
        """By names of the tree; none while the weights are released."""
        self._params_by: dict[str, dict[str, Array]] = {}
        """By function, those that it reads, by name."""
        self._placement = programs.placement
        self._encoders = programs.encoders
        self._num_blocks = num_blocks
        self._builder = BatchBuilder(
            num_blocks=num_blocks,
            block_size=programs.block_size,
            sizes=programs.step_sizes,
            sample_layout=programs.sample_layout,
            rows_of=self.rows.get,
            has_spans=has_spans,
            slot_lag=self.slot_lag,
        )
        self._empty_tables = {
            num_rows: programs.empty_tables(num_rows) for num_rows in self.buckets.sample
        }
        self._no_tables = {
            num_rows: self._placement.put(tables) for num_rows, tables in self._empty_tables.items()
        }
        """For samples that need none; they stay on the device."""
        self._padding: Counter[tuple[StepBucket, str]] = Counter()
        """The number of "steps" of each bucket, and of the "tokens" in them."""
        self._encoded: Array | None = None
        """Ready once the last encoder call has run."""
        self._is_leading = False
        """Whether every call is broadcast to following processes."""
        self._num_ahead = min(
            _AHEAD_TOKENS // programs.block_size, _AHEAD_BYTES // max(programs.bytes_per_block, 1)
        )
        self._has_tower_adapters = programs.adapted is not None and programs.adapted.has_towers
        self.make_arrays()

    @property
    def pool(self) -> Array:
        """The rows of encoded items."""
        return self._pool

    @property
    def hidden(self) -> Array:
        """The states of the last step's tokens, in its order, and behind them others."""
        return self._state.hidden

    def reset(self) -> None:
        """Reallocate all caches, after a failed step."""
        self._broadcast(Call.RESET)
        if self.host_pool is not None:
            self.host_pool.settle(has_failed=True)
        # The device has no room for both, and the exception's traceback may refer to the old ones.
        self.release_arrays()
        self.make_arrays()

    def release_arrays(self) -> None:
        """Free all caches, and what is in them; until `make_arrays` nothing can be computed."""
        self.rows.reset()
        for array in jax.tree.leaves((self._state, self._pool, self._previous, self._adapters)):
            if not array.is_deleted():
                array.delete()

    def replace_param(self, name: str, array: Array) -> None:
        """Put an array, placed as the programs have it, in the place of a parameter."""
        set_param(self.params, name, array)
        # The former array goes now, or two would be held of each.
        self._params_by.clear()

    def release_params(self) -> None:
        """Drop all parameters."""
        self.params.clear()
        self._params_by.clear()

    def select_params(self, function: str) -> dict[str, Array]:
        """Return by name the parameters that "step", "sample" or "pool" is called with."""
        found = self._params_by.get(function)
        if found is None:
            found = self._params_by[function] = self._programs.select_params(function, self.params)
        return found

    def write_extra(self) -> None:
        """Write the model's learned embeddings to the pool, as the parameters have them now."""
        if self._programs.num_extra_rows:
            self._pool = self._programs.write_extra(params=self.params, pool=self._pool)

    def make_arrays(self) -> None:
        """Allocate all caches."""
        self.num_taken = 0
        """Of the first KV blocks, those whose memory was taken before they are written."""
        self._state, self._pool, self._previous = self._programs.make_arrays(self._num_blocks)
        self.write_extra()
        self._adapters = self._programs.make_adapters()
        # What has one program is compiled as it runs here: no step will.
        if self._adapters is not None:
            self._run_load(0, {})
        if self._programs.num_state_slots:
            self._run_copy(0, 0)
        if self.host_pool is not None:
            self._state = self._state._replace(
                kv_cache=self.host_pool.warm_up(self._state.kv_cache)
            )

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
        self.move_blocks(output)
        self._encoded = self._unsaved = None
        self._found = set()
        self._encode_items(output.encoder_items)
        if not output.requests:
            return None
        ready = self._compiled.ready
        bucket = ready.step_bucket(
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
        self._padding[bucket, "steps"] += 1
        self._padding[bucket, "tokens"] += output.num_tokens
        packed, is_plain = self._builder.build(output.requests, bucket)
        self._copy_states(output.restored_states)
        rest = self._run_step(bucket, packed)
        self._copy_states(output.kept_states)
        in_flight = InFlight(
            [scheduled for scheduled in output.requests if scheduled.samples],
            rest,
            self._encoded,
            self._report_prompts(output.requests),
            alignments=[
                self._align(scheduled.request)
                for scheduled in output.requests
                if scheduled.num_new_states and scheduled.request.sampling_params.alignment
            ],
            unsaved=() if self._unsaved is None else (self._unsaved,),
            found=self._found,
        )
        if self.buckets.pools:
            return in_flight._replace(pooled=self._pool_states(output.requests))
        sampled = in_flight.sampled
        if not sampled:
            return in_flight
        size = next_bucket(ready.sample, len(sampled))
        tables = None if is_plain else make_tables(sampled, self._empty_tables[size])
        if output.awaits_masks:
            return in_flight._replace(tables=tables)
        drawn = self._run_sample(SampleBucket(size, is_plain), rest, tables)
        return in_flight._replace(drawn=drawn)

    def sample(self, in_flight: InFlight, late: Collection[str] = ()) -> InFlight:
        """Sample a step that awaited masks; the requests that are `late` get no token."""
        rest = in_flight.drawn
        assert in_flight.tables is not None, "the step was sampled"
        assert not isinstance(rest, SampleOutput), "the step was sampled"
        masks = in_flight.tables.masks
        for row, scheduled in enumerate(in_flight.sampled):
            if scheduled.awaits_mask and scheduled.request.request_id not in late:
                masks[row] = scheduled.request.logit_rules.allowed_bits
        drawn = self._run_sample(SampleBucket(len(masks), False), rest, in_flight.tables)
        return in_flight._replace(drawn=drawn, tables=None, late=late)

    def wait_encoded(self, in_flight: InFlight) -> None:
        """Wait for a step's items."""
        if in_flight.encoded is not None:
            jax.block_until_ready(in_flight.encoded)

    def read(self, in_flight: InFlight) -> ModelRunnerOutput:
        """Wait for a step, and return its sampled tokens."""
        output: ModelRunnerOutput = {}
        if in_flight.pooled is not None:
            output = _read_pooled(in_flight.pooled)
        elif in_flight.sampled:
            drawn = in_flight.drawn
            is_full = isinstance(drawn, SampleOutput)
            output = _read(in_flight.sampled, jax.device_get(drawn) if is_full else drawn)
        else:
            jax.block_until_ready(in_flight.drawn)
        for request_id in in_flight.late:
            del output[request_id]
        for report in in_flight.reports:
            request = report.scheduled.request
            num_wanted = request.sampling_params.prompt_logprobs or 0
            drawn, token_ids = jax.device_get(report.drawn), report.token_ids.tolist()
            logprobs = read_logprobs(drawn, token_ids, num_wanted, self._programs.vocab_size)
            (token,) = output.get(request.request_id, [SampledToken()])
            output[request.request_id] = [msgspec.structs.replace(token, prompt_logprobs=logprobs)]
        for request, weights in in_flight.alignments:
            (token,) = output.get(request.request_id, [SampledToken()])
            alignment = _cut_alignment(request, jax.device_get(weights))
            output[request.request_id] = [msgspec.structs.replace(token, alignment=alignment)]
        for unsaved in in_flight.unsaved:
            self._save(unsaved)
        return output

    def read_embeds(self, identifier: str) -> np.ndarray | None:
        """Return an item's embeddings, `[rows, D]`; None: they are not in the pool."""
        if identifier not in self.rows:
            return None
        return np.asarray(from_storage(self._pool[self.rows.get(identifier)]))

    def _run_step(self, bucket: StepBucket, packed: np.ndarray) -> Array:
        self._lead("step", bucket)
        self._state, rest = self._compiled(
            "step",
            bucket,
            params=self.select_params("step"),
            state=self._state,
            pool=self.pool,
            previous=self._previous,
            packed=self._placement.give(packed),
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

    def move_blocks(self, output: SchedulerOutput) -> None:
        """Copy evicted KV blocks to host memory, and those back that were found elsewhere."""
        if self.host_pool is not None:
            kv_cache = self.host_pool.move(
                self._state.kv_cache, output.copied_blocks, output.restored_blocks
            )
            self._state = self._state._replace(kv_cache=kv_cache)

    def _copy_states(self, slots: Sequence[tuple[int, int]]) -> None:
        for source, target in slots:
            self._broadcast(Call.COPY_STATES, source, target)
            self._run_copy(source, target)

    def _run_copy(self, source: int, target: int) -> None:
        """Copy recurrent layers' states from one slot to another."""
        on_device = self._placement.put((np.int32(source), np.int32(target)))
        kv_cache = self._programs.copy_states(self._state.kv_cache, *on_device)
        self._state = self._state._replace(kv_cache=kv_cache)

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
        rows = np.arange(row, row + len(token_ids), dtype=np.int32)
        for size, chosen in split_calls(self._compiled.ready.sample, len(token_ids)):
            packed = self._builder.build_reports(rows[chosen], known[chosen], adapter_slot)
            yield self._run_reports(size, packed)

    def _align(self, request: Request) -> AlignmentReport:
        """Align a request's prompt with its encoder's states, which are in the pool."""
        assert request.encoder is not None, "a request without an encoder's states is aligned"
        call = self._programs.empty_call("align", *self.buckets.align)
        assert isinstance(call, AlignCall), f"{call=} aligns nothing"
        call.token_ids[: request.num_prompt_tokens] = request.prompt_token_ids
        call.state_rows[: request.encoder_len] = self.rows.get(request.encoder.identifier)
        return AlignmentReport(request, self._run("align", call))

    def _run(self, function: str, call: HostCall) -> Any:
        """Call a program with the host's arguments; keep its pool, and return all that it gives."""
        size = len(call[0])
        self._lead(function, size)
        arguments = self._placement.put(call._asdict())
        held = {"params": self.params, "pool": self._pool, "hidden": self._state.hidden}
        arguments |= {name: held[name] for name in HELD[function]}
        if function == "pool":
            arguments |= {"params": self.select_params("pool")}
        result = self._compiled(function, size, **arguments)
        if function == "write":
            self._pool = result
        elif function == "encode prompts":
            self._pool, self._encoded = result
        return result

    def _run_reports(self, num_rows: int, packed: np.ndarray) -> SampleOutput:
        bucket = SampleBucket(num_rows, is_plain=False)
        self._lead("sample", bucket, SampleKind.REPORTS)
        drawn = self._call_sample(bucket, self._placement.put(packed))
        assert isinstance(drawn, SampleOutput), "log-probabilities are of a full sample"
        return drawn

    def _run_sample(
        self, bucket: SampleBucket, rest: Array, tables: SampleTables | None = None
    ) -> Array | SampleOutput:
        self._lead("sample", bucket, SampleKind.NO_TABLES if tables is None else _kind_of(tables))
        drawn = self._call_sample(bucket, rest, tables)
        self._previous = drawn.token_ids if isinstance(drawn, SampleOutput) else drawn
        return drawn

    def _call_sample(
        self, bucket: SampleBucket, packed: Array, tables: SampleTables | None = None
    ) -> Array | SampleOutput:
        on_device = self._no_tables[bucket.num_rows]
        for name, table in () if tables is None else tables._asdict().items():
            if table is not None:
                on_device = on_device._replace(**{name: self._placement.put(table)})
        return self._compiled(
            "sample",
            bucket,
            params=self.select_params("sample"),
            hidden=self._state.hidden,
            packed=packed,
            tables=on_device,
            previous=self._previous,
            adapters=self._adapters,
        )

    def _pool_states(self, requests: Sequence[ScheduledRequest]) -> PooledRows | None:
        """Compute what becomes vectors of a step's rows; None: of none of them."""
        windows: list[tuple[ScheduledRequest, int]] = []
        parts: list[np.ndarray] = []
        first_row = 0
        for scheduled in requests:
            end = scheduled.end
            start = scheduled.request.find_pooled(scheduled.start, end)
            if start < end:
                windows.append((scheduled, end - start))
                parts.append(np.arange(start, end, dtype=np.int32) + (first_row - scheduled.start))
            first_row += scheduled.num_tokens
        if not parts:
            return None
        rows, calls = np.concatenate(parts), list[tuple[Array, int]]()
        for size, chosen in split_calls(self._compiled.ready.pool, len(rows)):
            packed, number = np.zeros(size, np.int32), chosen.stop - chosen.start
            packed[:number] = rows[chosen]
            calls.append((self._run("pool", PoolCall(packed)), number))
        return PooledRows(windows, calls)

    def _run_encode(self, call: EncoderCall) -> None:
        self._lead(call.function, call.bucket)
        calls = self._encoders.by_function[call.function]
        sharding = calls.sharding(len(next(iter(call.inputs.values()))))
        self._pool, self._encoded = self._compiled(
            call.function,
            call.bucket,
            params=self.params,
            pool=self._pool,
            inputs=self._placement.put(call.inputs, sharding),
            dst_rows=self._placement.put(call.dst_rows),
            adapters=self._adapters if self._has_tower_adapters else None,
        )

    def _encode_items(self, items: Sequence[EncoderItem]) -> None:
        """Encode, or write, the items that are not in the pool yet; then prompts with items."""
        new = [item for item in items if item.identifier not in self.rows]
        ready = self._compiled.ready
        encoders = self._encoders
        places = {item.identifier: encoders.allocate(item, self.rows) for item in new}
        encoded = [item for item in new if item.embeds is None and item.prompt is None]
        written = [item for item in new if item.embeds is not None]
        encoded, found, keys = self._load(encoded)
        written += found
        places |= {item.identifier: self.rows.held(item.identifier) for item in written}
        if encoded:
            rows = [places[item.identifier] for item in encoded]
            calls = self._run_encoders(encoded, rows, returns=bool(keys))
            held = {key: self.rows.held(identifier) for key, identifier in keys.items()}
            self._unsaved = UnsavedRows(held, calls) if keys else None
        if written:
            rows = [places[item.identifier] for item in written]
            for write in self._programs.write_calls.fill(written, rows, ready.write):
                self._run("write", write)
        states = [item for item in new if item.prompt is not None]
        prompt_calls = self._programs.prompt_calls
        for prompt_call in prompt_calls.fill(states, self.rows.get, ready.prompts):
            self._run("encode prompts", prompt_call)

    def _run_encoders(
        self, items: Sequence[EncoderItem], rows: Sequence[np.ndarray], *, returns: bool
    ) -> list[tuple[np.ndarray, Array]]:
        """Encode items into rows of the pool; return `UnsavedRows.calls` where they are kept."""
        calls: list[tuple[np.ndarray, Array]] = []
        for call in self._encoders.fill(items, rows, self._compiled.ready.encode_sizes):
            self._run_encode(call)
            if returns and self._encoded is not None:
                self._encoded.copy_to_host_async()
                calls.append((call.dst_rows, self._encoded))
        return calls

    def encode_apart(self, items: Mapping[bytes, EncoderItem]) -> dict[bytes, np.ndarray]:
        """Encode items outside of any step; return the rows of each, which leave the pool."""
        rows = [self._encoders.allocate(item, self.rows) for item in items.values()]
        calls = self._run_encoders(list(items.values()), rows, returns=True)
        held = {key: self.rows.held(item.identifier) for key, item in items.items()}
        for item in items.values():
            self.rows.free(item.identifier)
        return dict(UnsavedRows(held, calls).read())

    # ---- encoder outputs on disk ---------------------------------------------------------------

    def forget_stored_rows(self) -> None:
        """Neither find nor keep any more: the encoders are no longer those of the files' name."""
        if self.stored_rows is not None:
            self.stored_rows.close()
            self._disk_stats = self.stored_rows.stats
            self.stored_rows = None

    @property
    def disk_stats(self) -> DiskStoreStats:
        return self._disk_stats if self.stored_rows is None else self.stored_rows.stats

    def _load(
        self, items: Sequence[EncoderItem]
    ) -> tuple[list[EncoderItem], list[EncoderItem], dict[bytes, str]]:
        """Look items up; return those to encode, those found with their rows, and keys to keep.

        The keys' values are identifiers. What adapters encode is neither found nor kept: their
        names and versions are this process's.
        """
        if self.stored_rows is None:
            return list(items), [], {}
        encoded: list[EncoderItem] = []
        found: list[EncoderItem] = []
        keys: dict[bytes, str] = {}
        for item in items:
            if self._has_tower_adapters and item.adapter_slot != NO_SLOT:
                encoded.append(item)
                continue
            key = make_row_key(item.identifier, item.units, item.rows)
            rows = self.stored_rows.load(key, len(self.rows.held(item.identifier)))
            if rows is None:
                encoded.append(item)
                keys[key] = item.identifier
            else:
                found.append(replace(item, embeds=rows))
                self._found.add(item.mm_hash or item.identifier)
        return encoded, found, keys

    def _save(self, unsaved: UnsavedRows) -> None:
        """Have what was encoded in a step, which is done, written to disk."""
        if self.stored_rows is None:
            return
        for key, rows in unsaved.read():
            self.stored_rows.save(key, rows)

    # ---- several processes ---------------------------------------------------------------------

    def wait(self) -> None:
        """Broadcast that there is no call, so that the followers' collective does not time out."""
        self._broadcast(Call.WAIT)

    def end(self) -> None:
        """Broadcast the end to the followers, and log how many rows of the steps were padding."""
        self._broadcast(Call.END)
        self._is_leading = False
        for bucket in sorted({bucket for bucket, _ in self._padding}):
            num_steps, num_tokens = (self._padding[bucket, of] for of in ("steps", "tokens"))
            logger.info(
                "steps of %d tokens x %d requests: %d, %.0f%% padding",
                *(bucket.num_tokens, bucket.num_requests, num_steps),
                100 * (1 - num_tokens / (num_steps * bucket.num_tokens)),
            )
        self._padding.clear()

    def lead(self) -> None:
        """Broadcast every call from now on, if there are processes that follow this one."""
        self._is_leading = self._placement.is_shared and self._placement.is_leader
        self.wait()

    def follow(self) -> None:
        """Make every call that the leader broadcasts, on its arrays, until it ends."""
        rest: Array | None = None
        while True:
            call, first, second = self._placement.receive_call()
            if call is Call.END:
                return
            if call is Call.RESET:
                self.reset()
            elif call is Call.LOAD_ADAPTER:
                self._run_load(first, {})
            elif call is Call.COPY_STATES:
                self._run_copy(first, second)
            elif call is Call.RUN:
                rest = self._run_padding(self._keys[first], rest, SampleKind(second))

    def warm_up(self, keys: Iterable[ProgramKey]) -> None:
        """Run programs on padding, those of steps before those of samples."""
        rest: Array | None = None
        for key in keys:
            rest = self._run_padding(key, rest)
            jax.block_until_ready((self._state, self._pool))
        jax.device_get(self._previous)

    def run_ahead(self, num_used: int) -> bool:
        """Run one program for the first time, on padding; False: none is left that is worth it.

        So no request waits for what a first run prepares: products of XLA's library on the CPU, one
        to three milliseconds each, kernels and graphs on a GPU. Nor does it for the memory of the
        first blocks behind those `num_used` ones that were ever written. Nothing may be in flight.
        """
        num_taken = min(num_used + self._num_ahead, self._num_blocks)
        if self.num_taken < num_taken:
            self._programs.take_blocks(self._state.kv_cache, self.num_taken, num_taken)
            self.num_taken = num_taken
        return not self._placement.is_shared and self._compiled.run_ahead(self._run_first)

    def _run_first(self, key: ProgramKey) -> None:
        packed = np.zeros(self._programs.sample_layout.size, np.int32)
        self._run_padding(key, self._placement.put(packed))
        jax.block_until_ready((self._state, self._pool, self._previous))

    def _run_padding(
        self, key: ProgramKey, rest: Array | None, kind: SampleKind = SampleKind.NO_TABLES
    ) -> Array | None:
        """Run a program on arrays of padding, or on the leader's; return the `rest` of a step."""
        function, size = key
        if function == "step":
            return self._run_step(size, self._builder.empty_step(size)[0])
        if function in self._encoders.by_function:
            self._run_encode(self._encoders.by_function[function].empty(size))
        elif function != "sample":
            result = self._run(function, self._programs.empty_call(function, size))
            if function == "pool":
                jax.block_until_ready(result)
        elif kind is SampleKind.REPORTS:
            packed = np.zeros(self._programs.sample_layout.size, np.int32)
            self._run_reports(size.num_rows, packed)
        else:
            assert rest is not None, "a sample follows a step"
            empty = zip(_KINDS, self._empty_tables[size.num_rows], strict=True)
            tables = SampleTables(*(table if flag in kind else None for flag, table in empty))
            self._run_sample(size, rest, tables)
        return rest

    def _lead(self, function: str, size: Any, kind: SampleKind = SampleKind.NO_TABLES) -> None:
        """Broadcast that a program is called next."""
        if self._is_leading:
            self._broadcast(Call.RUN, self._places[ProgramKey(function, size)], kind)

    def _broadcast(self, call: Call, first: int = 0, second: int = 0) -> None:
        if self._is_leading:
            self._placement.broadcast_call(call, first, second)


def _kind_of(tables: SampleTables) -> SampleKind:
    given = zip(_KINDS, tables, strict=True)
    return SampleKind(sum(kind for kind, table in given if table is not None))


def _read(sampled: Sequence[ScheduledRequest], drawn: Array | SampleOutput) -> ModelRunnerOutput:
    """Return each request's tokens, with log-probabilities where it asked for them."""
    full = drawn if isinstance(drawn, SampleOutput) else None
    tokens = np.asarray(drawn if full is None else full.token_ids).tolist()
    output: ModelRunnerOutput = {}
    for row, scheduled in enumerate(sampled):
        num_wanted = scheduled.request.sampling_params.logprobs
        logprobs = None
        if full is not None and num_wanted is not None:
            logprobs = full.read(row, tokens[row], num_wanted)
        token = SampledToken(tokens[row], logprobs)
        output.setdefault(scheduled.request.request_id, []).append(token)
    return output


def _cut_alignment(request: Request, weights: np.ndarray) -> Alignment:
    wanted = request.sampling_params.alignment
    assert wanted is not None, "no alignment was asked for"
    cut = weights[:, wanted.first_token : request.num_prompt_tokens, : wanted.num_states]
    heads, tokens, states = cut.shape
    return Alignment(weights=cut.astype("<f4").tobytes(), shape=(heads, tokens, states))


def _read_pooled(pooled: PooledRows) -> ModelRunnerOutput:
    """Return the states of each request's window."""
    states = np.concatenate([jax.device_get(array)[:number] for array, number in pooled.calls])
    output: ModelRunnerOutput = {}
    start = 0
    for scheduled, number in pooled.windows:
        part = states[start : start + number]
        output[scheduled.request.request_id] = [SampledToken(states=part)]
        start += number
    return output
