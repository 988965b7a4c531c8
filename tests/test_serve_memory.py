"""What a server's processes have in memory: at most what docs/operations.md says."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import httpx2
import psutil
import pytest
from openai import OpenAI
from safetensors.torch import load_file, save_file

from tests.kit import draw, tiny_gemma3_checkpoint
from tests.test_serve import Served, message_about

MIB = 2**20
API_BYTES = 300 * MIB
"""Of the API server."""
DEFAULT_BYTES = 510 * MIB
"""Of the embedded default's engine process with its 31 programs, compiled there; measured: 442.
210 are Python's and JAX's, 8 the weights, and most others XLA's, of its programs."""
DEFAULT_PEAK_BYTES = 700 * MIB
"""The same while they are compiled; measured: 587."""
LEAST_BYTES = 300 * MIB
"""Of an engine process without weights and KV cache, where weights are what counts."""
MAX_AT_REST = 1.6
"""Bytes at rest for each of the weights', beside `LEAST_BYTES`."""
MAX_AT_PEAK = 2.2
"""Bytes at the start's peak for each of the weights'."""
MID_TEXT = {
    "vocab_size": 262_208,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "max_position_embeddings": 8192,
}
MID_VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 448,
}


class Resident(NamedTuple):
    """Bytes of a server's processes."""

    api: int
    engine: int
    engine_peak: int


@contextmanager
def serving(*argv: str) -> Iterator[Served]:
    """Start a server of one device, as an operator has it."""
    with patch.dict(os.environ, {"XLA_FLAGS": ""}):
        served = Served(*argv)
    try:
        served.wait_for(r"all \d+ programs are compiled")
        yield served
    finally:
        served.end()


def measure(served: Served) -> Resident:
    """Return what is resident; of the engine process also the most that ever was."""
    pid = int(served.wait_for(r"started the engine process \(pid (\d+)\)")[1])
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    api, engine = (psutil.Process(one).memory_info().rss for one in (served.process.pid, pid))
    return Resident(api, engine, int(peak[1]) * 1024)


def ask_something(served: Served, **fields: Any) -> None:
    url = served.wait_for(r"http://127\.0\.0\.1:\d+")[0]
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        message = message_about(draw(200, 150, 3), "What color is the circle?")
        client.chat.completions.create(messages=[message], max_tokens=16, **fields)


@pytest.mark.slow  # a start without a compile cache
def test_the_embedded_default_takes_little(tmp_path: Path) -> None:
    with serving("--compilation-cache-dir", str(tmp_path)) as served:
        ask_something(served, model="tiny_scenes")
        found = measure(served)
    assert found.api < API_BYTES
    assert found.engine < DEFAULT_BYTES
    assert found.engine_peak < DEFAULT_PEAK_BYTES


@pytest.mark.slow  # 677 MiB of weights are written, read and compiled for
@pytest.mark.timeout(1800)
def test_a_checkpoint_takes_little_beside_its_weights(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    flags = ("--dtype", "bfloat16", "--served-model-name", "mid")
    with serving(str(model), *flags, "--compilation-cache-dir", str(tmp_path / "cache")) as served:
        ask_something(served, model="mid")
        found = measure(served)
        kv_cache = read_memory(served, "kv_cache")
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert found.api < API_BYTES
    assert found.engine - kv_cache < MAX_AT_REST * weights + LEAST_BYTES
    assert found.engine_peak - kv_cache < MAX_AT_PEAK * weights


def read_memory(served: Served, cause: str) -> int:
    """Return what the server says that its engine process has in memory for something."""
    url = served.wait_for(r"http://127\.0\.0\.1:\d+")[0]
    text = httpx2.get(f"{url}/metrics", timeout=60).text
    row = rf'^mmjax:engine_resident_memory_bytes{{.*cause="{cause}".*}} (\S+)$'
    found = re.search(row, text, re.M)
    assert found is not None, text
    return int(float(found[1]))


def make_checkpoint(path: Path) -> Path:
    """Write a random Gemma 3 of 340 million parameters, in bfloat16."""
    tiny_gemma3_checkpoint(path, text=MID_TEXT, vision=MID_VISION, tokens_per_image=256)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: one.bfloat16() for name, one in tensors.items()}, file, {"format": "pt"})
    return path
