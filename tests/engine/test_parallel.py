"""One model over several devices: the answers of one, and each device with its own part."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from transformers import Gemma3Config

from mmjax.config import EngineConfig, ParallelConfig
from mmjax.engine.core import EngineCore
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from tests.engine.test_core import MIXED
from tests.engine.tiny import drain, engine_config, loud_params, message, tiny_config, tokens_of

NUM_HEADS = 4
KV_HEADS = (1, 2, 4)
"""Held by all four devices; by two each; by one each."""


@lru_cache
def config_with_heads(num_kv_heads: int) -> Gemma3Config:
    """The tiny model with four heads."""
    text = tiny_config().text_config.to_dict()
    text.update(num_attention_heads=NUM_HEADS, num_key_value_heads=num_kv_heads)
    whole = tiny_config().to_dict()
    return Gemma3Config.from_dict({**whole, "text_config": text})


@lru_cache
def params_with_heads(num_kv_heads: int) -> Any:
    return loud_params(config_with_heads(num_kv_heads))[1]


def parallel_config(num_kv_heads: int, **parallel: Any) -> EngineConfig:
    config = engine_config()
    return replace(
        config,
        model=replace(config.model, hf_config=config_with_heads(num_kv_heads)),
        parallel=ParallelConfig(**parallel),
    )


@lru_cache
def engine(num_kv_heads: int, size: int) -> EngineCore:
    config = parallel_config(num_kv_heads, tensor_parallel_size=size)
    params = params_with_heads(num_kv_heads)
    return EngineCore.from_model(Gemma3ForConditionalGeneration, params, config)


def serve(core: EngineCore, **sampling: Any) -> list[list[int]]:
    """Serve all at once: mixed steps, chunks, pictures of several units."""
    names = [f"{n}" for n in range(len(MIXED))]
    for name, parts in zip(names, MIXED, strict=True):
        core.add_request(message(name, parts, **sampling))
    news = drain(core)
    return [tokens_of(news[name]) for name in names]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("num_kv_heads", KV_HEADS)
def test_answers_are_those_of_one_device(num_kv_heads: int, size: int):
    core = engine(num_kv_heads, size)
    assert serve(core) == serve(engine(num_kv_heads, 1))
    assert core.compilations == 0
