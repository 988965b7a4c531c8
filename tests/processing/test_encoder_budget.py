"""Budgets of the encoder: room for the largest item."""

from collections.abc import Mapping
from typing import Any

import pytest

from mmjax.config.engine_config import SchedulerConfig
from mmjax.errors import ConfigError
from mmjax.processing import MultiModalBudget, MultiModalProfiler, compute_mm_encoder_budget
from mmjax.processing.context import BaseProcessingInfo
from tests.processing.test_processor import make


def scheduler(**changes: Any) -> SchedulerConfig:
    changes = {"max_num_batched_tokens": 100, "max_num_seqs": 4, **changes}
    return SchedulerConfig(**changes)


@pytest.mark.parametrize(
    ("config", "cache_size", "largest", "expected"),
    [
        ({}, None, 30, (100, 100)),
        ({}, None, 300, (300, 300)),
        ({"max_num_encoder_input_tokens": 50}, None, 30, (50, 100)),
        ({"max_num_encoder_input_tokens": 20}, 10, 30, (30, 30)),
        ({"max_num_encoder_input_tokens": 500}, 700, 30, (500, 700)),
    ],
)
def test_there_is_room_for_the_largest_item(
    config: dict[str, Any], cache_size: int | None, largest: int, expected: tuple[int, int]
):
    items = {"image": largest, "audio": 1}
    budget = compute_mm_encoder_budget(scheduler(**config), items, encoder_cache_size=cache_size)
    assert budget == expected


def test_without_a_modality_there_is_no_budget(caplog: pytest.LogCaptureFixture):
    assert compute_mm_encoder_budget(scheduler(), {}) == (0, 0)
    assert "no modality needs an encoder" in caplog.text


def test_an_item_that_must_go_in_one_step_must_fit_it():
    kwargs: Any = {"disable_chunked_mm_input": True}
    assert compute_mm_encoder_budget(scheduler(), {"image": 100}, **kwargs) == (100, 100)
    with pytest.raises(ValueError, match=r"one image takes 101 tokens.* set it to 101") as caught:
        compute_mm_encoder_budget(scheduler(), {"image": 101}, **kwargs)
    assert isinstance(caught.value, ConfigError)


def make_budget(
    tokens: Mapping[str, int],
    limits: Mapping[str, int],
    *,
    enable_mm_embeds: bool = False,
) -> MultiModalBudget:
    """Make the budget of a model whose items are as large as `tokens` says."""
    processor = make(mm={"limit_mm_per_prompt": limits, "enable_mm_embeds": enable_mm_embeds})
    info: Any = processor.info
    info.__class__ = type(
        "Sized",
        (type(info),),
        {
            "get_supported_mm_limits": lambda self: dict.fromkeys(tokens),
            "get_mm_max_tokens_per_item": lambda self, seq_len, mm_counts: tokens,
        },
    )
    assert isinstance(info, BaseProcessingInfo)
    profiler = MultiModalProfiler(processor)
    return MultiModalBudget(profiler, scheduler())


def test_a_step_has_room_for_its_tokens():
    budget = make_budget({"image": 10, "video": 40}, {"image": 3, "video": 9})
    assert budget.get_encoder_budget() == 100
    assert budget.mm_max_toks_per_item == {"image": 10, "video": 40}


def test_a_modality_of_embeddings_alone_fills_the_cache_and_runs_no_tower():
    limits = {"image": 2, "video": 0}
    budget = make_budget({"image": 10, "video": 400}, limits, enable_mm_embeds=True)
    assert budget.mm_max_toks_per_item == {"image": 10}
    assert (budget.encoder_compute_budget, budget.encoder_cache_size) == (400, 400)
    without = make_budget({"image": 10, "video": 400}, limits)
    assert (without.encoder_compute_budget, without.encoder_cache_size) == (100, 100)


def test_a_model_without_modalities_has_no_items():
    budget = make_budget({"image": 10}, {"image": 0})
    assert budget.get_encoder_budget() == 0
    assert budget.mm_max_toks_per_item == {}
