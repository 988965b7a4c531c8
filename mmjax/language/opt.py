"""OPT's decoder (arXiv 2205.01068): learned positions, layer norms, an MLP without a gate."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.errors import CheckpointError
from mmjax.layers.activation import get_activation
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import KVCache, KVCacheSpec, LayerCache
from mmjax.layers.decoder import Decoder, attend_by_heads
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.layers.norm import LayerNorm

_POSITION_OFFSET = 2
"""Rows before position 0's: fairseq counts positions from behind its padding's row."""
_NORM_EPS = 1e-5
"""torch's default; the config has no key for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTConfig:
    """The keys of an `opt` config that the arrays depend on."""

    vocab_size: int
    hidden_size: int
    ffn_dim: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    word_embed_proj_dim: int
    """Width of the embeddings and of the head; projected where it is not `hidden_size`."""
    activation_function: str
    do_layer_norm_before: bool
    """Whether a block norms its inputs (pre-norm), or its sums."""
    enable_bias: bool
    has_final_norm: bool

    @classmethod
    def from_hf(cls, hf_config: Any) -> "OPTConfig":
        """Read HF's `OPTConfig`; `CheckpointError` for norms without parameters."""
        if not hf_config.layer_norm_elementwise_affine:
            raise CheckpointError(
                "`layer_norm_elementwise_affine` is false: mmjax has OPT's norms with weights and "
                "biases only"
            )
        has_final_norm = hf_config.do_layer_norm_before and not hf_config._remove_final_layer_norm
        derived: dict[str, Any] = {"has_final_norm": has_final_norm}
        names = cls.__dataclass_fields__.keys() - derived.keys()
        return cls(**{name: getattr(hf_config, name) for name in names}, **derived)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads


class OPTAttention(nnx.Module):
    """Multi-head attention; positions are in the hidden states already."""

    def __init__(self, config: OPTConfig, *, dtype: Any) -> None:
        width, bias = config.hidden_size, config.enable_bias
        self.k_proj = Linear(width, width, use_bias=bias, dtype=dtype)
        self.v_proj = Linear(width, width, use_bias=bias, dtype=dtype)
        self.q_proj = Linear(width, width, use_bias=bias, dtype=dtype)
        self.out_proj = Linear(width, width, use_bias=bias, dtype=dtype)
        self.head_dim = config.head_dim

    def __call__(
        self, x: Float[Array, "T D"], cache: LayerCache | None, metadata: AttentionMetadata
    ) -> tuple[Float[Array, "T D"], LayerCache | None]:
        """Attend, and return the layer's cache with this step's keys and values."""
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        out, cache = attend_by_heads(query, key, value, cache, metadata, head_dim=self.head_dim)
        return self.out_proj(out), cache


class OPTLayer(nnx.Module):
    """A block, with its norms before or behind attention and MLP."""

    def __init__(self, config: OPTConfig, *, dtype: Any) -> None:
        width, inner, bias = config.hidden_size, config.ffn_dim, config.enable_bias
        self.self_attn = OPTAttention(config, dtype=dtype)
        self.self_attn_layer_norm = LayerNorm(width, eps=_NORM_EPS, dtype=dtype)
        self.fc1 = Linear(width, inner, use_bias=bias, dtype=dtype)
        self.fc2 = Linear(inner, width, use_bias=bias, dtype=dtype)
        self.final_layer_norm = LayerNorm(width, eps=_NORM_EPS, dtype=dtype)
        self.activation = get_activation(config.activation_function)
        self.is_pre_norm = config.do_layer_norm_before

    def __call__(
        self,
        x: Float[Array, "T D"],
        layer_input: None,
        cache: LayerCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | None]:
        """Return the residual stream after this block, and its cache."""
        with jax.named_scope("attn"):
            normed = self.self_attn_layer_norm(x) if self.is_pre_norm else x
            out, cache = self.self_attn(normed, cache, metadata)
            x = x + out if self.is_pre_norm else self.self_attn_layer_norm(x + out)
        with jax.named_scope("mlp"):
            normed = self.final_layer_norm(x) if self.is_pre_norm else x
            out = self.fc2(self.activation(self.fc1(normed)))
            return x + out if self.is_pre_norm else self.final_layer_norm(x + out), cache


class OPTTextModel(Decoder):
    """OPT's text model."""

    def __init__(self, config: OPTConfig, *, is_tied: bool, dtype: Any) -> None:
        width, embed_width = config.hidden_size, config.word_embed_proj_dim
        has_norm, is_projected = config.has_final_norm, embed_width != width
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=embed_width,
            layers=[OPTLayer(config, dtype=dtype) for _ in range(config.num_hidden_layers)],
            norm=LayerNorm(width, eps=_NORM_EPS, dtype=dtype) if has_norm else None,
            is_tied=is_tied,
            kv_cache_spec=KVCacheSpec.alike(
                config.num_hidden_layers,
                num_kv_heads=config.num_attention_heads,
                head_dim=config.head_dim,
            ),
            dtype=dtype,
        )
        num_positions = config.max_position_embeddings + _POSITION_OFFSET
        self.embed_positions = Embed(num_positions, width, dtype=dtype)
        self.project_in = (
            Linear(embed_width, width, use_bias=False, dtype=dtype) if is_projected else None
        )
        self.project_out = (
            Linear(width, embed_width, use_bias=False, dtype=dtype) if is_projected else None
        )

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> list[None]:
        """Return nothing for each block: positions are added before the first."""
        return [None] * len(self.layers)

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], KVCache | None]:
        """Return the hidden states as the head reads them, and the cache (None in, None out)."""
        hidden = inputs_embeds if self.project_in is None else self.project_in(inputs_embeds)
        hidden = hidden + self.embed_positions(positions[0] + _POSITION_OFFSET)
        hidden, kv_cache = super().__call__(hidden, positions, kv_cache, metadata)
        return hidden if self.project_out is None else self.project_out(hidden), kv_cache
