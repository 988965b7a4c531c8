"""HTML of a request's output for notebooks: its pictures, with boxes if there are any, its answers.

No scripts; all text is escaped.

Draw boxes and polygons of a parsed answer on its image.
"""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from PIL import Image, ImageDraw

from mmjax.errors import RequestError

_COLORS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#808000")
_PIXELS_PER_LINE = 300
"""Lines are one pixel wider for every so many pixels of the shorter side."""


def draw_boxes(image: Image.Image, parsed: Mapping[str, Any] | None) -> Image.Image:
    """Return a copy of the image with the boxes, polygons, points and labels of an answer.

    Args:
        image: The one that the prompt was about, in its original size.
        parsed: `CompletionOutput.parsed`, or `parsed` of a HTTP answer: `{task: answer}`, where an
            answer has `bboxes`, `quad_boxes`, `polygons` or `points`, in pixels. For text nothing
            is drawn.
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
            if len(points) == 2:
                draw.circle(tuple(points), 2 * width, fill=color)
            draw.line([*points, *points[:2]], fill=color, width=width)
        if label and outlines:
            x, y = outlines[0][:2]
            place = draw.textbbox((x, y), label)
            draw.rectangle(place, fill=color)
            draw.text((x, y), label, fill="white")
    return canvas


def _find_outlines(parsed: Mapping[str, Any]) -> Iterator[tuple[str, list[Sequence[int]]]]:
    """Yield each object's label, and its outlines: x, y, x, y, ...; of a point, the place alone."""
    for answer in parsed.values():
        if not isinstance(answer, Mapping):
            continue
        labels = answer.get("labels")
        for name in ("bboxes", "quad_boxes", "polygons", "points"):
            own_labels = answer.get(f"{name}_labels") if labels is None else labels
            for label, found in zip(own_labels or (), answer.get(name, ()), strict=False):
                outlines = _as_outlines(name, found)
                yield label, [one for one in outlines if len(one) >= 4 or name == "points"]


def _as_outlines(name: str, found: Any) -> list[Sequence[int]]:
    if name == "polygons":
        return found
    if name in ("quad_boxes", "points"):
        return [found]
    left, top, right, bottom = found
    return [[left, top, right, top, right, bottom, left, bottom]]


_MAX_IMAGES = 8
"""Further ones are counted, not drawn."""
_MAX_SIDE = 320
_MAX_PROMPT_CHARS = 2000
_PAGE = "font:14px/1.5 system-ui,sans-serif;color:#18181b;background:#fff;padding:8px"
_IMAGE = "max-height:240px;margin:0 8px 8px 0;border:1px solid #d4d4d8"
_ANSWER = "white-space:pre-wrap;margin:4px 0;padding:6px 10px;border-left:3px solid #2563eb"
_SMALL = "color:#52525b;font-size:12px"


def draw_output(output: Any) -> str:
    """Return the HTML of a `RequestOutput`."""
    return f'<div style="{_PAGE}">{"".join(_parts(output))}</div>'


def _parts(output: Any) -> Iterator[str]:
    items = None if output.mm_items is None else output.mm_items.get("image")
    num_images = 0 if items is None else len(items)
    parsed = next((one.parsed for one in output.outputs if one.parsed), None)
    for index in range(min(num_images, _MAX_IMAGES)):
        yield _draw_image(items, index, parsed if num_images == 1 else None)
    if num_images > _MAX_IMAGES:
        yield f"<div>and {num_images - _MAX_IMAGES} more pictures</div>"
    if output.prompt:
        shown = escape(output.prompt[-_MAX_PROMPT_CHARS:])
        yield (
            f'<details><summary style="{_SMALL}">prompt, {len(output.prompt_token_ids)} tokens'
            f'</summary><pre style="white-space:pre-wrap">{shown}</pre></details>'
        )
    for completion in output.outputs:
        yield f'<div style="{_ANSWER}">{escape(completion.text)}</div>'
        reason = completion.finish_reason or "unfinished"
        yield f'<div style="{_SMALL}">{len(completion.token_ids)} tokens, {escape(reason)}</div>'


def _draw_image(items: Any, index: int, parsed: Any) -> str:
    try:
        image = items.get(index)
    except RequestError:
        image = None
    if not isinstance(image, Image.Image):
        # Embeddings, an array of another layout, or an id alone.
        return f'<span style="{_SMALL}">picture {index} is not to be shown</span>'
    shown = draw_boxes(image, parsed)
    items.drop_decoded()
    shown.thumbnail((_MAX_SIDE, _MAX_SIDE))
    buffer = io.BytesIO()
    shown.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img style="{_IMAGE}" alt="picture {index}" src="data:image/png;base64,{data}">'
