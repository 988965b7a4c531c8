"""Checkpoints in `tests/golden_models`, and what the published implementations made of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from mmjax.config import ModelConfig
from mmjax.model_source import load_model_config
from mmjax.models.registry import create_processor, load_model_class
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.parity.compare import LOGITS
from mmjax.processing import BaseMultiModalProcessor, MultiModalInputs

GOLDEN_MODELS = Path(__file__).parent.parent / "golden_models"


@dataclass(frozen=True, kw_only=True, eq=False)
class GoldenModel:
    """One checkpoint."""

    path: Path
    images: Mapping[str, Image.Image]
    expected: Mapping[str, Any]
    """expected.json."""
    tensors: Mapping[str, np.ndarray]
    """expected.safetensors."""
    config: ModelConfig
    processor: BaseMultiModalProcessor[Any]
    model_class: Any
    paged: PagedModel

    @property
    def cases(self) -> dict[str, Any]:
        return {case["name"]: case for case in self.expected["cases"]}

    def process(self, name: str, prompt: Any, **mm_kwargs: Any) -> MultiModalInputs:
        """Return what our processor makes of a prompt and a case's images."""
        images = [self.images[image] for image in self.cases[name]["images"]]
        mm_data = {"image": images} if images else {}
        return self.processor.apply(prompt, mm_data, hf_processor_mm_kwargs=mm_kwargs)

    def find_embeds(self, sample: Sample) -> np.ndarray:
        """Return the embeddings of a sample's items, in the order of their places."""
        return self.paged._run_encoder(sample)[""]

    def run_forced(self, name: str, sample: Sample) -> np.ndarray:
        """Return the logits of 16 steps, each after the published answer so far."""
        answer = np.array(self.cases[name]["greedy_token_ids"][:-1], np.int32)
        forced = replace(sample, token_ids=np.concatenate([sample.token_ids, answer]))
        return self.paged.run(forced)[LOGITS][sample.num_tokens - 1 :]


@cache
def load_golden_model(name: str, *, images: str) -> GoldenModel:
    """Load a checkpoint; `images` names the one that holds the images."""
    path = GOLDEN_MODELS / name
    config = load_model_config(str(path))
    model_class = load_model_class(config.architecture)
    return GoldenModel(
        path=path,
        images={
            file.stem: Image.open(file).copy()
            for file in (GOLDEN_MODELS / images / "images").iterdir()
        },
        expected=json.loads((path / "expected.json").read_text()),
        tensors=load_file(path / "expected.safetensors"),
        config=config,
        processor=create_processor(config),
        model_class=model_class,
        paged=PagedModel.from_directory(path, model_class, config.hf_config, max_len=128),
    )


def assert_placeholders(inputs: MultiModalInputs, expected: Sequence[Mapping[str, Any]]) -> None:
    """The ranges, and the positions in them that take embeddings, are the published ones."""
    ranges = inputs.mm_placeholders.get("image", [])
    assert [(one.offset, one.length) for one in ranges] == [
        (one["offset"], one["length"]) for one in expected
    ]
    for found, wanted in zip(ranges, expected, strict=True):
        is_embed = np.zeros(wanted["length"], bool)
        for start, length in wanted["is_embed_runs"]:
            is_embed[start : start + length] = True
        got = np.ones(found.length, bool) if found.is_embed is None else found.is_embed
        np.testing.assert_array_equal(got, is_embed)
