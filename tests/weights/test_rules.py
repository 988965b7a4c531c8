"""Rules: the first that matches decides."""

import numpy as np
import pytest

from mmjax.weights.load import find_shape
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
        assert parts[name].shape == find_shape(part, given.shape)
        index = (slice(1, 2), slice(1, 2), slice(2, 5))
        read = part.read(given.shape, given.__getitem__, index)
        np.testing.assert_array_equal(read, parts[name][index])
    np.testing.assert_array_equal(parts["first"], stack[:, :4])
    np.testing.assert_array_equal(parts["second"], stack[:, 4:])


@pytest.mark.parametrize("is_square", [False, True])
def test_parts_of_a_transposed_stack_may_alternate(is_square: bool):
    """As gpt-oss' experts, whose matrices are square, and their biases."""
    width = 6 if is_square else 5
    stack = np.random.default_rng(0).normal(size=(2, width, 6))
    kind = {"of_stack": True, "is_transposed": True, "is_interleaved": True}
    rule = Split("^both$", ("first", "second"), (3, 3), **kind)
    for number, (_, part) in enumerate(map_tensor("both", [rule])):
        assert isinstance(part, StackPart)
        assert part.is_fit(stack.shape)
        assert not part.is_fit((2, 6, 5))
        expected = stack.swapaxes(1, 2)[:, number::2]
        assert find_shape(part, stack.shape) == expected.shape
        np.testing.assert_array_equal(part.apply(stack), expected)
        index = (slice(1, 2), slice(1, 3), slice(2, 4))
        read = part.read(stack.shape, stack.__getitem__, index)
        np.testing.assert_array_equal(read, expected[index])
        biases = stack[:, 0]
        assert find_shape(part, biases.shape) == (2, 3)
        np.testing.assert_array_equal(part.apply(biases), biases[:, number::2])
