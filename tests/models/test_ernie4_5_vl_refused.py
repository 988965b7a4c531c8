"""What of ERNIE 4.5 VL is refused, by its name."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import jax.numpy as jnp
import pytest

from mmjax.errors import CheckpointError, RequestError
from mmjax.layers.module import build_abstract
from mmjax.models.ernie4_5_vl.model import Ernie4_5_VLMoeForConditionalGeneration
from mmjax.models.model_source import load_model_config
from tests.families.ernie4_5_vl import ERNIE4_5_VL, make_rope, tiny_config
from tests.kit import draw_video


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"text": {"use_bias": True}}, "`use_bias`"),
        (
            {"text": {"rope_parameters": {**make_rope(16), "mrope_section": [2, 3, 3]}}},
            "as many frequencies of rows as of columns",
        ),
        (
            {"text": {"rope_parameters": {**make_rope(16), "mrope_section": [2, 2, 2]}}},
            "its sum must be 8",
        ),
        ({"vision": {"temporal_merge_size": 4}}, "`vision_config.temporal_merge_size` is 4"),
    ],
)
def test_a_key_that_would_change_the_mathematics_is_refused(settings: Any, match: str):
    config = tiny_config(**settings)
    with pytest.raises(CheckpointError, match=match):
        build_abstract(Ernie4_5_VLMoeForConditionalGeneration, config, dtype=jnp.float32)


def test_config_json_in_baidus_own_layout_is_refused(tmp_path: Path):
    folder = Path(copytree(ERNIE4_5_VL.path(), tmp_path / "own"))
    (folder / "config.json").write_text(json.dumps({"model_type": "ernie4_5_moe_vl"}))
    with pytest.raises(CheckpointError, match="`ernie4_5_moe_vl`"):
        load_model_config(str(folder))


def test_videos_are_refused():
    processor = ERNIE4_5_VL.make_processor()
    with pytest.raises(RequestError, match="video"):
        processor.apply("what", {"video": [draw_video(4, 56, 56)]})
