"""The report of evaluate.py, with stand-ins for the model."""

from collections.abc import Sequence

from evaluate import Item, Prompt, ask_items, draw_items, find_misses, report, shuffle_scenes
from questions import ONE_KINDS, PAIR_KINDS

ITEMS = draw_items(240, seed=3)


def evaluate(answers: Sequence[str]) -> list[bool]:
    def answer(prompts: Sequence[Prompt]) -> list[str]:
        assert all(1 <= len(pictures) <= 2 for pictures, _ in prompts)
        return list(answers)

    return ask_items(answer, ITEMS, [item.scenes for item in ITEMS])


def test_items_are_of_all_kinds_and_fresh_by_seed():
    kinds = [item.question.kind for item in ITEMS]
    assert kinds == [*ONE_KINDS, *PAIR_KINDS] * 20
    assert draw_items(240, seed=3) == ITEMS
    assert draw_items(240, seed=4) != ITEMS


def test_a_model_that_knows_meets_the_targets():
    right = evaluate([item.question.answer for item in ITEMS])
    lines = report(ITEMS, right, [False] * len(ITEMS))
    assert [line.name for line in lines] == [
        *ONE_KINDS,
        *PAIR_KINDS,
        "ONE PICTURE",
        "TWO PICTURES",
    ]
    assert all(line.accuracy == 100 and line.shuffled == 0 for line in lines)
    assert find_misses(lines) == []


def test_what_falls_short_is_named():
    answers = [
        "no idea" if item.question.kind == "number" else item.question.answer for item in ITEMS
    ]
    right = evaluate(answers)
    misses = find_misses(report(ITEMS, right, right))
    assert [miss.split(":")[0] for miss in misses] == [
        "number",
        "ONE PICTURE",
        "ONE PICTURE",
        "TWO PICTURES",
    ]
    assert "shuffled" in misses[2]


def test_the_majority_is_the_best_answer_without_pictures():
    lines = {line.name: line for line in report(ITEMS, [True] * 240, [True] * 240)}
    assert 50 <= lines["exist"].majority <= 75
    assert lines["describe"].majority <= 20
    assert lines["one_of_two"].majority < 60


def test_shuffling_deals_out_the_same_scenes():
    dealt = shuffle_scenes(ITEMS, 0)
    assert [len(scenes) for scenes in dealt] == [len(item.scenes) for item in ITEMS]
    kept = sum(scenes == item.scenes for scenes, item in zip(dealt, ITEMS, strict=True))
    assert kept < 20
    assert sorted(map(repr, dealt)) == sorted(repr(item.scenes) for item in ITEMS)


def test_pairs_have_two_scenes():
    assert all(isinstance(item, Item) for item in ITEMS)
    assert all(item.is_pair == (item.question.kind in PAIR_KINDS) for item in ITEMS)
