"""Ask about scenes: kinds of question, their wordings, and the right answers.

An answer is computed from the scene, never from the picture. A question that has no single right
answer is not asked: the functions then return None.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scenes import COLORS, SHAPES, Scene, Thing

ONE_WORDINGS: dict[str, tuple[str, ...]] = {
    "color": (
        "What color is the {x}?",
        "What color is the {x}?",
        "What colour is the {x}?",
        "Which color is the {x}?",
        "What is the color of the {x}?",
        "What's the color of the {x}?",
        "Which color does the {x} have?",
        "What color does the {x} have?",
        "What color is the {x} in the picture?",
        "Name the color of the {x}.",
        "Tell me the color of the {x}.",
        "The {x} is what color?",
    ),
    "shape": (
        "Which shape is {x}?",
        "Which shape is {x}?",
        "What shape is {x}?",
        "Which object is {x}?",
        "What shape is the {x} object?",
        "What shape is the {x} one?",
        "What is the shape of the {x} object?",
        "What is the {x} object?",
        "What is the {x} shape?",
        "Name the {x} shape.",
        "Which shape in the picture is {x}?",
        "What is {x}?",
    ),
    "count": (
        "How many objects are there?",
        "How many objects are there?",
        "How many shapes are there?",
        "How many things are there?",
        "How many objects are in the picture?",
        "How many shapes are in the picture?",
        "How many objects do you see?",
        "How many shapes can you see?",
        "How many objects does the picture show?",
        "Count the objects.",
        "Count the shapes in the picture.",
        "How many objects are there in total?",
    ),
    "count_x": (
        "How many {x} are there?",
        "How many {x} are there?",
        "How many {x} are in the picture?",
        "How many {x} are there in the picture?",
        "How many {x} do you see?",
        "How many {x} can you see?",
        "How many {x} does the picture show?",
        "Count the {x}.",
        "Count the {x} in the picture.",
        "What is the number of {x}?",
    ),
    "exist": (
        "Is there {a} {x}?",
        "Is there {a} {x}?",
        "Is there {a} {x} in the picture?",
        "Do you see {a} {x}?",
        "Can you see {a} {x}?",
        "Does the picture show {a} {x}?",
        "Does the picture contain {a} {x}?",
        "Are there any {x}s?",
        "Are there any {x}s in the picture?",
        "Is {a} {x} in the picture?",
    ),
    "number": (
        "What number is written in the picture?",
        "What number is written in the picture?",
        "Which number is written in the picture?",
        "What number is in the picture?",
        "What number is shown?",
        "What number is shown in the picture?",
        "What number do you see?",
        "What number can you see?",
        "What number is written?",
        "What is the number?",
        "What is the number in the picture?",
        "Which number is it?",
        "Read the number.",
        "Read the number in the picture.",
        "What number does the picture show?",
    ),
    "left": (
        "What is left of the {x}?",
        "What is left of the {x}?",
        "What is to the left of the {x}?",
        "What is on the left of the {x}?",
        "What's to the left of the {x}?",
        "Which object is left of the {x}?",
        "Which object is to the left of the {x}?",
        "What object is to the left of the {x}?",
        "What do you see left of the {x}?",
        "What can you see to the left of the {x}?",
    ),
    "describe": (
        "Describe the picture.",
        "Describe the picture.",
        "Describe the image.",
        "Describe what you see.",
        "Describe the scene.",
        "Describe this picture.",
        "What is in the picture?",
        "What is in this image?",
        "What do you see?",
        "What do you see in the picture?",
        "What can you see?",
        "What does the picture show?",
        "What objects are in the picture?",
        "What objects are there?",
        "Which objects do you see?",
        "List the objects.",
        "List the shapes in the picture.",
    ),
}

PAIR_WORDINGS: dict[str, tuple[str, ...]] = {
    "more": (
        "Which picture has more {x}?",
        "Which picture has more {x}?",
        "Which picture shows more {x}?",
        "Which picture contains more {x}?",
        "Which of the pictures has more {x}?",
        "Which of the two pictures shows more {x}?",
        "In which picture are there more {x}?",
        "In which picture do you see more {x}?",
        "Are there more {x} in the first or the second picture?",
    ),
    "same_number": (
        "Do both pictures show the same number?",
        "Do both pictures show the same number?",
        "Do the two pictures show the same number?",
        "Do the pictures show the same number?",
        "Do both pictures have the same number?",
        "Is the number the same in both pictures?",
        "Is the same number written in both pictures?",
        "Is it the same number in both pictures?",
        "Are the numbers in the pictures the same?",
        "Are the two numbers the same?",
    ),
    "one_of_two": ("In the {n} picture, {q}?", "{q} in the {n} picture?"),
}

ONE_OF_TWO: dict[str, tuple[str, ...]] = {
    "color": ("what color is the {x}", "what colour is the {x}"),
    "shape": ("which shape is {x}", "what shape is the {x} object"),
    "count": ("how many objects are there", "how many shapes are there"),
    "number": ("what number is written", "what number is shown", "which number is there"),
}

POLITE = (
    "Please answer: {q}",
    "Please tell me: {q}",
    "Look at the picture. {q}",
    "Hello! {q}",
    "Hi, {q}",
    "{q} Answer with one word.",
    "{q} Answer briefly.",
    "{q} Please answer briefly.",
    "Question: {q}",
    "Can you tell me, {q}",
    "{q} Thanks!",
)

SYNONYMS = (("picture", "image", 0.2), ("picture", "photo", 0.04), ("color", "colour", 0.25))

ORDINALS = ("first", "second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question with its one right answer (for `describe`, one of its orders)."""

    kind: str
    text: str
    answer: str
    form: str
    """What is asked for: the kind, but for `one_of_two`, which asks for several things."""


def is_right(kind: str, expected: str, given: str) -> bool:
    """Compare whole answers; things of a description may come in any order."""
    if kind == "describe":
        return Counter(expected.split(", ")) == Counter(given.strip().split(", "))
    return expected == given.strip()


def ask(kind: str, scene: Scene, rng: random.Random) -> Question | None:
    """A question of `kind` about one scene, or None if the scene gives no clear one."""
    found = _ASKERS[kind](scene, rng)
    if found is None:
        return None
    slots, answer = found
    wording = rng.choice(ONE_WORDINGS["count_x" if kind.startswith("count_") else kind])
    text = vary(wording.format(**slots), rng)
    return Question(kind=kind, text=text, answer=answer, form=kind)


def ask_pair(kind: str, first: Scene, second: Scene, rng: random.Random) -> Question | None:
    """A question of `kind` about two scenes, or None."""
    found = _PAIR_ASKERS[kind](first, second, rng)
    if found is None:
        return None
    slots, answer = found
    wording = rng.choice(PAIR_WORDINGS[kind])
    text = wording.format(**slots)
    text = vary(text[0].upper() + text[1:], rng)
    return Question(kind=kind, text=text, answer=answer, form=slots.get("form", kind))


def vary(text: str, rng: random.Random) -> str:
    """Now and then a synonym, a missing question mark or a polite frame."""
    for word, other, share in SYNONYMS:
        if word in text and rng.random() < share:
            text = text.replace(word, other)
    roll = rng.random()
    if roll < 0.06:
        return text[:-1]
    if roll < 0.12:
        return rng.choice(POLITE).format(q=text)
    return text


def with_article(name: str) -> str:
    """`a red circle`, `an orange star`."""
    return f"{article(name)} {name}"


def article(name: str) -> str:
    return "an" if name[0] in "aeiou" else "a"


def refer(thing: Thing, things: Sequence[Thing], rng: random.Random) -> str | None:
    """A name that fits `thing` alone, or None."""
    names = []
    if sum(other.shape == thing.shape for other in things) == 1:
        names += [thing.shape, thing.shape]
    if sum(other.name == thing.name for other in things) == 1:
        names.append(thing.name)
    return rng.choice(names) if names else None


Asked = tuple[dict[str, str], str] | None


def _ask_color(scene: Scene, rng: random.Random) -> Asked:
    counts = Counter(thing.shape for thing in scene.things)
    unique = [thing for thing in scene.things if counts[thing.shape] == 1]
    if not unique:
        return None
    thing = rng.choice(unique)
    is_only = len(scene.things) == 1 and rng.random() < 0.3
    return {"x": rng.choice(("object", "shape")) if is_only else thing.shape}, thing.color


def _ask_shape(scene: Scene, rng: random.Random) -> Asked:
    counts = Counter(thing.color for thing in scene.things)
    unique = [thing for thing in scene.things if counts[thing.color] == 1]
    if not unique:
        return None
    thing = rng.choice(unique)
    return {"x": thing.color}, thing.shape


def _ask_count(scene: Scene, rng: random.Random) -> Asked:
    return {}, str(len(scene.things))


def _ask_count_shape(scene: Scene, rng: random.Random) -> Asked:
    shape = _pick(SHAPES, [thing.shape for thing in scene.things], rng)
    return {"x": shape + "s"}, str(sum(thing.shape == shape for thing in scene.things))


def _ask_count_color(scene: Scene, rng: random.Random) -> Asked:
    color = _pick(tuple(COLORS), [thing.color for thing in scene.things], rng)
    noun = rng.choice(("objects", "objects", "shapes", "things"))
    return {"x": f"{color} {noun}"}, str(sum(thing.color == color for thing in scene.things))


def _pick(values: Sequence[str], present: Sequence[str], rng: random.Random) -> str:
    """Mostly a value that is there, and rather one that is there often."""
    roll = rng.random()
    counts = Counter(present)
    if roll < 0.35:
        return max(sorted(counts), key=counts.__getitem__)
    return rng.choice(present) if roll < 0.75 else rng.choice(values)


def _ask_exist(scene: Scene, rng: random.Random) -> Asked:
    wanted = rng.random() < 0.5
    shapes = {thing.shape for thing in scene.things}
    colors = {thing.color for thing in scene.things}
    names = {thing.name for thing in scene.things}
    roll = rng.random()
    if roll < 0.35:
        options = [shape for shape in SHAPES if (shape in shapes) == wanted]
    elif roll < 0.55:
        nouns = ("object", "shape")
        options = [f"{c} {rng.choice(nouns)}" for c in COLORS if (c in colors) == wanted]
    else:
        every = [f"{color} {shape}" for color in COLORS for shape in SHAPES]
        options = [name for name in every if (name in names) == wanted]
        near = [name for name in options if _shares_a_word(name, colors, shapes)]
        if near and not wanted and rng.random() < 0.8:
            options = near
    if not options:
        return None
    name = rng.choice(options)
    return {"x": name, "a": article(name)}, "yes" if wanted else "no"


def _shares_a_word(name: str, colors: set[str], shapes: set[str]) -> bool:
    color, shape = name.split()
    return color in colors or shape in shapes


def _ask_number(scene: Scene, rng: random.Random) -> Asked:
    return {}, "none" if scene.number is None else scene.number.text


def _ask_left(scene: Scene, rng: random.Random) -> Asked:
    """Asked with up to three things, of the second from the left; sometimes of the first."""
    things = list(scene.left_to_right)
    if len(things) > 3:
        return None
    place = 0 if len(things) == 1 or rng.random() < 0.2 else 1
    if place == 0 and len(things) == 1 and rng.random() < 0.8:
        return None
    name = refer(things[place], things, rng)
    if name is None:
        return None
    return {"x": name}, with_article(things[0].name) if place else "nothing"


def _ask_describe(scene: Scene, rng: random.Random) -> Asked:
    return {}, ", ".join(with_article(thing.name) for thing in scene.left_to_right)


def _ask_more(first: Scene, second: Scene, rng: random.Random) -> Asked:
    """The three answers are equally likely where the scenes allow."""
    options: dict[str, list[str]] = {"first": [], "second": [], "same": []}
    names = ["objects", "shapes", *(shape + "s" for shape in SHAPES + SHAPES)]
    names += [f"{color} objects" for color in COLORS]
    for name in names:
        one, two = count_named(first, name), count_named(second, name)
        if one == two == 0:
            continue
        options["same" if one == two else "first" if one > two else "second"].append(name)
    answer = rng.choice([answer for answer, found in options.items() if found])
    return {"x": rng.choice(options[answer])}, answer


def count_named(scene: Scene, plural: str) -> int:
    """How many things `circles`, `red objects` or `objects` are."""
    if plural in ("objects", "shapes"):
        return len(scene.things)
    word = plural.split()[0]
    return sum(thing.color == word or thing.shape + "s" == word for thing in scene.things)


def _ask_same_number(first: Scene, second: Scene, rng: random.Random) -> Asked:
    if first.number is None or second.number is None:
        return None
    return {}, "yes" if first.number.text == second.number.text else "no"


def _ask_one_of_two(first: Scene, second: Scene, rng: random.Random) -> Asked:
    place = rng.randrange(2)
    scene = (first, second)[place]
    kinds = ["color", "shape", "count"] + (["number"] if scene.number is not None else [])
    kind = rng.choice(kinds)
    found = _ASKERS[kind](scene, rng)
    if found is None:
        return None
    slots, answer = found
    text = rng.choice(ONE_OF_TWO[kind]).format(**slots)
    return {"n": ORDINALS[place], "q": text, "form": f"one_of_two {kind}"}, answer


_ASKERS: dict[str, Callable[[Scene, random.Random], Asked]] = {
    "color": _ask_color,
    "shape": _ask_shape,
    "count": _ask_count,
    "count_shape": _ask_count_shape,
    "count_color": _ask_count_color,
    "exist": _ask_exist,
    "number": _ask_number,
    "left": _ask_left,
    "describe": _ask_describe,
}
_PAIR_ASKERS: dict[str, Callable[[Scene, Scene, random.Random], Asked]] = {
    "more": _ask_more,
    "same_number": _ask_same_number,
    "one_of_two": _ask_one_of_two,
}
ONE_KINDS = tuple(_ASKERS)
PAIR_KINDS = tuple(_PAIR_ASKERS)
