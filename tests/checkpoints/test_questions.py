"""Questions have one right answer, and it is recomputed here from the words and the scene."""

import random
import re
from collections import Counter

import pytest
from questions import (
    ONE_KINDS,
    ONE_WORDINGS,
    PAIR_KINDS,
    PAIR_WORDINGS,
    Question,
    ask,
    ask_pair,
    is_right,
)
from scenes import COLORS, EVALUATION, SHAPES, Scene, Thing, sample_number, sample_scene

QUOTED_WORDINGS = (
    "What color is the {x}?",
    "What colour is the {x}?",
    "Which shape is {x}?",
    "How many objects are there?",
    "How many {x} are there?",
    "What number is written in the picture?",
    "Is there {a} {x}?",
    "What is left of the {x}?",
    "Describe the picture.",
    "Which picture has more {x}?",
    "Do both pictures show the same number?",
)


def draw_scenes(rng: random.Random) -> tuple[Scene, Scene]:
    numbers = [sample_number(rng) if rng.random() < 0.6 else None, None]
    numbers[1] = numbers[0] if rng.random() < 0.5 else sample_number(rng)
    one, other = (sample_scene(rng, EVALUATION, number) for number in numbers)
    return one, other


def named(text: str, scene: Scene) -> list[Thing]:
    """The things that the shape and colour words of `text` fit."""
    words = re.findall(r"[a-z]+", text.lower())
    shapes = {word for word in words if word in SHAPES} | {
        word[:-1] for word in words if word[:-1] in SHAPES and word.endswith("s")
    }
    colors = {word for word in words if word in COLORS}
    return [
        thing
        for thing in scene.things
        if (not shapes or thing.shape in shapes) and (not colors or thing.color in colors)
    ]


def the_one(text: str, scene: Scene) -> Thing:
    found = named(text, scene)
    assert len(found) == 1, f"{text!r} fits {len(found)} things"
    return found[0]


def right_answer(form: str, text: str, scene: Scene) -> str:
    """Answer a question about one scene from its words."""
    if form == "color":
        return the_one(text, scene).color
    if form == "shape":
        return the_one(text, scene).shape
    if form in ("count", "count_shape", "count_color"):
        return str(len(named(text, scene)))
    if form == "exist":
        return "yes" if named(text, scene) else "no"
    if form == "number":
        return scene.number.text if scene.number else "none"
    if form == "left":
        x = the_one(text, scene).x
        lefts = [thing for thing in scene.things if thing.x < x]
        assert len(lefts) <= 1
        assert len(scene.things) <= 3
        return describe(lefts[0]) if lefts else "nothing"
    assert form == "describe"
    return ", ".join(describe(thing) for thing in sorted(scene.things, key=lambda t: t.x))


def describe(thing: Thing) -> str:
    return f"{'an' if thing.color == 'orange' else 'a'} {thing.color} {thing.shape}"


def asked(kind: str, count: int) -> list[tuple[Question, Scene, Scene]]:
    rng = random.Random(kind)
    found = []
    while len(found) < count:
        one, other = draw_scenes(rng)
        question = ask_pair(kind, one, other, rng) if kind in PAIR_KINDS else ask(kind, one, rng)
        if question is not None:
            found.append((question, one, other))
    return found


@pytest.mark.parametrize("kind", ONE_KINDS)
def test_answers_about_one_picture(kind: str):
    for question, scene, _ in asked(kind, 300):
        assert question.kind == question.form == kind
        assert question.answer == right_answer(kind, question.text, scene), question.text


def test_which_picture_has_more():
    for question, one, other in asked("more", 300):
        counts = len(named(question.text, one)), len(named(question.text, other))
        expected = "same" if counts[0] == counts[1] else "first" if counts[0] > counts[1] else None
        assert question.answer == (expected or "second"), question.text
        assert max(counts) > 0


def test_same_number():
    for question, one, other in asked("same_number", 100):
        assert one.number is not None
        assert other.number is not None
        assert question.answer == ("yes" if one.number.text == other.number.text else "no")


def test_one_of_two():
    for question, one, other in asked("one_of_two", 300):
        words = re.findall(r"[a-z]+", question.text.lower())
        scene = one if "first" in words else other
        assert ("first" in words) != ("second" in words)
        form = question.form.removeprefix("one_of_two ")
        assert question.answer == right_answer(form, question.text, scene), question.text


def test_answers_are_balanced():
    counts = Counter(question.answer for question, _, _ in asked("exist", 600))
    assert 0.4 < counts["yes"] / 600 < 0.6
    counts = Counter(question.answer for question, _, _ in asked("more", 600))
    assert all(0.22 < counts[answer] / 600 < 0.45 for answer in ("first", "second", "same"))


def test_every_kind_has_several_wordings_and_the_quoted_ones():
    wordings = {**ONE_WORDINGS, **PAIR_WORDINGS}
    every = {wording for several in wordings.values() for wording in several}
    assert set(QUOTED_WORDINGS) <= every
    assert all(len(set(wordings[kind])) >= 2 for kind in wordings)


def test_a_seed_gives_the_same_questions():
    first, second = ([question for question, _, _ in asked("exist", 30)] for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("kind", "given", "right"),
    [
        ("describe", "a blue star, a red circle", True),
        ("describe", "a red circle, a blue star", True),
        ("describe", "a red circle", False),
        ("describe", "a red circle, a blue star, a blue star", False),
        ("left", "a blue star, a red circle", False),
        ("left", "a red circle, a blue star", True),
    ],
)
def test_only_descriptions_come_in_any_order(kind: str, given: str, right: bool):
    assert is_right(kind, "a red circle, a blue star", given) == right
