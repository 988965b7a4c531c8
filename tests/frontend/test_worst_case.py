"""The engine has room for the largest item that the processor can make."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmjax.config import CacheConfig, EngineConfig, MultiModalConfig, SchedulerConfig
from mmjax.errors import ConfigError
from mmjax.frontend.worst_case import with_encoder_budget
from mmjax.model_source import load_model_config


def config_for(path: Path, *, scheduler: SchedulerConfig, **mm: object) -> EngineConfig:
    model = load_model_config(str(path), mm=MultiModalConfig(**mm))  # type: ignore[arg-type]
    return EngineConfig(model=model, scheduler=scheduler, cache=CacheConfig())


SMALL_STEPS = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=2)
CROPS = {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 4}


def test_an_item_of_one_unit_needs_no_question(tiny_gemma3: Path) -> None:
    config = config_for(tiny_gemma3, scheduler=SMALL_STEPS)
    assert with_encoder_budget(config) is config


def test_the_largest_item_fits_a_step_and_the_cache(tiny_gemma3: Path) -> None:
    config = config_for(tiny_gemma3, scheduler=SMALL_STEPS, mm_processor_kwargs=CROPS)
    found = with_encoder_budget(config)
    per_unit = config.model.hf_config.mm_tokens_per_image
    largest = max(8, 5 * per_unit)
    assert found.scheduler.max_num_encoder_input_tokens == largest
    assert found.cache.encoder_cache_size == largest


def test_only_a_run_of_embeddings_must_fit_a_step(tiny_gemma3: Path) -> None:
    scheduler = SchedulerConfig(
        max_num_batched_tokens=4, max_num_seqs=2, disable_chunked_mm_input=True
    )
    config = config_for(tiny_gemma3, scheduler=scheduler, mm_processor_kwargs=CROPS)
    assert with_encoder_budget(config).scheduler.max_num_encoder_input_tokens == 5 * 4
    config = replace(config, scheduler=replace(scheduler, max_num_batched_tokens=3))
    with pytest.raises(ConfigError, match=r"takes 4 tokens.*`--max-num-batched-tokens` is 3"):
        with_encoder_budget(config)


def test_without_pictures_nothing_changes(tiny_gemma3: Path) -> None:
    config = config_for(
        tiny_gemma3,
        scheduler=SMALL_STEPS,
        mm_processor_kwargs=CROPS,
        limit_mm_per_prompt={"image": 0},
    )
    assert with_encoder_budget(config) is config
