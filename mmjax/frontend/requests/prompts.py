"""The forms of a prompt, and their parsing into one."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.processing.items.parse import complete_mm_data, parse_mm_uuids

_MAX_SALT_LENGTH = 128


class PromptDict(TypedDict, total=False):
    """A prompt with media or options."""

    prompt: str
    prompt_token_ids: list[int]
    multi_modal_data: Mapping[str, Any] | None
    multi_modal_uuids: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None
    cache_salt: str | None
    add_special_tokens: bool | None
    decoder_prompt: str | list[int] | None
    truncate_prompt_tokens: int | None


PromptType = str | list[int] | PromptDict
"""One prompt of `LLM.generate`."""


class ParsedPrompt(NamedTuple):
    """A prompt with checked fields."""

    text: str | None = None
    token_ids: list[int] | None = None
    mm_data: Mapping[str, Any] = {}
    mm_uuids: Mapping[str, Any] | None = None
    mm_processor_kwargs: Mapping[str, Any] = {}
    cache_salt: str | None = None
    add_special_tokens: bool = True
    decoder_prompt: str | list[int] | None = None
    truncate_prompt_tokens: int | None = None
    """How many of its last tokens a prompt without media keeps; -1: as many as fit."""


def parse_prompt(prompt: object) -> ParsedPrompt:
    """Parse a prompt of any form; RequestError names a wrong field."""
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt)
    if isinstance(prompt, list):
        return ParsedPrompt(token_ids=_token_list(prompt, "prompt_token_ids"))
    if not isinstance(prompt, Mapping):
        raise RequestTypeError(
            f"a prompt is a str, a list of ids or a dict, not {type(prompt).__name__}",
            param="prompt",
        )
    unknown = [str(name) for name in prompt if name not in PromptDict.__annotations__]
    if unknown:
        raise RequestValueError(
            f"a prompt has no field `{unknown[0]}`; known are "
            f"{', '.join(f'`{name}`' for name in PromptDict.__annotations__)}",
            param=unknown[0],
        )
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if (text is None) == (token_ids is None):
        raise RequestValueError(
            "a prompt needs either `prompt` or `prompt_token_ids`, and not both", param="prompt"
        )
    if text is not None and not isinstance(text, str):
        raise RequestTypeError.about("prompt", f"must be a str, not {type(text).__name__}")
    mm_uuids = parse_mm_uuids(_mapping(prompt, "multi_modal_uuids"))
    return ParsedPrompt(
        text=text,
        token_ids=None if token_ids is None else _token_list(token_ids, "prompt_token_ids"),
        mm_data=complete_mm_data(_mapping(prompt, "multi_modal_data"), mm_uuids),
        mm_uuids=mm_uuids or None,
        mm_processor_kwargs=_mapping(prompt, "mm_processor_kwargs"),
        cache_salt=_salt(prompt.get("cache_salt")),
        add_special_tokens=_flag(prompt.get("add_special_tokens"), "add_special_tokens"),
        decoder_prompt=_decoder_prompt(prompt.get("decoder_prompt")),
        truncate_prompt_tokens=_truncation(prompt.get("truncate_prompt_tokens")),
    )


def _flag(value: Any, name: str) -> bool:
    """Return a flag that is true unless a prompt says otherwise."""
    if value is not None and not isinstance(value, bool):
        raise RequestTypeError.about(name, f"must be true or false, not {type(value).__name__}")
    return value is not False


def _truncation(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_number and (value > 0 or value == -1)):
        raise RequestValueError.about(
            "truncate_prompt_tokens", "must be a number of tokens, 1 or more, or -1"
        )
    return value


def _decoder_prompt(value: Any) -> str | list[int] | None:
    if value is None or isinstance(value, str):
        return value
    return _token_list(value, "decoder_prompt")


def _token_list(token_ids: Any, name: str) -> list[int]:
    if not isinstance(token_ids, Sequence) or any(
        isinstance(i, bool) or not isinstance(i, int) for i in token_ids
    ):
        raise RequestTypeError.about(name, "must be a list of integers")
    return list(token_ids)


def _mapping(prompt: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = prompt.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestTypeError.about(name, f"must be a dict, not {type(value).__name__}")
    return value


def _salt(value: Any) -> str | None:
    if value is None:
        return None
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= _MAX_SALT_LENGTH
        or not value.isprintable()
    ):
        raise RequestValueError.about(
            "cache_salt", f"must be a str of 1 to {_MAX_SALT_LENGTH} printable characters"
        )
    return value
