"""PaliGemma's objects, of `<loc0123><loc0456><loc0789><loc1011> car ; ...`, in pixels.

An object is a box, its sides from above, left, below and right in 1024ths of a side; behind it, if
it was segmented, 16 codes of its mask (`<seg000>` to `<seg127>`); then its name (big_vision's
`paligemma/segmentation`).
"""

import re
from typing import Any

from mmjax.processing.items.items import ImageSize

_NUM_BINS, _NUM_CODES = 1024, 16
_OBJECT = re.compile(rf"((?:<loc\d{{4}}>){{4}})\s*((?:<seg\d{{3}}>){{{_NUM_CODES}}})?([^<>;]*)")
_NUMBER = re.compile(r"\d+")


def parse_objects(text: str, image_size: ImageSize) -> dict[str, Any]:
    """Return `{"objects": {...}}`, lists of one length; nothing where an answer has no box.

    `bboxes`: left, top, right and bottom in pixels of the picture; `labels`: the names; where any
    object was segmented, `codes`: its 16 codes, none of the others.
    """
    found: dict[str, list[Any]] = {"bboxes": [], "labels": [], "codes": []}
    for places, codes, label in _OBJECT.findall(text):
        sides = [int(number) / _NUM_BINS for number in _NUMBER.findall(places)]
        top, left, bottom, right = sides
        width, height = image_size.width, image_size.height
        box = (left * width, top * height, right * width, bottom * height)
        found["bboxes"].append([round(side) for side in box])
        found["labels"].append(label.strip())
        found["codes"].append([int(number) for number in _NUMBER.findall(codes)])
    if not any(found["codes"]):
        del found["codes"]
    return {"objects": found} if found["bboxes"] else {}
