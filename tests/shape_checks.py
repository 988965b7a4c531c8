"""Which functions the tests check shapes of: those whose types have shapes."""

import ast

from jaxtyping import _import_hook


def _has_shape(node: ast.AST, aliases: set[str]) -> bool:
    """Return whether a type is `Float[Array, "T D"]` somewhere, or one of the aliases."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in aliases:
            return True
        if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Tuple):
            array, *_, shape = part.slice.elts
            is_text = isinstance(shape, ast.Constant) and isinstance(shape.value, str)
            if is_text and not isinstance(array, ast.Constant):
                return True
    return False


class _Shaped(_import_hook.JaxtypingTransformer):
    """Decorates functions of modules and of classes, and knows a file's own aliases of shapes.

    Pyrefly checks all other types. Functions inside of functions would be decorated whenever the
    outer one is called, for 1 to 3 ms each.
    """

    def visit_Module(self, node: ast.Module) -> ast.Module:
        self._aliases: set[str] = set()
        for one in node.body:
            if isinstance(one, ast.Assign) and _has_shape(one.value, self._aliases):
                self._aliases.update(name.id for name in one.targets if isinstance(name, ast.Name))
        return super().visit_Module(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        types = [
            node.returns,
            *(one.annotation for one in ast.walk(node.args) if isinstance(one, ast.arg)),
        ]
        if any(_has_shape(one, self._aliases) for one in types if one is not None):
            super().visit_FunctionDef(node)
        return node

    def generic_visit(self, node: ast.AST) -> None:
        if not isinstance(node, ast.FunctionDef):
            super().generic_visit(node)


def install() -> None:
    """Let modules that are imported from now on have them checked so."""
    _import_hook.JaxtypingTransformer = _Shaped
