"""Blocks that bear BART's names: of encoders over whole prompts, and of decoders."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from mmjax.layers.attention.api import (
    AttentionMetadata,
    DenseAttentionMetadata,
    attention,
    cross_attention,
    dense_attention,
    write_encoder,
)
from mmjax.layers.attention.kv_cache import DenseCache, LayerCache
from mmjax.layers.linear import Linear

DistanceBias = Float[Array, "N _distances"]
"""What each head adds to a score, by how many tokens the key is before the query."""


class Attention(nnx.Module):
    """The four projections of multi-head attention, and the three ways to attend with them."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int,
        *,
        has_bias: bool,
        has_key_bias: bool,
        scale: float | None = None,
        dtype: Any,
    ) -> None:
        """`scale`: what scores are multiplied by; None: `head_dim ** -0.5`."""
        inner = num_heads * head_dim
        self.q_proj = Linear(width, inner, use_bias=has_bias, dtype=dtype)
        self.k_proj = Linear(width, inner, use_bias=has_key_bias, dtype=dtype)
        self.v_proj = Linear(width, inner, use_bias=has_bias, dtype=dtype)
        self.out_proj = Linear(inner, width, use_bias=has_bias, dtype=dtype)
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale

    def attend_among(
        self,
        x: Float[Array, "B S D"],
        mask: Bool[Array, "B S S"],
        bias: Float[Array, "N S S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Attend to the tokens of a prompt that `mask` shows; `bias` is added to scores."""
        query, key, value = (self._cut(one, x) for one in (self.q_proj, self.k_proj, self.v_proj))
        return self._join(
            dense_attention(query, key, value, mask=mask, scale=self.scale, bias=bias)
        )

    def attend_back(
        self,
        x: Float[Array, "T D"],
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
        bias: DistanceBias | None = None,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Attend to earlier tokens, and return the cache with this step's keys and values."""
        query, key, value = (self._cut(one, x) for one in (self.q_proj, self.k_proj, self.v_proj))
        out, cache = attention(
            query, key, value, cache, metadata, scale=self.scale, distance_bias=bias
        )
        return self._join(out), cache

    def attend_across(
        self,
        x: Float[Array, "T D"],
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Write the encoder's keys and values of requests that start in this step; then attend."""
        assert metadata.cross is not None, "the metadata has no hidden states of the encoder"
        states = metadata.cross.encoder_hidden_states
        if states is not None and len(states):
            key, value = self._cut(self.k_proj, states), self._cut(self.v_proj, states)
            cache = write_encoder(key, value, cache, metadata)
        out = cross_attention(self._cut(self.q_proj, x), cache, metadata, scale=self.scale)
        return self._join(out), cache

    def weigh(
        self, x: Float[Array, "T D"], states: Float[Array, "S D"], heads: Sequence[int]
    ) -> Float[Array, "_heads T S"]:
        """Return how much tokens attend to an encoder's states, by some of the heads."""
        chosen = np.array(heads, np.int32)
        query, key = (
            self._cut(project, rows)[:, chosen]
            for project, rows in ((self.q_proj, x), (self.k_proj, states))
        )
        scores = jnp.einsum("tnh,snh->nts", query, key, preferred_element_type=jnp.float32)
        return jax.nn.softmax(scores * self.scale, axis=-1)

    def _cut(self, project: nnx.Module, x: Float[Array, "... D"]) -> Float[Array, "... N H"]:
        return project(x).reshape(*x.shape[:-1], -1, self.head_dim)

    def _join(self, out: Float[Array, "... N H"]) -> Float[Array, "... D"]:
        return self.out_proj(out.reshape(*out.shape[:-2], -1))


class Block(nnx.Module):
    """What blocks of encoders and decoders share: norms before or behind each part."""

    def __init__(self, config: Any, *, is_decoder: bool, dtype: Any) -> None:
        """`config`: BART's or T5's, which makes the norms, attentions and MLPs."""
        has_cross = is_decoder and config.has_encoder
        options = {"is_decoder": is_decoder, "dtype": dtype}
        self.self_attn = config.make_attention(**options)
        self.self_attn_layer_norm = config.make_norm(dtype)
        self.encoder_attn = config.make_attention(**options) if has_cross else None
        self.encoder_attn_layer_norm = config.make_norm(dtype) if has_cross else None
        self.mlp = config.make_mlp(**options)
        self.final_layer_norm = config.make_norm(dtype)
        self.is_pre_norm = config.is_pre_norm

    def before(self, norm: Any, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Return what a part of the block reads."""
        return norm(x) if self.is_pre_norm else x

    def behind(self, norm: Any, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Return the residual stream of a sum."""
        return x if self.is_pre_norm else norm(x)

    def finish(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Return the residual stream behind the MLP."""
        norm = self.final_layer_norm
        with jax.named_scope("mlp"):
            return self.behind(norm, x + self.mlp(self.before(norm, x)))


class EncoderBlock(Block):
    """A block over whole prompts."""

    def __call__(
        self,
        x: Float[Array, "B S D"],
        mask: Bool[Array, "B S S"],
        bias: Float[Array, "N S S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Return the residual stream after this block; tokens see those that `mask` shows."""
        norm = self.self_attn_layer_norm
        with jax.named_scope("attn"):
            x = self.behind(norm, x + self.self_attn.attend_among(self.before(norm, x), mask, bias))
        return self.finish(x)


class DecoderBlock(Block):
    """A block of a decoder, with cross-attention where there is an encoder."""

    def __call__(
        self,
        x: Float[Array, "T D"],
        layer_input: DistanceBias | None,
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Return the residual stream after this block, and its cache."""
        x, cache = self.attend_back(x, layer_input, cache, metadata)
        if self.encoder_attn is not None:
            x, cache = self.attend_across(x, cache, metadata)
        return self.finish(x), cache

    def attend_back(
        self,
        x: Float[Array, "T D"],
        layer_input: DistanceBias | None,
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Return the residual stream behind the self-attention, and the cache."""
        norm = self.self_attn_layer_norm
        with jax.named_scope("attn"):
            read = self.before(norm, x)
            out, cache = self.self_attn.attend_back(read, cache, metadata, layer_input)
            return self.behind(norm, x + out), cache

    def attend_across(
        self,
        x: Float[Array, "T D"],
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Return the residual stream behind the cross-attention, and the cache."""
        norm = self.encoder_attn_layer_norm
        assert self.encoder_attn is not None, "the block has no cross-attention"
        with jax.named_scope("cross_attn"):
            out, cache = self.encoder_attn.attend_across(self.before(norm, x), cache, metadata)
            return self.behind(norm, x + out), cache

    def align(
        self, x: Float[Array, "T D"], metadata: DenseAttentionMetadata, heads: Sequence[int]
    ) -> tuple[Float[Array, "T D"], Float[Array, "_heads T S"]]:
        """Return the residual stream after this block, and its heads' weights of the states."""
        assert metadata.cross is not None, "the metadata has no hidden states of the encoder"
        assert self.encoder_attn is not None, "the block has no cross-attention"
        x, _ = self.attend_back(x, None, None, metadata)
        read = self.before(self.encoder_attn_layer_norm, x)
        weights = self.encoder_attn.weigh(read, metadata.cross.encoder_hidden_states, heads)
        x, _ = self.attend_across(x, None, metadata)
        return self.finish(x), weights


def see_all(is_token: Bool[Array, "B S"]) -> Bool[Array, "B S S"]:
    """Return which tokens of a prompt each one sees: all but padding."""
    return jnp.broadcast_to(is_token[:, None, :], (*is_token.shape, is_token.shape[1]))
