"""A position that says which picture a token is of."""

import jax.numpy as jnp
import numpy as np

from mmjax.layers.rope import unmark
from mmjax.rounding import MARKED_LIMIT, mark


def test_marked_positions_give_back_what_was_marked():
    numbers = np.array([0, 1, MARKED_LIMIT - 1, 7])
    groups = np.array([0, 3, 200_000, 0])
    positions = np.concatenate([mark(numbers, groups), [0, 5, 131_071]]).astype(np.int32)
    is_marked, found, of = map(np.asarray, unmark(jnp.asarray(positions)))
    assert is_marked.tolist() == [True] * 4 + [False] * 3
    assert found.tolist() == [*numbers.tolist(), 0, 5, 131_071]
    assert of.tolist() == [*groups.tolist(), 0, 5, 131_071]
