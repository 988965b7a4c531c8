"""Llama's decoder and its relatives, and those that guess tokens ahead by a layer of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.language.llama.config import LlamaConfig
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import KVCache, KVCacheSpec
from mmjax.layers.attention.paged import apply_soft_cap
from mmjax.layers.decoder import (
    Decoder,
    DecoderLayer,
    GroupedQueryAttention,
    ScaledQueryAttention,
    multiply,
    read_kept_states,
)
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import MLP, GatedMLP
from mmjax.layers.module import call_block
from mmjax.layers.moe import MixtureOfExperts
from mmjax.layers.norm import GemmaRMSNorm, HeadNorm, LayerNorm, RMSNorm, UnitNorm
from mmjax.layers.rope import text_angles


class LlamaTextModel(Decoder):
    """Llama's text model, and its relatives'."""

    def __init__(self, config: LlamaConfig, *, is_tied: bool, dtype: Any) -> None:
        self.config, num_layers = config, config.num_hidden_layers
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=[_build_layer(config, n, dtype=dtype) for n in range(num_layers)],
            norm=_build_norm(config, config.hidden_size, dtype=dtype),
            is_tied=is_tied,
            kv_cache_spec=KVCacheSpec.alike(
                num_layers, num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim
            ),
            dtype=dtype,
        )

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up tokens; scaled, as in HF, by sqrt(D) rounded to the table's dtype."""
        embeds = super().embed_input_ids(token_ids)
        if not self.config.scales_embeds:
            return embeds
        return embeds * jnp.asarray(self.config.hidden_size**0.5, embeds.dtype)

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project onto the vocabulary, in float32, scale and cap."""
        logits, scale = super().compute_logits(hidden_states), self.config.logit_scale
        return apply_soft_cap(logits if scale == 1.0 else logits * scale, self.config.logit_cap)

    def run_layers(
        self,
        hidden: Float[Array, "T D"],
        inputs: Sequence[Any],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
        *,
        fed: Mapping[int, Float[Array, "T D"]] = MappingProxyType({}),
    ) -> tuple[Float[Array, "T _wide"], KVCache | None]:
        """Return the same of embeddings that are multiplied first, where they are."""
        scaled = multiply(hidden, self.config.input_scale)
        return super().run_layers(scaled, inputs, kv_cache, metadata, fed=fed)

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> Sequence[Any]:
        """Return the rotary angles, and what queries are multiplied by where they are."""
        config = self.config
        ropes = config.layer_ropes or (config.rope_parameters,) * config.num_hidden_layers
        kinds = {id(one): one for one in ropes if one is not None}
        made = {n: text_angles(one, config.head_dim, positions) for n, one in kinds.items()}
        angles = [None if one is None else made[id(one)] for one in ropes]
        if (scaling := config.query_scales) is None:
            return angles
        runs = (positions[0] + scaling.shift) // scaling.length
        scales = jnp.asarray(scaling.factors, jnp.float32)[runs]
        return [
            (each, scales) if _scales_queries(config, number) else each
            for number, each in enumerate(angles)
        ]


class MtpTextModel(LlamaTextModel):
    """One more layer, over a token's embedding and the state of the token before it, which guesses.

    Multi-token prediction (MTP): DeepSeek-V3's (arXiv 2412.19437, section 2.2), as GLM-OCR has it
    and vLLM's `glm_ocr_mtp.py` computes it, but that the state behind a guess is normed before it
    is read again (vLLM's pull request 46075, of GLM-5). The table of tokens and the head are the
    decoder's own. A token stands in the slot of the one before it, whose state is read there; the
    first of a prompt is in no step. Parameters bear HF's names, the layer its number in files.
    """

    def __init__(self, config: LlamaConfig, *, is_tied: bool, dtype: Any) -> None:
        number = config.num_hidden_layers
        one = replace(config, num_hidden_layers=1, windows=(None,), layer_ropes=None)
        super().__init__(one, is_tied=is_tied, dtype=dtype)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.layers = nnx.List([*(nnx.Module() for _ in range(number)), self.layers[0]])
        self.enorm = RMSNorm(width, eps=eps, dtype=dtype)
        self.hnorm = RMSNorm(width, eps=eps, dtype=dtype)
        self.eh_proj = Linear(2 * width, width, use_bias=False, dtype=dtype)
        self.kv_cache_spec = replace(self.kv_cache_spec, kept_width=width)

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], KVCache | None]:
        """Return the states that guess, and the cache; `positions` are of the tokens before."""
        (cache,), kept, states = read_kept_states(kv_cache, metadata)
        # As in vLLM: what stands behind the first token is not read.
        embeds = jnp.where((metadata.token_index == 0)[:, None], 0, inputs_embeds)
        with jax.named_scope("join"):
            joined = jnp.concatenate([self.enorm(embeds), self.hnorm(states)], axis=-1)
            x = self.eh_proj(joined)
        (angles,) = self.layer_inputs(positions)
        assert self.norm is not None, "the layer has no norm"
        x, cache = call_block(self.layers[-1], x, angles, cache, metadata)
        return self.norm(x), (cache, kept)


class Eagle3Config(NamedTuple):
    """What a head's config.json says beside its layer's keys."""

    target_width: int
    """Of the states that it reads."""
    num_tapped: int
    """Layers of the decoder whose inputs it reads."""
    draft_vocab_size: int
    """Tokens that it can guess."""
    norm_before_residual: bool
    norm_before_fc: bool


class Eagle3TextModel(LlamaTextModel):
    """One layer that guesses, of a token's embedding and several states of the token before.

    EAGLE-3 (arXiv 2503.01840, section 3.1), as vLLM's `llama_eagle3.py` computes it. `fc` joins the
    states as they are kept (`join_states`); behind a guess what the layer gives is read in their
    place, before its norm. The table of tokens is the decoder's, unscaled; where a picture's
    embedding stands the layer reads its placeholder's, as the published heads were trained. The
    head has the logits of some tokens, and `d2t` says how far behind its number each one's id is.
    """

    reads_token_ids = True

    def __init__(self, config: LlamaConfig, own: Eagle3Config, *, dtype: Any) -> None:
        super().__init__(config, is_tied=False, dtype=dtype)
        width = config.hidden_size
        attention = self._layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(attention, name).weight.shape[0]
            options = {"use_bias": config.has_qkv_bias, "dtype": dtype}
            setattr(attention, name, Linear(2 * width, rows, **options))
        self.hidden_norm = _build_norm(config, width, dtype=dtype)
        joined = own.num_tapped * own.target_width
        self.input_norm = _build_norm(config, joined, dtype=dtype) if own.norm_before_fc else None
        self.fc = Linear(joined, width, use_bias=False, dtype=dtype)
        self.lm_head = Embed(own.draft_vocab_size, width, dtype=dtype)
        self.has_map = own.draft_vocab_size != config.vocab_size
        if self.has_map:
            self.d2t = nnx.Param(jnp.zeros((own.draft_vocab_size,), jnp.int32))
        self.norm_before_residual = own.norm_before_residual
        self.kv_cache_spec = replace(self.kv_cache_spec, kept_width=width)

    @property
    def _layer(self) -> Any:
        return self.layers[0]

    def join_states(self, states: Float[Array, "T _wide"]) -> Float[Array, "T D"]:
        """Return what is read of the decoder's states, which `Decoder.tap` has set."""
        tapped = states[:, -self.fc.weight.shape[1] :]
        return self.fc(tapped if self.input_norm is None else self.input_norm(tapped))

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
        token_ids: Int[Array, " T"] | None = None,
    ) -> tuple[Float[Array, "T D"], KVCache | None]:
        """Return the layer's states without their norm; `positions` are of the tokens before."""
        assert token_ids is not None, "it looks up the tokens itself"
        (cache,), kept, states = read_kept_states(kv_cache, metadata)
        layer, (angles,) = self._layer, self.layer_inputs(positions)
        normed = self.hidden_norm(states)
        x = normed if self.norm_before_residual else states
        with jax.named_scope("attn"):
            embeds = layer.input_layernorm(self.embed_tokens(token_ids))
            joined = jnp.concatenate([embeds, normed], axis=-1)
            out, cache = layer.self_attn(joined, angles, cache, metadata)
            x = x + out
        with jax.named_scope("mlp"):
            return x + layer.mlp(layer.post_attention_layernorm(x)), (cache, kept)

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project onto the tokens that it can guess; others have none."""
        assert self.norm is not None, "the layer has no norm"
        logits = super().compute_logits(self.norm(hidden_states))
        if not self.has_map:
            return logits
        ids = jnp.arange(logits.shape[1]) + self.d2t[...]
        others = jnp.full((len(logits), self.config.vocab_size), -jnp.inf, logits.dtype)
        return others.at[:, ids].set(logits)


def _build_norm(config: LlamaConfig, width: int, *, dtype: Any) -> nnx.Module:
    eps = config.rms_norm_eps
    if config.norm_kind in ("rms", "gemma"):
        return (RMSNorm if config.norm_kind == "rms" else GemmaRMSNorm)(width, eps=eps, dtype=dtype)
    return LayerNorm(width, eps=eps, has_bias=config.norm_kind == "biased layer", dtype=dtype)


def _has_positions(config: LlamaConfig, number: int) -> bool:
    return config.layer_ropes is None or config.layer_ropes[number] is not None


def _scales_queries(config: LlamaConfig, number: int) -> bool:
    scaling = config.query_scales
    return scaling is not None and (scaling.is_everywhere or not _has_positions(config, number))


def _build_qk_norms(
    config: LlamaConfig, number: int, *, dtype: Any
) -> tuple[nnx.Module | None, nnx.Module | None]:
    """Return the norms of a layer's queries and keys."""
    if config.qk_norm == "unit":
        # Before or behind the rotation, which leaves a head's length, is the same.
        norm = UnitNorm(eps=config.rms_norm_eps) if _has_positions(config, number) else None
        return norm, norm
    heads = config.num_attention_heads, config.num_key_value_heads
    query, key = (_build_qk_norm(config, count, dtype=dtype) for count in heads)
    return query, key


def _build_qk_norm(config: LlamaConfig, num_heads: int, *, dtype: Any) -> nnx.Module | None:
    if config.qk_norm is None:
        return None
    if config.qk_norm == "own":
        return HeadNorm(num_heads, config.head_dim, dtype=dtype)
    width = config.head_dim * (num_heads if config.qk_norm == "wide" else 1)
    return _build_norm(config, width, dtype=dtype)


def _build_mlp(config: LlamaConfig, number: int, *, dtype: Any) -> nnx.Module:
    if config.router is not None and number not in config.dense_layers:
        return MixtureOfExperts(
            config.hidden_size,
            config.moe_intermediate_size,
            config.router,
            num_shared=config.num_shared_experts,
            activation=config.hidden_act,
            clamped_gate=config.clamped_gate,
            use_bias=config.has_expert_bias,
            dtype=dtype,
        )
    return (GatedMLP if config.has_gated_mlp else MLP)(
        config.hidden_size,
        config.intermediate_size,
        activation=config.hidden_act,
        use_bias=config.has_mlp_bias,
        dtype=dtype,
    )


def _build_layer(config: LlamaConfig, number: int, *, dtype: Any) -> nnx.Module:
    is_scaled = _scales_queries(config, number)
    attention = (ScaledQueryAttention if is_scaled else GroupedQueryAttention)(
        config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        has_qkv_bias=config.has_qkv_bias,
        has_output_bias=config.has_output_bias,
        norms=_build_qk_norms(config, number, dtype=dtype),
        norms_are_wide=config.qk_norm == "wide",
        norms_are_last=config.norms_rotated_heads,
        is_interleaved=config.is_interleaved,
        scale=config.score_scale,
        window=config.windows[number],
        soft_cap=config.score_cap,
        has_sinks=config.has_sinks,
        dtype=dtype,
    )
    mlp = _build_mlp(config, number, dtype=dtype)
    make_norm = partial(_build_norm, config, config.hidden_size, dtype=dtype)
    return DecoderLayer(
        attention,
        mlp,
        make_norm,
        norm_order=config.norm_order,
        residual_scale=config.residual_scale,
    )
