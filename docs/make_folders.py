"""Draw which folder of mmjax imports which: `python docs/make_folders.py` writes docs/folders.svg.

A row is a folder that imports, a column one that is imported, both in one order, in which importers
come first: an import of a folder that comes later is right of the diagonal, in blue; one that
closes a circle is left of it, in red. The families, `models.*`, are one row. What is drawn in red
fails `tests/layout/test_layout.py`.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CELL, LABEL, TOP = 15, 330, 150

_FILES = ("file", "files")

Imports = Mapping[str, set[str]]


def find_modules(package: Path) -> dict[str, Path]:
    """Return each module of a package by its full name; `__init__` keeps its name."""
    return {
        ".".join(file.relative_to(package.parent).with_suffix("").parts): file
        for file in sorted(package.rglob("*.py"))
    }


def read_imports(package: Path) -> dict[str, set[str]]:
    """Return the modules of the package that each of its modules imports, anywhere in it."""
    modules = find_modules(package)

    def resolve(name: str) -> str | None:
        return next((one for one in (name, f"{name}.__init__") if one in modules), None)

    return {
        name: {
            found
            for wanted in _imported_names(ast.parse(file.read_text(encoding="utf-8")))
            if (found := next(filter(None, map(resolve, wanted)), None)) is not None
            and found != name
        }
        for name, file in modules.items()
    }


def _imported_names(tree: ast.Module) -> Iterator[tuple[str, ...]]:
    """Yield what each imported name may be: a module of a package, or else a name in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.module) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)


def count_folder_imports(imports: Imports) -> dict[str, Counter[str]]:
    """Return how many imports lead from each folder to each other one.

    A package's `__init__`, which lists its public names, counts for itself. So do the modules that
    lie in the root, which the contract on floors puts in order one by one.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, wanted in imports.items():
        here = folder_of(name)
        found = [there for there in map(folder_of, wanted) if there != here]
        if found:
            counts[here].update(found)
    return counts


def folder_of(module: str) -> str:
    folder, _, file = module.rpartition(".")
    return module if file == "__init__" or "." not in folder else folder


def find_circles(counts: Mapping[str, Mapping[str, int]]) -> list[set[str]]:
    """Return the sets of folders that reach each other."""
    below = {folder: _reach(folder, counts) for folder in counts}
    circles: list[set[str]] = []
    for folder in counts:
        circle = {other for other in below[folder] if folder in below.get(other, ())}
        if circle and circle not in circles:
            circles.append(circle)
    return circles


def _reach(folder: str, counts: Mapping[str, Mapping[str, int]]) -> set[str]:
    found: set[str] = set()
    left = [folder]
    while left:
        new = set(counts.get(left.pop(), ())) - found
        found |= new
        left += new
    return found


def order_folders(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the folders, each behind all that import it and are in no circle with it."""
    left = set(counts) | {other for found in counts.values() for other in found}
    below = {folder: _reach(folder, counts) for folder in left}
    ordered: list[str] = []

    def rank(folder: str) -> tuple[bool, int, str]:
        importers = [other for other in left if folder in counts.get(other, ())]
        is_awaited = any(other not in below[folder] for other in importers)
        return is_awaited, len(importers), folder

    while left:
        ordered.append(min(left, key=rank))
        left.remove(ordered[-1])
    return ordered


def draw(package: Path) -> str:
    """Return the picture as SVG."""
    imports = read_imports(package)
    counts = _join_families(count_folder_imports(imports))
    folders = order_folders(counts)
    files, lines = Counter[str](), Counter[str]()
    for name, file in find_modules(package).items():
        folder = _row_of(folder_of(name))
        files[folder] += 1
        lines[folder] += len(file.read_text(encoding="utf-8").splitlines())
    side = CELL * len(folders)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + side + 8}" '
        f'height="{TOP + side + 8}" font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for row, folder in enumerate(folders):
        name = escape(folder.removeprefix(f"{package.name}."))
        y, across = TOP + CELL * row, LABEL + CELL * row
        text = f"{name} ({files[folder]} {_FILES[files[folder] > 1]}, {lines[folder]:,} lines)"
        parts += [
            f'<rect x="{LABEL}" y="{y}" width="{side}" height="{CELL}" '
            f'fill="{"#f4f6f8" if row % 2 else "#fff"}"/>',
            f'<text x="{LABEL - 6}" y="{y + 11}" text-anchor="end">{text}</text>',
            f'<text transform="translate({across + 11},{TOP - 6}) rotate(-60)">{name}</text>',
            f'<rect x="{across}" y="{y}" width="{CELL}" height="{CELL}" fill="#c9d1d9"/>',
        ]
        parts += [
            _cell(LABEL + CELL * column, y, counts[folder][other], is_down=column > row)
            for column, other in enumerate(folders)
            if counts.get(folder, {}).get(other)
        ]
    return "\n".join([*parts, "</svg>", ""])


def _join_families(counts: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
    joined: dict[str, Counter[str]] = defaultdict(Counter)
    for folder, found in counts.items():
        for other, number in found.items():
            if _row_of(folder) != _row_of(other):
                joined[_row_of(folder)][_row_of(other)] += number
    return joined


def _row_of(folder: str) -> str:
    parts = folder.split(".")
    is_family = parts[1:2] == ["models"] and len(parts) > 2 and parts[2] != "__init__"
    return f"{parts[0]}.models.*" if is_family else folder


def _cell(x: int, y: int, number: int, *, is_down: bool) -> str:
    """Return a square with a number of imports: the more, the darker."""
    fill = "#1f6feb" if is_down else "#d1242f"
    strength = min(0.25 + number / 20, 1.0)
    colour = "#fff" if strength > 0.55 else "#111"
    return (
        f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" fill="{fill}" '
        f'fill-opacity="{strength:.2f}"/><text x="{x + CELL / 2}" y="{y + 11}" font-size="8" '
        f'text-anchor="middle" fill="{colour}">{number}</text>'
    )


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs" / "folders.svg"
    target.write_text(draw(source / "mmjax"), encoding="utf-8")
