"""The sizes of a prompt's pictures: as they were sent, and as the model saw them."""

import io
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import ExifTags, Image

from mmjax.cache import MultiModalProcessorOnlyCache
from mmjax.decoders.image_file import decode_image, read_image_header
from mmjax.decoders.limits import MediaLimits
from mmjax.processing.answers import AskedImage
from mmjax.processing.media.encoded import EncodedImage, PixelRange
from tests.families.deepseek_ocr2 import DEEPSEEK_OCR2
from tests.families.family import Family
from tests.families.florence2 import FLORENCE2
from tests.families.qwen2_vl import QWEN2_5_VL
from tests.kit import draw

PROMPT = "<|vision_start|><|image_pad|><|vision_end|>find"
TEXT = '<think>at {"bbox_2d": [0, 0, 1, 1]}</think>{"bbox_2d": [28, 14, 56, 28], "label": "it"}'


def encode(width: int, height: int, **options: Any) -> EncodedImage:
    file = io.BytesIO()
    draw(width, height).save(file, "PNG")
    return EncodedImage(file.getvalue(), MediaLimits(), **options)


@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "late PNG"])
def test_headers_say_how_large_the_upright_picture_is(kind: str, orientation: int | None):
    """Where they do not, they say so."""
    exif = Image.Exif()
    if orientation is not None:
        exif[ExifTags.Base.Orientation] = orientation
    file = io.BytesIO()
    draw(9, 5).save(file, kind.removeprefix("late "), exif=exif)
    data = file.getvalue()
    if kind == "late PNG" and orientation is not None:
        data = move_exif_to_the_end(data)
    found = read_image_header(data, MediaLimits()).upright_size
    assert found in (decode_image(data, MediaLimits())[0].size, None)
    assert (found is None) == (kind == "TIFF" or ("PNG" in kind and orientation is not None))


def move_exif_to_the_end(data: bytes) -> bytes:
    """Return a PNG whose EXIF stands behind its pixels."""
    start = data.index(b"eXIf") - 4
    stop = start + 12 + int.from_bytes(data[start : start + 4], "big")
    end = data.index(b"IEND") - 4
    return data[:start] + data[stop:end] + data[start:stop] + data[end:]


def find_images(inputs: Any) -> list[AskedImage]:
    return inputs.parse_answer.keywords["images"]


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"min_pixels": 40_000}, {"max_pixels": 3136}, {"size": {"shortest_edge": 6000}}],
)
@pytest.mark.parametrize("width", [5, 28, 29, 70, 301])
@pytest.mark.parametrize("height", [28, 97, 300])
def test_a_picture_is_seen_as_large_as_its_grid(kwargs: Any, width: int, height: int):
    processor = QWEN2_5_VL.make_processor()
    prepared = processor.prepare(PROMPT, {"image": draw(width, height)}, kwargs)
    (image,) = find_images(prepared)
    inputs = processor.commit(prepared)
    _, rows, columns = np.asarray(inputs.mm_kwargs["image"][0]["image_grid_thw"].data).tolist()
    side = processor.info.get_hf_config().vision_config.patch_size
    assert image == ((width, height), (columns * side, rows * side))


def test_boxes_are_pixels_of_the_picture_as_it_was_sent():
    processor = QWEN2_5_VL.make_processor()
    picture = encode(200, 100, pixel_range=PixelRange(most=50 * 100))
    prepared: Any = processor.prepare(PROMPT, {"image": picture}, {"max_pixels": 56 * 84})
    assert find_images(prepared) == [((200, 100), (84, 28))]
    token_ids = processor.info.get_tokenizer().encode(TEXT, add_special_tokens=False)
    assert prepared.parse_answer(token_ids) == {
        "boxes": {"bboxes": [[66, 50, 133, 100]], "labels": ["it"]}
    }
    cut_off = processor.info.get_tokenizer().encode(
        "\n" + TEXT.partition("</think>")[0], add_special_tokens=False
    )
    assert prepared.parse_answer(cut_off) == {}
    assert processor.prepare("find", {}).parse_answer is None


@pytest.mark.parametrize("is_text", [True, False])
def test_boxes_amid_reasoning_that_the_prompt_has_opened_are_none(is_text: bool):
    processor = QWEN2_5_VL.make_processor()
    encode_text = partial(processor.info.get_tokenizer().encode, add_special_tokens=False)
    prompt = f"{PROMPT}<think>\n"
    given = prompt if is_text else encode_text(prompt)
    prepared: Any = processor.prepare(given, {"image": encode(200, 100)})
    reasoning, end, answer = TEXT.removeprefix("<think>").partition("</think>")
    assert prepared.parse_answer(encode_text(reasoning)) == {}
    assert prepared.parse_answer(encode_text(reasoning + end + answer))["boxes"]["labels"] == ["it"]


@pytest.mark.parametrize(
    ("family", "prompt"),
    [
        (QWEN2_5_VL, PROMPT),
        (DEEPSEEK_OCR2, "<image>find"),
        (FLORENCE2, "<OD>"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_known_picture_is_not_decoded_for_its_size(family: Family, prompt: str):
    """Nor does one that came as its id alone lack it."""
    processor = family.make_processor(processor_cache=MultiModalProcessorOnlyCache(2**26))
    names = {"image": ["mine"]}
    first: Any = processor.prepare(prompt, {"image": encode(90, 70)}, mm_uuids=names)
    processor.commit(first)
    for data in ({"image": encode(90, 70)}, {"image": [None]}):
        with patch.object(EncodedImage, "decode", side_effect=AssertionError("it is known")):
            again: Any = processor.prepare(prompt, data, mm_uuids=names)
        assert again.parse_answer.keywords == first.parse_answer.keywords
