"""BART's encoder and decoder (arXiv 1910.13461), and Whisper's decoder (arXiv 2212.04356)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmjax.layers.activation import get_activation
from mmjax.layers.attention.api import (
    AttentionMetadata,
    attention,
    cross_attention,
    dense_attention,
    write_encoder,
)
from mmjax.layers.attention.kv_cache import DenseCache, KVCache, KVCacheSpec, LayerCache
from mmjax.layers.decoder import Decoder
from mmjax.layers.linear import Linear
from mmjax.layers.module import call_block
from mmjax.layers.norm import LayerNorm

_EPS = 1e-5
"""The epsilon of every norm; no key of the config names it."""
POSITION_OFFSET = 2
"""The first position's row of BART's table: those before it were padding's when it was trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BartConfig:
    """The keys of a `bart` or a `whisper` config that the arrays depend on."""

    vocab_size: int
    d_model: int
    encoder_layers: int
    encoder_ffn_dim: int
    encoder_attention_heads: int
    decoder_layers: int
    decoder_ffn_dim: int
    decoder_attention_heads: int
    max_position_embeddings: int
    activation_function: str
    scale_embedding: bool
    position_offset: int = POSITION_OFFSET
    is_whisper: bool = False
    """Whether blocks norm what they read, and not what they give; a norm is then behind the last
    one and not before the first, and keys have no bias."""

    @classmethod
    def from_hf(cls, hf_config: Any) -> "BartConfig":
        """Read HF's `BartConfig`."""
        return cls(**_read(hf_config), max_position_embeddings=hf_config.max_position_embeddings)

    @classmethod
    def from_whisper(cls, hf_config: Any) -> "BartConfig":
        """Read HF's `WhisperConfig`, whose `scale_embedding` HF's decoder does not obey."""
        return cls(
            **{**_read(hf_config), "scale_embedding": False},
            max_position_embeddings=hf_config.max_target_positions,
            position_offset=0,
            is_whisper=True,
        )

    @property
    def embed_scale(self) -> float:
        """What embeddings of tokens are multiplied by (`scale_embedding`)."""
        return math.sqrt(self.d_model) if self.scale_embedding else 1.0


_OWN_FIELDS = ("max_position_embeddings", "position_offset", "is_whisper")
"""Those that are not read by their names."""


def _read(hf_config: Any) -> dict[str, Any]:
    fields = BartConfig.__dataclass_fields__
    return {name: getattr(hf_config, name) for name in fields if name not in _OWN_FIELDS}


class BartPositions(nnx.Module):
    """Learned position embeddings: parameter `weight[positions, D]`."""

    def __init__(self, config: BartConfig, *, dtype: Any) -> None:
        self.offset = config.position_offset
        shape = (config.max_position_embeddings + self.offset, config.d_model)
        self.weight = nnx.Param(jnp.zeros(shape, dtype))

    def __call__(self, positions: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up positions, counted from 0; those beyond the table read its last row."""
        return self.weight[...].at[positions + self.offset].get(mode="clip")


class BartAttention(nnx.Module):
    """The four projections of multi-head attention."""

    def __init__(
        self, width: int, num_heads: int, *, has_key_bias: bool = True, dtype: Any
    ) -> None:
        self.q_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.k_proj = Linear(width, width, use_bias=has_key_bias, dtype=dtype)
        self.v_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.out_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.head_dim = width // num_heads

    def split(self, x: Float[Array, "... D"]) -> Float[Array, "... N H"]:
        """Cut a projection into heads."""
        return x.reshape(*x.shape[:-1], -1, self.head_dim)

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5


class BartEncoderAttention(BartAttention):
    """Attention among all tokens of a prompt."""

    def __call__(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "B S S"]
    ) -> Float[Array, "B S D"]:
        """Attend to the tokens that `mask` shows."""
        query, key, value = (
            self.split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = dense_attention(query, key, value, mask=mask, scale=self.scale)
        return self.out_proj(out.reshape(x.shape))


class BartSelfAttention(BartAttention):
    """Causal attention of the decoder."""

    def __call__(
        self,
        x: Float[Array, "T D"],
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Attend, and return the layer's cache with this step's keys and values."""
        query, key, value = (
            self.split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out, cache = attention(query, key, value, cache, metadata, scale=self.scale)
        return self.out_proj(out.reshape(x.shape)), cache


class BartCrossAttention(BartAttention):
    """Attention of the decoder to the encoder's hidden states."""

    def __call__(
        self,
        x: Float[Array, "T D"],
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Write the keys and values of requests that start in this step; then attend."""
        assert metadata.cross is not None, "the metadata has no hidden states of BART's encoder"
        states = metadata.cross.encoder_hidden_states
        if states is not None and len(states):
            key, value = self.split(self.k_proj(states)), self.split(self.v_proj(states))
            cache = write_encoder(key, value, cache, metadata)
        query = self.split(self.q_proj(x))
        out = cross_attention(query, cache, metadata, scale=self.scale)
        return self.out_proj(out.reshape(x.shape)), cache


class BartEncoderLayer(nnx.Module):
    """A post-norm block."""

    def __init__(self, config: BartConfig, *, dtype: Any) -> None:
        width, inner = config.d_model, config.encoder_ffn_dim
        self.self_attn = BartEncoderAttention(width, config.encoder_attention_heads, dtype=dtype)
        self.self_attn_layer_norm = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.fc1 = Linear(width, inner, use_bias=True, dtype=dtype)
        self.fc2 = Linear(inner, width, use_bias=True, dtype=dtype)
        self.final_layer_norm = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.activation = get_activation(config.activation_function)

    def __call__(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "B S S"]
    ) -> Float[Array, "B S D"]:
        """Return the normed residual stream after this block."""
        with jax.named_scope("attn"):
            x = self.self_attn_layer_norm(x + self.self_attn(x, mask))
        with jax.named_scope("mlp"):
            return self.final_layer_norm(x + self.fc2(self.activation(self.fc1(x))))


class BartEncoder(nnx.Module):
    """Embeddings of whole prompts to hidden states."""

    def __init__(self, config: BartConfig, *, dtype: Any) -> None:
        self.embed_positions = BartPositions(config, dtype=dtype)
        self.layers = nnx.List(
            [BartEncoderLayer(config, dtype=dtype) for _ in range(config.encoder_layers)]
        )
        self.layernorm_embedding = LayerNorm(config.d_model, eps=_EPS, dtype=dtype)

    def __call__(
        self, inputs_embeds: Float[Array, "B S D"], is_token: Bool[Array, "B S"]
    ) -> Float[Array, "B S D"]:
        """Return hidden states; `is_token` is false for padding, whose states are finite."""
        positions = jnp.arange(inputs_embeds.shape[1], dtype=jnp.int32)
        hidden = inputs_embeds + self.embed_positions(positions)[None, :, :]
        hidden = self.layernorm_embedding(hidden)
        mask = jnp.broadcast_to(is_token[:, None, :], (*is_token.shape, is_token.shape[1]))
        for layer in self.layers:
            hidden = call_block(layer, hidden, mask)
        return hidden


class BartDecoderLayer(nnx.Module):
    """A post-norm block with cross-attention."""

    def __init__(self, config: BartConfig, *, dtype: Any) -> None:
        width, heads, inner = config.d_model, config.decoder_attention_heads, config.decoder_ffn_dim
        options = {"has_key_bias": not config.is_whisper, "dtype": dtype}
        self.self_attn = BartSelfAttention(width, heads, **options)
        self.self_attn_layer_norm = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.encoder_attn = BartCrossAttention(width, heads, **options)
        self.encoder_attn_layer_norm = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.fc1 = Linear(width, inner, use_bias=True, dtype=dtype)
        self.fc2 = Linear(inner, width, use_bias=True, dtype=dtype)
        self.final_layer_norm = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.activation = get_activation(config.activation_function)

    def __call__(
        self,
        x: Float[Array, "T D"],
        layer_input: None,
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Return the normed residual stream after this block, and its cache."""
        with jax.named_scope("attn"):
            out, cache = self.self_attn(x, cache, metadata)
            x = self.self_attn_layer_norm(x + out)
        with jax.named_scope("cross_attn"):
            out, cache = self.encoder_attn(x, cache, metadata)
            x = self.encoder_attn_layer_norm(x + out)
        with jax.named_scope("mlp"):
            return self.final_layer_norm(x + self.fc2(self.activation(self.fc1(x)))), cache


class WhisperDecoderLayer(BartDecoderLayer):
    """A pre-norm block with cross-attention, of the same parameters."""

    def __call__(
        self,
        x: Float[Array, "T D"],
        layer_input: None,
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Return the residual stream after this block, and its cache."""
        with jax.named_scope("attn"):
            out, cache = self.self_attn(self.self_attn_layer_norm(x), cache, metadata)
            x = x + out
        with jax.named_scope("cross_attn"):
            out, cache = self.encoder_attn(self.encoder_attn_layer_norm(x), cache, metadata)
            x = x + out
        with jax.named_scope("mlp"):
            return x + self.fc2(self.activation(self.fc1(self.final_layer_norm(x)))), cache


class _NoNorm(nnx.Module):
    """Stands where other decoders have a norm.

    BART's last block is normed already, and so is what Whisper's first block reads.
    """

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return x


class BartDecoder(Decoder):
    """BART's decoder, whose table of tokens its encoder shares; and Whisper's."""

    def __init__(self, config: BartConfig, *, is_tied: bool, dtype: Any) -> None:
        self.config = config
        make_layer = WhisperDecoderLayer if config.is_whisper else BartDecoderLayer
        norm = LayerNorm(config.d_model, eps=_EPS, dtype=dtype)
        first_norm, last_norm = (_NoNorm(), norm) if config.is_whisper else (norm, _NoNorm())
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            layers=[make_layer(config, dtype=dtype) for _ in range(config.decoder_layers)],
            norm=last_norm,
            is_tied=is_tied,
            # An encoder's hidden state stores as much.
            kv_cache_spec=KVCacheSpec.alike(
                config.decoder_layers,
                num_kv_heads=config.decoder_attention_heads,
                head_dim=config.d_model // config.decoder_attention_heads,
            ),
            dtype=dtype,
        )
        self.embed_positions = BartPositions(config, dtype=dtype)
        self.layernorm_embedding = first_norm

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up tokens, scaled; an id outside the table reads row 0."""
        return self.embed_tokens(token_ids) * self.config.embed_scale

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> Sequence[None]:
        """Return nothing for each block: positions are added once, before the first."""
        return [None] * len(self.layers)

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], KVCache | None]:
        """Return the last block's hidden states, and the cache."""
        hidden = self.layernorm_embedding(inputs_embeds + self.embed_positions(positions[0]))
        return super().__call__(hidden, positions, kv_cache, metadata)
