"""The paged KV cache as a pytree: a cache per layer, passed in and returned (donated).

Knows nothing of requests, only of block ids. The layout depends on the attention backend.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from mmjax.layers.cpu.storage import from_storage, to_storage
from mmjax.rounding import round_up

LANES = 128
"""Width of a TPU's registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKVSpec:
    """What one layer caches for one token."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    """Width of a value, where it is not a key's: at most `head_dim`."""

    def __post_init__(self) -> None:
        if self.value_dim > self.head_dim:
            raise ValueError(f"`value_dim` is {self.value_dim}, above `head_dim`, {self.head_dim}")

    @property
    def width(self) -> int:
        """Numbers that a token stores."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class StateArray:
    """An array that a recurrent layer keeps of each request."""

    shape: tuple[int, ...]
    cut_axis: int
    """The axis that a mesh cuts, if its devices divide it: that of heads, or of channels."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one recurrent layer keeps of a request between its tokens: arrays of float32.

    A sum over all tokens so far needs float32; a convolution's last inputs lose nothing in it.
    """

    arrays: tuple[StateArray, ...]


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What a language model caches for one token, layer by layer.

    Cross-attention whose heads are not those of self-attention has an entry of its own.
    """

    layers: tuple[LayerKVSpec, ...]
    layer_places: tuple[int, ...] = ()
    """Which of `layers`, and of `states` behind them, each of the decoder's has; empty: its own."""
    states: tuple[StateSpec, ...] = ()
    """Of recurrent layers: what they keep is a request's, and not a token's."""
    kept_width: int = 0
    """Width of the states of another model that stand behind all layers; 0: none do."""
    num_lent: int = 0
    """The first so many of `layers` are another model's, which lends them: they are read alone."""

    @classmethod
    def alike(
        cls, num_layers: int, *, num_kv_heads: int, head_dim: int, value_dim: int | None = None
    ) -> "KVCacheSpec":
        """Return the spec of layers that store the same."""
        layer = LayerKVSpec(
            num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim or head_dim
        )
        return cls((layer,) * num_layers)

    @classmethod
    def of_layers(cls, layers: Sequence[LayerKVSpec | StateSpec]) -> "KVCacheSpec":
        """Return the spec of a decoder's layers, each with an entry of its own."""
        paged = [place for place, one in enumerate(layers) if isinstance(one, LayerKVSpec)]
        states = [place for place, one in enumerate(layers) if isinstance(one, StateSpec)]
        order = [*paged, *states]
        return cls(
            tuple(one for one in layers if isinstance(one, LayerKVSpec)),
            tuple(map(order.index, range(len(layers)))),
            tuple(one for one in layers if isinstance(one, StateSpec)),
        )

    @property
    def shares_caches(self) -> bool:
        """Whether layers read what another one has written, or write beside it."""
        return len(set(self.layer_places)) < len(self.layer_places)

    @property
    def num_state_floats(self) -> int:
        """Numbers, of 4 bytes each, that a request keeps in all recurrent layers."""
        return sum(math.prod(array.shape) for one in self.states for array in one.arrays)

    @property
    def num_kv_heads(self) -> int:
        """How many devices the heads of every layer may be cut over, at most."""
        return math.gcd(*(layer.num_kv_heads for layer in self.layers))

    @property
    def width(self) -> int:
        """Numbers that a token stores in all layers, without padding."""
        return sum(layer.width for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSharding:
    """The sharding of attention over a mesh, by heads."""

    mesh: Mesh
    query_axes: tuple[str, ...]
    kv_axes: tuple[str, ...]


class TransposedCache(NamedTuple):
    """Transposed keys, so that a block's scores are one product over contiguous memory.

    The layout for attention in XLA but on TPUs (docs/notes/log.md has the figures); XLA shards it
    by itself.
    """

    keys: Shaped[Array, "M K H Q"]
    """Numbers, or their bits, as `layers.cpu.storage` keeps them."""
    values: Shaped[Array, "M K Q _value"]

    HEAD_AXIS = 1

    @classmethod
    def zeros(
        cls,
        layer: LayerKVSpec,
        num_blocks: int,
        block_size: int,
        dtype: Any,
        sharding: HeadSharding | None,
    ) -> "TransposedCache":
        heads = layer.num_kv_heads
        return cls(
            jnp.zeros((num_blocks, heads, layer.head_dim, block_size), dtype),
            jnp.zeros((num_blocks, heads, block_size, layer.value_dim), dtype),
        )

    @property
    def block_size(self) -> int:
        return self.values.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.values.shape[1]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[2]

    @property
    def value_dim(self) -> int:
        return self.values.shape[3]

    def write(
        self,
        keys: Float[Array, "T K H"],
        values: Float[Array, "T K _value"],
        blocks: Int[Array, " T"],
        offsets: Int[Array, " T"],
    ) -> "TransposedCache":
        return TransposedCache(
            self.keys.at[blocks, :, :, offsets].set(to_storage(keys, self.keys.dtype), mode="drop"),
            self.values.at[blocks, :, offsets, :].set(
                to_storage(values, self.values.dtype), mode="drop"
            ),
        )

    def read_keys(self, ids: Int[Array, "W _blocks"]) -> Float[Array, "W _blocks K H Q"]:
        return from_storage(self.keys[ids])

    def read_values(self, ids: Int[Array, "W _blocks"]) -> Float[Array, "W _blocks K Q _value"]:
        return from_storage(self.values[ids])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InterleavedCache:
    """Keys and values in one array, head by head: k0, v0, k1, v1, ... of every slot.

    The layout of the TPU kernel; heads are padded with zeros to a multiple of 128.
    """

    pages: Any
    """Float[Array, "M Q 2K H"], or, as in any pytree, its description."""
    value_dim: int = field(metadata={"static": True})
    sharding: HeadSharding | None = field(default=None, metadata={"static": True})
    """XLA cannot shard a kernel: on a mesh it is called with the heads of each device."""

    HEAD_AXIS: ClassVar[int] = 2

    @classmethod
    def zeros(
        cls,
        layer: LayerKVSpec,
        num_blocks: int,
        block_size: int,
        dtype: Any,
        sharding: HeadSharding | None,
    ) -> "InterleavedCache":
        width = padded_head_dim(layer.head_dim)
        shape = (num_blocks, block_size, 2 * layer.num_kv_heads, width)
        return cls(jnp.zeros(shape, dtype), layer.value_dim, sharding)

    @property
    def block_size(self) -> int:
        return self.pages.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.pages.shape[2] // 2

    @property
    def head_dim(self) -> int:
        return self.pages.shape[3]

    def write(
        self,
        keys: Float[Array, "T K _width"],
        values: Float[Array, "T K _value"],
        blocks: Int[Array, " T"],
        offsets: Int[Array, " T"],
    ) -> "InterleavedCache":
        padded = [pad_heads(x, self.head_dim) for x in (keys, values)]
        both = jnp.stack(padded, axis=2).reshape(len(keys), -1, self.head_dim)
        return replace(self, pages=self.pages.at[blocks, offsets].set(both, mode="drop"))

    def read_keys(self, ids: Int[Array, "W _blocks"]) -> Float[Array, "W _blocks K H Q"]:
        return self._read(ids)[:, :, :, 0::2].transpose(0, 1, 3, 4, 2)

    def read_values(self, ids: Int[Array, "W _blocks"]) -> Float[Array, "W _blocks K Q _value"]:
        # Cut after they are read: a TPU would copy the whole cache four times to cut it before.
        values = self._read(ids)[:, :, :, 1::2].transpose(0, 1, 3, 2, 4)
        return values[..., : self.value_dim]

    def _read(self, ids: Int[Array, "W _blocks"]) -> Float[Array, "W _blocks Q _heads H"]:
        # Blocks as they lie: XLA for TPU would lay the whole cache out anew to pick heads of them.
        blocks = self.pages.reshape(self.pages.shape[0], -1, self.head_dim)[ids]
        return blocks.reshape(*ids.shape, *self.pages.shape[1:])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotCache:
    """Keys and values slot by slot, each with all its heads, as a layer computes them.

    The layout of the kernel for CUDA: a write is a row for each token, which XLA scatters without a
    transposition, and a kernel reads whole rows.
    """

    keys: Any
    """Float[Array, "M Q K H"], or, as in any pytree, its description."""
    values: Any
    """Float[Array, "M Q K _value"]"""
    sharding: HeadSharding | None = field(default=None, metadata={"static": True})
    """As in `InterleavedCache`."""

    HEAD_AXIS: ClassVar[int] = 2

    @classmethod
    def zeros(
        cls,
        layer: LayerKVSpec,
        num_blocks: int,
        block_size: int,
        dtype: Any,
        sharding: HeadSharding | None,
    ) -> "SlotCache":
        heads = (num_blocks, block_size, layer.num_kv_heads)
        keys, values = (
            jnp.zeros((*heads, width), dtype) for width in (layer.head_dim, layer.value_dim)
        )
        return cls(keys, values, sharding)

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    @property
    def value_dim(self) -> int:
        return self.values.shape[3]

    def write(
        self,
        keys: Float[Array, "T K H"],
        values: Float[Array, "T K _value"],
        blocks: Int[Array, " T"],
        offsets: Int[Array, " T"],
    ) -> "SlotCache":
        return replace(
            self,
            keys=self.keys.at[blocks, offsets].set(keys, mode="drop"),
            values=self.values.at[blocks, offsets].set(values, mode="drop"),
        )

    def read_keys(self, ids: Int[Array, "W _blocks"]) -> Float[Array, "W _blocks K H Q"]:
        return self.keys[ids].transpose(0, 1, 3, 4, 2)

    def read_values(self, ids: Int[Array, "W _blocks"]) -> Float[Array, "W _blocks K Q _value"]:
        return self.values[ids].transpose(0, 1, 3, 2, 4)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowCache:
    """A row for each slot, of all the heads that a device has, padded to a multiple of 128.

    The layout for attention in XLA on a TPU, whose memory has rows of 128: XLA would lay out arrays
    of narrower heads, or of other numbers of heads, with blocks or slots innermost, and copy the
    whole cache in each step to write and to read blocks.
    """

    keys: Any
    """Float[Array, "M Q _devices _row"], or, as in any pytree, its description."""
    values: Any
    """Float[Array, "M Q _devices _row"]"""
    layer: LayerKVSpec = field(metadata={"static": True})

    HEAD_AXIS: ClassVar[int] = 2

    @classmethod
    def zeros(
        cls,
        layer: LayerKVSpec,
        num_blocks: int,
        block_size: int,
        dtype: Any,
        sharding: HeadSharding | None,
    ) -> "RowCache":
        num_devices = 1
        if sharding is not None:
            num_devices = math.prod(sharding.mesh.shape[name] for name in sharding.kv_axes)
        heads = layer.num_kv_heads // num_devices
        keys, values = (
            jnp.zeros((num_blocks, block_size, num_devices, round_up(heads * width, LANES)), dtype)
            for width in (layer.head_dim, layer.value_dim)
        )
        return cls(keys, values, layer)

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.layer.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layer.head_dim

    @property
    def value_dim(self) -> int:
        return self.layer.value_dim

    def write(
        self,
        keys: Float[Array, "T K H"],
        values: Float[Array, "T K _value"],
        blocks: Int[Array, " T"],
        offsets: Int[Array, " T"],
    ) -> "RowCache":
        def store(array: Any, x: Float[Array, "T K _width"]) -> Any:
            rows = x.reshape(len(x), array.shape[2], -1)
            return array.at[blocks, offsets].set(pad_heads(rows, array.shape[3]), mode="drop")

        return replace(self, keys=store(self.keys, keys), values=store(self.values, values))

    def read_keys(self, ids: Int[Array, "W _blocks"]) -> Float[Array, "W _blocks K H Q"]:
        return self._read(self.keys, ids, self.head_dim).transpose(0, 1, 3, 4, 2)

    def read_values(self, ids: Int[Array, "W _blocks"]) -> Float[Array, "W _blocks K Q _value"]:
        return self._read(self.values, ids, self.value_dim).transpose(0, 1, 3, 2, 4)

    def _read(
        self, array: Any, ids: Int[Array, "W _blocks"], width: int
    ) -> Float[Array, "W _blocks Q K _width"]:
        rows = array[ids]
        of_heads = self.num_kv_heads // array.shape[2] * width
        return rows[..., :of_heads].reshape(*rows.shape[:3], self.num_kv_heads, width)


LayerCache = TransposedCache | InterleavedCache | SlotCache | RowCache
"""The blocks of one layer, in a layout. Every layout has

- `HEAD_AXIS`: the axis of its arrays that a mesh shards;
- `zeros(layer, num_blocks, block_size, dtype, sharding)`;
- `block_size` (`Q`), `num_kv_heads` (`K`), `head_dim` (`H`, with padding), `value_dim` (without);
- `write`: store tokens in their slots; those with a block id out of range (padding) are dropped;
- `read_keys` and `read_values`: the blocks of some ids.
"""


class StateCache(NamedTuple):
    """What a recurrent layer keeps of all requests, each in a slot; in the order of its spec."""

    arrays: tuple[Any, ...]
    """Each Float[Array, "_slots ..."], or, as in any pytree, its description."""

    @classmethod
    def zeros(cls, spec: StateSpec, num_slots: int) -> "StateCache":
        return cls(tuple(jnp.zeros((num_slots, *one.shape), jnp.float32) for one in spec.arrays))


class KeptStates(NamedTuple):
    """A hidden state of each token, of the model that a layer guesses for, in the cache's slots."""

    rows: Shaped[Array, "M Q D"]
    """Numbers, or their bits, as `layers.cpu.storage` keeps them."""

    def write(
        self, states: Float[Array, "T D"], blocks: Int[Array, " T"], offsets: Int[Array, " T"]
    ) -> "KeptStates":
        """Store states in slots; those with a block id out of range are dropped."""
        stored = to_storage(states, self.rows.dtype)
        return KeptStates(self.rows.at[blocks, offsets].set(stored, mode="drop"))

    def read(self, blocks: Int[Array, " T"], offsets: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Return the states of slots; of a block id out of range any."""
        return from_storage(self.rows.at[blocks, offsets].get(mode="clip"))


KVCache = tuple[LayerCache | StateCache | KeptStates, ...]


class DenseCache(NamedTuple):
    """The keys and values of a layer without a paged cache, for later layers that share them.

    None before that layer.
    """

    keys: Float[Array, "T K H"] | None = None
    values: Float[Array, "T K _value"] | None = None


def padded_head_dim(head_dim: int) -> int:
    """Round up to a multiple of a TPU register's width."""
    return round_up(head_dim, LANES)


def pad_heads(x: Float[Array, "T _heads _width"], head_dim: int) -> Float[Array, "T _heads H"]:
    """Pad heads with zeros, which change no product."""
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
    num_state_slots: int = 0,
) -> KVCache:
    """Return zeroed blocks for every layer, zeroed slots for recurrent ones, and kept states."""
    blocks = (
        cache_type.zeros(layer, num_blocks, block_size, dtype, sharding) for layer in spec.layers
    )
    states = (StateCache.zeros(one, num_state_slots) for one in spec.states)
    if not spec.kept_width:
        return *blocks, *states
    kept = KeptStates(jnp.zeros((num_blocks, block_size, spec.kept_width), dtype))
    return *blocks, *states, kept
