"""`structured_outputs` and `response_format` of a body, as what its answer must match."""

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mmjax.errors import RequestError, RequestTypeError, RequestValueError
from mmjax.params.sampling_params import StructuredOutputsParams

_SCHEMA = "response_format.json_schema.schema"
_FIELDS = frozenset(StructuredOutputsParams.__struct_fields__)
_SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})


def read_structure(
    structured_outputs: Mapping[str, Any] | None, response_format: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """Return the structure that a body asks for; RequestError names a wrong field."""
    formatted = None if response_format is None else _read_format(response_format)
    if structured_outputs is None:
        return formatted
    if formatted is not None:
        raise RequestValueError(
            "`response_format` and `structured_outputs` both say what the answer must match; "
            "leave one of them out",
            param="structured_outputs",
        )
    _check_names(structured_outputs, _FIELDS, "structured_outputs")
    given = {name: value for name, value in structured_outputs.items() if value is not None}
    return StructuredOutputsParams(**given)


def _read_format(response_format: Mapping[str, Any]) -> StructuredOutputsParams | None:
    kind, described = response_format.get("type"), response_format.get("json_schema")
    if described is not None and kind != "json_schema":
        raise RequestValueError.about(
            "response_format.json_schema", f"has no effect with the type {kind}; leave it out"
        )
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        return None
    path = "response_format.json_schema"
    if not isinstance(described, Mapping):
        raise RequestTypeError.about(path, "is missing; give an object with a `schema`")
    _check_names(described, _SCHEMA_FIELDS, path)
    if not isinstance(described.get("schema"), Mapping):
        raise RequestTypeError.about(_SCHEMA, "is missing; give a JSON schema")
    with errors_of_format(True):
        return StructuredOutputsParams(json=described["schema"])


def errors_of_format(
    has_format: bool, /, *, has_calls: bool = False
) -> AbstractContextManager[None]:
    """Rename the field of errors from `structured_outputs`, if the body said it otherwise.

    `has_calls`: it did by tools, of which one must be called.
    """
    name = "tools" if has_calls else _SCHEMA
    return renamed({"structured_outputs": name} if has_format or has_calls else {}, is_whole=True)


@contextmanager
def renamed(new_names: Mapping[str, str], *, is_whole: bool = False) -> Iterator[None]:
    """Name, in errors about fields, those that the client gave; `is_whole`: without their parts.

    `new_names`: by patterns, of which the first that a field begins with holds.
    """
    try:
        yield
    except RequestError as error:
        old = error.param or ""
        for name, new_name in new_names.items():
            found = re.match(rf"(?:{name})(?=\.|$)", old)
            if found is not None:
                error.param = found.expand(new_name) + ("" if is_whole else old[found.end() :])
                error.message = error.message.replace(f"`{old}`", f"`{error.param}`")
                break
        raise


@contextmanager
def errors_of_messages() -> Iterator[None]:
    """Rename the field of errors from the prompt to `messages`."""
    try:
        yield
    except RequestError as error:
        if error.param == "prompt" or (error.param or "").startswith("multi_modal_"):
            error.param = "messages"
        raise


def _check_names(given: Mapping[str, Any], known: frozenset[str], path: str) -> None:
    others = (name for name, value in given.items() if name not in known and value is not None)
    unknown = next(others, None)
    if unknown is not None:
        raise RequestValueError.about(
            f"{path}.{unknown[:64]}",
            f"is not a field that mmjax knows; it has {', '.join(sorted(known))}",
        )
