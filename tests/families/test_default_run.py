"""The default run asks of every family its prompts and items, and its logits or tokens."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import pytest

from tests.families import ALL_FAMILIES, CLIP_FAMILIES, FAMILIES
from tests.families.default_run import HELD_ELSEWHERE


def is_slow(marks: Iterable[Any]) -> bool:
    return any(mark.name == "slow" for mark in marks)


def list_marks(holder: Any) -> list[Any]:
    marks = getattr(holder, "pytestmark", [])
    return marks if isinstance(marks, list) else [marks]


def default_rows(test: str) -> set[str] | None:
    """Return a test's rows in the default run, by the parts of their names; None: it is slow."""
    module_name, name = test.split("::")
    module = import_module(f"tests.{module_name}")
    marks = [*list_marks(module), *list_marks(getattr(module, name))]
    if is_slow(marks):
        return None
    found = {""}
    for mark in marks:
        if mark.name != "parametrize":
            continue
        rows = [one for one in mark.args[1] if not is_slow(getattr(one, "marks", ()))]
        if not rows:
            return None
        found |= {str(getattr(one, "id", None) or getattr(one, "values", [one])[0]) for one in rows}
    return found


def is_held(test: str) -> bool:
    """Return whether the default run has a test, or its row if one is named."""
    name, _, row = test.removesuffix("]").partition("[")
    rows = default_rows(name)
    return rows is not None and row in rows


PROMPTS = "models.test_laws::test_prompts_and_pixels_equal_hf"
CLIP_PROMPTS = "models.test_clip_laws::test_prompts_and_spectrograms_equal_hf"
PROMPTS_ELSEWHERE = {
    "whisper": "processing.test_whisper::"
    "test_a_clip_is_hfs_spectrogram_and_fills_the_encoders_prompt",
}
"""Of families whose prompts hold no item."""
ARRAYS = "models.test_array_laws::test_states_logits_and_tokens_are_hfs"


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_prompts_and_items_are_compared(name: str) -> None:
    assert name not in FAMILIES or is_held(f"{PROMPTS}[{name}-plain-1]")
    test = PROMPTS_ELSEWHERE.get(name, f"{CLIP_PROMPTS}[{name}]")
    assert name not in CLIP_FAMILIES or is_held(test)


def find_arrays(name: str) -> str:
    """Return the test that compares a row's arrays, or those of a row of its architecture."""
    if held := HELD_ELSEWHERE.get(name):
        return find_arrays(held) if held in ALL_FAMILIES else held
    row = ALL_FAMILIES[name]
    if row.tiny is not None:
        return f"{ARRAYS}[{row.tiny.name}-{next(iter(row.tiny.variants))}]"
    alike = [one for one in ALL_FAMILIES.values() if one.architecture == row.architecture]
    return find_arrays(next(one.name for one in alike if one.tiny is not None))


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_logits_or_tokens_are_compared(name: str) -> None:
    test = find_arrays(name)
    assert is_held(test), f"{name} has no default row: {test}"


def test_a_slow_row_holds_nothing() -> None:
    assert is_held(f"{ARRAYS}[llava-llama]")
    assert not is_held(f"{ARRAYS}[cohere2_vision-plain]")
    assert not is_held("models.test_blip2_t5::test_parity_says_yes")
