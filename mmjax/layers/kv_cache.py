"""The paged KV cache as a pytree: one pair of arrays a layer, passed in and returned (donated).

Knows nothing of requests: block ids in, block ids out. Keys lie transposed, so that the scores
of a block are one matrix product over contiguous memory (docs/log.md has the figures).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What a language model stores for one token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class LayerCache(NamedTuple):
    """The blocks of one layer."""

    keys: Float[Array, "M K H Q"]
    values: Float[Array, "M K Q H"]

    @property
    def block_size(self) -> int:
        """Slots in a block (`Q`)."""
        return self.values.shape[2]

    def write(
        self,
        keys: Float[Array, "T K H"],
        values: Float[Array, "T K H"],
        blocks: Int[Array, " T"],
        offsets: Int[Array, " T"],
    ) -> "LayerCache":
        """Store each token in its slot; tokens of a block id out of range (padding) are dropped."""
        return LayerCache(
            self.keys.at[blocks, :, :, offsets].set(keys, mode="drop"),
            self.values.at[blocks, :, offsets, :].set(values, mode="drop"),
        )


KVCache = tuple[LayerCache, ...]


def allocate(spec: KVCacheSpec, *, num_blocks: int, block_size: int, dtype: Any) -> KVCache:
    """Return zeroed blocks for every layer."""
    keys = (num_blocks, spec.num_kv_heads, spec.head_dim, block_size)
    values = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
    return tuple(
        LayerCache(jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(spec.num_layers)
    )


def block_bytes(spec: KVCacheSpec, *, block_size: int, dtype: Any) -> int:
    """Return the bytes of one block over all layers."""
    per_slot = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    return per_slot * block_size * jnp.dtype(dtype).itemsize
