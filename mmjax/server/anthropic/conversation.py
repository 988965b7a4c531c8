"""A body of Anthropic's as a chat completion's."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.server.anthropic.protocol import CountTokensRequest, MessagesRequest, ToolChoice
from mmjax.server.openai.protocol import ChatCompletionRequest, shared_fields
from mmjax.server.openai.request_body import validated
from mmjax.server.openai.responses_api.conversation import PlacedMessages, text_of

_Part = dict[str, Any]

_OWN_FIELDS = frozenset({"messages", "tools", "tool_choice", "metadata", "service_tier"})
"""Fields that a chat completion has, too, and that are not its own."""

_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(
    body: CountTokensRequest, conversation: PlacedMessages, thinking_option: str | None
) -> ChatCompletionRequest:
    """Return the chat completion that `body` asks for; RequestError names that one's fields.

    `thinking_option`: the option of the chat template that says whether the model reasons.
    """
    fields = shared_fields(body, ChatCompletionRequest, but=_OWN_FIELDS)
    fields["messages"] = conversation.messages
    if conversation.messages[-1]["role"] == "assistant":
        # What the client has put into the answer's mouth goes on.
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    if body.tools:
        fields["tools"] = [_to_tool(tool, i) for i, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _to_choice(body.tool_choice)
    thinking = body.thinking
    if thinking is not None and (thinking.type == "disabled" or thinking.display == "omitted"):
        fields["include_reasoning"] = False
    if thinking is not None and thinking_option is not None:
        thinks = thinking.type != "disabled"
        given = fields.get("chat_template_kwargs")
        fields["chat_template_kwargs"] = {thinking_option: thinks, **(given or {})}
    config = body.output_config
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    form = body.output_format if config is None or config.format is None else config.format
    if form is not None:
        schema = {"name": "output", "schema": form.get("schema")}
        fields["response_format"] = {"type": form.get("type"), "json_schema": schema}
    if isinstance(body, MessagesRequest):
        fields["stop"] = body.stop_sequences
    return validated(ChatCompletionRequest, fields)


def read_messages(body: CountTokensRequest, *, keeps_thoughts: bool) -> PlacedMessages:
    """Return the messages of a chat; RequestError names a wrong block.

    `keeps_thoughts`: whether the chat template has a place for them.
    """
    if not body.messages:
        raise RequestValueError.about("messages", "is empty; give at least one")
    read = PlacedMessages(whole="messages")
    if body.system is not None:
        read.add({"role": "system", "content": _read_texts(body.system, "system")}, "system")
    for index, message in enumerate(body.messages):
        place, content = f"messages[{index}]", message.content
        if isinstance(content, str):
            read.add({"role": message.role, "content": content}, place)
        elif message.role == "user":
            _read_user(read, content, place)
        elif message.role == "assistant":
            _read_assistant(read, content, place, keeps_thoughts=keeps_thoughts)
        else:
            texts = _read_texts(content, f"{place}.content")
            read.add({"role": "system", "content": texts}, place)
    return read


def _read_user(read: PlacedMessages, blocks: Sequence[Any], place: str) -> None:
    """Add a user's blocks; the results of tools are messages of their own, at their places."""
    parts: dict[str, _Part] = {}
    for block, at in _read_blocks(blocks, f"{place}.content"):
        if block["type"] != "tool_result":
            parts[at] = _read_part(block, at)
            continue
        if parts:
            read.add({"role": "user", "content": [*parts.values()]}, place, [*parts])
        parts = {}
        content = block.get("content")
        if isinstance(content, list):
            content = [_read_part(*one) for one in _read_blocks(content, f"{at}.content")]
        call_id = text_of(block, "tool_use_id", at)
        read.add({"role": "tool", "tool_call_id": call_id, "content": content or ""}, at)
    if parts or not blocks:
        read.add({"role": "user", "content": [*parts.values()]}, place, [*parts])


def _read_assistant(
    read: PlacedMessages, blocks: Sequence[Any], place: str, *, keeps_thoughts: bool
) -> None:
    parts: dict[str, _Part] = {}
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block, at in _read_blocks(blocks, f"{place}.content"):
        match block["type"]:
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": text_of(block, "name", at), "arguments": arguments}
                calls.append(
                    {"id": text_of(block, "id", at), "type": "function", "function": function}
                )
            case "thinking":
                thoughts.append(text_of(block, "thinking", at))
            case "redacted_thinking":
                pass  # nothing that this model has thought
            case _:
                parts[at] = _read_part(block, at)
    message: dict[str, Any] = {"role": "assistant", "content": [*parts.values()] or None}
    if calls:
        message["tool_calls"] = calls
    if thoughts and keeps_thoughts:
        message["reasoning"] = "".join(thoughts)
    read.add(message, place, [*parts])


def _read_blocks(blocks: Sequence[Any], place: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield each block with its place; a text is one, too."""
    for index, block in enumerate(blocks):
        at = f"{place}[{index}]"
        block = {"type": "text", "text": block} if isinstance(block, str) else block
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise RequestTypeError.about(at, "must be an object with a `type`")
        yield block, at


def _read_part(block: Mapping[str, Any], place: str) -> _Part:
    """Return a block of text or a picture as a part of a chat's message."""
    source = block.get("source")
    match block["type"], source:
        case "text", _:
            return {"type": "text", "text": text_of(block, "text", place)}
        case "document", {"type": "text"}:
            return {"type": "text", "text": text_of(source, "data", f"{place}.source")}
        case "image", {"type": "base64"}:
            data = text_of(source, "data", f"{place}.source")
            kind = text_of(source, "media_type", f"{place}.source")
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case "image", {"type": "url"}:
            url = text_of(source, "url", f"{place}.source")
            return {"type": "image_url", "image_url": {"url": url}}
        case (("image" | "document"), _):
            raise RequestValueError.about(
                f"{place}.source",
                "is none that mmjax reads: it reads images as `base64` and by `url`, and documents "
                "of `text`; send a PDF's pages as images",
            )
    raise RequestValueError.about(
        f"{place}.type",
        "is no block that mmjax reads here; it reads text, image, document, tool_use, tool_result "
        "and thinking",
    )


def _read_texts(content: Any, place: str) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": text_of(block, "text", at)}
        for block, at in _read_blocks(content, place)
    ]


def _to_tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise RequestValueError.about(
            f"tools[{index}].type",
            "is a tool that Anthropic's server runs; this one runs none: describe a function of "
            "the client's by `name` and `input_schema`",
        )
    names = {"input_schema": "parameters"}
    known = ("name", "description", "input_schema", "strict")
    function = {names.get(name, name): tool[name] for name in known if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _to_choice(choice: ToolChoice) -> dict[str, Any]:
    if choice.type == "tool" and choice.name is None:
        raise RequestValueError.about("tool_choice.name", "is missing; name the tool")
    by_name = {"type": "function", "function": {"name": choice.name}}
    wanted: dict[str, Any] = {"tool_choice": _CHOICES.get(choice.type, by_name)}
    if choice.disable_parallel_tool_use:
        wanted["parallel_tool_calls"] = False
    return wanted
