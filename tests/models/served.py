"""What tests of families share: samples as the engine's requests, and what it must answer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from mmjax.config.engine_config import (
    EngineConfig,
    LoRAConfig,
    MultiModalConfig,
    ParallelConfig,
    Quantization,
)
from mmjax.engine.core import EngineCore
from mmjax.params.sampling_params import SamplingParams
from mmjax.parity.arrays import Sample
from mmjax.processing.tensors.fields import MultiModalBatchedField, MultiModalFieldElem
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from mmjax.rounding import cdiv
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import engine_config
from tests.families.tiny import TinyModel


def start_engine(model: TinyModel, **settings: Any) -> EngineCore:
    """Start an engine of a row of the table; `settings` as of `start_model`.

    It has room for the largest item, and for all of a prompt's that are encoded in one step.
    """
    family = model.family
    largest = max(family.max_embeds.values()) * count_encoded_together(model)
    sizes = {
        "max_model_len": family.max_model_len,
        "max_num_encoder_input_tokens": largest,
        "encoder_cache_size": largest,
        **settings,
    }
    return start_model(
        family.model_class, model.config, model.params, max_embeds=family.max_embeds, **sizes
    )


def start_model(
    model_class: Any, hf_config: Any, params: Any, *, max_embeds: Mapping[str, int], **settings: Any
) -> EngineCore:
    """Start an engine; `settings` as of `make_config`."""
    config = make_config(model_class, hf_config, max_embeds=max_embeds, **settings)
    return EngineCore(config, model_class=model_class, params=params)


def make_config(
    model_class: Any,
    hf_config: Any,
    *,
    max_embeds: Mapping[str, int],
    num_blocks: int | None = None,
    size: int = 1,
    mm: MultiModalConfig | None = None,
    lora: LoRAConfig | None = None,
    quantization: Quantization | None = None,
    **settings: Any,
) -> EngineConfig:
    """Return what an engine is of three requests at a time, with room for the largest item.

    `size` is `tensor_parallel_size`; None blocks are enough for all.
    """
    largest = max(max_embeds.values())
    sizes: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_num_encoder_input_tokens": largest,
        "encoder_cache_size": largest,
    }
    config = engine_config(**{**sizes, **settings})
    layers = model_class(hf_config, dtype="float32").kv_cache_spec.layers
    width = sum(layer.width // min(size, layer.num_kv_heads) for layer in layers)
    block_bytes = config.cache.block_size * width * 4
    config = replace(
        config,
        model=replace(config.model, hf_config=hf_config, quantization=quantization),
        cache=replace(
            config.cache,
            kv_cache_memory_bytes=None if num_blocks is None else num_blocks * block_bytes,
        ),
        parallel=ParallelConfig(tensor_parallel_size=size),
        lora=lora or LoRAConfig(),
        max_embeds_per_item=dict(max_embeds),
    )
    return config if mm is None else config.with_mm(mm)


def count_encoded_together(model: TinyModel) -> int:
    """Return the items of a prompt that are encoded in one step, since they see each other."""
    return model.family.max_items if model.paged.sees in ("all_items", "prompt") else 1


def count_least_blocks(model: TinyModel, max_model_len: int, block_size: int = 8) -> int:
    """Return the blocks that the longest request needs."""
    return cdiv(max_model_len, block_size) + cdiv(model.paged.max_encoder_len, block_size)


def cramp(model: TinyModel, samples: Sequence[Sample], max_tokens: int) -> dict[str, int]:
    """Return sizes of an engine that holds the longest of some requests, and one block more.

    Requests that it serves at once must preempt each other: in room for a family's longest prompt
    some families' prompts of these tests lie side by side.
    """
    longest = max(len(sample.token_ids) for sample in samples) + max_tokens
    return {"max_model_len": longest, "num_blocks": count_least_blocks(model, longest) + 1}


def find_modality(tensors: Iterable[str]) -> str:
    """Return an item's modality, by the names of its tensors."""
    if "input_features" in tensors:
        return "audio"
    return "video" if any("video" in name for name in tensors) else "image"


def make_request(
    request_id: str,
    sample: Sample,
    *,
    tensors: Sequence[Mapping[str, Any]] | None = None,
    eos: Sequence[int] = (),
    **sampling: Any,
) -> EngineCoreRequest:
    """Return the sample as the engine gets it; an item is named by its content.

    `tensors`: what the items hold instead.
    """
    features = []
    for number, (place, own) in enumerate(sample.items):
        held = own if tensors is None else tensors[number]
        elems = {
            key: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
            for key, value in held.items()
        }
        content = b"".join(name.encode() + value.tobytes() for name, value in held.items())
        name = sha256(content).hexdigest()
        features.append(
            MultiModalFeatureSpec(
                data=MultiModalKwargsItem(elems),
                modality=find_modality(own),
                identifier=name,
                mm_position=place,
                mm_hash=name,
            )
        )
    encoder_ids = sample.encoder_token_ids
    sampling = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=sample.token_ids.tolist(),
        encoder_prompt_token_ids=None if encoder_ids is None else encoder_ids.tolist(),
        mm_features=features,
        sampling_params=SamplingParams(**sampling),
        eos_token_ids=list(eos),
    )


def ask(image: Any, text: str) -> Any:
    """Return a conversation that asks about an image, or without one."""
    parts: list[Any] = [{"type": "text", "text": text}]
    if image is not None:
        parts.insert(0, {"type": "image_pil", "image_pil": image})
    return [{"role": "user", "content": parts}]
