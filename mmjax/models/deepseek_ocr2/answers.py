"""DeepSeek-OCR 2's boxes, of `<|ref|>title<|/ref|><|det|>[[81, 77, 916, 109]]<|/det|>`, in pixels.

The four numbers of a box are its left, upper, right and lower edge in parts of 999 of a side.
"""

import re
from typing import Any

from mmjax.processing.items.items import ImageSize

_FOUND = re.compile(r"<\|ref\|>(.*?)<\|/ref\|>\s*<\|det\|>(.*?)<\|/det\|>", re.DOTALL)
_BOX = re.compile(r"\[\s*(\d{1,3})\s*,\s*(\d{1,3})\s*,\s*(\d{1,3})\s*,\s*(\d{1,3})\s*\]")
_PARTS = 999


def parse_boxes(text: str, image_size: ImageSize) -> dict[str, Any]:
    """Return `{"boxes": {"bboxes", "labels"}}`, of equal length; nothing where there are none.

    `bboxes`: edges in whole pixels of the image; `labels`: what `<|ref|>` says of each.
    """
    boxes, labels = [], []
    sides = (image_size.width, image_size.height) * 2
    for label, places in _FOUND.findall(text):
        for box in _BOX.findall(places):
            edges = zip(map(int, box), sides, strict=True)
            boxes.append([int(part / _PARTS * side) for part, side in edges])
            labels.append(label.strip())
    return {"boxes": {"bboxes": boxes, "labels": labels}} if boxes else {}
