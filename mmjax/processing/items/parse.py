"""The user's media, in any accepted form -> items; and the ids that he gives them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from mmjax.decoders.limits import MediaLimits
from mmjax.errors import ConfigError, RequestTypeError, RequestValueError
from mmjax.processing.items.embeddings import (
    AudioEmbeddingItems,
    DictEmbeddingItems,
    EmbeddingItems,
    FieldsFactory,
    ImageEmbeddingItems,
    VideoEmbeddingItems,
    check_embeds,
)
from mmjax.processing.items.items import (
    AudioProcessorItems,
    ImageProcessorItems,
    ImageSize,
    ModalityDataItems,
    MultiModalDataItems,
    ProcessorBatchItems,
    VideoProcessorItems,
    VisionChunkProcessorItems,
)
from mmjax.processing.media.audio import (
    RESAMPLE_METHODS,
    AudioSpec,
    has_rate,
    parse_audio,
    split_audios,
)
from mmjax.processing.media.decode import MediaWithBytes, as_numpy, is_array_like
from mmjax.processing.media.encoded import EncodedFrames, EncodedVideo, parse_image
from mmjax.processing.media.video import parse_video, parse_vision_chunk, split_videos
from mmjax.processing.tensors.fields import MultiModalFieldConfig

__all__ = [
    "AudioEmbeddingItems",
    "AudioProcessorItems",
    "DictEmbeddingItems",
    "EmbeddingItems",
    "ImageEmbeddingItems",
    "ImageEmbedsDataParser",
    "ImageProcessorItems",
    "ImageSize",
    "ImagesOnlyDataParser",
    "ModalityDataItems",
    "MultiModalDataDict",
    "MultiModalDataItems",
    "MultiModalDataParser",
    "PixelsOnlyDataParser",
    "ProcessorBatchItems",
    "VideoEmbeddingItems",
    "VideoProcessorItems",
    "VisionChunkProcessorItems",
]

MultiModalDataDict = Mapping[str, Any]
"""Per modality, one item or a list of items, as the user gives them."""


class MultiModalDataParser:
    """Turns the user's media into items; families that take more override `_get_subparsers`.

    Args:
        target_sr: The sampling rate that audio is resampled to.
        target_channels: The channels that audio is mixed to.
        audio_resample_method: How; "scipy" is what there is.
        video_needs_metadata: Whether videos come as `(frames, metadata)`, and stay that.
        expected_hidden_size: The width that embeddings must have.
        allow_missing_mm_embeddings: Whether a dict of embeddings may lack the values, and bring
            the metadata alone.
        limits: What is refused before work is done on it.
    """

    embedding_fields: ClassVar[
        Mapping[str, Mapping[str, Literal["values", "metadata", "optional"]]]
    ] = {}
    """Per modality, the tensors of a dict of embeddings: the embeddings, what says how they divide,
    and what may be left out. A family that takes dicts overrides this and
    `_get_embedding_fields_config`; where the embeddings are all that there is, they divide as
    arrays do, and the first is enough."""
    keeps_metadata: ClassVar[bool] = False
    """Whether a video is an item `(frames, metadata)` where there are metadata of it."""

    def __init__(
        self,
        *,
        target_sr: int | float | None = None,
        target_channels: int | None = None,
        audio_resample_method: str = "scipy",
        video_needs_metadata: bool = False,
        expected_hidden_size: int | None = None,
        allow_missing_mm_embeddings: bool = False,
        limits: MediaLimits | None = None,
    ) -> None:
        if audio_resample_method not in RESAMPLE_METHODS:
            known = ", ".join(f"`{name}`" for name in RESAMPLE_METHODS)
            raise ConfigError(
                f"audio resample method `{audio_resample_method}` is unknown; choose {known}"
            )
        if target_sr is not None and not (target_sr >= 1 and target_sr == int(target_sr)):
            raise ConfigError(f"target_sr is {target_sr}; it must be a whole number, 1 or more")
        self.target_sr = target_sr
        self.target_channels = target_channels
        self.audio_resample_method = audio_resample_method
        self.video_needs_metadata = video_needs_metadata
        self.expected_hidden_size = expected_hidden_size
        self.allow_missing_mm_embeddings = allow_missing_mm_embeddings
        self.limits = limits or MediaLimits()

    @staticmethod
    def is_embeddings(data: Any) -> bool:
        """Return whether `data` holds embeddings: a 3-D float array, or a list of 2-D arrays.

        A numpy array never does, nor do integers, nor a 3-D array whose last axis is channels, nor
        a pair of samples and their rate.
        """
        if isinstance(data, list | tuple):
            first = next((entry for entry in data if entry is not None), None)
            return _is_foreign_floats(first, 2) and not has_rate(data)
        return _is_foreign_floats(data, 3) and data.shape[-1] not in (1, 3, 4)

    def _is_image_embeddings(self, data: Any) -> bool:
        """Tell `[items, rows, hidden]` from an image `[channels, height, width]` of floats.

        Only the model's width can tell, where the first axis may be either; unknown, the array
        holds embeddings, as one item's do: `[1, rows, hidden]`.
        """
        if not self.is_embeddings(data):
            return False
        if isinstance(data, list | tuple) or self.expected_hidden_size is None:
            return True
        return data.shape[0] not in (1, 3, 4) or data.shape[-1] == self.expected_hidden_size

    def _get_subparsers(self) -> Mapping[str, Callable[[Any], ModalityDataItems | None]]:
        return {
            "audio": self._parse_audio_data,
            "image": self._parse_image_data,
            "video": self._parse_video_data,
            "vision_chunk": self._parse_vision_chunk_data,
        }

    def _get_embedding_fields_config(
        self, modality: str, data: Mapping[str, Any]
    ) -> Mapping[str, MultiModalFieldConfig]:
        """Return how each of `embedding_fields[modality]` divides among items."""
        raise NotImplementedError(f"{type(self).__name__} says nothing of {modality} embeddings")

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
            items = None if data is None else subparsers[modality](data)
            if items is not None:
                mm_items[modality] = items
        return mm_items

    def count_entries(self, modality: str, data: Any) -> int | None:
        """Return how many items `data` holds, before any of them is read.

        None where only parsing can tell: for embeddings, and modalities of a family's own.
        """
        split = _SPLIT_BY_MODALITY.get(modality)
        if split is None or data is None or isinstance(data, Mapping):
            return None
        return None if self._holds_embeddings(modality, data) else len(split(data))

    def _parse_image_data(self, data: Any) -> ModalityDataItems | None:
        embeddings = self._parse_embeddings("image", data)
        if embeddings is not None:
            return embeddings
        return ImageProcessorItems(
            [
                parse_image(entry, self.limits, param=f"multi_modal_data.image[{index}]")
                for index, entry in enumerate(_split_images(data))
            ]
        )

    def _parse_audio_data(self, data: Any) -> ModalityDataItems | None:
        embeddings = self._parse_embeddings("audio", data)
        if embeddings is not None:
            return embeddings
        spec = AudioSpec(self.target_sr, self.target_channels)
        return AudioProcessorItems(
            [
                parse_audio(entry, spec, self.limits, param=f"multi_modal_data.audio[{index}]")
                for index, entry in enumerate(split_audios(data))
            ],
            rate=None if self.target_sr is None else int(self.target_sr),
        )

    def _parse_video_data(self, data: Any) -> ModalityDataItems | None:
        embeddings = self._parse_embeddings("video", data)
        if embeddings is not None:
            return embeddings
        has_pairs = self.video_needs_metadata or self.keeps_metadata
        videos: list[Any] = []
        metadatas: list[Mapping[str, Any] | None] = []
        for index, entry in enumerate(split_videos(data)):
            param = f"multi_modal_data.video[{index}]"
            if isinstance(entry, EncodedVideo | EncodedFrames):
                videos.append(entry)
                metadatas.append(None)
                continue
            frames, metadata = parse_video(entry, self.limits, param=param)
            if self.video_needs_metadata and frames is not None and metadata is None:
                raise RequestValueError(
                    f"video metadata is required but not found in {param}; "
                    "give a pair (frames, metadata)",
                    param=param,
                )
            is_pair = has_pairs and frames is not None and metadata is not None
            videos.append((frames, metadata) if is_pair else frames)
            metadatas.append(metadata)
        return VideoProcessorItems(videos, metadatas, has_pairs=has_pairs)

    def _parse_vision_chunk_data(self, data: Any) -> ModalityDataItems | None:
        if self.is_embeddings(data):
            raise RequestValueError(
                "embeddings of vision chunks are not supported; give images and frames",
                param="multi_modal_data.vision_chunk",
            )
        entries = data if isinstance(data, list | tuple) else [data]
        return VisionChunkProcessorItems(
            [
                parse_vision_chunk(
                    entry, self.limits, param=f"multi_modal_data.vision_chunk[{index}]"
                )
                for index, entry in enumerate(entries)
            ]
        )

    def _parse_embeddings(self, modality: str, data: Any) -> ModalityDataItems | None:
        """Return what `data` holds of embeddings; None: it holds media."""
        if isinstance(data, Mapping) and modality in self.embedding_fields:
            if self.takes_plain_embeds(modality):
                data = _get_plain_embeds(modality, data)
            else:
                return self._parse_dict_embeddings(modality, data)
        elif not self._holds_embeddings(modality, data):
            return None
        items_class = _EMBEDDING_ITEMS[modality]
        return items_class(data, expected_hidden_size=self.expected_hidden_size)

    def _holds_embeddings(self, modality: str, data: Any) -> bool:
        return (self._is_image_embeddings if modality == "image" else self.is_embeddings)(data)

    @classmethod
    def takes_plain_embeds(cls, modality: str) -> bool:
        """Return whether a dict of embeddings holds nothing else: `{"image_embeds": ...}`."""
        return cls.embedding_fields.get(modality, {}).keys() == {f"{modality}_embeds"}

    def _parse_dict_embeddings(
        self, modality: str, data: Mapping[str, Any], fields_factory: FieldsFactory | None = None
    ) -> DictEmbeddingItems:
        """Parse a dict of embeddings by `embedding_fields`; other names in it are dropped."""
        fields = self.embedding_fields[modality]
        data = {key: value for key, value in data.items() if key in fields}
        values = {key for key, kind in fields.items() if kind == "values"}
        for key in values & data.keys():
            if not is_array_like(data[key]) or not len(data[key].shape):
                raise RequestTypeError(
                    f"`{key}` has the type `{type(data[key]).__name__}`; it must be an array",
                    param=f"multi_modal_data.{modality}",
                )
            check_embeds(data[key], self.expected_hidden_size, f"`{key}`")
        optional = {key for key, kind in fields.items() if kind == "optional"}
        optional |= values if self.allow_missing_mm_embeddings else set()
        return DictEmbeddingItems(
            data,
            modality,
            required_fields=fields.keys() - optional,
            fields_factory=fields_factory or partial(self._get_embedding_fields_config, modality),
            optional_fields=optional,
        )


def _get_plain_embeds(modality: str, data: Mapping[str, Any]) -> Any:
    """Return what `{"image_embeds": ...}` holds: [items, rows, width], or a list of [rows, width].

    One array of two axes is one item. numpy's arrays are taken, too, for the name says what they
    are.
    """
    key, param = f"{modality}_embeds", f"multi_modal_data.{modality}"
    if data.keys() != {key}:
        raise RequestValueError(
            f"a dict of {modality} embeddings has the keys {sorted(map(str, data))}; it must have "
            f"`{key}` alone",
            param=param,
        )
    embeds = data[key]
    if is_array_like(embeds):
        return [embeds] if len(embeds.shape) == 2 else embeds
    if not isinstance(embeds, list | tuple):
        raise RequestTypeError(
            f"`{key}` has the type `{type(embeds).__name__}`; it must be an array, or a list of "
            "arrays",
            param=param,
        )
    return embeds


def _split_images(data: Any) -> Sequence[Any]:
    """Return the entries of `data`, which may be one image or several."""
    if is_array_like(data) and len(data.shape) == 4:
        return list(as_numpy(data))
    return data if isinstance(data, list | tuple) else [data]


_EMBEDDING_ITEMS: Mapping[str, type[EmbeddingItems]] = {
    "audio": AudioEmbeddingItems,
    "image": ImageEmbeddingItems,
    "video": VideoEmbeddingItems,
}
_SPLIT_BY_MODALITY: Mapping[str, Callable[[Any], Sequence[Any]]] = {
    "audio": split_audios,
    "image": _split_images,
    "video": split_videos,
}


def _is_foreign_floats(data: Any, ndim: int) -> bool:
    """Whether `data` is a float array of a library other than numpy (jax, torch)."""
    return (
        not isinstance(data, MediaWithBytes)
        and type(data).__module__.partition(".")[0] != "numpy"
        and is_array_like(data)
        and len(data.shape) == ndim
        and "float" in str(data.dtype)
    )


class ImageEmbedsDataParser(MultiModalDataParser):
    """Takes an image's embeddings also as `{"image_embeds": ...}`."""

    embedding_fields: ClassVar = {"image": {"image_embeds": "values"}}


class AudioEmbedsDataParser(MultiModalDataParser):
    """Takes a clip's embeddings also as `{"audio_embeds": ...}`."""

    embedding_fields: ClassVar = {"audio": {"audio_embeds": "values"}}


class ImagesOnlyDataParser(MultiModalDataParser):
    """Refuses an image's embeddings."""

    def _is_image_embeddings(self, data: Any) -> bool:
        if super()._is_image_embeddings(data):
            raise RequestValueError(
                "this model takes images, not their embeddings; give the image",
                param="multi_modal_data",
            )
        return False


class PixelsOnlyDataParser(ImagesOnlyDataParser):
    """The same of a family with videos, which come with their metadata."""

    keeps_metadata = True


MultiModalUUIDDict = Mapping[str, Any]
"""Per modality, a str or a list with a str or None for each item, as the user gives it."""


class ParsedUUIDs(dict[str, list[str | None]]):
    """Per modality, a list with a str or None for each item: what `parse_mm_uuids` has checked."""


def parse_mm_uuids(mm_uuids: MultiModalUUIDDict | None) -> ParsedUUIDs:
    """Return the uuids in one form; those that have it are returned as they are."""
    if isinstance(mm_uuids, ParsedUUIDs):
        return mm_uuids
    return ParsedUUIDs(
        {
            modality: _to_list(modality, uuids)
            for modality, uuids in (mm_uuids or {}).items()
            if uuids is not None
        }
    )


def _to_list(modality: str, uuids: Any) -> list[str | None]:
    if isinstance(uuids, str):
        return [uuids]
    if isinstance(uuids, bytes | bytearray) or not isinstance(uuids, Sequence):
        raise RequestTypeError(
            f"multi_modal_uuids[{modality!r}] has the type `{type(uuids).__name__}`; "
            "give a str, or a list with a str or None for each item",
            param="multi_modal_uuids",
        )
    for index, uuid in enumerate(uuids):
        if uuid is not None and not isinstance(uuid, str):
            raise RequestTypeError(
                f"multi_modal_uuids[{modality!r}][{index}] has the type "
                f"`{type(uuid).__name__}`; a uuid is a str or None",
                param="multi_modal_uuids",
            )
    return list(uuids)


def complete_mm_data(
    mm_data: Mapping[str, Any], mm_uuids: MultiModalUUIDDict | None
) -> dict[str, Any]:
    """Return `mm_data` with an empty item for each uuid of a modality that has no data.

    `{"image": None}` with the uuids `["a", "b"]` -> `{"image": [None, None]}`; without uuids it is
    refused.
    """
    uuids = parse_mm_uuids(mm_uuids)
    completed = dict(mm_data)
    for modality, data in mm_data.items():
        if data is not None:
            continue
        if modality not in uuids:
            raise RequestValueError(
                f"multi_modal_data[{modality!r}] is empty but multi_modal_uuids[{modality!r}] is "
                "missing; give the data, or the uuids of cached items",
                param="multi_modal_data",
            )
        completed[modality] = [None] * len(uuids[modality])
    return completed


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
    for modality, items in mm_items.items():
        uuids = mm_uuids.get(modality) or [None] * len(items)
        for index, uuid in enumerate(uuids):
            if uuid is None and items.get_item_for_hash(index) is None:
                raise RequestValueError(
                    f"multi_modal_data[{modality!r}][{index}] is empty but its uuid, "
                    f"multi_modal_uuids[{modality!r}][{index}], is missing; "
                    "give the data or a uuid",
                    param="multi_modal_data",
                )
