"""Applying updates and finding placeholders, against a slow reading of the rules."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.processing import (
    PromptIndex,
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    UpdateMode,
    apply_text_matches,
    apply_token_matches,
    find_mm_placeholders,
)
from mmjax.processing.prompt_updates.updates import Match
from tests.kit import ByteTokenizer
from tests.processing.test_prompt_updates import seconds

tokenizer = ByteTokenizer()
Updates = dict[str, list[list[ResolvedPromptUpdate]]]


def bind(counts: dict[str, int], *updates: PromptUpdate) -> Updates:
    """Each update is an alternative for every item of its modality."""
    return {
        modality: [
            [update.resolve(i) for update in updates if update.modality == modality]
            for i in range(count)
        ]
        for modality, count in counts.items()
    }


def first_match(
    prompt: list[int],
    updates: Sequence[ResolvedPromptUpdate],
    cursor: int,
    mode: UpdateMode | None = None,
) -> Any:
    for index, update in enumerate(updates):
        if mode in (None, update.mode):
            match = find_target(prompt, update.target, cursor)
            if match is not None:
                return index, match
    return None


def find_target(prompt: list[int], target: Any, cursor: int) -> Match | None:
    if isinstance(target, PromptIndex):
        place = target.get_match_index(tokenizer, prompt, cursor)
        return None if place is None else Match(place, place)
    wanted = tokenizer.encode(target) if isinstance(target, str) else target
    for start in range(cursor, len(prompt) + 1 - len(wanted)):
        if wanted and prompt[start : start + len(wanted)] == wanted:
            return Match(start, start + len(wanted))
    return None


def apply_slowly(
    prompt: list[int], mm_updates: Updates
) -> tuple[list[int], dict[str, list[int | None]]]:
    """The rules, one for one: rounds of one mode, left to right."""
    result: dict[str, list[int | None]] = {
        m: [None] * len(items) for m, items in mm_updates.items()
    }
    todo = [(m, i, updates) for m, items in mm_updates.items() for i, updates in enumerate(items)]
    out: list[int] = []
    cursor = copied = 0
    while True:
        matching = [first_match(prompt, updates, cursor) for _, _, updates in todo]
        found = next((k for k, one in enumerate(matching) if one), None)
        if found is None:
            return out + prompt[copied:], result
        mode = todo[found][2][matching[found][0]].mode
        applied = []
        for priority, (_, _, updates) in enumerate(todo):
            one = first_match(prompt, updates, cursor, mode)
            if one is not None:
                applied.append((one[1], priority, one[0]))
        if mode is UpdateMode.REPLACE:
            empty = [one for one in applied if one[0].start_idx == one[0].end_idx]
            applied = empty + sorted(one for one in applied if one not in empty)[:1]
        for match, priority, alternative in sorted(applied):
            modality, index, updates = todo[priority]
            result[modality][index] = alternative
            stop = match.end_idx if mode is UpdateMode.INSERT else match.start_idx
            out += prompt[copied : max(copied, stop)]
            out += updates[alternative].content.full
            copied = max(copied, match.end_idx)
            cursor = match.end_idx
        done = {priority for _, priority, _ in applied}
        todo = [one for k, one in enumerate(todo) if k not in done]


def find_slowly(prompt: list[int], mm_updates: Updates) -> list[tuple[str, int, int]]:
    """At each position, the next item of each modality, in order."""
    found, place = [], 0
    following = dict.fromkeys(mm_updates, 0)
    while place < len(prompt):
        hit = next(
            (
                (modality, update.content.full)
                for modality, items in mm_updates.items()
                if following[modality] < len(items)
                for update in items[following[modality]]
                if update.content.full
                and prompt[place : place + len(update.content.full)] == update.content.full
            ),
            None,
        )
        if hit is None:
            place += 1
            continue
        modality, content = hit
        found.append((modality, following[modality], place))
        following[modality] += 1
        place += len(content)
    return found


targets = st.lists(st.integers(0, 2), min_size=1, max_size=2)
contents = st.lists(st.integers(0, 4), max_size=3)
kinds = st.sampled_from([PromptInsertion, PromptReplacement])
updates_of = st.tuples(kinds, st.sampled_from(["image", "audio"]), targets, contents)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=14),
    st.lists(updates_of, min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_applying_and_finding_follow_the_rules(
    prompt: list[int], updates: list[Any], num_images: int, num_audios: int
):
    made = [kind(modality, target, content) for kind, modality, target, content in updates]
    mm_updates = bind({"image": num_images, "audio": num_audios}, *made)
    expected, expected_result = apply_slowly(prompt, mm_updates)
    new_prompt, result = apply_token_matches(prompt, mm_updates, tokenizer)
    assert result == expected_result
    assert new_prompt == expected
    found = find_mm_placeholders(new_prompt, mm_updates)
    places = [(m, one.item_idx, one.start_idx) for m, many in found.items() for one in many]
    assert sorted(places) == sorted(find_slowly(new_prompt, mm_updates))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(1, 4), max_size=6))
def test_what_is_applied_is_found_again(prompt: list[int], sizes: list[int]):
    """Round trip: items go where their placeholders were, in order."""
    prompt = [token for token in prompt if token != 3]
    for _ in sizes:
        prompt += [3, 1]
    mm_updates = bind(
        {"image": len(sizes)}, PromptReplacement("image", [3], lambda i: [9] * sizes[i])
    )
    new_prompt, result = apply_token_matches(prompt, mm_updates)
    assert result == {"image": [0] * len(sizes)}
    found = find_mm_placeholders(new_prompt, mm_updates).get("image", [])
    assert [one.length for one in found] == sizes
    assert [new_prompt[one.start_idx + one.length] for one in found] == [1] * len(sizes)


def test_items_take_the_next_target_and_output_is_not_searched_again():
    updates = bind({"image": 2}, PromptReplacement("image", [1], lambda i: [1] * (i + 2)))
    new_prompt, result = apply_token_matches([0, 1, 5, 1], updates)
    assert new_prompt == [0, 1, 1, 5, 1, 1, 1]
    assert result == {"image": [0, 0]}


def test_insertions_at_one_target_stand_back_to_back():
    updates = bind(
        {"image": 2, "audio": 1},
        PromptInsertion("image", [1], lambda i: [10 + i]),
        PromptInsertion("audio", PromptIndexTargets.start(), [20]),
    )
    new_prompt, _ = apply_token_matches([1, 2, 1], updates)
    assert new_prompt == [20, 1, 10, 11, 2, 1]


def test_the_first_matching_alternative_wins():
    updates = bind(
        {"image": 2}, PromptReplacement("image", [8], [80]), PromptReplacement("image", [9], [90])
    )
    assert apply_token_matches([9, 8], updates) == ([9, 80], {"image": [0, None]})
    assert apply_token_matches([8, 9], updates) == ([80, 90], {"image": [0, 1]})
    assert apply_token_matches([9], updates) == ([90], {"image": [1, None]})


def test_a_place_never_moves_the_cursor_back():
    """`start` stands before what was replaced already, so it does not match any more."""
    updates = {
        "image": [[PromptReplacement("image", [5], [50]).resolve(0)]],
        "audio": [[PromptInsertion("audio", PromptIndexTargets.start(), [60]).resolve(0)]],
    }
    new_prompt, result = apply_token_matches([5, 5], updates)
    assert new_prompt == [50, 5]
    assert result == {"image": [0], "audio": [None]}


def test_text_is_updated_as_tokens_are():
    updates = bind({"image": 2}, PromptReplacement("image", "<i>", lambda i: "ab" * (i + 1)))
    text, result = apply_text_matches("x<i>y<i>", updates, tokenizer)
    assert (text, result) == ("xabyabab", {"image": [0, 0]})
    as_tokens, _ = apply_token_matches(tokenizer.encode("x<i>y<i>"), updates, tokenizer)
    assert as_tokens == tokenizer.encode(text)
    updates = bind({"image": 1}, PromptReplacement("image", "", [97]))
    assert apply_text_matches("b", updates, tokenizer)[0] == "ab"


def test_modalities_with_one_target_take_turns_by_order():
    updates = bind(
        {"audio": 1, "image": 1},
        PromptReplacement("image", [1], [10]),
        PromptReplacement("audio", [1], [20]),
    )
    assert apply_token_matches([1, 1], updates)[0] == [20, 10]


def test_found_placeholders_say_what_is_embedded():
    details = PromptUpdateDetails.select_token_id([7, 9, 9], 9)
    updates = bind({"image": 1, "audio": 1}, PromptReplacement("image", [1], details))
    (found,) = find_mm_placeholders([0, 7, 9, 9], updates)["image"]
    assert (found.start_idx, found.tokens) == (1, [7, 9, 9])
    np.testing.assert_array_equal(found.is_embed, [False, True, True])


@pytest.mark.parametrize("num_targets", [1, 50])
def test_applying_is_linear_in_prompt_and_items(num_targets: int):
    def run(num_items: int) -> float:
        prompt = []
        for i in range(num_items):
            prompt += [5] * 30 + [100 + i % num_targets]
        updates = bind(
            {"image": num_items},
            PromptReplacement("image", lambda i: [100 + i % num_targets], [9, 9]),
        )

        def apply() -> None:
            new_prompt, result = apply_token_matches(prompt, updates)
            assert None not in result["image"]
            assert len(find_mm_placeholders(new_prompt, updates)["image"]) == num_items

        return seconds(apply)

    assert run(1200) < 10 * run(300) + 1e-3


def test_nothing_to_find_is_found_quickly():
    """A prompt that always nearly matches, and many items that stay unapplied."""

    def run(size: int) -> float:
        updates = bind(
            {"image": size // 10}, PromptReplacement("image", [7] * 300 + [8], [7] * 300 + [9])
        )
        prompt = [7] * size

        def apply() -> None:
            assert apply_token_matches(prompt, updates)[0] == prompt
            assert find_mm_placeholders(prompt, updates) == {}

        return seconds(apply)

    assert run(40_000) < 10 * run(10_000) + 1e-3
