"""Chameleon's picture tokenizer (arXiv 2405.09818, section 2.1): the encoder of a VQ-VAE.

A picture becomes a grid of codes, each the nearest of a codebook's vectors (arXiv 1711.00937; the
architecture is VQGAN's, arXiv 2012.09841). Its decoder, which generates pictures, is not here.

All parameters are float32, and products are computed as such on every platform: rounding to
bfloat16 would select other codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.layers.attention.api import dense_attention
from mmjax.layers.embed import Embed
from mmjax.layers.norm import GroupNorm
from mmjax.layers.vision import Conv2d

DTYPE = jnp.float32
NUM_GROUPS, EPS = 32, 1e-6
"""The same in every GroupNorm; no key of the config names them."""
AROUND = ((1, 1), (1, 1))
"""Padding that keeps a picture's size."""
BELOW_AND_RIGHT = ((0, 1), (0, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChameleonVQVAEConfig:
    """The keys of a `chameleon_vqgan` config that the arrays depend on."""

    embed_dim: int
    num_embeddings: int
    latent_channels: int
    resolution: int
    in_channels: int
    base_channels: int
    channel_multiplier: tuple[int, ...]
    num_res_blocks: int
    attn_resolutions: tuple[int, ...]
    has_attention: bool

    @classmethod
    def from_hf(cls, hf_config: Any) -> "ChameleonVQVAEConfig":
        """Read HF's `ChameleonVQVAEConfig`; `CheckpointError` for what its encoder cannot be."""
        if hf_config.double_latent:
            raise CheckpointError(
                "`vq_config.double_latent` is true: the encoder would give twice the channels "
                "that `quant_conv` takes; mmjax knows false"
            )
        if hf_config.attn_type not in ("vanilla", "none", None):
            raise CheckpointError(
                f"`vq_config.attn_type` is `{hf_config.attn_type}`; "
                "mmjax knows `vanilla` and `none`"
            )
        if hf_config.base_channels % NUM_GROUPS:
            raise CheckpointError(
                f"`vq_config.base_channels` is {hf_config.base_channels}; it must be a multiple of "
                f"{NUM_GROUPS}, the groups of each norm"
            )
        return read_config(
            cls,
            hf_config,
            attn_resolutions=tuple(hf_config.attn_resolutions or ()),
            has_attention=hf_config.attn_type == "vanilla",
        )


def _swish(x: Float[Array, "I C _y _x"]) -> Float[Array, "I C _y _x"]:
    return x * jax.nn.sigmoid(x)


def _norm(num_channels: int) -> GroupNorm:
    return GroupNorm(NUM_GROUPS, num_channels, eps=EPS, dtype=DTYPE)


def _conv(in_channels: int, out_channels: int) -> Conv2d:
    return Conv2d(in_channels, out_channels, 3, padding=AROUND, dtype=DTYPE)


def _pointwise(in_channels: int, out_channels: int) -> Conv2d:
    return Conv2d(in_channels, out_channels, 1, dtype=DTYPE)


class ResnetBlock(nnx.Module):
    """Two convolutions beside a residual path, which is projected where the width changes."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        self.norm1, self.conv1 = _norm(in_channels), _conv(in_channels, out_channels)
        self.norm2, self.conv2 = _norm(out_channels), _conv(out_channels, out_channels)
        is_same = in_channels == out_channels
        self.nin_shortcut = None if is_same else _pointwise(in_channels, out_channels)

    def __call__(self, x: Float[Array, "I C _y _x"]) -> Float[Array, "I _out _y _x"]:
        """Return the sum of both paths."""
        out = self.conv1(_swish(self.norm1(x)))
        out = self.conv2(_swish(self.norm2(out)))
        return (x if self.nin_shortcut is None else self.nin_shortcut(x)) + out


class AttentionBlock(nnx.Module):
    """Full attention with one head among the places of a picture."""

    def __init__(self, num_channels: int) -> None:
        self.norm = _norm(num_channels)
        self.q, self.k = (_pointwise(num_channels, num_channels) for _ in range(2))
        self.v, self.proj_out = (_pointwise(num_channels, num_channels) for _ in range(2))

    def __call__(self, x: Float[Array, "I C _y _x"]) -> Float[Array, "I C _y _x"]:
        """Attend over `Y * X`."""
        images, channels = x.shape[:2]
        normed = self.norm(x)
        query, key, value = (
            project(normed).reshape(images, channels, -1).transpose(0, 2, 1)[:, :, None]
            for project in (self.q, self.k, self.v)
        )  # I P 1 C
        out = dense_attention(query, key, value, mask=None, scale=channels**-0.5)
        return x + self.proj_out(out[:, :, 0].transpose(0, 2, 1).reshape(x.shape))


class Downsample(nnx.Module):
    """Halves a picture; its zeros lie below and to the right alone."""

    def __init__(self, num_channels: int) -> None:
        self.conv = Conv2d(
            num_channels, num_channels, 3, stride=2, padding=BELOW_AND_RIGHT, dtype=DTYPE
        )

    def __call__(self, x: Float[Array, "I C _y _x"]) -> Float[Array, "I C _rows _columns"]:
        """Return every second row and column."""
        return self.conv(x)


class Level(nnx.Module):
    """The blocks of one resolution."""

    def __init__(self, widths: Sequence[int], *, has_attention: bool, has_downsample: bool) -> None:
        """`widths`: channels before the first block, and behind each."""
        blocks = [ResnetBlock(*pair) for pair in pairwise(widths)]
        self.block = nnx.List(blocks)
        self.attn = nnx.List([AttentionBlock(width) for width in widths[1:] if has_attention])
        self.downsample = Downsample(widths[-1]) if has_downsample else None

    def __call__(self, x: Float[Array, "I C _y _x"]) -> Float[Array, "I _out _rows _columns"]:
        """Run the blocks, each with its attention, then halve the picture unless it is the last."""
        for number, block in enumerate(self.block):
            x = block(x)
            if self.attn:
                x = self.attn[number](x)
        return x if self.downsample is None else self.downsample(x)


class Middle(nnx.Module):
    """Behind the last level."""

    def __init__(self, num_channels: int, *, has_attention: bool) -> None:
        self.block_1 = ResnetBlock(num_channels, num_channels)
        self.attn_1 = AttentionBlock(num_channels) if has_attention else None
        self.block_2 = ResnetBlock(num_channels, num_channels)

    def __call__(self, x: Float[Array, "I C _y _x"]) -> Float[Array, "I C _y _x"]:
        """Run both blocks, with attention between them."""
        x = self.block_1(x)
        return self.block_2(x if self.attn_1 is None else self.attn_1(x))


class Encoder(nnx.Module):
    """Pictures to latent channels, at a resolution of `1 / 2 ** (levels - 1)`."""

    def __init__(self, config: ChameleonVQVAEConfig) -> None:
        base, multipliers = config.base_channels, config.channel_multiplier
        self.conv_in = _conv(config.in_channels, base)
        levels, width = [], base
        for number, multiplier in enumerate(multipliers):
            is_attended = config.resolution // 2**number in config.attn_resolutions
            widths = [width] + [base * multiplier] * config.num_res_blocks
            level = Level(
                widths,
                has_attention=config.has_attention and is_attended,
                has_downsample=number < len(multipliers) - 1,
            )
            levels.append(level)
            width = widths[-1]
        self.down = nnx.List(levels)
        self.mid = Middle(width, has_attention=config.has_attention)
        self.norm_out = _norm(width)
        self.conv_out = _conv(width, config.latent_channels)

    def __call__(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I _latent Y X"]:
        """Return the latent channels, from which `quant_conv` makes the vectors to be quantised."""
        hidden = self.conv_in(pixel_values)
        for level in self.down:
            hidden = level(hidden)
        return self.conv_out(_swish(self.norm_out(self.mid(hidden))))


class Quantizer(nnx.Module):
    """The codebook: parameter `embedding.weight[codes, D]`."""

    def __init__(self, config: ChameleonVQVAEConfig) -> None:
        self.embedding = Embed(config.num_embeddings, config.embed_dim, dtype=DTYPE)

    def __call__(self, latents: Float[Array, "I P D"]) -> Int[Array, "I P"]:
        """Return the nearest code of each; the first of equals."""
        codebook = self.embedding.weight[...]
        # Added up in HF's order, so that what it rounds to a tie is one here.
        lengths = jnp.square(latents).sum(-1, keepdims=True)
        lengths = lengths + jnp.square(codebook).sum(-1)[None, None, :]
        distances = lengths - 2 * jnp.einsum("ipd,cd->ipc", latents, codebook)
        return jnp.argmin(distances, axis=-1).astype(jnp.int32)


class ChameleonVQVAE(nnx.Module):
    """Pictures to codes; parameters bear HF's names."""

    def __init__(self, config: ChameleonVQVAEConfig) -> None:
        self.encoder = Encoder(config)
        self.quant_conv = _pointwise(config.latent_channels, config.embed_dim)
        self.quantize = Quantizer(config)

    def __call__(self, pixel_values: Float[Array, "I C _y _x"]) -> Int[Array, "I P"]:
        """Return the codes of every picture, row by row."""
        # Accelerators would multiply float32 in fewer bits.
        with jax.default_matmul_precision("highest"):
            latents = self.quant_conv(self.encoder(pixel_values.astype(DTYPE)))
            images, width = latents.shape[:2]
            return self.quantize(latents.reshape(images, width, -1).transpose(0, 2, 1))
