"""Where everything is, for the auxiliary heads of training: one row of labels per picture."""

from dataclasses import dataclass

import numpy as np
from scenes import COLORS, SHAPES, Number, Scene, Thing, digit_spans

PATCHES = 12
"""Patches per side, as the tower sees the squashed picture."""
CELLS = 6
"""Soft tokens per side."""
LABEL_CLASSES = {
    "shape": 1 + len(SHAPES),
    "color": 1 + len(COLORS),
    "digit": 11,
    "place": 4,
    "centre": 1 + len(SHAPES) * len(COLORS),
}
"""Classes of each label; class 0 is "nothing here"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """int32 labels: of patches [144], and, `centre`, of soft tokens [36]."""

    shape: np.ndarray
    color: np.ndarray
    digit: np.ndarray
    place: np.ndarray
    """Which digit of the number, counted from the left and from 1."""
    centre: np.ndarray
    """Shape and colour of the thing whose centre lies in the cell."""


def label(scene: Scene) -> Labels:
    """Label the patches by what covers their centres; a thing also gets the patch it centres in."""
    patches = {name: np.zeros((PATCHES, PATCHES), np.int32) for name in LABEL_CLASSES}
    centre = np.zeros((CELLS, CELLS), np.int32)
    for thing in scene.things:
        shape, color = SHAPES.index(thing.shape), tuple(COLORS).index(thing.color)
        covered = _covered_by(scene, thing)
        patches["shape"][covered] = 1 + shape
        patches["color"][covered] = 1 + color
        row, column = _cell(scene, thing.x, thing.y, CELLS)
        centre[row, column] = 1 + shape * len(COLORS) + color
    if scene.number is not None:
        _label_digits(scene, scene.number, patches["digit"], patches["place"])
    flat = {name: patches[name].reshape(-1) for name in LABEL_CLASSES if name != "centre"}
    return Labels(**flat, centre=centre.reshape(-1))


def _centres(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """x[1, P] and y[P, 1] of the patch centres in the scene's units."""
    steps = (np.arange(PATCHES) + 0.5) / PATCHES
    return (steps * scene.width / scene.side)[None, :], (steps * scene.height / scene.side)[:, None]


def _cell(scene: Scene, x: float, y: float, cells: int) -> tuple[int, int]:
    column = int(x * scene.side / scene.width * cells)
    row = int(y * scene.side / scene.height * cells)
    return min(max(row, 0), cells - 1), min(max(column, 0), cells - 1)


def _covered_by(scene: Scene, thing: Thing) -> np.ndarray:
    xs, ys = _centres(scene)
    covered = (xs - thing.x) ** 2 + (ys - thing.y) ** 2 <= (thing.size / 2) ** 2
    covered[_cell(scene, thing.x, thing.y, PATCHES)] = True
    return covered


def _label_digits(scene: Scene, number: Number, digit: np.ndarray, place: np.ndarray) -> None:
    middle = number.y + number.height / 2
    _, ys = _centres(scene)
    rows = np.abs(ys[:, 0] - middle) <= number.height / 2
    rows[_cell(scene, 0.0, middle, PATCHES)[0]] = True
    xs = _centres(scene)[0][0]
    for i, (left, right) in enumerate(digit_spans(number, scene.side)):
        columns = (xs >= left) & (xs < right)
        columns[_cell(scene, (left + right) / 2, middle, PATCHES)[1]] = True
        covered = rows[:, None] & columns[None, :]
        digit[covered] = 1 + int(number.text[i])
        place[covered] = 1 + i
