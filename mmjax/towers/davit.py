"""DaViT's vision encoder: attention within windows, then among channels (arXiv 2204.03645)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.layers.attention.api import dense_attention
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import MLP
from mmjax.layers.module import call_block
from mmjax.layers.norm import LayerNorm
from mmjax.layers.vision import Conv2d, DepthwiseConv2d

_EPS = 1e-5
"""The epsilon of every norm; no key of the config names it."""
_KERNEL_SIZE = 3
"""The side of the depthwise convolutions that encode positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DavitConfig:
    """The keys of a `florence_vision` config that the arrays depend on; tuples: one per stage."""

    in_channels: int
    depths: tuple[int, ...]
    patch_size: tuple[int, ...]
    patch_stride: tuple[int, ...]
    patch_padding: tuple[int, ...]
    patch_prenorm: tuple[bool, ...]
    embed_dim: tuple[int, ...]
    num_heads: tuple[int, ...]
    num_groups: tuple[int, ...]
    window_size: int
    mlp_ratio: float
    qkv_bias: bool
    activation_function: str

    @classmethod
    def from_hf(cls, hf_config: Any) -> "DavitConfig":
        """Read HF's `Florence2VisionConfig`; `CheckpointError` where lists differ in length."""
        config = read_config(cls, hf_config)
        found = {name: getattr(config, name) for name in cls.__dataclass_fields__}
        lengths = {name: len(value) for name, value in found.items() if isinstance(value, tuple)}
        if len(set(lengths.values())) != 1:
            raise CheckpointError(
                "lists of `vision_config` hold a value for each stage, but their lengths differ: "
                f"{', '.join(f'`{name}` {length}' for name, length in lengths.items())}"
            )
        return config


class DavitConvEmbed(nnx.Module):
    """The strided convolution at the beginning of a stage, with a norm before or after it."""

    def __init__(self, config: DavitConfig, stage: int, *, dtype: Any) -> None:
        width = config.embed_dim[stage]
        in_channels = config.embed_dim[stage - 1] if stage else config.in_channels
        edge = config.patch_padding[stage]
        self.conv = Conv2d(
            in_channels,
            width,
            config.patch_size[stage],
            stride=config.patch_stride[stage],
            padding=((edge, edge), (edge, edge)),
            is_channels_last=True,
            dtype=dtype,
        )
        self.is_norm_first = config.patch_prenorm[stage]
        self.norm = LayerNorm(in_channels if self.is_norm_first else width, eps=_EPS, dtype=dtype)

    def __call__(self, x: Float[Array, "I _y _x C"]) -> Float[Array, "I Y X D"]:
        """Return the stage's grid."""
        return self.conv(self.norm(x)) if self.is_norm_first else self.norm(self.conv(x))


class DavitWindowAttention(nnx.Module):
    """Attention among the patches of each `window_size` square window."""

    def __init__(self, config: DavitConfig, stage: int, *, dtype: Any) -> None:
        width = config.embed_dim[stage]
        self.qkv = Linear(width, 3 * width, use_bias=config.qkv_bias, dtype=dtype)
        self.proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.num_heads = config.num_heads[stage]
        self.window_size = config.window_size

    def __call__(self, x: Float[Array, "I Y X D"]) -> Float[Array, "I Y X D"]:
        """Attend within windows; as in HF, zeros that fill the last ones are keys too."""
        images, height, width, dim = x.shape
        size = self.window_size
        x = jnp.pad(x, ((0, 0), (0, -height % size), (0, -width % size), (0, 0)))
        rows, columns = x.shape[1] // size, x.shape[2] // size
        windows = x.reshape(images * rows, size, columns, size * dim).transpose(0, 2, 1, 3)
        windows = windows.reshape(-1, size * size, dim)
        head_dim = dim // self.num_heads
        qkv = self.qkv(windows).reshape(-1, size * size, 3, self.num_heads, head_dim)
        out = dense_attention(
            qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], mask=None, scale=head_dim**-0.5
        )
        out = self.proj(out.reshape(-1, size * size, dim))
        out = out.reshape(images * rows, columns, size, size * dim).transpose(0, 2, 1, 3)
        return out.reshape(images, rows * size, columns * size, dim)[:, :height, :width]


class DavitChannelAttention(nnx.Module):
    """Attention among the channels of each group; a channel's vector is its values at patches."""

    def __init__(self, config: DavitConfig, stage: int, *, dtype: Any) -> None:
        width = config.embed_dim[stage]
        self.qkv = Linear(width, 3 * width, use_bias=config.qkv_bias, dtype=dtype)
        self.proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.num_groups = config.num_groups[stage]

    def __call__(self, x: Float[Array, "I Y X D"]) -> Float[Array, "I Y X D"]:
        """Attend over the channels of a group."""
        images, height, width, dim = x.shape
        num_patches, group_width = height * width, dim // self.num_groups
        qkv = self.qkv(x).reshape(images, num_patches, 3, self.num_groups, group_width)
        query, key, value = qkv.transpose(2, 0, 4, 3, 1)  # 3 I (group width) groups P
        out = dense_attention(query, key, value, mask=None, scale=num_patches**-0.5)
        out = out.transpose(0, 3, 2, 1).reshape(images, height, width, dim)
        return self.proj(out)


class DavitHalf(nnx.Module):
    """A pre-norm block, with a depthwise convolution before attention and one before the MLP."""

    def __init__(self, config: DavitConfig, stage: int, *, dtype: Any) -> None:
        width = config.embed_dim[stage]
        self.conv1 = DepthwiseConv2d(width, _KERNEL_SIZE, dtype=dtype)
        self.norm1 = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.conv2 = DepthwiseConv2d(width, _KERNEL_SIZE, dtype=dtype)
        self.norm2 = LayerNorm(width, eps=_EPS, dtype=dtype)
        inner = int(width * config.mlp_ratio)
        self.ffn = MLP(width, inner, activation=config.activation_function, dtype=dtype)

    def attend(self, x: Float[Array, "I Y X D"]) -> Float[Array, "I Y X D"]:
        """Return what attention adds."""
        raise NotImplementedError(f"{type(self).__name__} must attend")

    def __call__(self, x: Float[Array, "I Y X D"]) -> Float[Array, "I Y X D"]:
        """Return the residual stream after this half of a block."""
        with jax.named_scope("attn"):
            x = x + self.conv1(x)
            x = x + self.attend(self.norm1(x))
        with jax.named_scope("mlp"):
            x = x + self.conv2(x)
            return x + self.ffn(self.norm2(x))


class DavitSpatialBlock(DavitHalf):
    """The half of a block that attends within windows."""

    def __init__(self, config: DavitConfig, stage: int, *, dtype: Any) -> None:
        super().__init__(config, stage, dtype=dtype)
        self.window_attn = DavitWindowAttention(config, stage, dtype=dtype)

    def attend(self, x: Float[Array, "I Y X D"]) -> Float[Array, "I Y X D"]:
        """Attend within windows."""
        return self.window_attn(x)


class DavitChannelBlock(DavitHalf):
    """The half of a block that attends among channels."""

    def __init__(self, config: DavitConfig, stage: int, *, dtype: Any) -> None:
        super().__init__(config, stage, dtype=dtype)
        self.channel_attn = DavitChannelAttention(config, stage, dtype=dtype)

    def attend(self, x: Float[Array, "I Y X D"]) -> Float[Array, "I Y X D"]:
        """Attend among channels."""
        return self.channel_attn(x)


class DavitBlock(nnx.Module):
    """Windows, then channels."""

    def __init__(self, config: DavitConfig, stage: int, *, dtype: Any) -> None:
        self.spatial_block = DavitSpatialBlock(config, stage, dtype=dtype)
        self.channel_block = DavitChannelBlock(config, stage, dtype=dtype)

    def __call__(self, x: Float[Array, "I Y X D"]) -> Float[Array, "I Y X D"]:
        """Return the residual stream after this block."""
        return self.channel_block(self.spatial_block(x))


class DavitVisionTower(nnx.Module):
    """Images to a grid of features, with HF's parameter names; a stage halves the grid, say."""

    def __init__(self, config: DavitConfig, *, dtype: Any) -> None:
        stages = range(len(config.depths))
        self.convs = nnx.List([DavitConvEmbed(config, stage, dtype=dtype) for stage in stages])
        self.blocks = nnx.List(
            [
                nnx.List(
                    [DavitBlock(config, stage, dtype=dtype) for _ in range(config.depths[stage])]
                )
                for stage in stages
            ]
        )

    def __call__(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I Y X D"]:
        """Return the last stage's grid."""
        hidden = pixel_values.transpose(0, 2, 3, 1)
        for conv, blocks in zip(self.convs, self.blocks, strict=True):
            hidden = conv(hidden)
            for block in blocks:
                hidden = call_block(block, hidden)
        return hidden
