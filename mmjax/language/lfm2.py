"""LFM2's decoder (arXiv 2511.23404): short convolutions that are gated, and attention among them.

Parameters bear Llama's names, and a convolution's HF's (`models/text_model.py` maps the rest).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import (
    KVCacheSpec,
    LayerKVSpec,
    StateArray,
    StateCache,
    StateSpec,
)
from mmjax.layers.decoder import Angles, Decoder, DecoderLayer, GroupedQueryAttention
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.norm import RMSNorm
from mmjax.layers.recurrent.causal import CausalConvolution
from mmjax.layers.rope import text_angles

_CONVOLUTION, _ATTENTION = "conv", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config:
    """The keys that arrays depend on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inside of the MLPs; the file's may be what it follows from."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    norm_eps: float
    rope_parameters: dict[str, Any]
    conv_bias: bool
    conv_taps: int
    """Tokens that a convolution reads: a token and those before it (`conv_L_cache`)."""
    convolves: tuple[bool, ...]
    """Per layer, whether it is a convolution; else attention."""

    @staticmethod
    def from_hf(hf_config: Any) -> "Lfm2Config":
        """Read HF's config; `CheckpointError` for layers of another kind."""
        unknown = set(hf_config.layer_types) - {_CONVOLUTION, _ATTENTION}
        if unknown:
            raise CheckpointError(
                f"`layer_types` holds {sorted(unknown)}; known: {_CONVOLUTION}, {_ATTENTION}"
            )
        if hf_config.conv_L_cache < 2:
            raise CheckpointError(
                f"`conv_L_cache` is {hf_config.conv_L_cache}; a convolution reads 2 tokens or more"
            )
        num_heads = hf_config.num_attention_heads
        head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads
        return read_config(
            Lfm2Config,
            hf_config,
            intermediate_size=_find_inner(hf_config),
            head_dim=head_dim,
            conv_taps=hf_config.conv_L_cache,
            convolves=tuple(kind == _CONVOLUTION for kind in hf_config.layer_types),
        )


def _find_inner(hf_config: Any) -> int:
    """Return the width inside of an MLP (HF: `Lfm2MLP`)."""
    inner = hf_config.intermediate_size
    if not hf_config.block_auto_adjust_ff_dim:
        return inner
    inner = int(2 * inner / 3)
    if hf_config.block_ffn_dim_multiplier is None:
        return inner
    unit = hf_config.block_multiple_of
    inner = int(hf_config.block_ffn_dim_multiplier * inner)
    return unit * ((inner + unit - 1) // unit)


class GatedConvolution(nnx.Module):
    """A causal convolution between two gates, of which tokens make their own."""

    def __init__(self, config: Lfm2Config, *, dtype: Any) -> None:
        width, options = config.hidden_size, {"use_bias": config.conv_bias, "dtype": dtype}
        self.in_proj = Linear(width, 3 * width, **options)
        self.conv = CausalConvolution(width, config.conv_taps, **options)
        self.out_proj = Linear(width, width, **options)

    def __call__(
        self,
        x: Float[Array, "T D"],
        layer_input: None,
        cache: StateCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], StateCache | None]:
        """Convolve, and return the layer's cache with the last inputs of each request."""
        before, behind, value = jnp.split(self.in_proj(x), 3, axis=-1)
        state = None if cache is None else cache.arrays[0]
        out, state = self.conv(before * value, state, metadata)
        return self.out_proj(behind * out), None if state is None else StateCache((state,))


class Lfm2TextModel(Decoder):
    """LFM2's text model."""

    def __init__(self, config: Lfm2Config, *, is_tied: bool, dtype: Any) -> None:
        self.config = config
        kept = StateArray((config.conv_taps - 1, config.hidden_size), cut_axis=1)
        kinds = {
            True: StateSpec((kept,)),
            False: LayerKVSpec(
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                value_dim=config.head_dim,
            ),
        }
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=[_build_layer(config, one, dtype=dtype) for one in config.convolves],
            norm=RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype),
            is_tied=is_tied,
            kv_cache_spec=KVCacheSpec.of_layers([kinds[one] for one in config.convolves]),
            dtype=dtype,
        )

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> Sequence[Angles | None]:
        """Return the rotary angles of attention; convolutions have none."""
        angles = text_angles(self.config.rope_parameters, self.config.head_dim, positions)
        return [None if convolves else angles for convolves in self.config.convolves]


def _build_layer(config: Lfm2Config, convolves: bool, *, dtype: Any) -> nnx.Module:
    def make_norm(width: int = config.hidden_size) -> RMSNorm:
        return RMSNorm(width, eps=config.norm_eps, dtype=dtype)

    mlp = GatedMLP(config.hidden_size, config.intermediate_size, activation="silu", dtype=dtype)
    if convolves:
        convolution = GatedConvolution(config, dtype=dtype)
        return DecoderLayer(convolution, mlp, make_norm, mixer_name="conv")
    attention = GroupedQueryAttention(
        config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        has_qkv_bias=False,
        has_output_bias=False,
        norms=(make_norm(config.head_dim), make_norm(config.head_dim)),
        dtype=dtype,
    )
    return DecoderLayer(attention, mlp, make_norm)
