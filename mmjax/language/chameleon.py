"""Chameleon's decoder (arXiv 2405.09818): Llama's blocks, with normed queries and keys.

The 34B norms behind each half of a block in place of before it, as Swin v2 does (`swin_norm`,
arXiv 2111.09883).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.errors import CheckpointError
from mmjax.layers.decoder import (
    GroupedQueryAttention,
    PostNormLayer,
    PreNormLayer,
    RotaryDecoder,
)
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.norm import RMSNorm

HEAD_NORM_EPS = 1e-5
"""Of queries and keys; no key of the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChameleonConfig:
    """The keys of a `chameleon` config that the decoder's arrays depend on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    swin_norm: bool
    rope_parameters: dict[str, Any]

    @classmethod
    def from_hf(cls, hf_config: Any) -> "ChameleonConfig":
        """Read HF's config; `CheckpointError` for heads that do not fill the width."""
        width, num_heads = hf_config.hidden_size, hf_config.num_attention_heads
        num_kv_heads = hf_config.num_key_value_heads or num_heads
        if width % num_heads or num_heads % num_kv_heads:
            raise CheckpointError(
                f"`num_attention_heads` is {num_heads}; it must divide `hidden_size`, {width}, and "
                f"be a multiple of `num_key_value_heads`, {num_kv_heads}"
            )
        shared = {name: getattr(hf_config, name) for name in cls.__dataclass_fields__}
        read = {
            "num_key_value_heads": num_kv_heads,
            "attention_bias": bool(hf_config.attention_bias),
            "swin_norm": bool(hf_config.swin_norm),
            "rope_parameters": dict(hf_config.rope_parameters),
        }
        return cls(**{**shared, **read})

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_attention_heads


class HeadNorm(nnx.Module):
    """LayerNorm over each head, with parameters of its own for each: `weight[N, H]`, `bias`."""

    def __init__(self, num_heads: int, head_dim: int, *, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.ones((num_heads, head_dim), dtype))
        self.bias = nnx.Param(jnp.zeros((num_heads, head_dim), dtype))

    def __call__(self, x: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        """Normalise the last axis; rounded before the weight, as in HF."""
        wide = x.astype(jnp.float32)
        mean = wide.mean(-1, keepdims=True)
        variance = jnp.square(wide - mean).mean(-1, keepdims=True)
        normed = ((wide - mean) * jax.lax.rsqrt(variance + HEAD_NORM_EPS)).astype(x.dtype)
        return normed * self.weight[...][None] + self.bias[...][None]


class ChameleonTextModel(RotaryDecoder):
    """Chameleon's decoder over one vocabulary of words and codes."""

    def __init__(self, config: ChameleonConfig, *, is_tied: bool, dtype: Any) -> None:
        super().__init__(
            config,
            num_kv_heads=config.num_key_value_heads,
            layers=[_build_layer(config, dtype=dtype) for _ in range(config.num_hidden_layers)],
            norm=RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype),
            is_tied=is_tied,
            dtype=dtype,
        )


def _build_layer(config: ChameleonConfig, *, dtype: Any) -> nnx.Module:
    width, num_heads, num_kv_heads = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    attention = GroupedQueryAttention(
        width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.head_dim,
        has_qkv_bias=config.attention_bias,
        has_output_bias=config.attention_bias,
        norms=(
            HeadNorm(num_heads, config.head_dim, dtype=dtype),
            HeadNorm(num_kv_heads, config.head_dim, dtype=dtype),
        ),
        dtype=dtype,
    )
    mlp = GatedMLP(
        width,
        config.intermediate_size,
        activation=config.hidden_act,
        use_bias=config.mlp_bias,
        dtype=dtype,
    )
    kind = PostNormLayer if config.swin_norm else PreNormLayer
    return kind(attention, mlp, lambda: RMSNorm(width, eps=config.rms_norm_eps, dtype=dtype))
