"""pydantic's validation errors as messages for the client, without values."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from mmjax.errors import RequestValueError

ModelT = TypeVar("ModelT", bound=BaseModel)

UNKNOWN_FIELDS = "unknown_fields"
"""Type of the error about all unknown fields of an object."""

_REPLACED_FIELDS: Mapping[str, str] = {
    "guided_json": """give `structured_outputs: {"json": ...}`, or a `response_format`""",
    "guided_regex": """give `structured_outputs: {"regex": ...}`""",
    "guided_choice": """give `structured_outputs: {"choice": [...]}`""",
    "guided_grammar": """give `structured_outputs: {"grammar": ...}`""",
    "guided_whitespace_pattern": """give `structured_outputs: {"whitespace_pattern": ...}`""",
    "guided_decoding_backend": "it is always llguidance; leave it out",
}
"""Names that vLLM had before -> what to give instead."""

_MAX_ERRORS_SHOWN = 3
_MAX_NAME_CHARS = 64
_MAX_PATH_CHARS = 256


def unknown_fields_error(names: Sequence[str]) -> PydanticCustomError:
    """Return one error for all of `names`, of which it lists the first."""
    shown = [name[:_MAX_NAME_CHARS] for name in names[:_MAX_ERRORS_SHOWN]]
    return PydanticCustomError(
        UNKNOWN_FIELDS, "unknown fields", {"names": shown, "num_more": len(names) - len(shown)}
    )


def validated(model: type[ModelT], fields: Mapping[str, Any]) -> ModelT:
    """Return `fields` as a `model`; RequestValueError names the wrong ones."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        refusal = refusal_of(error)
    # Outside of `except`, so that the error does not reference pydantic's, and so the body.
    raise refusal


def refusal_of(error: ValidationError) -> RequestValueError:
    """Return a 400 that names the first few wrong fields.

    The models stop at the first error of a list or a dict, so there are few in all.
    """
    messages: dict[str, str] = {}
    num_more = 0
    for item in error.errors(include_url=False, include_input=False):
        path = field_path(item["loc"])
        if item["type"] == UNKNOWN_FIELDS:
            context = item.get("ctx", {})
            num_more += context["num_more"]
            for name in context["names"]:
                field = f"{path}.{name}" if path else name
                messages[field] = _unknown_message(field)
        else:
            # Each member of a union has an error: keep the first.
            messages.setdefault(path, _message(path, item))
    shown = list(messages.values())[:_MAX_ERRORS_SHOWN]
    num_more += len(messages) - len(shown)
    text = "; ".join(shown)
    if num_more:
        text += f"; and {num_more} more"
    return RequestValueError(text, param=next(iter(messages), "") or None)


def field_path(loc: Sequence[str | int]) -> str:
    """Return pydantic's location as a path: `messages[0].content`."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        # Names of union members, and pydantic's own steps such as `[key]`, have other characters.
        elif step[:_MAX_PATH_CHARS].replace("_", "").replace("-", "").isalnum() and (
            step not in _UNION_MARKS
        ):
            path += f".{step[:_MAX_PATH_CHARS]}" if path else step[:_MAX_PATH_CHARS]
    return path[:_MAX_PATH_CHARS]


_OBJECT = "input should be an object"
_UNION_MARKS = frozenset({"str", "constrained-str", "int", "float", "bool", "dict", "none"})
"""Steps of pydantic's location that name a union's member."""


def _unknown_message(field: str) -> str:
    if field in _REPLACED_FIELDS:
        return f"`{field}` is an older name, which mmjax does not take: {_REPLACED_FIELDS[field]}"
    return f"`{field}` is not a field that mmjax knows; remove it"


def _message(path: str, error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return f"`{path}` is missing; give it"
    # Python's words for it would name classes of ours.
    text = _OBJECT if error["type"] in ("dict_type", "model_type") else error["msg"]
    return f"`{path}`: {text[:1].lower()}{text[1:]}"
