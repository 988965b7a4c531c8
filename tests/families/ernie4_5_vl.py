"""Tiny ERNIE 4.5 VLs: pictures of any grid, experts of text and of what is seen."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeImageProcessorPil,
)
from transformers.models.ernie4_5_vl_moe.processing_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeProcessor,
)

from mmjax.models.ernie4_5_vl import model as ours
from mmjax.models.ernie4_5_vl.processor import IMAGE
from mmjax.parity.arrays import Sample
from tests.families.directories import make_tokenizer, write_directory
from tests.families.family import Family, written
from tests.families.published import Published
from tests.families.qwen2_vl import GRID_FIELDS, GRIDS, draw_tensors
from tests.families.qwen2_vl import torch_inputs as grid_inputs
from tests.families.sizes import DECODER, NO_KEYS, Keys, fit_text, resize_text
from tests.families.tiny import DrawnItem, Media, TinyFamily, Variant
from tests.oracle import fill_with_unit_norms

IMAGE_TOKEN, START, END = 125, 123, 122
VISION: dict[str, Any] = {
    **{"depth": 2, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4},
}


def make_rope(head_dim: int) -> dict[str, Any]:
    """Return rotary parameters of heads of a width."""
    rows = 3 * head_dim // 16
    sections = [rows, rows, head_dim // 2 - 2 * rows]
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}


def tiny_config(*, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, is_tied: bool = True) -> Any:
    """Return HF's config: a dense layer, and one with experts."""
    decoder = {
        **DECODER,
        "head_dim": 16,
        "rope_parameters": make_rope(16),
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": [24, 16],
        "tie_word_embeddings": is_tied,
    }
    return Ernie4_5_VLMoeConfig(
        text_config={**decoder, **text},
        vision_config={**VISION, **vision},
        image_token_id=IMAGE_TOKEN,
        image_start_token_id=START,
        image_end_token_id=END,
        video_token_id=124,
        video_start_token_id=121,
        video_end_token_id=120,
        tie_word_embeddings=is_tied,
        architectures=["Ernie4_5_VLMoeForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image, its marks among its tokens."""
    grid, _ = GRIDS["image"][media.seed % 3]
    vision = config.vision_config
    width = vision.in_channels * vision.patch_size**2
    tensors = draw_tensors("image", media.seed, grid, (width,))
    ids = np.array([START, *[IMAGE_TOKEN] * (int(np.prod(grid)) // 4), END])
    return DrawnItem(tensors, ids.tolist(), is_embed=ids == IMAGE_TOKEN)


def torch_inputs(reference: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it."""
    inputs = grid_inputs(reference, sample)
    ids = inputs["input_ids"]
    kinds = {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()}
    marked = torch.isin(ids, torch.tensor([IMAGE_TOKEN, START, END])).int()
    return inputs | kinds | {"moe_mm_token_type_ids": marked}


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    return resize_text(width, head_dim, num_heads, rope_parameters=make_rope(head_dim))


def fill(model: Any) -> None:
    """Fill HF's model, experts as loud as other layers: stacks of matrices are quiet otherwise."""
    fill_with_unit_norms(model, sharpness=1.4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter *= parameter.shape[1] ** 0.5


TINY = TinyFamily(
    name="ernie4_5_vl",
    model_class=ours.Ernie4_5_VLMoeForConditionalGeneration,
    reference_class=Ernie4_5_VLMoeForConditionalGeneration,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, 110),
    published_head_dim=128,
    max_embeds={"image": 15},
    fill=fill,
    variants={
        "plain": Variant({}, 8),
        "all else": Variant(
            {
                "is_tied": False,
                "text": {
                    "num_hidden_layers": 3,
                    "mlp_layer_types": ["sparse", "dense", "sparse"],
                    "moe_k": 3,
                    "moe_num_shared_experts": 0,
                    "rms_norm_eps": 1e-3,
                    "rope_parameters": {**make_rope(16), "mrope_section": [2, 2, 4]},
                },
                "vision": {"hidden_act": "gelu", "rms_norm_eps": 1e-3},
            },
            9,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


NAMED = {
    f"{kind.lower()}{name}_token": f"<|{kind}{mark}|>"
    for kind in ("IMAGE", "VIDEO")
    for name, mark in (("", "_PLACEHOLDER"), ("_start", "_START"), ("_end", "_END"))
}


def write_files(path: Path) -> Path:
    bounds = ["<|begin_of_sentence|>", "<|end_of_sentence|>"]
    tokenizer = make_tokenizer([*NAMED.values(), *bounds], named=NAMED)
    config = tiny_config(text=fit_text(tokenizer), vision={"patch_size": 14})
    for name, token in NAMED.items():
        setattr(config, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "Ernie4_5_VLMoeImageProcessor",
            "size": {"shortest_edge": 3136, "longest_edge": 160_000},
        },
    )


_RENAMED = {
    r"^model\.vision_tower\.": "vision_model.",
    r"^model\.language_model\.": "model.",
    r"(_linear)\.fc1\.": r"\1.0.",
    r"(_linear)\.fc2\.": r"\1.2.",
    r"(_linear)\.ln\.": r"\1.3.",
}


def publish(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of HF's module as the hub's files have them."""
    published: dict[str, torch.Tensor] = {}
    biases: dict[str, dict[str, torch.Tensor]] = {}
    for old, tensor in state.items():
        name = old
        for pattern, new in _RENAMED.items():
            name = re.sub(pattern, new, name)
        mlp, found, part = name.partition("text_moe.")
        kind = "text" if found else "vision"
        if not found:
            mlp, found, part = name.partition("vision_moe.")
        if not found:
            published[name] = tensor
        elif part == "gate.weight":
            published[f"{mlp}gate.weight" + "_1" * (kind == "vision")] = tensor.T
        elif part.startswith("gate.moe_statics."):
            biases.setdefault(mlp, {})[kind] = tensor
        else:
            first = len(tensor) * (kind == "vision")
            parts = ["gate_proj", "up_proj"] if "gate_up" in part else ["down_proj"]
            for expert, whole in enumerate(tensor):
                for one, matrix in zip(parts, whole.chunk(len(parts)), strict=True):
                    published[f"{mlp}experts.{first + expert}.{one}.weight"] = matrix
    for mlp, both in biases.items():
        name = f"{mlp}moe_statics.e_score_correction_bias"
        published[name] = torch.cat([both["text"], both["vision"]])
    return published


def list_published(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the published names and shapes."""
    with torch.device("meta"):
        module = Ernie4_5_VLMoeForConditionalGeneration(config)
        tensors = publish(module.state_dict())
    tied = config.tie_word_embeddings
    return {n: tuple(t.shape) for n, t in tensors.items() if not (tied and n == "lm_head.weight")}


ERNIE4_5_VL = Family(
    **written(
        TINY, write_files, Ernie4_5_VLMoeProcessor, Ernie4_5_VLMoeImageProcessorPil, has_videos=True
    ),
    needless_files=frozenset({"tokenizer_config.json"}),
    published=Published(make_config=Ernie4_5_VLMoeConfig, list_shapes=list_published),
    rendered=(
        f"<|begin_of_sentence|>User: {IMAGE}what is it\nAssistant: a car<|end_of_sentence|>"
        "User: which color\nAssistant: "
    ),
    with_system=("<|begin_of_sentence|>", "<|begin_of_sentence|>be short\n"),
    probed=("vision_tower.blocks.1", "vision_tower.post_layernorm", "merger"),
    placeholder=IMAGE,
    **GRID_FIELDS,
)
