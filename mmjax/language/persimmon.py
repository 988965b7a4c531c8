"""Persimmon's decoder (Adept, 2023), which is Fuyu's: squared ReLU, normed queries and keys.

Rotary positions turn a part of each head alone (`partial_rotary_factor`).
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.errors import CheckpointError
from mmjax.layers.activation import get_activation
from mmjax.layers.attention.api import AttentionMetadata, attention
from mmjax.layers.attention.kv_cache import KVCacheSpec, LayerCache
from mmjax.layers.decoder import Angles, Decoder
from mmjax.layers.linear import Linear
from mmjax.layers.norm import LayerNorm
from mmjax.layers.rope import (
    apply_rotary,
    attention_factor,
    inverse_frequencies,
    rotary_angles,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PersimmonConfig:
    """The keys of a `persimmon` config that arrays depend on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str
    layer_norm_eps: float
    qk_layernorm: bool
    rope_parameters: dict[str, Any]

    @classmethod
    def from_hf(cls, hf_config: Any) -> "PersimmonConfig":
        """Read HF's config; `CheckpointError` for heads that do not fill the width."""
        width, num_heads = hf_config.hidden_size, hf_config.num_attention_heads
        if width % num_heads:
            raise CheckpointError(
                f"`hidden_size` is {width}, which is no multiple of `num_attention_heads`, "
                f"{num_heads}; Persimmon's heads share the width evenly"
            )
        shared = {name: getattr(hf_config, name) for name in cls.__dataclass_fields__}
        return cls(**{**shared, "rope_parameters": dict(hf_config.rope_parameters)})

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """What one token stores."""
        return KVCacheSpec(
            num_layers=self.num_hidden_layers,
            num_kv_heads=self.num_attention_heads,
            head_dim=self.head_dim,
        )


class PersimmonAttention(nnx.Module):
    """As many key heads as query heads; the file's `query_key_value` is three products here."""

    def __init__(self, config: PersimmonConfig, *, dtype: Any) -> None:
        width, head_dim = config.hidden_size, config.head_dim
        self.q_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.k_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.v_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.dense = Linear(width, width, use_bias=True, dtype=dtype)
        has_norms, options = config.qk_layernorm, {"eps": config.layer_norm_eps, "dtype": dtype}
        self.q_layernorm = LayerNorm(head_dim, **options) if has_norms else None
        self.k_layernorm = LayerNorm(head_dim, **options) if has_norms else None
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
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        query, key = apply_rotary(query, *angles), apply_rotary(key, *angles)
        scale = self.head_dim**-0.5
        out, cache = attention(query, key, value, cache, metadata, scale=scale)
        return self.dense(out.reshape(x.shape[0], -1)), cache


class PersimmonMLP(nnx.Module):
    """Two linear layers and an activation: squared ReLU (Primer, arXiv 2109.08668)."""

    def __init__(self, config: PersimmonConfig, *, dtype: Any) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        self.dense_h_to_4h = Linear(width, inner, use_bias=True, dtype=dtype)
        self.dense_4h_to_h = Linear(inner, width, use_bias=True, dtype=dtype)
        self.activation = get_activation(config.hidden_act)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Transform every token by itself."""
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(x)))


class PersimmonLayer(nnx.Module):
    """A pre-norm block."""

    def __init__(self, config: PersimmonConfig, *, dtype: Any) -> None:
        options = {"eps": config.layer_norm_eps, "dtype": dtype}
        self.self_attn = PersimmonAttention(config, dtype=dtype)
        self.mlp = PersimmonMLP(config, dtype=dtype)
        self.input_layernorm = LayerNorm(config.hidden_size, **options)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, **options)

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: Angles,
        cache: LayerCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | None]:
        """Return the residual stream after this block, and its cache."""
        with jax.named_scope("attn"):
            out, cache = self.self_attn(self.input_layernorm(x), angles, cache, metadata)
            x = x + out
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_attention_layernorm(x)), cache


class PersimmonTextModel(Decoder):
    """Persimmon's text model; `norm` is the file's `final_layernorm`."""

    def __init__(self, config: PersimmonConfig, *, is_tied: bool, dtype: Any) -> None:
        self.config = config
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=[PersimmonLayer(config, dtype=dtype) for _ in range(config.num_hidden_layers)],
            norm=LayerNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype),
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
