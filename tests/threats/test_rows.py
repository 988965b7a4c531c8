"""Every threat has a test that bears its id, and a line in docs/security.md that names its file."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.threats.rows import ROWS

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "security.md"
_ROW = re.compile(
    r"^\| (?P<ids>[^|]+) \| (?P<also>[^|]*) \| [^|]{10,} \| \[[^\]]*\]\((?P<file>[^|]+)\) \|$",
    re.MULTILINE,
)


def _rows() -> list[re.Match[str]]:
    return list(_ROW.finditer(DOCUMENT.read_text(encoding="utf-8")))


def _ids_of(row: re.Match[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", row["ids"])


def _in_a_name(row_id: str) -> str:
    return row_id.replace("-", "_")


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
    for row in _rows():
        words = _words_of(ROOT / "docs" / row["file"])
        documented |= dict.fromkeys(_ids_of(row), words)
    assert documented.keys() == set(ROWS)
    missing = [one for one, words in documented.items() if _in_a_name(one) not in words]
    assert missing == []


def test_advisories_are_listed_once() -> None:
    assert len(set(ROWS)) == len(ROWS)
    beside = [one for row in _rows() for one in re.findall(r"[^\s,]+", row["also"])]
    assert all(re.fullmatch(r"(CVE|GHSA|PYSEC|vllm)-[0-9a-z-]+", one) for one in beside)
    named = [*ROWS, *beside]
    assert sorted(set(named)) == sorted(named)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_CVE_2026_41523_nothing_is_protected_by_an_assert() -> None:
    """Run these tests where Python leaves asserts out; pytest rewrites those of the tests."""
    files = {(ROOT / "docs" / row["file"]).resolve() for row in _rows()}
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow"]
    options += ["-W", "ignore:assertions not in test modules"]
    options += ["-k", " or ".join(map(_in_a_name, ROWS))]
    command = [sys.executable, "-O", "-m", "pytest", *options, *map(str, sorted(files))]
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
