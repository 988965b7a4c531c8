"""The arrays of one step from scheduled windows: packed on the host, unpacked under jit.

`StepBatch` and `SampleBatch` say what the fields are; their layout in one flat buffer follows from
the shapes there. All are int32 in it (floats as their bits), so that a step is one transfer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from mmjax.cache.adapter_slots import NO_SLOT
from mmjax.engine.scheduling.buckets import StepBucket
from mmjax.engine.scheduling.outputs import ScheduledRequest
from mmjax.engine.scheduling.request import NUM_MASKED, Request
from mmjax.layers.attention.api import CrossAttentionMetadata, PagedAttentionMetadata
from mmjax.layers.attention.metadata import StateMetadata
from mmjax.rounding import cdiv

NO_TOKEN = np.iinfo(np.int32).max
"""Padding of lists of token ids: beyond every vocabulary, so that a scatter drops it."""
NOWHERE = np.iinfo(np.int32).max
"""A slot of states that there is not: what is written there is dropped."""
ADAPTER_SLOTS = "adapter_slots"
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NESTED = {"cross": CrossAttentionMetadata, "states": StateMetadata}
"""Parts of the metadata that some models have: `cross_lengths` is the `lengths` of `cross`."""


class StepBatch(NamedTuple):
    """The input of `step`, besides parameters and caches."""

    token_ids: Int[Array, " T"]
    token_from: Int[Array, " T"]
    """Row of the previous sample that is the token, or -1."""
    positions: Int[Array, "3 T"]
    src_index: Int[Array, " T"]
    """Row of the encoder-output pool; -1 for text."""
    metadata: PagedAttentionMetadata
    cross_src: Int[Array, " S"] | None = None
    """Row of the pool of each encoder hidden state to write; None for a decoder-only model."""
    adapter_slots: Int[Array, " T"] | None = None
    """Where each token's adapter is; -1: it has none. None: no token of the step has one."""


class SampleBatch(NamedTuple):
    """The input of `sample`, besides parameters and hidden states."""

    rows: Int[Array, " R"]
    """Rows of the hidden states; padding: 0."""
    positions: Int[Array, " R"]
    """Position of the new token in its sequence."""
    seeds: UInt32[Array, "R 2"]
    top_k: Int[Array, " R"]
    """0 or below: all."""
    temperature: Float[Array, " R"]
    """0: greedy."""
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    masked_token_ids: Int[Array, "R _masked"]
    """Ids masked by `min_tokens`; padding: `NO_TOKEN`."""
    token_from: Int[Array, " R"]
    """Row of the previous sample that is the sequence's last token, or -1."""
    ngram_sizes: Int[Array, " R"]
    """`no_repeat_ngram_size`; 0: no limit."""
    ngram_windows: Int[Array, " R"]
    """How many of the last tokens that is about; 0: all."""
    prompt_lengths: Int[Array, " R"]
    """Tokens that repetition penalties count, and presence and frequency penalties do not."""
    repetition_penalty: Float[Array, " R"]
    """0 for rows without penalties, as the other two: it leaves the logits as they are."""
    presence_penalty: Float[Array, " R"]
    frequency_penalty: Float[Array, " R"]
    reports_masked: Int[Array, " R"]
    """1: log-probabilities are of what the row's mask leaves, as vLLM's with a grammar."""
    timestamps_from: Int[Array, " R"]
    """The first timestamp of a transcript that has some; 0: the row is none."""
    reported: Int[Array, " R"]
    """The token whose log-probability is wanted, and 1 added; 0: the sampled one."""
    has_filters: Int[Array, ""]
    """Whether any row has top-k, top-p or min-p: the rows are sorted only then."""
    has_logprobs: Int[Array, ""]
    has_masks: Int[Array, ""]
    """Whether the tables' masks are to be read; so, too, of edits and penalties."""
    has_edits: Int[Array, ""]
    has_penalties: Int[Array, ""]
    adapter_slots: Int[Array, " R"] | None = None
    """Where each row's adapter is; -1: it has none. None: the engine has no adapters."""


@dataclass(frozen=True)
class Layout:
    """Offsets of named int32 fields in one flat buffer."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @cached_property
    def slices(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Field -> (its slice of the buffer, its shape)."""
        slices, start = {}, 0
        for name, shape in self.shapes:
            slices[name] = (slice(start, start + prod(shape)), shape)
            start += prod(shape)
        return slices

    @cached_property
    def size(self) -> int:
        """Length of the buffer."""
        return sum(prod(shape) for _, shape in self.shapes)

    def views(self, flat: Any) -> dict[str, Any]:
        """Return the fields: views of a numpy buffer, slices of a traced one."""
        return {name: flat[part].reshape(shape) for name, (part, shape) in self.slices.items()}


PADDING: Mapping[str, int] = {"token_from": -1, "src_index": -1, ADAPTER_SLOTS: NO_SLOT}
"""What stands in a step's fields where no token does, if that is not 0."""


def _find_fields(batch: type) -> Iterator[tuple[str, Any]]:
    """Yield the names and jaxtyping's types of a tuple's arrays."""
    for name, annotation in batch.__annotations__.items():
        for kind in (annotation, *get_args(annotation)):
            if hasattr(kind, "dim_str"):
                yield name, kind


def _find_shapes(batch: type, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tuple's arrays whose axes have `sizes`."""
    axes = {name: kind.dim_str.split() for name, kind in _find_fields(batch)}
    return {
        name: tuple(int(axis) if axis.isdecimal() else sizes[axis] for axis in own)
        for name, own in axes.items()
        if all(axis in sizes or axis.isdecimal() for axis in own)
    }


class StepSizes(NamedTuple):
    """What a step's fields depend on besides its bucket."""

    max_blocks: int
    """Of a request's block table."""
    max_encoder_blocks: int = 0
    """Of its table for cross-attention; 0: the model is a decoder alone."""
    attends_to_items: bool = False
    """As of `HostInputs`."""
    states_per_seq: int = 0
    """Of recurrent layers; 0: the model has none."""


@cache
def step_layout(bucket: StepBucket, sizes: StepSizes) -> Layout:
    """Return the fields of a `StepBatch` of one bucket, and of its metadata.

    Encoder-decoder models also have those of `CrossAttentionMetadata`, named `cross_...`, `seen`
    among them where tokens attend to some of the hidden states (`HostInputs.attends_to_items`), and
    models with recurrent layers, of which a request has some states, those of `StateMetadata`,
    named `states_...`.
    """
    axes = {
        "T": bucket.num_tokens,
        "R": bucket.num_requests,
        "W": bucket.num_tiles,
        "Z": bucket.tile_size,
        "_blocks": sizes.max_blocks,
    }
    shapes = _find_shapes(StepBatch, axes) | _find_shapes(PagedAttentionMetadata, axes)
    if not bucket.has_spans:
        del shapes["span_end"]
    if not bucket.has_adapters:
        del shapes[ADAPTER_SLOTS]
    if sizes.max_encoder_blocks:
        axes |= {"S": bucket.num_states, "_blocks": sizes.max_encoder_blocks}
        cross = _find_shapes(CrossAttentionMetadata, axes)
        if not sizes.attends_to_items:
            del cross["seen"]
        shapes |= {f"cross_{name}": shape for name, shape in cross.items()}
        shapes["cross_src"] = (bucket.num_states,)
    if sizes.states_per_seq:
        # A step of decoding has windows of one token alone, and no other has guesses.
        is_decoding = bucket.tile_size == 1
        chunks = {} if is_decoding else {"_chunks": bucket.num_tokens}
        states = _find_shapes(StateMetadata, {"R": bucket.num_requests, **chunks})
        if is_decoding:
            del states["num_chunks"]
        if not is_decoding or sizes.states_per_seq == 1:
            del states["depths"]
        shapes |= {f"states_{name}": shape for name, shape in states.items()}
    return Layout(tuple(shapes.items()))


def sample_layout(num_requests: int, *, has_adapters: bool = False) -> Layout:
    """Return the fields of a `SampleBatch` of one bucket."""
    shapes = _find_shapes(SampleBatch, {"R": num_requests, "_masked": NUM_MASKED})
    if not has_adapters:
        del shapes[ADAPTER_SLOTS]
    return Layout(tuple(shapes.items()))


def unpack_step(layout: Layout, flat: Int[Array, " size"]) -> StepBatch:
    """Return the batch of a packed buffer, under jit."""
    fields: dict[str, Any] = {"span_end": None, **layout.views(flat)}
    head = {name: fields.pop(name) for name in StepBatch._fields if name in fields}
    for part, kind in _NESTED.items():
        names = {name: f"{part}_{name}" for name in kind._fields}
        own = {name: fields.pop(field) for name, field in names.items() if field in fields}
        if own:
            fields[part] = kind(**own)
    return StepBatch(**head, metadata=PagedAttentionMetadata(**fields))


def add_padding_row(batch: StepBatch) -> StepBatch:
    """Return the batch with one row more, which is nobody's token: no tile asks for it."""
    num_rows, tile_rows = len(batch.token_ids), batch.metadata.tile_rows
    metadata = _add_row(batch.metadata, {"slot_block": jnp.iinfo(jnp.int32).max})
    if metadata.cross is not None:
        metadata = metadata._replace(cross=_add_row(metadata.cross, {}))
    tile_rows = jnp.where(tile_rows < num_rows, tile_rows, num_rows + 1)
    return _add_row(batch, PADDING)._replace(metadata=metadata._replace(tile_rows=tile_rows))


def _add_row(batch: Any, padding: Mapping[str, int]) -> Any:
    """Pad the arrays of a tuple whose last axis is that of tokens."""
    padded = {}
    for name, kind in _find_fields(type(batch)):
        field = getattr(batch, name)
        if field is not None and kind.dim_str.endswith("T"):
            widths = [(0, 0)] * (field.ndim - 1) + [(0, 1)]
            padded[name] = jnp.pad(field, widths, constant_values=padding.get(name, 0))
    return batch._replace(**padded)


def unpack_sample(layout: Layout, flat: Int[Array, " size"], num_rows: int) -> SampleBatch:
    """Return the first rows of a packed batch, floats and seeds restored, under jit."""
    fields = layout.views(flat)
    for name, kind in _find_fields(SampleBatch):
        if name in fields and fields[name].ndim:
            wanted = next(one for one in ("int32", "uint32", "float32") if one in kind.dtypes)
            fields[name] = jax.lax.bitcast_convert_type(fields[name][:num_rows], wanted)
    return SampleBatch(**fields)


class BatchBuilder:
    """Writes scheduled windows into padded buffers."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        sizes: StepSizes,
        sample_layout: Layout,
        rows_of: Callable[[str], np.ndarray],
        has_spans: bool,
        slot_lag: int = 0,
    ) -> None:
        """`slot_lag`: how many slots before its own a token stands; the first are in no window.

        Of a layer that reads the state of the token before (`MtpTextModel`).
        """
        self._slot_lag = slot_lag
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sizes = sizes
        self.sample_layout = sample_layout
        """Layout of the sample that follows every packed step; the same for all buckets."""
        self.rows_of = rows_of
        """identifier -> rows of the encoder-output pool, int32[embeddings]."""
        self.has_spans = has_spans
        self._padding: dict[StepBucket, np.ndarray] = {}
        """Buffers of padding, which are copied."""

    def layout(self, bucket: StepBucket) -> Layout:
        """Return the layout of a step of one bucket."""
        return step_layout(bucket, self.sizes)

    def empty_step(self, bucket: StepBucket) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return a buffer of padding, and views of its fields."""
        padding = self._padding.get(bucket)
        if padding is None:
            padding = self._padding[bucket] = self._make_padding(bucket)
        flat = padding.copy()
        return flat, self.layout(bucket).views(flat)

    def _make_padding(self, bucket: StepBucket) -> np.ndarray:
        layout = self.layout(bucket)
        flat = np.zeros(layout.size + self.sample_layout.size, np.int32)
        fields = layout.views(flat)
        nowhere = {"slot_block": self.num_blocks, "cross_slot_block": self.num_blocks}
        nowhere["states_slots"] = NOWHERE
        for name, value in {**PADDING, **nowhere, "tile_rows": bucket.num_tokens}.items():
            if name in fields:
                fields[name][:] = value
        self._sample_fields(flat[layout.size :])
        return flat

    def _sample_fields(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return views of a sample's fields, of which no row has an adapter."""
        fields = self.sample_layout.views(flat)
        if ADAPTER_SLOTS in fields:
            fields[ADAPTER_SLOTS][:] = NO_SLOT
        return fields

    def count_states(self, requests: Sequence[ScheduledRequest]) -> int:
        """Return how many encoder hidden states the step writes."""
        if not self.sizes.max_encoder_blocks:
            return 0
        return sum(scheduled.num_new_states for scheduled in requests)

    def needs_spans(self, requests: Sequence[ScheduledRequest]) -> bool:
        """Return whether the step's bucket must have spans: whether a token may use one."""
        return self.has_spans and any(
            one.request.spans.are_between(one.start, one.end) for one in requests
        )

    def build(
        self, requests: Sequence[ScheduledRequest], bucket: StepBucket
    ) -> tuple[np.ndarray, bool]:
        """Return the packed step and its sample, and whether the sample is plain greedy."""
        flat, last_rows = self.build_step(requests, bucket)
        sampled = [one for one in requests if one.samples]
        if len(sampled) < len(requests):
            last_rows = last_rows[[one.samples for one in requests]]
        return flat, self.fill_sample(flat[-self.sample_layout.size :], sampled, last_rows)

    def build_step(
        self, requests: Sequence[ScheduledRequest], bucket: StepBucket
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the packed step, and each request's last row, int32[requests]."""
        flat, fields = self.empty_step(bucket)
        counts = np.fromiter((item.num_tokens for item in requests), np.int32, len(requests))
        ends = np.cumsum(counts, dtype=np.int32)
        num_tokens = int(ends[-1])
        request_of_row = np.repeat(np.arange(len(requests), dtype=np.int32), counts)
        starts = np.fromiter((item.start for item in requests), np.int32, len(requests))
        place = np.arange(num_tokens, dtype=np.int32) - np.repeat(ends - counts, counts)
        index = np.repeat(starts, counts) + place - self._slot_lag

        tables = fields["block_tables"][: len(requests)].reshape(-1)
        np.concatenate([item.block_table for item in requests], out=tables)
        token_from = [item.token_from for item in requests]
        fields["token_from"][ends - 1] = token_from
        if num_tokens > len(requests) or -1 in token_from:
            fields["token_ids"][:num_tokens] = np.concatenate(
                [item.request.token_ids[item.start : item.end] for item in requests]
            )
        fields["positions"][:, :num_tokens] = index
        for scheduled, first, count in zip(requests, ends - counts, counts, strict=True):
            if scheduled.request.rotary is not None:
                low, high = scheduled.start - self._slot_lag, scheduled.end - self._slot_lag
                places = scheduled.request.rotary.between(low, high)
                fields["positions"][:, first : first + count] = places
        fields["token_index"][:num_tokens] = index
        if bucket.has_spans:
            fields["span_end"][:num_tokens] = index + 1
            self._fill_spans(fields, requests, ends - counts)
        blocks = fields["block_tables"][request_of_row, index // self.block_size]
        fields["slot_block"][:num_tokens] = blocks
        fields["slot_offset"][:num_tokens] = index % self.block_size
        if bucket.has_adapters:
            slots = [item.request.adapter_slot for item in requests]
            fields[ADAPTER_SLOTS][:num_tokens] = np.repeat(np.array(slots, np.int32), counts)
        self._fill_tiles(fields, bucket, counts, place)
        self._fill_items(fields, requests, ends - counts)
        if self.sizes.max_encoder_blocks:
            self._fill_cross(fields, requests)
        if self.sizes.attends_to_items:
            _fill_seen(fields["cross_seen"], requests, ends - counts)
        if self.sizes.states_per_seq:
            _fill_states(fields, requests, ends - counts)
        return flat, ends - 1

    def _fill_tiles(
        self,
        fields: dict[str, np.ndarray],
        bucket: StepBucket,
        counts: np.ndarray,
        place: np.ndarray,
    ) -> None:
        """Split each request's rows into tiles: 70 and 3 rows in tiles of 64 give 64, 6, 3."""
        size = bucket.tile_size
        tiles = cdiv(counts, size)
        first_tile = np.cumsum(tiles, dtype=np.int32) - tiles
        slots = np.repeat(first_tile * size, counts) + place
        fields["row_slot"][: len(place)] = slots
        fields["tile_rows"].reshape(-1)[slots] = np.arange(len(place), dtype=np.int32)
        num_tiles = int(tiles.sum())
        fields["tile_request"][:num_tiles] = np.repeat(
            np.arange(len(counts), dtype=np.int32), tiles
        )

    def _fill_items(
        self,
        fields: dict[str, np.ndarray],
        requests: Sequence[ScheduledRequest],
        first_rows: np.ndarray,
    ) -> None:
        """Set `src_index` of rows that are embeddings."""
        for scheduled, first_row in zip(requests, first_rows, strict=True):
            if scheduled.start >= scheduled.request.items_end:
                continue
            for item in scheduled.request.items_between(scheduled.start, scheduled.end):
                low = max(scheduled.start, item.start)
                high = min(scheduled.end, item.end)
                window = slice(
                    first_row + low - scheduled.start, first_row + high - scheduled.start
                )
                inside = slice(low - item.start, high - item.start)
                first, last = item.mm_position.get_embeds_indices_in_range(
                    inside.start, inside.stop
                )
                if first == last:
                    continue  # no embeddings in the window: the item may not be encoded
                rows = self.rows_of(item.identifier)[first:last]
                mask = item.mm_position.is_embed
                chosen = slice(None) if mask is None else np.asarray(mask[inside], bool)
                fields["src_index"][window][chosen] = rows

    def _fill_spans(
        self,
        fields: dict[str, np.ndarray],
        requests: Sequence[ScheduledRequest],
        first_rows: np.ndarray,
    ) -> None:
        """Set `span_end` of rows that see more than what comes before them, or less."""
        if not self.has_spans:
            return
        for scheduled, first_row in zip(requests, first_rows, strict=True):
            reference_end = scheduled.request.spans.reference_end
            if reference_end is not None:
                rows = slice(first_row, first_row + scheduled.end - scheduled.start)
                span_end = fields["span_end"][rows]
                np.minimum(span_end, reference_end, out=span_end)
                continue
            if scheduled.start < scheduled.request.num_prompt_tokens:
                spans = scheduled.request.spans.ends[scheduled.start : scheduled.end]
                span_end = fields["span_end"][first_row : first_row + len(spans)]
                np.copyto(span_end, spans, where=spans != 0)

    def _fill_cross(
        self, fields: dict[str, np.ndarray], requests: Sequence[ScheduledRequest]
    ) -> None:
        """Set the cross-attention tables, and the pool rows of new requests' hidden states."""
        start = 0
        for row, scheduled in enumerate(requests):
            encoder, table = scheduled.request.encoder, scheduled.encoder_table
            if encoder is None or table is None:
                continue
            fields["cross_lengths"][row] = encoder.num_embeds
            fields["cross_block_tables"][row] = table
            places = np.arange(scheduled.num_new_states, dtype=np.int32)
            new = slice(start, start + len(places))
            if len(places):
                fields["cross_src"][new] = self.rows_of(encoder.identifier)
                fields["cross_slot_block"][new] = table[places // self.block_size]
                fields["cross_slot_offset"][new] = places % self.block_size
            start = new.stop

    def fill_sample(
        self, flat: np.ndarray, requests: Sequence[ScheduledRequest], rows: np.ndarray
    ) -> bool:
        """Pack the sample of the requests' next tokens; return whether it is plain greedy."""
        fields = self._sample_fields(flat)
        fields["rows"][: len(rows)] = rows
        if ADAPTER_SLOTS in fields:
            fields[ADAPTER_SLOTS][: len(rows)] = [one.request.adapter_slot for one in requests]
        is_plain = True
        for row, scheduled in enumerate(requests):
            request, params = scheduled.request, scheduled.request.sampling_params
            if scheduled.end >= request.plain_from:
                continue
            if is_plain:
                is_plain = False
                fields["masked_token_ids"][:] = NO_TOKEN
            fields["has_logprobs"][...] |= params.logprobs is not None
            if request.needs_min_tokens(scheduled.end):
                masked = request.held_back_token_ids[:NUM_MASKED]
                fields["masked_token_ids"][row, : len(masked)] = masked
            fields["positions"][row] = scheduled.end
            fields["token_from"][row] = scheduled.token_from
            fields["ngram_sizes"][row] = params.no_repeat_ngram_size
            fields["ngram_windows"][row] = params.no_repeat_ngram_window_size
            fields["reports_masked"][row] = request.logit_rules.grammar is not None
            if params.transcript is not None:
                fields["timestamps_from"][row] = params.transcript.timestamps_from or 0
            fields["has_masks"][...] |= request.logit_rules.has_mask
            fields["has_edits"][...] |= request.has_edits(scheduled.end)
            if params.has_penalties:
                _fill_penalties(fields, row, request)
            if not params.is_greedy:
                _fill_sampling(fields, row, scheduled)
        return is_plain

    def fill_guess(
        self, flat: np.ndarray, requests: Sequence[ScheduledRequest], rows: np.ndarray
    ) -> bool:
        """Pack the sample of tokens that are guessed; return whether it is plain greedy.

        They are drawn as the requests' own are, by seed and position, but by no other rules.
        """
        fields = self._sample_fields(flat)
        fields["rows"][: len(rows)] = rows
        is_plain = all(one.request.sampling_params.is_greedy for one in requests)
        if not is_plain:
            fields["masked_token_ids"][:] = NO_TOKEN
        for row, scheduled in enumerate(requests):
            if not scheduled.request.sampling_params.is_greedy:
                fields["positions"][row] = scheduled.end
                _fill_sampling(fields, row, scheduled)
        return is_plain

    def build_reports(
        self, rows: np.ndarray, token_ids: np.ndarray, adapter_slot: int = NO_SLOT
    ) -> np.ndarray:
        """Pack a sample that reports the log-probabilities of given tokens, and draws none."""
        flat = np.zeros(self.sample_layout.size, np.int32)
        fields = self._sample_fields(flat)
        if ADAPTER_SLOTS in fields:
            fields[ADAPTER_SLOTS][: len(rows)] = adapter_slot
        fields["masked_token_ids"][:] = NO_TOKEN
        fields["rows"][: len(rows)] = rows
        fields["reported"][: len(rows)] = token_ids + 1
        fields["has_logprobs"][...] = 1
        return flat


def _fill_seen(
    seen: np.ndarray, requests: Sequence[ScheduledRequest], first_rows: np.ndarray
) -> None:
    """Set which of its request's hidden states each token attends to."""
    for scheduled, first_row in zip(requests, first_rows, strict=True):
        rows = slice(first_row, first_row + scheduled.num_tokens)
        seen[:, rows] = scheduled.request.seen_between(scheduled.start, scheduled.end)


def _fill_states(
    fields: dict[str, np.ndarray], requests: Sequence[ScheduledRequest], first_rows: np.ndarray
) -> None:
    """Set where the windows' states are, and cut windows of several tokens into chunks."""
    number = len(requests)
    depths: list[int] = []
    for scheduled in requests:
        depths.append(depths[-1] + 1 if scheduled.is_guessed else 0)
    fields["states_slots"][:number] = [
        one.request.state_slots[depth] for one, depth in zip(requests, depths, strict=True)
    ]
    if "states_depths" in fields:
        fields["states_depths"][:number] = depths
    fields["states_first_rows"][:number] = first_rows
    fields["states_num_rows"][:number] = [one.num_tokens for one in requests]
    num_chunks = 0
    for scheduled, first_row in zip(requests, first_rows, strict=True):
        if scheduled.num_tokens == 1:
            continue
        ends = scheduled.request.chunk_ends_between(scheduled.start, scheduled.end)
        starts = np.concatenate([[scheduled.start], ends[:-1]])
        chunks = slice(num_chunks, num_chunks + len(ends))
        fields["states_chunk_rows"][chunks] = first_row + starts - scheduled.start
        fields["states_chunk_sizes"][chunks] = ends - starts
        fields["states_chunk_slots"][chunks] = scheduled.request.state_slots[0]
        num_chunks = chunks.stop
    if num_chunks:
        fields["states_num_chunks"][...] = num_chunks


def _fill_penalties(fields: dict[str, np.ndarray], row: int, request: Request) -> None:
    fields["has_penalties"][...] = 1
    fields["prompt_lengths"][row] = request.num_prompt_tokens
    for name in PENALTIES:
        fields[name].view(np.float32)[row] = getattr(request.sampling_params, name)


def _fill_sampling(fields: dict[str, np.ndarray], row: int, scheduled: ScheduledRequest) -> None:
    request, params = scheduled.request, scheduled.request.sampling_params
    seed = request.seed % 2**64
    fields["seeds"].view(np.uint32)[row] = (seed >> 32, seed & 0xFFFFFFFF)
    fields["top_k"][row] = max(params.top_k, 0)
    for name in ("temperature", "top_p", "min_p"):
        fields[name].view(np.float32)[row] = getattr(params, name)
    fields["has_filters"][...] |= params.top_k > 0 or params.top_p < 1 or params.min_p > 0
