"""InternViT, InternVL's vision encoder (Chen et al., arXiv 2312.14238, section 3.2).

A pre-norm transformer over patches and a class token, with learned positions and a learned scale on
each residual branch (arXiv 2103.17239). Knows nothing of what it feeds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.errors import CheckpointError
from mmjax.layers.attention.api import dense_attention
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import MLP
from mmjax.layers.norm import LayerNorm, RMSNorm
from mmjax.layers.vision import PatchEmbedding, VisionEncoder

_NORMS: Mapping[str, type[LayerNorm | RMSNorm]] = MappingProxyType(
    {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
)
"""By `norm_type`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InternViTConfig:
    """What of an InternViT's configuration the arrays depend on, in either of its spellings."""

    hidden_size: int
    intermediate_size: int
    num_blocks: int
    """Blocks up to the one whose output is read."""
    num_attention_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    layer_norm_eps: float
    hidden_act: str
    norm_type: str
    has_qkv_bias: bool
    has_qk_norm: bool
    """Whether queries and keys are normed, over all heads together."""
    qk_norm_eps: float
    has_position_table: bool
    has_final_norm: bool

    def __post_init__(self) -> None:
        if self.norm_type not in _NORMS:
            known = ", ".join(f"`{name}`" for name in _NORMS)
            raise CheckpointError(f"`norm_type` is `{self.norm_type}`; mmjax knows {known}")

    @property
    def num_patches(self) -> int:
        """Patches of a picture of `image_size`, the class token aside."""
        return (self.image_size // self.patch_size) ** 2


def count_blocks(feature_layer: Any, num_hidden_layers: int, *, name: str) -> int:
    """Return how many blocks lie below the state that is read; `CheckpointError` for no such state.

    `feature_layer` is the value of the key `name`. It counts as HF's `hidden_states`: 0 is the
    embedding, n the output of block n - 1, and -1 that of the last.
    """
    num_states = num_hidden_layers + 1
    if not isinstance(feature_layer, int) or not -num_states <= feature_layer < num_states:
        raise CheckpointError(
            f"`{name}` is {feature_layer!r}; it must be the number of one state of the vision "
            f"tower, from {-num_states} to {num_hidden_layers}"
        )
    return feature_layer % num_states


class InternViTEmbeddings(nnx.Module):
    """The class token and the patches, plus learned positions."""

    def __init__(self, config: InternViTConfig, *, dtype: Any) -> None:
        width, num_patches = config.hidden_size, config.num_patches
        self.cls_token = nnx.Param(jnp.zeros((1, 1, width), dtype))
        self.patch_embeddings = PatchEmbedding(
            config.num_channels, width, config.patch_size, use_bias=True, dtype=dtype
        )
        self.position_embeddings = (
            nnx.Param(jnp.zeros((1, num_patches + 1, width), dtype))
            if config.has_position_table
            else None
        )

    def __call__(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        """Embed pictures of the config's `image_size`; the class token is the first of `P`."""
        patches = self.patch_embeddings(pixel_values)
        shape = (patches.shape[0], 1, patches.shape[-1])
        hidden = jnp.concatenate([jnp.broadcast_to(self.cls_token[...], shape), patches], axis=1)
        if self.position_embeddings is None:
            return hidden
        return hidden + self.position_embeddings[...]


class InternViTAttention(nnx.Module):
    """Full attention among the tokens of one picture."""

    def __init__(self, config: InternViTConfig, *, dtype: Any) -> None:
        width, bias = config.hidden_size, config.has_qkv_bias
        self.q_proj = Linear(width, width, use_bias=bias, dtype=dtype)
        self.k_proj = Linear(width, width, use_bias=bias, dtype=dtype)
        self.v_proj = Linear(width, width, use_bias=bias, dtype=dtype)
        self.projection_layer = Linear(width, width, use_bias=True, dtype=dtype)
        options = {"eps": config.qk_norm_eps, "dtype": dtype}
        self.q_norm = RMSNorm(width, **options) if config.has_qk_norm else None
        self.k_norm = RMSNorm(width, **options) if config.has_qk_norm else None
        self.num_heads = config.num_attention_heads

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P D"]:
        """Attend over `P`."""
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        head_dim = x.shape[-1] // self.num_heads
        split = (*x.shape[:2], self.num_heads, head_dim)
        query, key, value = (part.reshape(split) for part in (query, key, value))
        out = dense_attention(query, key, value, mask=None, scale=head_dim**-0.5)
        return self.projection_layer(out.reshape(x.shape))


class InternViTLayer(nnx.Module):
    """A pre-norm transformer block whose branches are scaled before they are added."""

    def __init__(self, config: InternViTConfig, *, dtype: Any) -> None:
        width, make_norm = config.hidden_size, _NORMS[config.norm_type]
        self.layernorm_before = make_norm(width, eps=config.layer_norm_eps, dtype=dtype)
        self.attention = InternViTAttention(config, dtype=dtype)
        self.lambda_1 = nnx.Param(jnp.zeros((width,), dtype))
        self.layernorm_after = make_norm(width, eps=config.layer_norm_eps, dtype=dtype)
        self.mlp = MLP(width, config.intermediate_size, activation=config.hidden_act, dtype=dtype)
        self.lambda_2 = nnx.Param(jnp.zeros((width,), dtype))

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P D"]:
        """Return the residual stream after this block."""
        with jax.named_scope("attn"):
            x = x + self.lambda_1[...][None, None] * self.attention(self.layernorm_before(x))
        with jax.named_scope("mlp"):
            return x + self.lambda_2[...][None, None] * self.mlp(self.layernorm_after(x))


class InternViT(nnx.Module):
    """Pictures to the states of their tokens; parameters bear HF's names."""

    def __init__(self, config: InternViTConfig, *, dtype: Any) -> None:
        self.embeddings = InternViTEmbeddings(config, dtype=dtype)
        self.encoder = VisionEncoder(
            InternViTLayer(config, dtype=dtype) for _ in range(config.num_blocks)
        )
        # HF's is a LayerNorm whatever `norm_type` says.
        self.layernorm = (
            LayerNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype)
            if config.has_final_norm
            else None
        )

    def __call__(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        """Return the state that is read; the class token is the first of `P`."""
        hidden, _ = self.encoder(self.embeddings(pixel_values))
        return hidden if self.layernorm is None else self.layernorm(hidden)
