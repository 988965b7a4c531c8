"""Molmo 2's points, of `<points coords="1 1 483 442 2 700 061">boats</points>`, in pixels.

`coords` has, for each picture (by its number from 1) or second of a video, points of three numbers:
which object it is, and its place from the left and from above in thousandths of a side. Pictures
are divided by tabs or one of `,;:`. `<tracks ...>` is written alike.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from mmjax.processing.items.items import ImageSize

_ELEMENT = re.compile(r'<(points|tracks)\b([^<>]*?) coords="([0-9\t:;, .]+)"\s*(/?)>')
_GROUP = re.compile(r"(?:^|[\t:,;])([0-9.]+) ([0-9. ]+)")
_POINT = re.compile(r"([0-9]+) ([0-9]{3,4}) ([0-9]{3,4})")
_ALT = re.compile(r'\balt="([^"]*)"')
_PARTS = 1000


def parse_points(text: str, image_sizes: Sequence[ImageSize]) -> dict[str, Any]:
    """Return `{"points": {...}}`, lists of one length; nothing where an answer has no points.

    `points`: x and y, in pixels of the picture; `labels`: the phrase; `ids`: the object's number;
    `images`: the picture's number, from 1. Points beyond their picture are left out, and those of
    pictures that there are not.
    """
    found: dict[str, list[Any]] = {"points": [], "labels": [], "ids": [], "images": []}
    for label, number, object_id, x, y in _find_points(text):
        if not number.isdecimal() or not 1 <= int(number) <= len(image_sizes):
            continue
        if max(x, y) > _PARTS:
            continue
        size = image_sizes[int(number) - 1]
        found["points"].append([x / _PARTS * size.width, y / _PARTS * size.height])
        found["labels"].append(label)
        found["ids"].append(object_id)
        found["images"].append(int(number))
    return {"points": found} if found["points"] else {}


def _find_points(text: str) -> Iterator[tuple[str, str, int, int, int]]:
    """Yield each point's phrase, its picture as it is written, its object and its place."""
    for element in _ELEMENT.finditer(text):
        name, attributes, coords, is_closed = element.groups()
        alt = _ALT.search(attributes)
        end = -1 if is_closed else text.find(f"</{name}>", element.end())
        label = alt.group(1) if alt else text[element.end() : end] if end >= 0 else ""
        for group in _GROUP.finditer(coords):
            for point in _POINT.finditer(group.group(2)):
                object_id, x, y = map(int, point.groups())
                yield label.strip(), group.group(1), object_id, x, y
