"""Whisper's encoder (arXiv 2212.04356): a log-mel spectrogram to a state every 20 ms.

Qwen2-Audio (arXiv 2407.10759) and Voxtral (arXiv 2507.13264) have it too, by the same names;
Qwen2.5-Omni (arXiv 2503.20215) has it over each chunk of a clip, and Ultravox
(github.com/fixie-ai/ultravox) over chunks of 30 seconds of which the last may be shorter.

Qwen3-Omni's (arXiv 2509.17765), which is also Qwen3-ASR's, has Whisper's blocks behind other
convolutions: over time and mel bins, of a second each, to a state every 80 ms.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.layers.activation import get_activation
from mmjax.layers.attention.api import dense_attention
from mmjax.layers.linear import Linear, linear
from mmjax.layers.module import call_block
from mmjax.layers.norm import LayerNorm
from mmjax.layers.vision import Conv2d, PositionTable
from mmjax.rounding import cdiv

FRAMES_PER_STATE = 2
"""The second convolution's stride: of 3,000 frames, 1,500 states."""
_KERNEL_SIZE = 3
_EPS = 1e-5
"""The epsilon of every norm; no key of the config names it."""
_NUM_HALVINGS = 3
"""Qwen3-Omni's convolutions, each of which takes every second frame and bin."""
_STATES_PER_CHUNK = 13
"""Of a whole chunk; HF's model counts with this number, whatever a chunk's length is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperEncoderConfig:
    """The keys of HF's configs of the three that the arrays depend on."""

    num_mel_bins: int
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    max_source_positions: int
    activation_function: str
    pool_size: int = 1
    """So many states are averaged to one before the last norm: 2 in Qwen2-Audio."""
    is_chunked: bool = False
    """Whether a spectrogram is a chunk of a clip, as in Qwen2.5-Omni: the convolutions see zeros
    behind its frames, and positions are computed; parameters have other names."""

    @classmethod
    def from_hf(cls, hf_config: Any, **own: Any) -> "WhisperEncoderConfig":
        """Read HF's config of any of them; `own`: fields that it does not have."""
        return read_config(cls, hf_config, **own)


class Conv1d(nnx.Module):
    """`torch.nn.Conv1d` of three taps, zeros before and behind, as one matrix product.

    Parameters `weight[out, in, 3]` and `bias[out]`.
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1, dtype: Any) -> None:
        shape = (out_channels, in_channels, _KERNEL_SIZE)
        self.weight = nnx.Param(jnp.zeros(shape, dtype))
        self.bias = nnx.Param(jnp.zeros((out_channels,), dtype))
        self.stride = stride

    def __call__(self, x: Float[Array, "U _time C"]) -> Float[Array, "U _less D"]:
        """Convolve along time."""
        length, stride = x.shape[1], self.stride
        edge = _KERNEL_SIZE // 2
        padded = jnp.pad(x, ((0, 0), (edge, edge), (0, 0)))
        taps = [padded[:, tap : tap + length : stride] for tap in range(_KERNEL_SIZE)]
        weight = self.weight[...].transpose(0, 2, 1).reshape(self.weight.shape[0], -1)
        return linear(jnp.concatenate(taps, axis=-1), weight, self.bias[...])


class WhisperEncoderAttention(nnx.Module):
    """Attention among all states of a clip."""

    def __init__(self, width: int, num_heads: int, *, has_key_bias: bool, dtype: Any) -> None:
        self.q_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.k_proj = Linear(width, width, use_bias=has_key_bias, dtype=dtype)
        self.v_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.out_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.head_dim = width // num_heads

    def __call__(
        self, x: Float[Array, "U P D"], mask: Bool[Array, "U P P"] | None
    ) -> Float[Array, "U P D"]:
        """Attend to the states that `mask` shows; None: to all."""
        split = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (
            project(x).reshape(split) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = dense_attention(query, key, value, mask=mask, scale=self.head_dim**-0.5)
        return self.out_proj(out.reshape(x.shape))


class WhisperEncoderLayer(nnx.Module):
    """A pre-norm block."""

    def __init__(
        self,
        config: "WhisperEncoderConfig | Qwen3AudioConfig",
        *,
        has_key_bias: bool = False,
        dtype: Any,
    ) -> None:
        width, inner = config.d_model, config.encoder_ffn_dim
        heads = config.encoder_attention_heads
        self.self_attn = WhisperEncoderAttention(
            width, heads, has_key_bias=has_key_bias, dtype=dtype
        )
        self.self_attn_layer_norm = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.fc1 = Linear(width, inner, use_bias=True, dtype=dtype)
        self.fc2 = Linear(inner, width, use_bias=True, dtype=dtype)
        self.final_layer_norm = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.activation = get_activation(config.activation_function)

    def __call__(
        self, x: Float[Array, "U P D"], mask: Bool[Array, "U P P"] | None
    ) -> Float[Array, "U P D"]:
        """Return the residual stream after this block."""
        with jax.named_scope("attn"):
            x = x + self.self_attn(self.self_attn_layer_norm(x), mask)
        with jax.named_scope("mlp"):
            return x + self.fc2(self.activation(self.fc1(self.final_layer_norm(x))))


class WhisperEncoder(nnx.Module):
    """Log-mel spectrograms to states; parameters bear HF's names."""

    def __init__(self, config: WhisperEncoderConfig, *, dtype: Any) -> None:
        width = config.d_model
        self.conv1 = Conv1d(config.num_mel_bins, width, dtype=dtype)
        self.conv2 = Conv1d(width, width, stride=FRAMES_PER_STATE, dtype=dtype)
        layers = nnx.List(
            [WhisperEncoderLayer(config, dtype=dtype) for _ in range(config.encoder_layers)]
        )
        if config.is_chunked:
            # HF has the states of all clips in a row, so that these are not its row by row.
            self.encoder_layers = layers
        else:
            # Sinusoids, which checkpoints hold.
            size = config.max_source_positions
            self.embed_positions = PositionTable(size, width, dtype=dtype)
            self.layers = layers
        self.layer_norm = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.config = config
        self.activation = get_activation("gelu")

    def __call__(
        self,
        input_features: Float[Array, "U C _frames"],
        num_keys: Int[Array, " U"] | None = None,
        num_frames: Int[Array, " U"] | None = None,
    ) -> Float[Array, "U P D"]:
        """Return the normed states of spectrograms, silence behind shorter clips.

        `num_keys`: how many states of each clip, from the first, all of its states see; None: all
        of them. Whisper and Voxtral see the silence behind a clip, Qwen2-Audio and Ultravox do
        not.
        `num_frames`: of a chunk, behind which are zeros.
        """
        x = input_features.astype(self.conv1.weight.dtype).transpose(0, 2, 1)
        x = self.activation(self.conv1(x))
        if num_frames is not None:
            is_sound = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] < num_frames[:, None]
            x = jnp.where(is_sound[:, :, None], x, 0)
        x = self.activation(self.conv2(x))
        is_chunked = self.config.is_chunked
        table = _sinusoids(*x.shape[1:]) if is_chunked else self.embed_positions.weight[...]
        x = x + jnp.asarray(table, x.dtype)[None, :, :]
        mask = None
        if num_keys is not None:
            is_key = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] < num_keys[:, None]
            mask = jnp.broadcast_to(is_key[:, None, :], (len(x), x.shape[1], x.shape[1]))
        for layer in self.encoder_layers if is_chunked else self.layers:
            x = call_block(layer, x, mask)
        return self.layer_norm(_average(x, self.config.pool_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3AudioConfig:
    """The keys of Qwen3-Omni's and Qwen3-ASR's `audio_config` that the arrays depend on."""

    num_mel_bins: int
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    activation_function: str
    downsample_hidden_size: int
    """Channels of the convolutions."""
    n_window: int
    """Half the frames of a chunk, which the convolutions see by itself."""
    n_window_infer: int
    """Frames whose states see each other."""

    @classmethod
    def from_hf(cls, hf_config: Any) -> "Qwen3AudioConfig":
        """Read HF's config."""
        return read_config(cls, hf_config)

    @property
    def chunk_size(self) -> int:
        """Frames of a chunk."""
        return 2 * self.n_window

    @property
    def num_chunks(self) -> int:
        """Chunks whose states see each other: a window."""
        return self.n_window_infer // self.chunk_size


class Qwen3AudioEncoder(nnx.Module):
    """Windows of spectrograms to states; parameters bear HF's names, but for the layers.

    HF has the states of all clips in a row, so that the layers' are not its row by row.
    """

    def __init__(self, config: Qwen3AudioConfig, *, dtype: Any) -> None:
        width, inner, num_bins = config.d_model, config.downsample_hidden_size, config.num_mel_bins
        options: dict[str, Any] = {"stride": 2, "padding": ((1, 1), (1, 1)), "dtype": dtype}
        options["is_channels_last"] = True
        self.conv2d1 = Conv2d(1, inner, _KERNEL_SIZE, **options)
        self.conv2d2 = Conv2d(inner, inner, _KERNEL_SIZE, **options)
        self.conv2d3 = Conv2d(inner, inner, _KERNEL_SIZE, **options)
        num_bins = cdiv(num_bins, 2**_NUM_HALVINGS)
        self.conv_out = Linear(inner * num_bins, width, use_bias=False, dtype=dtype)
        self.encoder_layers = nnx.List(
            [
                WhisperEncoderLayer(config, has_key_bias=True, dtype=dtype)
                for _ in range(config.encoder_layers)
            ]
        )
        self.ln_post = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.config = config
        self.activation = get_activation("gelu")

    def __call__(
        self,
        input_features: Float[Array, "U C _frames"],
        num_frames: Int[Array, " U"],
        num_seen: Int[Array, " U"],
    ) -> Float[Array, "U P D"]:
        """Return the normed states of windows; those behind a window's frames mean nothing.

        `num_frames`: of a window, behind which are zeros. `num_seen`: how many frames of a chunk
        the convolutions see, behind which each of them sees zeros: all of a chunk, or those of a
        clip that has less than one, as HF has it.
        """
        x = self._convolve(input_features, num_seen)
        chunk = self.config.chunk_size
        num_keys = num_frames // chunk * _STATES_PER_CHUNK
        num_keys = num_keys + (num_frames % chunk + 2**_NUM_HALVINGS - 1) // 2**_NUM_HALVINGS
        is_key = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] < num_keys[:, None]
        mask = jnp.broadcast_to(is_key[:, None, :], (len(x), x.shape[1], x.shape[1]))
        for layer in self.encoder_layers:
            x = call_block(layer, x, mask)
        return self.ln_post(x)

    def _convolve(
        self, input_features: Float[Array, "U C _frames"], num_seen: Int[Array, " U"]
    ) -> Float[Array, "U P D"]:
        """Return each window's states before the first layer, chunk by chunk."""
        num_units, num_bins = input_features.shape[:2]
        size = (num_units, num_bins, self.config.num_chunks, self.config.chunk_size)
        x = input_features.astype(self.conv2d1.weight.dtype).reshape(size)
        x = x.transpose(0, 2, 1, 3).reshape(-1, num_bins, self.config.chunk_size, 1)
        left = jnp.repeat(num_seen, self.config.num_chunks)
        for convolution in (self.conv2d1, self.conv2d2, self.conv2d3):
            x = self.activation(convolution(x))
            left = (left + 1) // 2
            is_seen = jnp.arange(x.shape[2], dtype=jnp.int32)[None, :] < left[:, None]
            x = jnp.where(is_seen[:, None, :, None], x, 0)
        # Of a state, all bins of the first channel come before those of the second.
        num_chunks, _, num_states, _ = x.shape
        x = self.conv_out(x.transpose(0, 2, 3, 1).reshape(num_chunks, num_states, -1))
        x = x + jnp.asarray(_sinusoids(*x.shape[1:]), x.dtype)[None, :, :]
        return x.reshape(num_units, -1, x.shape[-1])


def _sinusoids(length: int, width: int) -> np.ndarray:
    rates = np.exp(-np.log(10_000.0) / (width // 2 - 1) * np.arange(width // 2)).astype(np.float32)
    angles = np.arange(length, dtype=np.float32)[:, None] * rates[None, :]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def _average(x: Float[Array, "U _states D"], pool_size: int) -> Float[Array, "U P D"]:
    """Average each `pool_size` states; what is left over at the end goes."""
    if pool_size == 1:
        return x
    num_rows = x.shape[1] // pool_size
    groups = x[:, : num_rows * pool_size].reshape(len(x), num_rows, pool_size, x.shape[-1])
    return groups.astype(jnp.float32).mean(2).astype(x.dtype)
