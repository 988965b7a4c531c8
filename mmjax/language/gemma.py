"""Gemma 3's decoder (arXiv 2503.19786). Knows nothing of pictures: embeddings in, states out."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.errors import CheckpointError
from mmjax.layers.activation import get_activation
from mmjax.layers.attention.api import AttentionMetadata, attention
from mmjax.layers.attention.kv_cache import KVCache, KVCacheSpec, LayerCache
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.layers.norm import GemmaRMSNorm
from mmjax.layers.rope import apply_rotary, inverse_frequencies, rotary_angles

_LAYER_TYPES = ("sliding_attention", "full_attention")

Angles = tuple[Float[Array, "T P"], Float[Array, "T P"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig:
    """The keys of a `gemma3_text` config that the arrays depend on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_activation: str
    rms_norm_eps: float
    attention_bias: bool
    query_pre_attn_scalar: float
    sliding_window: int | None
    layer_types: tuple[str, ...]
    rope_parameters: dict[str, dict[str, Any]]
    """Per layer type: `rope_theta`, `rope_type`, `factor`."""
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None

    @classmethod
    def from_hf(cls, hf_config: Any) -> "GemmaConfig":
        """Read HF's `Gemma3TextConfig`; `CheckpointError` for what cannot be generated with."""
        if hf_config.use_bidirectional_attention:
            raise CheckpointError(
                "`use_bidirectional_attention` is true: an encoder, not a generator; "
                "mmjax serves checkpoints with causal text"
            )
        values: dict[str, Any] = {
            name: getattr(hf_config, name) for name in cls.__dataclass_fields__
        }
        values["layer_types"] = tuple(hf_config.layer_types)
        for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
            # config.json may write a whole number.
            values[name] = None if values[name] is None else float(values[name])
        config = cls(**values)
        unknown = set(config.layer_types) - set(_LAYER_TYPES)
        if unknown:
            raise CheckpointError(
                f"`layer_types` holds {sorted(unknown)}; known: {', '.join(_LAYER_TYPES)}"
            )
        return config

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """What one token stores."""
        return KVCacheSpec(
            num_layers=self.num_hidden_layers,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
        )


class GemmaAttention(nnx.Module):
    """Grouped-query attention with normed queries and keys; sliding or global."""

    def __init__(self, config: GemmaConfig, layer_type: str, *, dtype: Any) -> None:
        width, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        query_width = config.num_attention_heads * head_dim
        key_width = config.num_key_value_heads * head_dim
        self.q_proj = Linear(width, query_width, use_bias=bias, dtype=dtype)
        self.k_proj = Linear(width, key_width, use_bias=bias, dtype=dtype)
        self.v_proj = Linear(width, key_width, use_bias=bias, dtype=dtype)
        self.o_proj = Linear(query_width, width, use_bias=bias, dtype=dtype)
        self.q_norm = GemmaRMSNorm(head_dim, eps=config.rms_norm_eps, dtype=dtype)
        self.k_norm = GemmaRMSNorm(head_dim, eps=config.rms_norm_eps, dtype=dtype)
        self.head_dim = head_dim
        self.scale = float(config.query_pre_attn_scalar) ** -0.5
        self.window = config.sliding_window if layer_type == "sliding_attention" else None
        self.soft_cap = config.attn_logit_softcapping

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
        options = {"scale": self.scale, "window": self.window, "soft_cap": self.soft_cap}
        out, cache = attention(query, key, value, cache, metadata, **options)
        return self.o_proj(out.reshape(x.shape[0], -1)), cache


class GemmaMLP(nnx.Module):
    """Gated MLP (GeGLU, arXiv 2002.05202)."""

    def __init__(self, config: GemmaConfig, *, dtype: Any) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(width, inner, use_bias=False, dtype=dtype)
        self.up_proj = Linear(width, inner, use_bias=False, dtype=dtype)
        self.down_proj = Linear(inner, width, use_bias=False, dtype=dtype)
        self.activation = get_activation(config.hidden_activation)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Transform every token by itself."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class GemmaLayer(nnx.Module):
    """A block with a norm before and after each half."""

    def __init__(self, config: GemmaConfig, layer_type: str, *, dtype: Any) -> None:
        options = {"eps": config.rms_norm_eps, "dtype": dtype}
        self.self_attn = GemmaAttention(config, layer_type, dtype=dtype)
        self.mlp = GemmaMLP(config, dtype=dtype)
        self.input_layernorm = GemmaRMSNorm(config.hidden_size, **options)
        self.post_attention_layernorm = GemmaRMSNorm(config.hidden_size, **options)
        self.pre_feedforward_layernorm = GemmaRMSNorm(config.hidden_size, **options)
        self.post_feedforward_layernorm = GemmaRMSNorm(config.hidden_size, **options)

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
            x = x + self.post_attention_layernorm(out)
        with jax.named_scope("mlp"):
            out = self.mlp(self.pre_feedforward_layernorm(x))
            return x + self.post_feedforward_layernorm(out), cache


class GemmaTextModel(nnx.Module):
    """Embeddings, blocks and the final norm; parameters bear HF's names."""

    def __init__(self, config: GemmaConfig, *, dtype: Any) -> None:
        self.embed_tokens = Embed(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List(GemmaLayer(config, kind, dtype=dtype) for kind in config.layer_types)
        self.norm = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.config = config

    def embed(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up tokens, scaled by sqrt(D) rounded to the table's dtype, as in HF."""
        embeds = self.embed_tokens(token_ids)
        return embeds * jnp.asarray(self.config.hidden_size**0.5, embeds.dtype)

    def angles(self, positions: Int[Array, " T"]) -> dict[str, Angles]:
        """Return the rotary angles of each layer type that the model has."""
        config = self.config
        return {
            kind: rotary_angles(
                positions, inverse_frequencies(config.rope_parameters[kind], config.head_dim)
            )
            for kind in sorted(set(config.layer_types))
        }

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, " T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], KVCache | None]:
        """Return the states after the final norm, and the cache (None in, None out)."""
        angles = self.angles(positions)
        caches = kv_cache if kv_cache is not None else (None,) * len(self.layers)
        hidden, written = inputs_embeds, []
        for layer, kind, cache in zip(self.layers, self.config.layer_types, caches, strict=True):
            hidden, cache = layer(hidden, angles[kind], cache, metadata)
            written.append(cache)
        return self.norm(hidden), None if kv_cache is None else tuple(written)
