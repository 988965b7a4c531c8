"""Chameleon's decoder (arXiv 2405.09818): Llama's blocks, with normed queries and keys.

The 34B norms behind each half of a block in place of before it, as Swin v2 does (`swin_norm`,
arXiv 2111.09883).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.errors import CheckpointError
from mmjax.layers.activation import get_activation
from mmjax.layers.attention.api import AttentionMetadata, attention
from mmjax.layers.attention.kv_cache import KVCacheSpec, LayerCache
from mmjax.layers.decoder import Angles, Decoder
from mmjax.layers.linear import Linear
from mmjax.layers.norm import RMSNorm
from mmjax.layers.rope import (
    apply_rotary,
    attention_factor,
    inverse_frequencies,
    rotary_angles,
)

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

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """What one token stores."""
        return KVCacheSpec(
            num_layers=self.num_hidden_layers,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
        )


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


class ChameleonAttention(nnx.Module):
    """Grouped-query attention with rotary positions, over normed queries and keys."""

    def __init__(self, config: ChameleonConfig, *, dtype: Any) -> None:
        width, head_dim = config.hidden_size, config.head_dim
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        options = {"use_bias": config.attention_bias, "dtype": dtype}
        self.q_proj = Linear(width, width, **options)
        self.k_proj = Linear(width, num_kv_heads * head_dim, **options)
        self.v_proj = Linear(width, num_kv_heads * head_dim, **options)
        self.o_proj = Linear(width, width, **options)
        self.q_norm = HeadNorm(num_heads, head_dim, dtype=dtype)
        self.k_norm = HeadNorm(num_kv_heads, head_dim, dtype=dtype)
        self.head_dim = head_dim

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: Angles,
        cache: LayerCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | None]:
        """Attend, and return the layer's cache with this step's keys and values."""
        query, key, value = (
            project(x).reshape(x.shape[0], -1, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = apply_rotary(self.q_norm(query), *angles)
        key = apply_rotary(self.k_norm(key), *angles)
        scale = self.head_dim**-0.5
        out, cache = attention(query, key, value, cache, metadata, scale=scale)
        return self.o_proj(out.reshape(x.shape[0], -1)), cache


class ChameleonMLP(nnx.Module):
    """Gated MLP (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, config: ChameleonConfig, *, dtype: Any) -> None:
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(width, inner, use_bias=bias, dtype=dtype)
        self.up_proj = Linear(width, inner, use_bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, width, use_bias=bias, dtype=dtype)
        self.activation = get_activation(config.hidden_act)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Transform every token by itself."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class ChameleonLayer(nnx.Module):
    """A block whose norms stand before its halves, or behind them (`swin_norm`)."""

    def __init__(self, config: ChameleonConfig, *, dtype: Any) -> None:
        options = {"eps": config.rms_norm_eps, "dtype": dtype}
        self.self_attn = ChameleonAttention(config, dtype=dtype)
        self.mlp = ChameleonMLP(config, dtype=dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, **options)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **options)
        self.swin_norm = config.swin_norm

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: Angles,
        cache: LayerCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | None]:
        """Return the residual stream after this block, and its cache."""
        with jax.named_scope("attn"):
            out = x if self.swin_norm else self.input_layernorm(x)
            out, cache = self.self_attn(out, angles, cache, metadata)
            x = x + (self.input_layernorm(out) if self.swin_norm else out)
        with jax.named_scope("mlp"):
            if self.swin_norm:
                return x + self.post_attention_layernorm(self.mlp(x)), cache
            return x + self.mlp(self.post_attention_layernorm(x)), cache


class ChameleonTextModel(Decoder):
    """Chameleon's decoder over one vocabulary of words and codes."""

    def __init__(self, config: ChameleonConfig, *, is_tied: bool, dtype: Any) -> None:
        self.config = config
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=[ChameleonLayer(config, dtype=dtype) for _ in range(config.num_hidden_layers)],
            norm=RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype),
            is_tied=is_tied,
            kv_cache_spec=config.kv_cache_spec,
            dtype=dtype,
        )

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> list[Angles]:
        """Return the rotary angles, the same for every layer."""
        parameters = self.config.rope_parameters
        frequencies = inverse_frequencies(parameters, self.config.head_dim)
        angles = rotary_angles(positions[0], frequencies, attention_factor(parameters))
        return [angles] * len(self.layers)
