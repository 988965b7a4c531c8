"""BLIP-2's Q-Former (arXiv 2301.12597, section 3.1): learned queries read an image's features.

Without its text branch, which is for pre-training and retrieval. Granite 4 Vision's reads windows
of patches, by queries that begin with what is in them.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from mmjax.config.hf_config import read_config
from mmjax.layers.activation import get_activation
from mmjax.layers.attention.api import dense_attention
from mmjax.layers.linear import Linear
from mmjax.layers.module import call_block
from mmjax.layers.norm import LayerNorm
from mmjax.layers.recurrent.rounding import rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class QFormerConfig:
    """The keys of a `blip_2_qformer` config that the arrays depend on."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    encoder_hidden_size: int
    """Width of the image's features."""
    cross_attention_frequency: int
    """Every so many blocks, from the first on, one reads the image."""
    hidden_act: str
    layer_norm_eps: float

    @classmethod
    def from_hf(cls, hf_config: Any) -> "QFormerConfig":
        """Read HF's `Blip2QFormerConfig`."""
        return read_config(cls, hf_config)


class QFormerMultiHeadAttention(nnx.Module):
    """Attention over the queries themselves, or over the image's features."""

    def __init__(self, config: QFormerConfig, source_size: int, *, dtype: Any) -> None:
        width = config.hidden_size
        self.query = Linear(width, width, use_bias=True, dtype=dtype)
        self.key = Linear(source_size, width, use_bias=True, dtype=dtype)
        self.value = Linear(source_size, width, use_bias=True, dtype=dtype)
        self.num_heads = config.num_attention_heads

    def __call__(
        self, x: Float[Array, "I T D"], source: Float[Array, "I S E"]
    ) -> Float[Array, "I T D"]:
        """Attend over `S`."""
        images, _, width = x.shape
        query, key, value = (
            states.reshape(images, -1, self.num_heads, width // self.num_heads)
            for states in (self.query(x), self.key(source), self.value(source))
        )
        scale = (width // self.num_heads) ** -0.5
        return dense_attention(query, key, value, mask=None, scale=scale).reshape(x.shape)


class QFormerOutput(nnx.Module):
    """A projection, and a norm of its sum with the block's input."""

    def __init__(self, config: QFormerConfig, in_features: int, *, dtype: Any) -> None:
        self.dense = Linear(in_features, config.hidden_size, use_bias=True, dtype=dtype)
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype)

    def __call__(
        self, x: Float[Array, "I T F"], residual: Float[Array, "I T D"]
    ) -> Float[Array, "I T D"]:
        """Return the normed sum (post-norm, as in BERT)."""
        return self.LayerNorm(self.dense(x) + residual)


class QFormerAttention(nnx.Module):
    """Attention with its output projection."""

    def __init__(self, config: QFormerConfig, source_size: int, *, dtype: Any) -> None:
        self.attention = QFormerMultiHeadAttention(config, source_size, dtype=dtype)
        self.output = QFormerOutput(config, config.hidden_size, dtype=dtype)

    def __call__(
        self, x: Float[Array, "I T D"], source: Float[Array, "I S E"]
    ) -> Float[Array, "I T D"]:
        """Return the queries after what they read of `source`."""
        return self.output(self.attention(x, source), x)


class QFormerIntermediate(nnx.Module):
    """The first half of the MLP."""

    def __init__(self, config: QFormerConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        self.dense = Linear(width, config.intermediate_size, use_bias=True, dtype=dtype)
        self.activation = get_activation(config.hidden_act)

    def __call__(self, x: Float[Array, "I T D"]) -> Float[Array, "I T F"]:
        """Transform every query by itself."""
        return self.activation(self.dense(x))


class QFormerLayer(nnx.Module):
    """A block: self-attention, cross-attention where it has one, an MLP."""

    def __init__(self, config: QFormerConfig, *, has_cross: bool, dtype: Any) -> None:
        self.attention = QFormerAttention(config, config.hidden_size, dtype=dtype)
        self.crossattention = (
            QFormerAttention(config, config.encoder_hidden_size, dtype=dtype) if has_cross else None
        )
        self.intermediate_query = QFormerIntermediate(config, dtype=dtype)
        self.output_query = QFormerOutput(config, config.intermediate_size, dtype=dtype)

    def __call__(
        self, x: Float[Array, "I T D"], images: Float[Array, "I P E"]
    ) -> Float[Array, "I T D"]:
        """Return the queries after this block."""
        with jax.named_scope("attn"):
            x = self.attention(x, x)
        if self.crossattention is not None:
            with jax.named_scope("cross_attn"):
                x = self.crossattention(x, images)
        with jax.named_scope("mlp"):
            return self.output_query(self.intermediate_query(x), x)


class QFormerEncoder(nnx.Module):
    """The stack of blocks."""

    def __init__(self, config: QFormerConfig, *, dtype: Any) -> None:
        self.layer = nnx.List(
            QFormerLayer(config, has_cross=i % config.cross_attention_frequency == 0, dtype=dtype)
            for i in range(config.num_hidden_layers)
        )


class QFormerModel(nnx.Module):
    """Queries in, as many states out; parameters bear HF's names."""

    def __init__(self, config: QFormerConfig, *, dtype: Any) -> None:
        self.layernorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype)
        self.encoder = QFormerEncoder(config, dtype=dtype)

    def __call__(
        self, query_embeds: Float[Array, "I T D"], images: Float[Array, "I P E"]
    ) -> Float[Array, "I T D"]:
        """Return what each query has read of its image's features."""
        hidden = self.layernorm(query_embeds)
        for layer in self.encoder.layer:
            hidden = call_block(layer, hidden, images)
        return hidden


class WindowQFormer(nnx.Module):
    """A Q-Former over windows of a square picture's patches; parameters bear HF's names."""

    def __init__(
        self,
        config: QFormerConfig,
        out_features: int,
        *,
        window: tuple[int, int],
        corner: int | None,
        dtype: Any,
    ) -> None:
        """Build a Q-Former whose queries are added to what a window has.

        Args:
            config: Whose `hidden_size` is that of the patches.
            out_features: Of each query's embedding.
            window: How many queries and how many patches lie along its side.
            corner: Of each square of 2 x 2 patches the one that a query begins with, row by row;
                None: a mean of the patches that share the query's place.
            dtype: Of the parameters.
        """
        width, (self.query_side, self.window_side) = config.hidden_size, window
        self.corner = corner
        self.norm = LayerNorm(width, eps=1e-6, dtype=dtype)
        self.query = nnx.Param(jnp.zeros((1, self.query_side**2, width), dtype))
        self.image_positions = nnx.Param(jnp.zeros((1, self.window_side**2, width), dtype))
        self.qformer = QFormerModel(config, dtype=dtype)
        self.out_linear = Linear(width, out_features, use_bias=True, dtype=dtype)

    def __call__(self, patches: Float[Array, "I P D"]) -> Float[Array, "I _queries _out"]:
        """Return an embedding for each query, row by row over the picture."""
        side = round(patches.shape[1] ** 0.5)
        square = self.norm(patches).reshape(len(patches), side, side, -1)
        if self.corner is None:
            starts = average_square(square, side // self.window_side * self.query_side)
        else:
            row, column = divmod(self.corner, 2)
            starts = square[:, row::2, column::2]
        queries = cut_windows(starts, self.query_side) + self.query[...]
        keys = cut_windows(square, self.window_side) + self.image_positions[...]
        read = self.qformer(queries, keys)
        return self.out_linear(join_windows(read, starts.shape))


def average_square(square: Float[Array, "I Y X D"], side: int) -> Float[Array, "I _side _side D"]:
    """Return means of a square's rows and columns, `side` of each, in float32 and rounded.

    As torch's adaptive pooling: where they do not divide, two means share what lies between them.
    """
    old = square.shape[1]
    places = np.arange(side)
    first, end = places * old // side, -(-(places + 1) * old // side)
    total = square.astype(jnp.float32)
    for axis in (1, 2):
        total = _sum_runs(total, first, end, axis)
    counts = np.multiply.outer(end - first, end - first).astype(np.float32)
    return rounded(total / counts[None, :, :, None]).astype(square.dtype)


def _sum_runs(
    x: Float[Array, "I Y X D"], first: np.ndarray, end: np.ndarray, axis: int
) -> Float[Array, "I _y _x D"]:
    """Return sums of runs along an axis, one after the other, so that programs agree."""
    shape = [-1 if one == axis else 1 for one in range(x.ndim)]
    total = jnp.take(x, first, axis=axis)
    for step in range(1, int((end - first).max())):
        places = first + step
        more = jnp.take(x, np.minimum(places, end - 1), axis=axis)
        total = total + jnp.where((places < end).reshape(shape), more, 0)
    return total


def cut_windows(square: Float[Array, "I Y X D"], side: int) -> Float[Array, "_windows _patches D"]:
    """Return the windows of squares, row by row, and what is in each, row by row."""
    count = square.shape[1] // side
    parts = square.reshape(len(square), count, side, count, side, -1).swapaxes(2, 3)
    return parts.reshape(-1, side**2, square.shape[-1])


def join_windows(
    windows: Float[Array, "_windows _patches D"], shape: tuple[int, ...]
) -> Float[Array, "I P D"]:
    """Return what `cut_windows` made of squares of a shape, row by row over each."""
    images, rows, _, width = shape
    side = round(windows.shape[1] ** 0.5)
    count = rows // side
    parts = windows.reshape(images, count, count, side, side, width).swapaxes(2, 3)
    return parts.reshape(images, rows**2, width)
