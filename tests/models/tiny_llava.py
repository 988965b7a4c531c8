"""Tiny random LLaVAs: HF's model and ours with the same weights, prompts, directories."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2Config,
    SiglipVisionConfig,
)

from mmjax.config import ParallelConfig
from mmjax.engine.core import EngineCore
from mmjax.layers.module import build_abstract
from mmjax.models.host_inputs import PromptItem
from mmjax.models.llava.host_inputs import count_image_tokens, has_pixtral_tower
from mmjax.models.llava.model import LlavaForConditionalGeneration as Model
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.parity.reference import make_reference_inputs
from mmjax.processing.tensors.fields import MultiModalBatchedField, MultiModalFieldElem
from mmjax.processing.tensors.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from mmjax.sampling_params import SamplingParams
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import drain, engine_config, tokens_of
from tests.oracle import fill_with_unit_norms, params_of

IMAGE_TOKEN, BREAK_TOKEN, END_TOKEN = 120, 121, 122
MAX_EMBEDS = 64
"""Of the largest picture."""
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
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
TEXT_CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "gemma3": Gemma3TextConfig,
}
VISION_CONFIGS = {
    "clip": CLIPVisionConfig,
    "siglip": SiglipVisionConfig,
    "pixtral": PixtralVisionConfig,
}
PIXTRAL: dict[str, Any] = {
    "tower": "pixtral",
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
}


def tiny_config(
    *,
    decoder: str = "llama",
    tower: str = "clip",
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    **settings: Any,
) -> LlavaConfig:
    """Return a LLaVA of two decoder blocks and three of the tower, with 16 patches a picture."""
    return LlavaConfig(
        text_config=TEXT_CONFIGS[decoder](**{**TEXT, **(text or {})}),
        vision_config=VISION_CONFIGS[tower](**{**VISION, **(vision or {})}),
        image_token_index=IMAGE_TOKEN,
        **settings,
    )


def random_llava(config: Any, seed: int = 0) -> Any:
    """Return HF's model with random weights, whose `generate` never ends a text."""
    model = LlavaForConditionalGeneration(config).eval()
    fill_with_unit_norms(model, seed)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def paged_llava(reference: Any, max_len: int = 160) -> PagedModel:
    """Return our model with the reference's weights."""
    config = reference.config
    _, abstract = build_abstract(Model, config, dtype=jnp.float32)
    params = params_of(reference, abstract, Model.rules(config))
    return PagedModel(Model, config, params, max_len)


GRIDS = [(3, 4), (1, 1), (5, 2)]
"""Rows and columns of patches of Pixtral's pictures, by turns."""


def draw_picture(config: Any, number: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """Return the pixels and the token ids of a processed picture."""
    vision = config.vision_config
    if has_pixtral_tower(config):
        rows, columns = GRIDS[number % len(GRIDS)]
        ids = [*[IMAGE_TOKEN] * columns, BREAK_TOKEN] * rows
        ids[-1] = END_TOKEN
        shape = (3, rows * vision.patch_size, columns * vision.patch_size)
    else:
        ids = [IMAGE_TOKEN] * count_image_tokens(config)
        shape = (3, vision.image_size, vision.image_size)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32), ids


def draw_sample(config: Any, texts: Sequence[int], seed: int = 0) -> Sample:
    """Return a prompt of `texts[0]` random tokens, a picture, `texts[1]` tokens, a picture, ..."""
    generator = np.random.default_rng(seed)
    ids: list[int] = []
    items = []
    for number, length in enumerate(texts):
        if number:
            pixels, own = draw_picture(config, number + seed, 10 * seed + number)
            place = PlaceholderRange(len(ids), len(own), np.equal(own, IMAGE_TOKEN))
            items.append(PromptItem(place, {"pixel_values": pixels}))
            ids += own
        ids += generator.integers(5, IMAGE_TOKEN, length).tolist()
    return Sample(token_ids=np.array(ids, np.int32), items=items)


def torch_inputs(sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it, for either kind of tower."""
    items = [item.tensors for item in sample.items]
    data = {name: [item[name] for item in items] for name in (items[0] if items else ())}
    return make_reference_inputs(sample.token_ids, data)


@cache
def reference_of(tower: str) -> Any:
    """Return the plain tiny model with a tower, made once."""
    settings: dict[str, Any] = PIXTRAL if tower == "pixtral" else {"tower": tower}
    return random_llava(tiny_config(**settings))


def llava_engine(reference: Any, *, num_devices: int = 1, **settings: Any) -> EngineCore:
    """Start an engine over the reference's weights; `settings` as of `engine_config`."""
    ours = paged_llava(reference)
    spec = ours.cache_spec
    block_size, num_blocks = settings.pop("block_size", 8), settings.pop("num_blocks", None)
    config = engine_config(block_size=block_size, **settings)
    memory = None if num_blocks is None else num_blocks * block_size * spec.width * 4
    config = replace(
        config,
        model=replace(config.model, hf_config=reference.config),
        cache=replace(config.cache, kv_cache_memory_bytes=memory),
        parallel=ParallelConfig(tensor_parallel_size=num_devices),
        max_embeds_per_item={"image": MAX_EMBEDS},
    )
    return EngineCore.from_model(Model, ours.params, config)


def to_message(sample: Sample, request_id: str, max_tokens: int) -> EngineCoreRequest:
    """Return a sample as P0 sends it; an item is named by its content."""
    features = []
    for place, tensors in sample.items:
        name = sha256(b"".join(value.tobytes() for value in tensors.values())).hexdigest()
        elems = {
            key: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
            for key, value in tensors.items()
        }
        features.append(
            MultiModalFeatureSpec(
                data=MultiModalKwargsItem(elems),
                modality="image",
                identifier=name,
                mm_position=place,
                mm_hash=name,
            )
        )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=sample.token_ids.tolist(),
        mm_features=features,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
    )


def serve(
    core: EngineCore, samples: Sequence[Sample], prefix: str, max_tokens: int = 8
) -> list[tuple[int, ...]]:
    """Return the answers to all samples, given at once."""
    messages = [to_message(s, f"{prefix} {n}", max_tokens) for n, s in enumerate(samples)]
    for message in messages:
        core.add_request(message)
    news = drain(core)
    return [tuple(tokens_of(news[message.request_id])) for message in messages]
