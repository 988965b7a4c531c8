"""Attention metadata of a step: arrays are int32 and padded to a bucket.

The query at index i attends to the key at index j if j < max(i + 1, span_end) and, on sliding
layers, j > i - window, or, where windows are chunks, j >= i // size * size. `span_end` is the end
of the query's image: attention within an image is bidirectional (HF: modeling_gemma3.py,
create_masks_for_vision_model). A `span_end` of -n is a prompt's that sees itself: all keys j < n,
on sliding layers, too (HF: modeling_paligemma.py). Where windows keep a reference, a `span_end` of
up to i + 1 is its end: all keys before it are seen, whatever the window (HF:
modeling_unlimited_ocr.py).
"""

from typing import Any, NamedTuple, TypeVar

from jaxtyping import Array, Bool, Float, Int

IndexT = TypeVar("IndexT", bound=Any)


class ChunkWindow(NamedTuple):
    """A window that does not slide: a token sees those before it in its own chunk of the sequence.

    The chunks follow each other from the first token, `size` tokens each: Llama 4's
    `attention_chunk_size`. A step may end within one.
    """

    size: int


Window = int | ChunkWindow | None
"""How many tokens a token sees, itself among them, or those of its chunk; None: all before it."""


def find_unseen(token_index: IndexT, window: int | ChunkWindow) -> IndexT:
    """Return the index before the first token that each token's window lets it see."""
    if isinstance(window, ChunkWindow):
        return token_index - token_index % window.size - 1
    return token_index - window


class CrossAttentionMetadata(NamedTuple):
    """Cross-attention's own block table: keys and values of encoder hidden states.

    They are written in the first step of a request; later steps only read them.
    """

    slot_block: Int[Array, " S"]
    """Block of a written hidden state's key and value; padding: out of range. S may be 0."""
    slot_offset: Int[Array, " S"]
    lengths: Int[Array, " R"]
    """Number of each request's encoder hidden states; without `seen`, its queries attend to all."""
    block_tables: Int[Array, "R _blocks"]
    seen: Int[Array, "2 T"] | None = None
    """The first of its request's hidden states that a token attends to, and the one behind the
    last: both are equal where it attends to none. None: all tokens attend to all."""
    encoder_hidden_states: Float[Array, "S D"] | None = None
    """The encoder hidden states to write: every layer projects them to its own keys and values,
    and calls `write_encoder`. Padding is finite, and dropped."""


class StateMetadata(NamedTuple):
    """What recurrent layers are told of a step: where each request's tokens and its state are.

    A prompt's tokens are computed in chunks, whose ends depend on the prompt alone, and an answer's
    one by one, as they came: so a state has the same bits however a request was scheduled.
    """

    slots: Int[Array, " R"]
    """Of each window's request; padding: out of range."""
    first_rows: Int[Array, " R"]
    """Index into T of a window's first token."""
    num_rows: Int[Array, " R"]
    """Tokens of a window; padding: 0."""
    chunk_rows: Int[Array, " _chunks"] | None = None
    """Index into T of a chunk's first token: of windows of several tokens, in their order. None: no
    window has several."""
    chunk_sizes: Int[Array, " _chunks"] | None = None
    """Tokens of a chunk, at most `CHUNK`; padding: 0."""
    chunk_slots: Int[Array, " _chunks"] | None = None
    num_chunks: Int[Array, ""] | None = None
    depths: Int[Array, " R"] | None = None
    """How many windows of the same request stand just before a window: those of guessed tokens
    follow on others, each with a slot of its own. None: the step has no guesses."""


class PagedAttentionMetadata(NamedTuple):
    """Metadata of paged attention, made on the host.

    Whether an optional field is None is static: part of the program.
    """

    slot_block: Int[Array, " T"]
    """Block of the token's key and value; padding: out of range."""
    slot_offset: Int[Array, " T"]
    token_index: Int[Array, " T"]
    """The token's position in its sequence."""
    span_end: Int[Array, " T"] | None
    """token_index + 1 for a causal token, else the exclusive end of its image's run, or -n for a
    token of a prompt of n tokens that sees all of it; or the end of a reference, as above.

    None if every token is causal, and sees all before it where windows keep a reference: only then
    can a causal kernel be used.
    """
    tile_rows: Int[Array, "W Z"]
    """Indices into T of a tile's queries; padding: T. A request's rows are contiguous, and requests
    are in the order of `block_tables`."""
    tile_request: Int[Array, " W"]
    """Row of `block_tables` of a tile's request."""
    row_slot: Int[Array, " T"]
    """Index of a token's output in the flattened tiles; padding: 0."""
    block_tables: Int[Array, "R _blocks"]
    cross: CrossAttentionMetadata | None = None
    """None for a model without cross-attention."""
    states: StateMetadata | None = None
    """None for a model without recurrent layers."""
    is_seen_ahead: Bool[Array, " _rows"] | None = None
    """Which tokens of the step others see before they come, up to the last one within a `span_end`,
    which all of the span see; None: all of a span's. Not from the host (`with_gaps`)."""


class DenseCrossMetadata(NamedTuple):
    """What the tokens of `B` sequences attend to of their encoders' hidden states."""

    is_seen: Bool[Array, "B _queries _states"]
    """Whether a token attends to a hidden state, of as many rows as a sequence has, or of one for
    all its tokens; false for padding."""
    encoder_hidden_states: Float[Array, "_rows D"]
    """Of all sequences, one behind the other; as in `CrossAttentionMetadata`."""


class DenseAttentionMetadata(NamedTuple):
    """B sequences of S tokens each, flattened to T = B * S rows."""

    token_index: Int[Array, "B S"]
    """A token's position in its sequence, for the sliding window."""
    mask: Bool[Array, "B S S"]
    """mask[b, i, j]: whether query i attends to key j, before the window."""
    beyond_window: Bool[Array, "B S S"] | None = None
    """Keys that a query attends to whatever the window is; None: there are none."""
    cross: DenseCrossMetadata | None = None
    """None for a model without cross-attention."""


AttentionMetadata = PagedAttentionMetadata | DenseAttentionMetadata
