"""The user's media, in any accepted form -> items: counted, sized, ready to hash and process."""

from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from mmjax.errors import RequestError, RequestKeyError, RequestTypeError, RequestValueError
from mmjax.processing.media import (
    MediaLimits,
    MediaWithBytes,
    as_numpy,
    check_image_size,
    convert_to_rgb,
    image_from_array,
    is_array_like,
    load_image_bytes,
    load_image_path,
    load_image_url,
)

MultiModalDataDict = Mapping[str, Any]
"""Per modality, one item or a list of items, as the user gives them."""
MultiModalUUIDDict = Mapping[str, str | Sequence[str | None] | None]


class ImageSize(NamedTuple):
    width: int
    height: int


class ModalityDataItems(ABC):
    """The items of one modality of one request."""

    def __init__(self, data: Any, modality: str) -> None:
        self.data = data
        self.modality = modality

    def __repr__(self) -> str:
        return f"{type(self).__name__}(modality={self.modality!r}, len={len(self)})"

    def __len__(self) -> int:
        return self.get_count()

    def __getitem__(self, index: int) -> Any:
        return self.get(index)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get_all())

    @abstractmethod
    def get_count(self) -> int: ...

    @abstractmethod
    def get(self, index: int) -> Any:
        """Return an item as the HF processor takes it."""

    def get_all(self) -> list[Any]:
        return [self.get(index) for index in range(self.get_count())]

    def get_item_for_hash(self, index: int) -> Any:
        """Return what stands for the item's content: the encoded bytes where there are any."""
        return self.get(index)

    def get_all_items_for_hash(self) -> list[Any]:
        return [self.get_item_for_hash(index) for index in range(self.get_count())]

    @abstractmethod
    def select(self, indices: Sequence[int]) -> "ModalityDataItems":
        """Return the items at `indices` alone."""

    @abstractmethod
    def get_processor_data(self) -> Mapping[str, Any]:
        """Return what the HF processor receives."""

    @abstractmethod
    def get_passthrough_data(self) -> Mapping[str, Any]:
        """Return what goes round the HF processor (embeddings)."""


class ProcessorBatchItems(ModalityDataItems):
    """Items that the HF processor takes as a list; None where only a uuid was given."""

    def get_count(self) -> int:
        return len(self.data)

    def get(self, index: int) -> Any:
        item = self.data[index]
        return item.media if isinstance(item, MediaWithBytes) else item

    def get_item_for_hash(self, index: int) -> Any:
        return self.data[index]

    def select(self, indices: Sequence[int]) -> "ProcessorBatchItems":
        return type(self)([self.data[index] for index in indices], self.modality)

    def get_processor_data(self) -> Mapping[str, Any]:
        return {f"{self.modality}s": self.get_all()}

    def get_passthrough_data(self) -> Mapping[str, Any]:
        return {}


class ImageProcessorItems(ProcessorBatchItems):
    def __init__(self, data: Sequence[Any], modality: str = "image") -> None:
        super().__init__(data, modality)

    def get_image_size(self, index: int) -> ImageSize:
        """Return (width, height); channels last wins where an array's layout is ambiguous."""
        image = self.get(index)
        if image is None:
            raise RequestValueError(
                f"image {index} was given by its uuid alone, so its size is cached, not known here",
                param="multi_modal_data",
            )
        if isinstance(image, Image.Image):
            return ImageSize(*image.size)
        shape = image.shape
        if shape[-1] in (1, 3, 4):
            return ImageSize(width=shape[1], height=shape[0])
        return ImageSize(width=shape[2], height=shape[1])


class EmbeddingItems(ModalityDataItems):
    """Precomputed embeddings: one 3-D array, or a list of 2-D arrays."""

    def __init__(self, data: Any, modality: str, expected_hidden_size: int | None = None) -> None:
        super().__init__(data, modality)
        entries = data if isinstance(data, list) else [data]
        allowed = (2,) if isinstance(data, list) else (2, 3)
        for entry in entries:
            if entry.ndim not in allowed:
                raise RequestValueError(
                    f"{modality} embeddings have shape {tuple(entry.shape)}; "
                    "they must be 2D (list entries) or 3D (one array)",
                    param="multi_modal_data",
                )
        for entry in entries:
            if expected_hidden_size is not None and entry.shape[-1] != expected_hidden_size:
                raise RequestValueError(
                    f"{modality} embeddings hidden dimension mismatch: got {entry.shape[-1]}, "
                    f"the model has {expected_hidden_size}",
                    param="multi_modal_data",
                )

    def get_count(self) -> int:
        return len(self.data)

    def get(self, index: int) -> Any:
        return self.data[index]

    def get_feature_size(self, index: int) -> int:
        """Return how many rows an item has."""
        return len(self.get(index))

    def select(self, indices: Sequence[int]) -> "EmbeddingItems":
        return type(self)([self.data[index] for index in indices], self.modality)

    def get_processor_data(self) -> Mapping[str, Any]:
        return {}

    def get_passthrough_data(self) -> Mapping[str, Any]:
        return {f"{self.modality}_embeds": self.data}


class ImageEmbeddingItems(EmbeddingItems):
    def __init__(
        self, data: Any, modality: str = "image", expected_hidden_size: int | None = None
    ) -> None:
        super().__init__(data, modality, expected_hidden_size)


ItemsT = TypeVar("ItemsT", bound=ModalityDataItems)


class MultiModalDataItems(UserDict[str, ModalityDataItems]):
    """All items of one request, by modality."""

    def select(self, modalities: Sequence[str]) -> "MultiModalDataItems":
        return MultiModalDataItems({m: items for m, items in self.items() if m in modalities})

    def get_count(self, modality: str, *, strict: bool = True) -> int:
        """Return the number of items; an absent modality raises, or counts 0 without `strict`."""
        if modality in self:
            return self[modality].get_count()
        if strict:
            raise self._absent(modality)
        return 0

    def get_all_counts(self) -> dict[str, int]:
        return {modality: items.get_count() for modality, items in self.items()}

    def get_items(self, modality: str, typ: type[ItemsT] | tuple[type[ItemsT], ...]) -> ItemsT:
        """Return a modality's items; raise where they are absent or of another kind."""
        if modality not in self:
            raise self._absent(modality)
        items = self[modality]
        if not isinstance(items, typ):
            raise RequestTypeError(
                f"{modality} items are {type(items).__name__}, expected {typ}",
                param="multi_modal_data",
            )
        return items

    def _absent(self, modality: str) -> RequestKeyError:
        available = ", ".join(f"`{name}`" for name in self) or "none"
        return RequestKeyError(
            f"modality `{modality}` not found; available: {available}", param="multi_modal_data"
        )


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
            [self._parse_image(entry, index) for index, entry in enumerate(entries)]
        )

    def _parse_image(self, entry: Any, index: int) -> Image.Image | MediaWithBytes | None:
        """Return an upright RGB picture, with its bytes where it came as bytes."""
        param = f"multi_modal_data.image[{index}]"
        if entry is None:
            return None
        if isinstance(entry, MediaWithBytes):
            check_image_size(entry.media.size, self.limits, param=param)
            return entry
        if isinstance(entry, Image.Image):
            check_image_size(entry.size, self.limits, param=param)
            return _convert(entry, param)
        if isinstance(entry, bytes | bytearray | memoryview):
            return load_image_bytes(bytes(entry), self.limits, param=param)
        if isinstance(entry, Path):
            return load_image_path(entry, self.limits, param=param)
        if isinstance(entry, str):
            if "://" in entry[:16] or entry[:5].lower() == "data:":
                return load_image_url(entry, self.limits, param=param)
            return load_image_path(Path(entry), self.limits, param=param)
        if is_array_like(entry):
            return image_from_array(entry, self.limits, param=param)
        raise RequestTypeError(
            f"image {index} has the type `{type(entry).__name__}`; give a PIL image, an array, "
            "bytes, a path or a data URL",
            param=param,
        )


def _is_foreign_array(data: Any) -> bool:
    """Whether `data` is an array of a library other than numpy (jax, torch)."""
    return type(data).__module__.partition(".")[0] != "numpy" and is_array_like(data)


def _convert(image: Image.Image, param: str) -> Image.Image:
    try:
        return convert_to_rgb(image)
    except RequestError:
        raise
    # A lazily opened picture decodes here, and a truncated one fails here.
    except Exception as error:
        raise RequestValueError(
            f"image cannot be decoded: {error or type(error).__name__}; give a whole picture",
            param=param,
        ) from error


def parse_mm_uuids(mm_uuids: MultiModalUUIDDict | None) -> dict[str, list[str | None]]:
    """Return per modality a list of uuids; entries may be None."""
    parsed: dict[str, list[str | None]] = {}
    for modality, uuids in (mm_uuids or {}).items():
        if uuids is not None:
            parsed[modality] = [uuids] if isinstance(uuids, str) else list(uuids)
    return parsed


def validate_mm_uuids(
    mm_items: MultiModalDataItems, mm_uuids: Mapping[str, Sequence[str | None]]
) -> None:
    """Check that every item has data or a uuid, and that the two lists are equally long."""
    for modality, uuids in mm_uuids.items():
        if modality not in mm_items:
            raise RequestValueError(
                f"multi_modal_uuids has `{modality}`, but multi_modal_data has none; "
                f"give [None] * {len(uuids)} there for cached items",
                param="multi_modal_uuids",
            )
        if len(uuids) != mm_items.get_count(modality):
            raise RequestValueError(
                f"multi_modal_uuids[{modality!r}] must have same length as "
                f"multi_modal_data[{modality!r}]: {len(uuids)} uuids for "
                f"{mm_items.get_count(modality)} items",
                param="multi_modal_uuids",
            )
        for index, uuid in enumerate(uuids):
            if uuid is not None and not isinstance(uuid, str):
                raise RequestTypeError(
                    f"multi_modal_uuids[{modality!r}][{index}] has the type "
                    f"`{type(uuid).__name__}`; a uuid is a str or None",
                    param="multi_modal_uuids",
                )
    for modality, items in mm_items.items():
        uuids = mm_uuids.get(modality)
        for index, item in enumerate(items.get_all_items_for_hash()):
            if item is None and (uuids is None or uuids[index] is None):
                raise RequestValueError(
                    f"{modality} {index} is empty but its uuid is missing; give the data or a uuid",
                    param="multi_modal_data",
                )
