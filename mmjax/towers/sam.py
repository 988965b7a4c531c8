"""SAM's image encoder (arXiv 2304.02643): a ViT of windows, with relative positions and a neck.

As models of documents have it (GOT, Vary, DeepSeek-OCR): two convolutions behind the neck halve
rows and columns twice. They are the tower's, or a projector's.
"""

from collections.abc import Sequence
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
from mmjax.layers.vision import Conv2d, PatchEmbedding, antialiased_matrix, linear_matrix

_NECK_EPS = 1e-6
"""The epsilon of the neck's norms; no key of the config names it."""
_ALWAYS = ("use_abs_pos", "use_rel_pos")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamConfig:
    """What the arrays depend on."""

    hidden_size: int
    mlp_dim: int
    num_hidden_layers: int
    num_attention_heads: int
    num_channels: int
    image_size: int
    """Of the images that the tables of positions were learned with; others are resized to."""
    patch_size: int
    hidden_act: str
    layer_norm_eps: float
    qkv_bias: bool
    window_size: int
    global_attn_indexes: tuple[int, ...]
    """Blocks that attend over the whole image, and not within windows."""
    output_channels: int
    downsample_channels: tuple[int, int] | None
    """Of the convolutions behind the neck; None: they are not the tower's."""

    @classmethod
    def from_hf(cls, hf_config: Any, **given: Any) -> "SamConfig":
        """Read HF's configuration; `CheckpointError` for values that are not served.

        `given`: fields that it has no keys for.
        """
        for name in _ALWAYS:
            if not getattr(hf_config, name):
                raise CheckpointError(f"`{name}` of SAM's config is false; mmjax serves true alone")
        for name in ("image_size", "patch_size"):
            if not isinstance(side := getattr(hf_config, name), int):
                raise CheckpointError(
                    f"`{name}` of SAM's config is {side!r}; give one number, the side of a square"
                )
        return read_config(cls, hf_config, **given)

    @property
    def side(self) -> int:
        """Patches along a side of an image of `image_size`."""
        return self.image_size // self.patch_size


class SamAttention(nnx.Module):
    """Attention among the patches of a square, by their contents and by how far they are apart."""

    def __init__(self, config: SamConfig, side: int, *, dtype: Any) -> None:
        """`side`: patches along a side of the square that the relative positions are made for."""
        width, options = config.hidden_size, {"use_bias": config.qkv_bias, "dtype": dtype}
        self.q_proj = Linear(width, width, **options)
        self.k_proj = Linear(width, width, **options)
        self.v_proj = Linear(width, width, **options)
        self.out_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.num_heads = config.num_attention_heads
        shape = (2 * side - 1, width // self.num_heads)
        self.rel_pos_h, self.rel_pos_w = (nnx.Param(jnp.zeros(shape, dtype)) for _ in range(2))

    def __call__(self, x: Float[Array, "I Y X D"]) -> Float[Array, "I Y X D"]:
        """Attend over rows and columns.

        To a score is added what the query says of the key's row, and of its column, relative to its
        own (arXiv 2112.01526, section 4.1). So a query has these numbers behind its head, where a
        key has a 1 at its own row and column.
        """
        images, side, _, width = x.shape
        grid = (images, side, side, self.num_heads, width // self.num_heads)
        query, key, value = (
            project(x).reshape(grid) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        by_row = _relate(query, self.rel_pos_h[...])
        by_column = _relate(query.swapaxes(1, 2), self.rel_pos_w[...]).swapaxes(1, 2)
        query = jnp.concatenate([query * grid[-1] ** -0.5, by_row, by_column], axis=-1)
        own = jnp.eye(side, dtype=x.dtype)
        own_row, own_column = own[None, :, None, None, :], own[None, None, :, None, :]
        places = [jnp.broadcast_to(one, by_row.shape) for one in (own_row, own_column)]
        key = jnp.concatenate([key, *places], axis=-1)
        flat = [part.reshape(images, side**2, *part.shape[3:]) for part in (query, key, value)]
        out = dense_attention(*flat, mask=None, scale=1.0)
        return self.out_proj(out.reshape(x.shape))


def _relate(
    query: Float[Array, "I Y X N H"], table: Float[Array, "_places H"]
) -> Float[Array, "I Y X N _keys"]:
    """Return each query's product with the position of each line, relative to its own line `Y`.

    `table`: the middle row is of the same line; of another side it is resized.
    """
    images, side = query.shape[:2]
    num_places = 2 * side - 1
    if len(table) != num_places:
        resized = jnp.asarray(linear_matrix(len(table), num_places)) @ table.astype(jnp.float32)
        table = resized.astype(table.dtype)
    lines = jnp.arange(side)
    relative = table[lines[:, None] - lines[None, :] + side - 1]  # Y keys H
    # A product for each image, so that none depends on how many are beside it.
    relative = jnp.broadcast_to(relative[None], (images, *relative.shape))
    return jnp.einsum("iyxnh,iykh->iyxnk", query, relative)


class SamLayer(nnx.Module):
    """A pre-norm transformer block, within windows or over the whole image."""

    def __init__(self, config: SamConfig, *, is_global: bool, dtype: Any) -> None:
        width, eps = config.hidden_size, config.layer_norm_eps
        self.layer_norm1 = LayerNorm(width, eps=eps, dtype=dtype)
        self.window_size = None if is_global else config.window_size
        self.attn = SamAttention(config, self.window_size or config.side, dtype=dtype)
        self.layer_norm2 = LayerNorm(width, eps=eps, dtype=dtype)
        self.mlp = MLP(width, config.mlp_dim, activation=config.hidden_act, dtype=dtype)

    def __call__(self, x: Float[Array, "I Y X D"]) -> Float[Array, "I Y X D"]:
        """Return the residual stream after this block."""
        with jax.named_scope("attn"):
            x = x + self._attend(self.layer_norm1(x))
        with jax.named_scope("mlp"):
            return x + self.mlp(self.layer_norm2(x))

    def _attend(self, x: Float[Array, "I Y X D"]) -> Float[Array, "I Y X D"]:
        """Attend; windows at the edges are filled up with zeros, which are seen like patches."""
        if self.window_size is None:
            return self.attn(x)
        images, side, _, width = x.shape
        size = self.window_size
        missing = -side % size
        padded = jnp.pad(x, ((0, 0), (0, missing), (0, missing), (0, 0)))
        count = (side + missing) // size
        windows = padded.reshape(images, count, size, count, size, width).swapaxes(2, 3)
        out = self.attn(windows.reshape(-1, size, size, width))
        out = out.reshape(images, count, count, size, size, width).swapaxes(2, 3)
        return out.reshape(images, side + missing, side + missing, width)[:, :side, :side]


class SamPatchEmbed(nnx.Module):
    """The patches of an image: parameter `projection`."""

    def __init__(self, config: SamConfig, *, dtype: Any) -> None:
        sizes = (config.num_channels, config.hidden_size, config.patch_size)
        self.projection = PatchEmbedding(*sizes, use_bias=True, dtype=dtype)


class SamNeck(nnx.Module):
    """Two convolutions that keep rows and columns, each with a norm of the channels behind it."""

    def __init__(self, config: SamConfig, *, dtype: Any) -> None:
        width = config.output_channels
        options = {"use_bias": False, "is_channels_last": True, "dtype": dtype}
        self.conv1 = Conv2d(config.hidden_size, width, 1, **options)
        self.layer_norm1 = LayerNorm(width, eps=_NECK_EPS, dtype=dtype)
        self.conv2 = Conv2d(width, width, 3, padding=((1, 1), (1, 1)), **options)
        self.layer_norm2 = LayerNorm(width, eps=_NECK_EPS, dtype=dtype)

    def __call__(self, x: Float[Array, "I Y X D"]) -> Float[Array, "I Y X C"]:
        """Return the grid, of fewer channels."""
        return self.layer_norm2(self.conv2(self.layer_norm1(self.conv1(x))))


class SamDownsampling(nnx.Module):
    """Two convolutions, each of which halves rows and columns."""

    def __init__(self, channels: Sequence[int], *, dtype: Any) -> None:
        """`channels`: before them, between and behind."""
        options = {"stride": 2, "padding": ((1, 1), (1, 1)), "use_bias": False, "dtype": dtype}
        before, first, second = channels
        self.conv1 = Conv2d(before, first, 3, is_channels_last=True, **options)
        self.conv2 = Conv2d(first, second, 3, is_channels_last=True, **options)

    def __call__(self, x: Float[Array, "I Y X C"]) -> Float[Array, "I _y _x _c"]:
        """Return a quarter of the rows and of the columns."""
        return self.conv2(self.conv1(x))


class SamEncoder(nnx.Module):
    """Images to a grid of states; parameters bear HF's names, but that `qkv` is cut in three."""

    def __init__(self, config: SamConfig, *, dtype: Any) -> None:
        self.patch_embed = SamPatchEmbed(config, dtype=dtype)
        shape = (1, config.side, config.side, config.hidden_size)
        self.pos_embed = nnx.Param(jnp.zeros(shape, dtype))
        self.layers = nnx.List(
            SamLayer(config, is_global=number in config.global_attn_indexes, dtype=dtype)
            for number in range(config.num_hidden_layers)
        )
        self.neck = SamNeck(config, dtype=dtype)
        channels = config.downsample_channels
        self.proj = (
            None
            if channels is None
            else SamDownsampling((config.output_channels, *channels), dtype=dtype)
        )

    def __call__(self, pixel_values: Float[Array, "I C S S"]) -> Float[Array, "I P D"]:
        """Return the states of square images, row by row: of each patch, or 4 x 4 patches."""
        patches = self.patch_embed.projection(pixel_values)
        side = round(patches.shape[1] ** 0.5)
        x = patches.reshape(len(patches), side, side, -1) + self._resize_positions(side)
        for layer in self.layers:
            x = call_block(layer, x)
        grid = self.neck(x) if self.proj is None else self.proj(self.neck(x))
        return grid.reshape(len(grid), -1, grid.shape[-1])

    def _resize_positions(self, side: int) -> Float[Array, "1 Y X D"]:
        table = self.pos_embed[...]
        if side == table.shape[1]:
            return table
        matrix = jnp.asarray(antialiased_matrix(table.shape[1], side))
        resized = jnp.einsum("yi,xj,bijd->byxd", matrix, matrix, table.astype(jnp.float32))
        return resized.astype(table.dtype)
