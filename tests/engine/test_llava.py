"""LLaVA through the engine: chunks, warm prefixes, preemption and several devices."""

from functools import cache
from typing import Any

import pytest

from tests.models.tiny_llava import (
    draw_sample,
    llava_engine,
    paged_llava,
    plain_reference,
    serve,
)

PROMPTS = [(3, 5), (0, 1, 9), (20,), (3, 5)]
"""Tokens before and between the pictures; the last is the first, with another picture."""


@cache
def samples() -> list[Any]:
    config = plain_reference().config
    return [draw_sample(config, texts, seed=n) for n, texts in enumerate(PROMPTS)]


@cache
def expected_answers() -> list[tuple[int, ...]]:
    """Return the greedy answers of one pass over each whole prompt, without the engine."""
    alone = paged_llava(plain_reference())
    return [alone.generate(sample, 8) for sample in samples()]


def test_pictures_change_the_answer():
    """The oracle would not see what neither side obeys."""
    assert len(set(expected_answers())) == len(PROMPTS)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_batched_tokens": 7}, id="chunks of seven"),
        pytest.param({"num_blocks": 9, "max_model_len": 72}, id="preempted"),
        pytest.param({"num_devices": 2}, id="two devices"),
        pytest.param({"num_devices": 4}, id="four devices"),
    ],
)
def test_answers_are_those_of_one_pass(settings: dict[str, Any]):
    core = llava_engine(plain_reference(), **settings)
    assert serve(core, samples(), "batch") == expected_answers()
    for sample, expected in zip(samples(), expected_answers(), strict=True):
        for _ in range(2):  # found in the prefix cache, but for the end
            assert serve(core, [sample], "alone") == [expected]
    assert core.prefix_cache_info.hits > 0
    assert core.compilations == 0
