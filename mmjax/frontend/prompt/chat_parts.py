"""One content part of a message: a text, or an image with its limits. Says where a mistake is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mmjax.config import MultiModalConfig
from mmjax.errors import MediaError, RequestError, RequestTypeError, RequestValueError
from mmjax.processing.hashing.media_ids import MAX_MEDIA_ID_LENGTH, MediaId, is_media_id
from mmjax.processing.media.decode import IMAGE_FORMATS, MediaLimits, decode_data_url
from mmjax.processing.media.encoded import EncodedImage

_TEXT_TYPES = ("text", "input_text", "output_text", "refusal")
_IMAGE_TYPES = ("image_url", "input_image")
_PART_TYPES = (*_TEXT_TYPES, *_IMAGE_TYPES, "image_pil")
_PART_FIELDS = ("type", "text", "refusal", *_IMAGE_TYPES, "image_pil", "detail", "uuid", "url")


@dataclass(slots=True)
class ConversationMedia:
    """The media of a conversation, in the order of their parts, and the size of its texts."""

    images: list[Any] = field(default_factory=list)
    uuids: list[str | None] = field(default_factory=list)
    num_chars: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReader:
    """Reads parts; images are counted before they are decoded."""

    mm: MultiModalConfig
    limits: Mapping[str, int]
    """How many items of each modality a prompt may hold."""
    are_objects_allowed: bool = False
    """Whether parts may carry Python objects (`image_pil`): never over HTTP."""

    def read(self, part: Any, place: str, media: ConversationMedia) -> dict[str, str] | None:
        """Return `{"type": "text", "text": ...}` or `{"type": "image"}` (None: an empty part).

        The image itself goes to `media`.
        """
        if isinstance(part, str):
            return text_part(part, place)
        if not isinstance(part, Mapping):
            raise RequestTypeError(
                f"`{place}` must be an object or a text, not {type(part).__name__}", param=place
            )
        unknown = sorted(str(name) for name in part if name not in _PART_FIELDS)
        if unknown and "type" in part and part["type"] in _PART_TYPES:
            raise RequestValueError(
                f"`{place}` has the unknown field `{unknown[0]}`; remove it",
                param=f"{place}.{unknown[0]}",
            )
        kind = _part_type(part, place)
        if kind in _TEXT_TYPES:
            text = part.get("refusal" if kind == "refusal" else "text")
            return None if text is None else text_part(text, f"{place}.text")
        self._admit_image(place, media)
        uuid = _uuid(part, place)
        image = self._image(part, kind, place, has_uuid=uuid is not None)
        media.images.append(image)
        media.uuids.append(uuid)
        return {"type": "image"}

    def _admit_image(self, place: str, media: ConversationMedia) -> None:
        limit = self.limits.get("image", 0)
        if len(media.images) >= limit:
            raise RequestValueError(
                f"`{place}` is image number {len(media.images) + 1}; At most {limit} image(s) may "
                "be provided in one prompt; send fewer, or raise `--limit-mm-per-prompt`",
                param=place,
            )

    def _image(self, part: Mapping[str, Any], kind: str, place: str, *, has_uuid: bool) -> Any:
        # The Responses API has it as {"type": "input_image", "image_url": "data:..."}.
        kind = "image_url" if kind == "input_image" and kind not in part else kind
        value = part.get(kind)
        if kind == "image_pil":
            return self._image_object(value, place, has_uuid=has_uuid)
        place = f"{place}.{kind}"
        if isinstance(value, Mapping):
            unknown = sorted(str(name) for name in value if name not in ("url", "detail"))
            if unknown:
                raise RequestValueError(
                    f"`{place}` has the unknown field `{unknown[0]}`; it knows `url` and "
                    "`detail` (a `uuid` stands beside it, on the part)",
                    param=f"{place}.{unknown[0]}",
                )
            _check_detail(value.get("detail"), place)
            value, place = value.get("url"), f"{place}.url"
        _check_detail(part.get("detail"), place)
        if value is None and has_uuid:
            return None
        if not isinstance(value, str):
            raise RequestTypeError(
                f"`{place}` must be a data URL, not {type(value).__name__}; "
                "write `data:image/png;base64,...`",
                param=place,
            )
        return self._image_from_url(value, place)

    def _image_object(self, value: Any, place: str, *, has_uuid: bool) -> Any:
        if not self.are_objects_allowed:
            raise RequestValueError(
                f"`{place}` has the type `image_pil`, which only `LLM.chat` takes; "
                "use `image_url` with a data URL",
                param=f"{place}.type",
            )
        if value is None and not has_uuid:
            raise RequestValueError(f"`{place}.image_pil` is missing", param=f"{place}.image_pil")
        return value

    def _image_from_url(self, url: str, place: str) -> Any:
        scheme = url[:16].partition(":")[0].lower()
        if scheme != "data":
            shown = scheme if scheme in ("http", "https", "file") else "another"
            raise RequestValueError(
                f"`{place}` is a URL of {shown} scheme, which mmjax does not fetch yet; send the "
                "image itself as `data:image/png;base64,...`",
                param=place,
            )
        limits = MediaLimits(
            max_image_bytes=self.mm.max_image_bytes, max_image_pixels=self.mm.max_image_pixels
        )
        try:
            data = decode_data_url(url, limits, param=place)
        except RequestError as error:
            raise _explain(place, error) from error
        return EncodedImage(data, limits, place, explain=partial(_explain, place))


def _explain(place: str, error: RequestError) -> RequestError:
    """Return what a client may read of an error over the image at `place`."""
    if isinstance(error, MediaError):
        # The decoder's own words may tell of its memory; these do not.
        return MediaError(
            f"`{place}` holds no image that can be decoded; send a whole file, base64 encoded, "
            f"of one of the formats {', '.join(IMAGE_FORMATS)}",
            param=place,
        )
    return type(error)(f"`{place}`: {error}", param=place)


def text_part(text: Any, place: str) -> dict[str, str]:
    """Return a text as a part, or say that it is none."""
    if not isinstance(text, str):
        raise RequestTypeError(f"`{place}` must be a text, not {type(text).__name__}", param=place)
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise RequestValueError(
            f"`{place}` is no Unicode: it holds half of a surrogate pair", param=place
        )
    return {"type": "text", "text": text}


def _part_type(part: Mapping[str, Any], place: str) -> str:
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in _PART_TYPES if name in part), None)
        if kind is None:
            raise RequestValueError(
                f"Missing 'type' field in multimodal part `{place}`; give one of "
                f"{', '.join(_PART_TYPES)}",
                param=f"{place}.type",
            )
    if not isinstance(kind, str):
        raise RequestTypeError(f"Invalid 'type' field in `{place}`", param=f"{place}.type")
    if kind not in _PART_TYPES:
        raise RequestValueError(
            f"`{place}` has the type {kind[:64]!r}, which is not supported; supported are "
            f"{', '.join(_PART_TYPES)}",
            param=f"{place}.type",
        )
    return kind


def _uuid(part: Mapping[str, Any], place: str) -> MediaId | None:
    uuid = part.get("uuid")
    if uuid is None:
        return None
    text = str(uuid)
    if not is_media_id(text):
        raise RequestValueError(
            f"`{place}.uuid` must be 1 to {MAX_MEDIA_ID_LENGTH} printable characters",
            param=f"{place}.uuid",
        )
    return MediaId(text, f"{place}.uuid")


def _check_detail(detail: Any, place: str) -> None:
    if detail not in (None, "auto", "low", "high"):
        raise RequestValueError(
            f"`{place}.detail` must be `auto`, `low` or `high`", param=f"{place}.detail"
        )
