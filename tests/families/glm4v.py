"""Tiny GLM-4.1Vs, GLM-4.6Vs and GLM-OCRs: grids, merged by a convolution; videos with seconds."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    GlmOcrConfig,
    GlmOcrForConditionalGeneration,
)
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor

from mmjax.models.glm4v import model as ours
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import Family, assemble, call_processor, written
from tests.families.hf_videos import make_grid_videos
from tests.families.published import Published
from tests.families.qwen2_vl import (
    GRID_FIELDS,
    GRIDS,
    IMAGE_TOKEN,
    TEXT,
    VIDEO_TOKEN,
    VISION_END,
    VISION_START,
    draw_grid,
)
from tests.families.sizes import NO_KEYS, Keys, fit_text
from tests.families.tiny import DrawnItem, Media, TinyFamily, Variant, joined
from tests.oracle import fill_with_unit_norms

ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
VISION: dict[str, Any] = {
    **{"depth": 2, "num_heads": 2, "patch_size": 4, "hidden_size": 24, "intermediate_size": 40},
    **{"out_hidden_size": 32, "image_size": 20, "spatial_merge_size": 2},
}
EXPERTS: dict[str, Any] = {
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True},
}
MARKS = {"image_start": VISION_START, "image_end": VISION_END, "video_start": 91, "video_end": 90}
CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "glm4v": (Glm4vConfig, Glm4vForConditionalGeneration, ours.Glm4vForConditionalGeneration),
    "glm46v": (Glm46VConfig, Glm46VForConditionalGeneration, ours.Glm46VForConditionalGeneration),
    "glm4v_moe": (
        Glm4vMoeConfig,
        Glm4vMoeForConditionalGeneration,
        ours.Glm4vMoeForConditionalGeneration,
    ),
    "glm_ocr": (GlmOcrConfig, GlmOcrForConditionalGeneration, ours.GlmOcrForConditionalGeneration),
}
"""HF's config and class, and ours."""


def tiny_config(
    kind: str = "glm4v", *, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, is_tied: bool = False
) -> Any:
    """Return HF's config of a kind, with 25 learned positions where it has such."""
    part = "glm4v" if kind == "glm46v" else kind
    experts = EXPERTS if kind == "glm4v_moe" else {}
    rope = {"rope_parameters": {**ROPE, "mrope_section": [1, 0, 1]}}
    tied: dict[str, Any] = {"tie_word_embeddings": is_tied}
    config = CLASSES[kind][0](
        text_config={
            "model_type": f"{part}_text",
            **TEXT,
            **rope,
            **tied,
            **experts,
            **text,
        },
        vision_config={"model_type": f"{part}_vision", **VISION, **vision},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        **{f"{name}_token_id": token_id for name, token_id in MARKS.items()},
        **tied,
    )
    config.architectures = [CLASSES[kind][1].__name__]
    return config


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image, or a video, of whose steps each has its second behind it."""
    grid, _ = GRIDS[media.modality][media.seed % 3]
    item = draw_grid(config, media.modality, media.seed, grid, 0.0)
    if media.modality == "image":
        return item
    steps, rows, columns = grid
    step = [VISION_START, *[IMAGE_TOKEN] * (rows * columns // 4), VISION_END]
    ids = [token_id for number in range(steps) for token_id in (*step, 5 + number)]
    return item._replace(
        token_ids=ids,
        is_embed=np.equal(ids, IMAGE_TOKEN),
        before=[MARKS["video_start"]],
        after=[MARKS["video_end"]],
    )


def torch_inputs(reference: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it."""
    data = joined(sample)
    for name in data.keys() & {"image_grid_thw", "video_grid_thw"}:
        data[name] = data[name].reshape(-1, 3)
    inputs = make_reference_inputs(sample.token_ids, data)
    ids = inputs["input_ids"]
    kinds = (ids == IMAGE_TOKEN).int() * (1 + is_in_video(reference.config, ids).int())
    return inputs | {"mm_token_type_ids": kinds}


def is_in_video(config: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return where a video's tokens stand, by the marks around it (HF: of its processor)."""
    starts, ends = (
        (ids == getattr(config, f"video_{name}_token_id")).cumsum(-1) for name in ("start", "end")
    )
    return starts > ends


def tell_videos_from_images(model: Any) -> None:
    """Let HF's model take both in one prompt: it counts the same token for each, and refuses."""
    inner = model.model

    def get_placeholder_mask(input_ids: Any, inputs_embeds: Any, **features: Any) -> Any:
        found = input_ids == inner.config.image_token_id
        is_video = is_in_video(inner.config, input_ids)
        return tuple(mask[..., None] for mask in (found & ~is_video, found & is_video))

    inner.get_placeholder_mask = get_placeholder_mask


def resize(kind: str, width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    sections = [head_dim // 8, head_dim // 16, head_dim // 16]
    text = {
        "hidden_size": width,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 4),
        "rope_parameters": {**ROPE, "mrope_section": sections},
    }
    return {"kind": kind, "text": text, "vision": {"out_hidden_size": width}}


fill = partial(fill_with_unit_norms, sharpness=1.4)
WHOLE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
VARIANTS = {
    "glm4v": {
        "plain": Variant({}, 8),
        "all else": Variant(
            {
                "is_tied": True,
                "text": {"rope_parameters": WHOLE},
                "vision": {
                    "hidden_act": "gelu",
                    "image_size": 12,
                    "temporal_patch_size": 1,
                    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
                },
            },
            8,
        ),
    },
    "glm46v": {"plain": Variant({"kind": "glm46v"}, 8)},
    "glm4v_moe": {
        "plain": Variant({"kind": "glm4v_moe"}, 8),
        "groups of experts, scaled": Variant(
            {
                "kind": "glm4v_moe",
                "text": {
                    **{"n_group": 3, "topk_group": 2, "norm_topk_prob": False},
                    **{"routed_scaling_factor": 1.5, "n_shared_experts": 2},
                    **{"first_k_dense_replace": 0, "attention_bias": False},
                },
            },
            8,
        ),
    },
    "glm_ocr": {
        "plain": Variant({"kind": "glm_ocr"}, 8),
        "wide heads, no biases": Variant(
            {
                "kind": "glm_ocr",
                "text": {"head_dim": 16, "rope_parameters": {**WHOLE, "mrope_section": [2, 3, 3]}},
                "vision": {"attention_bias": False},
            },
            8,
        ),
    },
}


def make_row(kind: str) -> TinyFamily:
    """Return the row of a kind."""
    return TinyFamily(
        name=kind,
        model_class=CLASSES[kind][2],
        reference_class=CLASSES[kind][1],
        make_config=tiny_config,
        resize=partial(resize, kind),
        served={"kind": kind},
        draw_item=draw_item,
        torch_inputs=torch_inputs,
        word_ids=range(5, 90),
        published_head_dim=128,
        max_embeds={"image": 15, "video": 18},
        fill=fill,
        mend=tell_videos_from_images,
        variants=VARIANTS[kind],
    )


# ---- their prompts and directories ---------------------------------------------------------------


IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
SPECIAL = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
ROLES = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"]
VIDEO = "<|begin_of_video|><|video|><|end_of_video|>"
SMALLER = {"size": {"shortest_edge": 3136, "longest_edge": 40_000}}
VIDEO_SIZE = {"shortest_edge": 6272, "longest_edge": 200_000}
PROCESSORS: Mapping[str, tuple[Any, str]] = {
    "glm46v": (Glm46VProcessor, "Glm46V"),
    # Of the published 4.6V, whose config.json is 4.5V's; GLM-OCR names them, too.
    "glm4v_moe": (Glm46VProcessor, "Glm46V"),
    "glm_ocr": (Glm46VProcessor, "Glm46V"),
}
"""HF's class, and how names of the files' classes begin; of others, GLM-4.1V's."""


def write_files(kind: str, path: Path) -> Path:
    """Write a directory as published, of pictures of up to 400 x 400."""
    tokenizer = make_tokenizer([*SPECIAL.values(), *ROLES], eos="<|endoftext|>")
    config = tiny_config(
        kind,
        text=fit_text(tokenizer),
        vision={"image_size": 70, "patch_size": 14},
    )
    for name, token in SPECIAL.items():
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "Glm4vImageProcessor",
            "size": {"shortest_edge": 6272, "longest_edge": 320_000},
        },
        video_preprocessor_config={
            "video_processor_type": f"{PROCESSORS.get(kind, (None, 'Glm4v'))[1]}VideoProcessor",
            "size": VIDEO_SIZE,
        },
    )


WRITERS = {kind: partial(write_files, kind) for kind in CLASSES}


@cache
def hf_processor(kind: str, with_videos: bool = False) -> Any:
    """HF's own processor, built apart from ours, with its rules for videos or without any."""
    processor_class, name = PROCESSORS.get(kind, (Glm4vProcessor, "Glm4v"))
    path = made_once(WRITERS[kind])()
    images = Glm4vImageProcessorPil.from_pretrained(path)
    sampling: dict[str, Any] = {"fps": 2, "max_duration": 300}
    return assemble(
        processor_class,
        Glm4vImageProcessorPil,
        path,
        video_processor=make_grid_videos(name.lower(), images, VIDEO_SIZE, **sampling)
        if with_videos
        else None,
        has_videos=True,
    )


def name_parts(kind: str) -> dict[str, Any]:
    """Return the fields of a class's row that depend on it."""
    return {
        **written(make_row(kind), WRITERS[kind]),
        "call_hf": partial(call_processor, partial(hf_processor, kind)),
        "load_hf_videos": partial(hf_processor, kind, with_videos=True),
    }


GLM4V = Family(
    **name_parts("glm4v"),
    needless_files=frozenset({"tokenizer_config.json", "video_preprocessor_config.json"}),
    rendered=f"[gMASK]<sop><|user|>\n{IMAGE}what is it<|assistant|>\na car"
    "<|user|>\nwhich color<|assistant|>\n",
    with_system=("<|user|>\n<", "<|system|>\nbe short<|user|>\n<"),
    probed=("visual.blocks.1", "visual.post_layernorm", "visual.merger"),
    placeholder=IMAGE,
    video=VIDEO,
    video_kwargs=({}, {"videos_kwargs": {"max_pixels": 90_000}}),
    **GRID_FIELDS
    | {
        "extra_kwargs": ({}, SMALLER),
        "operator_kwargs": (SMALLER, {"max_pixels": 60_000}),
        "lowering_kwargs": {"max_pixels": 60_000},
    },
)


GLM46V = replace(GLM4V, **name_parts("glm46v"))


def list_moe(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the published names and shapes: HF's stacks of experts, one by one."""
    with torch.device("meta"):
        module = Glm4vMoeForConditionalGeneration(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in module.state_dict().items():
        layer, found, part = name.partition(".experts.")
        if not found:
            shapes[name] = tuple(tensor.shape)
            continue
        num_experts, rows, columns = tensor.shape
        parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
        for expert in range(num_experts):
            for one in parts:
                key = f"{layer}.experts.{expert}.{one}.weight"
                shapes[key] = (rows // len(parts), columns)
    return shapes


GLM4V_MOE = replace(
    GLM4V,
    **name_parts("glm4v_moe"),
    published=Published(
        list_shapes=list_moe,
        unread=("model.language_model.layers.46.mlp.experts.0.up_proj.weight",),
    ),
)
GLM_OCR = replace(
    GLM4V,
    **name_parts("glm_ocr"),
    published=Published(unread=("model.language_model.layers.16.eh_proj.weight",)),
)
