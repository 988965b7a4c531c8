"""What processing hands to the engine: placeholder ranges, processed items, features.

Knows nothing of caches, of the engine, or of where arrays will live: all tensors are numpy.
"""

from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmjax.processing.fields import (
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalSharedField,
    NestedTensors,
    nested_tensors_equal,
)


@dataclass(frozen=True, slots=True, eq=False)
class PlaceholderRange:
    """Where an item's placeholder stands in the prompt.

    `offset=3, length=4, is_embed=0 1 1 0`: tokens 3 to 6 belong to the item, and the item's
    embeddings replace those of tokens 4 and 5.
    """

    offset: int
    length: int
    is_embed: np.ndarray | None = None
    """bool[length]; None: every position takes an embedding."""

    def get_num_embeds(self) -> int:
        """Return how many positions take an embedding."""
        return self.length if self.is_embed is None else int(np.count_nonzero(self.is_embed))

    @property
    def embeds_cumsum(self) -> list[int] | None:
        """Number of embeddings up to and including each position, or None without a mask."""
        return None if self.is_embed is None else np.cumsum(self.is_embed).tolist()

    def get_embeds_indices_in_range(self, start_idx: int, end_idx: int) -> tuple[int, int]:
        """Map a half-open range of the placeholder's own positions to rows of its embeddings."""
        if self.is_embed is None:
            return start_idx, end_idx
        start = int(np.count_nonzero(self.is_embed[:start_idx]))
        return start, start + int(np.count_nonzero(self.is_embed[start_idx:end_idx]))

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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlaceholderRange):
            return NotImplemented
        if (self.offset, self.length) != (other.offset, other.length):
            return False
        return nested_tensors_equal(self.is_embed, other.is_embed)

    def __hash__(self) -> int:
        return hash((self.offset, self.length))


MultiModalPlaceholders = Mapping[str, Sequence[PlaceholderRange]]


class MultiModalKwargsItem(UserDict[str, MultiModalFieldElem]):
    """The processed tensors of one item, by the name that the HF processor gives them."""

    @staticmethod
    def dummy(nbytes: int = 1) -> "MultiModalKwargsItem":
        """Return an item that only has a size; for tests of caches and transport."""
        elem = MultiModalFieldElem(
            data=np.zeros(nbytes, dtype=np.uint8), field=MultiModalSharedField(batch_size=1)
        )
        return MultiModalKwargsItem({"dummy": elem})

    def own_arrays(self) -> "MultiModalKwargsItem":
        """Return the item without views: one that is kept must not keep its batch alive."""
        return MultiModalKwargsItem(
            {
                key: replace(elem, data=elem.data.copy())
                if isinstance(elem.data, np.ndarray) and elem.data.base is not None
                else elem
                for key, elem in self.items()
            }
        )

    def get_data(self) -> dict[str, NestedTensors]:
        """Return the tensors alone."""
        return {key: elem.data for key, elem in self.items()}


class MultiModalKwargsItems(UserDict[str, Sequence[MultiModalKwargsItem | None]]):
    """The processed items of one request, by modality, in the user's order.

    An entry is None where a cache on the engine's side holds the tensors.
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
            elems = config.build_elems(key, data)
            if elems:
                elems_by_modality.setdefault(config.modality, {})[key] = elems
        return MultiModalKwargsItems(
            {
                modality: _items_of_modality(modality, elems_by_key)
                for modality, elems_by_key in elems_by_modality.items()
            }
        )

    def __getitem__(self, modality: str) -> Sequence[MultiModalKwargsItem | None]:
        if modality not in self.data:
            available = ", ".join(f"`{name}`" for name in self.data) or "none"
            raise KeyError(f"modality `{modality}` not found; available: {available}")
        return self.data[modality]

    def require_data(self) -> "MultiModalKwargsItems":
        """Return self; raise RuntimeError where an item has no tensors."""
        for modality, items in self.items():
            for index, item in enumerate(items):
                if item is None:
                    raise RuntimeError(f"Found empty mm_items[{modality!r}][{index}]")
        return self

    def get_data(self) -> dict[str, NestedTensors]:
        """Merge each modality into one batch; return a flat dict over modalities."""
        batches: dict[str, NestedTensors] = {}
        for modality, items in self.require_data().items():
            groups = list(group_and_batch_mm_items([item for item in items if item is not None]))
            if len(groups) > 1:
                raise RuntimeError(f"{modality} items cannot be merged into a single batch")
            for _, kwargs in groups:
                batches.update(kwargs)
        return batches


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

    data: MultiModalKwargsItem | None
    """None where a cache on the engine's side holds the tensors under `mm_hash`."""
    modality: str
    identifier: str
    """Names the item's encoder output (differs from `mm_hash` only under a tower's LoRA)."""
    mm_position: PlaceholderRange
    mm_hash: str | None = None

    @staticmethod
    def gather_kwargs(
        features: Iterable["MultiModalFeatureSpec"], keys: Iterable[str]
    ) -> dict[str, list[NestedTensors]]:
        """Collect each key's tensors over `features`, skipping absent items and keys."""
        gathered: dict[str, list[NestedTensors]] = {key: [] for key in keys}
        for feature in features:
            for key, tensors in gathered.items():
                if feature.data is not None and key in feature.data:
                    tensors.append(feature.data[key].data)
        return gathered


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


def _fit_one_batch(first: MultiModalKwargsItem, other: MultiModalKwargsItem) -> bool:
    if first.keys() != other.keys():
        return False
    for key, elem in first.items():
        if type(elem.field) is not type(other[key].field):
            return False
        if isinstance(elem.field, MultiModalSharedField) and elem != other[key]:
            return False
    return True
