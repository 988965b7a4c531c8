"""From items to the arrays of `encode`: units in buckets, or packed patches; both have one face."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Shaped

from mmjax.engine.device.mesh import Placement
from mmjax.engine.device.packing import PADDING_SEGMENT, make_segment_ids, patch_buckets, plan_calls
from mmjax.engine.scheduling.buckets import Buckets
from mmjax.engine.scheduling.request import EncoderItem
from mmjax.models.interface import EncoderSpec, PackedEncoderSpec

Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Per input: shape, dtype."""


class EncoderCall(NamedTuple):
    """What the host gives to one call."""

    inputs: dict[str, np.ndarray]
    dst_rows: np.ndarray
    """int32[outputs]: rows of the pool; padding has `num_rows`, which is out of range."""


class EncoderCalls(ABC):
    """How the items of a model are encoded. A size is the first axis of all inputs."""

    def __init__(self, buckets: Buckets, placement: Placement, num_rows: int) -> None:
        self._buckets = buckets
        self._placement = placement
        self._num_rows = num_rows

    @abstractmethod
    def num_outputs(self, size: int) -> int:
        """Return the embeddings that a call of a size gives."""

    @abstractmethod
    def sharding(self, size: int) -> Sharding:
        """Return where the inputs lie."""

    @abstractmethod
    def gather(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
        """Make what the devices compute in parts whole on each of them; under jit."""

    @abstractmethod
    def fill(
        self, items: Sequence[EncoderItem], rows: Sequence[np.ndarray]
    ) -> Iterator[EncoderCall]:
        """Yield the calls that encode items into their rows."""

    def describe(self, bucket: int) -> tuple[dict[str, jax.ShapeDtypeStruct], int]:
        """Return the inputs of a bucket's program, and how many embeddings it gives."""
        size = self._size(bucket)
        where = self.sharding(size)
        inputs = {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
            for name, (shape, dtype) in self._shapes(size).items()
        }
        return inputs, self.num_outputs(size)

    def empty(self, bucket: int) -> EncoderCall:
        """Return a call of padding alone."""
        size = self._size(bucket)
        inputs = {
            name: np.zeros(shape, dtype) for name, (shape, dtype) in self._shapes(size).items()
        }
        return EncoderCall(inputs, np.full(self.num_outputs(size), self._num_rows, np.int32))

    def _size(self, bucket: int) -> int:
        return bucket

    @abstractmethod
    def _shapes(self, size: int) -> Shapes: ...


class UnitCalls(EncoderCalls):
    """Units of one shape: items may share calls, and be split over them."""

    def __init__(self, spec: EncoderSpec, *places: Any) -> None:
        super().__init__(*places)
        self._spec = spec

    def num_outputs(self, size: int) -> int:
        """Return the embeddings of `size` units."""
        return size * self._spec.tokens_per_unit

    def sharding(self, size: int) -> Sharding:
        """Spread units over the devices."""
        return self._placement.units(size)

    def gather(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
        """Collect the units' embeddings."""
        return self._placement.gather(x, axis)

    def fill(
        self, items: Sequence[EncoderItem], rows: Sequence[np.ndarray]
    ) -> Iterator[EncoderCall]:
        """Cut all units of all items into calls."""
        per_unit = self._spec.tokens_per_unit
        dst_rows = np.concatenate(rows)
        units = {
            name: np.concatenate([item.units[name] for item in items]) for name in self._spec.inputs
        }
        start = 0
        for bucket, count in self._buckets.unit_calls(len(dst_rows) // per_unit):
            call = self.empty(bucket)
            end = start + count
            call.dst_rows[: count * per_unit] = dst_rows[start * per_unit : end * per_unit]
            for name, padded in call.inputs.items():
                padded[:count] = units[name][start:end]
            yield call
            start = end

    def _size(self, bucket: int) -> int:
        return self._placement.padded_units(bucket)

    def _shapes(self, size: int) -> Shapes:
        return {name: ((size, *shape), dtype) for name, (shape, dtype) in self._spec.inputs.items()}


class PackedCalls(EncoderCalls):
    """Items of any number of patches, one behind the other; each device encodes all of them."""

    def __init__(self, spec: PackedEncoderSpec, *places: Any) -> None:
        super().__init__(*places)
        self._spec = spec

    def num_outputs(self, size: int) -> int:
        """Return the embeddings of `size` patches."""
        return size // self._spec.patches_per_token

    def sharding(self, size: int) -> Sharding:
        """Have a pack whole everywhere: its cuts are not those of its images."""
        return self._placement.replicated

    def gather(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
        """Do nothing: it is whole."""
        return x

    def fill(
        self, items: Sequence[EncoderItem], rows: Sequence[np.ndarray]
    ) -> Iterator[EncoderCall]:
        """Pack the items into as few calls as first-fit finds."""
        per_token = self._spec.patches_per_token
        sizes = [len(part) * per_token for part in rows]
        for bucket, numbers in plan_calls(sizes, self._buckets.encode):
            call = self.empty(bucket)
            count = sum(sizes[n] for n in numbers)
            call.inputs["segment_ids"][:] = make_segment_ids([sizes[n] for n in numbers], bucket)
            call.dst_rows[: count // per_token] = np.concatenate([rows[n] for n in numbers])
            for name in self._spec.inputs:
                parts = [items[n].units[name] for n in numbers]
                np.concatenate(parts, out=call.inputs[name][:count])
            yield call

    def empty(self, bucket: int) -> EncoderCall:
        """Return a call of padding alone, which is a segment of its own."""
        call = super().empty(bucket)
        call.inputs["segment_ids"][:] = PADDING_SEGMENT
        return call

    def _shapes(self, size: int) -> Shapes:
        rows = {name: ((size, *shape), dtype) for name, (shape, dtype) in self._spec.inputs.items()}
        return rows | {"segment_ids": ((size,), "int32")}


def make_encoder_calls(
    spec: EncoderSpec | PackedEncoderSpec, buckets: Buckets, placement: Placement, num_rows: int
) -> EncoderCalls:
    """Return how the items of a model with `spec` are encoded."""
    if isinstance(spec, PackedEncoderSpec):
        return PackedCalls(spec, buckets, placement, num_rows)
    return UnitCalls(spec, buckets, placement, num_rows)


# ---- sizes ---------------------------------------------------------------------------------------


def largest_item(spec: EncoderSpec | PackedEncoderSpec, max_model_len: int) -> int:
    """Return the most embeddings that are encoded at once: a unit's, or an item's in a prompt."""
    if isinstance(spec, PackedEncoderSpec):
        return max(1, min(spec.max_patches // spec.patches_per_token, max_model_len))
    return spec.tokens_per_unit


def count_units(spec: EncoderSpec | PackedEncoderSpec, encoder_budget: int) -> int:
    """Return the units that a step may encode; none of a pack."""
    is_packed = isinstance(spec, PackedEncoderSpec)
    return 0 if is_packed else encoder_budget // spec.tokens_per_unit


def choose_patches(
    spec: EncoderSpec | PackedEncoderSpec, encoder_budget: int, max_model_len: int
) -> tuple[int, ...]:
    """Return the sizes of packed calls, for a budget in embeddings; none of units."""
    if not isinstance(spec, PackedEncoderSpec):
        return ()
    return patch_buckets(
        largest_item=largest_item(spec, max_model_len) * spec.patches_per_token,
        encoder_budget=encoder_budget * spec.patches_per_token,
        patches_per_token=spec.patches_per_token,
    )
