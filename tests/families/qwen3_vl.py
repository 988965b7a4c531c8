"""Tiny Qwen3-VLs and Qwen3.5s, dense and with experts: towers that may feed several layers.

Times stand among a video's frames; most layers of Qwen3.5's decoder are recurrent.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from mmjax.layers.recurrent.chunks import CHUNK
from mmjax.models.qwen3_vl import model as ours
from tests.families import published_names, qwen2_vl
from tests.families.directories import edit_golden, made_once, with_weights
from tests.families.family import CHATML, Family, call_processor, hf_of
from tests.families.hf_videos import make_grid_videos
from tests.families.published import Published
from tests.families.qwen2_vl import GRIDS, QWEN2_VL, VIDEO_TOKEN, VISION_END, VISION_START
from tests.families.sizes import NO_KEYS, Keys, resize_text
from tests.families.tiny import DrawnItem, Media, TinyFamily, Variant
from tests.kit import fill_by_name

TEXT: dict[str, Any] = {
    **qwen2_vl.TEXT,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
VISION: dict[str, Any] = {
    "depth": 3,
    "num_heads": 2,
    "patch_size": 4,
    "hidden_size": 24,
    "intermediate_size": 40,
    "out_hidden_size": 32,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 1],
}
RECURRENT: dict[str, Any] = {
    **TEXT,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
    # What a first token reads may be next to nothing, and would be normed to rounding errors.
    "rms_norm_eps": 1e-2,
    "rope_parameters": {
        **TEXT["rope_parameters"],
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
    },
}
TEXTS: dict[str, dict[str, Any]] = {
    "qwen3_vl": TEXT,
    "qwen3_vl_moe": {**TEXT, **EXPERTS},
    "qwen3_5": RECURRENT,
    "qwen3_5_moe": {**RECURRENT, **EXPERTS, "shared_expert_intermediate_size": 24},
}
CONFIGS = {
    "qwen3_vl": Qwen3VLConfig,
    "qwen3_vl_moe": Qwen3VLMoeConfig,
    "qwen3_5": Qwen3_5Config,
    "qwen3_5_moe": Qwen3_5MoeConfig,
}
CLASSES: Mapping[str, tuple[Any, Any]] = {
    "qwen3_vl": (Qwen3VLForConditionalGeneration, ours.Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (Qwen3VLMoeForConditionalGeneration, ours.Qwen3VLMoeForConditionalGeneration),
    "qwen3_5": (Qwen3_5ForConditionalGeneration, ours.Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeForConditionalGeneration, ours.Qwen3_5MoeForConditionalGeneration),
}
"""HF's class, and ours."""


def find_vision(kind: str) -> dict[str, Any]:
    """Return the settings of a kind's tower."""
    is_fed = kind.startswith("qwen3_vl")
    return VISION if is_fed else {k: v for k, v in VISION.items() if not k.startswith("deepstack")}


def tiny_config(
    kind: str = "qwen3_vl", *, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, is_tied: bool = False
) -> Any:
    """Return HF's config of a kind."""
    config = CONFIGS[kind](
        text_config={**TEXTS[kind], "tie_word_embeddings": is_tied, **text},
        vision_config={**find_vision(kind), **vision},
        image_token_id=qwen2_vl.IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=is_tied,
    )
    config.architectures = [CLASSES[kind][1].__name__]
    return config


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image, or a video with two tokens of time before each step."""
    grid, _ = GRIDS[media.modality][media.seed % 3]
    item = qwen2_vl.draw_grid(config, media.modality, media.seed, grid, 0.0)
    if media.modality == "image":
        return item
    steps, rows, columns = grid
    ids: list[int] = []
    for step in range(steps):
        pads = [VIDEO_TOKEN] * (rows * columns // 4)
        ids += [5 + step, 80 - media.seed, VISION_START, *pads, VISION_END]
    return replace_item(item, ids)


def fill_recurrent(model: Any) -> None:
    """Fill Qwen3.5: its norms' weights are centred, but for a tower's and a DeltaNet's."""
    fill_by_name(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_tower = re.search(r"(visual|vision_tower|merger).*norm", name)
            if name.endswith("linear_attn.norm.weight") or is_tower:
                parameter += 1.0 * name.endswith("weight")
            if re.search(r"[qk]_proj", name):
                parameter *= 1.4


def replace_item(item: DrawnItem, ids: list[int]) -> DrawnItem:
    """Return the item with other tokens, of which the pads take embeddings."""
    return item._replace(token_ids=ids, is_embed=np.equal(ids, VIDEO_TOKEN))


def resize(kind: str, width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    turned = head_dim if kind.startswith("qwen3_vl") else head_dim // 2
    rope = qwen2_vl.turn(TEXTS[kind]["rope_parameters"], turned)
    text = resize_text(width, head_dim, num_heads, rope_parameters=rope)
    return {"kind": kind, **text, "vision": {"out_hidden_size": width}}


def make_row(kind: str, variants: Mapping[str, Variant]) -> TinyFamily:
    """Return the row of a kind."""
    return replace(
        qwen2_vl.TINY,
        name=kind,
        model_class=CLASSES[kind][1],
        reference_class=CLASSES[kind][0],
        make_config=tiny_config,
        resize=partial(resize, kind),
        served={"kind": kind},
        draw_item=draw_item,
        fill=qwen2_vl.TINY.fill if kind.startswith("qwen3_vl") else fill_recurrent,
        longest_run=0 if kind.startswith("qwen3_vl") else CHUNK,
        variants={
            name: v._replace(settings={"kind": kind, **v.settings}) for name, v in variants.items()
        },
    )


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "mrope_section": [2, 4, 2]}
TINY = make_row(
    "qwen3_vl",
    {
        "plain": Variant({}, 10),
        "all else": Variant(
            {
                "is_tied": True,
                "text": {
                    "rope_parameters": {**YARN, "original_max_position_embeddings": 32},
                    "attention_bias": True,
                },
                "vision": {
                    "deepstack_visual_indexes": [2, 0],
                    "num_position_embeddings": 4,
                    "hidden_act": "gelu",
                    "rope_parameters": {"rope_theta": 100.0},
                    "temporal_patch_size": 1,
                    "in_channels": 6,
                },
            },
            10,
        ),
        "nothing fed": Variant({"vision": {"deepstack_visual_indexes": []}}, 8),
    },
)
TINY_MOE = make_row(
    "qwen3_vl_moe",
    {
        "plain": Variant({}, 10),
        "a dense layer": Variant({"text": {"mlp_only_layers": [0]}, "is_tied": True}, 10),
        "every second layer": Variant({"text": {"decoder_sparse_step": 2}}, 10),
    },
)
TINY_3_5 = make_row(
    "qwen3_5",
    {
        "plain": Variant({}, 13),
        "all else": Variant(
            {
                "is_tied": True,
                "text": {
                    "attention_bias": True,
                    "linear_num_key_heads": 2,
                    "linear_conv_kernel_dim": 3,
                    "layer_types": ["full_attention", "linear_attention"] * 2,
                    "rope_parameters": {
                        **RECURRENT["rope_parameters"],
                        "mrope_section": [2, 3, 3],
                        "partial_rotary_factor": 1.0,
                    },
                },
                "vision": {"num_position_embeddings": 4, "temporal_patch_size": 1},
            },
            12,
        ),
    },
)
TINY_3_5_MOE = make_row(
    "qwen3_5_moe", {"plain": Variant({}, 13), "a tied head": Variant({"is_tied": True}, 13)}
)


# ---- its prompts and directories ----------------------------------------------------------------


def edit_config(kind: str) -> dict[str, Any]:
    """Return the edits of Qwen2-VL's golden config.json, with its tokens."""
    text = {
        **TEXTS[kind],
        "model_type": f"{kind}_text",
        "vocab_size": 1024,
        "max_position_embeddings": 8192,
    }
    if not kind.startswith("qwen3_vl"):
        # HF's own float32 is 1e-4 from float64 behind three recurrent layers of random weights.
        text |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    vision = {**find_vision(kind), "model_type": f"{kind}_vision", "patch_size": 16, "depth": 2}
    return {
        "architectures": [CLASSES[kind][1].__name__],
        "model_type": kind,
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": False,
    }


SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 4096, "longest_edge": 65_536},
}
"""As preprocessor_config.json of the published repositories, but for the sizes."""
VIDEO_SETTINGS = {
    **SETTINGS,
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 4096, "longest_edge": 150_000},
}
SMALLER = {"size": {"shortest_edge": 4096, "longest_edge": 25_600}}


def write_files(kind: str, folder: Path) -> Path:
    """Write config, tokenizer and the processors' files."""
    return edit_golden(
        "qwen2_vl",
        folder,
        config=edit_config(kind),
        processor_config=None,
        preprocessor_config=SETTINGS,
        video_preprocessor_config=VIDEO_SETTINGS,
    )


DIRECTORIES = {kind: made_once(partial(write_files, kind)) for kind in CLASSES}
PROCESSORS = {
    kind: hf_of(Qwen3VLProcessor, Qwen2VLImageProcessorPil, directory, has_videos=True)
    for kind, directory in DIRECTORIES.items()
}
hf_processor = PROCESSORS["qwen3_vl"]


def load_hf_videos(kind: str) -> Any:
    """Return HF's processor with its rules for videos, and its settings of them."""
    images = Qwen2VLImageProcessorPil.from_pretrained(DIRECTORIES[kind]())
    sampling = {"fps": 2, "num_frames": None, "min_frames": 4, "max_frames": 768}
    videos = make_grid_videos("qwen3_vl", images, VIDEO_SETTINGS["size"], **sampling)
    return PROCESSORS[kind](videos)


def make_family(kind: str, tiny: TinyFamily) -> Family:
    """Return the row of a kind."""
    return replace(
        QWEN2_VL,
        name=kind,
        architecture=CLASSES[kind][1].__name__,
        tiny=tiny,
        is_written=True,
        path=DIRECTORIES[kind],
        write=with_weights(partial(write_files, kind), tiny.fill),
        needless_files=QWEN2_VL.needless_files | {"video_preprocessor_config.json"},
        probed=(
            "visual.merger",
            *["visual.deepstack_merger_list.0"] * kind.startswith("qwen3_vl"),
        ),
        rendered=CHATML.format(image=qwen2_vl.IMAGE),
        with_system=(
            "<|im_start|>user\n",
            "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\n",
        ),
        call_hf=partial(call_processor, PROCESSORS[kind]),
        load_hf_videos=partial(load_hf_videos, kind),
        published=Published(
            list_shapes=published_names.list_qwen3_vl_moe if tiny is TINY_MOE else None,
            unread=() if kind.startswith("qwen3_vl") else ("mtp.fc.weight",),
        ),
        extra_kwargs=({}, {"images_kwargs": SMALLER}),
        operator_kwargs=(*QWEN2_VL.operator_kwargs, SMALLER),
    )


QWEN3_VL = make_family("qwen3_vl", TINY)
QWEN3_VL_MOE = make_family("qwen3_vl_moe", TINY_MOE)
QWEN3_5 = make_family("qwen3_5", TINY_3_5)
QWEN3_5_MOE = make_family("qwen3_5_moe", TINY_3_5_MOE)
