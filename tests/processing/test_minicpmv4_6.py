"""MiniCPM-V 4.6's own: the largest picture, which frames are seen, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.video_utils import VideoMetadata

from mmjax.errors import CheckpointError, RequestError
from mmjax.models.minicpmv4_6.host_inputs import MiniCPMV46HostInputs
from mmjax.models.minicpmv4_6.slices import SecondSampling, SliceCutter
from mmjax.processing.image_processors.frames import Timing
from mmjax.processing.items.items import ImageSize
from tests.families.directories import edit_json, golden_processor
from tests.families.hf_videos import take_functions
from tests.families.minicpmv4_6 import IMAGE, MINICPMV4_6, tiny_config, write_files
from tests.kit import draw

PUBLISHED = SliceCutter(MiniCPMV4_6ImageProcessorPil(), patch_size=14, downsample_mode="16x")
SAMPLING = take_functions("minicpmv4_6", "sample_frames")


@settings(max_examples=400, deadline=None)
@given(width=st.integers(1, 6000), share=st.floats(1 / 16, 16), most=st.sampled_from([1, 4, 9]))
def test_no_published_picture_is_larger(width: int, share: float, most: int) -> None:
    size = ImageSize(width=width, height=max(1, round(width * share)))
    if max(size) <= 16 * min(size):
        assert PUBLISHED.count_tokens(size, most) <= PUBLISHED.find_largest(most)[1]


def test_a_published_picture_has_ten_parts_and_64_embeddings_or_so_of_each() -> None:
    size, num_tokens = PUBLISHED.find_largest(9)
    assert num_tokens == PUBLISHED.count_tokens(size, 9) == 720
    assert PUBLISHED.count_tokens(ImageSize(width=448, height=448), 9) == 64


@settings(max_examples=300, deadline=None)
@given(
    total=st.integers(1, 5000),
    fps=st.floats(0.05, 120.0),
    most=st.integers(1, 200),
    longer=st.sampled_from([None, 0.0, 0.4, 300.0]),
)
def test_the_frames_that_are_seen_are_hfs(
    total: int, fps: float, most: int, longer: float | None
) -> None:
    """HF's own rule, of the places that there are."""
    duration = total / fps + (longer or 0.0)
    known = VideoMetadata(total_num_frames=total, fps=fps, duration=duration)
    expected = SAMPLING.sample_frames(None, known, most, 1)
    said = None if longer is None else duration
    timing = Timing(fps=fps, total=total, places=np.arange(total), duration=said)
    seen = SecondSampling(max_num_frames=most).choose(timing)
    assert seen.tolist() == np.minimum(expected, total - 1).tolist()


def test_items_are_numbered_unless_the_checkpoint_says_no(tmp_path: Path) -> None:
    images, prompt = [draw(60, 60, seed) for seed in range(12)], IMAGE * 12
    numbered = MINICPMV4_6.make_processor()
    text = numbered.info.get_tokenizer().decode(
        numbered.apply(prompt, {"image": images}).prompt_token_ids
    )
    assert [f"<image_id>{n}</image_id><image>" in text for n in range(13)] == [True] * 12 + [False]
    path = write_files(tmp_path)
    edit_json(path / "preprocessor_config.json", {"use_image_id": False})
    plain = golden_processor("minicpmv4_6", path=path)
    ids = plain.apply(prompt, {"image": images}).prompt_token_ids
    assert "<image_id>" not in plain.info.get_tokenizer().decode(ids)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"max_slice_nums": 0}, "`max_slice_nums` is 0 .*; it must be a number of tiles"),
        ({"slice_mode": "no"}, "`slice_mode` is 'no' .* true or false"),
        ({"downsample_mode": "4x"}, "`downsample_mode`, which this model's processor does not"),
    ],
)
def test_kwargs_that_no_picture_can_be_cut_by_are_refused(kwargs: dict[str, Any], match: str):
    processor = MINICPMV4_6.make_processor()
    with pytest.raises(RequestError, match=match) as error:
        processor.apply(IMAGE, {"image": draw(90, 70)}, hf_processor_mm_kwargs=kwargs)
    assert error.value.status == 400


def test_slivers_are_refused() -> None:
    processor = MINICPMV4_6.make_processor()
    with pytest.raises(RequestError, match=r"image is 1200x2 pixels; .* at most 200 times"):
        processor.apply(IMAGE, {"image": draw(1200, 2)})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"merger_times": 2}, "`merger_times` 2, .* HF's processor"),
        ({"merge_kernel_size": [4, 4]}, r"`merge_kernel_size` \[4, 4\]"),
        ({"downsample_mode": "2x"}, "`downsample_mode` '2x'"),
        ({"insert_layer_id": 3}, "`insert_layer_id` of config.json is 3; .* layers 0 to 2"),
        ({"vision": {"window_kernel_size": [4, 4]}}, r"`window_kernel_size` \[4, 4\]"),
    ],
)
def test_towers_whose_embeddings_hfs_processor_does_not_write_are_refused(
    changes: dict[str, Any], match: str
):
    with pytest.raises(CheckpointError, match=match):
        MiniCPMV46HostInputs(tiny_config(**changes))
