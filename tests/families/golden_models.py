"""Checkpoints whose model has no class in transformers: what the published code made of them."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor, load_model_class
from mmjax.parity.arrays import PagedModel
from mmjax.processing import BaseMultiModalProcessor, PlaceholderRange
from tests.families.directories import GOLDEN_MODELS

NUM_STEPS = 16


@dataclass(frozen=True, eq=False)
class GoldenModel:
    """A directory of `tests/golden_models`; `path`: itself, or a copy with another config."""

    name: str
    path: Path

    @cached_property
    def cases(self) -> dict[str, dict[str, Any]]:
        expected = json.loads((GOLDEN_MODELS / self.name / "expected.json").read_text())
        return {case["name"]: case for case in expected["cases"]}

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        return load_file(GOLDEN_MODELS / self.name / "expected.safetensors")

    @cached_property
    def processor(self) -> BaseMultiModalProcessor[Any]:
        return create_processor(self.path)

    @cached_property
    def model(self) -> PagedModel:
        config = load_model_config(str(self.path))
        model_class = load_model_class(config.architecture)
        parts: Any = (self.path, model_class, config.hf_config)
        return PagedModel.from_directory(*parts, max_len=1024, prompt_step=512)

    def images(self, case: dict[str, Any]) -> dict[str, Any]:
        folder = GOLDEN_MODELS / self.name / "images"
        images = [_open(folder / f"{name}.png") for name in case["images"]]
        return {"image": images} if images else {}


def to_ranges(case: dict[str, Any]) -> list[PlaceholderRange]:
    """Return a case's placeholders."""
    ranges = []
    for one in case["placeholders"]:
        is_embed = np.zeros(one["length"], bool)
        for start, length in one["is_embed_runs"]:
            is_embed[start : start + length] = True
        mask = None if is_embed.all() else is_embed
        ranges.append(PlaceholderRange(one["offset"], one["length"], mask))
    return ranges


def _open(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.copy()
