"""T5's encoder and decoder (arXiv 1910.10683), as T5 1.1 and Flan-T5 have them, too.

Positions are in the scores alone: each head adds a number to them by how far a key is away.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmjax.layers.attention.api import (
    AttentionMetadata,
    attention,
    cross_attention,
    dense_attention,
    write_encoder,
)
from mmjax.layers.attention.kv_cache import DenseCache, KVCacheSpec, LayerCache
from mmjax.layers.decoder import Decoder
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import MLP, GatedMLP
from mmjax.layers.module import call_block
from mmjax.layers.norm import RMSNorm

DistanceBias = Float[Array, "N _distances"]
"""What each head adds to a score, by how many tokens the key is before the query."""


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

    @classmethod
    def from_hf(cls, hf_config: Any) -> "T5Config":
        """Read HF's `T5Config`."""
        return cls(**{name: getattr(hf_config, name) for name in cls.__dataclass_fields__})

    def make_norm(self, dtype: Any) -> RMSNorm:
        """Return a norm of hidden states."""
        return RMSNorm(self.d_model, eps=self.layer_norm_epsilon, dtype=dtype)

    def make_mlp(self, dtype: Any) -> nnx.Module:
        """Return what stands between two attentions (`feed_forward_proj`)."""
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


class T5Attention(nnx.Module):
    """The four projections; scores are not scaled."""

    def __init__(self, config: T5Config, *, dtype: Any) -> None:
        width, inner = config.d_model, config.num_heads * config.d_kv
        options = {"use_bias": False, "dtype": dtype}
        self.q_proj = Linear(width, inner, **options)
        self.k_proj = Linear(width, inner, **options)
        self.v_proj = Linear(width, inner, **options)
        self.o_proj = Linear(inner, width, **options)
        self.head_dim = config.d_kv

    def split(self, x: Float[Array, "... _inner"]) -> Float[Array, "... N H"]:
        """Cut a projection into heads."""
        return x.reshape(*x.shape[:-1], -1, self.head_dim)

    def project(
        self, x: Float[Array, "... D"]
    ) -> tuple[Float[Array, "... N H"], Float[Array, "... N H"], Float[Array, "... N H"]]:
        """Return queries, keys and values."""
        return self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))

    def join(self, out: Float[Array, "... N H"]) -> Float[Array, "... D"]:
        """Put the heads side by side, and project."""
        return self.o_proj(out.reshape(*out.shape[:-2], -1))


class T5EncoderLayer(nnx.Module):
    """A pre-norm block."""

    def __init__(self, config: T5Config, *, dtype: Any) -> None:
        self.self_attn = T5Attention(config, dtype=dtype)
        self.self_attn_layer_norm = config.make_norm(dtype)
        self.mlp = config.make_mlp(dtype)
        self.final_layer_norm = config.make_norm(dtype)

    def __call__(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "B S S"], bias: Float[Array, "N S S"]
    ) -> Float[Array, "B S D"]:
        """Return the residual stream after this block; tokens see those that `mask` shows."""
        with jax.named_scope("attn"):
            parts = self.self_attn.project(self.self_attn_layer_norm(x))
            out = dense_attention(*parts, mask=mask, scale=1.0, bias=bias)
            x = x + self.self_attn.join(out)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.final_layer_norm(x))


class T5Encoder(nnx.Module):
    """Embeddings of whole prompts to hidden states."""

    def __init__(self, config: T5Config, *, dtype: Any) -> None:
        self.layers = nnx.List(
            [T5EncoderLayer(config, dtype=dtype) for _ in range(config.num_layers)]
        )
        self.norm = config.make_norm(dtype)
        self.relative_attention_bias = RelativeBias(config, dtype=dtype)

    def __call__(
        self, inputs_embeds: Float[Array, "B S D"], is_token: Bool[Array, "B S"]
    ) -> Float[Array, "B S D"]:
        """Return hidden states; `is_token` is false for padding, whose states are finite."""
        bias = self.relative_attention_bias.between(inputs_embeds.shape[1])
        mask = jnp.broadcast_to(is_token[:, None, :], (*is_token.shape, is_token.shape[1]))
        hidden = inputs_embeds
        for layer in self.layers:
            hidden = call_block(layer, hidden, mask, bias)
        return self.norm(hidden)


class T5DecoderLayer(nnx.Module):
    """A pre-norm block with cross-attention."""

    def __init__(self, config: T5Config, *, dtype: Any) -> None:
        self.self_attn = T5Attention(config, dtype=dtype)
        self.self_attn_layer_norm = config.make_norm(dtype)
        self.encoder_attn = T5Attention(config, dtype=dtype)
        self.encoder_attn_layer_norm = config.make_norm(dtype)
        self.mlp = config.make_mlp(dtype)
        self.final_layer_norm = config.make_norm(dtype)

    def __call__(
        self,
        x: Float[Array, "T D"],
        layer_input: DistanceBias,
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Return the residual stream after this block, and its cache."""
        with jax.named_scope("attn"):
            query, key, value = self.self_attn.project(self.self_attn_layer_norm(x))
            out, cache = attention(
                query, key, value, cache, metadata, scale=1.0, distance_bias=layer_input
            )
            x = x + self.self_attn.join(out)
        with jax.named_scope("cross_attn"):
            out, cache = self._attend_across(self.encoder_attn_layer_norm(x), cache, metadata)
            x = x + out
        with jax.named_scope("mlp"):
            return x + self.mlp(self.final_layer_norm(x)), cache

    def _attend_across(
        self,
        x: Float[Array, "T D"],
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Write the keys and values of requests that start in this step; then attend."""
        across = self.encoder_attn
        assert metadata.cross is not None, "the metadata has no hidden states of T5's encoder"
        states = metadata.cross.encoder_hidden_states
        if states is not None and len(states):
            key, value = across.split(across.k_proj(states)), across.split(across.v_proj(states))
            cache = write_encoder(key, value, cache, metadata)
        query = across.split(across.q_proj(x))
        return across.join(cross_attention(query, cache, metadata, scale=1.0)), cache


class T5Decoder(Decoder):
    """T5's decoder, whose table of tokens its encoder shares."""

    def __init__(self, config: T5Config, *, is_tied: bool, dtype: Any) -> None:
        self.config = config
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            layers=[T5DecoderLayer(config, dtype=dtype) for _ in range(config.num_decoder_layers)],
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
