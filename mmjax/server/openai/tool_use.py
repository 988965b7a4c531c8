"""`tools` and `tool_choice`: what they ask of sampling, and how answers are read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mmjax.config.engine_config import ServerConfig
from mmjax.errors import RequestValueError
from mmjax.frontend.output.tool_calls.parsers import (
    TOOL_CALL_FORMATS,
    NamedCallParser,
    ToolCallFormat,
    ToolCallParser,
    required_call_parser,
)
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.chat_tools import read_tools
from mmjax.requests.sampling_params import SamplingParams, StructuredOutputsParams
from mmjax.server.openai.continuation import new_hex

_MARKS: Mapping[str, str] = {
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|plugin|>": "internlm",
    "<|python_tag|>": "llama3_json",
    "tool_code": "pythonic",
}
"""What a chat template writes -> the format of its model's calls."""

_NAMELESS = frozenset({"auto", "none", "required"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request."""

    functions: Mapping[str, Mapping[str, Any]]
    """By name."""
    choice: str
    """"auto", "required", or a function's name."""
    is_parallel: bool
    """Whether an answer may hold several calls."""
    format: ToolCallFormat | None
    """Of "auto"; None: of JSON that the sampling enforces."""

    def parser(self) -> ToolCallParser:
        """Return a parser for one answer."""
        if self.format is not None:
            return self.format.make(frozenset(self.functions))
        if self.choice == "required":
            return required_call_parser()
        return NamedCallParser(self.choice)

    def sampling_params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with what the calls need."""
        if self.format is not None:
            skips = params.skip_special_tokens and not self.format.keeps_special_tokens
            return msgspec.structs.replace(params, skip_special_tokens=skips)
        if params.structured_outputs is not None:
            raise RequestValueError(
                "`tool_choice` asks for a call, and a structure of the answer is given too; leave "
                "one out",
                param="tool_choice",
            )
        wanted = StructuredOutputsParams(json=json.dumps(self._schema()))
        return msgspec.structs.replace(params, structured_outputs=wanted)

    def new_call_id(self) -> str:
        """Return an id for a call."""
        length = None if self.format is None else self.format.id_length
        if length is not None:
            return new_hex()[:length]
        return f"chatcmpl-tool-{new_hex()}"

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """Return an answer's finish reason; an answer by a function's name just stops."""
        is_called = num_calls > 0 and reason == "stop" and self.choice in _NAMELESS
        return "tool_calls" if is_called else reason

    def _schema(self) -> Mapping[str, Any]:
        if self.choice != "required":
            return self.functions[self.choice]["parameters"]
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [name]},
                    "parameters": function["parameters"],
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name, function in self.functions.items()
        ]
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        return schema if self.is_parallel else {**schema, "maxItems": 1}


def plan_tool_use(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: Any,
    *,
    is_parallel: bool,
    config: ServerConfig,
    template: ChatTemplate,
) -> ToolUse | None:
    """Return how a request uses its tools; None: it does not. RequestError names a field."""
    name = _read_choice(choice)
    if not tools:
        if name not in (None, "none", "auto"):
            raise RequestValueError(
                "`tool_choice` asks for a call, but `tools` is empty; give functions, or leave "
                "`tool_choice` out",
                param="tool_choice",
            )
        return None
    functions = {one["function"]["name"]: one["function"] for one in read_tools(tools)}
    name = name or "auto"
    if name == "none":
        return None
    if name not in _NAMELESS and name not in functions:
        raise RequestValueError(
            f"`tool_choice` names `{name[:64]}`, which is none of `tools`", param="tool_choice"
        )
    return ToolUse(
        functions=functions,
        choice=name,
        is_parallel=is_parallel,
        format=_format(config, template) if name == "auto" else None,
    )


def _read_choice(choice: Any) -> str | None:
    """Return "none", "auto", "required" or a function's name; None: nothing is said."""
    match choice:
        case None:
            return None
        case str() if choice in _NAMELESS:
            return choice
        case {"type": "function", "function": {"name": str(name)}} if name not in _NAMELESS:
            return name
    raise RequestValueError(
        "`tool_choice` must be `auto`, `none`, `required` or "
        '{"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


def _format(config: ServerConfig, template: ChatTemplate) -> ToolCallFormat:
    if not config.enable_auto_tool_choice:
        raise RequestValueError(
            "`tool_choice` is `auto`, which this server does not offer; name a function, ask with "
            "`required`, or start the server with `--enable-auto-tool-choice`",
            param="tool_choice",
        )
    source = template.source or ""
    found = config.tool_call_parser or next(
        (name for mark, name in _MARKS.items() if mark in source), None
    )
    if found is None:
        raise RequestValueError(
            "`tool_choice` is `auto`, but nothing says how this model writes calls; start the "
            "server with `--tool-call-parser`, or ask with `required`",
            param="tool_choice",
        )
    return TOOL_CALL_FORMATS[found]
