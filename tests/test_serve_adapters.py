"""The adapter in the box over HTTP: named as a model, loaded while it serves, after a death too."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from PIL import Image, ImageDraw

from tests.test_serve import FEW, Served, message_about

pytestmark = pytest.mark.usefixtures("default_checkpoint")
ENGINE = r"engine process \(pid (\d+)\)"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Serve the default with its adapter, and with the directory of it for others."""
    adapters = Path(__file__).parents[1] / "checkpoints" / "tiny_scenes" / "adapters"
    server = Served(
        *(*FEW, "--precompile", "none", "--enable-lora", "--max-loras", "2"),
        *("--lora-modules", "italian=tiny_scenes/italian"),
        *("--allow-runtime-lora-updating", "--lora-dir", str(adapters)),
    )
    try:
        yield server
    finally:
        server.end()


@pytest.fixture(scope="module")
def address(served: Served) -> str:
    return served.wait_for(r"mmjax serving tiny_scenes at (\S+)\n").group(1)


def ask(address: str, model: str) -> str | None:
    picture = Image.new("RGB", (320, 240), "white")
    ImageDraw.Draw(picture).ellipse((90, 60, 210, 180), fill="red")
    # Requests wait while the engine process starts again.
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=240) as client:
        answer = client.chat.completions.create(
            model=model,
            temperature=0,
            messages=[message_about(picture, "What color is the circle?")],
        )
    assert answer.model == model
    return answer.choices[0].message.content


def post(address: str, verb: str, **body: Any) -> int:
    url = f"{address}/v1/{verb}_lora_adapter"
    return httpx2.post(url, json=body, timeout=240).status_code


def test_a_request_names_the_adapter_as_its_model(address: str) -> None:
    models = httpx2.get(f"{address}/v1/models").json()["data"]
    parents = {"tiny_scenes": None, "italian": "tiny_scenes"}
    assert {one["id"]: one["parent"] for one in models}.items() >= parents.items()
    assert [ask(address, name) for name in parents] == ["red", "rosso"]


def test_a_new_engine_process_has_the_adapters_of_the_killed_one(
    served: Served, address: str
) -> None:
    assert post(address, "load", lora_name="other", lora_path="italian") == 200
    assert ask(address, "other") == "rosso"
    os.kill(int(served.wait_for(ENGINE).group(1)), signal.SIGKILL)
    assert [ask(address, name) for name in ("other", "italian", "tiny_scenes")] == [
        *("rosso", "rosso", "red")
    ]
    metrics = httpx2.get(f"{address}/metrics").text
    assert "vllm:lora_requests_info{" in metrics
    (restarts,) = (line for line in metrics.splitlines() if "engine_restarts_total{" in line)
    assert float(restarts.rpartition(" ")[2]) == 1
    assert post(address, "unload", lora_name="other") == 200
    assert ask(address, "italian") == "rosso"
