"""BART (arXiv 1910.13461); Whisper's decoder (2212.04356); OPT (2205.01068), without an encoder."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.language.encoder_decoder.blocks import (
    Attention,
    DecoderBlock,
    EncoderBlock,
    see_all,
)
from mmjax.layers.attention.api import (
    AttentionMetadata,
    DenseAttentionMetadata,
    DenseCrossMetadata,
)
from mmjax.layers.attention.kv_cache import KVCache, KVCacheSpec
from mmjax.layers.decoder import Decoder
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import MLP
from mmjax.layers.module import call_block
from mmjax.layers.norm import LayerNorm

_EPS = 1e-5
"""The epsilon of every norm; no key of the config names it."""


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
        mask = see_all(is_token)
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
