"""Florence-2's answers to tasks: boxes, polygons and labels, of texts with `<loc_N>` tokens.

As `Florence2Processor.post_process_generation` of transformers, which needs torch. Of `<OD>` and an
image of 1000 x 500 pixels, `cat<loc_0><loc_0><loc_499><loc_999>` gives
`{"<OD>": {"bboxes": [[0, 0, 499, 499]], "labels": ["cat"]}}`.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from mmjax.processing.items.items import ImageSize

NUM_BINS = 1000
"""Places along each side of an image that a `<loc_N>` may name."""
_MARKS = re.compile("<s>|</s>|<pad>")
_LOC = r"<loc_(\d+)>"
_ANY_LOC = r"<loc_\d+>"
_PHRASE_WITH_BOXES = re.compile(rf"[^<]+(?:{_ANY_LOC}){{4,}}")
_BOXES_ALONE = re.compile(rf"(?:{_ANY_LOC}){{4,}}")
_POLYGON_PARTS = rf"(?:{_ANY_LOC}|<sep>|<poly>|</poly>){{4,}}"
_PHRASE_WITH_POLYGONS = re.compile(rf"[^<]+{_POLYGON_PARTS}")
_POLYGONS_ALONE = re.compile(_POLYGON_PARTS)
_QUAD_BOX = re.compile(rf"(.+?){_LOC * 8}")
_BOX = re.compile(_LOC * 4)
_LABEL = re.compile(r"\s*(.*?)(?=</?od>|</?box>|</?bbox>|<loc_)")
_POLYGON_LABEL = re.compile(r"\s*(.*?)(?=</?od>|</?box>|</?bbox>|<loc_|<poly>)")
_POLYGON_GROUP = re.compile(r"<poly>(.*?)</poly>")
_POLYGON = re.compile(rf"((?:{_ANY_LOC})+)(?:<sep>|$)")

VAGUE_PHRASES = frozenset(
    """it I me mine you your yours he him his she her hers they them their theirs one oneself we us
    our ours its myself yourself himself herself itself ourselves yourselves themselves this that
    these those who whom whose which what all another any anybody anyone anything each everybody
    everyone everything few many nobody none several some somebody someone something image images
    the a an lots""".split()
) | {"each other", "one another", "the image", "a group", "other objects", "a set"}
"""Phrases of the published checkpoints' `banned_grounding_tokens`, to which no box belongs."""


@dataclass(frozen=True, slots=True)
class _Text:
    """An answer without marks of its beginning and end, and how its places become pixels."""

    text: str
    image_size: ImageSize
    vague_phrases: Collection[str]

    def to_pixels(self, bins: Sequence[str]) -> list[int]:
        """Return x, y, x, y, ...: the centers of bins, cut to whole pixels, in float32 as HF's."""
        per_bin = np.array([side / NUM_BINS for side in self.image_size], np.float32)
        pairs = np.array(bins, np.float32).reshape(-1, 2)
        return ((pairs + np.float32(0.5)) * per_bin).astype(np.int32).reshape(-1).tolist()


def _find_boxes(answer: _Text, pattern: re.Pattern[str]) -> list[tuple[str, list[int]]]:
    """Return (phrase, box) of each box of each phrase."""
    found = []
    for phrase in pattern.findall(answer.text):
        label = _LABEL.match(phrase)
        if label is not None:
            boxes = _BOX.findall(phrase)
            found += [(label.group().strip(), answer.to_pixels(box)) for box in boxes]
    return found


def _with_boxes(found: Sequence[tuple[str, list[int]]]) -> dict[str, Any]:
    labels = [label.encode("ascii", "ignore").decode("ascii") for label, _ in found]
    return {"bboxes": [box for _, box in found], "labels": labels}


def _parse_boxes(answer: _Text) -> dict[str, Any]:
    return _with_boxes(_find_boxes(answer, _PHRASE_WITH_BOXES))


def _parse_boxes_alone(answer: _Text) -> dict[str, Any]:
    return _with_boxes(_find_boxes(answer, _BOXES_ALONE))


def _parse_grounding(answer: _Text) -> dict[str, Any]:
    found = _find_boxes(answer, _PHRASE_WITH_BOXES)
    return _with_boxes([one for one in found if one[0] not in answer.vague_phrases])


def _parse_quad_boxes(answer: _Text) -> dict[str, Any]:
    found = _QUAD_BOX.findall(answer.text)
    return {
        "quad_boxes": [answer.to_pixels(bins) for _, *bins in found],
        "labels": [label.strip() for label, *_ in found],
    }


def _find_polygons(answer: _Text, pattern: re.Pattern[str]) -> dict[str, Any]:
    """Return, of each object, its polygons (x, y, x, y, ...) and its label."""
    polygons, labels = [], []
    for phrase in pattern.findall(answer.text):
        label = _POLYGON_LABEL.match(re.sub(rf"^{_ANY_LOC}", "", phrase, count=1))
        if label is None:
            continue
        has_groups = "<poly>" in phrase and "</poly>" in phrase
        for group in _POLYGON_GROUP.findall(phrase) if has_groups else [phrase]:
            outlines = [re.findall(_LOC, outline) for outline in _POLYGON.findall(group)]
            if outlines:
                # A last x without a y is left out.
                pairs = [bins[: len(bins) // 2 * 2] for bins in outlines]
                polygons.append([answer.to_pixels(bins) for bins in pairs])
                labels.append(label.group().strip())
    return {"polygons": polygons, "labels": labels}


def _parse_polygons_alone(answer: _Text) -> dict[str, Any]:
    return _find_polygons(answer, _POLYGONS_ALONE)


def _parse_boxes_or_polygons(answer: _Text) -> dict[str, Any]:
    boxes: dict[str, Any] = {"bboxes": [], "labels": []}
    polygons: dict[str, Any] = {"polygons": [], "labels": []}
    if "<poly>" in answer.text:
        polygons = _find_polygons(answer, _PHRASE_WITH_POLYGONS)
    else:
        boxes = _parse_boxes(answer)
    return {
        "bboxes": boxes["bboxes"],
        "bboxes_labels": boxes["labels"],
        "polygons": polygons["polygons"],
        "polygons_labels": polygons["labels"],
    }


_PARSERS: Mapping[str, Callable[[_Text], dict[str, Any]]] = MappingProxyType(
    {
        "ocr": _parse_quad_boxes,
        "description_with_bboxes": _parse_boxes,
        "phrase_grounding": _parse_grounding,
        "polygons": _parse_polygons_alone,
        "description_with_bboxes_or_polygons": _parse_boxes_or_polygons,
        "bboxes": _parse_boxes_alone,
    }
)
"""By HF's kind of answer (`tasks_answer_post_processing_type`); others are text."""


def parse_answer(
    text: str,
    *,
    task: str,
    kind: str,
    image_size: ImageSize,
    vague_phrases: Collection[str] = VAGUE_PHRASES,
) -> dict[str, Any]:
    """Return `{task: answer}`: a text, or lists of boxes, polygons and labels.

    Args:
        text: With the tokenizer's special tokens.
        task: As `<OD>`.
        kind: HF's name for what the task's answers hold, as `description_with_bboxes`.
        image_size: Of the original image: boxes are in its pixels.
        vague_phrases: Phrases that `<CAPTION_TO_PHRASE_GROUNDING>` leaves out.
    """
    parse = _PARSERS.get(kind)
    if parse is None:
        return {task: text.replace("<s>", "").replace("</s>", "").strip()}
    return {task: parse(_Text(_MARKS.sub("", text), image_size, vague_phrases))}
