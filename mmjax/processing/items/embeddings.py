"""Items that the user has encoded already: embeddings, alone or with what else an item needs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.processing.items.items import ModalityDataItems, only_cached
from mmjax.processing.media.decode import as_numpy, is_array_like
from mmjax.processing.tensors.fields import MultiModalFieldConfig, MultiModalFlatField
from mmjax.processing.tensors.inputs import (
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    group_and_batch_mm_items,
)

FieldsFactory = Callable[[Mapping[str, Any]], Mapping[str, MultiModalFieldConfig]]
"""Says of a dict of tensors how each of them divides among items."""

EMBEDS_DTYPES = ("float32", "bfloat16", "float16", "float64")

_MISFITS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class EmbeddingItems(ModalityDataItems):
    """Precomputed embeddings: one array, whose first axis is the items, or a list of 2-D arrays."""

    def __init__(
        self, data: Any, modality: str | None = None, expected_hidden_size: int | None = None
    ) -> None:
        super().__init__(data, modality)
        modality = self.modality
        entries = data if isinstance(data, list | tuple) else [data]
        allowed = (2,) if isinstance(data, list | tuple) else (2, 3)
        given = [(index, entry) for index, entry in enumerate(entries) if entry is not None]
        for index, entry in given:
            if not is_array_like(entry):
                raise RequestTypeError(
                    f"{modality} embeddings have `{type(entry).__name__}` at index {index}; "
                    "they must be arrays",
                    param="multi_modal_data",
                )
            if len(entry.shape) not in allowed:
                raise RequestValueError(
                    f"{modality} embeddings have shape {tuple(entry.shape)} at index {index}; "
                    "they must be 2D (list entries) or 3D (one array)",
                    param="multi_modal_data",
                )
        for index, entry in given:
            check_embeds(entry, expected_hidden_size, f"{modality} embeddings {index}")

    def get(self, index: int) -> Any:
        return self.data[index]

    def get_feature_size(self, index: int) -> int:
        """Return how many rows an item has."""
        item = self.get(index)
        if item is None:
            raise only_cached(self.modality, index, "size")
        return len(item)

    def select(self, indices: Sequence[int]) -> "EmbeddingItems":
        # A list, but for one 2-D array: its items have one axis, and stay rows of an array.
        selected = super().select(indices)
        if selected.data and not isinstance(self.data, list | tuple) and len(self.data.shape) == 2:
            selected.data = self.data[np.asarray(indices)]
        return selected

    def get_passthrough_data(self) -> Mapping[str, Any]:
        if isinstance(self.data, list | tuple) and all(entry is None for entry in self.data):
            return {}  # uuids alone: a cache has them, or nobody
        return {f"{self.modality}_embeds": self.data}


class ImageEmbeddingItems(EmbeddingItems):
    modality = "image"


class VideoEmbeddingItems(EmbeddingItems):
    modality = "video"


class AudioEmbeddingItems(EmbeddingItems):
    modality = "audio"


def check_embeds(embeds: Any, expected_width: int | None, name: str) -> None:
    """Refuse embeddings that have not the model's width, or that are not finite floats."""
    if expected_width is not None and embeds.shape[-1] != expected_width:
        raise RequestValueError(
            f"{name}: hidden dimension mismatch: got {embeds.shape[-1]}, the model has "
            f"{expected_width}",
            param="multi_modal_data",
        )
    dtype = str(embeds.dtype).removeprefix("torch.")
    if dtype not in EMBEDS_DTYPES:
        raise RequestTypeError(
            f"{name}: the dtype is {dtype}; give one of {', '.join(EMBEDS_DTYPES)}",
            param="multi_modal_data",
        )
    try:
        values = as_numpy(embeds)
    # Sparse, quantised and device-less arrays: their libraries raise what they like.
    except Exception as error:
        raise RequestTypeError(
            f"{name}: a `{type(embeds).__name__}` that cannot be read: {error}; give a dense array",
            param="multi_modal_data",
        ) from error
    if not np.isfinite(values).all():
        raise RequestValueError(
            f"{name}: some values are NaN or infinite; give finite ones",
            param="multi_modal_data",
        )


class DictEmbeddingItems(ModalityDataItems):
    """Embeddings that come with more: `{"image_embeds": ..., "image_grid_thw": ...}`.

    Args:
        data: Tensors by name; names that no field has are left alone.
        modality: Whose items they are.
        required_fields: Names that `data` must have.
        fields_factory: Says how the tensors divide; it must know every field.
        optional_fields: Names that `data` may have.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        modality: str,
        required_fields: Collection[str],
        fields_factory: FieldsFactory,
        optional_fields: Collection[str] = (),
    ) -> None:
        super().__init__(data, modality)
        self.required_fields = frozenset(required_fields)
        self.optional_fields = frozenset(optional_fields)
        self.fields_factory = fields_factory
        self._check_keys(data)
        self.fields_config, self._items = self._split(data)

    def _check_keys(self, data: Mapping[str, Any]) -> None:
        if not self.required_fields:
            raise ValueError(f"{self.modality} embeddings need at least one required field")
        missing = sorted(key for key in self.required_fields if data.get(key) is None)
        if missing:
            raise RequestValueError(
                f"{self.modality} embeddings should contain the fields "
                f"{sorted(self.required_fields)}, but only have {sorted(data)}; "
                f"give {missing} too",
                param="multi_modal_data",
            )

    def _split(
        self, data: Mapping[str, Any]
    ) -> tuple[Mapping[str, MultiModalFieldConfig], list[MultiModalKwargsItem]]:
        # The sizes that the factory reads are the user's: they may be of any shape.
        try:
            config = self.fields_factory(data)
        except _MISFITS as error:
            raise self._misfit(error) from error
        unknown = (self.required_fields | self.optional_fields) - config.keys()
        if unknown:
            raise ValueError(
                f"the fields factory of {self.modality} embeddings knows {sorted(config)}; "
                f"it must know {sorted(unknown)} too"
            )
        try:
            declared = {key: config[key] for key in config if key in data}
            items = MultiModalKwargsItems.from_hf_inputs(data, declared)
            for key, one in declared.items():
                _check_covered(key, one, data[key])
        except _MISFITS as error:
            raise self._misfit(error) from error
        count = len(items.get(self.modality, ()))
        return config, [items.get_item(self.modality, index) for index in range(count)]

    def _misfit(self, error: Exception) -> RequestValueError:
        return RequestValueError(
            f"{self.modality} embeddings do not divide into items: {error}; "
            "give tensors that fit each other",
            param="multi_modal_data",
        )

    def get_count(self) -> int:
        return len(self._items)

    def get(self, index: int) -> dict[str, Any]:
        return self._items[index].get_data()

    def select(self, indices: Sequence[int]) -> "DictEmbeddingItems":
        chosen = [self._items[index] for index in indices]
        batches = [kwargs for _, kwargs in group_and_batch_mm_items(chosen)]
        none_of = {key: self.data[key][:0] for key in self.fields_config if key in self.data}
        data = batches[0] if batches else none_of
        return type(self)(
            data, self.modality, self.required_fields, self.fields_factory, self.optional_fields
        )

    def get_passthrough_data(self) -> Mapping[str, Any]:
        return self.data


def _check_covered(key: str, config: MultiModalFieldConfig, data: Any) -> None:
    """Refuse a flat tensor that has fewer or more rows than its items' sizes add up to."""
    field = config.field
    if not isinstance(field, MultiModalFlatField):
        return
    stops = [
        part.stop if isinstance(part, slice) else part[field.dim].stop for part in field.slices
    ]
    num_rows = data.shape[field.dim] if is_array_like(data) else len(data)
    if None not in stops and max(stops, default=0) != num_rows:
        raise ValueError(f"`{key}` has {num_rows} rows, its items have {max(stops, default=0)}")
