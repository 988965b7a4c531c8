"""Every threat has a test that bears its id, and a line in docs/security.md that names its file."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.threats.rows import ROWS

ROOT = Path(__file__).parents[2]
_ROW = re.compile(
    r"^\| (?P<ids>[^|]+) \| [^|]{10,} \| \[[^\]]*\]\((?P<file>[^|]+)\) \|$", re.MULTILINE
)


def _words_of(file: Path) -> str:
    """Return the names of a file's tests, and the texts of their parameters' ids."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += [node.name] if node.name.startswith("test_") else []
        elif isinstance(node, ast.keyword) and node.arg == "ids":
            texts = (one for one in ast.walk(node.value) if isinstance(one, ast.Constant))
            found += [str(one.value) for one in texts]
    return " ".join(found)


def test_every_row_has_a_test_in_the_file_that_the_document_names() -> None:
    documented: dict[str, str] = {}
    for row in _ROW.finditer((ROOT / "docs" / "security.md").read_text(encoding="utf-8")):
        words = _words_of(ROOT / "docs" / row["file"])
        for row_id in re.findall(r"`([^`]+)`", row["ids"]):
            documented[row_id] = words
    assert documented.keys() == set(ROWS)
    missing = [one for one, words in documented.items() if one.replace("-", "_") not in words]
    assert missing == []


def test_rows_are_listed_once() -> None:
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_CVE_2026_41523_nothing_is_protected_by_an_assert() -> None:
    """Run these tests where Python leaves asserts out; pytest rewrites those of the tests."""
    command = [
        sys.executable,
        "-O",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/threats",
    ]
    command += ["-m", "not slow", "-W", "ignore:assertions not in test modules"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_CVE_2026_41523_no_assert_guards_what_clients_send() -> None:
    """Where bytes and URLs of clients are read, nothing is checked by an assert at all."""
    found = []
    for folder in ("decoders", "frontend/media", "processing/media", "server", "transport"):
        for file in (ROOT / "mmjax" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Assert):
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert found == []
