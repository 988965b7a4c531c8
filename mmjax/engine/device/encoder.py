"""The inputs of `encode` from items, and the rows of the encoder-output pool for its outputs.

Items are units of one shape, or sequences of patches of any length, which are packed into one call
with a segment id each, which attention masks by; so a batch of images of mixed sizes is one call,
and no size needs another program.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Shaped

from mmjax.cache.adapter_slots import NO_SLOT
from mmjax.engine.device.batch_layout import ADAPTER_SLOTS
from mmjax.engine.device.mesh import Placement
from mmjax.engine.scheduling.buckets import ladder, next_bucket, split_calls
from mmjax.engine.scheduling.request import EncoderItem
from mmjax.errors import ConfigError
from mmjax.layers.attention.segments import BLOCK_SIZE, PADDING
from mmjax.models.host_inputs import EncoderSpec, PackedEncoderSpec
from mmjax.rounding import round_up

MIN_PATCHES = 128
"""Size of the smallest bucket; all are multiples of it, as TPU kernels pad rows to it."""
MAX_PACKED_PATCHES = 4096
"""Patches of the largest call, unless a single item has more; others take several calls."""

"""The input that says where the adapter of each unit, or patch, is."""

Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Input name -> (shape, dtype)."""


class EncoderCall(NamedTuple):
    """The host's arguments of one call of `encode`."""

    inputs: dict[str, np.ndarray]
    dst_rows: np.ndarray
    """int32[outputs]: rows of the pool; padding: `num_rows`, which is out of range."""


class EncoderCalls(ABC):
    """Makes a model's encoder calls. `size`: length of the inputs' first axis."""

    def __init__(self, placement: Placement, num_rows: int, *, has_adapters: bool) -> None:
        self._placement = placement
        self._num_rows = num_rows
        self._has_adapters = has_adapters

    @abstractmethod
    def num_outputs(self, size: int) -> int:
        """Return the number of embeddings of a call."""

    @abstractmethod
    def count_outputs(self, item: EncoderItem) -> int:
        """Return the embeddings that an item's units give, those that no prompt has included."""

    @abstractmethod
    def sharding(self, size: int) -> Sharding:
        """Return the sharding of the inputs."""

    @abstractmethod
    def gather(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
        """Replicate an array that the devices computed in parts along `axis`, under jit."""

    @abstractmethod
    def fill(
        self, items: Sequence[EncoderItem], rows: Sequence[np.ndarray], sizes: Sequence[int]
    ) -> Iterator[EncoderCall]:
        """Yield the calls that encode items, each of one of the `sizes`.

        `rows`: where each of an item's outputs goes.
        """

    def describe(self, bucket: int) -> tuple[dict[str, jax.ShapeDtypeStruct], int]:
        """Return the inputs of a bucket's program, and its number of embeddings."""
        size = self._size(bucket)
        where = self.sharding(size)
        inputs = {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
            for name, (shape, dtype) in self._all_shapes(size).items()
        }
        return inputs, self.num_outputs(size)

    def empty(self, bucket: int) -> EncoderCall:
        """Return a call of padding."""
        size = self._size(bucket)
        inputs = {
            name: np.zeros(shape, dtype) for name, (shape, dtype) in self._all_shapes(size).items()
        }
        if self._has_adapters:
            inputs[ADAPTER_SLOTS][:] = NO_SLOT
        return EncoderCall(inputs, np.full(self.num_outputs(size), self._num_rows, np.int32))

    def _size(self, bucket: int) -> int:
        return bucket

    def _all_shapes(self, size: int) -> Shapes:
        slots: Shapes = {ADAPTER_SLOTS: ((size,), "int32")}
        return self._shapes(size) | (slots if self._has_adapters else {})

    @abstractmethod
    def _shapes(self, size: int) -> Shapes: ...


class UnitCalls(EncoderCalls):
    """Calls of units of one shape; items may share calls, and be split over several."""

    def __init__(self, spec: EncoderSpec, *places: Any, min_units: int, has_adapters: bool) -> None:
        super().__init__(*places, has_adapters=has_adapters)
        self._min_units = min_units
        self._spec = spec

    def num_outputs(self, size: int) -> int:
        return size * self._spec.tokens_per_unit

    def count_outputs(self, item: EncoderItem) -> int:
        """Return the embeddings of all of an item's units."""
        return self.num_outputs(_count_first_axis(item))

    def sharding(self, size: int) -> Sharding:
        return self._placement.units(size)

    def gather(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:

        return self._placement.gather(x, axis)

    def fill(
        self, items: Sequence[EncoderItem], rows: Sequence[np.ndarray], sizes: Sequence[int]
    ) -> Iterator[EncoderCall]:
        """Yield calls with all units of all items, in order."""
        per_unit = self._spec.tokens_per_unit
        dst_rows = np.concatenate(rows)
        units = {
            name: np.concatenate([item.units[name] for item in items]) for name in self._spec.inputs
        }
        if self._has_adapters:
            slots = [np.full(_count_first_axis(one), one.adapter_slot, np.int32) for one in items]
            units[ADAPTER_SLOTS] = np.concatenate(slots)
        start = 0
        for bucket, count in split_calls(sizes, len(dst_rows) // per_unit):
            call = self.empty(bucket)
            end = start + count
            call.dst_rows[: count * per_unit] = dst_rows[start * per_unit : end * per_unit]
            for name, padded in call.inputs.items():
                padded[:count] = units[name][start:end]
            yield call
            start = end

    def _size(self, bucket: int) -> int:
        return self._placement.padded_units(max(bucket, self._min_units))

    def _shapes(self, size: int) -> Shapes:
        return {name: ((size, *shape), dtype) for name, (shape, dtype) in self._spec.inputs.items()}


class PackedCalls(EncoderCalls):
    """Calls of packed items of any number of patches; every device computes all of a call."""

    def __init__(self, spec: PackedEncoderSpec, *places: Any, has_adapters: bool) -> None:
        super().__init__(*places, has_adapters=has_adapters)
        self._spec = spec

    def num_outputs(self, size: int) -> int:
        return size // self._spec.patches_per_token

    def count_outputs(self, item: EncoderItem) -> int:
        """Return the embeddings of all of an item's patches."""
        return self.num_outputs(_count_first_axis(item))

    def sharding(self, size: int) -> Sharding:
        """Replicate the inputs: even shards would cut images apart."""
        return self._placement.replicated

    def gather(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:

        return x

    def fill(
        self, items: Sequence[EncoderItem], rows: Sequence[np.ndarray], sizes: Sequence[int]
    ) -> Iterator[EncoderCall]:
        """Yield calls with the items packed, the largest first."""
        per_token = self._spec.patches_per_token
        num_patches = [len(part) * per_token for part in rows]
        for bucket, packed in plan_calls(num_patches, sizes, per_token):
            call = self.empty(bucket)
            for segment, (number, start) in enumerate(packed):
                end = start + num_patches[number]
                call.inputs["segment_ids"][start:end] = segment
                call.dst_rows[start // per_token : end // per_token] = rows[number]
                for name in self._spec.inputs:
                    call.inputs[name][start:end] = items[number].units[name]
                if self._has_adapters:
                    call.inputs[ADAPTER_SLOTS][start:end] = items[number].adapter_slot
            yield call

    def empty(self, bucket: int) -> EncoderCall:
        """Return a call of padding, which is one segment."""
        call = super().empty(bucket)
        call.inputs["segment_ids"][:] = PADDING
        return call

    def _shapes(self, size: int) -> Shapes:
        rows = {name: ((size, *shape), dtype) for name, (shape, dtype) in self._spec.inputs.items()}
        return rows | {"segment_ids": ((size,), "int32")}


def _count_first_axis(item: EncoderItem) -> int:
    return len(next(iter(item.units.values())))


def make_encoder_calls(
    spec: EncoderSpec | PackedEncoderSpec,
    placement: Placement,
    num_rows: int,
    *,
    min_units: int = 1,
    has_adapters: bool = False,
) -> EncoderCalls:
    """Return the encoder calls of a model with `spec`; smaller ones are padded to `min_units`.

    `has_adapters`: whether units have adapters.
    """
    if isinstance(spec, PackedEncoderSpec):
        return PackedCalls(spec, placement, num_rows, has_adapters=has_adapters)
    options = {"min_units": min_units, "has_adapters": has_adapters}
    return UnitCalls(spec, placement, num_rows, **options)


# ---- sizes ---------------------------------------------------------------------------------------


def largest_items(
    spec: EncoderSpec | PackedEncoderSpec,
    max_embeds_per_item: Mapping[str, int],
    max_model_len: int,
) -> Mapping[str, int]:
    """Return the most embeddings that are encoded at once: a unit's, or an item's in a prompt.

    `max_embeds_per_item`: as P0's processor says, by modality; ConfigError where a pack needs it.
    """
    if isinstance(spec, EncoderSpec):
        return {"image": spec.tokens_per_unit}
    if not max_embeds_per_item:
        raise ConfigError(
            "the encoder takes items of any size, and `max_embeds_per_item` does not say how large "
            "they are; give what the processor's `get_mm_max_tokens_per_item` returns"
        )
    return {m: max(1, min(most, max_model_len)) for m, most in max_embeds_per_item.items()}


def count_units(spec: EncoderSpec | PackedEncoderSpec, encoder_budget: int) -> int:
    """Return how many units a step may encode; 0 for a packed encoder."""
    is_packed = isinstance(spec, PackedEncoderSpec)
    return 0 if is_packed else encoder_budget // spec.tokens_per_unit


def choose_patches(
    spec: EncoderSpec | PackedEncoderSpec, encoder_budget: int, largest_item: int
) -> tuple[int, ...]:
    """Return the buckets of a packed encoder, for a budget in embeddings; () for units."""
    if not isinstance(spec, PackedEncoderSpec):
        return ()
    return patch_buckets(
        largest_item=largest_item * spec.patches_per_token,
        encoder_budget=encoder_budget * spec.patches_per_token,
        patches_per_token=spec.patches_per_token,
    )


# ---- packing ------------------------------------------------------------------------------------


class PackedCall(NamedTuple):
    """One call of a packed encoder."""

    bucket: int
    """Patches, with padding."""
    items: list[tuple[int, int]]
    """Indices of its items, and where each starts."""


def patch_buckets(
    *, largest_item: int, encoder_budget: int, patches_per_token: int
) -> tuple[int, ...]:
    """Return the buckets of a packed encoder, all multiples of `patches_per_token`.

    Args:
        largest_item: Patches of the largest item, which the last bucket holds.
        encoder_budget: Patches that a step may encode.
        patches_per_token: Patches that become one embedding.
    """
    first = round_up(MIN_PATCHES, patches_per_token)
    last = max(largest_item, min(encoder_budget, MAX_PACKED_PATCHES))
    return ladder(first, round_up(last, first), 2)


def plan_calls(
    num_patches: Sequence[int], buckets: Sequence[int], patches_per_token: int
) -> list[PackedCall]:
    """Put each item into the first call with room for it, and each call into its bucket.

    The largest first: items of 600, 700, 100 patches, buckets up to 1,024: [(1024, [(1, 0),
    (2, 768)]), (1024, [(0, 0)])]. An item starts where its own blocks of keys would, so that its
    embeddings are summed in one order whatever lies beside it (docs/determinism.md).
    """
    calls: list[list[tuple[int, int]]] = []
    ends: list[int] = []
    for number in sorted(range(len(num_patches)), key=lambda n: -num_patches[n]):
        size = num_patches[number]
        assert 0 <= size <= buckets[-1], f"{size=} {buckets[-1]=}"
        step = math.lcm(min(BLOCK_SIZE, 1 << (size - 1).bit_length()), patches_per_token)
        starts = [round_up(end, step) for end in ends]
        place = next((n for n, s in enumerate(starts) if s + size <= buckets[-1]), len(calls))
        if place == len(calls):
            calls.append([])
            ends.append(0)
            starts.append(0)
        calls[place].append((number, starts[place]))
        ends[place] = starts[place] + size
    return [
        PackedCall(next_bucket(buckets, end), items) for end, items in zip(ends, calls, strict=True)
    ]


# ---- the pool of encoder outputs ----------------------------------------------------------------


class EncoderRows:
    """Hands out pool rows by identifier; any rows do, so nothing fragments.

    Behind the `num_rows` that are handed out lie the model's `num_extra_rows` learned embeddings.
    """

    def __init__(self, num_rows: int, num_extra_rows: int = 0) -> None:
        self.num_rows = num_rows
        self._num_rows_in_all = num_rows + num_extra_rows
        self._free = np.arange(num_rows, dtype=np.int32)[::-1].copy()
        """A stack; the first `num_free` entries are free."""
        self.num_free = num_rows
        self._rows: dict[str, np.ndarray] = {}
        self._embeds: dict[str, np.ndarray] = {}
        """Where an item's embeddings are not its rows in order."""

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._rows

    def allocate(self, identifier: str, num_embeds: int) -> np.ndarray:
        """Give rows to an item, int32[num_embeds], one per embedding in order."""
        assert num_embeds <= self.num_free, f"{num_embeds=} {self.num_free=}"
        assert identifier not in self._rows, f"{identifier=} has rows already"
        self.num_free -= num_embeds
        rows = self._free[self.num_free : self.num_free + num_embeds][::-1].copy()
        self._rows[identifier] = rows
        return rows

    def allocate_chosen(
        self, identifier: str, embed_rows: np.ndarray, num_outputs: int
    ) -> np.ndarray:
        """Give rows to those of an item's outputs that its embeddings are.

        Args:
            identifier: Of the item.
            embed_rows: int32[num_embeds], as `HostInputs.embed_rows` returns it.
            num_outputs: How many embeddings the encoder gives.

        Returns:
            int32[num_outputs]: where each output goes; out of range where no embedding is it.
        """
        is_extra = embed_rows < 0
        kept = np.unique(embed_rows[~is_extra])
        places = np.full(num_outputs, self._num_rows_in_all, np.int32)
        places[kept] = self.allocate(identifier, len(kept))
        # A negative number is counted from the first learned embedding on: -1, -2, ...
        extra = self.num_rows - 1 - embed_rows
        chosen = places[np.where(is_extra, 0, embed_rows)]
        self._embeds[identifier] = np.where(is_extra, extra, chosen).astype(np.int32)
        return places

    def get(self, identifier: str) -> np.ndarray:
        """Return the row of each of an item's embeddings, int32[num_embeds]."""
        embeds = self._embeds.get(identifier)
        return self._rows[identifier] if embeds is None else embeds

    def free(self, identifier: str) -> None:
        """Take an item's rows back."""
        rows = self._rows.pop(identifier)
        self._embeds.pop(identifier, None)
        self._free[self.num_free : self.num_free + len(rows)] = rows[::-1]
        self.num_free += len(rows)

    def reset(self) -> None:
        """Take all rows back."""
        for identifier in list(self._rows):
            self.free(identifier)
