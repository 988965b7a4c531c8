"""The chat template: its source, its content format, and rendering."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.sandbox

from mmjax.config import ModelConfig
from mmjax.errors import ConfigError, RequestValueError

ContentFormat = Literal["openai", "string"]
"""openai: the template iterates over content parts; string: it takes one text."""


class ChatTemplate:
    """One chat template with its content format."""

    def __init__(
        self, source: str | None, tokenizer: Any, *, add_special_tokens: bool = False
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self.content_format: ContentFormat = (
            "string" if source is None else detect_content_format(source)
        )
        self.message_fields = frozenset() if source is None else find_member_names(source)
        """All member names in the template: other fields of a message have no effect."""
        self.add_special_tokens = add_special_tokens
        """Whether the tokenizer adds BOS to what it renders; else the template writes it."""

    @staticmethod
    def from_config(
        model_config: ModelConfig, tokenizer: Any, *, family_source: str | None = None
    ) -> "ChatTemplate":
        """Return the operator's template, else the checkpoint's, else `family_source`.

        The checkpoint's is the tokenizer's, or in a file of HF's processors.
        """
        source = _read_operators(model_config.chat_template)
        if source is None:
            source = _default_of(tokenizer.chat_template)
        source = source or _read_directory(model_config.path)
        if source is None and family_source is not None:
            return ChatTemplate(family_source, tokenizer, add_special_tokens=True)
        return ChatTemplate(source, tokenizer)

    def with_source(self, source: str) -> "ChatTemplate":
        """Return another template for the same tokenizer."""
        return ChatTemplate(source, self._tokenizer)

    def render(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt's text; transformers renders in a sandbox."""
        if self._source is None:
            raise RequestValueError(
                "this model has no chat template; use /v1/completions, or start the server with "
                "`--chat-template`",
                param="messages",
            )
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in conversation],
                chat_template=self._source,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        except jinja2.TemplateError as error:
            raise RequestValueError(
                f"the chat template refuses these messages: {_reason(error)}", param="messages"
            ) from error
        except Exception as error:  # a template's code may raise anything
            raise RequestValueError(
                "the chat template cannot render these messages; do their roles alternate, "
                "beginning with `user`?",
                param="messages",
            ) from error


def _reason(error: jinja2.TemplateError) -> str:
    # Only the template's own messages (raise_exception); other errors may show internals.
    if type(error) is jinja2.TemplateError and error.message:
        return error.message
    return "it failed; check the roles and the content of the messages"


# ---- sources -----------------------------------------------------------------------------------


def _read_operators(chat_template: str | None) -> str | None:
    """Return the template of the operator's setting: a file's path, or the template."""
    if chat_template is None:
        return None
    if any(mark in chat_template for mark in "{\n"):
        return chat_template
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"`chat_template` is {chat_template!r}: no file that can be read, and no template "
            "either; give one of the two"
        ) from error


def _default_of(template: Any) -> str | None:
    if isinstance(template, Mapping):
        return template.get("default")
    return template


def _read_directory(path: Path) -> str | None:
    """Return the template of a checkpoint directory, from the files of HF's processors."""
    jinja_file = path / "chat_template.jinja"
    if jinja_file.is_file():
        return jinja_file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "processor_config.json"):
        json_file = path / name
        if json_file.is_file():
            settings = json.loads(json_file.read_text(encoding="utf-8"))
            source = _default_of(settings.get("chat_template"))
            if source is not None:
                return source
    return None


# ---- content format ----------------------------------------------------------------------------


def detect_content_format(source: str) -> ContentFormat:
    """Return "openai" if the template iterates over a message's content, by its syntax tree."""
    tree = _parse(source)
    if tree is None:
        return "string"
    contents = _ContentNames(tree)
    loops = tree.find_all(nodes.For)
    return "openai" if any(contents.is_content(loop.iter) for loop in loops) else "string"


def find_member_names(source: str) -> frozenset[str]:
    """Return the names of all attributes and items that a template accesses, of any object."""
    tree = _parse(source)
    if tree is None:
        return frozenset()
    asked = (nodes.Getattr, nodes.Getitem, nodes.Call)
    names = (_member(node)[1] for node in tree.find_all(asked))
    return frozenset(name for name in names if isinstance(name, str))


def _parse(source: str) -> nodes.Template | None:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    try:
        return environment.parse(source)
    except jinja2.TemplateError:
        return None


class _GenerationTag(jinja2.ext.Extension):
    """HF's `{% generation %}` tag, which is replaced by its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        """Return the body between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ContentNames:
    """The names that a template uses for the messages, for a message, and for its content."""

    def __init__(self, tree: nodes.Template) -> None:
        self._messages = {"messages"}
        self._message: set[str] = set()
        self._content = {"content"} - set(_macro_parameters(tree))
        # Macros may reorder assignments: repeat until nothing new is found.
        size = -1
        while size != self._size():
            size = self._size()
            self._collect(tree)

    def is_content(self, node: nodes.Node) -> bool:
        """Return whether `node` is some message's content."""
        node = _unwrap(node)
        if _name(node) in self._content:
            return True
        owner, key = _member(node)
        return key == "content" and owner is not None and self._is_message(owner)

    def _is_message(self, node: nodes.Node) -> bool:
        node = _unwrap(node)
        if _name(node) in self._message:
            return True
        # messages[0]
        return isinstance(node, nodes.Getitem) and self._is_messages(node.node)

    def _is_messages(self, node: nodes.Node) -> bool:
        return _name(_unwrap(node)) in self._messages

    def _size(self) -> int:
        return len(self._messages) + len(self._message) + len(self._content)

    def _collect(self, tree: nodes.Template) -> None:
        for loop in tree.find_all(nodes.For):
            if self._is_messages(loop.iter):
                self._message.update(_names_of_target(loop.target))
        for assign in tree.find_all(nodes.Assign):
            self._note(_names_of_target(assign.target), assign.node)
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        for call in tree.find_all(nodes.Call):
            macro = macros.get(_name(call.node) or "")
            if macro is not None:
                for parameter, value in zip(macro.args, call.args, strict=False):
                    self._note([parameter.name], value)

    def _note(self, names: Sequence[str], value: nodes.Node) -> None:
        if self._is_messages(value):
            self._messages.update(names)
        elif self.is_content(value):
            self._content.update(names)
        elif self._is_message(value):
            self._message.update(names)


def _unwrap(node: nodes.Node) -> nodes.Node:
    """Return the expression inside filters, slices, tests and conditionals."""
    while True:
        match node:
            case nodes.Filter(node=nodes.Node() as inner):
                node = inner
            case nodes.Getitem(node=inner, arg=nodes.Slice()):
                node = inner
            case nodes.CondExpr(expr1=inner):
                node = inner
            case _:
                return node


def _name(node: nodes.Node) -> str | None:
    match node:
        case nodes.Name(name=name):
            return name
        case nodes.NSRef(name=name, attr=attr):
            return f"{name}.{attr}"
        case nodes.Getattr(node=nodes.Name(name=name), attr=attr):
            return f"{name}.{attr}"
    return None


def _member(node: nodes.Node) -> tuple[nodes.Node | None, Any]:
    match node:
        case nodes.Getattr(node=owner, attr=attr):
            return owner, attr
        case nodes.Getitem(node=owner, arg=nodes.Const(value=value)):
            return owner, value
        case nodes.Call(
            node=nodes.Getattr(node=owner, attr="get"), args=[nodes.Const(value=value), *_]
        ):
            return owner, value
    return None, None


def _names_of_target(target: nodes.Node) -> list[str]:
    if isinstance(target, nodes.Tuple):
        return [name for item in target.items for name in _names_of_target(item)]
    name = _name(target)
    return [] if name is None else [name]


def _macro_parameters(tree: nodes.Template) -> Iterator[str]:
    for macro in tree.find_all(nodes.Macro):
        yield from (parameter.name for parameter in macro.args)
