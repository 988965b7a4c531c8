"""Persimmon's decoder (Adept, 2023), which is Fuyu's: squared ReLU, normed queries and keys.

Rotary positions turn a part of each head alone (`partial_rotary_factor`).
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from mmjax.errors import CheckpointError
from mmjax.layers.activation import get_activation
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import LayerCache
from mmjax.layers.decoder import Angles, PreNormLayer, RotaryDecoder, attend_by_heads
from mmjax.layers.linear import Linear
from mmjax.layers.norm import LayerNorm


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
        out, cache = attend_by_heads(
            self.q_proj(x),
            self.k_proj(x),
            self.v_proj(x),
            cache,
            metadata,
            head_dim=self.head_dim,
            angles=angles,
            norms=(self.q_layernorm, self.k_layernorm),
        )
        return self.dense(out), cache


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


class PersimmonTextModel(RotaryDecoder):
    """Persimmon's text model; `norm` is the file's `final_layernorm`."""

    def __init__(self, config: PersimmonConfig, *, is_tied: bool, dtype: Any) -> None:
        super().__init__(
            config,
            num_kv_heads=config.num_attention_heads,
            layers=[_build_layer(config, dtype=dtype) for _ in range(config.num_hidden_layers)],
            norm=LayerNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype),
            is_tied=is_tied,
            dtype=dtype,
        )


def _build_layer(config: PersimmonConfig, *, dtype: Any) -> nnx.Module:
    width, eps = config.hidden_size, config.layer_norm_eps
    attention, mlp = PersimmonAttention(config, dtype=dtype), PersimmonMLP(config, dtype=dtype)
    return PreNormLayer(attention, mlp, lambda: LayerNorm(width, eps=eps, dtype=dtype))
