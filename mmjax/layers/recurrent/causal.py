"""The module of a short causal convolution, its weights as in checkpoints.

A causal convolution of each channel by itself, over a flat batch, with its last inputs kept.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.attention.metadata import (
    AttentionMetadata,
    DenseAttentionMetadata,
    StateMetadata,
)
from mmjax.layers.recurrent.rounding import rounded
from mmjax.layers.recurrent.slots import find_states, read_slots, write_slots


def short_convolution(
    x: Float[Array, "T C"],
    weight: Float[Array, "C _width"],
    bias: Float[Array, " C"] | None,
    state: Float[Array, "_slots _last C"] | None,
    metadata: AttentionMetadata,
) -> tuple[Float[Array, "T C"], Float[Array, "_slots _last C"] | None]:
    """Return each token's sum over itself and the tokens before it, and the slots.

    Torch's `Conv1d(groups=C, padding=_width - 1)`, cut at the sequence's end, added in float32.
    HF: modeling_qwen3_5.py, causal_conv1d_fn; modeling_lfm2.py, Lfm2ShortConv.

    Args:
        x: The layer's inputs.
        weight: `conv.weight` without its axis of one; the last column is a token's own.
        bias: None: there is none.
        state: The last `_width - 1` inputs of each request, the latest last; None with the metadata
            of whole sequences.
        metadata: The step's.
    """
    width = weight.shape[1]
    inputs, taps = x.astype(jnp.float32), weight.astype(jnp.float32).T[:, None]
    if isinstance(metadata, DenseAttentionMetadata):
        shape = (*metadata.token_index.shape, x.shape[1])
        sequences = inputs.reshape(shape)
        shifted = [
            jnp.pad(sequences, ((0, 0), (back, 0), (0, 0)))[:, : shape[1]].reshape(inputs.shape)
            for back in range(width - 1, 0, -1)
        ]
    else:
        assert state is not None, "a step has slots"
        states = find_states(metadata)
        kept = _with_guessed(read_slots(state, states, metadata), inputs, states)
        shifted = [_shift(inputs, kept, states, back) for back in range(width - 1, 0, -1)]
        state = write_slots(state, states, _last_inputs(inputs, kept, states))
    out = rounded(shifted[0] * taps[0])
    for place, values in enumerate((*shifted[1:], inputs), start=1):
        out = out + values * taps[place]
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None]
    return out.astype(x.dtype), state


def _with_guessed(
    kept: Float[Array, "R _last C"], inputs: Float[Array, "T C"], states: StateMetadata
) -> Float[Array, "R _last C"]:
    """Return what stood before each window: before one that follows a guess, that token, too."""
    if states.depths is None:
        return kept
    (num_windows, num_kept), depths = kept.shape[:2], states.depths[:, None]
    first = kept[jnp.arange(num_windows, dtype=jnp.int32) - states.depths]
    places = jnp.arange(num_kept, dtype=jnp.int32)[None] + depths
    before = jnp.take_along_axis(first, jnp.minimum(places, num_kept - 1)[:, :, None], axis=1)
    rows = states.first_rows[:, None] - depths + places - num_kept
    own = inputs[jnp.maximum(rows, 0)]
    return jnp.where((places >= num_kept)[:, :, None], own, before)


def _shift(
    inputs: Float[Array, "T C"], kept: Float[Array, "R _last C"], states: StateMetadata, back: int
) -> Float[Array, "T C"]:
    """Return what stood `back` tokens before each row, at a window's beginning in its slot."""
    num_rows, num_kept = len(inputs), kept.shape[1]
    shifted = jnp.pad(inputs, ((back, 0), (0, 0)))[:num_rows]
    places = jnp.arange(back, dtype=jnp.int32)
    rows = states.first_rows[:, None] + places[None]
    rows = jnp.where(places[None] < states.num_rows[:, None], rows, num_rows)
    return shifted.at[rows].set(kept[:, num_kept - back :], mode="drop")


def _last_inputs(
    inputs: Float[Array, "T C"], kept: Float[Array, "R _last C"], states: StateMetadata
) -> Float[Array, "R _last C"]:
    """Return the last inputs behind each window: its own, and of those before if it is short."""
    num_kept = kept.shape[1]
    places = states.num_rows[:, None] - num_kept + jnp.arange(num_kept, dtype=jnp.int32)[None]
    own = inputs[states.first_rows[:, None] + jnp.maximum(places, 0)]
    earlier = jnp.clip(places + num_kept, 0, num_kept - 1)
    before = jnp.take_along_axis(kept, earlier[:, :, None], axis=1)
    return jnp.where((places >= 0)[:, :, None], own, before)


class CausalConvolution(nnx.Module):
    """`torch.nn.Conv1d(groups=channels)`: parameters `weight[channels, 1, taps]`, `bias`."""

    def __init__(self, num_channels: int, taps: int, *, use_bias: bool, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((num_channels, 1, taps), dtype))
        self.bias = nnx.Param(jnp.zeros((num_channels,), dtype)) if use_bias else None

    def __call__(
        self,
        x: Float[Array, "T C"],
        state: Float[Array, "_slots _last C"] | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T C"], Float[Array, "_slots _last C"] | None]:
        """Convolve; as of `short_convolution`."""
        bias = None if self.bias is None else self.bias[...]
        return short_convolution(x, self.weight[...][:, 0], bias, state, metadata)
