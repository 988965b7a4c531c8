"""`tools` and `tool_choice`: what they ask of sampling, and how a chat's answers are read.

Answers are read in one way for streams and wholes: text, tool calls, and why they ended.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mmjax.config.engine_config import ServerConfig
from mmjax.errors import RequestValueError
from mmjax.frontend.output.outputs import CompletionOutput
from mmjax.frontend.output.reasoning import ReasoningFormat, ReasoningReader
from mmjax.frontend.output.tool_calls.deltas import (
    AllowedCallParser,
    CallParser,
    ToolCallDelta,
)
from mmjax.frontend.output.tool_calls.parsers import (
    TOOL_CALL_FORMATS,
    NamedCallParser,
    ToolCallFormat,
    required_call_parser,
)
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.chat_tools import read_tools
from mmjax.params.sampling_params import SamplingParams, StructuredOutputsParams
from mmjax.params.structured_outputs import drop_remarks
from mmjax.server.openai.continuation import new_hex
from mmjax.server.openai.structure import errors_of_format

_MARKS: Mapping[str, str] = {
    "<arg_key>": "glm45",
    "<|tool_call>": "gemma4",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<|tool_call_start|>": "lfm2",
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|plugin|>": "internlm",
    "<|python_tag|>": "llama3_json",
    "tool_code": "pythonic",
}
"""What a chat template writes -> the format of its model's calls; the first that is found."""

_NAMELESS = frozenset({"auto", "none", "required"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request."""

    functions: Mapping[str, Mapping[str, Any]]
    """Name -> function that may be called, as OpenAI's `tools` have it."""
    choice: str
    """"auto", "required", or a function's name."""
    is_parallel: bool
    """Whether an answer may hold several calls."""
    format: ToolCallFormat | None
    """The format of the calls for "auto"; None: JSON that the sampling enforces."""
    is_restricted: bool = False
    """Whether `tools` has functions beside those that may be called."""
    id_format: ToolCallFormat | None = None
    """Whose ids the chat template asks for, also where sampling enforces calls."""
    num_earlier_calls: int = 0
    """In the conversation."""

    def parser(self) -> CallParser:
        """Return a parser for one answer."""
        if self.format is not None:
            parser = self.format.make(self.functions)
            return AllowedCallParser(parser, self.functions) if self.is_restricted else parser
        if self.choice == "required":
            return required_call_parser()
        return NamedCallParser(self.choice)

    def sampling_params(
        self, params: SamplingParams, *, is_structured: bool = False
    ) -> SamplingParams:
        """Return the parameters with what the calls need.

        A call that is asked for has its own schema, in place of what `response_format` says of
        texts; with `is_structured`, `structured_outputs` asks for something else: refused.
        """
        if self.format is not None:
            skips = params.skip_special_tokens and not self.format.keeps_special_tokens
            return msgspec.structs.replace(params, skip_special_tokens=skips)
        if is_structured:
            raise RequestValueError.about(
                "tool_choice",
                "asks for a call, and `structured_outputs` is given too; leave one out",
            )
        with errors_of_format(False, has_calls=True):
            wanted = StructuredOutputsParams(json=json.dumps(self._schema()))
        return msgspec.structs.replace(params, structured_outputs=wanted)

    def new_call_id(self, name: str, index: int) -> str:
        """Return an id for an answer's call."""
        form = self.id_format
        if form is not None and form.has_names_in_ids:
            return f"functions.{name}:{self.num_earlier_calls + index}"
        if form is not None and form.id_length is not None:
            return new_hex()[: form.id_length]
        return f"chatcmpl-tool-{new_hex()}"

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """Return an answer's finish reason; an answer by a function's name just stops."""
        is_called = num_calls > 0 and reason == "stop" and self.choice in _NAMELESS
        return "tool_calls" if is_called else reason

    def _schema(self) -> Mapping[str, Any]:
        if self.choice != "required":
            return _of_object(self.functions[self.choice]["parameters"])
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [name]},
                    "parameters": _moved(
                        _of_object(function["parameters"]),
                        f"#/items/anyOf/{index}/properties/parameters",
                    ),
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for index, (name, function) in enumerate(self.functions.items())
        ]
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        return schema if self.is_parallel else {**schema, "maxItems": 1}


def _of_object(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of arguments, which are an object, also where `{}` or no type is given.

    Without descriptions, which the prompt has: many functions' are too long for a schema.
    """
    return {"type": "object", **drop_remarks(parameters)}


def _moved(schema: Any, place: str) -> Any:
    """Return a schema that stands at `place` of another one: its own references lead there."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, Mapping) or isinstance(schema.get("$id"), str):
        # References within what has an id are relative to that.
        return schema
    moved = {name: _moved(one, place) for name, one in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference.removeprefix("#")
    return moved


def plan_tool_use(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: Any,
    *,
    is_parallel: bool,
    config: ServerConfig,
    template: ChatTemplate,
    num_earlier_calls: int = 0,
) -> ToolUse | None:
    """Return how a request uses its tools; None: it does not. RequestError names a field."""
    name, allowed = _read_choice(choice)
    if not tools:
        if allowed is not None or name not in (None, "none", "auto"):
            raise RequestValueError.about(
                "tool_choice",
                "asks for a call, but `tools` is empty; give functions, or leave `tool_choice` out",
            )
        return None
    functions = {one["function"]["name"]: one["function"] for one in read_tools(tools)}
    name = name or "auto"
    if name == "none":
        return None
    named = allowed if allowed is not None else [name] if name not in _NAMELESS else []
    unknown = next((one for one in named if one not in functions), None)
    if unknown is not None:
        raise RequestValueError.about(
            "tool_choice", f"names `{unknown[:64]}`, which is none of `tools`"
        )
    may_call = functions if allowed is None else {one: functions[one] for one in allowed}
    return ToolUse(
        functions=may_call,
        choice=name,
        is_parallel=is_parallel,
        format=_format(config, template) if name == "auto" else None,
        is_restricted=len(may_call) < len(functions),
        id_format=_find_format(config, template),
        num_earlier_calls=num_earlier_calls,
    )


def tools_of_prompt(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any
) -> Sequence[Mapping[str, Any]] | None:
    """Return the checked `tools` that the prompt tells of.

    Where sampling holds calls to those that are allowed, the prompt stays that of all tools, so
    that its cached prefix is found again; where the model is free, it must not know the others.
    """
    name, allowed = _read_choice(choice)
    if tools is None or allowed is None or name != "auto":
        return tools
    return [tool for tool in tools if tool["function"]["name"] in allowed]


def _read_choice(choice: Any) -> tuple[str | None, Sequence[str] | None]:
    """Return what is chosen, and the names of the functions that are allowed; None: all.

    What is chosen is "none", "auto", "required" or a function's name; None: nothing is said.
    """
    match choice:
        case None:
            return None, None
        case str() if choice in _NAMELESS:
            return choice, None
        case {"type": "function", "function": {"name": str(name)}} if name not in _NAMELESS:
            return name, None
        case {"type": "allowed_tools", "allowed_tools": {"mode": str(mode), "tools": [*tools]}} if (
            mode in ("auto", "required") and tools
        ):
            return mode, [_read_name(tool) for tool in tools]
    raise _wrong_choice()


def _read_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise _wrong_choice()


def _wrong_choice() -> RequestValueError:
    return RequestValueError(
        "`tool_choice` must be `auto`, `none`, `required`, "
        '{"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools", '
        '"allowed_tools": {"mode": "auto" or "required", "tools": [{"type": "function", '
        '"function": {"name": ...}}, ...]}}, with one function at least',
        param="tool_choice",
    )


def _format(config: ServerConfig, template: ChatTemplate) -> ToolCallFormat:
    if not config.enable_auto_tool_choice:
        raise RequestValueError.about(
            "tool_choice",
            "is `auto`, which this server does not offer; name a function, ask with `required`, "
            "or start the server with `--enable-auto-tool-choice`",
        )
    found = _find_format(config, template)
    if found is None:
        raise RequestValueError.about(
            "tool_choice",
            "is `auto`, but nothing says how this model writes calls; start the server with "
            "`--tool-call-parser`, or ask with `required`",
        )
    return found


def _find_format(config: ServerConfig, template: ChatTemplate) -> ToolCallFormat | None:
    """Return the format that the server's flag or a mark in the template names."""
    source = template.source or ""
    found = config.tool_call_parser or next(
        (name for mark, name in _MARKS.items() if mark in source), None
    )
    return None if found is None else TOOL_CALL_FORMATS[found]


# ---- reasoning -----------------------------------------------------------------------------------

_MAX_OPENING_TOKENS = 32
"""At a prompt's end, among which a chat template's opening mark stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningUse:
    """How the reasoning of one request's answers is read."""

    format: ReasoningFormat
    is_open: bool
    """Whether an answer begins within reasoning."""
    is_shown: bool
    """`include_reasoning`."""


def plan_reasoning(
    form: ReasoningFormat | None,
    prompt_token_ids: Sequence[int],
    tokenizer: Any,
    special_ids: Collection[int],
    *,
    is_shown: bool,
) -> ReasoningUse | None:
    """Return how reasoning is read in a format; None: it is not told apart."""
    if form is None:
        return None
    marks = (form.start, form.end)
    last: list[int] = []
    for token_id in reversed(prompt_token_ids[-_MAX_OPENING_TOKENS:]):
        if token_id in special_ids and tokenizer.decode([token_id]) not in marks:
            # Before it another message ends: a mark in there is somebody's text.
            break
        last.insert(0, token_id)
    end = tokenizer.decode(last, skip_special_tokens=False)
    return ReasoningUse(format=form, is_open=form.is_open(end), is_shown=is_shown)


# ---- answers ------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class CallPiece:
    """What a piece of an answer adds to one call."""

    index: int
    id: str | None
    """Is in the call's first piece alone, as the name is."""
    name: str | None
    arguments: str


@dataclass(slots=True, kw_only=True)
class AnswerPiece:
    """What an output adds to one of a chat's answers."""

    parts: list[str | CallPiece]
    """Text and calls, in the answer's order."""
    reasoning: str = ""
    """What the model thought before it, where that is told apart."""
    is_thought: bool = False
    """Whether nothing but reasoning and its marks came, shown or not."""
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[CallPiece]:
        """What is added to calls."""
        return [part for part in self.parts if isinstance(part, CallPiece)]


class AnswerReader:
    """Reads the `n` answers of one chat."""

    def __init__(
        self, tools: ToolUse | None, *, echo: str = "", reasoning: ReasoningUse | None = None
    ) -> None:
        """`echo`: text that comes before each answer."""
        self._tools = tools
        self._echo = echo
        self._reasoning = reasoning
        self._thoughts: dict[int, ReasoningReader] = {}
        self._parsers: dict[int, CallParser] = {}
        self._num_calls: dict[int, int] = {}
        self._begun: set[int] = set()

    @property
    def holds_text_back(self) -> bool:
        """Whether an output may add nothing that can be shown yet."""
        return self._tools is not None or self._reasoning is not None

    def read(self, output: CompletionOutput) -> AnswerPiece:
        """Return what `output` adds; each text must come once."""
        reasoning, text, is_thought = self._tell_apart(output)
        piece = self._parse(output, text)
        piece.reasoning, piece.is_thought = reasoning, is_thought
        if output.index not in self._begun:
            self._begun.add(output.index)
            piece.parts.insert(0, self._echo)
        return piece

    def _tell_apart(self, output: CompletionOutput) -> tuple[str, str, bool]:
        """Return what `output` adds to the reasoning that is shown, and to the text behind it.

        Then `AnswerPiece.is_thought`.
        """
        use, index = self._reasoning, output.index
        if use is None:
            return "", output.text, False
        if index not in self._thoughts:
            self._thoughts[index] = ReasoningReader(use.format, is_open=use.is_open)
        reader = self._thoughts[index]
        was_within = reader.is_within
        parts = [reader.push(output.text)]
        is_within = was_within or reader.is_within
        if output.finish_reason is not None:
            parts.append(reader.finish())
        thought = "".join(part.reasoning for part in parts) if use.is_shown else ""
        text = "".join(part.text for part in parts)
        return thought, text, is_within and not text

    def _parse(self, output: CompletionOutput, text: str) -> AnswerPiece:
        tools, index = self._tools, output.index
        if tools is None:
            return AnswerPiece(parts=[text], finish_reason=output.finish_reason)
        if index not in self._parsers:
            self._parsers[index] = tools.parser()
        parser = self._parsers[index]
        deltas = [parser.push(text)]
        if output.finish_reason is not None:
            deltas.append(parser.finish())
        piece = AnswerPiece(
            parts=[
                part if isinstance(part, str) else _call_piece(part, tools)
                for delta in deltas
                for part in delta.parts
                if isinstance(part, str) or tools.is_parallel or part.index == 0
            ]
        )
        num_new = sum(call.name is not None for call in piece.calls)
        self._num_calls[index] = self._num_calls.get(index, 0) + num_new
        piece.finish_reason = tools.finish_reason(output.finish_reason, self._num_calls[index])
        return piece


def _call_piece(delta: ToolCallDelta, tools: ToolUse) -> CallPiece:
    call_id = None
    if delta.name is not None:
        call_id = delta.call_id or tools.new_call_id(delta.name, delta.index)
    return CallPiece(index=delta.index, id=call_id, name=delta.name, arguments=delta.arguments)


def join_calls(pieces: list[CallPiece]) -> list[CallPiece]:
    """Return whole calls from the pieces of one answer."""
    whole: dict[int, CallPiece] = {}
    for piece in pieces:
        call = whole.setdefault(
            piece.index, CallPiece(index=piece.index, id=piece.id, name=piece.name, arguments="")
        )
        call.arguments += piece.arguments
    return list(whole.values())
