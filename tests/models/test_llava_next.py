"""LLaVA-NeXT beyond the laws: files that contradict each other, CLIP's tower, logits' divisor."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from mmjax.errors import RequestError
from mmjax.parity.departures import obeying
from mmjax.processing.items.items import ImageSize
from tests.families import FAMILIES
from tests.families.directories import edit_json, golden_processor
from tests.families.family import hf_of
from tests.families.llava_next import LlavaNextImageProcessorPil, tiny_config, write_files

CLIP = {"vision_config.model_type": "clip_vision_model", "vision_feature_layer": -2}


def test_a_tower_with_a_class_token_gives_hf_tokens(tmp_path: Path):
    """As the files of `llava-hf/llava-v1.6-mistral-7b-hf` say it."""
    path, default = write_files(tmp_path), {"vision_feature_select_strategy": "default"}
    edit_json(path / "config.json", {**CLIP, **default})
    own = {"patch_size": 14, "num_additional_image_tokens": 1, **default}
    edit_json(path / "processor_config.json", own)
    edit_json(path / "preprocessor_config.json", {"size": {"shortest_edge": 56}})
    hf_processor = hf_of(LlavaNextProcessor, LlavaNextImageProcessorPil, lambda: path, **own)()
    images = [
        Image.new("RGB", size, "red") for size in ((300, 90), (31, 200), (1, 240), (113, 111))
    ]
    prompt = "<image> and <image> or <image>, not <image>"
    expected = hf_processor(text=[prompt], images=images, return_tensors="np")
    found = golden_processor("llava_next", path=path).apply(prompt, {"image": images})
    assert found.prompt_token_ids == expected["input_ids"][0].tolist()


def test_embeddings_have_the_rows_of_some_picture():
    processor = FAMILIES["llava_next"].make_processor(enable_mm_embeds=True)
    most = processor.info.get_max_image_tokens()
    assert most == 16 + 8 * (8 + 1)
    for rows in (15, most + 1):
        with pytest.raises(RequestError, match=f"have {rows} rows; an image has 16, those of its"):
            processor.info.check_num_embeds("image", rows)


def test_a_picture_fills_the_canvas_that_is_planned_for():
    """`select_best_resolution` of the largest one's size is that size."""
    size, _ = FAMILIES["llava_next"].make_processor().info.find_largest_image()
    assert size == ImageSize(width=112, height=112)


def test_hfs_class_leaves_out_what_logits_are_divided_by():
    """Granite's decoder alone divides: tests/language/test_decoders.py compares that."""
    family = FAMILIES["llava_next"]
    assert family.tiny is not None
    model = family.tiny.make_reference(config=tiny_config(text={"logits_scaling": 4.0}))
    ids = torch.arange(5, 12)[None]
    with torch.no_grad():
        ignored = model(input_ids=ids).logits
        with obeying(model, {"logits_scaling": 4.0}):
            obeyed = model(input_ids=ids).logits
    assert torch.equal(obeyed * 4, ignored)
