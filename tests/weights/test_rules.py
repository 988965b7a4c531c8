"""Rules: the first that matches decides."""

import numpy as np
import pytest

from mmjax.weights.rules import Rule, Split, StackPart, apply_rules, map_tensor

RULES = (Rule(r"\.head\.", None), Rule(r"^(model\.)?tower\.", "vision."), Rule(r"^model\.", ""))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.tower.a.weight", "vision.a.weight"),
        ("tower.a.weight", "vision.a.weight"),
        ("model.tower.head.weight", None),
        ("model.norm.weight", "norm.weight"),
        ("norm.weight", "norm.weight"),
    ],
)
def test_apply_rules(name: str, expected: str | None):
    assert apply_rules(name, RULES) == expected


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_stack_of_matrices_is_cut_along_their_rows(is_transposed: bool):
    stack = np.random.default_rng(0).normal(size=(2, 6, 5))
    given = stack.swapaxes(1, 2) if is_transposed else stack
    rule = Split("^both$", ("first", "second"), (4, 2), of_stack=True)
    parts = {}
    for name, part in map_tensor("both", [rule]):
        assert isinstance(part, StackPart)
        assert part.is_fit(given.shape)
        assert not part.is_fit((2, 7, 5))
        parts[name] = part.apply(given)
        assert parts[name].shape == part.find_shape(given.shape)
        index = (slice(1, 2), slice(1, 2), slice(2, 5))
        read = part.read(given.shape, given.__getitem__, index)
        np.testing.assert_array_equal(read, parts[name][index])
    np.testing.assert_array_equal(parts["first"], stack[:, :4])
    np.testing.assert_array_equal(parts["second"], stack[:, 4:])
