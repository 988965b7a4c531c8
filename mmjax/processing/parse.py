"""The user's media, in any accepted form -> items."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmjax.errors import RequestValueError
from mmjax.processing.items import (
    EmbeddingItems,
    ImageEmbeddingItems,
    ImageProcessorItems,
    ImageSize,
    ModalityDataItems,
    MultiModalDataItems,
    ProcessorBatchItems,
)
from mmjax.processing.media import MediaLimits, as_numpy, is_array_like
from mmjax.processing.parse_image import parse_image
from mmjax.processing.uuids import MultiModalUUIDDict, parse_mm_uuids, validate_mm_uuids

__all__ = [
    "EmbeddingItems",
    "ImageEmbeddingItems",
    "ImageProcessorItems",
    "ImageSize",
    "ModalityDataItems",
    "MultiModalDataDict",
    "MultiModalDataItems",
    "MultiModalDataParser",
    "MultiModalUUIDDict",
    "ProcessorBatchItems",
    "parse_mm_uuids",
    "validate_mm_uuids",
]

MultiModalDataDict = Mapping[str, Any]
"""Per modality, one item or a list of items, as the user gives them."""


class MultiModalDataParser:
    """Turns the user's media into items; families that take more override `_get_subparsers`."""

    def __init__(
        self, *, limits: MediaLimits | None = None, expected_hidden_size: int | None = None
    ) -> None:
        self.limits = limits or MediaLimits()
        self.expected_hidden_size = expected_hidden_size

    @staticmethod
    def is_embeddings(data: object) -> bool:
        """Return whether `data` holds embeddings: a 3-D float array, or a list of 2-D arrays.

        A numpy array never does, nor a 3-D array that looks like a picture.
        """
        if isinstance(data, list | tuple) and data:
            return _is_foreign_array(data[0]) and len(data[0].shape) == 2
        shape: tuple[int, ...] = getattr(data, "shape", ())
        return _is_foreign_array(data) and len(shape) == 3 and not {shape[0], shape[-1]} & {1, 3, 4}

    def _get_subparsers(self) -> Mapping[str, Callable[[Any], ModalityDataItems | None]]:
        return {"image": self._parse_image_data}

    def parse_mm_data(self, mm_data: MultiModalDataDict) -> MultiModalDataItems:
        """Parse every modality; one whose data is None is dropped, an empty list stays."""
        subparsers = self._get_subparsers()
        mm_items = MultiModalDataItems()
        for modality, data in mm_data.items():
            if modality not in subparsers:
                known = ", ".join(f"`{name}`" for name in subparsers)
                raise RequestValueError(
                    f"Unsupported modality: {modality}; this model takes {known}",
                    param="multi_modal_data",
                )
            items = subparsers[modality](data)
            if items is not None:
                mm_items[modality] = items
        return mm_items

    def _parse_image_data(self, data: Any) -> ModalityDataItems | None:
        if data is None:
            return None
        if self.is_embeddings(data):
            return ImageEmbeddingItems(data, expected_hidden_size=self.expected_hidden_size)
        if is_array_like(data) and len(data.shape) == 4:
            entries: Sequence[Any] = list(as_numpy(data))
        elif isinstance(data, list | tuple):
            entries = data
        else:
            entries = [data]
        return ImageProcessorItems(
            [
                parse_image(entry, self.limits, param=f"multi_modal_data.image[{index}]")
                for index, entry in enumerate(entries)
            ]
        )


def _is_foreign_array(data: Any) -> bool:
    """Whether `data` is an array of a library other than numpy (jax, torch)."""
    return type(data).__module__.partition(".")[0] != "numpy" and is_array_like(data)
