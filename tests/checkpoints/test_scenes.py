"""Scenes keep their promises: what is drawn is what the scene says, and nothing hides another."""

import itertools
import math
import random

import numpy as np
import pytest
from batches import sample_numbers, to_native
from PIL import Image
from scenes import (
    COLORS,
    EVALUATION,
    MAX_SIZE,
    MIN_GAP,
    TRAINING,
    Scene,
    Style,
    digit_spans,
    draw,
    sample_number,
    sample_scene,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tests.checkpoints.conftest import TINY_SCENES

STYLES = pytest.mark.parametrize("style", [EVALUATION, TRAINING], ids=["evaluation", "training"])


def sample_many(style: Style, count: int, seed: int = 0) -> list[Scene]:
    rng = random.Random(seed)
    return [
        sample_scene(rng, style, sample_number(rng) if rng.random() < 0.6 else None)
        for _ in range(count)
    ]


def test_a_seed_gives_one_scene_and_one_picture():
    first, second = sample_many(TRAINING, 20), sample_many(TRAINING, 20)
    assert first == second
    assert [draw(scene).tobytes() for scene in first] == [draw(scene).tobytes() for scene in second]
    assert sample_many(TRAINING, 20, seed=1) != first


@STYLES
def test_things_lie_inside_and_apart(style: Style):
    for scene in sample_many(style, 300):
        right, bottom = scene.width / scene.side, scene.height / scene.side
        for thing in scene.things:
            assert thing.x - 0.5 * thing.size >= -1e-6
            assert thing.x + 0.5 * thing.size <= right + 1e-6
            assert 0 <= thing.y <= bottom
        for one, other in itertools.combinations(scene.things, 2):
            apart = math.hypot(one.x - other.x, one.y - other.y)
            assert apart >= style.closeness * (one.reach + other.reach) - 1e-6
            assert abs(one.x - other.x) >= MIN_GAP[len(scene.things)] - 1e-9


def test_evaluated_scenes_are_as_hard_as_promised():
    scenes = sample_many(EVALUATION, 1000)
    assert {len(scene.things) for scene in scenes} == {1, 2, 3, 4, 5}
    assert {thing.name for scene in scenes for thing in scene.things} == {
        f"{color} {shape}" for color in COLORS for shape in ("circle", "square", "triangle", "star")
    }
    sizes = [thing.size for scene in scenes for thing in scene.things]
    assert 0.12 <= min(sizes) < 0.13
    assert 0.44 < max(sizes) <= MAX_SIZE[1] + 0.2
    fonts = [scene.number.font_px / scene.side for scene in scenes if scene.number is not None]
    assert 0.18 <= min(fonts) < 0.2
    stretches = [scene.width / scene.height for scene in scenes]
    assert min(stretches) < 0.7
    assert max(stretches) > 1.45


@STYLES
def test_numbers_are_clear_of_things(style: Style):
    for scene in sample_many(style, 300):
        number = scene.number
        if number is None:
            continue
        for thing in scene.things:
            dx = max(number.x - thing.x, 0.0, thing.x - number.x - number.width)
            dy = max(number.y - thing.y, 0.0, thing.y - number.y - number.height)
            assert math.hypot(dx, dy) >= thing.reach


def test_a_thing_has_its_color_at_its_centre():
    for scene in sample_many(EVALUATION, 200):
        picture = np.asarray(draw(scene), np.int32)
        assert picture.shape == (scene.height, scene.width, 3)
        for thing in scene.things:
            pixel = picture[int(thing.y * scene.side), int(thing.x * scene.side)]
            assert np.abs(pixel - thing.rgb).max() <= 5 * scene.noise + 2
            assert np.abs(np.subtract(thing.rgb, COLORS[thing.color])).max() <= EVALUATION.jitter


def test_digits_stand_where_they_are_said_to():
    for scene in sample_many(EVALUATION, 100):
        if scene.number is None:
            continue
        spans = digit_spans(scene.number, scene.side)
        assert len(spans) == len(scene.number.text)
        assert spans[0][0] <= scene.number.x + 0.02
        assert spans[-1][1] >= scene.number.x + scene.number.width - 0.02
        assert all(left < right for left, right in spans)


def test_numbers_of_neighbours_are_often_alike():
    numbers = sample_numbers(random.Random(0), 4000, 0.65)
    pairs = [
        (one, other)
        for one, other in zip(numbers[::2], numbers[1::2], strict=True)
        if one is not None and other is not None
    ]
    assert 0.5 < len(pairs) / 2000 < 0.75
    assert 0.25 < sum(one == other for one, other in pairs) / len(pairs) < 0.5


def test_training_pixels_are_the_processors():
    processor = Gemma3ImageProcessorPil.from_pretrained(TINY_SCENES / "model")
    for size in ((96, 96), (64, 150), (333, 222)):
        noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
        picture = Image.fromarray(noise)
        theirs = processor(picture, return_tensors="np")["pixel_values"][0]
        ours = to_native(picture).transpose(2, 0, 1) / 127.5 - 1
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
