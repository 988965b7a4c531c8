"""BLIP-2 through the engine: chunks, warm prefixes, preemption and several devices."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.models.tiny_blip2 import blip2_engine, draw_sample, paged_blip2, plain_reference, serve

MAX_TOKENS = 16
"""So many that two requests outgrow 7 blocks."""


@cache
def samples() -> list[Any]:
    """Prompts with and without a picture; the last is the first, with another picture."""
    config = plain_reference().config
    first = draw_sample(config, 5, seed=0)
    return [
        first,
        draw_sample(config, 12, seed=1),
        draw_sample(config, 20, has_image=False, seed=2),
        replace(first, items=draw_sample(config, 1, seed=3).items),
    ]


@cache
def expected_answers() -> list[tuple[int, ...]]:
    """Return the greedy answers of one pass over each whole prompt, without the engine."""
    alone = paged_blip2(plain_reference())
    return [alone.generate(sample, MAX_TOKENS) for sample in samples()]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_batched_tokens": 7}, id="chunks of seven"),
        pytest.param({"num_blocks": 7, "max_model_len": 48}, id="preempted"),
        pytest.param({"num_devices": 2}, id="two devices"),
    ],
)
def test_answers_are_those_of_one_pass(settings: dict[str, Any]):
    core = blip2_engine(plain_reference(), **settings)
    assert serve(core, samples(), "batch", MAX_TOKENS) == expected_answers()
    for sample, expected in zip(samples(), expected_answers(), strict=True):
        for _ in range(2):  # found in the prefix cache, but for the end
            assert serve(core, [sample], "alone", MAX_TOKENS) == [expected]
    assert core.stats().prefix_cache_hits > 0
    assert (core.num_preemptions > 0) == ("num_blocks" in settings)
    assert core.compilations == 0
