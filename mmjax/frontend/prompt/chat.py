"""Chat messages with content parts to one prompt: text by the chat template, and media.

For the HTTP server and for `LLM.chat`. Knows nothing of HTTP.

Control tokens that somebody wrote in a message: they stay text.

A template's text is tokenized with the control tokens that the template wrote. Where a message
holds the text of one, a mark goes through the template in its place, and that text is tokenized
apart, as text:

    "is <eos> red?"  ->  "is 5f0e..x0x red?"  ->  [("<bos>is ", False), ("<eos>", True), ...]
"""

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmjax.errors import ContextLengthError, RequestTypeError, RequestValueError
from mmjax.frontend.prompt.chat_parts import ConversationMedia, PartReader, text_part
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.chat_tools import map_texts, read_tool_calls, read_tools
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.requests.prompts import PromptDict
from mmjax.params.media_io import find_media_io_fault
from mmjax.system.request_times import measuring


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

    def find(self, text: str, *, allowed: Collection[str] = ()) -> str | None:
        """Return the first control token in `text` except `allowed`, or None."""
        found = self.find_at(text, 0, allowed=allowed)
        return None if found is None else found[1]

    def find_at(
        self, text: str, place: int, *, allowed: Collection[str] = ()
    ) -> tuple[int, str] | None:
        """Return the first control token from `place` on, and where it begins; None: none."""
        for start in self._starts.finditer(text, place):
            for length in self._lengths:
                token = text[start.start() : start.start() + length]
                if token in self._tokens and token not in allowed:
                    return start.start(), token
        return None


class Literals:
    """The control tokens' texts of one conversation, each with its mark."""

    def __init__(self) -> None:
        # Nobody can write a mark in a message, since nobody can guess it.
        self._nonce = secrets.token_hex(12)
        self._texts: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._texts)

    def mark(self, text: str, tokens: ControlTokens, *, allowed: Collection[str] = ()) -> str:
        """Return `text` with a mark in the place of every control token."""
        pieces: list[str] = []
        place = 0
        while (found := tokens.find_at(text, place, allowed=allowed)) is not None:
            start, token = found
            pieces += [text[place:start], f"{self._nonce}x{len(self._texts)}x"]
            self._texts.append(token)
            place = start + len(token)
        return "".join([*pieces, text[place:]]) if pieces else text

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Return the rendered text in pieces, and whether each is to be read as mere text."""
        pieces: list[tuple[str, bool]] = []
        for index, piece in enumerate(re.split(f"{self._nonce}x([0-9]+)x", rendered)):
            text = self._texts[int(piece)] if index % 2 else piece
            if text:
                pieces.append((text, bool(index % 2)))
        return pieces


REASONING_FIELDS = ("reasoning", "reasoning_content")
"""Two names of one field, which clients send back under either; templates know one of them."""

_READ_FIELDS = frozenset(
    {"role", "content", "name", "refusal", "tool_calls", "tool_call_id", *REASONING_FIELDS}
)

_RESERVED_OPTIONS = frozenset(
    """messages tools documents conversation chat_template tokenize add_generation_prompt
    continue_final_message return_tensors return_dict padding truncation max_length
    """.split()
)
"""Variables of a template that are not its own options."""

_NO_PLACE = "is given, but this model's chat template has no place for it; leave it out"


@dataclass(slots=True, kw_only=True)
class _Conversation:
    """What is gathered while the messages are read."""

    template: ChatTemplate
    media: ConversationMedia
    literals: Literals


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParser:
    """Turns conversations into prompts for one model."""

    template: ChatTemplate
    parts: PartReader
    placeholder: Callable[[str, int], str | None]
    """(modality, i from 1) -> the item's placeholder in a text without parts."""
    control_tokens: ControlTokens
    """Texts that mean something else than themselves; in a message they are mere text."""
    tokenize_pieces: Callable[[Sequence[tuple[str, bool]], bool], list[int]] | None
    """(pieces of a prompt, and whether they are mere text; whether BOS is added) -> token ids.
    None where the model's processor wants text: there, nobody may write a control token."""
    max_chars: int
    """Limit on all texts of a conversation; longer ones cannot fit into the context."""
    interleaves: bool = False
    """Whether placeholders stand where their parts stood, in templates that take one text."""

    @classmethod
    def for_model(
        cls, input_processor: InputProcessor, *, are_objects_allowed: bool = False
    ) -> "ChatParser":
        """Return the parser for a model's template, tokenizer and limits."""
        model_config, info = input_processor.model_config, input_processor.info
        return cls(
            template=ChatTemplate.from_config(
                model_config,
                input_processor.tokenizer,
                family_source=info.chat_template,
                is_fixed=info.is_chat_template_fixed,
            ),
            parts=PartReader(
                connector=input_processor.connector,
                info=info,
                are_objects_allowed=are_objects_allowed,
            ),
            placeholder=info.find_placeholder_str,
            control_tokens=ControlTokens.of(input_processor.tokenizer),
            tokenize_pieces=(
                input_processor.tokenize_pieces if input_processor.keeps_token_ids else None
            ),
            interleaves=model_config.interleave_mm_strings,
            max_chars=input_processor.max_prompt_chars,
        )

    def parse(
        self,
        messages: Sequence[Any],
        *,
        template: ChatTemplate | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        media_io_kwargs: Mapping[str, Any] | None = None,
    ) -> PromptDict:
        """Return the prompt of a conversation; its `http:` and `file:` URLs are not read yet.

        `template_kwargs`: the template's own options. `add_special_tokens`: the tokenizer adds its
        own, besides those that the template writes. `media_io_kwargs`: replace the operator's.
        """
        if not messages:
            raise RequestValueError.about("messages", "is empty; give at least one")
        template = template or self.template
        _check_options(template_kwargs or {}, template)
        media = ConversationMedia(video_options=_read_video_options(media_io_kwargs))
        talk = _Conversation(template=template, media=media, literals=Literals())
        conversation = [
            self._message(message, f"messages[{index}]", talk)
            for index, message in enumerate(messages)
        ]
        with measuring("tokenize"):
            text = template.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=self._tools(tools, talk) if tools else None,
                options=template_kwargs,
            )
            prompt = self._prompt(text, add_special_tokens or template.add_special_tokens, talk)
        return {**prompt, **media.to_prompt()}

    @property
    def _modalities(self) -> tuple[str, ...]:
        """What a message may hold beside text."""
        known = self.parts.info.allowed_mm_limits
        return tuple(one for one in ("image", "video", "audio") if one in known)

    def _prompt(self, text: str, add_special_tokens: bool, talk: _Conversation) -> PromptDict:
        """Return the rendered text as a prompt: as token ids if it holds literals."""
        if not talk.literals or self.tokenize_pieces is None:
            return {"prompt": text, "add_special_tokens": add_special_tokens}
        pieces = talk.literals.split(text)
        return {"prompt_token_ids": self.tokenize_pieces(pieces, add_special_tokens)}

    def _tools(self, tools: Sequence[Any], talk: _Conversation) -> list[dict[str, Any]]:
        read = read_tools(tools)
        if "tools" not in talk.template.variables:
            raise RequestValueError.about(
                "tools", f"{_NO_PLACE}, or have a template set that takes tools (`--chat-template`)"
            )
        return map_texts(read, lambda text: self._admit(text, "tools", talk), "tools")

    # ---- one message ----------------------------------------------------------------------------

    def _message(self, message: Any, place: str, talk: _Conversation) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise RequestTypeError.about(place, "must be an object")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RequestValueError.about(f"{place}.role", "is missing")
        firsts = {modality: talk.media.count(modality) + 1 for modality in self._modalities}
        kept = self._content(message.get("content"), f"{place}.content", talk.media)
        content_format = talk.template.content_format
        allowed = frozenset[str]()
        if content_format == "string":
            allowed = frozenset(filter(None, (self.placeholder(m, 1) for m in firsts)))
        for part in kept:
            if "text" in part:
                part["text"] = self._admit(part["text"], place, talk, allowed=allowed)
        self._check_seams([part["text"] for part in kept if "text" in part], place, allowed)
        if role == "developer" and not talk.template.knows_developers:
            # OpenAI's newer word for it; most templates would leave such a message out, or refuse.
            role = "system"
        rendered: dict[str, Any] = {"role": role}
        if message.get("name") is not None:
            rendered["name"] = self._admit(str(message["name"]), f"{place}.name", talk)
        for name, text in _read_extras(message, place, talk.template.message_fields).items():
            rendered[name] = self._admit(text, f"{place}.{name}", talk)
        rendered |= self._tool_fields(message, place, talk)
        if content_format == "string":
            rendered["content"] = self._join(kept, firsts, place)
        elif role == "tool" and all(part["type"] == "text" for part in kept):
            # Templates print a tool's result as it is, where it has no pictures.
            rendered["content"] = "\n".join(part["text"] for part in kept)
        else:
            rendered["content"] = kept
        return rendered

    def _tool_fields(
        self, message: Mapping[str, Any], place: str, talk: _Conversation
    ) -> dict[str, Any]:
        """Return a message's calls, or the id of the call that it answers."""
        fields: dict[str, Any] = {}
        call_id = message.get("tool_call_id")
        if call_id is not None:
            text = text_part(call_id, f"{place}.tool_call_id")["text"]
            fields["tool_call_id"] = self._admit(text, f"{place}.tool_call_id", talk)
        place = f"{place}.tool_calls"
        calls = read_tool_calls(message.get("tool_calls") or (), place)
        if calls and "tool_calls" not in talk.template.message_fields:
            raise RequestValueError.about(place, f"{_NO_PLACE}, or put its text into `content`")
        if calls:
            admit = map_texts(calls, lambda text: self._admit(text, place, talk), place)
            fields["tool_calls"] = admit
        return fields

    def _content(self, content: Any, place: str, media: ConversationMedia) -> list[dict[str, str]]:
        if content is None:
            return []
        if isinstance(content, str):
            return [text_part(content, place)]
        if not isinstance(content, Sequence):
            raise RequestTypeError.about(
                place, f"must be a text or a list of parts, not {type(content).__name__}"
            )
        parts = [
            self.parts.read(part, f"{place}[{index}]", media) for index, part in enumerate(content)
        ]
        return [part for part in parts if part is not None]

    def _join(
        self, parts: Sequence[Mapping[str, str]], firsts: Mapping[str, int], place: str
    ) -> str:
        r"""Return one text; missing placeholders are put before it, or where the items stood.

        `"Is", image, "red?"` -> `<image>\nIs\nred?`, and with `interleaves`: `Is\n<image>\nred?`
        """
        texts = [part["text"] for part in parts if part["type"] == "text"]
        counts, pieces, wanted = dict(firsts), list[str | None](), list[str]()
        for part in parts:
            if (modality := part["type"]) == "text":
                pieces.append(part["text"])
                continue
            pieces.append(self.placeholder(modality, counts[modality]))
            wanted += filter(None, pieces[-1:])
            counts[modality] += 1
        own = {m: known for m, first in firsts.items() if (known := self.placeholder(m, first))}
        if self.interleaves:
            _refuse_placeholders(texts, own.values(), place)
            return "\n".join(piece for piece in pieces if piece is not None)
        text, missing = "\n".join(texts), list(wanted)
        for placeholder in dict.fromkeys(wanted):
            count, present = wanted.count(placeholder), text.count(placeholder)
            if present > count:
                raise _too_many_placeholders(placeholder, f"{present} for {count}", place)
            for _ in range(present):
                missing.remove(placeholder)
        for modality, known in own.items():
            if known in text and known not in wanted:
                raise _too_many_placeholders(known, f"the message has no {modality}", place)
        return "\n".join([*missing, text]) if missing else text

    def _admit(
        self,
        text: str,
        place: str,
        talk: _Conversation,
        *,
        allowed: Collection[str] = (),
    ) -> str:
        """Return a text with marks in the place of control tokens; refuse what is too long."""
        talk.media.num_chars += len(text)
        if talk.media.num_chars > self.max_chars:
            # Here, since the tokenizer would refuse it much later.
            raise ContextLengthError(
                f"the messages have more than {self.max_chars} characters, which no prompt of "
                "this model can hold; shorten them",
                param=place,
            )
        if self.tokenize_pieces is not None:
            marked = talk.literals.mark(text, self.control_tokens, allowed=allowed)
            self._refuse_plain_placeholders(marked, place, allowed)
            return marked
        found = self.control_tokens.find(text, allowed=allowed)
        if found is not None:
            raise RequestValueError.about(
                place,
                f"holds `{found}`, which is a control token of this model; remove it, or put a "
                "space into it",
            )
        return text

    def _refuse_plain_placeholders(self, text: str, place: str, allowed: Collection[str]) -> None:
        """Refuse a placeholder that is no control token, as InternVL's: it has no mark.

        The prompt's own could not be told from it, and one of them would bind the wrong words.
        """
        for modality in self._modalities:
            placeholder = self.placeholder(modality, 1)
            if placeholder is None or placeholder in allowed or placeholder not in text:
                continue
            raise RequestValueError.about(
                place,
                f"holds '{placeholder}', which is where this model's prompts have their "
                f"{modality}s, and no control token, so that it cannot be told from them; put a "
                "space into it",
            )

    def _check_seams(self, texts: Sequence[str], place: str, allowed: Collection[str]) -> None:
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


def _refuse_placeholders(texts: Sequence[str], placeholders: Collection[str], place: str) -> None:
    for placeholder in placeholders:
        if any(placeholder in text for text in texts):
            raise RequestValueError.about(
                f"{place}.content",
                f"has a text with '{placeholder}', but this server puts placeholders where the "
                "images stand; remove it",
            )


def _too_many_placeholders(placeholder: str, counted: str, place: str) -> RequestValueError:
    return RequestValueError(
        f"Found more '{placeholder}' placeholders in input prompt than actual multimodal data "
        f"items: {counted}; remove them",
        param=f"{place}.content",
    )


def _read_video_options(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the part of a request's `media_io_kwargs` that is about videos."""
    fault = find_media_io_fault(given or {})
    if fault is not None:
        raise RequestValueError.about(f"media_io_kwargs{fault[0]}", fault[1])
    return (given or {}).get("video", {})


def _check_options(options: Mapping[str, Any], template: ChatTemplate) -> None:
    """Refuse what the template does not ask for, and what it is given by other fields."""
    for name in options:
        place = f"chat_template_kwargs.{str(name)[:64]}"
        if name in _RESERVED_OPTIONS:
            raise RequestValueError.about(place, "is set by a field of its own; leave it out")
        if name not in template.variables:
            known = sorted(template.variables - _RESERVED_OPTIONS)
            raise RequestValueError.about(
                place,
                "has no effect: this model's chat template does not ask for it; it asks for "
                f"{', '.join(f'`{one}`' for one in known) or 'nothing of its own'}",
            )


def _read_extras(message: Mapping[str, Any], place: str, known: frozenset[str]) -> dict[str, str]:
    """Return a message's reasoning and refusal for the template, which must use them.

    Empty fields are left out; any other field that is not empty is refused.
    """
    given = {key: value for key, value in message.items() if not _is_empty(value)}
    for key in given:
        if key not in _READ_FIELDS:
            raise RequestValueError.about(
                f"{place}.{str(key)[:64]}", "has no effect here; leave it out"
            )
    texts: dict[str, str] = {}
    for name in (*REASONING_FIELDS, "refusal"):
        if name in given:
            texts[name] = text_part(given[name], f"{place}.{name}")["text"]
    if len({texts[name] for name in REASONING_FIELDS if name in texts}) > 1:
        raise RequestValueError(
            f"`{place}` has `reasoning` and `reasoning_content`, and they differ; give one",
            param=f"{place}.reasoning_content",
        )
    extras: dict[str, str] = {}
    for name, text in texts.items():
        wanted = [
            one
            for one in (REASONING_FIELDS if name in REASONING_FIELDS else (name,))
            if one in known
        ]
        if not wanted:
            raise RequestValueError.about(
                f"{place}.{name}", f"{_NO_PLACE}, or put its text into `content`"
            )
        extras |= dict.fromkeys(wanted, text)
    return extras


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | Sequence | Mapping) and not len(value))
