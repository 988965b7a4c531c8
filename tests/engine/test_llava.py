"""LLaVA through the engine: chunks, warm prefixes, preemption and several devices."""

from functools import cache
from typing import Any

import pytest

from tests.models.tiny_llava import (
    draw_sample,
    llava_engine,
    paged_llava,
    reference_of,
    serve,
)

PROMPTS = [(3, 5), (0, 1, 9), (20,), (3, 5)]
"""Tokens before and between the pictures; the last is the first, with another picture."""


@cache
def samples(tower: str) -> list[Any]:
    config = reference_of(tower).config
    return [draw_sample(config, texts, seed=n) for n, texts in enumerate(PROMPTS)]


@cache
def expected_answers(tower: str) -> list[tuple[int, ...]]:
    """Return the greedy answers of one pass over each whole prompt, without the engine."""
    alone = paged_llava(reference_of(tower))
    return [alone.generate(sample, 8) for sample in samples(tower)]


@pytest.mark.parametrize("tower", ["clip", "pixtral"])
def test_pictures_change_the_answer(tower: str):
    """The oracle would not see what neither side obeys."""
    assert len(set(expected_answers(tower))) == len(PROMPTS)


@pytest.mark.parametrize(
    ("tower", "settings"),
    [
        pytest.param("clip", {"max_num_batched_tokens": 7}, id="chunks of seven"),
        pytest.param("clip", {"num_blocks": 9, "max_model_len": 72}, id="preempted"),
        pytest.param("clip", {"num_devices": 2}, id="two devices"),
        pytest.param("clip", {"num_devices": 4}, id="four devices"),
        pytest.param("pixtral", {"max_num_batched_tokens": 7}, id="pixtral, chunks of seven"),
        pytest.param("pixtral", {"num_blocks": 9, "max_model_len": 72}, id="pixtral, preempted"),
    ],
)
def test_answers_are_those_of_one_pass(tower: str, settings: dict[str, Any]):
    core = llava_engine(reference_of(tower), **settings)
    assert serve(core, samples(tower), "batch") == expected_answers(tower)
    for sample, expected in zip(samples(tower), expected_answers(tower), strict=True):
        for _ in range(2):  # found in the prefix cache, but for the end
            assert serve(core, [sample], "alone") == [expected]
    assert core.stats().prefix_cache_hits > 0
    assert core.compilations == 0
