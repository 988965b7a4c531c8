"""Rules: the first that matches decides."""

import pytest

from mmjax.weights.rules import Rule, apply_rules

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
