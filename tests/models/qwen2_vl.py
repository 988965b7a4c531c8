"""Tiny random Qwen2-VL and Qwen2.5-VL: HF's model, ours with its weights, and prompts for both."""

from collections.abc import Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
)
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl

from mmjax.layers.module import build_abstract
from mmjax.models.host_inputs import PromptItem
from mmjax.models.qwen2_vl import model as ours
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.processing.tensors.inputs import PlaceholderRange
from tests.kit import fill_by_name
from tests.oracle import params_of

VOCAB_SIZE = 96
IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 95, 94, 93, 92
PATCH_WIDTH = 3 * 2 * 4 * 4

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
    "qwen2_vl": (
        modeling_qwen2_vl.Qwen2VLForConditionalGeneration,
        ours.Qwen2VLForConditionalGeneration,
    ),
    "qwen2_5_vl": (
        modeling_qwen2_5_vl.Qwen2_5_VLForConditionalGeneration,
        ours.Qwen2_5_VLForConditionalGeneration,
    ),
}
"""HF's class, and ours."""

Part = int | tuple[str, int, tuple[int, int, int]] | tuple[str, int, tuple[int, int, int], float]
"""Of a prompt: a number of tokens, or an item: modality, seed, grid, and a video's seconds."""


def qwen_config(
    kind: str = "qwen2_vl",
    *,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    is_tied: bool = False,
) -> Any:
    config = CONFIGS[kind](
        text_config={**TEXT, **(text or {})},
        vision_config={**VISION[kind], **(vision or {})},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=is_tied,
    )
    config.architectures = [CLASSES[kind][1].__name__]
    return config


def fill_qwen(model: Any, seed: int = 0) -> None:
    """Fill a torch model so that activations stay near 1; its norms multiply by their weight."""
    fill_by_name(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and ("norm" in name or "ln_q" in name):
                parameter.copy_(1.0 + 0.1 * torch.cos(torch.arange(len(parameter)) * 1.3))
            if "qkv" in name or "q_proj" in name or "k_proj" in name:
                parameter *= 1.4  # sharp attention: answers that do not settle on one token


def random_qwen(kind: str = "qwen2_vl", **settings: Any) -> Any:
    """Return HF's tiny model with random weights, whose `generate` never ends a text."""
    model = CLASSES[kind][0](qwen_config(kind, **settings)).eval()
    fill_qwen(model)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def qwen_params(reference: Any) -> Any:
    """Return its weights as our tree."""
    model_class = CLASSES[reference.config.model_type][1]
    _, abstract = build_abstract(model_class, reference.config, dtype=jnp.float32)
    return params_of(reference, abstract, model_class.rules(reference.config))


def paged_qwen(reference: Any, max_len: int = 256) -> PagedModel:
    model_class = CLASSES[reference.config.model_type][1]
    return PagedModel(model_class, reference.config, qwen_params(reference), max_len)


@cache
def tiny_qwen(kind: str = "qwen2_vl") -> tuple[Any, PagedModel]:
    """Return both sides of the plain config."""
    reference = random_qwen(kind)
    return reference, paged_qwen(reference)


def draw_item(part: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Return the processed tensors of a picture or a video."""
    modality, seed, grid = part[:3]
    pixels = np.random.default_rng(seed).normal(size=(int(np.prod(grid)), PATCH_WIDTH))
    name = "pixel_values" if modality == "image" else "pixel_values_videos"
    tensors = {
        name: pixels.astype(np.float32),
        f"{modality}_grid_thw": np.array(grid, np.int64),
    }
    if len(part) > 3:
        tensors["second_per_grid_ts"] = np.array(part[3], np.float32)
    return tensors


def draw_sample(parts: Sequence[Part], seed: int = 0) -> Sample:
    """Return a prompt of random tokens and items between vision's marks."""
    generator = np.random.default_rng(seed)
    ids: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, int):
            ids += generator.integers(5, 90, part).tolist()
            continue
        length = int(np.prod(part[2])) // 4
        place = PlaceholderRange(offset=len(ids) + 1, length=length)
        items.append(PromptItem(place, draw_item(part)))
        pad = IMAGE_TOKEN if part[0] == "image" else VIDEO_TOKEN
        ids += [VISION_START, *[pad] * length, VISION_END]
    return Sample(token_ids=np.array(ids, np.int32), items=items)


def torch_inputs(sample: Sample, reference: Any) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it to HF's model `reference`."""
    ids = torch.tensor(sample.token_ids, dtype=torch.long)[None]
    kinds = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
    known = signature(reference.forward).parameters
    names = dict.fromkeys(name for item in sample.items for name in item.tensors)
    for name in names.keys() & known.keys():  # Qwen2-VL knows no seconds
        rows = [item.tensors[name] for item in sample.items if name in item.tensors]
        is_flat = name.startswith("pixel_values")
        inputs[name] = torch.tensor(np.concatenate(rows) if is_flat else np.stack(rows))
    return inputs
