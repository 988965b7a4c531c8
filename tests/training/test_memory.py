"""A gradient keeps what enters each block, and computes the rest of it again."""

from typing import Any

import jax

from mmjax import ScoredModel, score
from tests.families import TINY_FAMILIES
from tests.families.tiny import Words, draw_words

NUM_LAYERS = 4
OPTIONS: dict[str, str | bool] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""XLA's CPU backend orders for speed by itself: blocks are then computed again all at once."""


def test_blocks_that_are_computed_again_need_less_memory():
    family = TINY_FAMILIES["llava"]
    config = family.make_config(text={"num_hidden_layers": NUM_LAYERS})
    sizes = {}
    for remat in (True, False):
        model = ScoredModel.build(family.model_class, config, remat=remat)
        parts = (*family.prompts["image"], *[Words(seed, 48) for seed in range(2)])
        answer = draw_words(Words(9, 40), family.word_ids)
        batch = model.make_batch([(family.draw_sample(config, parts), answer)] * 8)

        def mean(params: Any, model: ScoredModel = model, batch: Any = batch) -> jax.Array:
            return score(params, model, batch).mean()

        compiled = jax.jit(jax.grad(mean)).lower(model.abstract).compile(OPTIONS)
        analysis = compiled.memory_analysis()
        assert analysis is not None
        sizes[remat] = analysis.temp_size_in_bytes
    assert sizes[True] < 0.6 * sizes[False], sizes
