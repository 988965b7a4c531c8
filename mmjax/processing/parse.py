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
    VideoEmbeddingItems,
    VideoProcessorItems,
)
from mmjax.processing.media import MediaLimits, as_numpy, is_array_like
from mmjax.processing.parse_image import parse_image
from mmjax.processing.parse_video import parse_video, split_videos
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
    "VideoEmbeddingItems",
    "VideoProcessorItems",
    "parse_mm_uuids",
    "validate_mm_uuids",
]

MultiModalDataDict = Mapping[str, Any]
"""Per modality, one item or a list of items, as the user gives them."""


class MultiModalDataParser:
    """Turns the user's media into items; families that take more override `_get_subparsers`."""

    def __init__(
        self,
        *,
        target_sr: float | None = None,
        target_channels: int | None = None,
        audio_resample_method: str = "scipy",
        video_needs_metadata: bool = False,
        expected_hidden_size: int | None = None,
        allow_missing_mm_embeddings: bool = False,
        limits: MediaLimits | None = None,
    ) -> None:
        self.target_sr = target_sr
        self.target_channels = target_channels
        self.audio_resample_method = audio_resample_method
        self.video_needs_metadata = video_needs_metadata
        self.expected_hidden_size = expected_hidden_size
        self.allow_missing_mm_embeddings = allow_missing_mm_embeddings
        self.limits = limits or MediaLimits()

    @staticmethod
    def is_embeddings(data: object) -> bool:
        """Return whether `data` holds embeddings: a 3-D float array, or a list of 2-D arrays.

        A numpy array never does, nor do integers, nor a 3-D array whose last axis is channels.
        """
        if isinstance(data, list | tuple) and data:
            return _is_foreign_floats(data[0], 2)
        return _is_foreign_floats(data, 3) and data.shape[-1] not in (1, 3, 4)  # pyright: ignore

    def _is_image_embeddings(self, data: Any) -> bool:
        """Tell `[items, rows, hidden]` from a picture `[channels, height, width]` of floats.

        Only the model's width can tell, where the first axis may be either; unknown, the array
        holds embeddings, as one item's do: `[1, rows, hidden]`.
        """
        if not self.is_embeddings(data):
            return False
        if isinstance(data, list | tuple) or self.expected_hidden_size is None:
            return True
        return data.shape[0] not in (1, 3, 4) or data.shape[-1] == self.expected_hidden_size

    def _get_subparsers(self) -> Mapping[str, Callable[[Any], ModalityDataItems | None]]:
        return {"image": self._parse_image_data, "video": self._parse_video_data}

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
        if self._is_image_embeddings(data):
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

    def _parse_video_data(self, data: Any) -> ModalityDataItems | None:
        if data is None:
            return None
        if self.is_embeddings(data):
            return VideoEmbeddingItems(data, expected_hidden_size=self.expected_hidden_size)
        videos: list[Any] = []
        metadatas: list[Mapping[str, Any] | None] = []
        for index, entry in enumerate(split_videos(data)):
            param = f"multi_modal_data.video[{index}]"
            frames, metadata = parse_video(entry, self.limits, param=param)
            if self.video_needs_metadata and frames is not None:
                if metadata is None:
                    raise RequestValueError(
                        f"video metadata is required but not found in {param}; "
                        "give a pair (frames, metadata)",
                        param=param,
                    )
                frames = (frames, metadata)
            videos.append(frames)
            metadatas.append(metadata)
        return VideoProcessorItems(videos, metadatas)


def _is_foreign_floats(data: Any, ndim: int) -> bool:
    """Whether `data` is a float array of a library other than numpy (jax, torch)."""
    return (
        type(data).__module__.partition(".")[0] != "numpy"
        and is_array_like(data)
        and len(data.shape) == ndim
        and "float" in str(data.dtype)
    )
