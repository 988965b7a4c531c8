"""The paged KV cache as a pytree: one cache a layer, passed in and returned (donated).

Knows nothing of requests: block ids in, block ids out. How a block lies in memory is the choice
of the attention that reads it; all layouts can be written, and walked block by block.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from mmjax.rounding import round_up

LANES = 128
"""Width of a TPU's registers: heads are padded to a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What a language model stores for one token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSharding:
    """How attention is cut over a mesh: each device has whole heads, and all their tokens."""

    mesh: Mesh
    query_axes: tuple[str, ...]
    kv_axes: tuple[str, ...]


class TransposedCache(NamedTuple):
    """Keys lie transposed: a block's scores are one matrix product over contiguous memory.

    The layout of the XLA walk (docs/log.md has the figures).
    """

    keys: Float[Array, "M K H Q"]
    values: Float[Array, "M K Q H"]

    HEAD_AXIS = 1
    """Of each array: what a mesh may cut."""

    @classmethod
    def zeros(
        cls,
        spec: KVCacheSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: Any,
        sharding: HeadSharding | None = None,
    ) -> "TransposedCache":
        """Return empty blocks of one layer. The compiler cuts what reads them by itself."""
        heads, width = spec.num_kv_heads, spec.head_dim
        return cls(
            jnp.zeros((num_blocks, heads, width, block_size), dtype),
            jnp.zeros((num_blocks, heads, block_size, width), dtype),
        )

    @property
    def block_size(self) -> int:
        """Slots in a block (`Q`)."""
        return self.values.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """Heads in a slot (`K`)."""
        return self.values.shape[1]

    @property
    def head_dim(self) -> int:
        """Width of a stored head (`H`)."""
        return self.values.shape[3]

    def write(
        self,
        keys: Float[Array, "T K H"],
        values: Float[Array, "T K H"],
        blocks: Int[Array, " T"],
        offsets: Int[Array, " T"],
    ) -> "TransposedCache":
        """Store each token in its slot; tokens of a block id out of range (padding) are dropped."""
        return TransposedCache(
            self.keys.at[blocks, :, :, offsets].set(keys, mode="drop"),
            self.values.at[blocks, :, offsets, :].set(values, mode="drop"),
        )

    def read_keys(self, ids: Int[Array, "W _blocks"]) -> Float[Array, "W _blocks K H Q"]:
        """Return a block of keys for each id."""
        return self.keys[ids]

    def read_values(self, ids: Int[Array, "W _blocks"]) -> Float[Array, "W _blocks K Q H"]:
        """Return a block of values for each id."""
        return self.values[ids]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InterleavedCache:
    """Keys and values lie head by head in one array: k0, v0, k1, v1, ... of every slot.

    The layout of the TPU kernel; heads are padded with zeros to a multiple of 128.
    """

    pages: Any
    """Float[Array, "M Q 2K H"]; as in every pytree, its description may stand in its place."""
    sharding: HeadSharding | None = field(default=None, metadata={"static": True})
    """No compiler cuts a kernel: on a mesh it is called with the heads of each device."""

    HEAD_AXIS: ClassVar[int] = 2
    """Of each array: what a mesh may cut."""

    @classmethod
    def zeros(
        cls,
        spec: KVCacheSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: Any,
        sharding: HeadSharding | None = None,
    ) -> "InterleavedCache":
        """Return empty blocks of one layer."""
        shape = (num_blocks, block_size, 2 * spec.num_kv_heads, padded_head_dim(spec.head_dim))
        return cls(jnp.zeros(shape, dtype), sharding)

    @property
    def block_size(self) -> int:
        """Slots in a block (`Q`)."""
        return self.pages.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys, or of values, in a slot (`K`)."""
        return self.pages.shape[2] // 2

    @property
    def head_dim(self) -> int:
        """Width of a stored head, padding included (`H`)."""
        return self.pages.shape[3]

    def write(
        self,
        keys: Float[Array, "T K _width"],
        values: Float[Array, "T K _width"],
        blocks: Int[Array, " T"],
        offsets: Int[Array, " T"],
    ) -> "InterleavedCache":
        """Store each token in its slot; tokens of a block id out of range (padding) are dropped."""
        both = jnp.stack([keys, values], axis=2)
        both = pad_heads(both.reshape(len(keys), -1, keys.shape[-1]), self.head_dim)
        return replace(self, pages=self.pages.at[blocks, offsets].set(both, mode="drop"))

    def read_keys(self, ids: Int[Array, "W _blocks"]) -> Float[Array, "W _blocks K H Q"]:
        """Return a block of keys for each id."""
        return self.pages[ids, :, 0::2].transpose(0, 1, 3, 4, 2)

    def read_values(self, ids: Int[Array, "W _blocks"]) -> Float[Array, "W _blocks K Q H"]:
        """Return a block of values for each id."""
        return self.pages[ids, :, 1::2].transpose(0, 1, 3, 2, 4)


LayerCache = TransposedCache | InterleavedCache
KVCache = tuple[LayerCache, ...]


def padded_head_dim(head_dim: int) -> int:
    """Return the next multiple of a TPU register's width."""
    return round_up(head_dim, LANES)


def pad_heads(x: Float[Array, "T _heads _width"], head_dim: int) -> Float[Array, "T _heads H"]:
    """Widen heads with zeros, which no product sees."""
    missing = head_dim - x.shape[-1]
    return x if missing == 0 else jnp.pad(x, ((0, 0), (0, 0), (0, missing)))


def allocate(
    spec: KVCacheSpec,
    *,
    num_blocks: int,
    block_size: int,
    dtype: Any,
    cache_type: type[LayerCache] = TransposedCache,
    sharding: HeadSharding | None = None,
) -> KVCache:
    """Return zeroed blocks for every layer."""
    options: dict[str, Any] = {"dtype": dtype, "sharding": sharding}
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    return tuple(cache_type.zeros(spec, **sizes, **options) for _ in range(spec.num_layers))
