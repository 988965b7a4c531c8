"""Messages with content parts to one prompt: text by the template, media beside it.

Both doors (HTTP and `LLM.chat`) come through here. Knows nothing of HTTP.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mmjax.config import MultiModalConfig
from mmjax.errors import MediaError, RequestError, RequestTypeError, RequestValueError
from mmjax.frontend.chat_template import ChatTemplate, ContentFormat
from mmjax.frontend.input_processor import InputProcessor, PromptDict
from mmjax.models.registry import get_placeholder_str
from mmjax.processing.media import (
    IMAGE_FORMATS,
    MediaLimits,
    decode_data_url,
    load_image_bytes,
)

MAX_UUID_LENGTH = 128

_TEXT_TYPES = ("text", "input_text", "output_text", "refusal")
_IMAGE_TYPES = ("image_url", "input_image")
_PART_TYPES = (*_TEXT_TYPES, *_IMAGE_TYPES, "image_pil")
_PART_FIELDS = ("type", "text", "refusal", *_IMAGE_TYPES, "image_pil", "detail", "uuid", "url")


@dataclass(slots=True)
class _Media:
    """The media of a conversation, in the order of their parts."""

    images: list[Any] = field(default_factory=list)
    uuids: list[str | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParser:
    """Turns conversations into prompts for one model."""

    template: ChatTemplate
    mm: MultiModalConfig
    limits: Mapping[str, int]
    """How many items of each modality a prompt may hold."""
    placeholder: Callable[[str, int], str | None]
    """(modality, i from 1) -> what stands for an item in a text that has no parts."""
    special_tokens: frozenset[str]
    """Texts that the tokenizer reads as control tokens: users may not write them."""
    are_objects_allowed: bool = False
    """Whether parts may carry Python objects (`image_pil`): never over HTTP."""

    @classmethod
    def for_model(
        cls, input_processor: InputProcessor, *, are_objects_allowed: bool = False
    ) -> "ChatParser":
        """Make the parser that fits a model's template, tokenizer and limits."""
        model_config = input_processor.model_config
        return cls(
            template=ChatTemplate.from_config(model_config, input_processor.tokenizer),
            mm=model_config.mm,
            limits=input_processor.allowed_mm_limits,
            placeholder=partial(get_placeholder_str, model_config.architecture),
            special_tokens=special_tokens_of(input_processor.tokenizer),
            are_objects_allowed=are_objects_allowed,
        )

    def parse(
        self,
        messages: Sequence[Any],
        *,
        template: ChatTemplate | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> PromptDict:
        """Return the prompt of a conversation, its media decoded."""
        if not messages:
            raise RequestValueError("`messages` is empty; give at least one", param="messages")
        template = template or self.template
        media = _Media()
        conversation = [
            self._message(message, f"messages[{index}]", template.content_format, media)
            for index, message in enumerate(messages)
        ]
        text = template.render(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        prompt: PromptDict = {"prompt": text, "add_special_tokens": False}
        if media.images:
            prompt["multi_modal_data"] = {"image": media.images}
        if any(uuid is not None for uuid in media.uuids):
            prompt["multi_modal_uuids"] = {"image": media.uuids}
        return prompt

    # ---- one message ----------------------------------------------------------------------------

    def _message(
        self,
        message: Any,
        place: str,
        content_format: ContentFormat,
        media: _Media,
    ) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise RequestTypeError(f"`{place}` must be an object", param=place)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RequestValueError(f"`{place}.role` is missing", param=f"{place}.role")
        content = message.get("content")
        parts: list[Any]
        if content is None:
            parts = []
        elif isinstance(content, str):
            parts = [content]
        elif isinstance(content, Sequence):
            parts = list(content)
        else:
            raise RequestTypeError(
                f"`{place}.content` must be a text or a list of parts, "
                f"not {type(content).__name__}",
                param=f"{place}.content",
            )
        first_image = len(media.images) + 1
        parsed = [
            self._part(part, f"{place}.content[{index}]", media)
            if not isinstance(content, str)
            else self._text_part(part, f"{place}.content")
            for index, part in enumerate(parts)
        ]
        kept = [part for part in parsed if part is not None]
        for part in kept:
            self._check_text(part, place, allow_placeholder=content_format == "string")
        rendered: dict[str, Any] = {"role": role}
        if message.get("name") is not None:
            rendered["name"] = message["name"]
            self._check_text({"text": str(message["name"])}, f"{place}.name")
        if content_format == "openai":
            rendered["content"] = kept
        else:
            rendered["content"] = self._join(kept, first_image, place)
        return rendered

    def _join(self, parts: Sequence[Mapping[str, str]], first_image: int, place: str) -> str:
        r"""Return one text; placeholders that it lacks go before it.

        `image, "Which one?"` -> `<image>\nWhich one?`
        """
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        missing: list[str] = []
        num_images = sum(part["type"] == "image" for part in parts)
        wanted = [self.placeholder("image", first_image + i) for i in range(num_images)]
        for placeholder in dict.fromkeys(item for item in wanted if item is not None):
            count, present = wanted.count(placeholder), text.count(placeholder)
            if present > count:
                raise RequestValueError(
                    f"Found more '{placeholder}' placeholders in input prompt than actual "
                    f"multimodal data items: {present} for {count}; remove them",
                    param=f"{place}.content",
                )
            missing += [placeholder] * (count - present)
        known = self.placeholder("image", first_image)
        if num_images == 0 and known is not None and known in text:
            raise RequestValueError(
                f"Found more '{known}' placeholders in input prompt than actual multimodal data "
                "items: the message has no image; remove them",
                param=f"{place}.content",
            )
        return "\n".join([*missing, text]) if missing else text

    # ---- one part -------------------------------------------------------------------------------

    def _part(self, part: Any, place: str, media: _Media) -> dict[str, str] | None:
        if isinstance(part, str):
            return self._text_part(part, place)
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
            return None if text is None else self._text_part(text, f"{place}.text")
        self._admit_image(place, media)
        uuid = _uuid(part, place)
        image = self._image(part, kind, place, has_uuid=uuid is not None)
        media.images.append(image)
        media.uuids.append(uuid)
        return {"type": "image"}

    def _text_part(self, text: Any, place: str) -> dict[str, str]:
        if not isinstance(text, str):
            raise RequestTypeError(
                f"`{place}` must be a text, not {type(text).__name__}", param=place
            )
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise RequestValueError(
                f"`{place}` is no Unicode: it holds half of a surrogate pair", param=place
            )
        return {"type": "text", "text": text}

    def _check_text(
        self, part: Mapping[str, str], place: str, *, allow_placeholder: bool = False
    ) -> None:
        text = part.get("text")
        if not text:
            return
        allowed = self.placeholder("image", 1) if allow_placeholder else None
        found = next(
            (token for token in self.special_tokens if token in text and token != allowed), None
        )
        if found is not None:
            raise RequestValueError(
                f"`{place}` holds `{found}`, which is a control token of this model; remove it, "
                "or put a space into it",
                param=place,
            )

    def _admit_image(self, place: str, media: _Media) -> None:
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
            return self._image_object(value, place)
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

    def _image_object(self, value: Any, place: str) -> Any:
        if not self.are_objects_allowed:
            raise RequestValueError(
                f"`{place}` has the type `image_pil`, which only `LLM.chat` takes; "
                "use `image_url` with a data URL",
                param=f"{place}.type",
            )
        if value is None:
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
            return load_image_bytes(decode_data_url(url, limits, param=place), limits, param=place)
        except MediaError as error:
            # The decoder's own words may tell of its memory; these do not.
            raise RequestValueError(
                f"`{place}` holds no image that can be decoded; send a whole file, base64 encoded, "
                f"of one of the formats {', '.join(IMAGE_FORMATS)}",
                param=place,
            ) from error
        except RequestError as error:
            raise type(error)(f"`{place}`: {error}", param=place) from error


def special_tokens_of(tokenizer: Any) -> frozenset[str]:
    """Return the texts that the tokenizer reads as special tokens, wherever they stand."""
    added = tokenizer.added_tokens_decoder.values()
    marked = {token.content for token in added if token.special}
    return frozenset(text for text in marked | set(tokenizer.all_special_tokens) if text)


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


def _uuid(part: Mapping[str, Any], place: str) -> str | None:
    uuid = part.get("uuid")
    if uuid is None:
        return None
    text = str(uuid)
    if not 0 < len(text) <= MAX_UUID_LENGTH or not text.isprintable():
        raise RequestValueError(
            f"`{place}.uuid` must be 1 to {MAX_UUID_LENGTH} printable characters",
            param=f"{place}.uuid",
        )
    return text


def _check_detail(detail: Any, place: str) -> None:
    if detail not in (None, "auto", "low", "high"):
        raise RequestValueError(
            f"`{place}.detail` must be `auto`, `low` or `high`", param=f"{place}.detail"
        )
