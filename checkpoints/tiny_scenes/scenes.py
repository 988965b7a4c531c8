"""Draw the scenes of tiny_scenes: a few coloured shapes, sometimes a number, on a plain ground.

Everything is decided by the `random.Random` that is passed in; `draw(scene)` itself draws no lots.
Lengths are fractions of the picture's side, which is the geometric mean of its width and height.
"""

import functools
import itertools
import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SHAPES = ("circle", "square", "triangle", "star")
COLORS = {
    "red": (255, 0, 0),
    "green": (0, 128, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "purple": (128, 0, 128),
    "orange": (255, 165, 0),
    "black": (0, 0, 0),
}
INKS = ("black", "black", "black", "black", "red", "green", "blue", "purple")
"""What numbers are written in: colours that stay legible on every ground; black half the time."""

REACH = {"circle": 0.5, "square": 0.6, "triangle": 0.54, "star": 0.5}
"""Radius that a shape of size 1 claims for itself: corners may come close, bodies may not."""

MAX_SIZE = {1: 0.45, 2: 0.45, 3: 0.36, 4: 0.30, 5: 0.30}
"""Largest size by the number of things, so that they fit."""

MIN_GAP = {1: 0.0, 2: 0.08, 3: 0.08, 4: 0.06, 5: 0.06}
"""Least distance between two centres along x, which makes "left of" well defined."""

MARGIN = 0.012
NOISE_TILE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """One shape. `x`, `y` is its centre; `form` in [0, 1] varies triangles and stars a little."""

    shape: str
    color: str
    rgb: tuple[int, int, int]
    x: float
    y: float
    size: float
    angle: float
    form: float

    @property
    def reach(self) -> float:
        return REACH[self.shape] * self.size

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A written number. `x`, `y` is the top left of its ink, `width`, `height` the ink's extent."""

    text: str
    x: float
    y: float
    width: float
    height: float
    font_px: int
    rgb: tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All that is needed to draw one picture, and to answer questions about it."""

    width: int
    height: int
    things: tuple[Thing, ...]
    number: Number | None
    ground: tuple[int, int, int]
    noise: float
    noise_seed: int
    smooth: bool
    """Antialiased edges; without, shapes look as `ImageDraw` leaves them."""
    outline: int
    """Width in pixels of a dark line around each thing; 0 for none."""

    @property
    def side(self) -> float:
        return math.sqrt(self.width * self.height)

    @property
    def left_to_right(self) -> tuple[Thing, ...]:
        return tuple(sorted(self.things, key=lambda thing: thing.x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The distribution of scenes. The defaults are what is evaluated."""

    min_size: float = 0.12
    min_font: float = 0.18
    """Font size, not the digits' height, which is about 0.7 of it: the harder reading."""
    max_font: float = 0.42
    small_font_share: float = 0.0
    """Share of numbers whose font is drawn from the smallest third only."""
    jitter: int = 18
    max_angle: float = 25.0
    plain_share: float = 0.1
    """Share of scenes as a user draws them by hand: pure colours, no noise, hard edges, upright."""
    square_share: float = 0.6
    max_stretch: float = 1.55
    native_share: float = 0.25
    """Share of pictures that already have the model's resolution."""
    closeness: float = 0.97


EVALUATION = Style()
TRAINING = Style(
    min_size=0.115,
    min_font=0.16,
    small_font_share=0.5,
    jitter=24,
    max_angle=30.0,
    plain_share=0.2,
    square_share=0.55,
    max_stretch=2.0,
    native_share=0.55,
    closeness=0.92,
)
NATIVE_SIDE = 96


def sample_number(rng: random.Random) -> str:
    """One to three digits without a leading zero; the lengths are equally likely."""
    length = rng.randint(1, 3)
    return str(rng.randint(0 if length == 1 else 10 ** (length - 1), 10**length - 1))


def sample_scene(rng: random.Random, style: Style, number_text: str | None) -> Scene:
    """Draw lots for a scene that shows `number_text` (None: no number)."""
    width, height = _sample_resolution(rng, style)
    side = math.sqrt(width * height)
    canvas = (width / side, height / side)
    plain = rng.random() < style.plain_share
    num_things = rng.randint(1, 5)
    attempt = 0
    while True:
        crowd = min(1.0, attempt / 12)
        number = _sample_number(rng, style, number_text, side=side, canvas=canvas, crowd=crowd)
        things = _sample_things(
            rng, style, num_things, number, canvas=canvas, crowd=crowd, plain=plain
        )
        if things is not None:
            break
        attempt += 1
        if attempt % 20 == 0:
            num_things = max(1, num_things - 1)
    return Scene(
        width=width,
        height=height,
        things=things,
        number=number,
        ground=_sample_ground(rng, plain),
        noise=0.0 if plain else rng.uniform(0.0, 9.0),
        noise_seed=rng.randrange(1 << 30),
        smooth=not plain,
        outline=max(1, round(side * rng.uniform(0.004, 0.015)))
        if plain and rng.random() < 0.2
        else 0,
    )


def _sample_resolution(rng: random.Random, style: Style) -> tuple[int, int]:
    stretch = 1.0
    if rng.random() >= style.square_share:
        stretch = style.max_stretch ** rng.uniform(-1.0, 1.0)
    if rng.random() < style.native_share:
        side = float(NATIVE_SIDE)
    elif rng.random() < 0.4:
        side = rng.uniform(64, 128)
    else:
        side = 128 * 5 ** (rng.random() ** 2)
    return round(side * math.sqrt(stretch)), round(side / math.sqrt(stretch))


def _sample_ground(rng: random.Random, plain: bool) -> tuple[int, int, int]:
    if plain and rng.random() < 0.8:
        return (255, 255, 255)
    grey = rng.uniform(0.5, 1.0)
    red, green, blue = (
        min(255, round(255 * grey * (1 + rng.uniform(-0.06, 0.06)))) for _ in range(3)
    )
    return (red, green, blue)


def _sample_number(
    rng: random.Random,
    style: Style,
    text: str | None,
    *,
    side: float,
    canvas: tuple[float, float],
    crowd: float,
) -> Number | None:
    if text is None:
        return None
    span = (style.max_font - style.min_font) * (1 - crowd)
    if rng.random() < style.small_font_share:
        span /= 3
    font_px = math.ceil((style.min_font + span * rng.random()) * side)
    x0, y0, x1, y1 = _font(font_px).getbbox(text)
    width, height = (x1 - x0) / side, (y1 - y0) / side
    return Number(
        text=text,
        x=rng.uniform(MARGIN, max(MARGIN, canvas[0] - width - MARGIN)),
        y=rng.uniform(MARGIN, max(MARGIN, canvas[1] - height - MARGIN)),
        width=width,
        height=height,
        font_px=font_px,
        rgb=_jitter(rng, COLORS[rng.choice(INKS)], style.jitter),
    )


def _sample_things(
    rng: random.Random,
    style: Style,
    count: int,
    number: Number | None,
    *,
    canvas: tuple[float, float],
    crowd: float,
    plain: bool,
) -> tuple[Thing, ...] | None:
    """`count` things that keep clear of each other and of the number; None if they do not fit."""
    max_size = MAX_SIZE[count] + (0.2 if plain and count == 1 else 0.0)
    things: list[Thing] = []
    for _ in range(count):
        color = rng.choice(tuple(COLORS))
        shape = rng.choice(SHAPES)
        size = rng.uniform(style.min_size, max_size - (max_size - style.min_size) * crowd)
        reach = REACH[shape] * size + MARGIN
        place = _find_place(
            rng,
            reach,
            things,
            number,
            canvas=canvas,
            closeness=style.closeness,
            min_gap=MIN_GAP[count],
        )
        if place is None:
            return None
        things.append(
            Thing(
                shape=shape,
                color=color,
                rgb=COLORS[color] if plain else _jitter(rng, COLORS[color], style.jitter),
                x=place[0],
                y=place[1],
                size=size,
                angle=0.0 if plain else rng.uniform(-style.max_angle, style.max_angle),
                form=rng.random(),
            )
        )
    return tuple(things)


def _find_place(
    rng: random.Random,
    reach: float,
    things: list[Thing],
    number: Number | None,
    *,
    canvas: tuple[float, float],
    closeness: float,
    min_gap: float,
) -> tuple[float, float] | None:
    for _ in range(25):
        x = rng.uniform(min(reach, canvas[0] / 2), max(canvas[0] - reach, canvas[0] / 2))
        y = rng.uniform(min(reach, canvas[1] / 2), max(canvas[1] - reach, canvas[1] / 2))
        if number is not None and _distance_to(number, x, y) < reach:
            continue
        if all(
            abs(other.x - x) >= min_gap
            and math.hypot(other.x - x, other.y - y) >= (other.reach + reach) * closeness
            for other in things
        ):
            return x, y
    return None


def _distance_to(number: Number, x: float, y: float) -> float:
    dx = max(number.x - x, 0.0, x - number.x - number.width)
    dy = max(number.y - y, 0.0, y - number.y - number.height)
    return math.hypot(dx, dy)


def _jitter(rng: random.Random, rgb: tuple[int, int, int], amount: int) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, c + rng.randint(-amount, amount))) for c in rgb)
    return (red, green, blue)


@functools.cache
def _font(font_px: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(font_px)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise TypeError("Pillow was built without FreeType; scenes need its scalable default font")
    return font


def digit_spans(number: Number, side: float) -> list[tuple[float, float]]:
    """Left and right edge of each digit, in fractions of the side."""
    font = _font(number.font_px)
    start = number.x - font.getbbox(number.text)[0] / side
    edges = [start + font.getlength(number.text[:i]) / side for i in range(len(number.text) + 1)]
    return list(itertools.pairwise(edges))


def corners(thing: Thing) -> list[tuple[float, float]]:
    """The polygon of a square, triangle or star: offsets from its centre, before rotation."""
    half = thing.size / 2
    if thing.shape == "square":
        return [(-half, -half), (half, -half), (half, half), (-half, half)]
    if thing.shape == "triangle":
        height = thing.size * (0.84 + 0.18 * thing.form)
        return [(0.0, -0.58 * height), (half, 0.42 * height), (-half, 0.42 * height)]
    inner = half * (0.38 + 0.1 * thing.form)
    spokes = [(half if i % 2 == 0 else inner, math.pi * i / 5) for i in range(10)]
    return [(radius * math.sin(turn), -radius * math.cos(turn)) for radius, turn in spokes]


def draw(scene: Scene) -> Image.Image:
    """The picture of a scene, RGB, `scene.width` by `scene.height` pixels."""
    picture = Image.new("RGB", (scene.width, scene.height), scene.ground)
    for thing in scene.things:
        if scene.outline:
            line = (0, 0, 0) if thing.color != "black" else (64, 64, 64)
            _draw_thing(picture, scene, thing, line, grow=0.0)
        _draw_thing(picture, scene, thing, thing.rgb, grow=-scene.outline)
    if scene.number is not None:
        _draw_number(picture, scene.side, scene.number)
    return _add_noise(picture, scene)


def _draw_thing(
    picture: Image.Image, scene: Scene, thing: Thing, rgb: tuple[int, int, int], *, grow: float
) -> None:
    side = scene.side
    scale = (4 if side <= NATIVE_SIDE * 2 else 2) if scene.smooth else 1
    radius = math.ceil(thing.size * 0.75 * side) + 2
    left, top = math.floor(thing.x * side) - radius, math.floor(thing.y * side) - radius
    mask = Image.new("L", (2 * radius * scale, 2 * radius * scale))
    pen = ImageDraw.Draw(mask)
    cx, cy = (thing.x * side - left) * scale, (thing.y * side - top) * scale
    unit = side * scale * (1 + 2 * grow / (thing.size * side))
    if thing.shape == "circle":
        half = thing.size / 2 * unit
        pen.ellipse((cx - half, cy - half, cx + half, cy + half), fill=255)
    else:
        cos, sin = math.cos(math.radians(thing.angle)), math.sin(math.radians(thing.angle))
        points = [
            (cx + (x * cos - y * sin) * unit, cy + (x * sin + y * cos) * unit)
            for x, y in corners(thing)
        ]
        pen.polygon(points, fill=255)
    picture.paste(rgb, (left, top), mask.reduce(scale) if scale > 1 else mask)


def _draw_number(picture: Image.Image, side: float, number: Number) -> None:
    font = _font(number.font_px)
    x0, y0, _, _ = font.getbbox(number.text)
    place = (round(number.x * side) - x0, round(number.y * side) - y0)
    ImageDraw.Draw(picture).text(place, number.text, fill=number.rgb, font=font)


@functools.cache
def _noise_bank() -> np.ndarray:
    """float32[8, NOISE_TILE, NOISE_TILE, 3]; unit normal."""
    shape = (8, NOISE_TILE, NOISE_TILE, 3)
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def _add_noise(picture: Image.Image, scene: Scene) -> Image.Image:
    if scene.noise < 0.5:
        return picture
    rng = random.Random(scene.noise_seed)
    dy, dx = rng.randrange(NOISE_TILE), rng.randrange(NOISE_TILE)
    tile = np.roll(_noise_bank()[rng.randrange(8)], (dy, dx), axis=(0, 1))
    repeat = (-(-scene.height // NOISE_TILE), -(-scene.width // NOISE_TILE), 1)
    if repeat != (1, 1, 1):
        tile = np.tile(tile, repeat)
    pixels = np.asarray(picture, dtype=np.float32)
    pixels = pixels + scene.noise * tile[: scene.height, : scene.width]
    return Image.fromarray(np.clip(pixels + 0.5, 0, 255).astype(np.uint8))
