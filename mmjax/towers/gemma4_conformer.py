"""Gemma 4's encoder of sounds: spectrograms, packed, to a state every 40 ms (arXiv 2303.01037).

Two convolutions halve time and mel bins twice; a block of a Conformer is half an MLP, attention to
the states just before, a convolution over the states just before, and half an MLP. No state sees
what follows, but for the few frames that the first convolutions take together: so clips of any
length lie in one pack, a row for each state, and each row looks back within its own clip.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.layers.activation import get_activation
from mmjax.layers.linear import ClippedLinear, Linear, linear
from mmjax.layers.module import call_block
from mmjax.layers.norm import GemmaRMSNorm, LayerNorm

FRAMES_PER_ROW = 4
"""Of a spectrogram: each of two convolutions takes every second one."""
_KERNEL_SIZE = 3
"""Of both; no key of the config names it."""
_EPS = 1e-6
"""Of the norms that do not read the config's."""
_LONGEST_PERIOD = 10_000.0
"""Of the sinusoids that say how far back a state is."""
LookBack = Callable[[Array, int], Array]
"""`(rows, distance)` -> what stands so many rows before each in its own clip, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4ConformerConfig:
    """The keys of a `gemma4_audio` config that the arrays depend on."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str
    subsampling_conv_channels: tuple[int, int]
    conv_kernel_size: int
    residual_weight: float
    attention_context_left: int
    attention_logit_cap: float
    use_clipped_linears: bool
    gradient_clipping: float
    rms_norm_eps: float
    output_proj_dims: int
    position_shift: int
    """What is added to a distance before its sinusoids."""

    @classmethod
    def from_hf(cls, hf_config: Any) -> "Gemma4ConformerConfig":
        """Read HF's `Gemma4AudioConfig`; `CheckpointError` for what this encoder does not do."""
        chunk, past = hf_config.attention_chunk_size, hf_config.attention_context_left - 1
        if hf_config.attention_context_right:
            raise CheckpointError(
                f"`audio_config.attention_context_right` is {hf_config.attention_context_right}; "
                "expected 0: no state sees what follows"
            )
        if not 1 <= past <= chunk:
            raise CheckpointError(
                f"`audio_config.attention_context_left` is {past + 1}; expected 2 to {chunk + 1}, "
                f"for an `attention_chunk_size` of {chunk}"
            )
        return read_config(cls, hf_config, position_shift=(chunk + past) // 2 - past)

    @property
    def num_mel_bins(self) -> int:
        """Of spectrograms: a quarter of them is what the first convolution has channels for."""
        return self.subsampling_conv_channels[0] // FRAMES_PER_ROW * FRAMES_PER_ROW

    def make_linear(self, in_features: int, out_features: int, *, dtype: Any) -> Linear:
        """Return one of the blocks' linear layers."""
        kind = ClippedLinear if self.use_clipped_linears else Linear
        return kind(in_features, out_features, use_bias=False, dtype=dtype)

    def make_norm(self, *, eps: float = _EPS, dtype: Any) -> GemmaRMSNorm:
        """Return a norm of states."""
        return GemmaRMSNorm(self.hidden_size, eps=eps, is_centred=False, dtype=dtype)

    def clip(self, x: Float[Array, "P D"]) -> Float[Array, "P D"]:
        """Cut off what is beyond `gradient_clipping`, or the dtype."""
        most = min(self.gradient_clipping, float(jnp.finfo(x.dtype).max))
        return jnp.clip(x, -most, most)


class Weight(nnx.Module):
    """One parameter, `weight`."""

    def __init__(self, *shape: int, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros(shape, dtype))


class RelativeProjection(Linear):
    """A linear layer of the distances, which are the same for every state but for its adapter."""

    def __call__(self, x: Float[Array, "P _distances D"]) -> Float[Array, "_rows _distances F"]:
        """Project the distances of each state; of all at once where there are no adapters."""
        out = linear(x[:1], self.weight[...])
        return out if self.lora is None else out + self.lora(x)


class SubsampleLayer(nnx.Module):
    """A convolution of every second frame and bin, a norm, ReLU; `conv.weight[out, in, 3, 3]`."""

    def __init__(self, in_channels: int, out_channels: int, *, eps: float, dtype: Any) -> None:
        self.conv = Weight(out_channels, in_channels, _KERNEL_SIZE, _KERNEL_SIZE, dtype=dtype)
        self.channel_norm = LayerNorm(out_channels, eps=eps, has_bias=False, dtype=dtype)

    def __call__(
        self, frames: Float[Array, "P _frames _bins C"], look_back: LookBack
    ) -> Float[Array, "P _half_frames _half_bins F"]:
        """Convolve each row's frames, before which the last one of the row before stands."""
        num_frames, num_bins = frames.shape[1:3]
        joined = jnp.concatenate([look_back(frames[:, -1:], 1), frames], axis=1)
        padded = jnp.pad(joined, ((0, 0), (0, 0), (1, 1), (0, 0)))
        taps = [
            padded[:, time : time + num_frames : 2, bin_ : bin_ + num_bins : 2]
            for time in range(_KERNEL_SIZE)
            for bin_ in range(_KERNEL_SIZE)
        ]
        weight = self.conv.weight[...].transpose(0, 2, 3, 1)
        mixed = linear(jnp.concatenate(taps, axis=-1), weight.reshape(len(weight), -1))
        return jax.nn.relu(self.channel_norm(mixed))


class SubsampleProjection(nnx.Module):
    """Two such convolutions, and a projection of what they give for four frames."""

    def __init__(self, config: Gemma4ConformerConfig, *, dtype: Any) -> None:
        first, second = config.subsampling_conv_channels
        options = {"eps": config.rms_norm_eps, "dtype": dtype}
        self.layer0 = SubsampleLayer(1, first, **options)
        self.layer1 = SubsampleLayer(first, second, **options)
        num_values = config.num_mel_bins // FRAMES_PER_ROW * second
        self.input_proj_linear = Linear(num_values, config.hidden_size, use_bias=False, dtype=dtype)

    def __call__(
        self,
        input_features: Float[Array, "P _values"],
        num_frames: Int[Array, " P"],
        look_back: LookBack,
    ) -> Float[Array, "P D"]:
        """Return a state of each row of four frames; those behind its `num_frames` are zeros."""
        dtype = self.layer0.conv.weight.dtype
        frames = input_features.astype(dtype).reshape(len(input_features), FRAMES_PER_ROW, -1, 1)
        halves = self.layer0(frames, look_back)
        # The second half's own frame, around which it takes three, is the row's third.
        is_sound = jnp.stack([num_frames > 0, num_frames > 2], axis=1)
        states = self.layer1(jnp.where(is_sound[:, :, None, None], halves, 0), look_back)
        return self.input_proj_linear(states.reshape(len(states), -1))


class ConformerFeedForward(nnx.Module):
    """Half an MLP."""

    def __init__(self, config: Gemma4ConformerConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        self.ffw_layer_1 = config.make_linear(width, 4 * width, dtype=dtype)
        self.ffw_layer_2 = config.make_linear(4 * width, width, dtype=dtype)
        self.pre_layer_norm = config.make_norm(dtype=dtype)
        self.post_layer_norm = config.make_norm(dtype=dtype)
        self.activation = get_activation(config.hidden_act)
        self.config = config

    def __call__(self, x: Float[Array, "P D"]) -> Float[Array, "P D"]:
        """Return the residual stream behind it."""
        out = self.activation(self.ffw_layer_1(self.pre_layer_norm(self.config.clip(x))))
        out = self.post_layer_norm(self.config.clip(self.ffw_layer_2(out)))
        return x + out * self.config.residual_weight


class ConformerAttention(nnx.Module):
    """Attention to a state and the few before it, with capped scores that know the distance."""

    def __init__(self, config: Gemma4ConformerConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.post = (
            config.make_linear(width, width, dtype=dtype) for _ in range(4)
        )
        self.relative_k_proj = RelativeProjection(width, width, use_bias=False, dtype=dtype)
        self.head_dim = width // config.num_attention_heads
        self.per_dim_scale = nnx.Param(jnp.zeros((self.head_dim,), dtype))
        self.config = config

    def __call__(self, x: Float[Array, "P D"], look_back: LookBack) -> Float[Array, "P D"]:
        """Attend in float32, as HF does."""
        query, key, value = (
            project(x).astype(jnp.float32).reshape(len(x), -1, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        scale = jax.nn.softplus(self.per_dim_scale[...].astype(jnp.float32))
        query = query * (self.head_dim**-0.5 / math.log(2) * scale)[None, None, :]
        key = key * (math.log1p(math.e) / math.log(2))
        distances = range(self.config.attention_context_left - 1)
        relative = self._relative_keys(len(x), len(distances), x.dtype)
        # A product for each distance, and no matrix of keys: a row's bits know no other row.
        scores = jnp.stack(
            [(query * (look_back(key, n) + relative[:, n])).sum(-1) for n in distances], axis=-1
        )
        cap = self.config.attention_logit_cap
        scores = jnp.tanh(scores / cap) * cap
        ones = jnp.ones(len(x), jnp.float32)
        is_own = jnp.stack([look_back(ones, n) for n in distances], axis=-1) > 0
        weights = jax.nn.softmax(jnp.where(is_own[:, None, :], scores, -jnp.inf), axis=-1)
        out = sum(weights[..., n, None] * look_back(value, n) for n in distances)
        return self.post(jnp.asarray(out).reshape(x.shape).astype(x.dtype))

    def _relative_keys(
        self, num_states: int, number: int, dtype: Any
    ) -> Float[Array, "_rows _distances N H"]:
        width = self.config.hidden_size
        step = math.log(_LONGEST_PERIOD) / max(width // 2 - 1, 1)
        rates = np.exp(-step * np.arange(width // 2, dtype=np.float32))
        angles = (np.arange(number) + self.config.position_shift)[:, None] * rates[None, :]
        sinusoids = jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=-1), dtype)
        keys = self.relative_k_proj(jnp.broadcast_to(sinusoids, (num_states, number, width)))
        return keys.reshape(len(keys), number, -1, self.head_dim).astype(jnp.float32)


class ConformerConvolution(nnx.Module):
    """A sum over a state and the few before it; `depthwise_conv1d.weight[D, 1, n]`."""

    def __init__(self, config: Gemma4ConformerConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        self.linear_start = config.make_linear(width, 2 * width, dtype=dtype)
        self.linear_end = config.make_linear(width, width, dtype=dtype)
        self.depthwise_conv1d = Weight(width, 1, config.conv_kernel_size, dtype=dtype)
        self.pre_layer_norm = config.make_norm(eps=config.rms_norm_eps, dtype=dtype)
        self.conv_norm = config.make_norm(eps=config.rms_norm_eps, dtype=dtype)
        self.activation = get_activation(config.hidden_act)
        self.config = config

    def __call__(self, x: Float[Array, "P D"], look_back: LookBack) -> Float[Array, "P D"]:
        """Return the residual stream behind it."""
        values, gates = jnp.split(self.linear_start(self.pre_layer_norm(x)), 2, axis=-1)
        gated = (values * jax.nn.sigmoid(gates)).astype(jnp.float32)
        taps = self.depthwise_conv1d.weight[...][:, 0].astype(jnp.float32)
        size = self.config.conv_kernel_size
        mixed = sum(taps[None, :, size - 1 - n] * look_back(gated, n) for n in range(size))
        normed = self.conv_norm(self.config.clip(jnp.asarray(mixed).astype(x.dtype)))
        return x + self.linear_end(self.activation(normed))


class ConformerBlock(nnx.Module):
    """Half an MLP, attention, a convolution, half an MLP."""

    def __init__(self, config: Gemma4ConformerConfig, *, dtype: Any) -> None:
        self.feed_forward1 = ConformerFeedForward(config, dtype=dtype)
        self.feed_forward2 = ConformerFeedForward(config, dtype=dtype)
        self.self_attn = ConformerAttention(config, dtype=dtype)
        self.lconv1d = ConformerConvolution(config, dtype=dtype)
        self.norm_pre_attn = config.make_norm(dtype=dtype)
        self.norm_post_attn = config.make_norm(dtype=dtype)
        self.norm_out = config.make_norm(dtype=dtype)
        self.config = config

    def __call__(
        self, x: Float[Array, "P D"], segment_ids: Int[Array, " P"]
    ) -> Float[Array, "P D"]:
        """Return the states after this block."""
        clip, look_back = self.config.clip, find_look_back(segment_ids)
        x = self.feed_forward1(x)
        with jax.named_scope("attn"):
            out = self.self_attn(self.norm_pre_attn(clip(x)), look_back)
            x = x + self.norm_post_attn(clip(out))
        with jax.named_scope("conv"):
            x = self.lconv1d(x, look_back)
        return self.norm_out(clip(self.feed_forward2(x)))


class Gemma4Conformer(nnx.Module):
    """Packed spectrograms to states; parameters bear HF's names but for two kinds.

    HF pads each clip, so that the outputs of its `layers` and first norms are not ours row by row.
    """

    def __init__(self, config: Gemma4ConformerConfig, *, dtype: Any) -> None:
        self.subsample_conv_projection = SubsampleProjection(config, dtype=dtype)
        self.encoder_layers = nnx.List(
            [ConformerBlock(config, dtype=dtype) for _ in range(config.num_hidden_layers)]
        )
        self.output_proj = Linear(
            config.hidden_size, config.output_proj_dims, use_bias=True, dtype=dtype
        )

    def __call__(
        self,
        input_features: Float[Array, "P _values"],
        *,
        num_frames: Int[Array, " P"],
        segment_ids: Int[Array, " P"],
    ) -> Float[Array, "P F"]:
        """Return a state of each row.

        Args:
            input_features: Four frames a row, one behind the other; zeros behind a clip's end.
            num_frames: How many of them are of the clip: 4, or fewer in its last row.
            segment_ids: The row's clip.
        """
        look_back = find_look_back(segment_ids)
        x = self.subsample_conv_projection(input_features, num_frames, look_back)
        for block in self.encoder_layers:
            x = call_block(block, x, segment_ids)
        return self.output_proj(x)


def find_look_back(segment_ids: Int[Array, " P"]) -> LookBack:
    """Return what looks back within each segment."""

    def look_back(rows: Array, distance: int) -> Array:
        if distance == 0:
            return rows
        index = jnp.arange(len(rows), dtype=jnp.int32)
        is_same = (jnp.roll(segment_ids, distance) == segment_ids) & (index >= distance)
        mask = is_same.reshape(-1, *[1] * (rows.ndim - 1))
        return jnp.where(mask, jnp.roll(rows, distance, axis=0), 0)

    return look_back
