"""What pre-commit asks of files: no large file, no private key, no debugger, sorted TOML lists.

`python tests/check_files.py FILE ...`; without names, all tracked files.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_BYTES = 500_000
MAY_BE_LARGE = ("checkpoints/tiny_scenes/model/", "tests/golden/", "tests/golden_models/")
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
DEBUGGERS = {"ipdb", "pdb", "pudb"}
LIST_OF_STRINGS = re.compile(r'^(\w[\w-]*) = (\[(?:\s*"[^"\n]*",?)+\s*\])', re.MULTILINE)
UNSORTED_ON_PURPOSE = {"layers"}
"""Lists whose order says something."""


def problems(file: Path) -> Iterator[str]:
    """Yield what is wrong with `file`."""
    size = file.stat().st_size
    if size > MAX_BYTES and not file.as_posix().startswith(MAY_BE_LARGE):
        yield f"{size} bytes; at most {MAX_BYTES} outside {', '.join(MAY_BE_LARGE)}"
        return
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    if PRIVATE_KEY.search(text):
        yield "holds a private key"
    if file.suffix == ".py":
        yield from debug_statements(text)
    if file.suffix == ".toml":
        yield from unsorted_lists(text)


def debug_statements(text: str) -> Iterator[str]:
    """Yield the debugger calls of a Python file."""
    if not any(name in text for name in (*DEBUGGERS, "breakpoint")):
        return  # to parse takes longest
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            if modules & DEBUGGERS:
                yield f"line {node.lineno}: imports a debugger"
        elif isinstance(node, ast.Name) and node.id == "breakpoint":
            yield f"line {node.lineno}: names breakpoint"


def unsorted_lists(text: str) -> Iterator[str]:
    """Yield the lists of strings that are out of order."""
    for match in LIST_OF_STRINGS.finditer(text):
        strings = re.findall(r'"([^"\n]*)"', match[2])
        if match[1] not in UNSORTED_ON_PURPOSE and strings != sorted(strings, key=str.lower):
            yield f"list `{match[1]}` is not sorted"


def main(names: Sequence[str]) -> int:
    """Print every problem; return 1 if there is one."""
    if not names:
        listing = ["git", "ls-files"]
        names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )
    found = 0
    for name in filter(None, names):
        file = Path(name)
        if file.is_file():
            for problem in problems(file):
                print(f"{name}: {problem}")
                found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
