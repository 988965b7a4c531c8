"""Tiny InternVL checkpoints of both layouts; HF's own processor, or the README's, as the oracle."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.video_processing_utils import VideoProcessorMixin

from mmjax.config.engine_config import MultiModalConfig
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor
from mmjax.processing import BaseMultiModalProcessor
from mmjax.processing.processor import ProcessorCache
from tests.processing.families.family import GOLDEN, Family, HFInputs, golden_processor

PATH = GOLDEN / "internvl"
IMAGE, VIDEO = "<IMG_CONTEXT>", "<video>"


def make_processor(
    *, processor_cache: ProcessorCache | None = None, **mm: Any
) -> BaseMultiModalProcessor[Any]:
    return golden_processor("internvl", processor_cache=processor_cache, **mm)


class WithoutTorchvision(InternVLProcessor):
    """HF's processor, which would refuse any video processor but those of torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
        pass


@cache
def hf_processor() -> Any:
    """HF's own processor, built apart from ours; it processes no videos."""
    return WithoutTorchvision(
        GotOcr2ImageProcessorPil.from_pretrained(PATH),
        AutoTokenizer.from_pretrained(PATH),
        VideoProcessorMixin(),
        image_seq_length=4,
    )


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    outputs = hf_processor()(
        text=prompt, images=images or None, return_tensors="np", **(kwargs if images else {})
    )
    return HFInputs(outputs["input_ids"][0].tolist(), outputs)


FEWER = {"images_kwargs": {"max_patches": 3, "min_patches": 2}}
FAMILY = Family(
    name="internvl",
    make_processor=make_processor,
    call_hf=call_hf,
    embed_token_ids=lambda processor: [processor.info.get_hf_config().image_token_id],
    placeholder=IMAGE,
    lowering_kwargs={"images_kwargs": {"max_patches": 2}},
    extra_kwargs=({}, FEWER, {"crop_to_patches": False}),
    mm_configs=(
        {},
        {"mm_processor_kwargs": {"max_patches": 11}},
        {"mm_processor_kwargs": {"crop_to_patches": False}},
        {"trust_request_mm_kwargs": True},
    ),
)


# ---- the original layout, which has no HF processor --------------------------------------------

CONFIG = {
    "architectures": ["InternVLChatModel"],
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 56,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 6,
    "use_thumbnail": True,
    "vision_config": {"model_type": "intern_vit_6b", "image_size": 56, "patch_size": 14},
    "llm_config": {
        "model_type": "qwen2",
        "hidden_size": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
    },
}


@cache
def original(**overrides: Any) -> Path:
    """Write a tiny checkpoint in the original layout; its `<image>` is several tokens."""
    path = Path(mkdtemp(prefix="mmjax-internvl-"))
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>"]})
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({**CONFIG, **overrides}))
    return path


def make_original(cache: Any = None, mm: Any = None, **overrides: Any) -> Any:
    config = load_model_config(str(original(**overrides)), mm=mm or MultiModalConfig())
    return create_processor(config, cache=cache)


def cut_as_original(image: Image.Image, fewest: int, most: int) -> list[Image.Image]:
    """`dynamic_preprocess` as the model's README has it."""
    ratios = sorted(
        {
            (i, j)
            for n in range(fewest, most + 1)
            for i in range(1, n + 1)
            for j in range(1, n + 1)
            if fewest <= i * j <= most
        },
        key=lambda ratio: ratio[0] * ratio[1],
    )
    best, best_difference = (1, 1), float("inf")
    for ratio in ratios:
        difference = abs(image.width / image.height - ratio[0] / ratio[1])
        if difference < best_difference:
            best, best_difference = ratio, difference
        elif difference == best_difference and (
            image.width * image.height > 0.5 * 56 * 56 * ratio[0] * ratio[1]
        ):
            best = ratio
    resized = image.resize((56 * best[0], 56 * best[1]))
    tiles = []
    for i in range(best[0] * best[1]):
        x, y = i % best[0] * 56, i // best[0] * 56
        tiles.append(resized.crop((x, y, x + 56, y + 56)))
    return [*tiles, image.resize((56, 56))] if len(tiles) > 1 else tiles


def normalize_as_original(tiles: Sequence[Image.Image]) -> np.ndarray:
    """ToTensor and Normalize, in torch."""
    mean = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
    std = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)
    pixels = [torch.from_numpy(np.asarray(tile).copy()).permute(2, 0, 1) for tile in tiles]
    return torch.stack([(one.float().div(255) - mean) / std for one in pixels]).numpy()


def ids_as_original(processor: Any, prompt: str, counts: Sequence[int]) -> list[int]:
    for count in counts:
        prompt = prompt.replace("<image>", f"<img>{'<IMG_CONTEXT>' * 4 * count}</img>", 1)
    return processor.info.get_tokenizer()(prompt)["input_ids"]


def make_original_processor(*, processor_cache: ProcessorCache | None = None, **mm: Any) -> Any:
    return make_original(processor_cache, MultiModalConfig(**mm))


def call_original(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    bounds = (kwargs.get("min_dynamic_patch", 1), kwargs.get("max_dynamic_patch", 6))
    if not kwargs.get("dynamic_image_size", True):
        bounds = (1, 1)
    tiles = [cut_as_original(image, *bounds) for image in images]
    ids = ids_as_original(make_original(), prompt, [len(one) for one in tiles])
    flat = [tile for one in tiles for tile in one]
    return HFInputs(ids, {"pixel_values_flat": normalize_as_original(flat)} if flat else {})


VARIANTS = {
    "internvl original": Family(
        name="internvl",
        make_processor=make_original_processor,
        call_hf=call_original,
        embed_token_ids=lambda processor: [998],
        placeholder="<image>",
        lowering_kwargs={"max_dynamic_patch": 2},
        extra_kwargs=(
            {},
            {"min_dynamic_patch": 2, "max_dynamic_patch": 3},
            {"dynamic_image_size": False},
        ),
        mm_configs=(
            {},
            {"mm_processor_kwargs": {"max_dynamic_patch": 11}},
            {"trust_request_mm_kwargs": True},
        ),
        tensors={"pixel_values_flat": 1e-6},
    )
}
