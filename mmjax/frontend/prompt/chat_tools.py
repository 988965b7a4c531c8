"""Tools of a conversation: the functions that are offered, and the calls in its messages."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mmjax.errors import RequestTypeError, RequestValueError

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
MAX_NAME_CHARS = 256
_MAX_DEPTH = 64


def read_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the functions that are offered, as OpenAI writes them; RequestError names a field."""
    if len(tools) > MAX_TOOLS:
        raise RequestValueError.about(
            "tools", f"holds {len(tools)} functions; give at most {MAX_TOOLS}"
        )
    read = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in read]
    for index, name in enumerate(names):
        if name in names[:index]:
            place = f"tools[{index}].function.name"
            raise RequestValueError.about(place, f"is `{name}`, as another's; rename one")
    return read


def _tool(tool: Any, place: str) -> dict[str, Any]:
    _check_object(tool, place)
    if tool.get("type") != "function":
        raise RequestValueError.about(
            f"{place}.type", "must be `function`; mmjax runs no tools of its own"
        )
    refuse_others(tool, ("type", "function"), place)
    function, place = tool.get("function"), f"{place}.function"
    _check_object(function, place)
    refuse_others(function, ("name", "description", "parameters", "strict"), place)
    name = _name(function.get("name"), f"{place}.name")
    read: dict[str, Any] = {"name": name}
    description = function.get("description")
    if description is not None:
        if not isinstance(description, str):
            raise RequestTypeError.about(f"{place}.description", "must be a text")
        read["description"] = description
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestTypeError.about(f"{place}.parameters", "must be a JSON schema, an object")
    read["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": read}


def _name(name: Any, place: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not _is_name(name):
        raise RequestValueError.about(
            place, f"must be 1 to {MAX_NAME_CHARS} letters, digits, `_`, `-` and `.`"
        )
    return name


def _is_name(name: str) -> bool:
    return all(char.isalnum() or char in "_-." for char in name)


def _check_object(value: Any, place: str) -> None:
    if not isinstance(value, Mapping):
        raise RequestTypeError.about(place, "must be an object")


def refuse_others(given: Mapping[str, Any], known: Collection[str], place: str) -> None:
    """Raise RequestValueError for an object's fields beside those that are known."""
    # Clients write null for what they leave to the server.
    others = (name for name, value in given.items() if name not in known and value is not None)
    other = next(map(str, others), None)
    if other is not None:
        raise RequestValueError.about(
            f"{place}.{other[:64]}", "is not a field that mmjax knows; remove it"
        )


def read_tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Return a message's calls with their arguments as objects, as templates want them."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestTypeError.about(place, "must be a list")
    if len(calls) > MAX_TOOL_CALLS:
        raise RequestValueError.about(
            place, f"holds {len(calls)} calls; send at most {MAX_TOOL_CALLS}"
        )
    return [_tool_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    _check_object(call, place)
    if call.get("type") not in (None, "function"):
        raise RequestValueError.about(f"{place}.type", "must be `function`")
    refuse_others(call, ("id", "type", "function", "index"), place)
    function = call.get("function")
    _check_object(function, f"{place}.function")
    # OpenAI's `parse` adds what it made of the arguments.
    refuse_others(function, ("name", "arguments", "parsed_arguments"), f"{place}.function")
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise RequestTypeError.about(f"{place}.id", "must be a text")
    read: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": _name(function.get("name"), f"{place}.function.name"),
            "arguments": _arguments(function.get("arguments"), f"{place}.function.arguments"),
        },
    }
    return read if call_id is None else {"id": call_id, **read}


def _arguments(arguments: Any, place: str) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if arguments is None or not isinstance(arguments, Mapping):
        raise RequestValueError.about(
            place, "must be the text of a JSON object, as the model wrote it"
        )
    return arguments


def map_texts(value: Any, change: Any, place: str, depth: int = 0) -> Any:
    """Return JSON data with every text replaced by `change(text)`, keys too."""
    if depth > _MAX_DEPTH:
        raise RequestValueError.about(place, f"is nested more than {_MAX_DEPTH} deep; flatten it")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change(str(key)): map_texts(item, change, place, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [map_texts(item, change, place, depth + 1) for item in value]
    return value
