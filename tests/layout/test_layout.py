"""The laws of the layout: no circle of folders, few modules in each, a short way for a picture."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from docs.make_folders import (
    count_folder_imports,
    find_circles,
    find_modules,
    folder_of,
    read_imports,
)
from tests.test_serve import FEW, Served, ask_about

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mmjax"
MAX_MODULES = 12
MAX_FILES_OF_A_PICTURE, MAX_FILES_MEANWHILE = 60, 98
"""Those that are given it, and those that run until its encoder does."""
ENCODER_IS_CALLED = ("engine/device/compilation.py", "__call__")
"""The first program that a picture's request runs is its encoder."""
BY_THE_CLOCK = {"engine/device/threads.py", "frontend/engine_client/liveness.py"}
"""What looks now and then whether a process is well, whatever is asked meanwhile."""


def test_no_circle_leads_through_folders():
    assert find_circles(count_folder_imports(read_imports(PACKAGE))) == []


def test_a_circle_is_found():
    imports = {"m.a.x": {"m.a.b.y"}, "m.a.b.y": {"m.a.z"}, "m.a.z": {"m.c.w"}, "m.c.w": set[str]()}
    assert find_circles(count_folder_imports(imports)) == [{"m.a", "m.a.b"}]


def test_a_folder_has_few_modules():
    modules = [name for name in find_modules(PACKAGE) if not name.endswith(".__init__")]
    counts = Counter(name.rpartition(".")[0] for name in modules)
    assert {name: number for name, number in counts.items() if number > MAX_MODULES} == {}
    assert folder_of("mmjax.engine.core") == "mmjax.engine"


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have processes that start from now on write which of our files run (`sitecustomize.py`)."""
    (tmp_path / "is_on").write_bytes(b"\0")
    (tmp_path / "calls.txt").touch()
    monkeypatch.setenv("MMJAX_TRACE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(__file__).parent), str(ROOT))))
    return tmp_path


@pytest.mark.slow  # a file more or less by what P0 goes on with meanwhile
def test_a_picture_passes_few_files_from_http_to_the_tower(trace: Path):
    """A function is given it if its arguments hold it (`sitecustomize.py`)."""
    # Without a second engine process, which else loads while the picture is on its way.
    server = Served(*FEW, "--precompile", "none")
    try:
        address = server.wait_for(r"mmjax serving tiny_scenes at (\S+)\n").group(1)
        ask_about(address, Image.new("RGB", (320, 240), "red"))
        _set(trace / "is_on", b"\1")
        noise = np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)
        ask_about(address, Image.fromarray(noise))
        _set(trace / "is_on", b"\0")
    finally:
        server.end()
    calls = [line.split() for line in (trace / "calls.txt").read_text().splitlines()]
    encoded_at = min(float(at) for at, *call, _ in calls if tuple(call) == ENCODER_IS_CALLED)
    before = [(file, has) for at, file, _, has in calls if float(at) <= encoded_at]
    run = {file for file, _ in before} - BY_THE_CLOCK
    given = {file for file, has in before if has == "1"}
    assert {
        "server/openai/request_body.py",
        "processing/processor.py",
        "transport/wire.py",
    } <= given
    assert {"models/host_inputs.py", "engine/device/encoder.py"} <= given
    assert len(given) <= MAX_FILES_OF_A_PICTURE, sorted(given)
    assert len(run) <= MAX_FILES_MEANWHILE, sorted(run)


def _set(file: Path, byte: bytes) -> None:
    with file.open("r+b") as opened:
        opened.write(byte)
