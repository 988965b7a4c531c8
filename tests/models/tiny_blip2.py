"""Tiny random BLIP-2s: HF's model and ours with the same weights, prompts, directories."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    GenerationConfig,
    OPTConfig,
)

from mmjax.config import ParallelConfig
from mmjax.engine.core import EngineCore
from mmjax.layers.module import build_abstract
from mmjax.models.blip2.model import Blip2ForConditionalGeneration as Model
from mmjax.models.host_inputs import PromptItem
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.processing.tensors.fields import MultiModalBatchedField, MultiModalFieldElem
from mmjax.processing.tensors.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from mmjax.sampling_params import SamplingParams
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import drain, engine_config, tokens_of
from tests.kit import fill_by_name
from tests.oracle import params_of

IMAGE_TOKEN, NUM_QUERIES = 120, 5
TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
QFORMER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}


def tiny_config(
    *,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    qformer: Mapping[str, Any] | None = None,
    num_queries: int = NUM_QUERIES,
) -> Any:
    """Return a config; the arguments are keys that differ from the above."""
    return Blip2Config(
        text_config=OPTConfig(**{**TEXT, **(text or {})}),
        vision_config={**VISION, **(vision or {})},
        qformer_config={**QFORMER, **(qformer or {})},
        num_query_tokens=num_queries,
        image_token_index=IMAGE_TOKEN,
    )


def fill(module: torch.nn.Module) -> None:
    """Fill with random values, norms near 1."""
    fill_by_name(module)
    with torch.no_grad():
        for child in module.modules():
            if isinstance(child, torch.nn.LayerNorm):
                child.weight.copy_(1 + 0.1 * torch.tanh(child.weight))


def random_blip2(config: Any) -> Any:
    """Return HF's model with random weights, whose `generate` never ends a text."""
    model = Blip2ForConditionalGeneration(config).eval()
    fill(model)
    # NOTE: it generates by the inner model's settings.
    model.language_model.generation_config = GenerationConfig(pad_token_id=0)
    return model


@cache
def plain_reference() -> Any:
    """HF's model of the plain config."""
    return random_blip2(tiny_config())


def paged_blip2(reference: Any, max_len: int = 128) -> PagedModel:
    """Return our model with the reference's weights."""
    _, abstract = build_abstract(Model, reference.config, dtype=jnp.float32)
    params = params_of(reference, abstract, Model.rules(reference.config))
    return PagedModel(Model, reference.config, params, max_len)


def draw_sample(config: Any, num_tokens: int, *, has_image: bool = True, seed: int = 0) -> Sample:
    """Return a prompt of `num_tokens` random tokens, behind the queries of a picture if any."""
    generator = np.random.default_rng(seed)
    side, queries = config.vision_config.image_size, config.num_query_tokens
    ids = generator.integers(3, IMAGE_TOKEN, num_tokens).tolist()
    items = []
    if has_image:
        pixels = generator.normal(size=(3, side, side)).astype(np.float32)
        place = PlaceholderRange(offset=0, length=queries)
        items.append(PromptItem(place, {"pixel_values": pixels}))
        ids = [IMAGE_TOKEN] * queries + ids
    return Sample(token_ids=np.array(ids, np.int32), items=items)


class TextAlone(torch.nn.Module):
    """HF's language model under its name in the whole model, which takes no text without images."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        self.language_model = reference.language_model
        self.config = reference.config.get_text_config()

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.language_model(input_ids=input_ids)

    def generate(self, input_ids: torch.Tensor, **options: Any) -> Any:
        return self.language_model.generate(input_ids=input_ids, **options)


def torch_model_and_inputs(reference: Any, sample: Sample) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the module that takes the sample, and the sample as it takes it."""
    ids = torch.tensor(sample.token_ids, dtype=torch.long)[None]
    if not sample.items:
        return TextAlone(reference), {"input_ids": ids}
    pixels: Sequence[Any] = [item.tensors["pixel_values"] for item in sample.items]
    return reference, {"input_ids": ids, "pixel_values": torch.tensor(np.stack(pixels))}


def blip2_engine(reference: Any, *, num_devices: int = 1, **settings: Any) -> EngineCore:
    """Start an engine over the reference's weights; `settings` as of `engine_config`."""
    ours = paged_blip2(reference)
    spec = ours.cache_spec
    num_blocks = settings.pop("num_blocks", None)
    config = engine_config(**settings)
    token_bytes = spec.width * 4
    memory = None if num_blocks is None else num_blocks * config.cache.block_size * token_bytes
    config = replace(
        config,
        model=replace(config.model, hf_config=reference.config),
        cache=replace(config.cache, kv_cache_memory_bytes=memory),
        parallel=ParallelConfig(tensor_parallel_size=num_devices),
        max_embeds_per_item={"image": reference.config.num_query_tokens},
    )
    return EngineCore.from_model(Model, ours.params, config)


def to_message(sample: Sample, request_id: str, max_tokens: int) -> EngineCoreRequest:
    """Return a sample as the server's process sends it; an item is named by its content."""
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
