"""Rules from names in checkpoint files to names in a module's tree."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """`re.sub(pattern, replacement, name)` where the pattern matches; None drops the tensor."""

    pattern: str
    replacement: str | None


def apply_rules(name: str, rules: Sequence[Rule]) -> str | None:
    """Return a tensor's name in the tree, by the first rule that matches; None: not loaded.

    A name that no rule matches is unchanged.
    """
    for rule in rules:
        if re.search(rule.pattern, name):
            if rule.replacement is None:
                return None
            return re.sub(rule.pattern, rule.replacement, name)
    return name
