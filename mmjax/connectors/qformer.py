"""BLIP-2's Q-Former (arXiv 2301.12597, section 3.1): learned queries read an image's features.

Without its text branch, which is for pre-training and retrieval.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from mmjax.config.hf_config import read_config
from mmjax.layers.activation import get_activation
from mmjax.layers.attention.api import dense_attention
from mmjax.layers.linear import Linear
from mmjax.layers.module import call_block
from mmjax.layers.norm import LayerNorm


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
