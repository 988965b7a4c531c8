"""MiniCPM-OCR's own: which small pictures are scaled up, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmjax.errors import CheckpointError, RequestError
from mmjax.models.minicpmv4_6.glyphs import find_threshold, find_upsize
from tests.families.directories import edit_json, golden_processor
from tests.families.minicpmv4_6 import IMAGE, MINICPM_OCR, take_ocr_processor, write_files
from tests.kit import draw

HF = take_ocr_processor()


def write_letters(size: tuple[int, int], letter: tuple[int, int], colours: Any) -> Image.Image:
    """Return a page of dark or light bars, one as large as the other."""
    pixels = np.full((size[1], size[0], 3), colours[0], np.uint8)
    for top in range(2, size[1] - letter[1], letter[1] + 3):
        for left in range(2, size[0] - letter[0], letter[0] + 3):
            pixels[top : top + letter[1], left : left + letter[0]] = colours[1]
    return Image.fromarray(pixels)


def test_small_dense_letters_are_scaled_up_dark_or_light() -> None:
    for colours in ((250, 3), (3, 250)):
        assert find_upsize(write_letters((90, 80), (5, 9), colours), 448) == 448
        assert find_upsize(write_letters((90, 80), (5, 14), colours), 448) is None, "large"
    assert find_upsize(write_letters((90, 80), (40, 9), (250, 3)), 448) is None, "few"
    assert find_upsize(draw(60, 60), 448) == 84, "tiny"
    assert find_upsize(Image.new("RGB", (90, 80)), 448) is None, "nothing"


def test_thresholds_are_opencvs() -> None:
    """As OpenCV 5.0 gives them."""
    known = {
        9: [0, 0, 9, 200],
        0: [7, 7],
        62: [10, 12, 60, 61, 62, 200],
        91: [5, 40, 40, 90, 91, 250, 251, 251],
    }
    for expected, levels in known.items():
        assert find_threshold(np.array([levels], np.uint8)) == expected


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(8, 260), st.integers(8, 260)),
    letter=st.tuples(st.integers(1, 12), st.integers(1, 16)),
    colours=st.sampled_from([(250, 3), (3, 250), ((250, 240, 200), (30, 90, 10))]),
    upsize=st.sampled_from(["always", "never", "adaptive"]),
    most=st.sampled_from([1, 4, 9]),
)
def test_pages_are_cut_as_hfs(
    size: tuple[int, int], letter: tuple[int, int], colours: Any, upsize: str, most: int
) -> None:
    page = write_letters(size, letter, colours)
    cutter = MINICPM_OCR.make_processor().info.get_image_processor()
    kwargs = {"max_slice_nums": most, "small_image_upsize": upsize}
    found = cutter([page], **kwargs)
    hf = HF(patch_size=8, scale_resolution=96, do_rescale=False, do_normalize=False, **kwargs)
    expected = hf([page], return_tensors="np")
    assert found["target_sizes"].tolist() == expected["target_sizes"].tolist()
    patches = expected["pixel_values"][0].reshape(3, 8, -1, 8).transpose(2, 0, 1, 3)
    assert (found["pixel_values"] == patches).all()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"small_image_upsize": "seldom"}, "`small_image_upsize` .* is 'seldom'; .* `adaptive`"),
        ({"scale_resolution": 80}, "`scale_resolution` .* is 80; it must be 84 or more"),
        ({"downsample_mode": "16x"}, "`downsample_mode` .* is '16x', but .*'4x'"),
    ],
)
def test_settings_that_no_picture_is_cut_by_are_refused(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    path = write_files(tmp_path, "minicpm_ocr")
    edit_json(path / "preprocessor_config.json", changes)
    with pytest.raises(CheckpointError, match=match):
        golden_processor("minicpm_ocr", path=path).info.get_hf_processor()


def test_files_may_leave_out_that_patches_are_joined_by_4(tmp_path: Path) -> None:
    path = write_files(tmp_path, "minicpm_ocr")
    for name in ("preprocessor_config", "video_preprocessor_config"):
        edit_json(path / f"{name}.json", {"downsample_mode": None, "small_image_upsize": None})
    parts = golden_processor("minicpm_ocr", path=path).info.get_hf_processor()
    assert (parts.image_processor.upsize, parts.video_processor.unit) == ("always", 16)


def test_a_request_says_whether_small_pictures_are_scaled_up() -> None:
    processor = MINICPM_OCR.make_processor()
    numbers = {
        upsize: len(
            processor.apply(
                IMAGE,
                {"image": draw(70, 40)},
                hf_processor_mm_kwargs={"small_image_upsize": upsize},
            ).prompt_token_ids
        )
        for upsize in ("always", "never")
    }
    assert numbers["never"] < numbers["always"]
    with pytest.raises(RequestError, match=r"`small_image_upsize` is 'no' .* be `always`"):
        processor.apply(
            IMAGE, {"image": draw(70, 40)}, hf_processor_mm_kwargs={"small_image_upsize": "no"}
        )
