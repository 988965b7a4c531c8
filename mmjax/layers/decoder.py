"""What decoders share: attention, a block, and the model around the blocks."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.layers.attention.api import AttentionMetadata, attention
from mmjax.layers.attention.kv_cache import (
    DenseCache,
    KeptStates,
    KVCache,
    KVCacheSpec,
    LayerCache,
    StateCache,
)
from mmjax.layers.attention.metadata import PagedAttentionMetadata, Window
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.layers.lora import LoRA
from mmjax.layers.module import call_block
from mmjax.layers.recurrent.rounding import rounded
from mmjax.layers.rope import apply_interleaved_rotary, apply_rotary

Angles = tuple[Float[Array, "T P"], Float[Array, "T P"]]
"""Cosines and sines of every position."""


class GroupedQueryAttention(nnx.Module):
    """Attention whose query heads share key and value heads (arXiv 2305.13245), with rotary angles.

    Parameters bear Llama's names.
    """

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        has_qkv_bias: bool = False,
        has_output_bias: bool = False,
        norms: tuple[nnx.Module | None, nnx.Module | None] = (None, None),
        norms_are_wide: bool = False,
        norms_are_last: bool = False,
        is_interleaved: bool = False,
        rotates_in_float32: bool = False,
        scale: float | None = None,
        window: Window = None,
        soft_cap: float | None = None,
        has_sinks: bool = False,
        keeps_reference: bool = False,
        dtype: Any,
    ) -> None:
        """Make the projections; none has a bias unless that is said.

        `norms`: of each head's queries and keys, before they are rotated; where they `are_last`
        behind that; where they `are_wide` of all heads together, before these are cut apart.
        `is_interleaved`: whether neighbours are a pair that is rotated, and not the halves of a
        head. `rotates_in_float32`: whether heads are, and not in their own dtype. `scale`: what
        scores are multiplied by; None: `head_dim ** -0.5`. `has_sinks`: whether each head has a
        learned score of a key without a value. `window` and `keeps_reference` are as in
        `attention`.
        """
        inner, key_width = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = Linear(width, inner, use_bias=has_qkv_bias, dtype=dtype)
        self.k_proj = Linear(width, key_width, use_bias=has_qkv_bias, dtype=dtype)
        self.v_proj = Linear(width, key_width, use_bias=has_qkv_bias, dtype=dtype)
        self.o_proj = Linear(inner, width, use_bias=has_output_bias, dtype=dtype)
        self.q_norm, self.k_norm = norms
        self.norms_are_wide = norms_are_wide
        self.norms_are_last = norms_are_last
        self.is_interleaved = is_interleaved
        self.rotates_in_float32 = rotates_in_float32
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.soft_cap = soft_cap
        self.keeps_reference = keeps_reference
        self.sinks = nnx.Param(jnp.zeros(num_heads, dtype)) if has_sinks else None

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: Angles | None,
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T _width"], LayerCache | DenseCache | None]:
        """Attend, and return the layer's cache with this step's keys and values."""
        out, cache = self.attend(self.q_proj(x), x, angles, cache, metadata)
        return self.o_proj(out), cache

    def attend(
        self,
        query: Float[Array, "T _query"],
        x: Float[Array, "T D"],
        angles: Angles | None,
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T _query"], LayerCache | DenseCache | None]:
        """Attend with projected queries to the keys and values of `x`; `o_proj` is left to do.

        `angles` None: nothing is rotated; positions are in the hidden states, or the layer has
        none.
        """
        key = self.k_proj(x)
        if self.norms_are_wide:
            query, key = self._norm(query, key)
        heads = (part.reshape(len(x), -1, self.head_dim) for part in (query, key, self.v_proj(x)))
        query, key, value = heads
        if not (self.norms_are_wide or self.norms_are_last):
            query, key = self._norm(query, key)
        if angles is not None:
            rotate = apply_interleaved_rotary if self.is_interleaved else apply_rotary
            dtype = jnp.float32 if self.rotates_in_float32 else query.dtype
            query, key = (
                rotate(part.astype(dtype), *angles).astype(part.dtype) for part in (query, key)
            )
        if self.norms_are_last:
            query, key = self._norm(query, key)
        out, cache = attention(
            query,
            key,
            value,
            cache,
            metadata,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            keeps_reference=self.keeps_reference,
        )
        return out.reshape(len(x), -1), cache

    def _norm(self, query: Array, key: Array) -> tuple[Array, Array]:
        query_norm: Any = self.q_norm
        key_norm: Any = self.k_norm
        return (
            query if query_norm is None else query_norm(query),
            key if key_norm is None else key_norm(key),
        )


class ScaledQueryAttention(GroupedQueryAttention):
    """Attention whose queries are multiplied by a factor of their position."""

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: Any,
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Attend; `angles` are a pair, of the rotary angles and of `[T]`, the factors."""
        angles, scales = angles
        query = self.q_proj(x) * scales.astype(x.dtype)[:, None]
        out, cache = self.attend(query, x, angles, cache, metadata)
        return self.o_proj(out), cache


def multiply(x: Float[Array, "T D"], scale: float) -> Float[Array, "T D"]:
    """Return the states multiplied by a constant in float32, as torch does, and rounded."""
    return x if scale == 1.0 else rounded(x.astype(jnp.float32) * scale).astype(x.dtype)


_NORMS: Mapping[str, tuple[str | None, str | None, str | None, str | None]] = MappingProxyType(
    {
        "pre": ("input_layernorm", None, "post_attention_layernorm", None),
        "post": (None, "input_layernorm", None, "post_attention_layernorm"),
        "both": (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        "parallel": ("input_layernorm", None, None, None),
        "exaone4": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        "glm": (
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
    }
)
"""By the order of norms, those of what attention reads and gives, and of what the MLP does.

The last two have their files' names: a name of the tree that is a file's of another norm could not
be told from it (`weights/update.py`)."""


class DecoderLayer(nnx.Module):
    """A block of attention and an MLP; parameters bear Llama's names, or Gemma's."""

    def __init__(
        self,
        mixer: nnx.Module,
        mlp: nnx.Module,
        make_norm: Callable[[], nnx.Module],
        *,
        norm_order: str = "pre",
        mixer_name: str = "self_attn",
        residual_scale: float = 1.0,
        mlp_has_input: bool = False,
    ) -> None:
        """`mixer`: attention, or what stands in its place by a name of its own.

        Args:
            mixer: Called with the hidden states, a layer's input, its cache and the metadata.
            mlp: Called with hidden states.
            make_norm: Makes each norm.
            norm_order: What is normed. `pre`: what attention and MLP read; `post`: what they give,
                as Swin v2's (arXiv 2111.09883) and OLMo 2's; `both`, as Gemma's; `parallel`: both
                read the same normed states, as GPT-J's and Cohere's; `exaone4`: as `post`, and
                `glm`: as `both`, by other names.
            mixer_name: The attribute that `mixer` is.
            residual_scale: What is added to the stream is multiplied by it, before it is added.
            mlp_has_input: Whether a layer's input is a pair, of the mixer's and of what the MLP is
                called with beside the hidden states.
        """
        setattr(self, mixer_name, mixer)
        self.mixer_name = mixer_name
        self.residual_scale = residual_scale
        self.mlp = mlp
        self.mlp_has_input = mlp_has_input
        self.norm_order = norm_order
        for name in filter(None, _NORMS[norm_order]):
            setattr(self, name, make_norm())

    def __call__(
        self,
        x: Float[Array, "T D"],
        layer_input: Any,
        cache: LayerCache | DenseCache | StateCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | StateCache | None]:
        """Return the residual stream after this block, and its cache.

        `layer_input` is what attention is given beside the hidden states: rotary angles, say.
        """
        mix, mlp_inputs = getattr(self, self.mixer_name), ()
        if self.mlp_has_input:
            layer_input, *mlp_inputs = layer_input
        before, behind, before_mlp, behind_mlp = _NORMS[self.norm_order]
        with jax.named_scope("attn"):
            normed = self._norm(before, x)
            out, cache = mix(normed, layer_input, cache, metadata)
            x = x + self.weigh("attn", self._norm(behind, out), metadata)
        with jax.named_scope("mlp"):
            if self.norm_order != "parallel":
                normed = self._norm(before_mlp, x)
            out = self.feed_forward(x, normed, *mlp_inputs)
            return x + self.weigh("mlp", self._norm(behind_mlp, out), metadata), cache

    def feed_forward(
        self, x: Float[Array, "T D"], normed: Float[Array, "T D"], *inputs: Any
    ) -> Float[Array, "T D"]:
        """Return what is added to the stream `x` behind attention, before a norm of it."""
        return self.mlp(normed, *inputs)

    def weigh(
        self, part: str, out: Float[Array, "T D"], metadata: AttentionMetadata
    ) -> Float[Array, "T D"]:
        """Return what is added to the stream of what a part gives, `attn` or `mlp`."""
        return multiply(out, self.residual_scale)

    def _norm(self, name: str | None, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return x if name is None else getattr(self, name)(x)


def read_kept_states(
    kv_cache: KVCache | None, metadata: AttentionMetadata
) -> tuple[KVCache, KeptStates, Float[Array, "T D"]]:
    """Return the layers' caches, what keeps another model's states, and those in the step's slots.

    Of a layer that guesses tokens (MTP): a token stands in the slot of the one before it.
    """
    assert kv_cache is not None, "states are read from the cache"
    assert isinstance(metadata, PagedAttentionMetadata), "states are read from the cache"
    *caches, kept = kv_cache
    assert isinstance(kept, KeptStates), "the cache keeps no states"
    return tuple(caches), kept, kept.read(metadata.slot_block, metadata.slot_offset)


class Decoder(nnx.Module):
    """Embeddings in, hidden states out; knows nothing of pictures. Parameters bear HF's names.

    A block is called `layer(x, layer_input, cache, metadata) -> (x, cache)`.
    """

    reads_token_ids: bool = False
    """Whether it is called with `token_ids`, int32[T], too: those of the prompt, where an item's
    embedding stands as well, and of the answer."""
    extra_width: int = 0
    """Columns of the states that it returns beside as many as an embedding has."""
    tapped_layers: Sequence[int] = ()
    """Layers whose inputs stand there, in this order (`tap`)."""

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        layers: Iterable[nnx.Module],
        norm: nnx.Module | None,
        is_tied: bool,
        kv_cache_spec: KVCacheSpec,
        dtype: Any,
    ) -> None:
        """`is_tied`: whether the head is the table of tokens (`tie_word_embeddings`)."""
        self.embed_tokens = Embed(vocab_size, hidden_size, dtype=dtype)
        self.layers = nnx.List(layers)
        self.norm = norm
        self.lm_head = None if is_tied else Embed(vocab_size, hidden_size, dtype=dtype)
        self.lora: LoRA | None = None
        """The adapters of the head, tied or not."""
        self.kv_cache_spec = kv_cache_spec
        self.fed_layers: Sequence[int] = ()
        """Layers to whose inputs features are added: a model sets those of its `host_inputs`."""

    def tap(self, layers: Sequence[int]) -> None:
        """Return from now on the inputs of some layers, too; their number is the last's output."""
        self.tapped_layers = tuple(layers)
        self.extra_width = len(layers) * self.embed_tokens.weight.shape[1]

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up tokens; an id outside the table reads row 0."""
        return self.embed_tokens(token_ids)

    @abstractmethod
    def layer_inputs(self, positions: Int[Array, "3 T"]) -> Sequence[Any]:
        """Return what each block is given beside the hidden states: its rotary angles, say."""

    def __call__(
        self,
        inputs_embeds: Float[Array, "T _wide"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T _wide"], KVCache | None]:
        """Return the hidden states after the final norm, and the cache (None in, None out).

        Features for some layers stand behind each embedding, and are 0 for text.
        """
        hidden, *features = jnp.split(inputs_embeds, 1 + len(self.fed_layers), axis=-1)
        inputs = self.layer_inputs(positions)
        fed = dict(zip(self.fed_layers, features, strict=True))
        return self.run_layers(hidden, inputs, kv_cache, metadata, fed=fed)

    def run_layers(
        self,
        hidden: Float[Array, "T D"],
        inputs: Sequence[Any],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
        *,
        fed: Mapping[int, Float[Array, "T D"]] = MappingProxyType({}),
    ) -> tuple[Float[Array, "T _wide"], KVCache | None]:
        """Return the same, given what each block is; `fed[i]` is added to what block i is given."""
        spec, places = self.kv_cache_spec, range(len(self.layers))
        num_entries = len(spec.layers) + len(spec.states)
        caches: list[Any] = [None] * num_entries if kv_cache is None else list(kv_cache)
        if spec.layer_places:
            places = spec.layer_places
        if kv_cache is None and spec.shares_caches:
            caches = [DenseCache()] * len(caches)
        layers = zip(self.layers, inputs, places, strict=True)
        streams = [hidden + fed[0] if 0 in fed else hidden]
        for behind, (layer, layer_input, place) in enumerate(layers, start=1):
            hidden, caches[place] = call_block(
                layer, streams[-1], layer_input, caches[place], metadata
            )
            streams.append(hidden + fed[behind] if behind in fed else hidden)
        hidden = streams[-1]
        hidden = hidden if self.norm is None else self.norm(hidden)
        if self.tapped_layers:
            tapped = [streams[number] for number in self.tapped_layers]
            hidden = jnp.concatenate([hidden, *tapped], axis=-1)
        return hidden, None if kv_cache is None else tuple(caches)

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project onto the vocabulary, in float32."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        if self.tapped_layers:
            hidden_states = hidden_states[:, : -self.extra_width]
        logits = head.project(hidden_states)
        return (
            logits if self.lora is None else logits + self.lora(hidden_states).astype(logits.dtype)
        )
