"""How a batch that an HF processor returns splits into items, and how items merge into a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np

from mmjax.processing.media.decode import as_numpy, is_array_like

NestedTensors = Any
"""A numpy array, or lists of them nested to any depth."""


def tensors_as_numpy(data: Any, *, copy: bool = False) -> NestedTensors:
    """Return arrays of any library, in lists to any depth, as numpy; in place, unless `copy`."""
    if isinstance(data, list):
        return [tensors_as_numpy(entry, copy=copy) for entry in data]
    if isinstance(data, tuple):
        return tuple(tensors_as_numpy(entry, copy=copy) for entry in data)
    if not is_array_like(data):
        return data
    return np.array(as_numpy(data)) if copy else as_numpy(data)


def nested_tensors_equal(a: NestedTensors, b: NestedTensors, *, check_dtype: bool = True) -> bool:
    """Compare two structures of arrays; a list never equals a tuple or an array."""
    if is_array_like(a) or is_array_like(b):
        if not (is_array_like(a) and is_array_like(b)):
            return False
        a, b = as_numpy(a), as_numpy(b)
        return (not check_dtype or a.dtype == b.dtype) and np.array_equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(
            nested_tensors_equal(x, y, check_dtype=check_dtype) for x, y in zip(a, b, strict=True)
        )
    return bool(a == b)


def batched_tensors_equal(a: dict[str, NestedTensors], b: dict[str, NestedTensors]) -> bool:
    """Return whether every key of `a` is in `b` with equal tensors (`b` may have more)."""
    return all(key in b and nested_tensors_equal(a[key], b[key]) for key in a)


class BaseMultiModalField(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True
):
    """How one tensor of a batch divides among items; itself what a message has of it."""

    keep_on_cpu: bool = False
    """Whether the engine reads this tensor on the host only."""

    def build_elems(
        self, modality: str, key: str, data: NestedTensors
    ) -> Sequence["MultiModalFieldElem"]:
        """Divide a batch into one element per item."""
        raise NotImplementedError

    def _merge(self, batch: list[NestedTensors]) -> NestedTensors:
        raise NotImplementedError

    def reduce_data(self, elems: Sequence["MultiModalFieldElem"]) -> NestedTensors:
        """Merge items' elements into a batch; all must divide by the same kind of field.

        The batch stays on the host: where it goes, `keep_on_cpu` says to the engine.
        """
        kinds = {type(elem.field) for elem in elems}
        if len(kinds) > 1:
            names = sorted(kind.__name__ for kind in kinds)
            raise ValueError(f"Cannot merge different field types: {', '.join(names)}")
        return self._merge([elem.data for elem in elems])


@dataclass(frozen=True, slots=True, eq=False)
class MultiModalFieldElem:
    """One item's part of one tensor."""

    data: NestedTensors
    field: BaseMultiModalField

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiModalFieldElem):
            return NotImplemented
        return type(self.field) is type(other.field) and nested_tensors_equal(self.data, other.data)

    __hash__ = None  # equal by arrays, which do not hash


class MultiModalBatchedField(BaseMultiModalField, frozen=True, kw_only=True):
    """Item i is row i of the first axis."""

    def build_elems(
        self, modality: str, key: str, data: NestedTensors
    ) -> list[MultiModalFieldElem]:
        return [
            MultiModalFieldElem(np.asarray(row) if isinstance(data, np.ndarray) else row, self)
            for row in data
        ]

    def _merge(self, batch: list[NestedTensors]) -> NestedTensors:
        if all(isinstance(row, np.ndarray) for row in batch):
            if len(batch) == 1:
                return batch[0][None]
            if len({(row.shape, row.dtype) for row in batch}) == 1:
                return np.stack(batch)
        return batch


class MultiModalFlatField(BaseMultiModalField, frozen=True, kw_only=True):
    """Item i is a slice of the concatenation of all items."""

    slices: Sequence[Any]
    """For each item a slice, or one for each axis; empty in the field of one item's element."""
    dim: int = 0

    def build_elems(
        self, modality: str, key: str, data: NestedTensors
    ) -> list[MultiModalFieldElem]:
        if any(not isinstance(part, slice) for part in self.slices) and not isinstance(
            data, np.ndarray
        ):
            raise ValueError(f"`{key}` is a list, but its slices run over several axes")
        # The others' slices say nothing of an item, and would travel with each of them.
        field = msgspec.structs.replace(self, slices=())
        return [
            MultiModalFieldElem(data[part if isinstance(part, slice) else tuple(part)], field)
            for part in self.slices
        ]

    def _merge(self, batch: list[NestedTensors]) -> NestedTensors:
        if not all(isinstance(part, np.ndarray) for part in batch):
            if self.dim != 0:
                raise ValueError(f"lists merge along axis 0 alone, not along axis {self.dim}")
            return [tensor for part in batch for tensor in part]
        if len(batch) <= 1:
            return batch[0] if batch else batch
        if len({part.ndim for part in batch}) > 1:
            shapes = ", ".join(str(part.shape) for part in batch)
            raise ValueError(f"arrays of the shapes {shapes} have no axis in common to merge along")
        dim = self.dim % batch[0].ndim
        others = {part.shape[:dim] + part.shape[dim + 1 :] for part in batch}
        return np.concatenate(batch, axis=dim) if len(others) == 1 else _merge_padded(batch, dim)


class MultiModalSharedField(BaseMultiModalField, frozen=True, kw_only=True):
    """Every item has the whole tensor."""

    batch_size: int

    def build_elems(
        self, modality: str, key: str, data: NestedTensors
    ) -> list[MultiModalFieldElem]:
        return [MultiModalFieldElem(data, self)] * self.batch_size

    def _merge(self, batch: list[NestedTensors]) -> NestedTensors:
        return batch[0]


def _merge_padded(batch: Sequence[np.ndarray], dim: int) -> np.ndarray:
    """Concatenate along `dim`; every other axis is as long as the longest, filled with zeros."""
    shape = np.max([part.shape for part in batch], axis=0)
    shape[dim] = sum(part.shape[dim] for part in batch)
    merged = np.zeros(shape, np.result_type(*batch))
    start = 0
    for part in batch:
        place = [slice(0, length) for length in part.shape]
        place[dim] = slice(start, start + part.shape[dim])
        merged[tuple(place)] = part
        start += part.shape[dim]
    return merged


@dataclass(frozen=True, slots=True)
class MultiModalFieldConfig:
    """Says of one key of the HF processor's output: whose items it holds, and how it divides."""

    field: BaseMultiModalField
    modality: str

    @staticmethod
    def batched(modality: str, *, keep_on_cpu: bool = False) -> "MultiModalFieldConfig":
        """Item i is row i: `[items, ...]`."""
        return MultiModalFieldConfig(MultiModalBatchedField(keep_on_cpu=keep_on_cpu), modality)

    @staticmethod
    def flat(
        modality: str,
        slices: Sequence[slice] | Sequence[Sequence[slice]],
        dim: int = 0,
        *,
        keep_on_cpu: bool = False,
    ) -> "MultiModalFieldConfig":
        """Item i is `data[slices[i]]`."""
        field = MultiModalFlatField(slices=slices, dim=dim, keep_on_cpu=keep_on_cpu)
        return MultiModalFieldConfig(field, modality)

    @staticmethod
    def flat_from_sizes(
        modality: str, size_per_item: Any, dim: int = 0, *, keep_on_cpu: bool = False
    ) -> "MultiModalFieldConfig":
        """Item i is the next `size_per_item[i]` rows along `dim`."""
        sizes = as_numpy(size_per_item)
        if sizes.ndim != 1:
            raise ValueError(
                f"size_per_item should be a 1-D tensor, but its shape is {tuple(sizes.shape)}"
            )
        if sizes.size and (sizes.dtype.kind not in "iu" or sizes.min() < 0):
            raise ValueError(f"size_per_item should hold whole numbers from 0 on, not {sizes}")
        if dim < 0:
            raise ValueError(f"dim is {dim}; count axes from the first, which is 0")
        edges = pairwise(accumulate(sizes.tolist(), initial=0))
        slices = [(slice(None),) * dim + (slice(int(start), int(stop)),) for start, stop in edges]
        if dim == 0:
            return MultiModalFieldConfig.flat(
                modality, [part for (part,) in slices], keep_on_cpu=keep_on_cpu
            )
        return MultiModalFieldConfig.flat(modality, slices, dim, keep_on_cpu=keep_on_cpu)

    @staticmethod
    def shared(
        modality: str, batch_size: int, *, keep_on_cpu: bool = False
    ) -> "MultiModalFieldConfig":
        """Every item has the whole tensor."""
        field = MultiModalSharedField(batch_size=batch_size, keep_on_cpu=keep_on_cpu)
        return MultiModalFieldConfig(field, modality)

    def build_elems(self, key: str, data: NestedTensors) -> Sequence[MultiModalFieldElem]:
        """Divide a batch into one element per item."""
        return self.field.build_elems(self.modality, key, data)
