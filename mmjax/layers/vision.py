"""What vision towers share: patches, convolutions, positions, and the blocks of CLIP and SigLIP."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from mmjax.errors import CheckpointError
from mmjax.layers.attention.api import dense_attention
from mmjax.layers.linear import Linear, linear
from mmjax.layers.mlp import MLP
from mmjax.layers.module import call_block
from mmjax.layers.norm import LayerNorm

Padding = Sequence[tuple[int, int]]
"""Zeros before and behind: of the rows, of the columns."""

_CUBIC = -0.75
"""The parameter of the bicubic kernel in torch, OpenCV and Pillow's older versions (Keys: -0.5)."""


class PatchEmbedding(nnx.Module):
    """A convolution with stride equal to its kernel, as one matrix product over patches."""

    def __init__(
        self, num_channels: int, dim: int, patch_size: int, *, use_bias: bool, dtype: Any
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((dim, num_channels, patch_size, patch_size), dtype))
        self.bias = nnx.Param(jnp.zeros((dim,), dtype)) if use_bias else None
        self.patch_size = patch_size

    def __call__(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        """Project patches, row by row; incomplete ones at the edges are dropped."""
        images, channels, height, width = pixel_values.shape
        size = self.patch_size
        rows, columns = height // size, width // size
        whole = pixel_values[:, :, : rows * size, : columns * size]
        patches = whole.reshape(images, channels, rows, size, columns, size)
        patches = patches.transpose(0, 2, 4, 1, 3, 5)  # I Y X C size size
        patches = patches.reshape(images, rows * columns, channels * size * size)
        return self.project(patches)

    def project(self, patches: Float[Array, "... _pixels"]) -> Float[Array, "... D"]:
        """Project patches that are cut already, their pixels by channel, row and column."""
        weight = self.weight[...].reshape(self.weight.shape[0], -1)
        return linear(patches, weight, None if self.bias is None else self.bias[...])


class Conv2d(nnx.Module):
    """`torch.nn.Conv2d`: parameters `weight[out, in, rows, columns]` and `bias[out]`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: Padding = ((0, 0), (0, 0)),
        is_channels_last: bool = False,
        dtype: Any,
    ) -> None:
        """`is_channels_last`: images are `[I, rows, columns, C]`, else `[I, C, rows, columns]`."""
        shape = (out_channels, in_channels, kernel_size, kernel_size)
        self.weight = nnx.Param(jnp.zeros(shape, dtype))
        self.bias = nnx.Param(jnp.zeros((out_channels,), dtype))
        self.stride = stride
        self.padding = tuple(padding)
        self.is_channels_last = is_channels_last

    def __call__(self, x: Float[Array, "I _ _ _"]) -> Float[Array, "I _ _ _"]:
        """Convolve each image."""
        layout = "NHWC" if self.is_channels_last else "NCHW"
        out = jax.lax.conv_general_dilated(
            x,
            self.weight[...],
            window_strides=(self.stride, self.stride),
            padding=self.padding,
            dimension_numbers=(layout, "OIHW", layout),
        )
        shape = (1, 1, 1, -1) if self.is_channels_last else (1, -1, 1, 1)
        return out + self.bias[...].reshape(shape)


class DepthwiseConv2d(nnx.Module):
    """A convolution of each channel by itself, of the same size out as in.

    As `torch.nn.Conv2d(groups=channels)`: parameters `weight[channels, 1, size, size]` and
    `bias[channels]`; `size` is odd.
    """

    def __init__(self, num_channels: int, kernel_size: int, *, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((num_channels, 1, kernel_size, kernel_size), dtype))
        self.bias = nnx.Param(jnp.zeros((num_channels,), dtype))

    def __call__(self, x: Float[Array, "I Y X C"]) -> Float[Array, "I Y X C"]:
        """Convolve images, padded with zeros on every side."""
        # Sums of shifted images: XLA's CPU backend has no fast program for grouped convolutions.
        weight = self.weight[...].astype(jnp.float32)
        size, (_, height, width, _) = weight.shape[-1], x.shape
        edge = size // 2
        padded = jnp.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0))).astype(jnp.float32)
        out = self.bias[...].astype(jnp.float32)[None, None, None, :]
        for row in range(size):
            for column in range(size):
                shifted = padded[:, row : row + height, column : column + width]
                out = out + shifted * weight[:, 0, row, column][None, None, None, :]
        return out.astype(x.dtype)


class PositionTable(nnx.Module):
    """One learned vector a patch: parameter `weight[P, D]`."""

    def __init__(self, num_positions: int, dim: int, *, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((num_positions, dim), dtype))


def bicubic_matrix(size: int, new_size: int) -> Float[np.ndarray, "_new _old"]:
    """Return what a row of `size` values is multiplied by to have `new_size` of them.

    As torch's `interpolate`: half-pixel centres (`align_corners=False`), edges repeated, no
    antialiasing.
    """
    places = (np.arange(new_size) + 0.5) * size / new_size - 0.5
    first = np.floor(places).astype(int)
    matrix = np.zeros((new_size, size))
    for tap in range(-1, 3):
        weights = _cubic(np.abs(places - (first + tap)))
        np.add.at(matrix, (np.arange(new_size), np.clip(first + tap, 0, size - 1)), weights)
    return matrix.astype(np.float32)


def resize_square(table: Float[Array, "_old D"], side: int) -> Float[Array, "_new D"]:
    """Resize a square table of positions, row by row, to `side` rows and columns."""
    old = round(table.shape[0] ** 0.5)
    if side == old:
        return table
    matrix = jnp.asarray(bicubic_matrix(old, side))
    grid = table.astype(jnp.float32).reshape(old, old, -1)
    grid = jnp.einsum("yi,xj,ijd->yxd", matrix, matrix, grid)
    return grid.reshape(side * side, -1).astype(table.dtype)


def _cubic(distance: np.ndarray) -> np.ndarray:
    near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * _CUBIC - 4 * _CUBIC
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The keys of a `clip_vision_model` or `siglip_vision_model` config that arrays depend on."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    layer_norm_eps: float
    hidden_act: str

    @classmethod
    def from_hf(cls, hf_config: Any) -> "VisionConfig":
        """Read HF's `vision_config`; `CheckpointError` for pictures that are not square."""
        for name in ("image_size", "patch_size"):
            if not isinstance(getattr(hf_config, name), int):
                raise CheckpointError(
                    f"`vision_config.{name}` is {getattr(hf_config, name)!r}; a "
                    f"`{hf_config.model_type}` has one number there, the side of a square"
                )
        return cls(**{name: getattr(hf_config, name) for name in cls.__dataclass_fields__})

    @property
    def num_patches(self) -> int:
        """Patches of a picture of `image_size`."""
        return (self.image_size // self.patch_size) ** 2


class VisionAttention(nnx.Module):
    """Full attention among the rows of one picture."""

    def __init__(self, config: VisionConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        self.q_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.k_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.v_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.out_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.num_heads = config.num_attention_heads

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P D"]:
        """Attend over `P`."""
        head_dim = x.shape[-1] // self.num_heads
        split = (*x.shape[:2], self.num_heads, head_dim)
        query, key, value = (
            project(x).reshape(split) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = dense_attention(query, key, value, mask=None, scale=head_dim**-0.5)
        return self.out_proj(out.reshape(x.shape))


class VisionLayer(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(
        self, self_attn: nnx.Module, mlp: nnx.Module, width: int, *, eps: float, dtype: Any
    ) -> None:
        self.layer_norm1 = LayerNorm(width, eps=eps, dtype=dtype)
        self.self_attn = self_attn
        self.layer_norm2 = LayerNorm(width, eps=eps, dtype=dtype)
        self.mlp = mlp

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P D"]:
        """Return the residual stream after this block."""
        with jax.named_scope("attn"):
            x = x + self.self_attn(self.layer_norm1(x))
        with jax.named_scope("mlp"):
            return x + self.mlp(self.layer_norm2(x))


class VisionEncoder(nnx.Module):
    """The stack of blocks."""

    def __init__(self, layers: Iterable[nnx.Module]) -> None:
        self.layers = nnx.List(layers)

    def __call__(
        self, x: Float[Array, "I P D"], feature_layers: Sequence[int] = ()
    ) -> tuple[Float[Array, "I P D"], list[Float[Array, "I P D"]]]:
        """Return the last block's output, and the states that are asked for.

        `feature_layers` counts as HF's `hidden_states`: 0 is `x`, n the output of block n - 1.
        """
        states = [x]
        for layer in self.layers:
            states.append(call_block(layer, states[-1]))
        return states[-1], [states[layer] for layer in feature_layers]


def build_vision_encoder(config: VisionConfig, *, dtype: Any) -> VisionEncoder:
    """Return the blocks of CLIP and SigLIP."""
    width, inner = config.hidden_size, config.intermediate_size
    return VisionEncoder(
        VisionLayer(
            VisionAttention(config, dtype=dtype),
            MLP(width, inner, activation=config.hidden_act, dtype=dtype),
            width,
            eps=config.layer_norm_eps,
            dtype=dtype,
        )
        for _ in range(config.num_hidden_layers)
    )
