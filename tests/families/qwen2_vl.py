"""Tiny Qwen2-VLs and Qwen2.5-VLs: images and videos of any grid, positions of three axes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from mmjax.models.qwen2_vl import model as ours
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_pixels, make_reference_inputs
from tests.families.directories import (
    GOLDEN,
    HEADS,
    edit_golden,
    golden_path,
    golden_processor,
    made_once,
    save_weights,
)
from tests.families.family import CHATML, Family, call_processor, hf_of
from tests.families.hf_videos import make_grid_videos
from tests.families.published import MODULE, Published
from tests.families.sizes import NO_KEYS, Keys
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes
from tests.oracle import fill_with_unit_norms

VOCAB_SIZE = 96
IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 95, 94, 93, 92
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
SHARED_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**SHARED_VISION, "embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {
        **SHARED_VISION,
        "depth": 3,
        "hidden_size": 24,
        "intermediate_size": 40,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
}
"""Windows of 2x2 embeddings."""
CONFIGS = {"qwen2_vl": Qwen2VLConfig, "qwen2_5_vl": Qwen2_5_VLConfig}
CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen2_vl": (Qwen2VLForConditionalGeneration, ours.Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLForConditionalGeneration, ours.Qwen2_5_VLForConditionalGeneration),
}
"""HF's class, and ours."""
Grid = tuple[int, int, int]
GRIDS: Mapping[str, list[tuple[Grid, float]]] = {
    "image": [((1, 6, 10), 0.0), ((1, 8, 2), 0.0), ((1, 2, 8), 0.0)],
    "video": [((3, 4, 6), 0.5), ((3, 4, 2), 1.5), ((5, 6, 2), 0.7)],
}
"""Frames, rows and columns of patches, and a video's seconds for each frame, by turns. Few numbers
of patches, hence few programs; frames of whole and of cut windows; a video longer than its frames
are wide."""


def tiny_config(
    kind: str = "qwen2_vl", *, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, is_tied: bool = False
) -> Any:
    """Return HF's config of either kind."""
    config = CONFIGS[kind](
        text_config={**TEXT, **text},
        vision_config={**VISION[kind], **vision},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=is_tied,
    )
    config.architectures = [CLASSES[kind][1].__name__]
    return config


def draw_tensors(
    modality: str, seed: int, grid: Grid, patch: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Return the tensors of an image or a video: its patches, of a shape, and its grid."""
    name = "pixel_values" if modality == "image" else "pixel_values_videos"
    return {
        name: draw_bytes(seed, (int(np.prod(grid)), *patch)),
        f"{modality}_affine": AFFINE,
        f"{modality}_grid_thw": np.array(grid, np.int64),
    }


def draw_grid(config: Any, modality: str, seed: int, grid: Grid, seconds: float) -> DrawnItem:
    """Return a processed image or video of a grid."""
    vision = config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    tensors = draw_tensors(modality, seed, grid, (width,))
    if seconds:
        tensors["second_per_grid_ts"] = np.array(seconds, np.float32)
    pad = IMAGE_TOKEN if modality == "image" else VIDEO_TOKEN
    ids = [pad] * (int(np.prod(grid)) // 4)
    return DrawnItem(tensors, ids, before=[VISION_START], after=[VISION_END])


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image or video."""
    grid, seconds = GRIDS[media.modality][media.seed % 3]
    return draw_grid(config, media.modality, media.seed, grid, seconds)


def torch_inputs(reference: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it to HF's model `reference`."""
    known = signature(reference.forward).parameters
    items = [make_pixels(item.tensors) for item in sample.items]
    names = dict.fromkeys(name for item in items for name in item)
    data = {}
    for name in names.keys() & known.keys():  # Qwen2-VL knows no seconds
        rows = [item[name] for item in items if name in item]
        data[name] = np.concatenate(rows) if name.startswith("pixel_values") else np.stack(rows)
    inputs = make_reference_inputs(sample.token_ids, data)
    ids = inputs["input_ids"]
    kinds = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    return inputs | {"mm_token_type_ids": kinds}


def turn(rope: Mapping[str, Any], num_turned: int) -> dict[str, Any]:
    """Return rotary parameters by which the axes share so many numbers of a head."""
    sections = [num_turned // 8, 3 * num_turned // 16, 3 * num_turned // 16]
    return {**rope, "mrope_section": sections}


def resize(kind: str, width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    if num_heads * head_dim != width:
        raise ValueError(f"{num_heads} heads of {head_dim} are not {width}, as Qwen2's must be")
    text = {
        "hidden_size": width,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 4),
        "rope_parameters": turn(TEXT["rope_parameters"], head_dim),
    }
    name = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
    return {"kind": kind, "text": text, "vision": {name: width}}


def make_row(kind: str, variants: Mapping[str, Variant]) -> TinyFamily:
    """Return the row of either kind."""
    return TinyFamily(
        name=kind,
        model_class=CLASSES[kind][1],
        reference_class=CLASSES[kind][0],
        make_config=tiny_config,
        resize=partial(resize, kind),
        served={"kind": kind},
        draw_item=draw_item,
        torch_inputs=torch_inputs,
        word_ids=range(5, 90),
        published_head_dim=128,
        max_embeds={"image": 15, "video": 18},
        fill=partial(fill_with_unit_norms, sharpness=1.4),
        variants=variants,
    )


OTHER_SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
TINY = make_row(
    "qwen2_vl",
    {
        "plain": Variant({}, 7),
        "all else": Variant(
            {
                "is_tied": True,
                "text": {"rope_parameters": OTHER_SECTIONS},
                "vision": {
                    "hidden_act": "gelu",
                    "rope_parameters": {"rope_theta": 100.0},
                    "temporal_patch_size": 1,
                    "in_channels": 6,
                },
            },
            7,
        ),
    },
)
TINY_2_5 = make_row(
    "qwen2_5_vl",
    {
        "plain": Variant({"kind": "qwen2_5_vl"}, 8),
        "all else": Variant(
            {
                "kind": "qwen2_5_vl",
                "is_tied": True,
                "vision": {
                    "window_size": 24,
                    "fullatt_block_indexes": [0, 2],
                    "tokens_per_second": 4,
                    "hidden_act": "gelu",
                },
            },
            8,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


PATH = GOLDEN / "qwen2_vl"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
SMALLER = {"size": {"shortest_edge": 3136, "longest_edge": 20_000}}
GRID_FIELDS: dict[str, Any] = {
    "takes_embeds": False,  # grids beside them: tests/models/test_qwen2_vl_embeds.py
    "has_pixel_counts": True,
    "extra_kwargs": ({}, SMALLER),
    "operator_kwargs": (SMALLER, {"max_pixels": 30_000}),
    "lowering_kwargs": {"max_pixels": 30_000},
    "tensors": {"pixel_values": 1e-6, "image_grid_thw": 0.0},
    "takes_size": lambda width, height: max(width, height) <= 200 * min(width, height),
}
"""Of rows whose pictures have any grid, within numbers of pixels."""
VIDEO_SIZE = {"shortest_edge": 3136, "longest_edge": 50_176}
"""Of the directory's videos."""
QWEN2_5: Mapping[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "text_config.model_type": "qwen2_5_vl_text",
    "vision_config": {
        "model_type": "qwen2_5_vl_vision",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
}
MROPE = {"text_config.rope_parameters.mrope_section": [2, 3, 3]}
"""Of heads half as wide as the golden ones."""
make_processor = partial(golden_processor, "qwen2_vl")


path = partial(golden_path, "qwen2_vl")
hf_processor = hf_of(Qwen2VLProcessor, Qwen2VLImageProcessorPil, path, has_videos=True)


def load_hf_videos(load: Callable[[Any], Any], load_path: Callable[[], Path]) -> Any:
    """Return HF's processor of a kind with its rules for videos, which sample nothing."""
    images = Qwen2VLImageProcessorPil.from_pretrained(load_path())
    return load(make_grid_videos("qwen2_vl", images, VIDEO_SIZE, samples=False))


def write(folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    config = {**HEADS, **MROPE, **(changes or {})}
    return save_weights(edit_golden("qwen2_vl", folder, config=config), TINY.fill)


QWEN2_VL = Family(
    name="qwen2_vl",
    architecture="Qwen2VLForConditionalGeneration",
    tiny=TINY,
    path=path,
    write=write,
    needless_files=frozenset({"chat_template.jinja", "tokenizer_config.json"}),
    published=Published(
        layouts={
            "hub": {"model.visual.": "visual.", "model.language_model.": "model."},
            "module": MODULE,
        },
    ),
    rendered="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    + CHATML.format(image="<|vision_start|><|image_pad|><|vision_end|>"),
    with_system=("You are a helpful assistant.", "be short"),
    call_hf=partial(call_processor, hf_processor),
    placeholder=IMAGE,
    video=VIDEO,
    load_hf_videos=partial(load_hf_videos, hf_processor, path),
    video_kwargs=(
        {},
        {"max_pixels": 30_000},
        {"videos_kwargs": {"size": {"longest_edge": 23 * 784}}},
        {"images_kwargs": {"max_pixels": 7 * 784}},
    ),
    **GRID_FIELDS | {"extra_kwargs": ({}, {"images_kwargs": SMALLER})},
)


# ---- Qwen2.5-VL ----------------------------------------------------------------------------------


write_2_5 = made_once(partial(edit_golden, "qwen2_vl", config=QWEN2_5))


hf_qwen2_5 = hf_of(Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil, write_2_5, has_videos=True)
QWEN2_5_VL = replace(
    QWEN2_VL,
    name="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    tiny=TINY_2_5,
    path=write_2_5,
    write=partial(write, changes=QWEN2_5),
    probed=("visual.blocks.1",),
    call_hf=partial(call_processor, hf_qwen2_5),
    load_hf_videos=partial(load_hf_videos, hf_qwen2_5, write_2_5),
)
