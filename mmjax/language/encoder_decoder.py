"""Blocks that bear BART's names: of encoder-decoders, and of OPT, a decoder without an encoder.

BART (arXiv 1910.13461); Whisper's decoder (2212.04356); OPT (2205.01068); and T5 (1910.10683; also
T5 1.1 and Flan-T5), whose positions are in the scores alone: each head adds a number to them by how
far a key is away.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.layers.attention.api import (
    AttentionMetadata,
    DenseAttentionMetadata,
    DenseCrossMetadata,
    attention,
    cross_attention,
    dense_attention,
    write_encoder,
)
from mmjax.layers.attention.kv_cache import DenseCache, KVCache, KVCacheSpec, LayerCache
from mmjax.layers.decoder import Decoder
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import MLP, GatedMLP
from mmjax.layers.module import call_block
from mmjax.layers.norm import LayerNorm, RMSNorm

_EPS = 1e-5
"""The epsilon of every norm but T5's; no key of the config names it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BartConfig:
    """The keys of a `bart`, a `whisper` or an `opt` config that the arrays depend on."""

    vocab_size: int
    d_model: int
    embed_width: int
    """Width of the embeddings and of the head; projected where it is not `d_model`."""
    encoder_layers: int = 0
    """0: there is no encoder, and no cross-attention."""
    encoder_ffn_dim: int = 0
    encoder_attention_heads: int = 0
    decoder_layers: int
    decoder_ffn_dim: int
    decoder_attention_heads: int
    max_position_embeddings: int
    position_offset: int = 2
    """The first position's row of the table: those before it were padding's in training."""
    activation_function: str
    scale_embedding: bool = False
    has_bias: bool = True
    has_key_bias: bool = True
    is_pre_norm: bool = False
    """Whether blocks norm what they read, and not what they give."""
    has_first_norm: bool = False
    """Whether there is a norm before the first block."""
    has_last_norm: bool = False
    """Whether there is one behind the last."""

    @staticmethod
    def from_hf(hf_config: Any) -> "BartConfig":
        """Read BART's, Whisper's or OPT's; `CheckpointError` for norms without parameters."""
        read = {"opt": _read_opt, "whisper": _read_whisper}.get(hf_config.model_type, _read_bart)
        return read_config(BartConfig, hf_config, **read(hf_config))

    @property
    def embed_scale(self) -> float:
        """What embeddings of tokens are multiplied by (`scale_embedding`)."""
        return math.sqrt(self.d_model) if self.scale_embedding else 1.0

    @property
    def has_encoder(self) -> bool:
        """Whether the decoder attends to an encoder's states."""
        return self.encoder_layers > 0

    def make_norm(self, dtype: Any) -> LayerNorm:
        """Return a norm of hidden states."""
        return LayerNorm(self.d_model, eps=_EPS, dtype=dtype)

    def make_attention(self, *, is_decoder: bool, dtype: Any) -> Attention:
        """Return the projections of an attention."""
        heads = self.decoder_attention_heads if is_decoder else self.encoder_attention_heads
        biases = {"has_bias": self.has_bias, "has_key_bias": self.has_key_bias}
        return Attention(self.d_model, heads, self.d_model // heads, **biases, dtype=dtype)

    def make_mlp(self, *, is_decoder: bool, dtype: Any) -> MLP:
        """Return what stands behind the attentions."""
        inner = self.decoder_ffn_dim if is_decoder else self.encoder_ffn_dim
        options = {"activation": self.activation_function, "use_bias": self.has_bias}
        return MLP(self.d_model, inner, **options, dtype=dtype)


def _read_bart(hf_config: Any, positions: str = "max_position_embeddings") -> dict[str, Any]:
    names = ("encoder_layers", "encoder_ffn_dim", "encoder_attention_heads", "scale_embedding")
    return {
        **{name: getattr(hf_config, name) for name in names},
        "embed_width": hf_config.d_model,
        "max_position_embeddings": getattr(hf_config, positions),
        "has_first_norm": True,
    }


def _read_whisper(hf_config: Any) -> dict[str, Any]:
    return {
        **_read_bart(hf_config, "max_target_positions"),
        "scale_embedding": False,  # HF's decoder does not obey it
        "position_offset": 0,
        "has_key_bias": False,
        **{"is_pre_norm": True, "has_first_norm": False, "has_last_norm": True},
    }


def _read_opt(hf_config: Any) -> dict[str, Any]:
    if not hf_config.layer_norm_elementwise_affine:
        raise CheckpointError(
            "`layer_norm_elementwise_affine` is false: mmjax has OPT's norms with weights and "
            "biases only"
        )
    is_pre_norm = hf_config.do_layer_norm_before
    return {
        "d_model": hf_config.hidden_size,
        "embed_width": hf_config.word_embed_proj_dim,
        "decoder_layers": hf_config.num_hidden_layers,
        "decoder_ffn_dim": hf_config.ffn_dim,
        "decoder_attention_heads": hf_config.num_attention_heads,
        **dict.fromkeys(("has_bias", "has_key_bias"), hf_config.enable_bias),
        "is_pre_norm": is_pre_norm,
        "has_last_norm": is_pre_norm and not hf_config._remove_final_layer_norm,
    }


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


class Block(nnx.Module):
    """What blocks of encoders and decoders share: norms before or behind each part."""

    def __init__(self, config: BartConfig | T5Config, *, is_decoder: bool, dtype: Any) -> None:
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


def _see_all(is_token: Bool[Array, "B S"]) -> Bool[Array, "B S S"]:
    """Return which tokens of a prompt each one sees: all but padding."""
    return jnp.broadcast_to(is_token[:, None, :], (*is_token.shape, is_token.shape[1]))


# ---- BART, Whisper and OPT -----------------------------------------------------------------------


class BartPositions(nnx.Module):
    """Learned position embeddings: parameter `weight[positions, D]`."""

    def __init__(self, config: BartConfig, *, dtype: Any) -> None:
        self.offset = config.position_offset
        shape = (config.max_position_embeddings + self.offset, config.d_model)
        self.weight = nnx.Param(jnp.zeros(shape, dtype))

    def __call__(self, positions: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up positions, counted from 0; those beyond the table read its last row."""
        return self.weight[...].at[positions + self.offset].get(mode="clip")


class BartEncoder(nnx.Module):
    """Embeddings of whole prompts to hidden states."""

    def __init__(self, config: BartConfig, *, dtype: Any) -> None:
        self.embed_positions = BartPositions(config, dtype=dtype)
        self.layers = nnx.List(
            EncoderBlock(config, is_decoder=False, dtype=dtype)
            for _ in range(config.encoder_layers)
        )
        self.layernorm_embedding = config.make_norm(dtype)

    def __call__(
        self, inputs_embeds: Float[Array, "B S D"], is_token: Bool[Array, "B S"]
    ) -> Float[Array, "B S D"]:
        """Return hidden states; `is_token` is false for padding, whose states are finite."""
        positions = jnp.arange(inputs_embeds.shape[1], dtype=jnp.int32)
        hidden = inputs_embeds + self.embed_positions(positions)[None, :, :]
        hidden = self.layernorm_embedding(hidden)
        mask = _see_all(is_token)
        for layer in self.layers:
            hidden = call_block(layer, hidden, mask)
        return hidden


class BartDecoder(Decoder):
    """BART's decoder, whose table of tokens its encoder shares; Whisper's; and OPT."""

    def __init__(self, config: BartConfig, *, is_tied: bool, dtype: Any) -> None:
        self.config = config
        width, embed_width = config.d_model, config.embed_width
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=embed_width,
            layers=[
                DecoderBlock(config, is_decoder=True, dtype=dtype)
                for _ in range(config.decoder_layers)
            ],
            norm=config.make_norm(dtype) if config.has_last_norm else None,
            is_tied=is_tied,
            # An encoder's hidden state stores as much.
            kv_cache_spec=KVCacheSpec.alike(
                config.decoder_layers,
                num_kv_heads=config.decoder_attention_heads,
                head_dim=width // config.decoder_attention_heads,
            ),
            dtype=dtype,
        )
        self.embed_positions = BartPositions(config, dtype=dtype)
        self.layernorm_embedding = config.make_norm(dtype) if config.has_first_norm else None
        options = {"use_bias": False, "dtype": dtype}
        is_projected = embed_width != width
        self.project_in = Linear(embed_width, width, **options) if is_projected else None
        self.project_out = Linear(width, embed_width, **options) if is_projected else None

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
        """Return the hidden states as the head reads them, and the cache (None in, None out)."""
        hidden = self._begin(inputs_embeds, positions[0])
        hidden, kv_cache = super().__call__(hidden, positions, kv_cache, metadata)
        return hidden if self.project_out is None else self.project_out(hidden), kv_cache

    def _begin(
        self, inputs_embeds: Float[Array, "T _embed"], positions: Int[Array, " T"]
    ) -> Float[Array, "T D"]:
        """Return what the first block reads."""
        hidden = inputs_embeds if self.project_in is None else self.project_in(inputs_embeds)
        hidden = hidden + self.embed_positions(positions)
        norm = self.layernorm_embedding
        return hidden if norm is None else norm(hidden)

    def align(
        self,
        token_ids: Int[Array, " T"],
        states: Float[Array, "S D"],
        heads: Sequence[tuple[int, int]],
    ) -> Float[Array, "_heads T S"]:
        """Return how much the tokens of one text attend to an encoder's states.

        `heads`: pairs of a layer and a head of its cross-attention, in whose order the weights are,
        float32. Blocks behind the last of the layers are not computed.
        """
        places = jnp.arange(len(token_ids), dtype=jnp.int32)
        metadata = DenseAttentionMetadata(
            token_index=places[None],
            mask=(places[None, :] <= places[:, None])[None],
            cross=DenseCrossMetadata(jnp.ones((1, 1, len(states)), bool), states),
        )
        hidden = self._begin(self.embed_input_ids(token_ids), places)
        found = []
        for number in range(1 + max(layer for layer, _ in heads)):
            chosen = [head for layer, head in heads if layer == number]
            block: Any = self.layers[number]
            hidden, weights = block.align(hidden, metadata, chosen)
            found.append(iter(weights))
        return jnp.stack([next(found[layer]) for layer, _ in heads])


# ---- T5 ------------------------------------------------------------------------------------------


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
        mask = _see_all(is_token)
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
