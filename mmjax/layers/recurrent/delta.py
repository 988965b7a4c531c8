"""The gated delta rule (arXiv 2412.06464): a sum over keys and values that is corrected and decays.

Each head keeps a matrix from keys to values. A token reads what the matrix has for its key, and
adds the rest of its value, times `beta`; before that the matrix decays. Everything is in float32.
HF: modeling_qwen3_5.py, `torch_chunk_gated_delta_rule` and `torch_recurrent_gated_delta_rule`.

Tokens of a prompt are computed in chunks (`chunks.py`), others one by one: both forms give the same
but for the order of sums (docs/determinism.md).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Int

from mmjax.layers.attention.metadata import (
    AttentionMetadata,
    DenseAttentionMetadata,
    PagedAttentionMetadata,
    StateMetadata,
)
from mmjax.layers.recurrent.chunks import CHUNK
from mmjax.layers.recurrent.rounding import rounded
from mmjax.layers.recurrent.slots import find_sources, find_states, read_slots
from mmjax.rounding import round_up

_EPSILON = 1e-6
"""Of the norms of queries and keys."""


class DeltaTokens(NamedTuple):
    """What the rule reads of tokens, or of a part of them."""

    query: Float[Array, "*rows K H"]
    """As projected: queries and keys are normed here."""
    key: Float[Array, "*rows K H"]
    """Each head of queries and keys serves `N / K` following heads of values."""
    value: Float[Array, "*rows N _value"]
    log_decay: Float[Array, "*rows N"]
    """The logarithm of what a matrix is multiplied by before a token; at most 0."""
    beta: Float[Array, "*rows N"]
    """How much of a value is new, between 0 and 1."""


Memory = Float[Array, "N H _value"]


def gated_delta_rule(
    given: DeltaTokens,
    state: Float[Array, "_slots N H _value"] | None,
    metadata: AttentionMetadata,
) -> tuple[Float[Array, "T N _value"], Float[Array, "_slots N H _value"] | None]:
    """Return what each token reads of its sequence, and the slots.

    `given`: of all tokens of a step. `state`: the matrices of each request; None with the metadata
    of whole sequences.
    """
    tokens = jax.tree.map(lambda x: x.astype(jnp.float32), given)
    dtype, num_tokens = given.value.dtype, len(given.value)
    if isinstance(metadata, DenseAttentionMetadata):
        return _over_sequences(tokens, len(metadata.token_index)).astype(dtype), None
    assert state is not None, "a step has slots"
    states = find_states(metadata)
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, CHUNK), *[(0, 0)] * (x.ndim - 1)]), tokens)
    out = jnp.zeros_like(padded.value)
    arguments = (padded, state, out, states, metadata)
    # On the CPU each request by itself: so a token has the same bits beside any others.
    state, out = jax.lax.platform_dependent(*arguments, cpu=_each_token, default=_tokens_at_once)
    assert state is not None, "it stays"
    if states.num_chunks is not None:
        state, out = _each_chunk(padded, state, out, states, metadata)
    return out[:num_tokens].astype(dtype), state


def _tokens_at_once(
    tokens: DeltaTokens,
    state: Float[Array, "_slots N H _value"],
    out: Float[Array, "_rows N _value"],
    states: StateMetadata,
    metadata: PagedAttentionMetadata,
) -> tuple[Float[Array, "_slots N H _value"], Float[Array, "_rows N _value"]]:
    """Compute the windows of one token: all at once, but for guesses, which are behind others."""
    own = jax.tree.map(lambda x: x[states.first_rows], tokens)
    sources = states._replace(slots=find_sources(states))

    def body(depth: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, out = carry
        is_due = states.num_rows == 1
        if states.depths is not None:
            is_due &= states.depths == depth
        found, memory = jax.vmap(delta_token)(read_slots(state, sources, metadata), own)
        slots = jnp.where(is_due, states.slots, len(state))
        rows = jnp.where(is_due, states.first_rows, len(out))
        return state.at[slots].set(memory, mode="drop"), out.at[rows].set(found, mode="drop")

    first = jnp.int32(0)
    if states.depths is None:
        return body(first, (state, out))
    return jax.lax.fori_loop(first, states.depths.max() + 1, body, (state, out))


def _each_token(
    tokens: DeltaTokens,
    state: Float[Array, "_slots N H _value"],
    out: Float[Array, "_rows N _value"],
    states: StateMetadata,
    metadata: PagedAttentionMetadata,
) -> tuple[Float[Array, "_slots N H _value"], Float[Array, "_rows N _value"]]:
    """Compute the windows of one token, one by one."""
    sources = find_sources(states)

    def body(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, out = carry
        row, slot = states.first_rows[number], states.slots[number]
        is_single = states.num_rows[number] == 1
        held, before = state[slot], out[row]
        memory = jnp.where(metadata.token_index[row] == 0, 0, state[sources[number]])
        found, memory = delta_token(memory, jax.tree.map(lambda x: x[row], tokens))
        state = state.at[slot].set(jnp.where(is_single, memory, held))
        return state, out.at[row].set(jnp.where(is_single, found, before))

    num_windows = (states.num_rows > 0).sum(dtype=jnp.int32)
    return jax.lax.fori_loop(jnp.zeros_like(num_windows), num_windows, body, (state, out))


def _each_chunk(
    tokens: DeltaTokens,
    state: Float[Array, "_slots N H _value"],
    out: Float[Array, "_rows N _value"],
    states: StateMetadata,
    metadata: PagedAttentionMetadata,
) -> tuple[Float[Array, "_slots N H _value"], Float[Array, "_rows N _value"]]:
    """Compute the chunks of longer windows, one by one."""
    rows, sizes, slots = states.chunk_rows, states.chunk_sizes, states.chunk_slots
    num_chunks = states.num_chunks
    assert rows is not None, "no window has several tokens"
    assert sizes is not None, "no window has several tokens"
    assert slots is not None, "no window has several tokens"
    assert num_chunks is not None, "no window has several tokens"

    def body(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, out = carry
        row, size, slot = rows[number], sizes[number], slots[number]
        memory = jnp.where(metadata.token_index[row] == 0, 0, state[slot])
        own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, CHUNK), tokens)
        found, memory = jax.lax.cond(size == 1, _first_token, delta_chunk, memory, own, size)
        before = jax.lax.dynamic_slice_in_dim(out, row, CHUNK)
        is_own = jnp.arange(CHUNK, dtype=jnp.int32) < size
        found = jnp.where(is_own[:, None, None], found, before)
        out = jax.lax.dynamic_update_slice_in_dim(out, found, row, 0)
        return state.at[slot].set(memory), out

    return jax.lax.fori_loop(jnp.zeros_like(num_chunks), num_chunks, body, (state, out))


def _first_token(
    memory: Memory, tokens: DeltaTokens, size: Int[Array, ""]
) -> tuple[Float[Array, "_rows N _value"], Memory]:
    """Return what `delta_chunk` returns, of a chunk of one token."""
    del size
    found, memory = delta_token(memory, jax.tree.map(lambda x: x[0], tokens))
    return jnp.pad(found[None], ((0, CHUNK - 1), (0, 0), (0, 0))), memory


def delta_token(memory: Memory, token: DeltaTokens) -> tuple[Float[Array, "N _value"], Memory]:
    """Return what one token reads, and the matrices behind it."""
    num_heads = len(memory)
    query = _repeat(_norm(token.query) * token.query.shape[-1] ** -0.5, num_heads, axis=0)
    key = _repeat(_norm(token.key), num_heads, axis=0)
    memory = rounded(memory * jnp.exp(token.log_decay)[:, None, None])
    known = (memory * key[:, :, None]).sum(1)
    new = (token.value - known) * token.beta[:, None]
    memory = memory + key[:, :, None] * new[:, None, :]
    return (memory * query[:, :, None]).sum(1), memory


def delta_chunk(
    memory: Memory, tokens: DeltaTokens, size: Int[Array, ""]
) -> tuple[Float[Array, "Z N _value"], Memory]:
    """Return what a chunk's tokens read, and the matrices behind them; `size` of `Z` are tokens.

    A token corrects what those before it have added. With `known[i, j]`, what i reads of j's key,
    the corrected values are the solution of a triangular system; then sums are matrix products.
    """
    num_rows, num_heads = tokens.beta.shape
    is_own = jnp.arange(num_rows, dtype=jnp.int32) < size
    tokens = jax.tree.map(
        lambda x: jnp.where(is_own.reshape(-1, *[1] * (x.ndim - 1)), x, 0), tokens
    )
    query = _repeat(_norm(tokens.query) * tokens.query.shape[-1] ** -0.5, num_heads, axis=1)
    key = _repeat(_norm(tokens.key), num_heads, axis=1)
    query, key, value = (x.swapaxes(0, 1) for x in (query, key, tokens.value))  # N Z _
    beta = tokens.beta.T[:, :, None]
    decay = jnp.cumsum(tokens.log_decay.T, axis=1)  # N Z
    product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    is_past = jnp.tril(jnp.ones((num_rows, num_rows), bool))
    # Behind a token decays would be above 1, and might overflow.
    between = jnp.exp(jnp.where(is_past, decay[:, :, None] - decay[:, None, :], -jnp.inf))
    since_start = jnp.exp(decay)[:, :, None]
    known = product(key * beta, key.mT) * between
    given = jnp.concatenate([value * beta, key * beta * since_start], axis=2)
    solved = solve_triangular(known, given, lower=True, unit_diagonal=True)
    values, reads = solved[:, :, : value.shape[2]], solved[:, :, value.shape[2] :]
    new = values - product(reads, memory)
    out = product(query * since_start, memory) + product(product(query, key.mT) * between, new)
    until_end = jnp.exp(decay[:, -1:] - decay)[:, :, None]
    memory = memory * jnp.exp(decay[:, -1])[:, None, None] + product((key * until_end).mT, new)
    return out.swapaxes(0, 1), memory


def _over_sequences(tokens: DeltaTokens, num_sequences: int) -> Float[Array, "T N _value"]:
    """Compute whole sequences, chunk by chunk."""
    length = len(tokens.beta) // num_sequences
    padded = round_up(length, CHUNK)

    def cut(x: Float[Array, "T ..."]) -> Float[Array, "_chunks B Z ..."]:
        rows = x.reshape(num_sequences, length, *x.shape[1:])
        rows = jnp.pad(rows, [(0, 0), (0, padded - length), *[(0, 0)] * (x.ndim - 1)])
        return rows.reshape(num_sequences, -1, CHUNK, *x.shape[1:]).swapaxes(0, 1)

    def body(memory: Array, chunk: DeltaTokens) -> tuple[Array, Array]:
        call = jax.vmap(delta_chunk, in_axes=(0, 0, None))
        out, memory = call(memory, chunk, jnp.int32(CHUNK))
        return memory, out

    shape = (num_sequences, tokens.value.shape[1], tokens.key.shape[2], tokens.value.shape[2])
    _, out = jax.lax.scan(body, jnp.zeros(shape, jnp.float32), jax.tree.map(cut, tokens))
    out = out.swapaxes(0, 1).reshape(num_sequences, padded, *tokens.value.shape[1:])
    return out[:, :length].reshape(tokens.value.shape)


def _norm(x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + _EPSILON)


def _repeat(x: Float[Array, "..."], num_heads: int, *, axis: int) -> Float[Array, "..."]:
    """Return each head of queries or keys as often as it serves one of values."""
    return jnp.repeat(x, num_heads // x.shape[axis], axis=axis)
