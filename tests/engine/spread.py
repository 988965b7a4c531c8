"""The tiny model with four heads, to be spread over devices and processes."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from transformers import Gemma3Config

from mmjax.config.engine_config import EngineConfig, LoRAConfig, MultiModalConfig, ParallelConfig
from mmjax.engine.core import EngineCore
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec
from tests.engine.adapters import make_tensors, text_layers, write_adapter
from tests.engine.tiny import (
    answer_all,
    engine_config,
    loud_params,
    message,
    text,
    tiny_config,
    with_embeds,
)

NUM_HEADS = 4
NUM_PROCESSES = 2


PROMPTS: list[tuple[Any, ...]] = [
    (text(1, 7),),
    (text(2, 100),),
    (text(3, 3), (1, 1), text(4, 5)),
    (text(6, 2), (1, 1), text(7, 2), (2, 1), (1, 1), text(8, 3)),
    (text(11, 5), (4, 3), text(12, 5)),
    (text(13, 37), (5, 2), (6, 1), (7, 2), text(14, 1)),
]
"""Text, longer than a step; pictures of one and of several units, shared ones among them."""


@lru_cache
def config_with_heads(num_kv_heads: int) -> Gemma3Config:
    """Return the tiny model's config with four heads."""
    fields: Any = tiny_config().to_dict()
    heads = {"num_attention_heads": NUM_HEADS, "num_key_value_heads": num_kv_heads}
    return Gemma3Config.from_dict({**fields, "text_config": {**fields["text_config"], **heads}})


@lru_cache
def params_with_heads(num_kv_heads: int) -> Any:
    """Return its parameters."""
    return loud_params(config_with_heads(num_kv_heads))[1]


def spread_config(num_kv_heads: int, **parallel: Any) -> EngineConfig:
    """Return a small engine's config; `parallel` are the fields of `ParallelConfig`."""
    config = engine_config(max_num_seqs=2)
    config = config.with_mm(MultiModalConfig(enable_mm_embeds=True))
    return replace(
        config,
        model=replace(config.model, hf_config=config_with_heads(num_kv_heads)),
        parallel=ParallelConfig(**parallel),
    )


def serve(core: EngineCore, **sampling: Any) -> list[list[int]]:
    """Serve all prompts at once; return their answers."""
    requests = [message(str(n), parts, **sampling) for n, parts in enumerate(PROMPTS)]
    return answer_all(core, requests)


def adapted_config(num_kv_heads: int, **parallel: Any) -> EngineConfig:
    """Return the same with two slots for adapters."""
    lora = LoRAConfig(enable_lora=True, max_loras=2, max_lora_rank=4)
    return replace(spread_config(num_kv_heads, **parallel), lora=lora)


def serve_adapters(core: EngineCore, folder: Path, num_kv_heads: int) -> list[list[int]]:
    """Serve prompts with three adapters, of which two fit, and with none; return their answers."""
    layers = text_layers(config_with_heads(num_kv_heads))
    names = ["a", "b", "c"]
    for name in names:
        tensors = make_tensors(ord(name), layers=layers)
        core.load_adapter(name, write_adapter(folder / name, tensors=tensors))
    core.wait_loaded()
    requests = [
        msgspec.structs.replace(message(f"{turn} {name}", PROMPTS[2 + turn]), lora_name=name)
        for turn in range(2)
        for name in (*names, None)
    ]
    return answer_all(core, requests)


def serve_embeds(core: EngineCore) -> list[list[int]]:
    """Serve all prompts at once, with random embeddings in place of their pictures."""
    requests = [message(str(n), parts) for n, parts in enumerate(PROMPTS)]
    return answer_all(
        core, [with_embeds(one, [_embeds(item) for item in one.mm_features]) for one in requests]
    )


def _embeds(feature: MultiModalFeatureSpec) -> np.ndarray:
    """Return random rows, the same for the same picture."""
    _, seed, units = feature.identifier.split("-")
    rng = np.random.default_rng((int(seed), int(units)))
    return rng.standard_normal((feature.mm_position.get_num_embeds(), 32)).astype(np.float32)
