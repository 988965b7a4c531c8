"""What a chat template's text says of it, by its syntax tree; no template is run here."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.sandbox

ContentFormat = Literal["openai", "string"]
"""openai: the template iterates over content parts; string: it takes one text."""

_MAX_PASSES = 16
"""Over the tree; each follows an assignment that stands before what it names."""


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


def find_variables(source: str) -> frozenset[str]:
    """Return the names that a template reads: what it is given, and variables of its own."""
    # NOTE: jinja2.meta would compute constants meanwhile, such as `'a' * 10**9`.
    tree = _parse(source)
    names = () if tree is None else tree.find_all(nodes.Name)
    return frozenset(name.name for name in names if name.ctx == "load")


def _parse(source: str) -> nodes.Template | None:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    try:
        return environment.parse(source)
    except (jinja2.TemplateError, RecursionError):
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
        for _ in range(_MAX_PASSES):
            if size == self._size():
                break
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
