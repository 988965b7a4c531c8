"""Where each field of a step's arrays is: one flat buffer, packed on the host, unpacked under jit.

All fields are int32 (floats as their bits), so that a step is one transfer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from mmjax.engine.scheduling.buckets import StepBucket
from mmjax.engine.scheduling.request import NUM_MASKED
from mmjax.layers.attention.api import CrossAttentionMetadata, PagedAttentionMetadata

NO_TOKEN = np.iinfo(np.int32).max
"""Padding of lists of token ids: beyond every vocabulary, so that a scatter drops it."""


_CROSS = "cross_"


ADAPTER_SLOTS = "adapter_slots"


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


Shapes = Mapping[str, tuple[int, ...]]


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
    prompt_lengths: Int[Array, " R"]
    """Tokens that repetition penalties count, and presence and frequency penalties do not."""
    repetition_penalty: Float[Array, " R"]
    """Of rows without penalties 0, which leaves all as it is, as that of the other two."""
    presence_penalty: Float[Array, " R"]
    frequency_penalty: Float[Array, " R"]
    reports_masked: Int[Array, " R"]
    """1: log-probabilities are of what the row's mask leaves, as vLLM's with a grammar."""
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


def step_layout(bucket: StepBucket, max_blocks: int, max_encoder_blocks: int = 0) -> Layout:
    """Return the fields of a `StepBatch` of one bucket.

    Encoder-decoder models also have those of `CrossAttentionMetadata`, named `cross_...`.
    """
    tokens, requests, tiles = bucket.num_tokens, bucket.num_requests, bucket.num_tiles
    shapes: dict[str, tuple[int, ...]] = {
        "token_ids": (tokens,),
        "token_from": (tokens,),
        "positions": (3, tokens),
        "src_index": (tokens,),
        "slot_block": (tokens,),
        "slot_offset": (tokens,),
        "token_index": (tokens,),
        **({"span_end": (tokens,)} if bucket.has_spans else {}),
        "tile_rows": (tiles, bucket.tile_size),
        "tile_request": (tiles,),
        "row_slot": (tokens,),
        "block_tables": (requests, max_blocks),
        **({ADAPTER_SLOTS: (tokens,)} if bucket.has_adapters else {}),
    }
    if max_encoder_blocks:
        states = (bucket.num_states,)
        shapes |= {
            "cross_src": states,
            "cross_slot_block": states,
            "cross_slot_offset": states,
            "cross_lengths": (requests,),
            "cross_block_tables": (requests, max_encoder_blocks),
        }
    return Layout(tuple(shapes.items()))


def sample_layout(num_requests: int, *, has_adapters: bool = False) -> Layout:
    """Return the fields of a `SampleBatch` of one bucket."""
    one = (num_requests,)
    shapes: Shapes = {
        "rows": one,
        "positions": one,
        "seeds": (num_requests, 2),
        "top_k": one,
        "temperature": one,
        "top_p": one,
        "min_p": one,
        "masked_token_ids": (num_requests, NUM_MASKED),
        "token_from": one,
        "ngram_sizes": one,
        "prompt_lengths": one,
        **dict.fromkeys(PENALTIES, one),
        "reports_masked": one,
        "reported": one,
        "has_filters": (),
        "has_logprobs": (),
        "has_masks": (),
        "has_edits": (),
        "has_penalties": (),
        **({ADAPTER_SLOTS: one} if has_adapters else {}),
    }
    return Layout(tuple(shapes.items()))


def unpack_step(layout: Layout, flat: Int[Array, " size"]) -> StepBatch:
    """Return the batch of a packed buffer, under jit."""
    fields = layout.views(flat)
    names = ("token_ids", "token_from", "positions", "src_index")
    head = {name: fields.pop(name) for name in names}
    if ADAPTER_SLOTS in fields:
        head[ADAPTER_SLOTS] = fields.pop(ADAPTER_SLOTS)
    cross = {name: fields.pop(name) for name in list(fields) if name.startswith(_CROSS)}
    if cross:
        head["cross_src"] = cross.pop("cross_src")
        named = {name.removeprefix(_CROSS): field for name, field in cross.items()}
        fields["cross"] = CrossAttentionMetadata(**named)
    return StepBatch(**head, metadata=PagedAttentionMetadata(**{"span_end": None, **fields}))


def add_padding_row(batch: StepBatch) -> StepBatch:
    """Return the batch with one row more, which is nobody's token: no tile asks for it."""

    def pad(field: Int[Array, "*other T"], value: int = 0) -> Int[Array, "*other _more"]:
        widths = [(0, 0)] * (field.ndim - 1) + [(0, 1)]
        return jnp.pad(field, widths, constant_values=value)

    metadata, slots = batch.metadata, batch.adapter_slots
    num_rows = len(batch.token_ids)
    return batch._replace(
        adapter_slots=None if slots is None else pad(slots, -1),
        token_ids=pad(batch.token_ids),
        token_from=pad(batch.token_from, -1),
        positions=pad(batch.positions),
        src_index=pad(batch.src_index, -1),
        metadata=metadata._replace(
            slot_block=pad(metadata.slot_block, jnp.iinfo(jnp.int32).max),
            slot_offset=pad(metadata.slot_offset),
            token_index=pad(metadata.token_index),
            span_end=None if metadata.span_end is None else pad(metadata.span_end),
            tile_rows=jnp.where(metadata.tile_rows < num_rows, metadata.tile_rows, num_rows + 1),
            row_slot=pad(metadata.row_slot),
        ),
    )


def unpack_sample(layout: Layout, flat: Int[Array, " size"], num_rows: int) -> SampleBatch:
    """Return the first rows of a packed batch, floats and seeds restored, under jit."""
    fields = {
        name: value[:num_rows] if value.ndim else value
        for name, value in layout.views(flat).items()
    }
    for name in ("temperature", "top_p", "min_p", *PENALTIES):
        fields[name] = jax.lax.bitcast_convert_type(fields[name], jnp.float32)
    fields["seeds"] = jax.lax.bitcast_convert_type(fields["seeds"], jnp.uint32)
    return SampleBatch(**fields)
