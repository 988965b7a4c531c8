"""Pixtral's prompts under LLaVA's name: rows of `[IMG]`, a mark behind each, pictures as HF's."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from mmjax.errors import CheckpointError
from mmjax.parity.reference import make_pixels
from mmjax.processing.encoder_budget import MultiModalProfiler
from tests.families import FAMILIES
from tests.families.directories import golden_processor
from tests.families.pixtral import PIXTRAL_EDGE, PIXTRAL_PATCH, write_pixtral
from tests.kit import draw
from tests.processing.conftest import both_kinds

IMAGE, BREAK, END = 1000, 1001, 1002
SIZES = [(1, 1), (37, 211), (640, 480), (56, 56), (90, 14), (14, 15)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pixtral(tmp_path_factory.mktemp("pixtral"))


FAMILY = FAMILIES["pixtral"]


def grid_of(width: int, height: int) -> tuple[int, int]:
    """Return rows and columns, by the formula of the published processor."""
    ratio = max(width / PIXTRAL_EDGE, height / PIXTRAL_EDGE, 1.0)
    sides = (
        (math.floor(height / ratio), math.floor(width / ratio)) if ratio > 1 else (height, width)
    )
    rows, columns = ((side - 1) // PIXTRAL_PATCH + 1 for side in sides)
    return rows, columns


def marked(rows: int, columns: int) -> list[int]:
    return ([IMAGE] * columns + [BREAK]) * (rows - 1) + [IMAGE] * columns + [END]


@pytest.mark.parametrize("num_images", [0, 1, 2, 6])
def test_rows_are_marked_and_pixels_are_hfs(processor: Any, path: Path, num_images: int):
    images = [draw(*size, seed) for seed, size in enumerate(SIZES[:num_images])]
    prompt = "look " + " and ".join(["[IMG]"] * num_images) + " what?"
    tokenizer = processor.info.get_tokenizer()
    text = "look " + " and ".join(
        "".join(tokenizer.convert_ids_to_tokens(marked(*grid_of(*size))))
        for size in SIZES[:num_images]
    )
    expected = tokenizer.encode(text + " what?")
    hf = PixtralImageProcessorPil.from_pretrained(path)
    for kind in both_kinds(processor, prompt):
        inputs = processor.apply(kind, {"image": images} if images else {})
        assert inputs.prompt_token_ids == expected
        places = inputs.mm_placeholders.get("image", [])
        assert [one.length for one in places] == [
            len(marked(*grid_of(*size))) for size in SIZES[:num_images]
        ]
        for place, item, image in zip(
            places, inputs.mm_kwargs.get("image", []), images, strict=True
        ):
            rows, columns = grid_of(*image.size)
            assert place.get_num_embeds() == rows * columns
            shown = np.array(expected)[place.offset : place.offset + place.length]
            np.testing.assert_array_equal(place.is_embed, shown == IMAGE)
            alone = hf([image], return_tensors="np")["pixel_values"][0]
            pixels = make_pixels(item.get_data())["pixel_values"]
            np.testing.assert_allclose(pixels, alone, rtol=0, atol=1e-6)


def test_the_dummy_input_is_the_maximum(processor: Any):
    inputs = MultiModalProfiler(processor).get_dummy_mm_inputs(
        {"image": 2}, max_num_batched_tokens=1024
    )
    assert MultiModalProfiler(processor).get_mm_max_tokens_per_item() == {"image": 16}
    assert [one.get_num_embeds() for one in inputs.mm_placeholders["image"]] == [16, 16]


def test_a_request_may_ask_for_smaller_pictures(path: Path):
    processor = golden_processor("llava", path=path, trust_request_mm_kwargs=True)
    for longest, expected in [(28, 4), (56, 16)]:
        kwargs = {"size": {"longest_edge": longest}}
        inputs = processor.apply("[IMG]", {"image": draw(60, 60)}, hf_processor_mm_kwargs=kwargs)
        assert inputs.mm_placeholders["image"][0].get_num_embeds() == expected


def test_a_sliver_that_fits_is_one_row(processor: Any):
    assert processor.apply("[IMG]", {"image": draw(56, 1)}).prompt_token_ids[1:] == marked(1, 4)


@pytest.mark.parametrize(
    ("edits", "match"),
    [
        ({"image_token_index": 7}, r"`\[IMG\]` is token 1000, but `image_token_index` .* is 7"),
        (
            {"vision_config.patch_size": 7},
            "`patch_size` of processor_config.json is 14, but config.json has 7",
        ),
        ({"vision_feature_select_strategy": "default"}, "must be `full` with a `pixtral` tower"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_named(
    tmp_path: Path, edits: dict[str, Any], match: str
):
    processor = golden_processor("llava", path=write_pixtral(tmp_path, **edits))
    with pytest.raises(CheckpointError, match=match):
        processor.apply("[IMG]", {"image": draw(20, 20)})


def test_a_tokenizer_without_the_marks_is_named(tmp_path: Path):
    path = write_pixtral(tmp_path)
    settings = '{"patch_size": 14, "image_break_token": "[ROW]"}'
    (path / "processor_config.json").write_text(settings)
    with pytest.raises(CheckpointError, match=r"does not know `\[ROW\]`"):
        golden_processor("llava", path=path).apply("[IMG]", {"image": draw(20, 20)})
