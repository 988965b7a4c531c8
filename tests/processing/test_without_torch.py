"""Processing needs neither torch nor jax: a fresh interpreter in which both cannot be imported."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.families import FAMILIES, gemma3

SCRIPT = """
import json, sys
for name in ("torch", "torchvision", "jax", "jaxlib", "flax"):
    sys.modules[name] = None  # importing it raises ImportError
from PIL import Image
from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor

images = [Image.new("RGB", (640, 300)), Image.new("RGBA", (30, 50))]
for path, prompt, num_images, kwargs in json.loads(sys.argv[1]):
    for cache in (None, MultiModalProcessorOnlyCache(2**26)):
        processor = create_processor(load_model_config(path), cache=cache)
        inputs = processor.apply(
            prompt, {"image": images[:num_images]}, hf_processor_mm_kwargs=kwargs
        )
        counts = [one.get_num_embeds() for one in inputs.mm_placeholders["image"]]
        print(json.dumps([inputs.prompt_token_ids, inputs.encoder_prompt_token_ids, counts]))
"""
IMAGES = [Image.new("RGB", (640, 300)), Image.new("RGBA", (30, 50))]


def request(name: str) -> tuple[str, str, int, dict[str, Any]]:
    """Return a family's (directory, prompt, number of images, kwargs)."""
    family = FAMILIES[name]
    num_images = min(len(IMAGES), family.max_images)
    prompt = " and ".join([family.placeholder] * num_images) + "?"
    return str(family.path()), prompt, num_images, {}


@cache
def processed_without_torch() -> list[Any]:
    """Return ids and counts, two lines a request: without a cache, and with."""
    rows = [request(name) for name in FAMILIES]
    _, prompt, num_images, _ = request("gemma3")
    rows.append((str(gemma3.directory()), prompt, num_images, {"do_pan_and_scan": True}))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(rows)],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_the_same_without_torch_and_jax(name: str):
    _, prompt, num_images, _ = request(name)
    inputs = FAMILIES[name].make_processor().apply(prompt, {"image": IMAGES[:num_images]})
    counts = [one.get_num_embeds() for one in inputs.mm_placeholders["image"]]
    expected = [inputs.prompt_token_ids, inputs.encoder_prompt_token_ids, counts]
    place = 2 * list(FAMILIES).index(name)
    assert processed_without_torch()[place : place + 2] == [expected] * 2


def test_gemma3_is_cropped_without_torch_and_jax():
    for _, _, counts in processed_without_torch()[-2:]:
        assert counts == [12, 4]
