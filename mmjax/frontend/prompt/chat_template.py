"""The model's chat template: its source, what its syntax tree says of it, and rendering."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.sandbox

from mmjax.config.engine_config import ModelConfig
from mmjax.decoders.template import GenerationTag
from mmjax.errors import ConfigError, RequestValueError

ContentFormat = Literal["openai", "string"]
"""openai: the template iterates over content parts; string: it takes one text."""


class ChatTemplate:
    """One chat template with its content format."""

    def __init__(
        self,
        source: str | None,
        tokenizer: Any,
        *,
        add_special_tokens: bool = False,
        content_format: ContentFormat | None = None,
    ) -> None:
        """`content_format` None: detected."""
        self.source = source
        self.tokenizer = tokenizer
        tree = _parse(source or "")
        self.content_format: ContentFormat = content_format or _detect_content_format(tree)
        self.message_fields = _find_member_names(tree)
        """All member names in the template: other fields of a message have no effect."""
        self.variables = _find_variables(tree)
        """What the template expects to be given: `messages`, `tools`, its own options."""
        self.knows_developers = any(one.value == "developer" for one in tree.find_all(nodes.Const))
        """Whether it says what becomes of the role `developer`."""
        self.add_special_tokens = add_special_tokens
        """Whether the tokenizer adds BOS to what it renders; else the template writes it."""

    @staticmethod
    def from_config(
        model_config: ModelConfig,
        tokenizer: Any,
        *,
        family_source: str | None = None,
        is_fixed: bool = False,
    ) -> "ChatTemplate":
        """Return the operator's template, else the checkpoint's, else `family_source`.

        The checkpoint's is the tokenizer's, or in a file of HF's processors; with `is_fixed` it is
        of another model, and not read.
        """
        source = _read_operators(model_config.chat_template)
        if source is None and not is_fixed:
            source = _default_of(tokenizer.chat_template)
            source = source or _read_directory(model_config.path)
        chosen = model_config.chat_template_content_format
        content_format = None if chosen == "auto" else chosen
        if source is None and family_source is not None:
            return ChatTemplate(
                family_source, tokenizer, add_special_tokens=True, content_format=content_format
            )
        return ChatTemplate(source, tokenizer, content_format=content_format)

    def with_source(self, source: str) -> "ChatTemplate":
        """Return another template for the same tokenizer."""
        return ChatTemplate(source, self.tokenizer)

    def render(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text; `options` are the template's own variables."""
        if self.source is None:
            raise RequestValueError(
                "this model has no chat template; use /v1/completions, or start the server with "
                "`--chat-template`",
                param="messages",
            )
        variables = {
            **(options or {}),
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else [dict(tool) for tool in tools],
        }
        return self._render(
            [dict(message) for message in conversation], continue_final_message, variables
        )

    def _render(
        self,
        conversation: list[dict[str, Any]],
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                conversation,
                chat_template=self.source,
                tokenize=False,
                continue_final_message=continue_final_message,
                **variables,
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


# ---- the syntax tree; no template is run here ---------------------------------------------------


def _detect_content_format(tree: nodes.Template) -> ContentFormat:
    """Return "openai" if the template iterates over a `content`, or over what it is assigned to."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    contents = {"content"} - {name for macro in macros.values() for name in _names(macro.args)}
    flows = [(assign.target, assign.node) for assign in tree.find_all(nodes.Assign)]
    for call in tree.find_all(nodes.Call):
        macro = macros.get(_name(call.node) or "")
        flows += [] if macro is None else zip(macro.args, call.args, strict=False)
    # An assignment may stand before what it names, in a macro: repeat until nothing new is found.
    size = -1
    while size < len(contents):
        size = len(contents)
        contents.update(*(_names([to]) for to, value in flows if _is_content(value, contents)))
    loops = tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, contents) for loop in loops) else "string"


def _find_member_names(tree: nodes.Template) -> frozenset[str]:
    """Return the names of all attributes and items that a template accesses, of any object."""
    names = map(_member, tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Call)))
    return frozenset(name for name in names if isinstance(name, str))


def _find_variables(tree: nodes.Template) -> frozenset[str]:
    """Return the names that a template reads: what it is given, and variables of its own."""
    # NOTE: jinja2.meta would compute constants meanwhile, such as `'a' * 10**9`.
    return frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")


def _parse(source: str) -> nodes.Template:
    """Return the syntax tree; an empty one where the source has none."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        extensions=[jinja2.ext.loopcontrols, GenerationTag]
    )
    try:
        return environment.parse(source)
    except (jinja2.TemplateError, RecursionError):
        return nodes.Template([])


def _is_content(node: nodes.Node, contents: Collection[str]) -> bool:
    """Return whether `node` is a message's content, inside of filters, slices and conditionals."""
    match node:
        case nodes.Filter(node=nodes.Node() as inner):
            return _is_content(inner, contents)
        case nodes.Getitem(node=inner, arg=nodes.Slice()) | nodes.CondExpr(expr1=inner):
            return _is_content(inner, contents)
    return _name(node) in contents or _member(node) == "content"


def _name(node: nodes.Node) -> str | None:
    match node:
        case nodes.Name(name=name):
            return name
        case nodes.NSRef(name=name, attr=attr):
            return f"{name}.{attr}"
        case nodes.Getattr(node=nodes.Name(name=name), attr=attr):
            return f"{name}.{attr}"
    return None


def _names(targets: Sequence[nodes.Node]) -> list[str]:
    """Return the names that an assignment gives, which may be tuples of them."""
    found: list[str] = []
    for target in targets:
        inner = _names(target.items) if isinstance(target, nodes.Tuple) else [_name(target)]
        found += [name for name in inner if name is not None]
    return found


def _member(node: nodes.Node) -> Any:
    """Return the name of the attribute or item that `node` is, of whatever object."""
    match node:
        case nodes.Getattr(attr=attr):
            return attr
        case nodes.Getitem(arg=nodes.Const(value=value)):
            return value
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=value), *_]):
            return value
    return None
