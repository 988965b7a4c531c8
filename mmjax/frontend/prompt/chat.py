"""Chat messages with content parts to one prompt: text by the chat template, and media.

For the HTTP server and for `LLM.chat`. Knows nothing of HTTP.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.frontend.prompt.chat_parts import ConversationMedia, PartReader, text_part
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.input_processor import InputProcessor, PromptDict
from mmjax.request_times import measuring

_REASONING = ("reasoning", "reasoning_content")
"""Two names of one field, which clients send back under either; templates know one of them."""

_READ_FIELDS = frozenset({"role", "content", "name", "refusal", *_REASONING})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParser:
    """Turns conversations into prompts for one model."""

    template: ChatTemplate
    parts: PartReader
    placeholder: Callable[[str, int], str | None]
    """(modality, i from 1) -> the item's placeholder in a text without parts."""
    control_tokens: "ControlTokens"
    """Texts that users may not write."""
    max_chars: int
    """Limit on all texts of a conversation; longer ones cannot fit into the context."""

    @classmethod
    def for_model(
        cls, input_processor: InputProcessor, *, are_objects_allowed: bool = False
    ) -> "ChatParser":
        """Return the parser for a model's template, tokenizer and limits."""
        model_config = input_processor.model_config
        return cls(
            template=ChatTemplate.from_config(
                model_config,
                input_processor.tokenizer,
                family_source=input_processor.family_chat_template,
            ),
            parts=PartReader(
                mm=model_config.mm,
                check_num_items=input_processor.check_num_items,
                are_objects_allowed=are_objects_allowed,
                check_mm_data=input_processor.check_mm_data,
                embeds_fields=input_processor.image_embeds_fields,
            ),
            placeholder=input_processor.find_placeholder_str,
            control_tokens=ControlTokens.of(input_processor.tokenizer),
            max_chars=input_processor.max_prompt_chars,
        )

    def parse(
        self,
        messages: Sequence[Any],
        *,
        template: ChatTemplate | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> PromptDict:
        """Return the prompt of a conversation, with its media decoded."""
        if not messages:
            raise RequestValueError("`messages` is empty; give at least one", param="messages")
        template = template or self.template
        media = ConversationMedia()
        conversation = [
            self._message(message, f"messages[{index}]", template, media)
            for index, message in enumerate(messages)
        ]
        with measuring("tokenize"):
            text = template.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        prompt: PromptDict = {"prompt": text, "add_special_tokens": template.add_special_tokens}
        if media.images:
            prompt["multi_modal_data"] = {"image": media.image_data()}
        if any(uuid is not None for uuid in media.uuids):
            prompt["multi_modal_uuids"] = {"image": media.uuids}
        return prompt

    # ---- one message ----------------------------------------------------------------------------

    def _message(
        self,
        message: Any,
        place: str,
        template: ChatTemplate,
        media: ConversationMedia,
    ) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise RequestTypeError(f"`{place}` must be an object", param=place)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RequestValueError(f"`{place}.role` is missing", param=f"{place}.role")
        first_image = len(media.images) + 1
        kept = self._content(message.get("content"), f"{place}.content", media)
        content_format = template.content_format
        allowed = self.placeholder("image", 1) if content_format == "string" else None
        for part in kept:
            self._check_text(part.get("text", ""), place, media, allowed=allowed)
        self._check_seams([part["text"] for part in kept if "text" in part], place, allowed)
        rendered: dict[str, Any] = {"role": role}
        if message.get("name") is not None:
            rendered["name"] = message["name"]
            self._check_text(str(message["name"]), f"{place}.name", media)
        for name, text in _read_extras(message, place, template.message_fields).items():
            self._check_text(text, f"{place}.{name}", media)
            rendered[name] = text
        if content_format == "openai":
            rendered["content"] = kept
        else:
            rendered["content"] = self._join(kept, first_image, place)
        return rendered

    def _content(self, content: Any, place: str, media: ConversationMedia) -> list[dict[str, str]]:
        if content is None:
            return []
        if isinstance(content, str):
            return [text_part(content, place)]
        if not isinstance(content, Sequence):
            raise RequestTypeError(
                f"`{place}` must be a text or a list of parts, not {type(content).__name__}",
                param=place,
            )
        parts = [
            self.parts.read(part, f"{place}[{index}]", media) for index, part in enumerate(content)
        ]
        return [part for part in parts if part is not None]

    def _join(self, parts: Sequence[Mapping[str, str]], first_image: int, place: str) -> str:
        r"""Return one text; missing placeholders are put before it.

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

    def _check_text(
        self, text: str, place: str, media: ConversationMedia, *, allowed: str | None = None
    ) -> None:
        media.num_chars += len(text)
        if media.num_chars > self.max_chars:
            # Here, since the tokenizer would refuse it much later.
            raise RequestValueError(
                f"the messages have more than {self.max_chars} characters, which no prompt of "
                "this model can hold; shorten them",
                param=place,
            )
        found = self.control_tokens.find(text, allowed=allowed)
        if found is not None:
            raise RequestValueError(
                f"`{place}` holds `{found}`, which is a control token of this model; remove it, "
                "or put a space into it",
                param=place,
            )

    def _check_seams(self, texts: Sequence[str], place: str, allowed: str | None) -> None:
        """Refuse control tokens split over texts, which templates concatenate, trimmed or not."""
        if len(texts) < 2:
            return
        for joined in ("".join(texts), "".join(text.strip() for text in texts)):
            found = self.control_tokens.find(joined, allowed=allowed)
            if found is not None:
                raise RequestValueError(
                    f"`{place}.content`: its texts make `{found}` together, which is a control "
                    "token of this model; change them",
                    param=f"{place}.content",
                )


def _read_extras(message: Mapping[str, Any], place: str, known: frozenset[str]) -> dict[str, str]:
    """Return a message's reasoning and refusal for the template, which must use them.

    Empty fields are left out; any other field that is not empty is refused.
    """
    given = {key: value for key, value in message.items() if not _is_empty(value)}
    for key in given:
        if key not in _READ_FIELDS:
            shown = str(key)[:64]
            raise RequestValueError(
                f"`{place}.{shown}` has no effect here; leave it out", param=f"{place}.{shown}"
            )
    texts: dict[str, str] = {}
    for name in (*_REASONING, "refusal"):
        if name in given:
            texts[name] = text_part(given[name], f"{place}.{name}")["text"]
    if len({texts[name] for name in _REASONING if name in texts}) > 1:
        raise RequestValueError(
            f"`{place}` has `reasoning` and `reasoning_content`, and they differ; give one",
            param=f"{place}.reasoning_content",
        )
    extras: dict[str, str] = {}
    for name, text in texts.items():
        wanted = [one for one in (_REASONING if name in _REASONING else (name,)) if one in known]
        if not wanted:
            raise RequestValueError(
                f"`{place}.{name}` is given, but this model's chat template has no place for it; "
                "leave it out, or put its text into `content`",
                param=f"{place}.{name}",
            )
        extras |= dict.fromkeys(wanted, text)
    return extras


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | Sequence | Mapping) and not len(value))


class ControlTokens:
    """Texts that a tokenizer parses as special tokens, anywhere in a text."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(token for token in tokens if token)
        self._lengths = sorted({len(token) for token in self._tokens})
        firsts = "".join(re.escape(char) for char in sorted({t[0] for t in self._tokens}))
        self._starts = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    @classmethod
    def of(cls, tokenizer: Any) -> "ControlTokens":
        """Return a tokenizer's special tokens."""
        added = tokenizer.added_tokens_decoder.values()
        return cls([*tokenizer.all_special_tokens, *(t.content for t in added if t.special)])

    def find(self, text: str, *, allowed: str | None = None) -> str | None:
        """Return the first control token in `text` except `allowed`, or None."""
        for start in self._starts.finditer(text):
            for length in self._lengths:
                token = text[start.start() : start.start() + length]
                if token in self._tokens and token != allowed:
                    return token
        return None
