"""LFM2's decoder (arXiv 2511.23404): short convolutions that are gated, and attention among them.

LFM3's (Liquid AI, 2026) is the same with windows in some layers of attention, rotary angles of each
kind of layer, norms behind its parts as well as before them, and a gate for each head. Parameters
bear Llama's names, Gemma's of norms where LFM3 has more, and a convolution's HF's
(`models/text_model.py` maps the rest).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import (
    DenseCache,
    KVCacheSpec,
    LayerCache,
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

_CONVOLUTION, _ATTENTION, _SLIDING = "conv", "full_attention", "sliding_attention"


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
    rope_parameters: Mapping[str, Mapping[str, Any]]
    """By the kind of layer, of attention."""
    conv_bias: bool
    conv_taps: int
    """Tokens that a convolution reads: a token and those before it (`conv_L_cache`)."""
    layer_types: tuple[str, ...]
    """Per layer, what it is: a convolution, attention, or attention within a window."""
    window: int | None = None
    """Tokens that one sees in the latter, itself among them; None: no layer has one."""
    attention_bias: bool = False
    norm_order: str = "pre"
    """As `DecoderLayer` has it."""
    has_head_gates: bool = False
    """Whether the states choose how much of each head's output counts."""
    rotates_in_float32: bool = False

    @staticmethod
    def from_hf(hf_config: Any) -> "Lfm2Config":
        """Read HF's config of an LFM2; `CheckpointError` for layers of another kind."""
        _check_layers(hf_config, (_CONVOLUTION, _ATTENTION))
        num_heads = hf_config.num_attention_heads
        head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads
        return read_config(
            Lfm2Config,
            hf_config,
            intermediate_size=_find_inner(hf_config),
            head_dim=head_dim,
            conv_taps=hf_config.conv_L_cache,
            rope_parameters={_ATTENTION: hf_config.rope_parameters},
        )

    @staticmethod
    def from_lfm3(hf_config: Any) -> "Lfm2Config":
        """Read HF's config of an LFM3; `CheckpointError` for what none can have."""
        kinds = _check_layers(hf_config, (_CONVOLUTION, _ATTENTION, _SLIDING))
        ropes, window = hf_config.rope_parameters, hf_config.sliding_window
        if missing := sorted(kinds - {_CONVOLUTION} - ropes.keys()):
            raise CheckpointError(
                f"`rope_parameters` has none for {', '.join(missing)}, which `layer_types` holds"
            )
        if _SLIDING in kinds and (window is None or window < 1):
            raise CheckpointError(
                f"`sliding_window` is {window}, and `layer_types` holds {_SLIDING}; give the "
                "number of tokens that one sees there, from 1 on"
            )
        return read_config(
            Lfm2Config,
            hf_config,
            "attention_bias",
            conv_taps=hf_config.conv_L_cache,
            window=window,
            norm_order="both" if hf_config.use_sandwich_norm else "pre",
            has_head_gates=hf_config.use_attention_gate,
            rotates_in_float32=True,
        )


def _check_layers(hf_config: Any, known: Sequence[str]) -> set[str]:
    """Return the kinds of layers that a config has; `CheckpointError` for one not known."""
    kinds = set(hf_config.layer_types)
    if unknown := sorted(kinds - {*known}):
        raise CheckpointError(f"`layer_types` holds {unknown}; known: {', '.join(known)}")
    if hf_config.conv_L_cache < 2:
        raise CheckpointError(
            f"`conv_L_cache` is {hf_config.conv_L_cache}; a convolution reads 2 tokens or more"
        )
    return kinds


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


class HeadGatedAttention(GroupedQueryAttention):
    """Attention each of whose heads gives as much of its output as the states say, where they do.

    Each head's queries and keys are normed.
    """

    def __init__(self, config: Lfm2Config, kind: str, *, dtype: Any) -> None:
        query_norm, key_norm = (
            RMSNorm(config.head_dim, eps=config.norm_eps, dtype=dtype) for _ in range(2)
        )
        super().__init__(
            config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            has_qkv_bias=config.attention_bias,
            has_output_bias=config.attention_bias,
            norms=(query_norm, key_norm),
            rotates_in_float32=config.rotates_in_float32,
            window=config.window if kind == _SLIDING else None,
            dtype=dtype,
        )
        width, num_heads = config.hidden_size, config.num_attention_heads
        has_gates, options = config.has_head_gates, {"use_bias": False, "dtype": dtype}
        self.g_proj = Linear(width, num_heads, **options) if has_gates else None

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: Angles | None,
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Attend, and return the layer's cache with this step's keys and values."""
        out, cache = self.attend(self.q_proj(x), x, angles, cache, metadata)
        if self.g_proj is not None:
            heads = out.reshape(len(x), -1, self.head_dim)
            out = (heads * jax.nn.sigmoid(self.g_proj(x))[:, :, None]).reshape(out.shape)
        return self.o_proj(out), cache


class Lfm2TextModel(Decoder):
    """LFM2's text model, and LFM3's."""

    def __init__(self, config: Lfm2Config, *, is_tied: bool, dtype: Any) -> None:
        self.config = config
        kept = StateArray((config.conv_taps - 1, config.hidden_size), cut_axis=1)
        paged = LayerKVSpec(
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            value_dim=config.head_dim,
        )
        kinds = {_CONVOLUTION: StateSpec((kept,)), _ATTENTION: paged, _SLIDING: paged}
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=[_build_layer(config, one, dtype=dtype) for one in config.layer_types],
            norm=RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype),
            is_tied=is_tied,
            kv_cache_spec=KVCacheSpec.of_layers([kinds[one] for one in config.layer_types]),
            dtype=dtype,
        )

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> Sequence[Angles | None]:
        """Return the rotary angles of attention; convolutions have none."""
        config = self.config
        made = {
            kind: text_angles(rope, config.head_dim, positions)
            for kind, rope in config.rope_parameters.items()
            if kind in config.layer_types
        }
        return [made.get(kind) for kind in config.layer_types]


def _build_layer(config: Lfm2Config, kind: str, *, dtype: Any) -> nnx.Module:
    def make_norm() -> RMSNorm:
        return RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)

    mlp = GatedMLP(config.hidden_size, config.intermediate_size, activation="silu", dtype=dtype)
    order = config.norm_order
    if kind == _CONVOLUTION:
        convolution = GatedConvolution(config, dtype=dtype)
        return DecoderLayer(convolution, mlp, make_norm, norm_order=order, mixer_name="conv")
    attention = HeadGatedAttention(config, kind, dtype=dtype)
    return DecoderLayer(attention, mlp, make_norm, norm_order=order)
