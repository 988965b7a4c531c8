"""The documentation's commands run as they stand, or say beside them why they do not run here.

A page is run from its top to its end, as a reader would: shell blocks and Python blocks, those of
one page in one process; a block of text behind one is what it prints (`...` is anything). A line
that begins with `mmjax serve` starts a server, in place of the one before. What cannot run here has
a comment above its fence: `<!-- not run: the reason -->`.

No hub can be reached: its cache has tiny checkpoints with random weights under the names of real
ones, so commands are checked, and answers are not.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from docs.make_from_vllm import FIELDS_WITH_A_FLAG
from docs.make_from_vllm import PAGE as FROM_VLLM
from docs.make_from_vllm import make_page as make_from_vllm
from mmjax.cli.main import COMMANDS
from mmjax.server.flags import parse_flags
from mmjax.server.openai.protocol import ChatCompletionRequest

ROOT = Path(__file__).parents[1]
ELSEWHERE: Mapping[str, str] = {
    "docs/adding_a_model.md": "tests/test_tutorial.py",
    "docs/notes/log.md": "what was tried once",
}
"""Pages whose blocks another test runs, or that are no instructions."""
PAGES = {
    name: page
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    if (name := str(page.relative_to(ROOT))) not in ELSEWHERE
}
HUB: Mapping[str, str] = {
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": "smolvlm",
    "Qwen/Qwen3-VL-2B-Instruct": "qwen3_vl",
    "google/gemma-3-4b-it": "gemma3",
}
"""Models of the pages -> the family whose tiny checkpoint stands for them."""
BLOCK = re.compile(
    r"(?P<mark><!--[^\n]*-->\n\s*)?^(?P<indent> *)```(?P<kind>\w+)\n(?P<body>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
MARK = re.compile(r"<!-- not run: .{10,} -->\s*")
SERVE = re.compile(r"^(mmjax serve|python -m mmjax\.serve|make serve)\b")
RUN_BY = {"sh": "shell", "bash": "shell", "python": "python"}
STARTED = re.compile(r"serving .* at http://[^:\s]+:(\d+)")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    line: int
    kind: str
    body: str
    mark: str | None

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block, continued ones joined, without comments."""
        joined = self.body.replace("\\\n", " ").splitlines()
        return [line for line in joined if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            line=text.count("\n", 0, found.start("indent")) + 1,
            kind=found["kind"],
            body=textwrap.dedent(found["body"]),
            mark=found["mark"],
        )
        for found in BLOCK.finditer(text)
    ]


CASES = [
    pytest.param(page, id=name)
    for name, page in PAGES.items()
    if any(block.kind in RUN_BY for block in blocks(page))
]


@pytest.mark.parametrize("page", CASES)
def test_what_is_written_could_run(page: Path) -> None:
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.mark is not None and "not run" in block.mark:
            assert MARK.fullmatch(block.mark), f"{where}: a mark is `<!-- not run: WHY -->`"
        if block.kind == "python":
            compile(block.body, where, "exec")
        for line in block.commands if block.kind in ("sh", "bash") else ():
            check_command(shlex.split(line, comments=True), where)


def check_command(words: list[str], where: str) -> None:
    """Check a command's name, and a server's flags, also where it cannot run."""
    if words[:1] != ["mmjax"]:
        return
    assert words[1] in COMMANDS, f"{where}: mmjax has no command {words[1]}"
    if words[1] == "serve" and "--config" not in words:
        parse_flags([word for word in words[2:] if word != "&"])


# ---- one page -----------------------------------------------------------------------------------

DRIVER = """
import json, sys, traceback
from contextlib import redirect_stdout
from io import StringIO
names = {"__name__": "__main__"}
for line in sys.stdin:
    printed, error = StringIO(), ""
    try:
        with redirect_stdout(printed):
            exec(compile(json.loads(line), "<the page>", "exec"), names)
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps([printed.getvalue(), error]), flush=True)
"""


@dataclass
class Reader:
    """Who follows a page: a folder, an environment, a Python, and at most one server."""

    folder: Path
    environment: dict[str, str]
    port: str | None = None
    server: Any = None
    python: Any = None
    ports: dict[str, str] = field(default_factory=dict)
    """The port that the page has -> the one that its server has here."""

    def run(self, block: Block) -> str:
        """Run a block, and return what it prints."""
        if block.kind == "python":
            return self._run_python(self._with_ports(block.body))
        printed = ""
        waiting: list[str] = []
        for line in block.commands:
            if SERVE.match(line):
                printed += self._run_shell(waiting)
                waiting = []
                self._serve(line)
            else:
                waiting.append(line)
        return printed + self._run_shell(waiting)

    def close(self) -> None:
        for process in (self.server, self.python):
            if process is not None:
                process.terminate()
                process.communicate(timeout=90)

    def _with_ports(self, text: str) -> str:
        for old, new in self.ports.items():
            text = re.sub(rf"(127\.0\.0\.1|localhost):{old}\b", rf"\1:{new}", text)
        return text

    def _run_shell(self, lines: list[str]) -> str:
        exports = [line for line in lines if line.startswith("export ")]
        for name, _, value in (line[len("export ") :].partition("=") for line in exports):
            self.environment[name] = " ".join(shlex.split(value))
        if not lines:
            return ""
        done = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", self._with_ports("\n".join(lines))],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{lines}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _run_python(self, source: str) -> str:
        if self.python is None:
            self.python = subprocess.Popen(
                [sys.executable, "-c", DRIVER],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        stdin, stdout = self.python.stdin, self.python.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(source) + "\n")
        stdin.flush()
        printed, error = json.loads(stdout.readline())
        assert not error, f"{source}\n{error}"
        return printed

    def _serve(self, line: str) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait(timeout=90)
        words = [word for word in shlex.split(line, comments=True) if word != "&"]
        words = words[3:] if words[0] == "python" else words[2:]
        flags = parse_flags(words)
        words += ["--port", "0", "--precompile", "none"]
        log = self.folder / "server.log"
        with log.open("w") as out:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "mmjax.serve", *words],
                cwd=self.folder,
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.ports[str(flags.port)] = self._wait_for_port(log)

    def _wait_for_port(self, log: Path) -> str:
        started = time.monotonic()
        while time.monotonic() - started < 300 and self.server.poll() is None:
            if found := STARTED.search(log.read_text()):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/ready")
                    return found[1]
                except urllib.error.URLError:
                    pass
            time.sleep(0.5)
        pytest.fail(f"the server did not start:\n{log.read_text()}")


@pytest.fixture
def reader(tmp_path: Path, hub: Path) -> Iterator[Reader]:
    """Who follows a page, in a folder that looks like a checkout."""
    for name in ("README.md", "checkpoints", "constraints", "docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    tools = tmp_path / "bin"
    tools.mkdir()
    # What `hf download` leaves in a directory, of a hub that cannot be reached.
    (tools / "hf").write_text(
        '#!/bin/sh\ntest "$1 $3" = "download --local-dir" || exit 2\n'
        'mkdir -p "$4" && cp -rL "$HF_HUB_CACHE/models--$(echo "$2" | sed s,/,--,)"'
        '/snapshots/main/. "$4"\n'
    )
    (tools / "hf").chmod(0o755)
    ours = ("JAX_NUMPY", "JAX_DEFAULT_MATMUL", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {
        "HF_HUB_CACHE": str(hub),
        "PATH": f"{tools}:{Path(sys.executable).parent}:{environment['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    made = Reader(tmp_path, environment)
    yield made
    made.close()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hub's cache, as a download leaves it."""
    from tests.families import FAMILIES

    cache = tmp_path_factory.mktemp("hub")
    for name, family in HUB.items():
        folder = cache / f"models--{name.replace('/', '--')}"
        copytree(FAMILIES[family].checkpoint, folder / "snapshots" / "main")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("main")
    return cache


@pytest.mark.slow  # starts servers: minutes a page
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", CASES)
def test_a_page_runs_from_its_top_to_its_end(page: Path, reader: Reader) -> None:
    printed = ""
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.kind == "text" and block.mark is None:
            assert shows(block.body, printed), f"{where} is not in what was printed:\n{printed}"
        if block.kind not in RUN_BY or block.mark is not None:
            printed = "" if block.kind in RUN_BY else printed
            continue
        printed = reader.run(block)
        for expected in re.findall(r"^(?:print\(|mmjax chat).*  # (.+)$", block.body, re.M):
            assert expected in printed, f"{where}: {printed}"


def shows(expected: str, printed: str) -> bool:
    """Return whether lines stand in what was printed, one behind the other; `...`: anything."""
    lines = (re.escape(line.rstrip()).replace(r"\.\.\.", ".*") for line in expected.splitlines())
    return re.search(r"\s*\n(?:.*\n)*?".join(lines), printed) is not None


# ---- messages -----------------------------------------------------------------------------------


def texts_of_the_code() -> list[str]:
    """Return every text of the package; what is put into one is a NUL."""
    found = []
    for file in (ROOT / "mmjax").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    one.value if isinstance(one, ast.Constant) else "\0" for one in node.values
                )
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_messages_that_are_quoted_are_printed() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quotes = re.findall(r"^> (.+)$", page, re.MULTILINE)
    texts = texts_of_the_code()
    assert len(quotes) > 20
    unknown: list[str] = []
    for quote in quotes:
        parts = [part.strip().removeprefix("` ") for part in quote.split("...") if part.strip()]
        assert max(map(len, parts)) > 10, f"{quote}: says too little to be found"
        unknown += [part for part in parts if not any(part in text for text in texts)]
    assert not unknown, f"nothing prints {unknown}"


def test_the_tables_of_vllms_flags_are_what_the_script_writes() -> None:
    assert FROM_VLLM.read_text(encoding="utf-8") == make_from_vllm(), "run `make docs`"


def test_a_field_that_is_taken_with_a_flag_is_not_called_missing() -> None:
    page = make_from_vllm()
    for name, flag in FIELDS_WITH_A_FLAG.items():
        (row,) = re.findall(rf"^\| `{name}` \| (.+) \|$", page, re.MULTILINE)
        # Those of `chat_template_kwargs` that are true or false need none.
        assert row.startswith(f"with `{flag}` alone")
        assert name in ChatCompletionRequest.model_fields
        parse_flags(flag.split())
