"""The training data of a step, made from the run's seed and the step's number alone."""

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from labels import LABEL_CLASSES, label
from packing import (
    ROW_SIZE,
    PackedRows,
    Reword,
    Row,
    RowSize,
    as_asked,
    one_question_source,
    pack_chats,
    pack_shared,
    pair_question_source,
    to_arrays,
)
from PIL import Image
from scenes import NATIVE_SIDE, TRAINING, Scene, Style, draw, sample_number, sample_scene

EASE_STEPS = 700
"""Steps over which the smallest sizes fall to the style's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How many pictures a step has, and how many rows of each sort."""

    pictures: int = 32
    single_rows: int = 32
    pair_rows: int = 12
    chat_rows: int = 4
    number_share: float = 0.65
    row_size: RowSize = ROW_SIZE
    reword: Reword = as_asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What a run does from step `start` on."""

    start: int
    plan: BatchPlan
    emphasis: Mapping[str, float]
    """Weights of targets by kind, where not 1."""


PHASES = (
    Phase(start=0, plan=BatchPlan(), emphasis={}),
    # The simple kinds are learned: on with what is hard.
    Phase(
        start=1800,
        plan=BatchPlan(),
        emphasis={
            "color": 0.5,
            "shape": 0.5,
            "exist": 0.6,
            "count": 3.0,
            "count_shape": 1.2,
            "count_color": 1.2,
            "number": 1.5,
            "left": 1.5,
            "more": 2.5,
            "same_number": 4.0,
        },
    ),
    # Single pictures are nearly right: on with pairs and long descriptions.
    Phase(
        start=3300,
        plan=BatchPlan(single_rows=24, pair_rows=20),
        emphasis={
            "color": 0.5,
            "shape": 0.5,
            "exist": 0.6,
            "count": 2.0,
            "number": 2.0,
            "describe": 1.5,
            "more": 2.5,
            "same_number": 6.0,
            "one_of_two": 2.0,
        },
    ),
    # The second, short leg: numbers in pairs were the weak spot of the first.
    Phase(
        start=4800,
        plan=BatchPlan(single_rows=18, pair_rows=26, number_share=0.85),
        emphasis={
            "color": 0.5,
            "shape": 0.5,
            "exist": 0.6,
            "number": 2.0,
            "describe": 1.5,
            "more": 1.5,
            "same_number": 6.0,
            "one_of_two": 3.0,
        },
    ),
)
"""The phases of the run that made the checkpoint, found by its curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step computes on."""

    pixels: np.ndarray
    """uint8[pictures, NATIVE_SIDE, NATIVE_SIDE, 3]"""
    rows: PackedRows
    labels: dict[str, np.ndarray]
    """int32[pictures, patches or cells] by the names of `LABEL_CLASSES`."""


def to_native(picture: Image.Image) -> np.ndarray:
    """uint8[NATIVE_SIDE, NATIVE_SIDE, 3], squashed as the image processor does it."""
    size = (NATIVE_SIDE, NATIVE_SIDE)
    if picture.size != size:
        picture = picture.resize(size, Image.Resampling.BILINEAR)
    return np.asarray(picture)


def ease_style(style: Style, step: int) -> Style:
    """At the start of the run the smallest things and digits are left out."""
    ease = max(0.0, 1 - step / EASE_STEPS)
    return dataclasses.replace(
        style, min_size=style.min_size + 0.06 * ease, min_font=style.min_font + 0.08 * ease
    )


def sample_numbers(rng: random.Random, count: int, share: float) -> list[str | None]:
    """Numbers such that neighbours often show the same one, or differ in one digit only."""
    numbers: list[str | None] = []
    for i in range(count):
        if i % 2 == 0 or rng.random() < 0.3:
            numbers.append(sample_number(rng) if rng.random() < share else None)
        else:
            numbers.append(None if numbers[-1] is None else relate_number(rng, numbers[-1]))
    return numbers


def relate_number(rng: random.Random, number: str) -> str:
    """The same number half the time, else one that differs in a digit, or any."""
    roll = rng.random()
    if roll < 0.48:
        return number
    if roll < 0.8:
        place = rng.randrange(len(number))
        digits = "0123456789" if place or len(number) == 1 else "123456789"
        digit = rng.choice([d for d in digits if d != number[place]])
        return number[:place] + digit + number[place + 1 :]
    return sample_number(rng)


def sample_scenes(rng: random.Random, plan: BatchPlan, style: Style) -> list[Scene]:
    """The scenes of a batch; picture 2k and 2k + 1 are a pair."""
    numbers = sample_numbers(rng, plan.pictures, plan.number_share)
    return [sample_scene(rng, style, number) for number in numbers]


def sample_rows(rng: random.Random, plan: BatchPlan, scenes: list[Scene]) -> list[Row]:
    """Rows of one picture, then rows of pairs, those with two numbers first, then whole chats."""
    rows = []
    for i, scene in enumerate(scenes[: plan.single_rows]):
        source = one_question_source(scene, rng, plan.reword)
        rows.append(pack_shared([i], source, tries=18, size=plan.row_size))
    numbered = [
        2 * k
        for k in range(len(scenes) // 2)
        if scenes[2 * k].number is not None and scenes[2 * k + 1].number is not None
    ]
    others = [2 * k for k in range(len(scenes) // 2) if 2 * k not in numbered]
    for i in sorted((numbered + others + numbered)[: plan.pair_rows]):
        pair = [i, i + 1] if rng.random() < 0.5 else [i + 1, i]
        source = pair_question_source(scenes[pair[0]], scenes[pair[1]], rng, plan.reword)
        rows.append(pack_shared(pair, source, tries=8, size=plan.row_size))
    rows += [pack_chats(scenes, rng, plan.reword, plan.row_size) for _ in range(plan.chat_rows)]
    return rows


def make_batch(
    rng: random.Random, plan: BatchPlan, style: Style, emphasis: Mapping[str, float]
) -> tuple[Batch, list[Row]]:
    """Draw a batch; the rows come too, for looking answers up by kind."""
    scenes = sample_scenes(rng, plan, style)
    rows = sample_rows(rng, plan, scenes)
    every = [label(scene) for scene in scenes]
    batch = Batch(
        pixels=np.stack([to_native(draw(scene)) for scene in scenes]),
        rows=to_arrays(rows, emphasis, plan.row_size),
        labels={name: np.stack([getattr(one, name) for one in every]) for name in LABEL_CLASSES},
    )
    return batch, rows


def training_batch(seed: int, step: int, phases: Sequence[Phase] = PHASES) -> Batch:
    """The batch of a step."""
    rng = random.Random(f"train {seed} {step}")
    phase = max((p for p in phases if p.start <= step), key=lambda p: p.start)
    return make_batch(rng, phase.plan, ease_style(TRAINING, step), phase.emphasis)[0]


def prefetch(seed: int, start: int, stop: int, phases: Sequence[Phase] = PHASES) -> Iterator[Batch]:
    """The batches of steps `start` to `stop`, drawn ahead in a thread."""
    with ThreadPoolExecutor(1) as pool:
        waiting = [
            pool.submit(training_batch, seed, step, phases)
            for step in range(start, min(start + 4, stop))
        ]
        for step in range(start, stop):
            batch = waiting.pop(0).result()
            if step + 4 < stop:
                waiting.append(pool.submit(training_batch, seed, step + 4, phases))
            yield batch
