"""Updates, their targets and contents, and matching tokens."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.processing import (
    PlaceholderFeaturesInfo,
    PlaceholderRange,
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
    UpdateMode,
    apply_text_matches,
    apply_token_matches,
    iter_token_matches,
    replace_token_matches,
)
from mmjax.processing.prompt_updates.updates import MultiModalPromptUpdates, UpdateTarget
from tests.kit import ByteTokenizer

tokenizer = ByteTokenizer()
tokens = st.lists(st.integers(0, 2), max_size=12)


def seconds(call: Callable[[], object]) -> float:
    """Processor time, the best of several runs: the machine may be busy."""
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return best


@pytest.mark.parametrize(
    ("prompt", "pattern", "expected"),
    [
        ([], [], []),
        ([1, 2], [], []),
        ([], [1], []),
        ([1, 1, 1, 1, 1], [1, 1], [(0, 2), (2, 4)]),
        ([1, 2, 3, 2, 3], [2, 3], [(1, 3), (3, 5)]),
        ([0, 55296, 1114111], [55296], [(1, 2)]),
    ],
)
def test_matches_do_not_overlap(prompt: list[int], pattern: list[int], expected: list[object]):
    assert list(iter_token_matches(prompt, pattern)) == expected


def test_matching_starts_where_it_is_told():
    assert list(iter_token_matches([1, 2, 1], [1], start_idx=1)) == [(2, 3)]
    with pytest.raises(ValueError, match="non-negative"):
        list(iter_token_matches([1], [1], start_idx=-1))


@given(tokens, tokens, tokens)
def test_replacing_is_splicing_at_the_matches(prompt: list[int], old: list[int], new: list[int]):
    expected, place = [], 0
    while place < len(prompt):
        if old and prompt[place : place + len(old)] == old:
            expected += new
            place += len(old)
        else:
            expected.append(prompt[place])
            place += 1
    assert replace_token_matches(prompt, old, new) == expected


def test_matching_is_linear_even_in_its_worst_case():
    def search(size: int) -> float:
        prompt, pattern = [7] * size, [7] * (size // 2) + [8]
        return seconds(lambda: list(iter_token_matches(prompt, pattern)))

    assert search(80_000) < 10 * search(20_000) + 1e-3


def resolve_for(places: Sequence[object], update: PromptUpdate) -> MultiModalPromptUpdates:
    """An item for each place where the update's target is; one where it is nowhere."""
    return {"image": [[update.resolve(index)] for index in range(max(1, len(places)))]}


def splice(prompt: Any, places: Sequence[Any], new: Any) -> Any:
    """Return the prompt with `new` at each (start, end)."""
    for start, end in reversed(places):
        prompt = prompt[:start] + new + prompt[end:]
    return prompt


@pytest.mark.parametrize(
    ("target", "prompt", "expected"),
    [
        ([1], [0, 1, 1], [(1, 2), (2, 3)]),
        ("b", [97, 98], [(1, 2)]),
        ("", [97], []),
        (PromptIndexTargets.start(), [], [(0, 0)]),
        (PromptIndexTargets.start(), [5], [(0, 0)]),
        (PromptIndexTargets.end(), [5, 6], [(2, 2)]),
        (PromptIndexTargets.prefix([5]), [5, 6], [(1, 1)]),
        (PromptIndexTargets.prefix([6]), [5, 6], []),
        (PromptIndexTargets.prefix("ab"), [97, 98, 99], [(2, 2)]),
    ],
)
def test_targets_in_tokens(target: UpdateTarget, prompt: list[int], expected: list[object]):
    updates = resolve_for(expected, PromptReplacement("image", target, [9]))
    written, applied = apply_token_matches(prompt, updates, tokenizer)
    assert written == splice(prompt, expected, [9])
    assert applied["image"] == ([0] * len(expected) or [None])


@pytest.mark.parametrize(
    ("target", "prompt", "expected"),
    [
        ("b.", "ab.b.bx", [(1, 3), (3, 5)]),
        ([98], "abb", [(1, 2), (2, 3)]),
        ("", "ab", [(0, 0)]),
        (PromptIndexTargets.start(), "ab", [(0, 0)]),
        (PromptIndexTargets.end(), "ab", [(2, 2)]),
        (PromptIndexTargets.prefix("a"), "ab", [(1, 1)]),
        (PromptIndexTargets.prefix([97]), "ab", [(1, 1)]),
    ],
)
def test_targets_in_text(target: UpdateTarget, prompt: str, expected: list[object]):
    updates = resolve_for(expected, PromptReplacement("image", target, "x"))
    written, applied = apply_text_matches(prompt, updates, tokenizer)
    assert written == splice(prompt, expected, "x")
    assert applied["image"] == ([0] * len(expected) or [None])


def test_a_place_is_only_at_its_place():
    for target in (PromptIndexTargets.start(), PromptIndexTargets.prefix([1])):
        assert target.get_match_index(tokenizer, [1, 2], 1) is None


def test_text_without_a_tokenizer_is_refused():
    in_text, in_tokens = PromptInsertion("image", "a", "b"), PromptInsertion("image", [97], "b")
    with pytest.raises(ValueError, match="pass `tokenizer`"):
        apply_token_matches([97], {"image": [[in_text.resolve(0)]]})
    with pytest.raises(ValueError, match="pass `tokenizer`"):
        apply_text_matches("a", {"image": [[in_tokens.resolve(0)]]})


def test_targets_and_contents_may_depend_on_the_item():
    update = PromptReplacement("image", lambda i: f"<{i}>", lambda i: [5] * i)
    resolved = update.resolve(2)
    assert (resolved.modality, resolved.item_idx) == ("image", 2)
    assert (resolved.mode, resolved.target) == (UpdateMode.REPLACE, "<2>")
    assert resolved.content == PromptUpdateDetails([5, 5])
    assert resolved.with_content("ab").content == PromptUpdateDetails.from_seq("ab")
    insertion = PromptInsertion("audio", [1], "x").resolve(0)
    assert (insertion.mode, insertion.mode.value) == (UpdateMode.INSERT, "insert")


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        (PromptUpdateDetails.select_token_id([1, 2, 1], 1), [True, False, True]),
        (PromptUpdateDetails.select_token_ids([1, 2, 3], [2, 3]), [False, True, True]),
        (PromptUpdateDetails.select_token_id("aba", 98), [False, True, False]),
        (PromptUpdateDetails.select_text("abca", "a"), [True, False, False, True]),
    ],
)
def test_details_choose_the_embedded_positions(details: PromptUpdateDetails, expected: list[bool]):
    assert details.is_embed is not None
    np.testing.assert_array_equal(details.is_embed(tokenizer, details.full), expected)
    assert PromptUpdateDetails.from_seq([1]).is_embed is None


def test_a_placeholder_becomes_a_range():
    mask = np.array([True, False])
    found = PlaceholderFeaturesInfo("image", 0, 4, [1, 2], mask)
    assert found.to_range() == PlaceholderRange(4, 2, mask)
