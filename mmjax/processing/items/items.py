"""The items of one request by modality: counted, sized, ready to hash and process."""

from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from mmjax.errors import (
    RequestKeyError,
    RequestRuntimeError,
    RequestTypeError,
    RequestValueError,
)
from mmjax.processing.media.decode import MediaWithBytes, map_in_threads, video_as_uint8
from mmjax.processing.media.decode_budget import Cancellation
from mmjax.processing.media.encoded import EncodedAudio, EncodedFrames, EncodedImage, EncodedVideo

ItemsT = TypeVar("ItemsT", bound="ModalityDataItems")

_PLACES = frozenset({"total_num_frames", "frames_indices"})
"""Metadata that say nothing of frames whose own speed is given."""


class ImageSize(NamedTuple):
    width: int
    height: int


def only_cached(modality: str, index: int, what: str) -> RequestValueError:
    """Return the error of asking an item that has no data for its measure."""
    return RequestValueError(
        f"{modality} {index} was given by its uuid alone, so its {what} is cached, not known here",
        param="multi_modal_data",
    )


class ModalityDataItems(ABC):
    """The items of one modality of one request."""

    modality: str = ""
    """A class of one modality's items names it."""

    def __init__(self, data: Any, modality: str | None = None) -> None:
        self.data = data
        self.modality = modality or self.modality

    def __repr__(self) -> str:
        return f"{type(self).__name__}(modality={self.modality!r}, len={len(self)})"

    def __len__(self) -> int:
        return self.get_count()

    def __getitem__(self, index: int) -> Any:
        return self.get(index)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get_all())

    def get_count(self) -> int:
        return len(self.data)

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

    def count_bytes_to_decode(self, index: int) -> int:
        """Return the memory that decoding an item takes; 0 where there is nothing to decode."""
        return sum(image.num_bytes_to_decode for image in _encoded(self.get_item_for_hash(index)))

    def get_param(self, index: int) -> str:
        """Return the field of the request that an item stood in."""
        images = _encoded(self.get_item_for_hash(index))
        named = next((image.param for image in images if image.param), None)
        return named or f"multi_modal_data.{self.modality}[{index}]"

    def drop_decoded(self) -> None:
        """Forget what can be decoded again."""
        for item in self.get_all_items_for_hash():
            for image in _encoded(item):
                image.drop_pixels()

    def select(self: ItemsT, indices: Sequence[int]) -> ItemsT:
        """Return the items at `indices` alone."""
        selected = copy(self)
        selected.data = [self.data[index] for index in indices]
        return selected

    def get_processor_data(self) -> Mapping[str, Any]:
        """Return what the HF processor receives."""
        return {}

    def get_passthrough_data(self) -> Mapping[str, Any]:
        """Return what goes round the HF processor (embeddings)."""
        return {}


class ProcessorBatchItems(ModalityDataItems):
    """Items that the HF processor takes as a list; None where only a uuid was given."""

    def get(self, index: int) -> Any:
        return _unwrap(self.data[index])

    def get_item_for_hash(self, index: int) -> Any:
        return self.data[index]

    def get_processor_data(self) -> Mapping[str, Any]:
        return {f"{self.modality}s": map_in_threads(self.get, range(self.get_count()))}


class ImageProcessorItems(ProcessorBatchItems):
    modality = "image"

    def get_image_size(self, index: int) -> ImageSize:
        """Return (width, height); channels last wins where an array's layout is ambiguous."""
        image = self.get(index)
        if image is None:
            raise only_cached(self.modality, index, "size")
        if isinstance(image, Image.Image):
            return ImageSize(*image.size)
        shape = image.shape
        height, width = shape[:2] if shape[-1] in (1, 3, 4) else shape[1:3]
        return ImageSize(width, height)

    def find_sizes(self, index: int) -> tuple[ImageSize, ImageSize] | None:
        """Return the size of an image as it was sent, and as its `detail` has it scaled.

        None where it must be decoded before.
        """
        item = self.data[index]
        if not isinstance(item, EncodedImage):
            size = self.get_image_size(index)
            return size, size
        if (size := item.find_upright_size()) is None:
            return None
        scaled = size if item.pixel_range is None else item.pixel_range.fit_size(*size)
        return ImageSize(*size), ImageSize(*scaled)


class VideoProcessorItems(ProcessorBatchItems):
    """Videos as frames; an item is `(frames, metadata)` where the model needs the metadata.

    `metadata` has one mapping, or None, per video, whether or not the items carry it. That of a
    video that is still encoded is known once it is decoded.
    """

    modality = "video"

    def __init__(
        self,
        data: Sequence[Any],
        metadata: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        *,
        has_pairs: bool = False,
    ) -> None:
        """`has_pairs`: what is decoded becomes an item with its metadata."""
        super().__init__(data)
        if metadata is None or isinstance(metadata, Mapping):
            metadata = [metadata] * len(data)
        if len(metadata) != len(data):
            raise RequestValueError(
                f"{len(metadata)} metadata were given for {len(data)} videos; "
                "give one, or None, for each",
                param="multi_modal_data",
            )
        self.metadata = list(metadata)
        self._has_pairs = has_pairs
        self.sound_rate: int | None = None
        """Of the samples that a file's metadata have as `sound`; None: it is not heard."""

    def get(self, index: int) -> Any:
        item = self.data[index]
        if isinstance(item, EncodedVideo | EncodedFrames):
            frames, metadata = item.decode()
            if self.sound_rate is not None and isinstance(item, EncodedVideo):
                metadata = {**(metadata or {}), "sound": item.decode_sound(self.sound_rate)}
            return (frames, metadata) if self._has_pairs and metadata is not None else frames
        return (_unwrap(item[0]), item[1]) if _is_pair(item) else _unwrap(item)

    def count_bytes_to_decode(self, index: int) -> int:
        """Return the same, with its sound where that is heard."""
        item = self.data[index]
        is_heard = self.sound_rate is not None and isinstance(item, EncodedVideo)
        return super().count_bytes_to_decode(index) + (item.count_sound_bytes() if is_heard else 0)

    def with_sound(self, rate: int) -> "VideoProcessorItems":
        """Return the same items, of which files are heard, too."""
        heard = copy(self)
        heard.sound_rate = rate
        return heard

    def with_speeds(self, speeds: Sequence[float]) -> "VideoProcessorItems":
        """Return the same items, of so many given frames a second where nobody else says it.

        `speeds`: one for each item. A file says its own.
        """
        timed = copy(self)
        timed.data, timed.metadata = list(self.data), list(self.metadata)
        for index, fps in enumerate(speeds):
            item, known = self.data[index], self.metadata[index] or {}
            if isinstance(item, EncodedFrames):
                timed.data[index] = item.with_fps(fps)
            elif item is None or isinstance(item, EncodedVideo) or known.get("fps") is not None:
                continue
            else:
                kept = {key: value for key, value in known.items() if key not in _PLACES}
                metadata = timed.metadata[index] = {**kept, "fps": fps}
                frames = item[0] if _is_pair(item) else item
                timed.data[index] = (frames, metadata) if self._has_pairs else frames
        return timed

    def get_item_for_hash(self, index: int) -> Any:
        """Return the item; with its metadata where encoded bytes alone would not say the frames."""
        item, metadata = self.data[index], self.metadata[index]
        if isinstance(item, MediaWithBytes) and metadata is not None:
            return item, metadata
        return item

    def select(self, indices: Sequence[int]) -> "VideoProcessorItems":
        selected = super().select(indices)
        selected.metadata = [self.metadata[index] for index in indices]
        return selected

    def get_processor_data(self) -> Mapping[str, Any]:
        """Return `videos`: each uint8[frames, height, width, 3], with its metadata if needed."""
        videos = []
        for item in self.get_all():
            if _is_pair(item):
                videos.append((video_as_uint8(item[0]), item[1]))
            else:
                videos.append(None if item is None else video_as_uint8(item))
        return {"videos": videos}


def _is_pair(item: Any) -> bool:
    """Whether a video's item is `(frames, metadata)`."""
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Mapping)


def _encoded(item: Any) -> list[EncodedImage | EncodedVideo | EncodedFrames | EncodedAudio]:
    """Return the encoded media in an item: itself, or a value of a vision chunk."""
    values = item.values() if isinstance(item, Mapping) else (item,)
    kinds = EncodedImage | EncodedVideo | EncodedFrames | EncodedAudio
    return [value for value in values if isinstance(value, kinds)]


def _unwrap(item: Any) -> Any:
    if isinstance(item, EncodedImage):
        item = item.decode()
    return item.media if isinstance(item, MediaWithBytes) else item


class AudioProcessorItems(ProcessorBatchItems):
    """Clips as samples, of one channel where `rate` says how many a second the model takes."""

    modality = "audio"

    def __init__(self, data: Sequence[Any], rate: int | None = None) -> None:
        super().__init__(data)
        self._rate = rate

    def get(self, index: int) -> Any:
        item = self.data[index]
        if not isinstance(item, EncodedAudio):
            return _unwrap(item)
        if self._rate is None:
            raise RequestRuntimeError(
                f"{self.get_param(index)} is a file, but audio resampling is not supported when "
                "`target_sr` is not provided; give the samples alone, at the model's rate",
                param=self.get_param(index),
            )
        return item.decode(self._rate)


class VisionChunkProcessorItems(ProcessorBatchItems):
    """Images and pieces of videos in one list, for models that take both alike.

    An item is `{"type": "image", "image": ...}` or `{"type": "video_chunk", "video_chunk":
    [frame, ...], "prompt": ...}`.
    """

    modality = "vision_chunk"

    def get(self, index: int) -> Any:
        item = self.data[index]
        return None if item is None else {key: _unwrap(value) for key, value in item.items()}


class MultiModalDataItems(UserDict[str, ModalityDataItems]):
    """All items of one request, by modality."""

    def __init__(self, *args: Any, **kwargs: ModalityDataItems) -> None:
        super().__init__(*args, **kwargs)
        self.cancellation = Cancellation()
        """Asked before any is decoded."""

    def with_cancellation(self, cancellation: Cancellation) -> "MultiModalDataItems":
        """Return the same items, which whoever sets `cancellation` wants no more."""
        items = MultiModalDataItems(self.data)
        items.cancellation = cancellation
        return items

    def select(self, modalities: Collection[str]) -> "MultiModalDataItems":
        """Return the items of some modalities, in this order."""
        kept = {m: items for m, items in self.items() if m in modalities}
        return MultiModalDataItems(kept).with_cancellation(self.cancellation)

    def get_count(self, modality: str, *, strict: bool = True) -> int:
        """Return the number of items; an absent modality raises, or counts 0 without `strict`."""
        if modality in self:
            return self[modality].get_count()
        if strict:
            raise self._absent(modality)
        return 0

    def drop_decoded(self) -> None:
        """Forget what can be decoded again."""
        for items in self.values():
            items.drop_decoded()

    def get_passthrough_data(self) -> dict[str, Any]:
        """Return what goes round the HF processor (embeddings), by name."""
        return {
            k: data for items in self.values() for k, data in items.get_passthrough_data().items()
        }

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
