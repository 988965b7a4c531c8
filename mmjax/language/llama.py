"""Llama's decoder (arXiv 2302.13971), and those that differ from it by a key of their config alone.

Mistral (a window, arXiv 2310.06825), Qwen2 (biases on queries, keys and values; arXiv 2407.10671),
Qwen2-VL's text model (three axes of positions; arXiv 2409.12191), Qwen3 (norms on queries and keys;
arXiv 2505.09388).
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
from mmjax.layers.norm import RMSNorm
from mmjax.layers.rope import (
    apply_rotary,
    attention_factor,
    inverse_frequencies,
    multimodal_angles,
    rotary_angles,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The keys that arrays depend on, of each config that `models/text_model.py` reads by this."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    """Whether each head's queries and keys are normed, before they are rotated."""
    windows: tuple[int | None, ...]
    """Per layer, how many tokens a token sees; None: all before it."""
    rope_parameters: dict[str, Any]

    @classmethod
    def from_hf(cls, hf_config: Any) -> "LlamaConfig":
        """Read HF's config; `CheckpointError` for what a decoder of this kind cannot have."""
        kind, num_heads = hf_config.model_type, hf_config.num_attention_heads
        has_qkv_bias = kind.startswith("qwen2") or getattr(hf_config, "attention_bias", False)
        num_layers = hf_config.num_hidden_layers
        window = getattr(hf_config, "sliding_window", None)
        types = getattr(hf_config, "layer_types", None) or ["sliding_attention"] * num_layers
        unknown = set(types) - {"sliding_attention", "full_attention"}
        if unknown:
            raise CheckpointError(
                f"`layer_types` holds {sorted(unknown)}; known: full_attention, sliding_attention"
            )
        shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        return cls(
            **{name: getattr(hf_config, name) for name in shared},
            num_attention_heads=num_heads,
            num_key_value_heads=hf_config.num_key_value_heads,
            head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads,
            hidden_act=hf_config.hidden_act,
            rms_norm_eps=hf_config.rms_norm_eps,
            has_qkv_bias=has_qkv_bias,
            has_output_bias=has_qkv_bias and not kind.startswith("qwen2"),
            has_mlp_bias=getattr(hf_config, "mlp_bias", False),
            has_qk_norm=kind == "qwen3",
            windows=tuple(window if one == "sliding_attention" else None for one in types),
            rope_parameters=_read_rope(hf_config),
        )

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """What one token stores."""
        return KVCacheSpec(
            num_layers=self.num_hidden_layers,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
        )


def _read_rope(hf_config: Any) -> dict[str, Any]:
    # NOTE: HF's Qwen2-VL assumes these sections where the config names none.
    has_axes = hf_config.model_type in ("qwen2_vl_text", "qwen2_5_vl_text")
    assumed = {"mrope_section": [16, 24, 24]} if has_axes else {}
    return assumed | dict(hf_config.rope_parameters)


class LlamaAttention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig, window: int | None, *, dtype: Any) -> None:
        width, head_dim = config.hidden_size, config.head_dim
        query_width = config.num_attention_heads * head_dim
        key_width = config.num_key_value_heads * head_dim
        bias = config.has_qkv_bias
        self.q_proj = Linear(width, query_width, use_bias=bias, dtype=dtype)
        self.k_proj = Linear(width, key_width, use_bias=bias, dtype=dtype)
        self.v_proj = Linear(width, key_width, use_bias=bias, dtype=dtype)
        self.o_proj = Linear(query_width, width, use_bias=config.has_output_bias, dtype=dtype)
        norm = {"eps": config.rms_norm_eps, "dtype": dtype}
        self.q_norm = RMSNorm(head_dim, **norm) if config.has_qk_norm else None
        self.k_norm = RMSNorm(head_dim, **norm) if config.has_qk_norm else None
        self.head_dim = head_dim
        self.window = window

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
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary(query, *angles), apply_rotary(key, *angles)
        scale = self.head_dim**-0.5
        out, cache = attention(query, key, value, cache, metadata, scale=scale, window=self.window)
        return self.o_proj(out.reshape(x.shape[0], -1)), cache


class LlamaMLP(nnx.Module):
    """Gated MLP (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig, *, dtype: Any) -> None:
        width, inner, bias = config.hidden_size, config.intermediate_size, config.has_mlp_bias
        self.gate_proj = Linear(width, inner, use_bias=bias, dtype=dtype)
        self.up_proj = Linear(width, inner, use_bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, width, use_bias=bias, dtype=dtype)
        self.activation = get_activation(config.hidden_act)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Transform every token by itself."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nnx.Module):
    """A pre-norm block."""

    def __init__(self, config: LlamaConfig, window: int | None, *, dtype: Any) -> None:
        options = {"eps": config.rms_norm_eps, "dtype": dtype}
        self.self_attn = LlamaAttention(config, window, dtype=dtype)
        self.mlp = LlamaMLP(config, dtype=dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, **options)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **options)

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


class LlamaTextModel(Decoder):
    """Llama's text model, and its relatives'."""

    def __init__(self, config: LlamaConfig, *, is_tied: bool, dtype: Any) -> None:
        self.config = config
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=[LlamaLayer(config, window, dtype=dtype) for window in config.windows],
            norm=RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype),
            is_tied=is_tied,
            kv_cache_spec=config.kv_cache_spec,
            dtype=dtype,
        )

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> list[Angles]:
        """Return the rotary angles, the same for every layer."""
        parameters = self.config.rope_parameters
        frequencies = inverse_frequencies(parameters, self.config.head_dim)
        factor, sections = attention_factor(parameters), parameters.get("mrope_section")
        if sections:
            angles = multimodal_angles(positions, frequencies, sections, factor)
        else:
            angles = rotary_angles(positions[0], frequencies, factor)
        return [angles] * len(self.layers)
