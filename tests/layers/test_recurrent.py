"""Recurrent layers: against torch's functions, against float64, and in whatever windows."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from mmjax.layers.attention.metadata import (
    DenseAttentionMetadata,
    PagedAttentionMetadata,
    StateMetadata,
)
from mmjax.layers.recurrent import delta
from mmjax.layers.recurrent.causal import short_convolution
from mmjax.layers.recurrent.chunks import CHUNK, find_chunk_ends
from mmjax.layers.recurrent.delta import gated_delta_rule
from mmjax.layers.recurrent.slots import find_states

pytestmark = pytest.mark.as_served

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 16
NUM_SLOTS = 5
Window = tuple[int, int, int]
"""Of a sequence: its slot, and the positions that are computed."""


def make_tokens(length: int, seed: int = 0) -> list[np.ndarray]:
    """Return query, key, value, log decay and beta of a sequence."""
    rng = np.random.default_rng(seed)
    shapes = [(KEY_HEADS, KEY_DIM)] * 2 + [(VALUE_HEADS, VALUE_DIM)]
    heads = [rng.standard_normal((length, *shape)) for shape in shapes]
    decay = -rng.exponential(0.3, (length, VALUE_HEADS))
    beta = rng.random((length, VALUE_HEADS))
    return [x.astype(np.float32) for x in (*heads, decay, beta)]


def in_float64(tokens: Sequence[np.ndarray]) -> np.ndarray:
    """Return the rule's outputs, token by token."""
    query, key, value, decay, beta = (x.astype(np.float64) for x in tokens)
    query, key = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (query, key))
    query, key = (np.repeat(x, VALUE_HEADS // KEY_HEADS, axis=1) for x in (query, key))
    memory = np.zeros((VALUE_HEADS, KEY_DIM, VALUE_DIM))
    out = np.zeros(value.shape)
    for place in range(len(value)):
        memory *= np.exp(decay[place])[:, None, None]
        known = np.einsum("nkv,nk->nv", memory, key[place])
        new = (value[place] - known) * beta[place][:, None]
        memory += key[place][:, :, None] * new[:, None, :]
        out[place] = np.einsum("nkv,nk->nv", memory, query[place]) / np.sqrt(KEY_DIM)
    return out


def over_sequences(tokens: Sequence[np.ndarray], number: int = 1) -> np.ndarray:
    """Return the rule's outputs of whole sequences, without slots."""
    metadata = dense(number, len(tokens[0]) // number)
    given: Any = tokens
    return np.asarray(run_rule(delta.DeltaTokens(*given), None, metadata)[0])


# Compiled as one program a shape, not one for every operation.
run_rule = jax.jit(gated_delta_rule)
convolve = jax.jit(short_convolution)


def dense(num_sequences: int, length: int) -> DenseAttentionMetadata:
    index: Any = np.broadcast_to(np.arange(length, dtype=np.int32), (num_sequences, length))
    mask: Any = np.ones((num_sequences, length, length), bool)
    return DenseAttentionMetadata(index, mask)


def paged(
    windows: Sequence[Window], prompt_lengths: Sequence[int], num_tokens: int, num_windows: int
) -> PagedAttentionMetadata:
    """Return a step's metadata, of which recurrent layers read positions and states."""
    nothing: Any = np.zeros(num_tokens, np.int32)
    index: Any = np.zeros(num_tokens, np.int32)
    rows, chunks = [], []
    first = 0
    for (slot, start, end), prompt in zip(windows, prompt_lengths, strict=True):
        index[first : first + end - start] = np.arange(start, end)
        rows.append((slot, first, end - start))
        ends = [*find_chunk_ends((), prompt), *range(prompt + 1, end + 1)]
        last = start
        for stop in ends:
            if start < stop <= end and end - start > 1:
                chunks.append((first + last - start, stop - last, slot))
                last = stop
        first += end - start
    is_decoding = all(end - start == 1 for _, start, end in windows)
    rows += [(2**31 - 1, 0, 0)] * (num_windows - len(rows))
    padded = chunks + [(0, 0, 0)] * (num_tokens - len(chunks))
    chunked = [] if is_decoding else [*np.array(padded, np.int32).T, np.int32(len(chunks))]
    states = StateMetadata(*np.array(rows, np.int32).T, *chunked)
    empty: Any = np.zeros((1, 1), np.int32)
    return PagedAttentionMetadata(
        nothing, nothing, index, None, empty, nothing[:1], nothing, empty, states=states
    )


class Schedule:
    """Computes windows of sequences, and keeps the slots and all outputs."""

    def __init__(self, layer: Any, inputs: Sequence[Sequence[np.ndarray]], state: Any) -> None:
        self._layer, self._inputs, self.state = jax.jit(layer), inputs, state
        self.outputs: dict[tuple[int, int], np.ndarray] = {}

    def step(
        self, windows: Sequence[Window], prompts: Sequence[int], num_tokens: int, num_windows: int
    ) -> None:
        parts = [[x[start:end] for x in self._inputs[slot]] for slot, start, end in windows]
        arrays = [np.concatenate(one) for one in zip(*parts, strict=True)]
        total = len(arrays[0])
        # Padding is whatever it is.
        padded = [
            np.pad(x, [(0, num_tokens - total)] + [(0, 0)] * (x.ndim - 1), constant_values=7)
            for x in arrays
        ]
        metadata = paged(
            windows, [prompts[slot] for slot, _, _ in windows], num_tokens, num_windows
        )
        out, self.state = self._layer(*padded, self.state, metadata)
        row = 0
        out = np.asarray(out)
        for slot, start, end in windows:
            for place in range(start, end):
                self.outputs[slot, place] = out[row]
                row += 1

    def of(self, slot: int) -> np.ndarray:
        places = sorted(place for one, place in self.outputs if one == slot)
        return np.stack([self.outputs[slot, place] for place in places])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_the_rule_is_torchs(length: int) -> None:
    tokens = make_tokens(length)
    ours = over_sequences(tokens)
    batched = [torch.from_numpy(x)[None] for x in tokens]
    by_chunks, _ = hf.torch_chunk_gated_delta_rule(*batched, use_qk_l2norm_in_kernel=True)
    by_tokens, _ = hf.torch_recurrent_gated_delta_rule(*batched, use_qk_l2norm_in_kernel=True)
    for theirs in (by_chunks, by_tokens):
        np.testing.assert_allclose(ours, theirs[0].numpy(), atol=1e-5)
    np.testing.assert_allclose(ours, in_float64(tokens), atol=1e-5)


def test_equal_keys_do_not_blow_up() -> None:
    """The triangular system's powers would: 64 times the same key, all of it new."""
    query, key, value, decay, beta = make_tokens(256)
    key[:], decay[:], beta[:] = key[0], -1e-3, 1.0
    tokens = [query, key, value, decay, beta]
    ours = over_sequences(tokens)
    np.testing.assert_allclose(ours, in_float64(tokens), atol=1e-4)


def test_strong_decay_does_not_overflow() -> None:
    query, key, value, decay, beta = make_tokens(130)
    decay[:] = -20.0
    tokens = [query, key, value, decay, beta]
    ours = over_sequences(tokens)
    np.testing.assert_allclose(ours, in_float64(tokens), atol=1e-5)


def test_sequences_beside_each_other_are_apart() -> None:
    many = [make_tokens(70, seed) for seed in range(3)]
    ours = over_sequences([np.concatenate(x) for x in zip(*many, strict=True)], 3)
    for number, tokens in enumerate(many):
        own = ours[70 * number : 70 * (number + 1)]
        np.testing.assert_allclose(own, in_float64(tokens), atol=1e-5)


def test_gradients_reach_all_inputs() -> None:
    tokens = make_tokens(100)

    def total(*inputs: Any) -> Any:
        return (gated_delta_rule(delta.DeltaTokens(*inputs), None, dense(1, 100))[0] ** 2).sum()

    grads = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3, 4)))(*tokens)
    for grad, given in zip(map(np.asarray, grads), tokens, strict=True):
        assert grad.shape == given.shape
        assert np.isfinite(grad).all()
        assert (np.abs(grad) > 0).mean() > 0.9


PROMPTS = [150, 64, 65, 1, 7]
"""Of the sequences, each in the slot of its number; all are computed to their 160th token."""
LENGTH = 160


def delta_schedule() -> Schedule:
    tokens = [make_tokens(LENGTH, seed) for seed in range(NUM_SLOTS)]
    # What was in a slot before must not be seen.
    state = jnp.full((NUM_SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM), jnp.nan, jnp.float32)

    def layer(*given: Any) -> Any:
        return gated_delta_rule(delta.DeltaTokens(*given[:5]), *given[5:])

    return Schedule(layer, tokens, state)


def alone(schedule: Schedule, slot: int) -> np.ndarray:
    """Compute a sequence alone: its prompt at once, then token by token."""
    prompt = PROMPTS[slot]
    schedule.step([(slot, 0, prompt)], PROMPTS, 256 if prompt > 1 else 1, 1)
    for place in range(prompt, LENGTH):
        schedule.step([(slot, place, place + 1)], PROMPTS, 1, 1)
    return schedule.of(slot)


def test_however_it_is_scheduled_it_has_the_same_bits() -> None:
    lone = [alone(delta_schedule(), slot) for slot in range(NUM_SLOTS)]
    for tokens, out in zip(delta_schedule()._inputs, lone, strict=True):
        np.testing.assert_allclose(out, in_float64(tokens), atol=1e-5)
    beside = delta_schedule()
    # Prompts in chunks beside each other, and beside tokens; an answer that is computed again.
    beside.step([(2, 0, 64), (3, 0, 1), (0, 0, 64)], PROMPTS, 192, 4)
    beside.step([(3, 1, 2), (2, 64, 65), (1, 0, 64), (0, 64, 128)], PROMPTS, 256, 4)
    beside.step([(4, 0, 100), (0, 128, 155), (3, 2, 3)], PROMPTS, 384, 8)
    beside.step([(4, 100, 101), (3, 3, 4), (1, 64, 65)], PROMPTS, 4, 4)
    beside.step(
        [(4, 101, LENGTH), (0, 155, LENGTH), (2, 65, LENGTH), (3, 4, LENGTH)], PROMPTS, 512, 8
    )
    for place in range(65, LENGTH):
        beside.step([(1, place, place + 1)], PROMPTS, 2, 2)
    for slot in range(NUM_SLOTS):
        np.testing.assert_array_equal(beside.of(slot), lone[slot], err_msg=f"{slot=}")


def test_tokens_at_once_are_those_one_by_one() -> None:
    """What accelerators compute in place of the loop over requests."""
    parts = [[x[start:end] for x in make_tokens(8, end)] for start, end in ((0, 1), (5, 6), (6, 8))]
    flat = [
        np.pad(np.concatenate(x), [(0, 2)] + [(0, 0)] * (x[0].ndim - 1))
        for x in zip(*parts, strict=True)
    ]
    shape = (NUM_SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    state = jnp.asarray(np.random.default_rng(1).standard_normal(shape), "float32")
    metadata = paged([(2, 0, 1), (0, 5, 6), (4, 6, 8)], [1, 1, 1], 6, 4)
    given = delta.DeltaTokens(*map(jnp.asarray, flat))
    out = jnp.full_like(given.value, 3.0)
    metadata = jax.tree.map(jnp.asarray, metadata)
    states = find_states(metadata)
    found = [
        jax.jit(compute)(given, state, out, states, metadata)
        for compute in (delta._tokens_at_once, delta._each_token)
    ]
    for at_once, each in zip(*found, strict=True):
        np.testing.assert_allclose(at_once, each, atol=1e-6)
    changed = np.asarray(jnp.abs(found[0][0] - state).max(axis=(1, 2, 3)) > 0)
    assert changed.tolist() == [True, False, True, False, False]
    assert (np.asarray(found[0][1])[2:] == 3.0).all()


def guessed_windows() -> tuple[list[tuple[int, ...]], StateMetadata, PagedAttentionMetadata]:
    """Return the slots of three requests, with guesses behind two of them, and a step's metadata.

    One request is at the beginning of its sequence; the last window is padding.
    """
    own: list[tuple[int, ...]] = [(3, 0, 5), (1,), (4, 2)]
    index = [7, 8, 9, 4, 0, 1, 0]
    windows = [(slot, depth) for slots in own for depth, slot in enumerate(slots)]
    slots, depths = jnp.array([*windows, (2**31 - 1, 0)], jnp.int32).T
    num_rows = jnp.array([1] * 6 + [0], jnp.int32)
    metadata = jax.tree.map(jnp.asarray, paged([], [], 7, 7))._replace(
        token_index=jnp.array(index, jnp.int32),
        states=StateMetadata(slots, jnp.arange(7, dtype=jnp.int32), num_rows, depths=depths),
    )
    return own, find_states(metadata), metadata


def one_by_one(layer: Any, inputs: Sequence[Any], state: Any) -> tuple[Any, Any]:
    """Compute `guessed_windows` in a step for each token, states copied on to the next slot."""
    own, _, metadata = guessed_windows()
    inputs = [np.asarray(x) for x in inputs]
    index: Any = np.asarray(metadata.token_index)
    out, row, state = [], 0, np.array(state)
    for slots in own:
        for place, slot in enumerate(slots):
            if place:
                state[slot] = state[slots[place - 1]]
            states: Any = [np.array([x], np.int32) for x in (slot, 0, 1)]
            step = metadata._replace(
                token_index=index[row : row + 1], states=StateMetadata(*states)
            )
            found, state = layer(*(x[row : row + 1] for x in inputs), state, step)
            out.append(np.asarray(found))
            state = np.array(state)
            row += 1
    return np.concatenate(out), state


def test_guesses_go_on_from_each_other() -> None:
    given = [jnp.asarray(x) for x in make_tokens(7)]
    shape = (6, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    state = jnp.asarray(np.random.default_rng(1).standard_normal(shape), "float32")

    @jax.jit
    def layer(*given: Any) -> Any:
        return gated_delta_rule(delta.DeltaTokens(*given[:5]), *given[5:])

    expected, states = one_by_one(layer, given, state)
    _, guessed, metadata = guessed_windows()
    out, found = layer(*given, state, metadata)
    np.testing.assert_array_equal(out[:6], expected)
    np.testing.assert_array_equal(found, states)
    # What accelerators compute.
    tokens = delta.DeltaTokens(*given)
    found, out = jax.jit(delta._tokens_at_once)(
        tokens, state, jnp.full_like(tokens.value, 3.0), guessed, metadata
    )
    np.testing.assert_allclose(out[:6], expected, atol=1e-6)
    np.testing.assert_allclose(found, states, atol=1e-6)
    assert (np.asarray(out)[6] == 3.0).all()


@pytest.mark.parametrize("width", [2, 3, 4])
def test_the_convolution_of_guesses_goes_on_from_each_other(width: int) -> None:
    weight, bias = conv_weights(width, has_bias=True)
    state = jnp.asarray(np.random.default_rng(1).standard_normal((6, width - 1, 6)), "float32")

    @jax.jit
    def layer(x: Any, state: Any, metadata: Any) -> Any:
        return short_convolution(x, weight, bias, state, metadata)

    inputs = [jnp.asarray(conv_inputs(7))]
    expected, states = one_by_one(layer, inputs, state)
    out, found = layer(*inputs, state, guessed_windows()[2])
    np.testing.assert_array_equal(out[:6], expected)
    np.testing.assert_array_equal(found, states)


def conv_inputs(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((length, 6)).astype(np.float32)


def conv_weights(width: int, *, has_bias: bool) -> tuple[Any, Any]:
    rng = np.random.default_rng(9)
    weight, bias = rng.standard_normal((6, width)), rng.standard_normal(6)
    return jnp.asarray(weight, "float32"), jnp.asarray(bias, "float32") if has_bias else None


@pytest.mark.parametrize(("width", "has_bias"), [(3, False), (3, True), (4, False), (4, True)])
def test_the_convolution_is_torchs(width: int, has_bias: bool) -> None:
    weight, bias = conv_weights(width, has_bias=has_bias)
    for length in (1, 2, 70):
        x = conv_inputs(length)
        ours, _ = convolve(x, weight, bias, None, dense(1, length))
        theirs = hf.causal_conv1d_fn(
            torch.from_numpy(x.T)[None],
            torch.from_numpy(np.array(weight)),
            None if bias is None else torch.from_numpy(np.array(bias)),
        )
        np.testing.assert_allclose(ours, theirs[0].numpy().T, atol=1e-5)


@pytest.mark.parametrize("width", [3, 4])
def test_the_convolution_has_the_same_bits_in_any_windows(width: int) -> None:
    weight, bias = conv_weights(width, has_bias=True)

    def layer(x: Any, state: Any, metadata: Any) -> Any:
        return short_convolution(x, weight, bias, state, metadata)

    inputs = [[conv_inputs(40, seed)] for seed in range(3)]
    state = jnp.full((NUM_SLOTS, width - 1, 6), jnp.nan, jnp.float32)
    schedule = Schedule(layer, inputs, state)
    prompts = [40] * NUM_SLOTS
    schedule.step([(0, 0, 1), (2, 0, 2)], prompts, 4, 2)
    schedule.step([(0, 1, 2), (2, 2, 3), (1, 0, 40)], prompts, 64, 4)
    schedule.step([(2, 3, 4), (0, 2, 3)], prompts, 2, 2)
    schedule.step([(2, 4, 40), (0, 3, 5)], prompts, 64, 4)
    schedule.step([(0, 5, 40)], prompts, 64, 2)
    for slot, (x,) in enumerate(inputs):
        whole, _ = convolve(x, weight, bias, None, dense(1, 40))
        np.testing.assert_array_equal(schedule.of(slot), whole, err_msg=f"{slot=}")


def test_chunks_end_where_the_prompt_says() -> None:
    assert find_chunk_ends((), 64).tolist() == [64]
    assert find_chunk_ends((), 65).tolist() == [64, 65]
    assert find_chunk_ends((0, 10, 64, 100), 130).tolist() == [10, 64, 100, 128, 130]
    assert find_chunk_ends((), CHUNK - 1).tolist() == [CHUNK - 1]
