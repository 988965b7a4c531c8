"""The decoders of Gemma 1 (arXiv 2403.08295), 2 (2408.00118) and 3 (2503.19786).

Gemma 1 norms what attention and MLP read, the others also what they give. Gemma 2 caps scores and
logits, Gemma 3 norms each head's queries and keys.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.errors import CheckpointError
from mmjax.layers.attention.kv_cache import KVCacheSpec
from mmjax.layers.attention.paged import apply_soft_cap
from mmjax.layers.decoder import (
    Angles,
    Decoder,
    GroupedQueryAttention,
    PreNormLayer,
    SandwichNormLayer,
)
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.norm import GemmaRMSNorm
from mmjax.layers.rope import text_angles

_LAYER_TYPES = ("sliding_attention", "full_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig:
    """The keys that arrays depend on, of a config of `gemma`, `gemma2` or `gemma3_text`."""

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
    has_output_norms: bool
    """Whether what attention and MLP give is normed, too."""
    has_head_norms: bool

    @classmethod
    def from_hf(cls, hf_config: Any) -> "GemmaConfig":
        """Read HF's config; `CheckpointError` for unsupported values."""
        kind = hf_config.model_type
        # PaliGemma's decoders have the key, whose prompts see themselves (`sees` of the model).
        if hf_config.use_bidirectional_attention and kind == "gemma3_text":
            raise CheckpointError(
                "`use_bidirectional_attention` is true: an encoder, not a generator; "
                "mmjax serves checkpoints with causal text"
            )
        values: dict[str, Any] = {
            name: getattr(hf_config, name, None) for name in cls.__dataclass_fields__
        }
        values |= {"has_output_norms": kind != "gemma", "has_head_norms": kind == "gemma3_text"}
        if kind == "gemma":
            values["hidden_activation"] = hf_config.hidden_act
            values["query_pre_attn_scalar"] = hf_config.head_dim
            values["layer_types"] = ["full_attention"] * hf_config.num_hidden_layers
        values["layer_types"] = tuple(values["layer_types"])
        if kind != "gemma3_text":
            rope = hf_config.rope_parameters
            values["rope_parameters"] = dict.fromkeys(values["layer_types"], rope)
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


class GemmaTextModel(Decoder):
    """Gemma's text model; its tokens' embeddings are scaled, its logits may be capped."""

    def __init__(self, config: GemmaConfig, *, is_tied: bool, dtype: Any) -> None:
        self.config = config
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=[_build_layer(config, kind, dtype=dtype) for kind in config.layer_types],
            norm=GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype),
            is_tied=is_tied,
            kv_cache_spec=KVCacheSpec.alike(
                config.num_hidden_layers,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
            ),
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
            kind: text_angles(config.rope_parameters[kind], config.head_dim, positions)
            for kind in sorted(set(config.layer_types))
        }
        return [angles[kind] for kind in config.layer_types]

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project onto the vocabulary, in float32, soft-capped where the config says so."""
        logits = super().compute_logits(hidden_states)
        return apply_soft_cap(logits, self.config.final_logit_softcapping)


def _build_layer(config: GemmaConfig, layer_type: str, *, dtype: Any) -> nnx.Module:
    width, options = config.hidden_size, {"eps": config.rms_norm_eps, "dtype": dtype}
    head_norms = [GemmaRMSNorm(config.head_dim, **options) for _ in range(2)]
    attention = GroupedQueryAttention(
        width,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        has_qkv_bias=config.attention_bias,
        has_output_bias=config.attention_bias,
        norms=(head_norms[0], head_norms[1]) if config.has_head_norms else (None, None),
        scale=config.query_pre_attn_scalar**-0.5,
        window=config.sliding_window if layer_type == "sliding_attention" else None,
        soft_cap=config.attn_logit_softcapping,
        dtype=dtype,
    )
    mlp = GatedMLP(
        width, config.intermediate_size, activation=config.hidden_activation, dtype=dtype
    )
    layer = SandwichNormLayer if config.has_output_norms else PreNormLayer
    return layer(attention, mlp, lambda: GemmaRMSNorm(width, **options))
