"""PaddleOCR-VL's files as published, which contradict each other in a key that nothing reads."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from mmjax.errors import CheckpointError
from mmjax.models.registry import create_processor
from tests.families.directories import edit_json
from tests.families.paddleocr_vl import PADDLEOCR_VL

IMAGE = Image.new("RGB", (84, 56), "red")
PROMPT = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>OCR:"


def write_published(folder: Path, depth: int) -> Path:
    """Write a checkpoint whose tower has the published keys of Qwen2-VL's."""
    copied = Path(shutil.copytree(PADDLEOCR_VL.path(), folder))
    tower = {"vision_config.temporal_patch_size": 2, "vision_config.tokens_per_second": 2}
    edit_json(copied / "config.json", tower)
    edit_json(copied / "preprocessor_config.json", {"temporal_patch_size": depth})
    return copied


def test_the_towers_patches_are_of_one_frame(tmp_path: Path):
    plain, published = PADDLEOCR_VL.path(), write_published(tmp_path / "model", 1)
    found = [create_processor(one).apply(PROMPT, {"image": [IMAGE]}) for one in (plain, published)]
    assert found[0].prompt_token_ids == found[1].prompt_token_ids


def test_deeper_patches_are_refused(tmp_path: Path):
    processor = create_processor(write_published(tmp_path / "model", 2))
    with pytest.raises(CheckpointError, match=r"`temporal_patch_size` of the image_processor is 2"):
        processor.apply(PROMPT, {"image": [IMAGE]})
