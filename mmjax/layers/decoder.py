"""What every decoder is: a table of tokens, blocks, a final norm, and a head."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import KVCache, KVCacheSpec
from mmjax.layers.embed import Embed, project_logits

Angles = tuple[Float[Array, "T P"], Float[Array, "T P"]]
"""Cosines and sines of every position."""


class Decoder(nnx.Module):
    """Embeddings in, hidden states out; knows nothing of pictures. Parameters bear HF's names.

    A block is called `layer(x, layer_input, cache, metadata) -> (x, cache)`.
    """

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
        self.kv_cache_spec = kv_cache_spec

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up tokens; an id outside the table reads row 0."""
        return self.embed_tokens(token_ids)

    @abstractmethod
    def layer_inputs(self, positions: Int[Array, "3 T"]) -> Sequence[Any]:
        """Return what each block is given beside the hidden states: its rotary angles, say."""

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], KVCache | None]:
        """Return the hidden states after the final norm, and the cache (None in, None out)."""
        inputs = self.layer_inputs(positions)
        caches = kv_cache if kv_cache is not None else (None,) * len(self.layers)
        hidden, written = inputs_embeds, []
        for layer, layer_input, cache in zip(self.layers, inputs, caches, strict=True):
            hidden, cache = layer(hidden, layer_input, cache, metadata)
            written.append(cache)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return hidden, None if kv_cache is None else tuple(written)

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project onto the vocabulary, in float32."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return project_logits(hidden_states, head.weight[...])
