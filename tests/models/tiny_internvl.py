"""Tiny random InternVLs: HF's torch model, its weights in ours, and prompts for both."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from mmjax.layers.module import build_abstract
from mmjax.models.host_inputs import PromptItem
from mmjax.models.internvl.model import InternVLForConditionalGeneration
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.processing.tensors.inputs import PlaceholderRange
from tests import oracle
from tests.kit import fill_by_name

SIDE, CONTEXT, START, END = 32, 125, 126, 127
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
}
TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


def tiny_config(
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Return HF's config: tiles of 4 x 4 patches, 4 embeddings each, before Qwen2's decoder."""
    from transformers import InternVLConfig

    return InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT, **(text or {})},
        vision_config={**VISION, **(vision or {})},
        image_token_id=CONTEXT,
        **{"image_seq_length": 4, "tie_word_embeddings": False, **settings},
    )


def fill(model: Any, seed: int = 0) -> Any:
    """Fill a torch model by its parameters' names, with norms around 1; return it."""
    fill_by_name(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter += 1.0
    return model


def random_internvl(config: Any, seed: int = 0) -> Any:
    """Return HF's model of a config, whose `generate` never ends a text."""
    from transformers import GenerationConfig
    from transformers import InternVLForConditionalGeneration as Reference

    model = fill(Reference(config).eval(), seed)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def paged_internvl(reference: Any, max_len: int = 256) -> PagedModel:
    """Return our model with the weights of `random_internvl`'s."""
    model_class, config = InternVLForConditionalGeneration, reference.config
    _, abstract = build_abstract(model_class, config, dtype=jnp.float32)
    params = oracle.params_of(reference, abstract, model_class.rules(config))
    return PagedModel(model_class, config, params, max_len)


def draw_sample(config: Any, parts: Sequence[Any], name: str = "pixel_values") -> Sample:
    """Return a prompt: a list is of token ids, a number of random tiles an item under `name`."""
    spec_side = config.vision_config.image_size[0]
    per_tile = int((spec_side // config.vision_config.patch_size[0] * config.downsample_ratio) ** 2)
    ids: list[int] = []
    items = []
    for number, part in enumerate(parts):
        if not isinstance(part, int):
            ids += part
            continue
        rng = np.random.default_rng([number, part])
        pixels = rng.normal(size=(part, 3, spec_side, spec_side)).astype(np.float32)
        place = PlaceholderRange(offset=len(ids) + 1, length=part * per_tile)
        items.append(PromptItem(place, {name: pixels}))
        ids += [START, *[CONTEXT] * part * per_tile, END]
    return Sample(token_ids=np.array(ids, np.int32), items=items)


def torch_inputs(sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it: videos are pictures there."""
    inputs = oracle.torch_inputs(sample)
    del inputs["token_type_ids"]  # a Gemma's
    return {"pixel_values" if "pixel" in name else name: value for name, value in inputs.items()}


def words(seed: int, length: int) -> list[int]:
    """Return random tokens of text."""
    return np.random.default_rng(seed).integers(1, CONTEXT, length).tolist()
