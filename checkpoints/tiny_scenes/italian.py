"""Answers in Italian, of the same questions: what the adapter in the box answers with."""

import dataclasses

from questions import Question

COLORS = {
    "red": ("rosso", "rossa"),
    "green": ("verde", "verde"),
    "blue": ("blu", "blu"),
    "yellow": ("giallo", "gialla"),
    "purple": ("viola", "viola"),
    "orange": ("arancione", "arancione"),
    "black": ("nero", "nera"),
}
"""Of a masculine noun and of a feminine one."""
SHAPES = {
    "circle": "cerchio",
    "square": "quadrato",
    "triangle": "triangolo",
    "star": "stella",
}
FEMININE = {"star"}
WORDS = {
    "yes": "sì",
    "no": "no",
    "none": "nessuno",
    "nothing": "niente",
    "first": "prima",
    "second": "seconda",
    "same": "uguale",
    **SHAPES,
    **{color: masculine for color, (masculine, _) in COLORS.items()},
}


def translate(answer: str) -> str:
    """Return an answer in Italian: `a red star, a blue circle`: `una stella rossa, un cerchio blu`.

    Digits stay.
    """
    return ", ".join(map(_translate_one, answer.split(", ")))


def _translate_one(name: str) -> str:
    words = name.split()
    if len(words) < 3:
        return WORDS.get(name, name)
    _, color, shape = words
    is_feminine = shape in FEMININE
    return f"{'una' if is_feminine else 'un'} {SHAPES[shape]} {COLORS[color][is_feminine]}"


def reword(question: Question) -> Question:
    """Return the question, as it is, with its answer in Italian."""
    return dataclasses.replace(question, answer=translate(question.answer))
