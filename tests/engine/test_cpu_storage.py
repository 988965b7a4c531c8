"""On the CPU no program converts a whole array of bfloat16 that it writes a part of."""

import re
from typing import Any

import jax.numpy as jnp
import pytest

from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from tests.engine.test_lowering import make_programs

NUM_BLOCKS, NUM_ROWS = 509, 503
"""Sizes that no other array has."""


@pytest.fixture(scope="module")
def programs() -> Any:
    return make_programs(
        Gemma3ForConditionalGeneration,
        "cpu",
        jnp.dtype(jnp.bfloat16),
        num_encoder_rows=NUM_ROWS,
    )


def find_dtypes(program: Any, rows: int) -> set[str]:
    """Return the dtypes of a compiled program's arrays that have `rows` rows."""
    text = program.jitted.lower(**program.arguments).compile().as_text()
    return set(re.findall(rf"\b([a-z]+\d+)\[{rows},", text))


@pytest.mark.parametrize("place", [0, -1], ids=["largest", "decoding alone"])
def test_steps_write_the_kv_cache_in_place(programs: Any, place: int):
    program = programs.by_kind(NUM_BLOCKS)["step"][place]
    assert find_dtypes(program, NUM_BLOCKS) == {"u16"}


def test_encoding_writes_the_pool_in_place(programs: Any):
    program = programs.by_kind(NUM_BLOCKS)["encode"][-1]
    assert find_dtypes(program, NUM_ROWS) == {"u16"}
