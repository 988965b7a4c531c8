"""Let the tests import tiny_scenes' scripts as they import each other: by bare name."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

TINY_SCENES = Path(__file__).parents[2] / "checkpoints" / "tiny_scenes"
FEW_PROGRAMS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
"""Settings of `LLM` under which few sizes of steps are compiled."""
sys.path.insert(0, str(TINY_SCENES))


@pytest.fixture
def lenient_promotion() -> Iterator[None]:
    """What optax needs: its Adam raises a float to the power of an integer count."""
    with jax.numpy_dtype_promotion("standard"):
        yield
