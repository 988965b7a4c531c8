"""The engine has room for the largest item that the processor can make."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmjax.config.engine_config import CacheConfig, EngineConfig, MultiModalConfig, SchedulerConfig
from mmjax.errors import ConfigError
from mmjax.frontend.media_budget import with_encoder_budget
from mmjax.models.model_source import load_model_config


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


def test_what_requests_may_ask_for_is_planned_for(tiny_gemma3: Path) -> None:
    config = config_for(tiny_gemma3, scheduler=SMALL_STEPS, trust_request_mm_kwargs=True)
    per_unit = config.model.hf_config.mm_tokens_per_image
    found = with_encoder_budget(config)
    assert found.scheduler.max_num_encoder_input_tokens == max(8, 5 * per_unit)


def test_the_operators_sizes_lower_the_budget(tiny_gemma3: Path) -> None:
    config = config_for(
        tiny_gemma3,
        scheduler=SMALL_STEPS,
        mm_processor_kwargs=CROPS,
        limit_mm_per_prompt={"image": {"width": 300, "height": 300}},
    )
    per_unit = config.model.hf_config.mm_tokens_per_image
    found = with_encoder_budget(config)
    assert found.cache.encoder_cache_size == max(8, per_unit)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"do_pan_and_scn": True}, "`do_pan_and_scn`, .* do you mean `do_pan_and_scan`"),
        ({"size": "huge"}, "cannot be processed with `--mm-processor-kwargs` {'size': 'huge'}"),
        ({"images_kwargs": 5}, "a `int` as `images_kwargs`; give a dict"),
    ],
)
def test_settings_that_hf_refuses_fail_before_the_engine_starts(
    tiny_gemma3: Path, kwargs: dict[str, object], message: str
) -> None:
    config = config_for(tiny_gemma3, scheduler=SMALL_STEPS, mm_processor_kwargs=kwargs)
    with pytest.raises(ConfigError, match=message):
        with_encoder_budget(config)


def test_a_limit_of_what_the_model_does_not_take_fails_before_the_engine_starts(
    tiny_gemma3: Path,
) -> None:
    for limits in ({"imge": 4}, {"image": 1, "audio": {"length": 5}}):
        config = config_for(tiny_gemma3, scheduler=SMALL_STEPS, limit_mm_per_prompt=limits)
        with pytest.raises(ConfigError, match="which this model does not take; it takes `image`"):
            with_encoder_budget(config)
    off = config_for(tiny_gemma3, scheduler=SMALL_STEPS, limit_mm_per_prompt={"video": 0})
    assert with_encoder_budget(off).cache.encoder_cache_size
