"""Granite 4 Vision beyond the laws: Q-Formers over windows, decoders, towers with a class."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.granite4_vision.modeling_granite4_vision import (
    Granite4VisionWindowQFormerDownsampler,
)
from transformers.models.granite4_vision.processing_granite4_vision import Granite4VisionProcessor

from mmjax.connectors.qformer import QFormerConfig, WindowQFormer
from mmjax.errors import CheckpointError
from mmjax.layers.module import bind, build_abstract
from mmjax.models.model_source import load_model_config
from mmjax.models.text_model import build_text_model
from mmjax.processing.items.items import ImageSize
from tests.families import FAMILIES
from tests.families.directories import edit_json, golden_processor
from tests.families.family import hf_of
from tests.families.granite4_vision import (
    RATE,
    LlavaNextImageProcessorPil,
    tiny_config,
    write_files,
)
from tests.oracle import assert_close, fill_with_unit_norms, params_of

WINDOWS = [("2/4", None), ("2/4", 0), ("2/4", 1), ("2/4", 2), ("2/4", 3), ("3/4", None)]


@pytest.mark.parametrize(("rate", "corner"), [*WINDOWS, ("1/8", None), ("5/8", None)])
def test_windows_are_read_as_by_hf(rate: str, corner: int | None):
    """Of 8 x 8 patches: several windows of several queries, and one that has no whole squares."""
    config = tiny_config(vision={"image_size": 56}, downsample_rate=rate)
    reference = Granite4VisionWindowQFormerDownsampler(config, spatial_offset=corner).eval()
    fill_with_unit_norms(reference)
    query_side, window_side = map(int, rate.split("/"))

    def make(hf_config: Any, *, dtype: Any) -> WindowQFormer:
        return WindowQFormer(
            QFormerConfig.from_hf(hf_config.qformer_config),
            hf_config.text_config.hidden_size,
            window=(query_side, window_side),
            corner=corner,
            dtype=dtype,
        )

    graphdef, abstract = build_abstract(make, config, dtype=jnp.float32)
    patches = np.random.default_rng(0).normal(size=(2, 64, 128)).astype(np.float32)
    ours = bind(graphdef, params_of(reference, abstract, ()))(jnp.asarray(patches))
    with torch.no_grad():
        expected = reference(torch.from_numpy(patches)).numpy()
    assert expected.shape == (2, (8 // window_side * query_side) ** 2, 32)
    assert_close({"out": np.asarray(ours)}, {"out": expected})


def test_a_tower_with_a_class_token_gives_hf_tokens(tmp_path: Path):
    path, default = write_files(tmp_path), {"vision_feature_select_strategy": "default"}
    edit_json(path / "config.json", {"vision_config.model_type": "clip_vision_model", **default})
    own = {"patch_size": 7, "num_additional_image_tokens": 1, "downsample_rate": RATE, **default}
    edit_json(path / "processor_config.json", own)
    hf_processor = hf_of(Granite4VisionProcessor, LlavaNextImageProcessorPil, lambda: path, **own)()
    images = [
        Image.new("RGB", size, "red") for size in ((300, 90), (31, 200), (1, 240), (113, 111))
    ]
    prompt = "<image> and <image> or <image>, not <image>"
    expected = hf_processor(text=[prompt], images=images, return_tensors="np")
    found = golden_processor("granite4_vision", path=path).apply(prompt, {"image": images})
    assert found.prompt_token_ids == expected["input_ids"][0].tolist()


def test_the_largest_picture_is_planned_for():
    info = FAMILIES["granite4_vision"].make_processor().info
    size, most = info.find_largest_image()
    assert (size, most) == (ImageSize(width=112, height=112), 16 + 8 * (8 + 1))


def test_a_granite_is_read_under_its_own_name_and_a_hybrid_is_refused(tmp_path: Path):
    """The published config.json of 4.1 calls its decoder `granite`; HF's class reads any as one."""
    path = write_files(tmp_path)
    edit_json(path / "config.json", {"text_config.model_type": "granite"})
    build_abstract(build_decoder, load_model_config(str(path)).hf_config, dtype=jnp.float32)
    edit_json(path / "config.json", {"text_config.model_type": "granitemoehybrid"})
    with pytest.raises(CheckpointError, match=r"model_type` is `granitemoehybrid`, a"):
        build_abstract(build_decoder, load_model_config(str(path)).hf_config, dtype=jnp.float32)


def build_decoder(hf_config: Any, *, dtype: Any) -> Any:
    return build_text_model(hf_config, dtype=dtype)
