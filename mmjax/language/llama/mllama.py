"""Llama 3.2 Vision's decoder (arXiv 2407.21783, section 7): Llama's, and gated cross-attention.

Among its layers are some that attend to rows of the prompt's pictures in place of its tokens.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.errors import CheckpointError
from mmjax.language.llama.config import LlamaConfig
from mmjax.language.llama.decoder import LlamaTextModel
from mmjax.layers.attention.api import (
    AttentionMetadata,
    cross_attention,
    find_attending,
    write_encoder,
)
from mmjax.layers.attention.kv_cache import DenseCache, KVCacheSpec, LayerCache
from mmjax.layers.decoder import DecoderLayer, GroupedQueryAttention
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.norm import RMSNorm
from mmjax.layers.recurrent.rounding import rounded


class MllamaConfig(NamedTuple):
    """What the text model's configuration says."""

    llama: LlamaConfig
    cross_attention_layers: tuple[int, ...]

    @staticmethod
    def from_hf(hf_config: Any) -> "MllamaConfig":
        """Read HF's config; `CheckpointError` for layers that do not fit each other."""
        layers = tuple(sorted(hf_config.cross_attention_layers))
        llama = LlamaConfig.from_hf(hf_config)
        numbers = range(llama.num_hidden_layers)
        if not layers or not {*layers} <= {*numbers} or 2 * len(layers) > len(numbers):
            raise CheckpointError(
                f"`text_config.cross_attention_layers` is {list(layers)}; they must be numbers of "
                f"its {len(numbers)} layers, one at least and at most half of them"
            )
        return MllamaConfig(llama, layers)


class MllamaCrossAttention(GroupedQueryAttention):
    """Attention to a picture's rows, whose keys and values stand in the request's second table."""

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: Any,
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Write the keys and values of requests that start in this step; then attend.

        Angles are not read.
        """
        assert metadata.cross is not None, "the metadata has no rows of pictures"
        query_norm: Any = self.q_norm
        key_norm: Any = self.k_norm
        states = metadata.cross.encoder_hidden_states
        if states is not None and len(states):
            key = key_norm(self._cut(self.k_proj(states)))
            cache = write_encoder(key, self._cut(self.v_proj(states)), cache, metadata)
        query = query_norm(self._cut(self.q_proj(x)))
        out = cross_attention(query, cache, metadata, scale=self.head_dim**-0.5)
        return self.o_proj(out.reshape(len(x), -1)), cache

    def _cut(self, x: Float[Array, "T _width"]) -> Float[Array, "T N H"]:
        return x.reshape(len(x), -1, self.head_dim)


class MllamaCrossAttentionLayer(DecoderLayer):
    """A block that adds nothing to tokens before the first picture; its branches are gated."""

    def __init__(self, config: LlamaConfig, *, dtype: Any) -> None:
        make_norm = partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        attention = MllamaCrossAttention(
            config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            norms=(make_norm(config.head_dim), make_norm(config.head_dim)),
            dtype=dtype,
        )
        mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            dtype=dtype,
        )
        super().__init__(
            attention, mlp, partial(make_norm, config.hidden_size), mixer_name="cross_attn"
        )
        self.cross_attn_attn_gate = nnx.Param(jnp.zeros((1,), dtype))
        self.cross_attn_mlp_gate = nnx.Param(jnp.zeros((1,), dtype))

    def weigh(
        self, part: str, out: Float[Array, "T D"], metadata: AttentionMetadata
    ) -> Float[Array, "T D"]:
        """Return what is added to the stream, zeros where a token attends to nothing.

        As Meta's code, and vLLM's. HF's adds the MLP's branch alone only where a token sees a
        picture, and attention's everywhere (huggingface/transformers#39379).
        """
        gate = getattr(self, f"cross_attn_{part}_gate")[...]
        gated = rounded(jnp.tanh(gate)[None] * out)
        return jnp.where(find_attending(metadata)[:, None], gated, 0)


class MllamaTextModel(LlamaTextModel):
    """Llama 3.2 Vision's text model."""

    def __init__(self, config: MllamaConfig, *, is_tied: bool, dtype: Any) -> None:
        llama, across = config
        super().__init__(llama, is_tied=is_tied, dtype=dtype)
        self.layers = nnx.List(
            MllamaCrossAttentionLayer(llama, dtype=dtype) if number in across else layer
            for number, layer in enumerate(self.layers)
        )
        self.kv_cache_spec = _share_caches(llama, across)


def _share_caches(config: LlamaConfig, across: tuple[int, ...]) -> KVCacheSpec:
    """Return a cache for each layer of self-attention, some of which pictures' keys share.

    They stand in blocks of their own, which each cache has; caches of cross-attention alone would
    have blocks for tokens, too, that nothing is written to.
    """
    places, free = list[int](), 0
    num_own = config.num_hidden_layers - len(across)
    for number in range(config.num_hidden_layers):
        places.append(across.index(number) if number in across else free)
        free += number not in across
    spec = KVCacheSpec.alike(
        num_own, num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim
    )
    return KVCacheSpec(spec.layers, tuple(places))
