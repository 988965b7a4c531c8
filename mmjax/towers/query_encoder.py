"""A small language model as an encoder: learned queries read an image's states, in their order.

DeepSeek-OCR 2's DeepEncoder V2 (arXiv 2601.20552), whose blocks are Qwen2's: the image's states see
each other, a query sees all of them and the queries before it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.layers.attention.api import DenseAttentionMetadata
from mmjax.layers.decoder import DecoderLayer, GroupedQueryAttention
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.module import call_block
from mmjax.layers.norm import RMSNorm
from mmjax.layers.rope import text_angles


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryEncoderConfig:
    """What the arrays depend on."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_act: str
    rms_norm_eps: float
    rope_parameters: dict[str, Any]

    @classmethod
    def from_hf(cls, hf_config: Any) -> "QueryEncoderConfig":
        """Read HF's configuration; `CheckpointError` for layers with a window."""
        if {*hf_config.layer_types} != {"full_attention"}:
            raise CheckpointError(
                f"`encoder_config.layer_types` is {hf_config.layer_types}; mmjax serves "
                "`full_attention` alone"
            )
        return read_config(cls, hf_config)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads


class QueryEncoder(nnx.Module):
    """States of images and queries to the queries' states; parameters bear Qwen2's names."""

    def __init__(self, config: QueryEncoderConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        make_norm = partial(RMSNorm, width, eps=config.rms_norm_eps, dtype=dtype)
        self.layers = nnx.List(
            DecoderLayer(
                GroupedQueryAttention(
                    width,
                    num_heads=config.num_attention_heads,
                    num_kv_heads=config.num_key_value_heads,
                    head_dim=config.head_dim,
                    has_qkv_bias=True,
                    dtype=dtype,
                ),
                GatedMLP(
                    width, config.intermediate_size, activation=config.hidden_act, dtype=dtype
                ),
                make_norm,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = make_norm()
        self.config = config

    def __call__(
        self, states: Float[Array, "I P D"], queries: Float[Array, "_queries D"]
    ) -> Float[Array, "I _queries D"]:
        """Return what the queries have read."""
        images, num_patches = states.shape[:2]
        behind = jnp.broadcast_to(queries[None].astype(states.dtype), (images, *queries.shape))
        x = jnp.concatenate([states, behind], axis=1)
        index = jnp.arange(x.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(jnp.tile(index, images)[None], (3, images * len(index)))
        angles = text_angles(self.config.rope_parameters, self.config.head_dim, positions)
        is_seen = (index[None, :] <= index[:, None]) | (index[None, :] < num_patches)
        metadata = DenseAttentionMetadata(
            jnp.broadcast_to(index[None], x.shape[:2]),
            jnp.broadcast_to(is_seen[None], (images, *is_seen.shape)),
        )
        rows = x.reshape(-1, x.shape[-1])
        for layer in self.layers:
            rows, _ = call_block(layer, rows, angles, None, metadata)
        return self.norm(rows).reshape(x.shape)[:, num_patches:]
