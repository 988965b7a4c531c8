"""New weights of a real server are those of every answer, also behind an engine's death."""

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.test_serve import FEW, Served

pytestmark = pytest.mark.slow  # a server of its own, whose engine starts twice

NUM_STREAMS = 4


@pytest.fixture
def weights_dir(tmp_path: Path, default_checkpoint: Path) -> Path:
    """A folder with the embedded default, other numbers in its embedding table."""
    made = tmp_path / "weights" / "step-1"
    shutil.copytree(default_checkpoint, made)
    arrays = load_file(made / "model.safetensors")
    (name,) = [one for one in arrays if one.endswith("embed_tokens.weight")]
    rng = np.random.default_rng(0)
    arrays[name] = rng.permutation(arrays[name], axis=0)
    save_file(arrays, made / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "weights"


KEY = {"Authorization": "Bearer secret"}


def post(url: str, body: dict[str, Any]) -> Any:
    return httpx2.post(url, json=body, headers=KEY, timeout=240).raise_for_status().json()


def complete(url: str, number: int) -> str:
    """Return a greedy text."""
    body = {
        "model": "tiny_scenes",
        "prompt": f"{number} red circles and",
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    return post(f"{url}/v1/completions", body)["choices"][0]["text"]


def test_an_engine_that_is_killed_comes_back_with_the_new_weights(weights_dir: Path) -> None:
    control = ("--allow-engine-control", "--weights-dir", str(weights_dir), "--api-key", "secret")
    server = Served(*FEW, *control)
    try:
        url = server.wait_for(r"mmjax serving tiny_scenes at (\S+)\n").group(1)
        pid = int(server.wait_for(r"started the engine process \(pid (\d+)\)").group(1))
        old = [complete(url, number) for number in range(NUM_STREAMS)]
        assert post(f"{url}/update_weights", {"path": "step-1"})["weights_version"] == 1
        new = [complete(url, number) for number in range(NUM_STREAMS)]
        assert not set(old) & set(new)
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            begun = [pool.submit(complete, url, number) for number in range(NUM_STREAMS)]
            os.kill(pid, signal.SIGKILL)
            assert [one.result() for one in begun] == new
        assert [complete(url, number) for number in range(NUM_STREAMS)] == new
    finally:
        server.end()
