"""Qwen's first decoder (arXiv 2309.16609): Llama's blocks, and two ways to read long prompts.

Dynamic NTK scaling: the base of the rotary angles grows with the prompt's length. Log-n scaling:
queries far behind the trained length are made larger (section 2.3 of the paper).
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.errors import check_settings
from mmjax.layers.attention.kv_cache import KVCacheSpec
from mmjax.layers.decoder import Angles, Decoder, PreNormLayer, ScaledQueryAttention
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.norm import RMSNorm
from mmjax.layers.rope import cos_sin, inverse_frequencies, rotary_angles
from mmjax.rounding import count_halvings

QwenInput = tuple[Angles, Float[Array, " T"]]
"""Cosines and sines of every token, and what its query is multiplied by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenConfig:
    """The keys of a `qwen` config that the arrays depend on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of both halves of an MLP together."""
    num_hidden_layers: int
    num_attention_heads: int
    kv_channels: int
    layer_norm_epsilon: float
    rotary_emb_base: float
    seq_length: int
    """The trained length, beyond which prompts are scaled."""
    max_position_embeddings: int
    use_dynamic_ntk: bool
    use_logn_attn: bool

    @classmethod
    def from_hf(cls, hf_config: Any) -> "QwenConfig":
        """Read config.json; `CheckpointError` for biases or rotary parts that nobody published."""
        wanted = {"no_bias": True, "rotary_pct": 1.0}
        check_settings(hf_config, wanted, where="config.json", source="mmjax's decoder has")
        # config.json may hold an integer.
        return read_config(cls, hf_config, rotary_emb_base=float(hf_config.rotary_emb_base))

    @property
    def rope_bases(self) -> list[float]:
        """Bases of the rotary angles, by how often a prompt must be halved to be `seq_length`."""
        num_levels = count_halvings(self.max_position_embeddings, self.seq_length) + 1
        power = self.kv_channels / (self.kv_channels - 2)
        alphas = [2 ** (level + 1) - 1 for level in range(num_levels)]
        return [self.rotary_emb_base * alpha**power for alpha in alphas]


class QwenTextModel(Decoder):
    """Qwen's text model.

    The third axis of a position is which of `QwenConfig.rope_bases` its request has.
    """

    def __init__(self, config: QwenConfig, *, is_tied: bool, dtype: Any) -> None:
        self.config = config
        layers = [_build_layer(config, dtype=dtype) for _ in range(config.num_hidden_layers)]
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=layers,
            norm=RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon, dtype=dtype),
            is_tied=is_tied,
            kv_cache_spec=KVCacheSpec.alike(
                config.num_hidden_layers,
                num_kv_heads=config.num_attention_heads,
                head_dim=config.kv_channels,
            ),
            dtype=dtype,
        )

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> list[QwenInput]:
        """Return the angles and the queries' factors, the same for every layer."""
        inputs = self._angles(positions), self._query_scale(positions[0])
        return [inputs] * len(self.layers)

    def _angles(self, positions: Int[Array, "3 T"]) -> Angles:
        width, bases = self.config.kv_channels, self.config.rope_bases
        if not self.config.use_dynamic_ntk:
            return rotary_angles(positions[0], inverse_frequencies({"rope_theta": bases[0]}, width))
        table = np.stack([inverse_frequencies({"rope_theta": base}, width) for base in bases])
        index = positions[0].astype(jnp.float32)
        return cos_sin(index[:, None] * jnp.asarray(table)[positions[2]])

    def _query_scale(self, index: Int[Array, " T"]) -> Float[Array, " T"]:
        """Return log(place) / log(trained length) beyond it, places counted from 1; else 1."""
        length = self.config.seq_length
        dtype = self.embed_tokens.dtype
        if not self.config.use_logn_attn:
            return jnp.ones(index.shape, dtype)
        place = jnp.maximum(index + 1, length).astype(jnp.float32)
        return (jnp.log(place) / np.float32(math.log(length))).astype(dtype)


def _build_layer(config: QwenConfig, *, dtype: Any) -> nnx.Module:
    width = config.hidden_size
    attention = ScaledQueryAttention(
        width,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=config.kv_channels,
        has_qkv_bias=True,
        has_output_bias=False,
        dtype=dtype,
    )
    mlp = GatedMLP(width, config.intermediate_size // 2, activation="silu", dtype=dtype)
    eps = config.layer_norm_epsilon
    return PreNormLayer(attention, mlp, lambda: RMSNorm(width, eps=eps, dtype=dtype))
