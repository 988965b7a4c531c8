"""Llama's decoder (arXiv 2302.13971), and those that differ from it by a key of their config alone.

Mistral (a window, arXiv 2310.06825), Qwen2 (biases on queries, keys and values; arXiv 2407.10671),
Qwen2-VL's text model (three axes of positions; arXiv 2409.12191), Qwen3 (norms on queries and keys;
arXiv 2505.09388).
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from mmjax.errors import CheckpointError
from mmjax.layers.decoder import GroupedQueryAttention, PreNormLayer, RotaryDecoder
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.norm import RMSNorm


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


def _read_rope(hf_config: Any) -> dict[str, Any]:
    # NOTE: HF's Qwen2-VL assumes these sections where the config names none.
    has_axes = hf_config.model_type in ("qwen2_vl_text", "qwen2_5_vl_text")
    assumed = {"mrope_section": [16, 24, 24]} if has_axes else {}
    return assumed | dict(hf_config.rope_parameters)


class LlamaTextModel(RotaryDecoder):
    """Llama's text model, and its relatives'."""

    def __init__(self, config: LlamaConfig, *, is_tied: bool, dtype: Any) -> None:
        super().__init__(
            config,
            num_kv_heads=config.num_key_value_heads,
            layers=[_build_layer(config, window, dtype=dtype) for window in config.windows],
            norm=RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype),
            is_tied=is_tied,
            dtype=dtype,
        )


def _build_layer(config: LlamaConfig, window: int | None, *, dtype: Any) -> nnx.Module:
    width, eps = config.hidden_size, config.rms_norm_eps
    head_norms = [
        RMSNorm(config.head_dim, eps=eps, dtype=dtype) if config.has_qk_norm else None
        for _ in range(2)
    ]
    attention = GroupedQueryAttention(
        width,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        has_qkv_bias=config.has_qkv_bias,
        has_output_bias=config.has_output_bias,
        norms=(head_norms[0], head_norms[1]),
        window=window,
        dtype=dtype,
    )
    mlp = GatedMLP(
        width,
        config.intermediate_size,
        activation=config.hidden_act,
        use_bias=config.has_mlp_bias,
        dtype=dtype,
    )
    return PreNormLayer(attention, mlp, lambda: RMSNorm(width, eps=eps, dtype=dtype))
