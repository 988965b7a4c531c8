"""Gemma 4's decoder: layers of two kinds, some of which share keys and values; a part per token.

Sliding layers and global ones have heads of their own widths. A global layer may take its keys'
projection for values, too. The last layers may read the cache of the last earlier layer of their
kind. Every token may have an embedding for each layer, beside that at the input.

An assistant is a small decoder that guesses tokens ahead: all of its layers read the caches of the
model that it guesses for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.layers.activation import get_activation
from mmjax.layers.attention.api import AttentionMetadata, attention, without_spans
from mmjax.layers.attention.kv_cache import (
    DenseCache,
    KVCache,
    KVCacheSpec,
    LayerCache,
    LayerKVSpec,
    StateCache,
)
from mmjax.layers.attention.paged import apply_soft_cap
from mmjax.layers.decoder import Angles, Decoder, DecoderLayer, read_kept_states
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.moe import Experts, Router, RouterConfig
from mmjax.layers.norm import GemmaRMSNorm, divide_by_rms
from mmjax.layers.rope import apply_rotary, text_angles

_SLIDING, _GLOBAL = _LAYER_TYPES = ("sliding_attention", "full_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Layer:
    """What one layer's arrays depend on beside those of the model."""

    kind: str
    """Of `layer_types`."""
    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    cache: int
    """Which layer's keys and values it reads: its own number, or that of an earlier layer.
    Negative: those that another model lends, the last of them -1."""
    has_values: bool
    """Whether values have a projection; else they are what the keys are before their norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config:
    """The keys of a `gemma4_text` config that the arrays depend on."""

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    hidden_activation: str
    rms_norm_eps: float
    attention_bias: bool
    sliding_window: int
    rope_parameters: dict[str, dict[str, Any]]
    """Per kind of layer."""
    final_logit_softcapping: float | None
    vocab_size_per_layer_input: int
    hidden_size_per_layer_input: int
    """Width of a token's embedding for one layer; 0: there are none."""
    router: RouterConfig | None
    """How experts are chosen, which are beside each layer's MLP; None: there are none."""
    moe_intermediate_size: int
    """Width inside of an expert."""
    layers: tuple[Gemma4Layer, ...]

    @staticmethod
    def from_hf(hf_config: Any, *, is_assistant: bool = False) -> "Gemma4Config":
        """Read HF's `Gemma4TextConfig`; `CheckpointError` for unsupported values."""
        if hf_config.use_bidirectional_attention == "all":
            raise CheckpointError(
                "`use_bidirectional_attention` is `all`: an encoder, not a generator; mmjax serves "
                "checkpoints with causal text"
            )
        unknown = set(hf_config.layer_types) - set(_LAYER_TYPES)
        if unknown:
            raise CheckpointError(
                f"`layer_types` holds {sorted(unknown)}; known: {', '.join(_LAYER_TYPES)}"
            )
        cap = hf_config.final_logit_softcapping
        return read_config(
            Gemma4Config,
            hf_config,
            vocab_size_per_layer_input=getattr(hf_config, "vocab_size_per_layer_input", 0),
            hidden_size_per_layer_input=getattr(hf_config, "hidden_size_per_layer_input", 0) or 0,
            final_logit_softcapping=None if cap is None else float(cap),
            router=_read_router(hf_config),
            moe_intermediate_size=getattr(hf_config, "moe_intermediate_size", 0) or 0,
            layers=tuple(_read_layers(hf_config, is_assistant=is_assistant)),
        )


def _read_router(hf_config: Any) -> RouterConfig | None:
    if not getattr(hf_config, "enable_moe_block", False):
        return None
    return RouterConfig(
        num_experts=hf_config.num_experts,
        top_k=hf_config.top_k_experts,
        is_normalized=True,
    )


def _read_layers(hf_config: Any, *, is_assistant: bool) -> list[Gemma4Layer]:
    kinds, num_shared = hf_config.layer_types, hf_config.num_kv_shared_layers or 0
    if is_assistant:
        num_shared = len(kinds)
    first_shared = len(kinds) - num_shared
    lasts = {kind: number for number, kind in enumerate(kinds[:first_shared])}
    if is_assistant:
        lent = [kind for kind in _LAYER_TYPES if kind in kinds]
        lasts = {kind: place - len(lent) for place, kind in enumerate(lent)}
    if num_shared and set(kinds) - set(lasts):
        raise CheckpointError(
            f"`num_kv_shared_layers` is {num_shared}, and none of the {first_shared} layers before "
            f"them is of the kind {sorted(set(kinds) - set(lasts))}, whose keys they would read"
        )
    layers = []
    for number, kind in enumerate(kinds):
        own, is_shared = hf_config.per_layer_config[number], number >= first_shared
        is_wide = hf_config.use_double_wide_mlp and is_shared
        layers.append(
            Gemma4Layer(
                kind=kind,
                head_dim=own.head_dim,
                num_kv_heads=own.num_key_value_heads,
                intermediate_size=hf_config.intermediate_size * (2 if is_wide else 1),
                cache=lasts[kind] if is_shared else number,
                has_values=not (hf_config.attention_k_eq_v and kind == _GLOBAL),
            )
        )
    return layers


def make_cache_spec(layers: Sequence[Gemma4Layer]) -> KVCacheSpec:
    """Return the caches of the layers that write one, and which of them each layer has."""
    # The first that has a cache is the one that writes it.
    owners = {layer.cache: layer for layer in reversed(layers)}
    order = sorted(owners)
    specs = tuple(
        LayerKVSpec(
            num_kv_heads=owners[number].num_kv_heads,
            head_dim=owners[number].head_dim,
            value_dim=owners[number].head_dim,
        )
        for number in order
    )
    places = tuple(order.index(layer.cache) for layer in layers)
    return KVCacheSpec(specs, places, num_lent=sum(number < 0 for number in order))


class Gemma4Attention(nnx.Module):
    """Attention whose queries, keys and values are normed head by head; values without a weight.

    Scores are products as they are, without a scale.
    """

    def __init__(self, config: Gemma4Config, number: int, *, dtype: Any) -> None:
        layer, options = config.layers[number], {"use_bias": config.attention_bias, "dtype": dtype}
        width, head_dim = config.hidden_size, layer.head_dim
        inner, key_width = config.num_attention_heads * head_dim, layer.num_kv_heads * head_dim
        norm = {"eps": config.rms_norm_eps, "is_centred": False, "dtype": dtype}
        is_own = layer.cache == number
        self.q_proj = Linear(width, inner, **options)
        self.k_proj = Linear(width, key_width, **options) if is_own else None
        self.v_proj = Linear(width, key_width, **options) if is_own and layer.has_values else None
        self.o_proj = Linear(inner, width, **options)
        self.q_norm = GemmaRMSNorm(head_dim, **norm)
        self.k_norm = GemmaRMSNorm(head_dim, **norm) if is_own else None
        self.head_dim, self.eps = head_dim, config.rms_norm_eps
        self.window = config.sliding_window if layer.kind == _SLIDING else None

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: Angles,
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Attend, and return the layer's cache, with this step's keys and values if it is its own.

        Images see each other both ways in sliding layers alone (HF: modeling_gemma4.py,
        create_masks_for_vision_model).
        """
        query = apply_rotary(self.q_norm(self._cut(self.q_proj(x))), *angles)
        key = value = None
        if self.k_proj is not None and self.k_norm is not None:
            key = self._cut(self.k_proj(x))
            value = key if self.v_proj is None else self._cut(self.v_proj(x))
            key = apply_rotary(self.k_norm(key), *angles)
            value = divide_by_rms(value, self.eps).astype(x.dtype)
        metadata = without_spans(metadata) if self.window is None else metadata
        out, cache = attention(query, key, value, cache, metadata, scale=1.0, window=self.window)
        return self.o_proj(out.reshape(len(x), -1)), cache

    def _cut(self, x: Float[Array, "T _wide"]) -> Float[Array, "T _heads H"]:
        return x.reshape(len(x), -1, self.head_dim)


class Gemma4Router(Router):
    """Chooses experts by what is normed and scaled; each expert has a factor of its own."""

    def __init__(self, width: int, config: RouterConfig, *, eps: float, dtype: Any) -> None:
        super().__init__(width, config, dtype=dtype)
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.per_expert_scale = nnx.Param(jnp.ones((config.num_experts,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Float[Array, "T _k"], Int[Array, "T _k"]]:
        """Return the weights, float32, and the numbers of every token's experts."""
        scaled = divide_by_rms(x, self.eps).astype(x.dtype) * self.scale[...][None]
        weights, experts = super().__call__(scaled * x.shape[-1] ** -0.5)
        return weights * self.per_expert_scale[...].astype(jnp.float32)[experts], experts


class Gemma4Block(DecoderLayer):
    """Norms before and after attention and MLP, then a token's own part, then a scale."""

    def __init__(self, config: Gemma4Config, number: int, *, dtype: Any) -> None:
        width, inner = config.hidden_size, config.layers[number].intermediate_size

        def make_norm() -> GemmaRMSNorm:
            return GemmaRMSNorm(width, eps=config.rms_norm_eps, is_centred=False, dtype=dtype)

        attention = Gemma4Attention(config, number, dtype=dtype)
        mlp = GatedMLP(width, inner, activation=config.hidden_activation, dtype=dtype)
        super().__init__(attention, mlp, make_norm, norm_order="both")
        router, self.has_experts = config.router, config.router is not None
        if router is not None:
            self.router = Gemma4Router(width, router, eps=config.rms_norm_eps, dtype=dtype)
            self.experts = Experts(
                router.num_experts,
                width,
                config.moe_intermediate_size,
                activation=config.hidden_activation,
                dtype=dtype,
            )
            self.post_feedforward_layernorm_1 = make_norm()
            self.post_feedforward_layernorm_2 = make_norm()
            self.pre_feedforward_layernorm_2 = make_norm()
        self.layer_scalar = nnx.Param(jnp.ones((1,), dtype))
        part = config.hidden_size_per_layer_input
        self.has_part = part > 0
        if self.has_part:
            self.per_layer_input_gate = Linear(width, part, use_bias=False, dtype=dtype)
            self.per_layer_projection = Linear(part, width, use_bias=False, dtype=dtype)
            self.post_per_layer_input_norm = make_norm()
        self.activation = get_activation(config.hidden_activation)

    def __call__(
        self,
        x: Float[Array, "T D"],
        layer_input: tuple[Angles, Float[Array, "T _part"] | None],
        cache: LayerCache | DenseCache | StateCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | StateCache | None]:
        """Return the residual stream after this block, and its cache."""
        angles, part = layer_input
        x, cache = super().__call__(x, angles, cache, metadata)
        if self.has_part:
            assert part is not None, "the model reads no token ids"
            gated = self.activation(self.per_layer_input_gate(x)) * part
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar[...][None], cache

    def feed_forward(
        self, x: Float[Array, "T D"], normed: Float[Array, "T D"], *inputs: Any
    ) -> Float[Array, "T D"]:
        """Return what is added to the stream, before its norm: of the MLP, and of experts."""
        out = super().feed_forward(x, normed)
        if not self.has_experts:
            return out
        mixed = self.experts.mix(self.pre_feedforward_layernorm_2(x), *self.router(x))
        normed = self.post_feedforward_layernorm_2(mixed)
        return self.post_feedforward_layernorm_1(out) + normed


class Centroids(NamedTuple):
    """How tokens are grouped, of which an assistant computes some groups' logits."""

    number: int
    num_active: int


class Gemma4TextModel(Decoder):
    """Gemma 4's text model; its tokens' embeddings are scaled, its logits may be capped."""

    def __init__(self, config: Gemma4Config, *, is_tied: bool, dtype: Any) -> None:
        self.config, self.reads_token_ids = config, config.hidden_size_per_layer_input > 0
        num_layers, width = len(config.layers), config.hidden_size
        norm = {"eps": config.rms_norm_eps, "is_centred": False, "dtype": dtype}
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=width,
            layers=[Gemma4Block(config, number, dtype=dtype) for number in range(num_layers)],
            norm=GemmaRMSNorm(width, **norm),
            is_tied=is_tied,
            kv_cache_spec=make_cache_spec(config.layers),
            dtype=dtype,
        )
        part = config.hidden_size_per_layer_input
        if part:
            self.embed_tokens_per_layer = Embed(
                config.vocab_size_per_layer_input, num_layers * part, dtype=dtype
            )
            self.per_layer_model_projection = Linear(
                width, num_layers * part, use_bias=False, dtype=dtype
            )
            self.per_layer_projection_norm = GemmaRMSNorm(part, **norm)

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up tokens, scaled by sqrt(D) rounded to the table's dtype, as in HF."""
        return _scaled(self.embed_tokens(token_ids), self.config.hidden_size)

    def find_last_caches(self) -> dict[str, int]:
        """Return, by kind of layer, the place in the cache of the last keys of that kind."""
        kinds = (layer.kind for layer in self.config.layers)
        return dict(zip(kinds, self.kv_cache_spec.layer_places, strict=True))

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> list[Angles]:
        """Return the rotary angles of each layer, by its kind."""
        layers = {layer.kind: layer for layer in self.config.layers}
        angles = {
            kind: text_angles(self.config.rope_parameters[kind], layer.head_dim, positions)
            for kind, layer in sorted(layers.items())
        }
        return [angles[layer.kind] for layer in self.config.layers]

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
        token_ids: Int[Array, " T"] | None = None,
    ) -> tuple[Float[Array, "T _wide"], KVCache | None]:
        """As of `Decoder`."""
        parts: Sequence[Array | None] = [None] * len(self.layers)
        if token_ids is not None:
            parts = self._token_parts(inputs_embeds, token_ids)
        inputs = list(zip(self.layer_inputs(positions), parts, strict=True))
        return self.run_layers(inputs_embeds, inputs, kv_cache, metadata)

    def _token_parts(
        self, inputs_embeds: Float[Array, "T D"], token_ids: Int[Array, " T"]
    ) -> list[Float[Array, "T _part"]]:
        """Return each token's part for each layer: of its id, and of its embedding at the input."""
        config, num_tokens = self.config, len(token_ids)
        shape = (num_tokens, len(self.layers), config.hidden_size_per_layer_input)
        looked_up = _scaled(self.embed_tokens_per_layer(token_ids), shape[2]).reshape(shape)
        projected = self.per_layer_model_projection(inputs_embeds)
        # Products with numbers are float32 in HF, whatever the dtype.
        scaled = projected.astype(jnp.float32) * config.hidden_size**-0.5
        normed = self.per_layer_projection_norm(scaled.astype(projected.dtype).reshape(shape))
        parts = (normed + looked_up).astype(jnp.float32) * 2**-0.5
        return list(parts.astype(normed.dtype).transpose(1, 0, 2))

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project onto the vocabulary, in float32, soft-capped where the config says so."""
        logits = super().compute_logits(hidden_states)
        return apply_soft_cap(logits, self.config.final_logit_softcapping)


class Gemma4AssistantTextModel(Gemma4TextModel):
    """Guesses tokens ahead, over a token's embedding and the state of the token before it.

    HF: modeling_gemma4_assistant.py, and `SinglePositionMultiTokenCandidateGenerator`: every token
    of a guess is computed at the position of the last known one, and sees what stands before that.
    Its layers have no keys. The table of tokens is the other model's, the head its own.
    """

    def __init__(
        self, config: Gemma4Config, *, backbone_width: int, centroids: Centroids | None, dtype: Any
    ) -> None:
        """`backbone_width`: of the other model. `centroids` None: the head gives all logits."""
        # HF's mask of an assistant has the window's other end in it, too.
        config = replace(config, sliding_window=config.sliding_window + 1)
        super().__init__(config, is_tied=False, dtype=dtype)
        width, options = config.hidden_size, {"use_bias": False, "dtype": dtype}
        self.embed_tokens = Embed(config.vocab_size, backbone_width, dtype=dtype)
        self.pre_projection = Linear(2 * backbone_width, width, **options)
        self.post_projection = Linear(width, backbone_width, **options)
        self.extra_width, self.backbone_width = width, backbone_width
        self.kv_cache_spec = replace(self.kv_cache_spec, kept_width=backbone_width)
        self.grouping = centroids
        if centroids is not None:
            self.centroids = Linear(width, centroids.number, **options)
            self.token_ordering = nnx.Param(jnp.zeros((config.vocab_size,), jnp.int32))

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up tokens, as the other model does."""
        return _scaled(self.embed_tokens(token_ids), self.backbone_width)

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
        token_ids: Int[Array, " T"] | None = None,
    ) -> tuple[Float[Array, "T _wide"], KVCache | None]:
        """Return the states that guess and, behind each, what a next token reads; and the cache.

        `positions` are those of the tokens before.
        """
        caches, kept, states = read_kept_states(kv_cache, metadata)
        with jax.named_scope("join"):
            joined = self.pre_projection(jnp.concatenate([inputs_embeds, states], axis=-1))
        hidden, caches = super().__call__(joined, positions + 1, caches, metadata)
        both = jnp.concatenate([hidden, self.post_projection(hidden)], axis=-1)
        return both, (*(caches or ()), kept)

    def compute_logits(self, hidden_states: Float[Array, "R _wide"]) -> Float[Array, "R V"]:
        """Project onto the vocabulary, or onto the tokens of the nearest centroids alone.

        Others have less than the least of these.
        """
        states = hidden_states[:, : self.config.hidden_size]
        assert self.lm_head is not None, "the head is not tied"
        if self.grouping is None:
            return self.lm_head.project(states)
        _, active = jax.lax.top_k(self.centroids(states), self.grouping.num_active)
        clusters = self.token_ordering[...].reshape(self.grouping.number, -1)
        ids = clusters[active].reshape(len(states), -1)
        table = self.lm_head(ids.reshape(-1)).reshape(*ids.shape, -1)
        logits = jnp.einsum("rd,rnd->rn", states, table, preferred_element_type=jnp.float32)
        least = logits.min(axis=1, keepdims=True) - 1
        others = jnp.broadcast_to(least, (len(states), self.config.vocab_size))
        return others.at[jnp.arange(len(states))[:, None], ids].set(logits)


def _scaled(embeds: Float[Array, "T D"], width: int) -> Float[Array, "T D"]:
    return embeds * jnp.asarray(width**0.5, embeds.dtype)
