"""The items of a response's input as messages of a chat, and back."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mmjax.errors import RequestError, RequestTypeError, RequestValueError
from mmjax.frontend.prompt.chat_tools import refuse_others
from mmjax.server.openai.structure import errors_of_messages

Message = dict[str, Any]

_ROLES = ("assistant", "developer", "system", "user")
_TEXT_PART_FIELDS = ("type", "text", "refusal")
_IMAGE_PART_FIELDS = ("type", "image_url", "detail", "uuid")
_EMPTY_PART_FIELDS = frozenset({"annotations", "logprobs", "file_id", "prompt_cache_breakpoint"})
"""Fields of parts that came from an answer; they say nothing to a model."""
_ITEM_FIELDS: Mapping[str, frozenset[str]] = {
    "message": frozenset({"type", "role", "content", "id", "status", "parsed"}),
    "function_call": frozenset({"type", "call_id", "name", "arguments", "id", "status"}),
    "function_call_output": frozenset({"type", "call_id", "output", "id", "status"}),
}


class PlacedMessages:
    """Messages for a chat, and where in another API's body each came from."""

    def __init__(self, messages: Iterable[tuple[Message, str]] = (), *, whole: str) -> None:
        """`whole`: the field that all of them come from."""
        self.messages: list[Message] = []
        self._places: list[tuple[str, Sequence[str]]] = []
        """Of each message and, where these do not follow from it, of its parts."""
        self._whole = whole
        for message, place in messages:
            self.add(message, place)

    def add(self, message: Message, place: str, part_places: Sequence[str] = ()) -> None:
        """Append a message that comes from `place`, and its parts from others than these."""
        self.messages.append(message)
        self._places.append((place, part_places))

    @contextmanager
    def naming_items(self) -> Iterator[None]:
        """Name, in errors about messages, the items that they came from."""
        try:
            with errors_of_messages():
                yield
        except RequestError as error:
            pattern = r"(messages\[(\d+)\])((?:\.content\[(\d+)\])?)(.*)"
            found = re.fullmatch(pattern, error.param or "")
            if found is not None and int(found[2]) < len(self._places):
                place, part_places = self._places[int(found[2])]
                is_own = found[4] is not None and int(found[4]) < len(part_places)
                place = part_places[int(found[4])] if is_own else place + found[3]
                error.message = error.message.replace(found[1] + found[3], place)
                error.param = place + found[5]
            elif error.param == "messages":
                error.param = self._whole
            raise


class Conversation(PlacedMessages):
    """The messages of a response's input, and of what it goes on from."""

    def __init__(self, history: Sequence[Message] = ()) -> None:
        super().__init__(((one, "previous_response_id") for one in history), whole="input")

    def with_instructions(self, text: str | None) -> list[Message]:
        """Return the messages behind those of `instructions`, which no follow-up inherits."""
        if text is None:
            return self.messages
        self._places.insert(0, ("instructions", ()))
        return [{"role": "system", "content": text}, *self.messages]

    def add_input(self, given: str | Sequence[Mapping[str, Any]]) -> None:
        """Append the input; RequestError names a wrong item."""
        if isinstance(given, str):
            self.add({"role": "user", "content": given}, "input")
            return
        if not given:
            raise RequestValueError.about("input", "is empty; give at least one item")
        for index, item in enumerate(given):
            self._add_item(item, f"input[{index}]")

    def _add_item(self, item: Mapping[str, Any], place: str) -> None:
        kind = "message" if item.get("type") is None else item["type"]
        known = _ITEM_FIELDS.get(kind) if isinstance(kind, str) else None
        if known is None:
            raise RequestValueError.about(
                f"{place}.type", f"is no item that mmjax reads; it reads {', '.join(_ITEM_FIELDS)}"
            )
        refuse_others(item, known, place)
        match kind:
            case "message":
                role, content = item.get("role"), item.get("content")
                if role not in _ROLES:
                    text = f"must be one of {', '.join(_ROLES)}"
                    raise RequestValueError.about(f"{place}.role", text)
                content = _read_content(content, f"{place}.content")
                self.add({"role": role, "content": content}, place)
            case "function_call":
                self._add_call(item, place)
            case _:
                call_id = text_of(item, "call_id", place)
                content = _read_content(item.get("output"), f"{place}.output")
                self.add({"role": "tool", "tool_call_id": call_id, "content": content}, place)

    def _add_call(self, item: Mapping[str, Any], place: str) -> None:
        """Append a call to the assistant's message before it, if there is one."""
        call = {
            "id": text_of(item, "call_id", place),
            "type": "function",
            "function": {
                "name": text_of(item, "name", place),
                "arguments": text_of(item, "arguments", place),
            },
        }
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == "assistant":
            # A copy: the message may be part of another conversation.
            calls = [*last.get("tool_calls", ()), call]
            self.messages[-1] = {**last, "tool_calls": calls}
        else:
            self.add({"role": "assistant", "content": None, "tool_calls": [call]}, place)


def _read_content(content: Any, place: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestTypeError.about(place, "must be a text or a list of parts")
    return [_read_part(part, f"{place}[{index}]") for index, part in enumerate(content)]


def _read_part(part: Any, place: str) -> Any:
    """Return a part without what is empty; chat's reader checks the rest."""
    if not isinstance(part, Mapping):
        raise RequestTypeError.about(place, "must be an object")
    if part.get("file_id") is not None:
        raise RequestValueError.about(
            f"{place}.file_id",
            "is not supported: this server keeps no files; send the image as `image_url`",
        )
    is_image = part.get("type") == "input_image"
    fields = _IMAGE_PART_FIELDS if is_image else _TEXT_PART_FIELDS
    return {
        name: value
        for name, value in part.items()
        if name in fields or not (name in _EMPTY_PART_FIELDS or value is None)
    }


def text_of(item: Mapping[str, Any], name: str, place: str) -> str:
    """Return a field of an item of the body; RequestTypeError unless it is a text."""
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestTypeError.about(f"{place}.{name}", "must be a text")
    return value


def to_chat_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Return functions in chat's form, where they stand one level deeper."""
    if tools is None:
        return None
    return [
        {
            "type": tool.get("type"),
            "function": {name: value for name, value in tool.items() if name != "type"},
        }
        for tool in tools
    ]


def to_chat_tool_choice(choice: Any) -> Any:
    """Return `tool_choice` in chat's form."""
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            allowed = {"mode": mode, "tools": [to_chat_tool_choice(tool) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def to_chat_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return `text.format` as chat's `response_format`."""
    if form is None:
        return None
    if form.get("type") != "json_schema":
        return dict(form)
    rest = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": rest}
