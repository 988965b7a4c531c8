"""Content parts of a message: text, an image, an image's embeddings, a video, or audio.

Errors name the part, such as `messages[0].content[1]`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmjax.decoders.limits import MediaLimits
from mmjax.errors import RequestError, RequestTypeError, RequestValueError
from mmjax.frontend.media.connector import MediaConnector
from mmjax.frontend.requests.prompts import PromptDict
from mmjax.processing.context import BaseProcessingInfo
from mmjax.processing.hashing.item_hashes import MAX_MEDIA_ID_LENGTH, MediaId, is_media_id
from mmjax.processing.media.decode import as_numpy, is_array_like
from mmjax.processing.media.embeds import decode_embeds
from mmjax.processing.media.encoded import PixelRange

_TEXT_TYPES = ("text", "input_text", "output_text", "refusal")
_IMAGE_TYPES = ("image_url", "input_image")
_EMBEDS_TYPE = "image_embeds"
_VIDEO_TYPE = "video_url"
_AUDIO_TYPE = "audio_url"
_AUDIO_FILE_TYPE = "input_audio"
_AUDIO_TYPES = (_AUDIO_TYPE, _AUDIO_FILE_TYPE)
_MEDIA_TYPES = (*_IMAGE_TYPES, "image_pil", _EMBEDS_TYPE, _VIDEO_TYPE, *_AUDIO_TYPES)
_EXAMPLES = {_VIDEO_TYPE: "data:video/mp4", _AUDIO_TYPE: "data:audio/wav"}
"""How a URL of such a part may begin; another's as an image's."""
_PART_TYPES = (*_TEXT_TYPES, *_MEDIA_TYPES)
_MAX_METADATA = 2**16
"""Bound of the numbers beside embeddings (sizes of a grid); products of three fit in 64 bits."""
_CACHE_HINTS = ("cache_control", "prompt_cache_breakpoint")
"""Where clients mark what a cache should keep; here all prompts are cached, as far as they are the
same."""
_PART_FIELDS = ("type", "text", "refusal", *_MEDIA_TYPES, "detail", "uuid", "url", *_CACHE_HINTS)


@dataclass(slots=True)
class ConversationMedia:
    """The media of a conversation, in order, and the length of its texts."""

    items: dict[str, list[Any]] = field(default_factory=dict)
    """By modality."""
    uuids: dict[str, list[str | None]] = field(default_factory=dict)
    are_embeds: bool = False
    """Whether all images are embeddings; otherwise none is."""
    video_options: Mapping[str, Any] = field(default_factory=dict)
    """How videos are sampled, where the request says so itself."""
    num_chars: int = 0

    def count(self, modality: str) -> int:
        """Return how many items of a modality there are so far."""
        return len(self.items.get(modality, ()))

    def append(self, modality: str, item: Any, uuid: str | None) -> None:
        """Add the next item."""
        self.items.setdefault(modality, []).append(item)
        self.uuids.setdefault(modality, []).append(uuid)

    def to_prompt(self) -> PromptDict:
        """Return the media as fields of a prompt."""
        prompt: PromptDict = {}
        if self.items:
            prompt["multi_modal_data"] = {
                modality: self._image_data() if modality == "image" else items
                for modality, items in self.items.items()
            }
        known = {m: ids for m, ids in self.uuids.items() if any(one is not None for one in ids)}
        if known:
            prompt["multi_modal_uuids"] = known
        return prompt

    def _image_data(self) -> Any:
        images = self.items["image"]
        if not self.are_embeds:
            return images
        if not isinstance(images[0], Mapping):
            return {_EMBEDS_TYPE: images}
        joined = {
            name: np.stack([one[name] for one in images])
            for name in images[0].keys() - {_EMBEDS_TYPE}
        }
        rows = [as_numpy(one[_EMBEDS_TYPE]).astype(np.float32) for one in images]
        return {_EMBEDS_TYPE: np.concatenate(rows), **joined}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReader:
    """Parses parts; images are counted before they are decoded."""

    connector: MediaConnector
    """Turns URLs into images."""
    info: BaseProcessingInfo
    """Says which media the model takes, how many, and of what sizes."""
    are_objects_allowed: bool
    """Whether parts may hold Python objects (PIL images, arrays): never over HTTP."""

    @property
    def embeds_fields(self) -> frozenset[str]:
        """The tensors that image embeddings consist of; none where the model takes none.

        They are `image_embeds`, which may have metadata beside it.
        """
        return frozenset(self.info.get_data_parser().embedding_fields.get("image", ()))

    def read(self, part: Any, place: str, media: ConversationMedia) -> dict[str, str] | None:
        """Return `{"type": "text", "text": ...}`, `{"type": "image"}`, or of a video or audio.

        None: an empty part. The medium is appended to `media`.
        """
        if isinstance(part, str):
            return text_part(part, place)
        if not isinstance(part, Mapping):
            raise RequestTypeError.about(
                place, f"must be an object or a text, not {type(part).__name__}"
            )
        unknown = sorted(str(name) for name in part if name not in _PART_FIELDS)
        if unknown and "type" in part and part["type"] in _PART_TYPES:
            raise RequestValueError(
                f"`{place}` has the unknown field `{unknown[0]}`; remove it",
                param=f"{place}.{unknown[0]}",
            )
        kind = self._part_type(part, place)
        if kind in _TEXT_TYPES:
            _refuse_fields(part, (*_MEDIA_TYPES, "detail", "uuid"), place)
            text = part.get("refusal" if kind == "refusal" else "text")
            return None if text is None else text_part(text, f"{place}.text")
        uuid = _uuid(part, place)
        if kind == _VIDEO_TYPE or kind in _AUDIO_TYPES:
            modality, item = self._file(part, kind, place, media, has_uuid=uuid is not None)
            media.append(modality, item, uuid)
            return {"type": modality}
        is_embeds = kind == _EMBEDS_TYPE
        self._admit_image(place, media, is_embeds=is_embeds)
        read = self._embeds if is_embeds else self._image
        media.append("image", read(part, kind, place, has_uuid=uuid is not None), uuid)
        media.are_embeds = is_embeds
        return {"type": "image"}

    def _part_type(self, part: Mapping[str, Any], place: str) -> str:
        kind = part.get("type")
        if kind is None:
            kind = next((name for name in _PART_TYPES if name in part), None)
            if kind is None:
                raise RequestValueError(
                    f"Missing 'type' field in multimodal part `{place}`; give one of "
                    f"{self._name_types()}",
                    param=f"{place}.type",
                )
        if not isinstance(kind, str):
            raise RequestTypeError(f"Invalid 'type' field in `{place}`", param=f"{place}.type")
        if kind not in _PART_TYPES:
            raise RequestValueError(
                f"`{place}` has the type {kind[:64]!r}, which is not supported; supported are "
                f"{self._name_types()}",
                param=f"{place}.type",
            )
        return kind

    def _name_types(self) -> str:
        """Return the types that a part may have here, of this model."""
        modalities = self.info.allowed_mm_limits
        refused = {
            _EMBEDS_TYPE: not (self.embeds_fields and self.connector.mm.enable_mm_embeds),
            **dict.fromkeys(_IMAGE_TYPES, "image" not in modalities),
            "image_pil": not (self.are_objects_allowed and "image" in modalities),
            _VIDEO_TYPE: "video" not in modalities,
            **dict.fromkeys(_AUDIO_TYPES, "audio" not in modalities),
        }
        return ", ".join(name for name in _PART_TYPES if not refused.get(name))

    def _admit_image(self, place: str, media: ConversationMedia, *, is_embeds: bool) -> None:
        if is_embeds:
            self._check_embeds_allowed(place)
        if media.count("image") and media.are_embeds != is_embeds:
            raise RequestValueError(
                f"`{place}`: a conversation holds images or `image_embeds`, and not both; send all "
                "in one form",
                param=place,
            )
        with _at(place):
            self.info.validate_num_items("image", media.count("image") + 1, are_embeds=is_embeds)

    def _file(
        self,
        part: Mapping[str, Any],
        kind: str,
        place: str,
        media: ConversationMedia,
        *,
        has_uuid: bool,
    ) -> tuple[str, Any]:
        """Return the modality of a video or of audio, and the item; None: a uuid stands for it."""
        modality = "video" if kind == _VIDEO_TYPE else "audio"
        if modality not in self.info.allowed_mm_limits:
            what = "videos; send frames as `image_url`" if modality == "video" else "audio"
            raise RequestValueError(
                f"`{place}` has the type `{kind}`, which is not supported: this model takes no "
                f"{what}",
                param=f"{place}.type",
            )
        with _at(place):
            self.info.validate_num_items(modality, media.count(modality) + 1)
        known = ("type", "uuid", kind, *_CACHE_HINTS)
        _refuse_fields(part, [name for name in _PART_FIELDS if name not in known], place)
        if kind == _AUDIO_FILE_TYPE:
            text, place = _read_audio_file(part.get(kind), f"{place}.{kind}", has_uuid=has_uuid)
            return modality, None if text is None else self.connector.open_audio_base64(text, place)
        url, place, _ = _read_url(part, kind, place, ("url",), has_uuid=has_uuid)
        if url is None:
            return modality, None
        if modality == "audio":
            return modality, self.connector.open_audio(url, place)
        return modality, self.connector.open_video(url, place, media.video_options)

    def _image(self, part: Mapping[str, Any], kind: str, place: str, *, has_uuid: bool) -> Any:
        # The Responses API's form: {"type": "input_image", "image_url": "data:..."}.
        kind = "image_url" if kind == "input_image" and kind not in part else kind
        if kind == "image_pil":
            _refuse_fields(part, ("detail",), place)
            return self._image_object(part.get(kind), place, has_uuid=has_uuid)
        url, url_place, value = _read_url(part, kind, place, ("url", "detail"), has_uuid=has_uuid)
        inner = self._pixel_range(value.get("detail"), f"{place}.{kind}")
        pixel_range = self._pixel_range(part.get("detail"), place) or inner
        return None if url is None else self.connector.open_image(url, url_place, pixel_range)

    def _pixel_range(self, detail: Any, place: str) -> PixelRange | None:
        """Return what `detail` has an image scaled to; None: to the model's own size."""
        place = f"{place}.detail"
        if detail in (None, "auto", "original"):
            return None
        if detail not in ("low", "high"):
            raise RequestValueError.about(place, "must be `auto`, `low`, `high` or `original`")
        return self.info.get_detail_range(detail)

    def _check_embeds_allowed(self, place: str) -> None:
        if not self.embeds_fields:
            raise RequestValueError(
                f"`{place}` has the type `image_embeds`, which this model does not take; send the "
                "image itself as `image_url`",
                param=f"{place}.type",
            )
        if not self.connector.mm.enable_mm_embeds:
            raise RequestValueError(
                f"`{place}` has the type `image_embeds`, which needs `--enable-mm-embeds`; have it "
                "set, or send the image itself as `image_url`",
                param=f"{place}.type",
            )

    def _embeds(self, part: Mapping[str, Any], kind: str, place: str, *, has_uuid: bool) -> Any:
        """Return the embeddings of one image, `[rows, width]`; with metadata, a dict of both."""
        place = f"{place}.{kind}"
        value = part.get(kind)
        metadata = self.embeds_fields - {kind}
        if value is None and has_uuid and not metadata:
            return None
        if not metadata:
            embeds = self._rows(value, place)
            self._check_embeds({kind: [embeds]}, place)
            return embeds
        if not isinstance(value, Mapping) or value.keys() != self.embeds_fields:
            found = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise RequestTypeError.about(
                place,
                f"must be an object of {_quote(self.embeds_fields)}, not of {found}: what stands "
                "beside the embeddings says where they belong in the image",
            )
        given = {name: self._metadata(value[name], f"{place}.{name}") for name in metadata}
        embeds = self._rows(value[kind], f"{place}.{kind}")
        items = {name: numbers[None] for name, numbers in given.items()}
        self._check_embeds({kind: embeds, **items}, place)
        return {kind: embeds, **given}

    def _check_embeds(self, image: Mapping[str, Any], place: str) -> None:
        with _at(place):
            self.info.parse_mm_data({"image": image})

    def _metadata(self, value: Any, place: str) -> np.ndarray:
        """Return int64[_]: a grid's sizes, or another list of numbers."""
        if self.are_objects_allowed and is_array_like(value):
            value = as_numpy(value).tolist()
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
            (value,) = value
        if (
            not isinstance(value, list)
            or not value
            or not all(type(one) is int and 0 <= one < _MAX_METADATA for one in value)
        ):
            raise RequestTypeError.about(
                place,
                f"must be a list of integers from 0 to {_MAX_METADATA - 1}, such as [1, 16, 24] "
                "for a `grid_thw`",
            )
        return np.array(value, np.int64)

    def _rows(self, value: Any, place: str) -> Any:
        """Return the array of one image's embeddings, `[rows, width]`."""
        if isinstance(value, str):
            limits = MediaLimits(max_image_bytes=self.connector.mm.max_image_bytes)
            embeds: Any = decode_embeds(value, limits, param=place)
        elif self.are_objects_allowed and is_array_like(value):
            embeds = value
        else:
            raise RequestTypeError.about(
                place,
                f"must be a safetensors file in base64, not {type(value).__name__}; encode what "
                "`safetensors.numpy.save` returns",
            )
        is_batch_of_one = len(embeds.shape) == 3 and embeds.shape[0] == 1
        return embeds[0] if is_batch_of_one else embeds

    def _image_object(self, value: Any, place: str, *, has_uuid: bool) -> Any:
        if not self.are_objects_allowed:
            raise RequestValueError(
                f"`{place}` has the type `image_pil`, which only `LLM.chat` takes; "
                "use `image_url` with a data URL",
                param=f"{place}.type",
            )
        if value is None and not has_uuid:
            raise RequestValueError.about(f"{place}.image_pil", "is missing")
        return value


def _refuse_fields(part: Mapping[str, Any], names: Sequence[str], place: str) -> None:
    """Refuse fields that have no effect on a part of this type."""
    for name in names:
        if part.get(name) is not None:
            raise RequestValueError.about(
                f"{place}.{name}", "has no effect on a part of this type; remove it"
            )


def _read_url(
    part: Mapping[str, Any], kind: str, place: str, fields: Sequence[str], *, has_uuid: bool
) -> tuple[str | None, str, Mapping[str, Any]]:
    """Return a part's URL, where it stands, and the object that it stands in, if any.

    The URL may only be missing where a uuid stands for the medium.
    """
    value, place = part.get(kind), f"{place}.{kind}"
    within: Mapping[str, Any] = {}
    if isinstance(value, Mapping):
        unknown = sorted(str(name) for name in value if name not in fields)
        if unknown:
            known = " and ".join(f"`{name}`" for name in fields)
            raise RequestValueError(
                f"`{place}` has the unknown field `{unknown[0]}`; it knows {known} (a `uuid` "
                "stands beside it, on the part)",
                param=f"{place}.{unknown[0]}",
            )
        within, value, place = value, value.get("url"), f"{place}.url"
    if not isinstance(value, str) and not (value is None and has_uuid):
        found = "is missing" if value is None else f"is no text but {type(value).__name__}"
        example = _EXAMPLES.get(kind, "data:image/png")
        raise RequestTypeError.about(place, f"{found}; give a URL, such as `{example};base64,...`")
    return value, place, within


def _read_audio_file(value: Any, place: str, *, has_uuid: bool) -> tuple[str | None, str]:
    """Return the base64 of `{"data": ..., "format": ...}`, and where it stands.

    `format` is what a client believes: the file itself tells.
    """
    if value is None and has_uuid:
        return None, place
    if not isinstance(value, Mapping):
        found = "is missing" if value is None else f"is no object but {type(value).__name__}"
        raise RequestTypeError.about(
            place, f"{found}; give `data`, a file in base64, and its `format`, such as `wav`"
        )
    unknown = sorted(str(name) for name in value if name not in ("data", "format"))
    if unknown:
        raise RequestValueError(
            f"`{place}` has the unknown field `{unknown[0][:64]}`; it knows `data` and `format`",
            param=f"{place}.{unknown[0][:64]}",
        )
    for name in ("data", "format"):
        if not isinstance(value.get(name), str) and (name in value or name == "data"):
            found = type(value.get(name)).__name__
            raise RequestTypeError.about(f"{place}.{name}", f"must be a text, not {found}")
    return value["data"], f"{place}.data"


def _quote(names: frozenset[str]) -> str:
    return " and ".join(f"`{name}`" for name in sorted(names))


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Say of an error at which part it is."""
    try:
        yield
    except RequestError as error:
        raise type(error)(f"`{place}`: {error}", param=place) from error


def text_part(text: Any, place: str) -> dict[str, str]:
    """Return a text as a part; RequestTypeError if it is none."""
    if not isinstance(text, str):
        raise RequestTypeError.about(place, f"must be a text, not {type(text).__name__}")
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise RequestValueError.about(place, "is no Unicode: it holds half of a surrogate pair")
    return {"type": "text", "text": text}


def _uuid(part: Mapping[str, Any], place: str) -> MediaId | None:
    uuid = part.get("uuid")
    if uuid is None:
        return None
    text = str(uuid)
    if not is_media_id(text):
        raise RequestValueError.about(
            f"{place}.uuid", f"must be 1 to {MAX_MEDIA_ID_LENGTH} printable characters"
        )
    return MediaId(text, f"{place}.uuid")
