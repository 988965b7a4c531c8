"""Molmo's decoders (arXiv 2409.17146): Qwen2's (7B-D, 72B), and OLMo's (7B-O).

OLMo's norms what attention and MLP give rather than what they read, and
queries and keys at their full width, before they are cut into heads.
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from mmjax.errors import CheckpointError
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import LayerCache
from mmjax.layers.decoder import (
    Angles,
    GroupedQueryAttention,
    PostNormLayer,
    PreNormLayer,
    RotaryDecoder,
    attend_by_heads,
)
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.norm import RMSNorm

_REQUIRED = {
    "layer_norm_type": "rms",
    "clip_qkv": None,
    "weight_tying": False,
    "block_type": "sequential",
    "moe_num_experts": None,
}
"""Keys of which every published checkpoint but MolmoE's, where it has them, has one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MolmoConfig:
    """The keys of a `molmo` config that the decoder's arrays depend on."""

    vocab_size: int
    """Rows of the table that have logits: `embedding_size`, which padding makes even."""
    hidden_size: int
    intermediate_size: int
    """Of one of the two halves; the file's counts both."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    layer_norm_eps: float
    qkv_bias: bool
    attention_layer_norm: bool
    norm_after: bool
    rope_parameters: dict[str, Any]

    @classmethod
    def from_hf(cls, hf_config: Any) -> "MolmoConfig":
        """Read config.json; `CheckpointError` for what no published checkpoint has."""
        for name, value in _REQUIRED.items():
            found = getattr(hf_config, name, value)
            if found != value:
                raise CheckpointError(f"`{name}` is {found!r}; mmjax's Molmo takes {value!r} alone")
        width, heads = hf_config.hidden_size, hf_config.num_attention_heads
        if width % heads:
            raise CheckpointError(
                f"`hidden_size` is {width}, which is no multiple of `num_attention_heads`, {heads}"
            )
        same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps")
        same = (*same, "qkv_bias", "attention_layer_norm", "norm_after")
        return cls(
            **{name: getattr(hf_config, name) for name in same},
            vocab_size=getattr(hf_config, "embedding_size", None) or hf_config.vocab_size,
            intermediate_size=hf_config.intermediate_size // 2,
            num_key_value_heads=getattr(hf_config, "num_key_value_heads", None) or heads,
            rope_parameters={"rope_theta": float(hf_config.rope_theta)},
        )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_attention_heads


class WideNormAttention(GroupedQueryAttention):
    """Attention that norms queries and keys before they are cut into heads."""

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: Angles,
        cache: LayerCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | None]:
        """Attend, and return the layer's cache with this step's keys and values."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        out, cache = attend_by_heads(
            self.q_norm(self.q_proj(x)),
            self.k_norm(self.k_proj(x)),
            self.v_proj(x),
            cache,
            metadata,
            head_dim=self.head_dim,
            angles=angles,
        )
        return self.o_proj(out), cache


class MolmoTextModel(RotaryDecoder):
    """Either decoder."""

    def __init__(self, config: MolmoConfig, *, is_tied: bool, dtype: Any) -> None:
        super().__init__(
            config,
            num_kv_heads=config.num_key_value_heads,
            layers=[_build_layer(config, dtype=dtype) for _ in range(config.num_hidden_layers)],
            norm=RMSNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype),
            is_tied=is_tied,
            dtype=dtype,
        )


def _build_layer(config: MolmoConfig, *, dtype: Any) -> nnx.Module:
    width, eps = config.hidden_size, config.layer_norm_eps
    key_width = config.num_key_value_heads * config.head_dim
    norms = (None, None)
    if config.attention_layer_norm:
        norms = (RMSNorm(width, eps=eps, dtype=dtype), RMSNorm(key_width, eps=eps, dtype=dtype))
    make = WideNormAttention if config.attention_layer_norm else GroupedQueryAttention
    attention = make(
        width,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        has_qkv_bias=config.qkv_bias,
        has_output_bias=False,
        norms=norms,
        dtype=dtype,
    )
    mlp = GatedMLP(width, config.intermediate_size, activation="silu", dtype=dtype)
    kind = PostNormLayer if config.norm_after else PreNormLayer
    return kind(attention, mlp, lambda: RMSNorm(width, eps=eps, dtype=dtype))
