"""T5 (arXiv 1910.10683; also T5 1.1 and Flan-T5), whose positions are in the scores alone.

Each head adds a number to them by how far a key is away.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.language.encoder_decoder.blocks import (
    Attention,
    DecoderBlock,
    DistanceBias,
    EncoderBlock,
    see_all,
)
from mmjax.layers.attention.kv_cache import KVCacheSpec
from mmjax.layers.decoder import Decoder
from mmjax.layers.mlp import MLP, GatedMLP
from mmjax.layers.module import call_block
from mmjax.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config:
    """The keys of a `t5` config that the arrays depend on."""

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_decoder_layers: int
    num_heads: int
    relative_attention_num_buckets: int
    relative_attention_max_distance: int
    layer_norm_epsilon: float
    dense_act_fn: str
    is_gated_act: bool
    scale_decoder_outputs: bool

    is_pre_norm: ClassVar[bool] = True
    has_encoder: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, hf_config: Any) -> "T5Config":
        """Read HF's `T5Config`."""
        return read_config(cls, hf_config)

    def make_norm(self, dtype: Any) -> RMSNorm:
        """Return a norm of hidden states."""
        return RMSNorm(self.d_model, eps=self.layer_norm_epsilon, dtype=dtype)

    def make_attention(self, *, is_decoder: bool, dtype: Any) -> Attention:
        """Return the projections of an attention; scores are not scaled."""
        biases = {"has_bias": False, "has_key_bias": False}
        return Attention(self.d_model, self.num_heads, self.d_kv, **biases, scale=1.0, dtype=dtype)

    def make_mlp(self, *, is_decoder: bool, dtype: Any) -> MLP | GatedMLP:
        """Return what stands behind the attentions (`feed_forward_proj`)."""
        options = {"activation": self.dense_act_fn, "use_bias": False, "dtype": dtype}
        return (GatedMLP if self.is_gated_act else MLP)(self.d_model, self.d_ff, **options)


def find_buckets(
    distances: Int[np.ndarray, "..."], num_buckets: int, max_distance: int
) -> Int[np.ndarray, "..."]:
    """Return the bucket of each distance, from 0 on; in float32, as HF's.

    The first half of the buckets has one distance each; of the others each has more than the one
    before, and the last all from `max_distance` on.
    """
    num_exact = num_buckets // 2
    ratio = np.maximum(distances, 1).astype(np.float32) / np.float32(num_exact)
    share = np.log(ratio) / np.float32(math.log(max_distance / num_exact))
    far = num_exact + (share * np.float32(num_buckets - num_exact)).astype(np.int64)
    return np.where(distances < num_exact, distances, np.minimum(far, num_buckets - 1))


class RelativeBias(nnx.Module):
    """What heads add to scores, by bucket: parameter `weight[buckets, N]`."""

    def __init__(self, config: T5Config, *, dtype: Any) -> None:
        self.weight = nnx.Param(
            jnp.zeros((config.relative_attention_num_buckets, config.num_heads), dtype)
        )
        self.max_distance = config.relative_attention_max_distance

    def before(self) -> DistanceBias:
        """Return it for keys before the query; the last distance stands for all beyond it."""
        distances = np.arange(self.max_distance + 1)
        buckets = find_buckets(distances, len(self.weight[...]), self.max_distance)
        return self.weight[...][buckets].T

    def between(self, length: int) -> Float[Array, "N S S"]:
        """Return it for all tokens of a text: keys behind have the second half of the buckets."""
        half = len(self.weight[...]) // 2
        places = np.arange(length)
        offset = places[None, :] - places[:, None]
        buckets = find_buckets(np.abs(offset), half, self.max_distance) + half * (offset > 0)
        return self.weight[...][buckets].transpose(2, 0, 1)


class T5Encoder(nnx.Module):
    """Embeddings of whole prompts to hidden states."""

    def __init__(self, config: T5Config, *, dtype: Any) -> None:
        self.layers = nnx.List(
            EncoderBlock(config, is_decoder=False, dtype=dtype) for _ in range(config.num_layers)
        )
        self.norm = config.make_norm(dtype)
        self.relative_attention_bias = RelativeBias(config, dtype=dtype)

    def __call__(
        self, inputs_embeds: Float[Array, "B S D"], is_token: Bool[Array, "B S"]
    ) -> Float[Array, "B S D"]:
        """Return hidden states; `is_token` is false for padding, whose states are finite."""
        bias = self.relative_attention_bias.between(inputs_embeds.shape[1])
        mask = see_all(is_token)
        hidden = inputs_embeds
        for layer in self.layers:
            hidden = call_block(layer, hidden, mask, bias)
        return self.norm(hidden)


class T5Decoder(Decoder):
    """T5's decoder, whose table of tokens its encoder shares."""

    def __init__(self, config: T5Config, *, is_tied: bool, dtype: Any) -> None:
        self.config = config
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            layers=[
                DecoderBlock(config, is_decoder=True, dtype=dtype)
                for _ in range(config.num_decoder_layers)
            ],
            norm=config.make_norm(dtype),
            is_tied=is_tied,
            kv_cache_spec=KVCacheSpec.alike(
                config.num_decoder_layers, num_kv_heads=config.num_heads, head_dim=config.d_kv
            ),
            dtype=dtype,
        )
        self.relative_attention_bias = RelativeBias(config, dtype=dtype)

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> Sequence[DistanceBias]:
        """Return what heads add to scores, the same for every block."""
        return [self.relative_attention_bias.before()] * len(self.layers)

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project onto the vocabulary, in float32; the first T5's states are scaled before."""
        if self.config.scale_decoder_outputs:
            hidden_states = hidden_states * self.config.d_model**-0.5
        return super().compute_logits(hidden_states)
