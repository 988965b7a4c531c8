"""HTML of a request's output for notebooks: its pictures, with boxes if there are any, its answers.

No scripts; all text is escaped.
"""

import base64
import io
from collections.abc import Iterator
from html import escape
from typing import Any

from PIL import Image

from mmjax.errors import RequestError
from mmjax.frontend.output.draw import draw_boxes

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
