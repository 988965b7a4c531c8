"""ERNIE 4.5 VL's decoder (Baidu, 2025): text has experts of its own, and so has what is seen.

Each token goes to the experts of its kind, and to shared ones. Tokens of pictures, the marks around
a picture among them, have marked positions (`rounding.mark`); those of answers are text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError, check_settings
from mmjax.layers.attention.kv_cache import KVCacheSpec
from mmjax.layers.decoder import Decoder, DecoderLayer, GroupedQueryAttention
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.moe import MixtureOfExperts, Router, RouterConfig
from mmjax.layers.norm import RMSNorm
from mmjax.layers.rope import cos_sin, inverse_frequencies, unmark

_SECTIONS = (22, 22, 20)
"""HF's, where the config names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ernie45VLConfig:
    """The keys that arrays depend on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_theta: float
    sections: tuple[int, int, int]
    """Frequencies of the row, of the column, which alternate, and of time behind them."""
    router: RouterConfig
    expert_widths: tuple[int, int]
    """Of text, and of what is seen."""
    num_shared_experts: int
    sparse_layers: tuple[int, ...]

    @staticmethod
    def from_hf(hf_config: Any) -> "Ernie45VLConfig":
        """Read HF's `Ernie4_5_VLMoeTextConfig`; `CheckpointError` for what is not served."""
        check_settings(hf_config, {"use_bias": False}, where="config.json", source="mmjax has")
        rope = hf_config.rope_parameters
        sections = tuple(rope.get("mrope_section") or _SECTIONS)
        head_dim = getattr(hf_config, "head_dim", None) or (
            hf_config.hidden_size // hf_config.num_attention_heads
        )
        kind = rope.get("rope_type", "default")
        if kind != "default" or len(sections) != 3 or sections[0] != sections[1]:
            raise CheckpointError(
                f"`rope_type` is `{kind}` and `mrope_section` {list(sections)}; an ERNIE 4.5 VL "
                "has `default`, and as many frequencies of rows as of columns"
            )
        if sum(sections) != head_dim // 2:
            raise CheckpointError(
                f"`mrope_section` is {list(sections)}; its sum must be {head_dim // 2}, the half "
                "of a head"
            )
        kinds = enumerate(hf_config.mlp_layer_types)
        return read_config(
            Ernie45VLConfig,
            hf_config,
            head_dim=head_dim,
            rope_theta=float(rope["rope_theta"]),
            sections=sections,
            router=RouterConfig(
                num_experts=hf_config.moe_num_experts,
                top_k=hf_config.moe_k,
                has_correction_bias=True,
                is_normalized=True,
            ),
            expert_widths=tuple(hf_config.moe_intermediate_size),
            num_shared_experts=hf_config.moe_num_shared_experts,
            sparse_layers=tuple(number for number, kind in kinds if kind == "sparse"),
        )


class ExpertsByKind(nnx.Module):
    """Experts of text and of what is seen, each with a router, and shared ones."""

    def __init__(self, config: Ernie45VLConfig, *, dtype: Any) -> None:
        width, activation = config.hidden_size, config.hidden_act
        text, vision = config.expert_widths
        make = partial(MixtureOfExperts, num_shared=0, activation=activation, dtype=dtype)
        self.text_moe = make(width, text, config.router)
        self.vision_moe = make(width, vision, config.router)
        for experts in (self.text_moe, self.vision_moe):
            experts.gate = Router(width, config.router, dtype=jnp.float32)
        inner = text * config.num_shared_experts
        self.shared_experts = (
            GatedMLP(width, inner, activation=activation, dtype=dtype) if inner else None
        )

    def __call__(self, x: Float[Array, "T D"], is_seen: Bool[Array, " T"]) -> Float[Array, "T D"]:
        """Transform every token by the experts of its kind, and by the shared ones."""
        out = self.text_moe.transform_some(x, ~is_seen) + self.vision_moe.transform_some(x, is_seen)
        return out if self.shared_experts is None else out + self.shared_experts(x)


class Ernie45VLTextModel(Decoder):
    """The text model; parameters bear HF's names."""

    def __init__(self, config: Ernie45VLConfig, *, is_tied: bool, dtype: Any) -> None:
        self.config = config
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=[_build_layer(config, n, dtype=dtype) for n in range(config.num_hidden_layers)],
            norm=RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype),
            is_tied=is_tied,
            kv_cache_spec=KVCacheSpec.alike(
                config.num_hidden_layers,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
            ),
            dtype=dtype,
        )

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> Sequence[Any]:
        """Return the rotary angles, and of layers with experts which tokens are of pictures."""
        config = self.config
        is_seen, _, time = unmark(positions[0])
        places = jnp.stack([time, *positions[1:]])
        rows, _, steps = config.sections
        axes = np.concatenate([np.tile([1, 2], rows), np.zeros(steps, int)])
        frequencies = inverse_frequencies({"rope_theta": config.rope_theta}, config.head_dim)
        angles = cos_sin(places.astype(jnp.float32)[axes].T * frequencies[None, :])
        sparse = {*config.sparse_layers}
        return [
            (angles, is_seen) if number in sparse else angles
            for number in range(config.num_hidden_layers)
        ]


def _build_layer(config: Ernie45VLConfig, number: int, *, dtype: Any) -> nnx.Module:
    attention = GroupedQueryAttention(
        config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        is_interleaved=True,
        dtype=dtype,
    )
    make_norm = partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
    if number in config.sparse_layers:
        experts = ExpertsByKind(config, dtype=dtype)
        return DecoderLayer(attention, experts, make_norm, mlp_has_input=True)
    mlp = GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        activation=config.hidden_act,
        use_bias=False,
        dtype=dtype,
    )
    return DecoderLayer(attention, mlp, make_norm)
