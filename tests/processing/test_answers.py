"""Places in answers: every form is read, in pixels of the picture as it was sent."""

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.processing import answers
from mmjax.processing.answers import AnswerForm, AskedImage, KnownImages
from mmjax.processing.items.items import ImageSize

IMAGE = AskedImage(sent=ImageSize(2000, 1000), seen=ImageSize(560, 280))
FORMS: Mapping[str, AnswerForm] = {
    name: form for name, form in vars(answers).items() if isinstance(form, AnswerForm)
}
CAT = {"boxes": {"bboxes": [[200, 100, 1000, 500]], "labels": ["cat"]}}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (answers.JSON_IN_PIXELS, '```json\n[{"bbox_2d": [56, 28, 280, 140], "label": "cat"}]\n```'),
        (answers.JSON_IN_THOUSANDTHS, '{"bbox_2d": [100, 100, 500, 500], "text_content": "cat"}'),
        (answers.GLM, '<answer>{"bbox_2d": [100, 100, 500, 500], "label": "cat"}</answer>'),
        (
            answers.GLM,
            '<|begin_of_box|>[{"bbox_2d": [100, 100, 500, 500], "label": "cat"}]<|end_of_box|>',
        ),
        (answers.REF_AND_BOX, "<ref> cat</ref><box>(100,100),(500,500)</box>"),
        (answers.REF_AND_BOX, "the <ref>cat</ref> <box>[[100, 100, 500, 500]]</box>."),
        (
            answers.QWEN2_VL,
            "<|object_ref_start|>cat<|object_ref_end|><|box_start|>(100,100),(500,500)<|box_end|>",
        ),
        (answers.DEEPSEEK, "<|ref|>cat<|/ref|><|det|>[[100, 100, 500, 500]]<|/det|>"),
        (answers.DEEPSEEK_OCR, "<|det|>cat [100, 100, 500, 500]<|/det|>is"),
    ],
)
def test_a_box_of_every_form(form: AnswerForm, text: str):
    parts = 999 if "det" in text else 1000
    sent = ImageSize(2 * parts, parts)
    assert form.read(text, [AskedImage(sent, IMAGE.seen)]) == CAT


def test_labels_hold_for_all_boxes_behind_them():
    text = (
        "<|ref|>title<|/ref|><|det|>[[0, 999, 499, 500]]<|/det|>\n# A\n"
        "<|ref|>two\nlines<|/ref|><|det|>[[1,2,3,4], [ 10 , 20, 30, 40 ]]<|/det|>"
        "<|ref|>none<|/ref|><|det|>[[1, 2, 3]]<|/det|>of nothing<|det|>[[1, 2, 3, 4]]<|/det|>"
        "<|ref|>cut<|/ref|><|det|>[[1, 2, 3, 4]]"
    )
    found = answers.DEEPSEEK_OCR.read(text, [AskedImage(ImageSize(1998, 999), IMAGE.seen)])
    assert found == {
        "boxes": {
            "bboxes": [[0, 999, 998, 500], [2, 2, 6, 4], [20, 20, 60, 40], [2, 2, 6, 4]],
            "labels": ["title", "two\nlines", "two\nlines", ""],
        }
    }
    qwen = "<ref>cats</ref><box>(1,2),(3,4)</box><box>(5,6),(7,8)</box> on<box>(1,2),(3,4)</box>"
    found = answers.REF_AND_BOX.read(qwen, [IMAGE])
    assert found["boxes"]["labels"] == ["cats", "cats", ""]


def test_boxes_without_labels():
    glm = "the cats: <|begin_of_box|>[[100, 200,300,400], [0,0,500,999]]<|end_of_box|>."
    assert answers.GLM.read(glm, [IMAGE]) == {
        "boxes": {"bboxes": [[200, 200, 600, 400], [0, 0, 1000, 999]], "labels": ["", ""]}
    }
    assert answers.GLM.read("<|begin_of_box|>12<|end_of_box|> of [1,2,3,4]", [IMAGE]) == {}


@pytest.mark.parametrize(
    ("names", "label"),
    [
        ('"label": "\\ud83d\\ude00"', "\U0001f600"),
        ('"label": "cut \\ud83d"', "cut \ufffd"),
        ('"label": null, "text_content": "a"', "a"),
        ('"label": null', ""),
        ('"label": 7', "7"),
    ],
)
def test_labels_in_json_are_texts(names: str, label: str):
    found = answers.JSON_IN_THOUSANDTHS.read(f'{{"bbox_2d": [1, 2, 3, 4], {names}}}', [IMAGE])
    assert found["boxes"]["labels"] == [label]


def test_boxes_and_points_of_one_answer():
    text = (
        '[{"bbox_2d": [0, 0, 560, 280]}, {"point_2d": [280.0, 70], "label": "an {eye}"},'
        '{"point_2d": [56, 28], "label": "nose"}, {"bbox_2d": [1, 2, 3, '
    )
    assert answers.JSON_IN_PIXELS.read(text, [IMAGE]) == {
        "boxes": {"bboxes": [[0, 0, 2000, 1000]], "labels": [""]},
        "points": {"points": [[200.0, 100.0]], "labels": ["nose"]},
    }


def test_places_are_of_the_last_picture():
    other = AskedImage(ImageSize(10, 10), ImageSize(28, 28))
    text = "<ref>cat</ref><box>(100,100),(500,500)</box>"
    assert answers.REF_AND_BOX.read(text, [other, IMAGE]) == CAT


@pytest.mark.parametrize(
    "text",
    [
        '{"bbox_2d": "no"}',
        '{"bbox_2d": [1, 2, 3]}',
        '{"bbox_2d": [1, 2, 3, true]}',
        '{"bbox_2d": [1, 2, 3, NaN]}',
        '{"bbox_2d": [1, 2, 3, 1e999]}',
        '{"bbox_2d": [-1, 2, 3, 4]}',
        '{"bbox_2d": [1, 2, 3, 3000]}',
        '{"bbox_2d": [1, 2, 3, 4',
        '{"bbox_2d": ' + "[" * 100_000 + "}",
        "[{]}",
        "<box>(1,2),(3000,4)</box><box>(1,2)</box><box>(1,2),(3,4)",
        "f(1,2),(3,4)",
        '<point x="101" y="5">beyond</point><point x="1" y="">none</point>',
        "",
    ],
)
def test_what_is_no_place(text: str):
    for name, form in FORMS.items():
        assert form.read(text, [IMAGE]) == {}, name


def test_molmos_points():
    text = (
        '<point x="10.5" y="20" alt="a cat">cat</point> <points x1="1" y1="2" x2="100" y2="4"'
        ' alt="dogs">two dogs</points><point x="5" y="5" alt="it"/>'
    )
    assert answers.MOLMO.read(text, [IMAGE]) == {
        "points": {
            "points": [[210.0, 200.0], [20.0, 20.0], [2000.0, 40.0], [100.0, 50.0]],
            "labels": ["cat", "two dogs", "two dogs", "it"],
        }
    }


ONE = [AskedImage(ImageSize(width=200, height=100), ImageSize(1, 1))]


@pytest.mark.parametrize(
    ("text", "points", "labels", "ids"),
    [
        (
            'See <points coords="1 1 500 250 2 010 1000">two boats</points>.',
            [[100.0, 25.0], [2.0, 100.0]],
            ["two boats"] * 2,
            [1, 2],
        ),
        ('<points alt="a cat" coords="1 3 250 500"/>', [[50.0, 50.0]], ["a cat"], [3]),
        ('<tracks coords="1 7 000 000">it</tracks>', [[0.0, 0.0]], ["it"], [7]),
        ('<points coords="1 1 500 500', [], [], []),
        ('<points coords="2 1 500 500">of no image</points>', [], [], []),
        ('<points coords="1 1 1001 500">beyond</points>', [], [], []),
        (f'<points coords="{"1" * 5000} 1 500 500">of none</points>', [], [], []),
        (f'<points coords="1 {"1" * 5000} 500 500">of none</points>', [], [], []),
        ("no points", [], [], []),
    ],
)
def test_molmo_2s_points(text: str, points: Any, labels: list[str], ids: list[int]):
    expected = {"points": points, "labels": labels, "ids": ids, "images": [1] * len(ids)}
    assert answers.MOLMO_2.read(text, ONE) == ({"points": expected} if points else {})


def test_molmo_2s_points_of_several_images_are_each_ones_pixels():
    images = [*ONE, AskedImage(ImageSize(width=1000, height=10), ImageSize(1, 1))]
    text = '<points coords="1 1 500 500\t2 2 500 500 3 100 900">x</points>'
    found = answers.MOLMO_2.read(text, images)["points"]
    assert found["points"] == [[100.0, 50.0], [500.0, 5.0], [100.0, 9.0]]
    assert (found["images"], found["ids"]) == ([1, 2, 2], [1, 2, 3])


BOX = "<loc0256><loc0000><loc0512><loc1023>"
CODES = list(range(16))
MASK = "".join(f"<seg{code:03}>" for code in CODES)


@pytest.mark.parametrize(
    ("text", "boxes", "labels", "codes"),
    [
        (f"{BOX} car", [[0, 256, 2046, 512]], ["car"], None),
        (f"{BOX} a car ; {BOX} cat<eos>", [[0, 256, 2046, 512]] * 2, ["a car", "cat"], None),
        (f"{BOX} {MASK} car", [[0, 256, 2046, 512]], ["car"], [CODES]),
        (f"{BOX}{MASK} ; {BOX} cat", [[0, 256, 2046, 512]] * 2, ["", "cat"], [CODES, []]),
        ("<loc0001><loc0002><loc0003> car", [], [], None),
        ("no car", [], [], None),
    ],
)
def test_paligemmas_objects(text: str, boxes: Any, labels: list[str], codes: Any):
    found = {"bboxes": boxes, "labels": labels, **({} if codes is None else {"codes": codes})}
    image = AskedImage(ImageSize(width=2048, height=1024), ImageSize(224, 224))
    assert answers.PALIGEMMA.read(text, [image]) == ({"objects": found} if boxes else {})


PIECES = st.sampled_from(
    [
        *('<point x="1" y="2"', "/>", ">", "</point>", '{"bbox_2d": [', '{"point_2d": [', "]}"),
        *("<ref>", "</ref>", "<box>", "</box>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>"),
        *("<|begin_of_box|>", "<|end_of_box|>", "(1,2),(3,4)", "[1, 2, 3, 4]", "1 1 500 500"),
        *('<points coords="', '">', "<loc0001>" * 4, "<seg001>" * 16, "words", "\n", '"', "{", "]"),
    ]
)


@given(st.lists(PIECES, max_size=20).map("".join))
def test_any_answer_is_read(text: str):
    """And each list has one length."""
    for form in FORMS.values():
        for found in form.read(text, [IMAGE]).values():
            assert len({len(column) for column in found.values()}) == 1
            assert found["labels"]


@pytest.mark.parametrize("piece", ["<|ref|>a", "<|det|>", '{"bbox_2d": ', "<box>", "<point x"])
def test_a_long_answer_takes_no_longer_a_token(piece: str):
    """As a regular expression might that looks for an end behind each beginning."""

    def measure(count: int) -> float:
        began = perf_counter()
        for form in FORMS.values():
            form.read(piece * count, [IMAGE])
        return perf_counter() - began

    measure(100)
    assert measure(32_000) < 200 * measure(1000) + 0.5


def test_the_sizes_of_few_images_are_kept():
    known = KnownImages()
    known.capacity = 2
    for name in "ab":
        known[name] = IMAGE
    assert known.get("a") == IMAGE
    known["c"] = IMAGE
    assert [known.get(name) is not None for name in "abc"] == [True, False, True]
