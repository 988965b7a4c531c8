"""Where the tokens of a step lie, for attention: every array int32 and padded to a bucket.

A key at index j is visible to the query at index i if j < max(i + 1, span_end) and, on sliding
layers, j > i - window. `span_end` is the end of the image that the query belongs to: inside an
image attention goes both ways (HF: modeling_gemma3.py, create_masks_for_vision_model).
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class CrossAttentionMetadata(NamedTuple):
    """Where the encoder's keys and values of a step's requests lie: a block table of its own.

    They are written once, in the first step of a request; later steps read them.
    """

    slot_block: Int[Array, " S"]
    """Block that an encoder state's key and value go to; padding: out of range. S may be 0."""
    slot_offset: Int[Array, " S"]
    lengths: Int[Array, " R"]
    """States of each request's encoder, all of which its queries see."""
    block_tables: Int[Array, "R _blocks"]
    states: Float[Array, "S D"] | None = None
    """The encoder states that this step writes: every layer projects them to its own keys and
    values, and gives those to `write_encoder`. Padding: anything finite, which goes nowhere."""


class PagedAttentionMetadata(NamedTuple):
    """What paged attention must know; built on the host.

    A field that may be None is there or not for all steps of a program: its structure is static.
    """

    slot_block: Int[Array, " T"]
    """Block that the token's key and value go to; padding: out of range."""
    slot_offset: Int[Array, " T"]
    token_index: Int[Array, " T"]
    """The token's place in its sequence."""
    span_end: Int[Array, " T"] | None
    """token_index + 1 for a causal token, else the exclusive end of its image's run.

    None where every token is causal: only then can a kernel that knows no images be used.
    """
    tile_rows: Int[Array, "W Z"]
    """Rows of T that a tile's queries are; padding: T. A request's rows follow each other, and the
    requests stand in the order of `block_tables`."""
    tile_request: Int[Array, " W"]
    """Row of `block_tables` that a tile reads."""
    row_slot: Int[Array, " T"]
    """Where in the flattened tiles a token's output lies; padding: 0."""
    block_tables: Int[Array, "R _blocks"]
    cross: CrossAttentionMetadata | None = None
    """None where the model has no encoder of its own to look at."""


class DenseAttentionMetadata(NamedTuple):
    """B sequences of S tokens each, flattened to T = B * S rows."""

    token_index: Int[Array, "B S"]
    """A token's place in its sequence, for the sliding window."""
    mask: Bool[Array, "B S S"]
    """mask[b, i, j]: whether query i sees key j, before the window."""


AttentionMetadata = PagedAttentionMetadata | DenseAttentionMetadata
