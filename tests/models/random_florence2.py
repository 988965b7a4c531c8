"""HF's Florence-2 of tiny random configs, and its weights in our trees."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from transformers import Florence2Config, Florence2ForConditionalGeneration, GenerationConfig

from mmjax.layers.module import build_abstract
from mmjax.models.florence2.host_inputs import Florence2HostInputs
from mmjax.models.florence2.model import Florence2ForConditionalGeneration as Model
from mmjax.models.host_inputs import PromptItem
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.processing.tensors.inputs import PlaceholderRange
from tests.oracle import params_of

IMAGE_TOKEN, START = 95, 2
VISION: dict[str, Any] = {
    "depths": [1, 1],
    "patch_size": [7, 3],
    "patch_stride": [4, 2],
    "patch_padding": [3, 1],
    "patch_prenorm": [False, True],
    "embed_dim": [8, 16],
    "num_heads": [2, 2],
    "num_groups": [2, 4],
    "window_size": 3,
    "drop_path_rate": 0.0,
    "projection_dim": 32,
    "max_position_embeddings": 8,
    "image_size": 24,
}
TEXT: dict[str, Any] = {
    "model_type": "bart",
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 64,
    "decoder_start_token_id": START,
}


def tiny_config(
    *,
    vision: Mapping[str, Any] | None = None,
    text: Mapping[str, Any] | None = None,
    is_tied: bool = True,
) -> Any:
    """Return a config of two stages, two blocks each way; a picture is 9 patches."""
    return Florence2Config(
        vision_config={**VISION, **(vision or {})},
        text_config={**TEXT, **(text or {})},
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=is_tied,
    )


def random_florence2(*, is_loud: bool = False, **config: Any) -> Any:
    """Return HF's model with random weights, whose `generate` never ends a text.

    `is_loud`: answers change with every input, and rounding grows more from layer to layer.
    """
    model = Florence2ForConditionalGeneration(tiny_config(**config)).eval()
    fill(model, is_loud=is_loud)
    model.generation_config = GenerationConfig(pad_token_id=1, decoder_start_token_id=START)
    return model


def fill(model: Any, *, is_loud: bool = False) -> None:
    """Fill with random values that depend on names alone."""
    inner, last, places = (3.0, 5.0, 2.0) if is_loud else (1.5, 1.5, 1.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = hashlib.sha256(f"0:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:6], "little"))
            value = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or name.endswith("bias"):
                value = 0.1 * value + (1.0 if name.endswith("weight") else 0.0)
            elif "embed" in name:
                value *= places
            elif "shared" not in name:
                is_last = name.endswith(("out_proj.weight", "fc2.weight"))
                value *= (last if is_last else inner) / parameter[0].numel() ** 0.5
            parameter.copy_(value)


def paged_florence2(reference: Any, max_len: int = 64) -> PagedModel:
    """Return our model with the weights of `random_florence2`'s."""
    config = reference.config
    _, abstract = build_abstract(Model, config, dtype=jnp.float32)
    return PagedModel(Model, config, params_of(reference, abstract, Model.rules(config)), max_len)


def draw_pixels(config: Any, seed: int) -> np.ndarray:
    """Return a picture, float32[3, Y, X]."""
    size = config.vision_config.image_size
    shape = (3, size, size) if isinstance(size, int) else (3, *size)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def draw_sample(
    config: Any, num_words: int, *, picture: int | None = None, answer: Sequence[int] = ()
) -> Sample:
    """Return a prompt of `num_words` random tokens behind a picture (its seed), or none.

    `answer`: tokens of the decoder's prompt behind the first.
    """
    text = np.random.default_rng(num_words).integers(4, 90, num_words).tolist()
    items, rows = [], 0
    if picture is not None:
        rows = Florence2HostInputs(config).num_image_rows
        place = PlaceholderRange(offset=0, length=rows)
        items = [PromptItem(place, {"pixel_values": draw_pixels(config, picture)})]
    return Sample(
        token_ids=np.array([START, *answer], np.int32),
        items=items,
        encoder_token_ids=np.array([IMAGE_TOKEN] * rows + text, np.int32),
    )


def torch_inputs(sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it, with the decoder's prompt."""
    ids = torch.tensor(sample.encoder_token_ids, dtype=torch.long)[None]
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "decoder_input_ids": torch.tensor(sample.token_ids, dtype=torch.long)[None],
    }
    pixels = [torch.tensor(tensors["pixel_values"]) for _, tensors in sample.items]
    return inputs | ({"pixel_values": torch.stack(pixels)} if pixels else {})
