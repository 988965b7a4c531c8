"""The examples run as they stand, with the model that comes with mmjax, and are right."""

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(set(EXAMPLES.glob("*.py")) - {EXAMPLES / "grpo_tiny_scenes.py"})
"""But for the one that trains, which `test_grpo_example.py` tests."""
MAX_LINES = 40

pytestmark = pytest.mark.usefixtures("default_checkpoint")


def example_environment() -> dict[str, str]:
    """Return an environment as a user has it: our strict settings are for our own tests."""
    ours = ("JAX_NUMPY", "JAX_DEFAULT_MATMUL", "XLA_FLAGS")
    return {key: value for key, value in os.environ.items() if not key.startswith(ours)}


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=example_environment() | {"PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def serving() -> Iterator[str]:
    """Serve the default on a free port; yield the address of its API."""
    flags = ("--precompile", "none", "--no-enable-standby-engine")
    process = subprocess.Popen(
        [sys.executable, "-m", "mmjax.serve", "--port", "0", *flags],
        cwd=EXAMPLES.parent,
        env=example_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if found := re.search(r"serving .* at (http://\S+)", line):
                yield f"{found[1]}/v1"
                break
        else:
            pytest.fail(f"the server ended before it gave an address:\n{''.join(seen)}")
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_is_short(script: Path):
    assert len(script.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("name", "answer"), [("chat_with_an_image", "red"), ("two_pictures", "second")]
)
def test_an_example_answers(name: str, answer: str, capsys: pytest.CaptureFixture[str]):
    """In this process: JAX is loaded, and programs are those of other tests of the default."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.strip() == answer


def test_streaming_client():
    with serving() as address:
        assert run("streaming_client.py", address) == "green"


def test_the_command_of_the_readme_answers_in_italian():
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    found = re.search(r'^mmjax (chat .*--lora .*) "(.*)"  # (.*)$', readme, re.MULTILINE)
    assert found is not None
    options, question, answer = found.groups()
    command = [sys.executable, "-m", "mmjax", *options.split(), question]
    done = subprocess.run(
        command,
        cwd=EXAMPLES.parent,
        env=example_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.strip() == answer, done.stderr


def stdout_of(notebook: Any) -> str:
    """Return what a notebook's cells print."""
    return "".join(
        output["text"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )


@pytest.mark.parametrize("place", [".", "examples"])
def test_the_notebook_installs_from_its_checkout(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No registry has mmjax: a cell that installed it by its name would get nothing."""
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    source = "".join(cells[1]["source"])
    assert "%pip install" in source
    run = re.sub(r"%pip install -q (.*)", r"installed.append(f'\1')", source)
    monkeypatch.chdir(EXAMPLES.parent / place)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    installed: list[str] = []
    exec(compile(run, "cell", "exec"), {"installed": installed})
    assert installed == [f'"{EXAMPLES.parent}[serve]" pandas']
    monkeypatch.chdir("/")
    with pytest.raises(SystemExit, match="no checkout"):
        exec(compile(run, "cell", "exec"), {"installed": installed})


def test_the_notebook():
    import nbformat
    from nbclient import NotebookClient

    assert find_spec("pandas"), "the notebook would install it; it is in [dev]: run `make test`"
    notebook: Any = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    shown_text = stdout_of(notebook)
    client = NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(EXAMPLES.parent)}}
    )
    client.execute(env=example_environment())
    printed = stdout_of(notebook)
    lines = printed.splitlines()
    assert lines.pop(4) == "24 of 24 are right"
    assert [line.split()[-1] for line in lines] == [
        *("red", "square", "2", "no", "rosso", "blu", "square", "47")
    ]
    assert printed == shown_text
    html = {
        index: output["data"]["text/html"]
        for index, cell in enumerate(notebook.cells)
        for output in cell.get("outputs", ())
        if output.output_type == "execute_result" and "text/html" in output["data"]
    }
    explained, table, cosines, answered = html.values()
    assert explained.count("image") > 1
    assert "<th>answer</th>" in table
    cosine = np.array(re.findall(r"<td>(.*)</td>", cosines), float).reshape(6, 6)
    alike = np.eye(6, dtype=bool)
    assert cosine[alike].min() > 0.5 > cosine[~alike].max()
    assert "<img" in answered
    assert ">47</div>" in answered
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 2, "the drawing, and the one with boxes"
    progress = "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "stream" and output.name == "stderr"
    )
    assert "24/24" in progress
