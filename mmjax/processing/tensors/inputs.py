"""What processing hands to the engine: placeholder ranges, processed items, features.

Knows nothing of caches, of the engine, or of where arrays will live: all tensors are numpy.
"""

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np

from mmjax.processing.tensors.fields import (
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalSharedField,
    NestedTensors,
    tensors_as_numpy,
)


class PlaceholderRange(
    msgspec.Struct, frozen=True, eq=False, dict=True, forbid_unknown_fields=True
):
    """Where an item's placeholder stands in the prompt.

    `offset=3, length=4, is_embed=0 1 1 0`: tokens 3 to 6 belong to the item, and the item's
    embeddings replace those of tokens 4 and 5.
    """

    offset: int
    length: int
    is_embed: np.ndarray | None = None
    """bool[length]; None: every position takes an embedding."""

    # Counted once: the scheduler asks for windows of one range at every step.
    @cached_property
    def embeds_cumsum(self) -> list[int] | None:
        """Number of embeddings up to and including each position, or None without a mask."""
        return None if self.is_embed is None else np.cumsum(self.is_embed).tolist()

    def get_num_embeds(self) -> int:
        """Return how many positions take an embedding."""
        return self._count_before(self.length)

    def get_embeds_indices_in_range(self, start_idx: int, end_idx: int) -> tuple[int, int]:
        """Map a half-open range of the placeholder's own positions to rows of its embeddings."""
        if self.is_embed is None:
            return start_idx, end_idx
        return self._count_before(start_idx), self._count_before(end_idx)

    def _count_before(self, position: int) -> int:
        cumsum = self.embeds_cumsum
        if cumsum is None:
            return position
        return cumsum[min(position, len(cumsum)) - 1] if position > 0 and cumsum else 0

    def extract_embeds_range(self) -> list[tuple[int, int]]:
        """Return the runs of positions that take embeddings: inclusive, in prompt coordinates."""
        if self.is_embed is None:
            return [(self.offset, self.offset + self.length - 1)]
        edges = np.diff(np.concatenate(([0], self.is_embed.astype(np.int8), [0])))
        starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        return [
            (self.offset + int(start), self.offset + int(end) - 1)
            for start, end in zip(starts, ends, strict=True)
        ]

    def get_longest_run(self) -> int:
        """Return the length of the longest run of positions that take embeddings."""
        runs = self.extract_embeds_range()
        return max((last + 1 - first for first, last in runs), default=0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlaceholderRange):
            return NotImplemented
        if (self.offset, self.length) != (other.offset, other.length):
            return False
        if self.is_embed is None or other.is_embed is None:
            return self.is_embed is other.is_embed
        is_same_dtype = self.is_embed.dtype == other.is_embed.dtype
        return is_same_dtype and np.array_equal(self.is_embed, other.is_embed)

    def __hash__(self) -> int:
        return hash((self.offset, self.length))


MultiModalPlaceholders = Mapping[str, Sequence[PlaceholderRange]]


class ItemData:
    """What the engine gets of an item: its tensors, or where they lie."""

    __slots__ = ()


class SharedItem(
    ItemData,
    msgspec.Struct,
    array_like=True,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
):
    """In the place of tensors that lie in shared memory: names the item's file.

    Only P0 makes one: no field of a request becomes one.
    """

    mm_hash: str
    """The item's, under which alone the file may be read."""
    number: int
    """The file's name. A number is used once."""
    layout: bytes
    """msgpack: names, dtypes, shapes, offsets, fields."""


class MultiModalKwargsItem(UserDict[str, MultiModalFieldElem], ItemData):
    """The processed tensors of one item, by the name that the HF processor gives them."""

    is_from_disk = False
    """Whether a former process had processed it."""

    @staticmethod
    def dummy(nbytes: int = 1) -> "MultiModalKwargsItem":
        """Return an item that only has a size; for tests of caches and transport."""
        elem = MultiModalFieldElem(
            data=np.zeros(nbytes, dtype=np.uint8), field=MultiModalSharedField(batch_size=1)
        )
        return MultiModalKwargsItem({"dummy": elem})

    def own_arrays(self) -> "MultiModalKwargsItem":
        """Return the item without views: one that is kept must not keep its batch alive."""
        return self._with_each(_own)

    def read_only(self) -> "MultiModalKwargsItem":
        """Return the item with views that cannot be written: a cache may have the arrays, too."""
        return self._with_each(_read_only)

    def _with_each(self, change: Callable[[np.ndarray], np.ndarray]) -> "MultiModalKwargsItem":
        return MultiModalKwargsItem(
            {key: replace(elem, data=_change(elem.data, change)) for key, elem in self.items()}
        )

    def get_data(self) -> dict[str, NestedTensors]:
        """Return the tensors alone."""
        return {key: elem.data for key, elem in self.items()}


def _change(data: NestedTensors, change: Callable[[np.ndarray], np.ndarray]) -> NestedTensors:
    if isinstance(data, list):
        return [_change(entry, change) for entry in data]
    if isinstance(data, tuple):
        return tuple(_change(entry, change) for entry in data)
    return change(data) if isinstance(data, np.ndarray) else data


def _read_only(data: np.ndarray) -> np.ndarray:
    view = data.view()
    view.flags.writeable = False
    return view


def _own(data: np.ndarray) -> np.ndarray:
    if data.base is None:
        return data
    # A batch of one item is that item: nothing else is kept alive.
    is_whole = isinstance(data.base, np.ndarray) and data.base.nbytes == data.nbytes
    return data if is_whole else data.copy()


class MultiModalKwargsItems(UserDict[str, Sequence[Any]]):
    """The processed items of one request, by modality, in the user's order.

    An entry is a `MultiModalKwargsItem`; or a `SharedItem`, where its tensors lie in shared memory;
    or None, where a cache on the engine's side holds them.
    """

    @staticmethod
    def from_hf_inputs(
        hf_inputs: Mapping[str, Any], config_by_key: Mapping[str, MultiModalFieldConfig]
    ) -> "MultiModalKwargsItems":
        """Split the HF processor's batch into items.

        Keys without a config and configs without data are ignored.
        """
        elems_by_modality: dict[str, dict[str, Sequence[MultiModalFieldElem]]] = {}
        for key, config in config_by_key.items():
            data = hf_inputs.get(key)
            if data is None:
                continue
            elems = config.build_elems(key, tensors_as_numpy(data))
            if elems:
                elems_by_modality.setdefault(config.modality, {})[key] = elems
        return MultiModalKwargsItems(
            {
                modality: _items_of_modality(modality, elems_by_key)
                for modality, elems_by_key in elems_by_modality.items()
            }
        )

    def __getitem__(self, key: str) -> Sequence[Any]:
        if key not in self.data:
            available = ", ".join(f"`{name}`" for name in self.data) or "none"
            raise KeyError(f"modality `{key}` not found; available: {available}")
        return self.data[key]

    def get_item(self, modality: str, index: int) -> MultiModalKwargsItem:
        """Return an item's tensors; raise RuntimeError where they are not here."""
        return _require_tensors(self[modality][index], f"mm_items[{modality!r}][{index}]")

    def get_data(self) -> dict[str, NestedTensors]:
        """Merge each modality into one batch; return a flat dict over modalities."""
        batches: dict[str, NestedTensors] = {}
        for modality, items in self.items():
            own = [self.get_item(modality, index) for index in range(len(items))]
            groups = list(group_and_batch_mm_items(own))
            if len(groups) > 1:
                raise RuntimeError(f"{modality} items cannot be merged into a single batch")
            for _, kwargs in groups:
                batches.update(kwargs)
        return batches


def _require_tensors(item: ItemData | None, name: str) -> MultiModalKwargsItem:
    if item is None:
        raise RuntimeError(f"Found empty {name}")
    if not isinstance(item, MultiModalKwargsItem):
        raise RuntimeError(f"{name} lies in shared memory, and its handle was not opened")
    return item


def _items_of_modality(
    modality: str, elems_by_key: Mapping[str, Sequence[MultiModalFieldElem]]
) -> list[MultiModalKwargsItem]:
    sizes = {key: len(elems) for key, elems in elems_by_key.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"Cannot merge different batch sizes for modality={modality!r}! {sizes=}")
    return [
        MultiModalKwargsItem({key: elems[index] for key, elems in elems_by_key.items()})
        for index in range(next(iter(sizes.values())))
    ]


@dataclass(slots=True, kw_only=True)
class MultiModalFeatureSpec:
    """One item of one request as the engine gets it."""

    data: ItemData | None
    """None where a cache on the engine's side holds the tensors under `mm_hash`."""
    modality: str
    identifier: str
    """Names the item's encoder output (differs from `mm_hash` only under a tower's LoRA)."""
    mm_position: PlaceholderRange
    mm_hash: str | None = None

    @property
    def tensors(self) -> MultiModalKwargsItem | None:
        """What `data` holds once it is resolved; RuntimeError where it is still a handle."""
        return None if self.data is None else _require_tensors(self.data, self.identifier)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalInputs:
    """A processed prompt."""

    prompt_token_ids: list[int]
    """With every placeholder in place."""
    mm_kwargs: MultiModalKwargsItems
    mm_hashes: Mapping[str, Sequence[str]]
    """Per modality, one hash per item, in the user's order."""
    mm_placeholders: MultiModalPlaceholders
    """Per modality, one range per item, in the user's order."""
    prompt: str | None = None
    """The prompt as text, where it came as text."""
    cache_salt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    """With every placeholder in place, where the model has an encoder for text; None elsewhere."""

    def to_features(self) -> list[MultiModalFeatureSpec]:
        """Return the items as features, sorted by their place in the prompt."""
        return [
            MultiModalFeatureSpec(
                data=self.mm_kwargs[modality][index],
                modality=modality,
                identifier=self.mm_hashes[modality][index],
                mm_position=self.mm_placeholders[modality][index],
                mm_hash=self.mm_hashes[modality][index],
            )
            for modality, index in argsort_mm_positions(self.mm_placeholders)
        ]


def argsort_mm_positions(mm_positions: MultiModalPlaceholders) -> list[tuple[str, int]]:
    """Return (modality, index) of every item, sorted by its offset in the prompt (stable)."""
    places = [
        (modality, index, position.offset)
        for modality, positions in mm_positions.items()
        for index, position in enumerate(positions)
    ]
    return [(modality, index) for modality, index, _ in sorted(places, key=lambda row: row[2])]


def group_and_batch_mm_items(
    items: Sequence[MultiModalKwargsItem],
) -> Iterator[tuple[int, dict[str, NestedTensors]]]:
    """Merge runs of consecutive items that fit one batch; yield (number of items, tensors)."""
    start = 0
    for stop in range(1, len(items) + 1):
        if stop < len(items) and _fit_one_batch(items[start], items[stop]):
            continue
        group = items[start:stop]
        yield (
            len(group),
            {
                key: elem.field.reduce_data([item[key] for item in group])
                for key, elem in group[0].items()
            },
        )
        start = stop


def group_and_batch_mm_kwargs(
    mm_kwargs: Iterable[tuple[str, MultiModalKwargsItem]],
) -> Iterator[tuple[str, int, dict[str, NestedTensors]]]:
    """Merge runs of consecutive items of one modality; yield (modality, number, tensors)."""
    for modality, run in groupby(mm_kwargs, key=itemgetter(0)):
        for num_items, kwargs in group_and_batch_mm_items([item for _, item in run]):
            yield modality, num_items, kwargs


def _fit_one_batch(first: MultiModalKwargsItem, other: MultiModalKwargsItem) -> bool:
    if first.keys() != other.keys():
        return False
    for key, elem in first.items():
        if type(elem.field) is not type(other[key].field):
            return False
        is_shared = isinstance(elem.field, MultiModalSharedField) and elem is not other[key]
        if is_shared and elem != other[key]:
            return False
    return True
