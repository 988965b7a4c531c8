"""GLM-V's own beside the laws: which frames of a video are seen, and what is written of them.

What HF's two video processors decide by is taken out of their source, and is the reference.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.video_utils import VideoMetadata

from mmjax.errors import RequestError
from mmjax.models.glm4v.processor import Glm4vSampling, Glm46VSampling
from tests.families.glm4v import GLM4V, GLM4V_MOE, GLM46V, VIDEO
from tests.families.hf_videos import take_functions
from tests.kit import draw_video

SAMPLINGS = {"glm4v": Glm4vSampling(), "glm46v": Glm46VSampling()}
SETTINGS = SimpleNamespace(fps=2, max_duration=300, temporal_patch_size=2)
"""Of HF's classes, where a checkpoint says nothing."""


@pytest.mark.parametrize("folder", SAMPLINGS)
@pytest.mark.parametrize("total", [1, 2, 3, 5, 9, 47, 48, 200, 5000])
@pytest.mark.parametrize("fps", [1.0, 2.0, 2.5, 24.0, 29.97, 59.94])
@pytest.mark.parametrize("duration", [None, 1.7, 31.0, 299.5, 2500.0])
def test_sampled_frames_are_hfs(folder: str, total: int, fps: float, duration: float | None):
    metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=duration)
    wanted = take_functions(folder, "sample_frames").sample_frames(SETTINGS, metadata)
    known = {"fps": fps, "duration": duration}
    found, _ = SAMPLINGS[folder].select(np.arange(total), known)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("asked", [0.3, 1, 2.5, 29.97, 48, 100])
@pytest.mark.parametrize("fps", [0.5, 24.0, 29.97])
def test_frames_are_sampled_as_a_request_says(asked: float, fps: float):
    metadata = VideoMetadata(total_num_frames=300, fps=fps)
    hf = take_functions("glm4v", "sample_frames")
    found, _ = Glm4vSampling().asked({"fps": asked}).select(np.arange(300), {"fps": fps})
    np.testing.assert_array_equal(found, hf.sample_frames(SETTINGS, metadata, fps=asked))
    most, _ = Glm4vSampling().asked({"fps": 1e6}).select(np.arange(300), {"fps": fps})
    assert len(most) == 300


@pytest.mark.parametrize(
    ("family", "written"),
    [(GLM4V, "<|end_of_image|>1"), (GLM46V, "1.5 seconds"), (GLM4V_MOE, "1.5 seconds")],
)
def test_the_files_decide_what_is_written_of_a_second(family: Any, written: str):
    processor = family.make_processor(enable_mm_embeds=True)
    known = {"fps": 2.0, "total_num_frames": 9, "frames_indices": [0, 1, 3, 4]}
    text = processor.info.get_tokenizer().decode(
        processor.apply(VIDEO, {"video": [(draw_video(4, 60, 60), known)]}).prompt_token_ids
    )
    assert text.endswith(f"{written}<|end_of_video|>")
    embeds = {
        "video_embeds": np.ones((8, 32), np.float32),
        "video_grid_thw": np.array([[2, 4, 4]]),
        "timestamps": np.array([0.0, 1.5]),
    }
    inputs = processor.apply(VIDEO, {"video": embeds})
    assert (
        processor.info.get_tokenizer()
        .decode(inputs.prompt_token_ids)
        .endswith(f"{written}<|end_of_video|>")
    )
    assert inputs.mm_placeholders["video"][0].get_num_embeds() == 8


def test_what_is_refused():
    video = {"video": [draw_video(4, 60, 60)]}
    with pytest.raises(RequestError, match=r"`fps` is -1"):
        GLM4V.make_processor().apply(VIDEO, video, hf_processor_mm_kwargs={"fps": -1})
    for family, name in ((GLM4V, "num_frames"), (GLM46V, "fps")):
        info = family.make_processor().info
        with pytest.raises(RequestError, match=name) as caught:
            info.check_mm_kwargs({name: 2})
        assert caught.value.status == 400
