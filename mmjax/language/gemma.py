"""Gemma 3's decoder (arXiv 2503.19786): embeddings to hidden states."""

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
from mmjax.layers.embed import soft_cap
from mmjax.layers.linear import Linear
from mmjax.layers.norm import GemmaRMSNorm
from mmjax.layers.rope import apply_rotary, inverse_frequencies, rotary_angles

_LAYER_TYPES = ("sliding_attention", "full_attention")


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
        """Read HF's `Gemma3TextConfig`; `CheckpointError` for unsupported values."""
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
            # config.json may hold an integer.
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
        """The KV cache of one token."""
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
        """Return the output, and the layer's cache with this step's keys and values."""
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
    """A block with norms before and after attention and MLP."""

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


class GemmaTextModel(Decoder):
    """Gemma 3's text model; its tokens' embeddings are scaled, its logits may be capped."""

    def __init__(self, config: GemmaConfig, *, is_tied: bool, dtype: Any) -> None:
        self.config = config
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=[GemmaLayer(config, kind, dtype=dtype) for kind in config.layer_types],
            norm=GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype),
            is_tied=is_tied,
            kv_cache_spec=config.kv_cache_spec,
            dtype=dtype,
        )

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up tokens, scaled by sqrt(D) rounded to the table's dtype, as in HF."""
        embeds = self.embed_tokens(token_ids)
        return embeds * jnp.asarray(self.config.hidden_size**0.5, embeds.dtype)

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> list[Angles]:
        """Return the rotary angles of each layer, by its type."""
        config = self.config
        angles = {
            kind: rotary_angles(
                positions[0], inverse_frequencies(config.rope_parameters[kind], config.head_dim)
            )
            for kind in sorted(set(config.layer_types))
        }
        return [angles[kind] for kind in config.layer_types]

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project onto the vocabulary, in float32, soft-capped where the config says so."""
        return soft_cap(super().compute_logits(hidden_states), self.config.final_logit_softcapping)
