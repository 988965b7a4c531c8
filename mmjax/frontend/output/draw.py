"""Draw boxes and polygons of a parsed answer on its image."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw

_COLORS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#808000")
_PIXELS_PER_LINE = 300
"""Lines are one pixel wider for every so many pixels of the shorter side."""


def draw_boxes(image: Image.Image, parsed: Mapping[str, Any] | None) -> Image.Image:
    """Return a copy of the image with the boxes, polygons and labels of an answer.

    Args:
        image: The one that the prompt was about, in its original size.
        parsed: `CompletionOutput.parsed`, or `parsed` of a HTTP answer: `{task: answer}`, where an
            answer has `bboxes`, `quad_boxes` or `polygons`, in pixels. For text nothing is drawn.
    """
    canvas = image.convert("RGB")
    if canvas is image:
        canvas = image.copy()
    draw = ImageDraw.Draw(canvas)
    width = 2 + min(image.size) // _PIXELS_PER_LINE
    colors: dict[str, str] = {}
    for label, outlines in _find_outlines(parsed or {}):
        color = colors.setdefault(label, _COLORS[len(colors) % len(_COLORS)])
        for points in outlines:
            draw.line([*points, *points[:2]], fill=color, width=width)
        if label and outlines:
            x, y = outlines[0][:2]
            place = draw.textbbox((x, y), label)
            draw.rectangle(place, fill=color)
            draw.text((x, y), label, fill="white")
    return canvas


def _find_outlines(parsed: Mapping[str, Any]) -> Iterator[tuple[str, list[Sequence[int]]]]:
    """Yield each object's label, and its outlines: x, y, x, y, ..., of two points at least."""
    for answer in parsed.values():
        if not isinstance(answer, Mapping):
            continue
        labels = answer.get("labels")
        for name in ("bboxes", "quad_boxes", "polygons"):
            own_labels = answer.get(f"{name}_labels") if labels is None else labels
            for label, found in zip(own_labels or (), answer.get(name, ()), strict=False):
                yield label, [points for points in _as_outlines(name, found) if len(points) >= 4]


def _as_outlines(name: str, found: Any) -> list[Sequence[int]]:
    if name == "polygons":
        return found
    if name == "quad_boxes":
        return [found]
    left, top, right, bottom = found
    return [[left, top, right, top, right, bottom, left, bottom]]
