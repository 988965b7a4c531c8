"""Boxes and points of answers, in pixels of the images as they were sent.

Every family writes places in a form of its own, which its row names (`FamilyInfo.answer_form`):
JSON, or numbers between marks, as `<ref>cat</ref><box>(81,77),(916,109)</box>`.
"""

import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from mmjax.processing.items.items import ImageSize

REASONING_MARKS = ("<think>", "</think>")
"""Of Qwen's and GLM's models that think before they answer."""
Places = Iterator[tuple[str, Sequence[float]]]
"""Labels, each with left, top, right and bottom of a box, or with x and y of a point."""


class AskedImage(NamedTuple):
    """An image that an answer is about."""

    sent: ImageSize
    seen: ImageSize
    """What it was resized to for the model."""


class KnownImages:
    """The sizes of the images that were asked about last, by their names; threads may share it."""

    capacity = 4096
    """Some 400 bytes each."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._images: OrderedDict[str, AskedImage] = OrderedDict()

    def get(self, name: str) -> AskedImage | None:
        """Return an image's sizes; None where it was not asked about lately."""
        with self._lock:
            if name in self._images:
                self._images.move_to_end(name)
            return self._images.get(name)

    def __setitem__(self, name: str, image: AskedImage) -> None:
        with self._lock:
            self._images[name] = image
            if len(self._images) > self.capacity:
                self._images.popitem(last=False)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How a model writes what it found."""

    read: Callable[[str, Sequence[AskedImage]], dict[str, Any]]
    """Returns what stands in an answer about images; nothing where it has no places."""
    max_images: float = math.inf
    """Of how many images, at most, answers are read."""
    in_pixels: bool = False
    """Whether it counts pixels of an image as the model saw it."""


def read_places(
    text: str,
    images: Sequence[AskedImage],
    *,
    find: Callable[[str], Places],
    parts: int | None = 1000,
) -> dict[str, Any]:
    """Return `{"boxes": {"bboxes", "labels"}, "points": {"points", "labels"}}`, or one of them.

    Of several images, the last is meant. What lies beyond it is left out.

    Args:
        text: An answer.
        images: Those of the prompt.
        find: Finds places in the text.
        parts: Of a side, in which they are counted; None: pixels of the image as the model saw it.
    """
    sent, seen = images[-1]
    boxes: dict[str, list[Any]] = {"bboxes": [], "labels": []}
    points: dict[str, list[Any]] = {"points": [], "labels": []}
    for label, numbers in find(text):
        limits = (seen if parts is None else (parts, parts)) * 2
        pairs = list(zip(numbers, limits, sent * 2, strict=False))
        if not all(0 <= number <= limit for number, limit, _ in pairs):
            continue
        placed = [number / limit * side for number, limit, side in pairs]
        if len(numbers) == 4:
            boxes["bboxes"].append([int(side) for side in placed])
            boxes["labels"].append(label)
        else:
            points["points"].append(placed)
            points["labels"].append(label)
    return {
        **({"boxes": boxes} if boxes["labels"] else {}),
        **({"points": points} if points["labels"] else {}),
    }


# ---- JSON ----------------------------------------------------------------------------------------

_OBJECT = re.compile(r"\{[^{}]*\}")


def find_json(text: str) -> Places:
    """Find objects with `bbox_2d` or `point_2d`, and `label` or, of text, `text_content`."""
    for match in _OBJECT.finditer(text):
        if '_2d"' not in match.group():
            continue
        try:
            found = json.loads(match.group())
        except (ValueError, RecursionError):
            continue
        for key, count in (("bbox_2d", 4), ("point_2d", 2)):
            numbers = found.get(key)
            if isinstance(numbers, list) and len(numbers) == count and _are_numbers(numbers):
                yield _read_json_label(found), numbers


def _read_json_label(found: dict[str, Any]) -> str:
    names = (found.get(key) for key in ("label", "text_content"))
    text = str(next((name for name in names if name is not None), ""))
    # Escapes may hold half of a surrogate pair, which is no text.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(n, int | float) and not isinstance(n, bool) for n in values)


# ---- numbers between marks -----------------------------------------------------------------------

_NUMBER = r"(\d{1,4})"
_BEFORE_BRACKETS = re.compile(r"[^\[(]*")
_FOUR = re.compile(r"[\s,()]+".join([_NUMBER] * 4))


class Marks(NamedTuple):
    """What stands around a label, and around the boxes of what it names."""

    label: tuple[str, str] | None
    boxes: tuple[str, str]


def find_marked(text: str, marks: Marks) -> Places:
    """Find four numbers, and more, between the marks of boxes; their label stands before them.

    Or, where none does, between the marks before the first bracket.
    """
    start_mark, end_mark = marks.boxes
    place, label = 0, ""
    while (start := text.find(start_mark, place)) >= 0:
        begin = start + len(start_mark)
        end = text.find(end_mark, begin)
        if end < 0:
            return
        before, inside = text[place:start].rstrip(), text[begin:end]
        if before:  # else these boxes are further ones of the same label
            label = _read_label(before, marks.label)
        for numbers in _FOUR.findall(inside):
            own = _BEFORE_BRACKETS.match(inside)
            assert own is not None, "it matches nothing, too"
            yield label or own.group().strip(), [int(number) for number in numbers]
        place = end + len(end_mark)


def _read_label(before: str, marks: tuple[str, str] | None) -> str:
    """Return the label that a text ends with; nothing where it ends otherwise."""
    if marks is None or not before.endswith(marks[1]):
        return ""
    return before.removesuffix(marks[1]).rpartition(marks[0])[2].strip()


def _find_glm(text: str) -> Places:
    # JSON may stand between the marks, too.
    marks = Marks(None, ("<|begin_of_box|>", "<|end_of_box|>"))
    yield from list(find_json(text)) or find_marked(text, marks)


def _form(marks: Marks, **options: Any) -> Callable[..., dict[str, Any]]:
    return partial(read_places, find=partial(find_marked, marks=marks), **options)


# ---- Molmo's points ------------------------------------------------------------------------------

_MOLMO = re.compile(r"<points?\b([^<>]*?)(?:/>|>([^<]*)</points?>)")
_MOLMO_POINT = re.compile(r'\bx(\d*)\s*=\s*"\s*(\d+\.?\d*)\s*"\s+y\1\s*=\s*"\s*(\d+\.?\d*)\s*"')
_ALT = re.compile(r'\balt\s*=\s*"([^"]*)"')


def find_molmo_points(text: str) -> Places:
    """Find points in hundredths of a side: `<point x="10.5" y="20" alt="a cat">cat</point>`."""
    for element in _MOLMO.finditer(text):
        attributes, inside = element.groups()
        alt = _ALT.search(attributes)
        label = inside or (alt.group(1) if alt else "")
        for _, x, y in _MOLMO_POINT.findall(attributes):
            yield label.strip(), (float(x), float(y))


# ---- Molmo 2's points ----------------------------------------------------------------------------

_ELEMENT = re.compile(r'<(points|tracks)\b([^<>]*?) coords="([0-9\t:;, .]+)"\s*(/?)>')
_GROUP = re.compile(r"(?:^|[\t:,;])([0-9.]{1,16}) ([0-9. ]+)")
_POINT = re.compile(r"\b([0-9]{1,16}) ([0-9]{3,4}) ([0-9]{3,4})")
_PARTS = 1000


def read_molmo2_points(text: str, images: Sequence[AskedImage]) -> dict[str, Any]:
    """Return `{"points": {...}}`, lists of one length.

    Of `<points coords="1 1 483 442 2 700 061">boats</points>`, which has, for each picture (by its
    number from 1) or second of a video, points of three numbers: which object it is, and its place
    from the left and from above in thousandths of a side. Pictures are divided by tabs or one of
    `,;:`. `<tracks ...>` is written alike.

    `points`: x and y, in pixels of the picture; `labels`: the phrase; `ids`: the object's number;
    `images`: the picture's number, from 1. Points beyond their picture are left out, and those of
    pictures that there are not.
    """
    found = list[tuple[list[float], str, int, int]]()
    for label, number, object_id, x, y in _find_molmo2_points(text):
        is_known = number.isdecimal() and 1 <= int(number) <= len(images)
        if is_known and max(x, y) <= _PARTS:
            size = images[int(number) - 1].sent
            place = [x / _PARTS * size.width, y / _PARTS * size.height]
            found.append((place, label, object_id, int(number)))
    names = ("points", "labels", "ids", "images")
    columns = map(list, zip(*found, strict=True))
    return {"points": dict(zip(names, columns, strict=True))} if found else {}


def _find_molmo2_points(text: str) -> Iterator[tuple[str, str, int, int, int]]:
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


# ---- PaliGemma's objects -------------------------------------------------------------------------

_NUM_BINS, _NUM_CODES = 1024, 16
_PALIGEMMA = re.compile(rf"((?:<loc\d{{4}}>){{4}})\s*((?:<seg\d{{3}}>){{{_NUM_CODES}}})?([^<>;]*)")
_DIGITS = re.compile(r"\d+")


def read_paligemma_objects(text: str, images: Sequence[AskedImage]) -> dict[str, Any]:
    """Return `{"objects": {...}}`, lists of one length.

    Of `<loc0123><loc0456><loc0789><loc1011> car ; ...`: a box, its sides from above, left, below
    and right in 1024ths of a side; behind it, if the object was segmented, 16 codes of its mask
    (`<seg000>` to `<seg127>`); then its name (big_vision's `paligemma/segmentation`).

    `bboxes`: left, top, right and bottom in pixels of the picture; `labels`: the names; where any
    object was segmented, `codes`: its 16 codes, none of the others.
    """
    found: dict[str, list[Any]] = {"bboxes": [], "labels": [], "codes": []}
    width, height = images[-1].sent
    for places, codes, label in _PALIGEMMA.findall(text):
        top, left, bottom, right = (int(number) / _NUM_BINS for number in _DIGITS.findall(places))
        box = (left * width, top * height, right * width, bottom * height)
        found["bboxes"].append([round(side) for side in box])
        found["labels"].append(label.strip())
        found["codes"].append([int(number) for number in _DIGITS.findall(codes)])
    if not any(found["codes"]):
        del found["codes"]
    return {"objects": found} if found["bboxes"] else {}


# ---- forms ---------------------------------------------------------------------------------------

JSON_IN_PIXELS = AnswerForm(partial(read_places, find=find_json, parts=None), in_pixels=True)
"""Qwen2.5-VL's: `[{"bbox_2d": [56, 28, 280, 140], "label": "cat"}]`, of the resized image."""
JSON_IN_THOUSANDTHS = AnswerForm(partial(read_places, find=find_json))
"""Qwen3-VL's: the same, in thousandths of a side."""
GLM = AnswerForm(partial(read_places, find=_find_glm))
"""GLM-V's `<|begin_of_box|>[[81, 77, 916, 109]]<|end_of_box|>`, or JSON as Qwen3-VL's."""
REF_AND_BOX = AnswerForm(_form(Marks(("<ref>", "</ref>"), ("<box>", "</box>"))))
"""Qwen-VL's `<box>(81,77),(916,109)</box>`, and InternVL's `<box>[[81, 77, 916, 109]]</box>`."""
QWEN2_VL = AnswerForm(
    _form(Marks(("<|object_ref_start|>", "<|object_ref_end|>"), ("<|box_start|>", "<|box_end|>")))
)
"""The same with Qwen2-VL's special tokens."""
_DEEPSEEK = _form(Marks(("<|ref|>", "<|/ref|>"), ("<|det|>", "<|/det|>")), parts=999)
DEEPSEEK = AnswerForm(_DEEPSEEK)
"""DeepSeek-VL2's `<|ref|>title<|/ref|><|det|>[[81, 77, 916, 109]]<|/det|>`, in parts of 999."""
DEEPSEEK_OCR = AnswerForm(_DEEPSEEK, max_images=1)
"""The same of one page; Unlimited-OCR's has no label before `<|det|>title [81, 77, 916, 109]`."""
MOLMO = AnswerForm(partial(read_places, find=find_molmo_points, parts=100))
MOLMO_2 = AnswerForm(read_molmo2_points)
PALIGEMMA = AnswerForm(read_paligemma_objects, max_images=1)
