"""LLaVA's own: the tower's features that are kept, other towers, checkpoints that lack a file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.errors import CheckpointError, RequestError
from mmjax.models.host_inputs import choose_features
from mmjax.parity.reference import make_pixels
from tests.families import FAMILIES
from tests.families.directories import edit_golden, golden_processor
from tests.kit import draw
from tests.processing.conftest import both_kinds

IMAGE, IMAGE_ID = "<image>", 998


FAMILY = FAMILIES["llava"]


def num_tokens(path: Path) -> int:
    """Process one picture, by text and by ids, and count what stands for it."""
    processor = golden_processor("llava", path=path)
    counts = set()
    for prompt in both_kinds(processor, f"look {IMAGE}?"):
        inputs = processor.apply(prompt, {"image": draw(90, 70)})
        (placeholder,) = inputs.mm_placeholders["image"]
        assert inputs.prompt_token_ids.count(IMAGE_ID) == placeholder.get_num_embeds()
        counts.add(placeholder.get_num_embeds())
    (count,) = counts
    assert processor.info.get_mm_max_tokens_per_item(4096) == {"image": count}
    return count


@pytest.mark.parametrize(("strategy", "expected"), [("default", 576), ("full", 577), ("class", 1)])
def test_a_strategy_keeps_features(strategy: str, expected: int):
    kept = choose_features(24 * 24 + 1, strategy)
    assert kept.stop - kept.start == expected


def test_an_unknown_strategy_is_named():
    with pytest.raises(CheckpointError, match="'most'; it must be one of default, full, class"):
        choose_features(577, "most")


def test_the_class_token_stays_under_full(tmp_path: Path):
    strategy = {"vision_feature_select_strategy": "full"}
    path = edit_golden("llava", tmp_path, config=strategy, processor_config=strategy)
    assert num_tokens(path) == 17


@pytest.mark.parametrize(("image_size", "patch_size", "expected"), [(56, 28, 4), (42, 14, 9)])
def test_counts_follow_the_tower(tmp_path: Path, image_size: int, patch_size: int, expected: int):
    path = edit_golden(
        "llava",
        tmp_path,
        config={"vision_config.image_size": image_size, "vision_config.patch_size": patch_size},
        processor_config={
            "patch_size": patch_size,
            "image_processor.crop_size": {"height": image_size, "width": image_size},
            "image_processor.size": {"shortest_edge": image_size},
        },
    )
    assert num_tokens(path) == expected


def siglip(folder: Path, strategy: str) -> Path:
    """Write a LLaVA whose tower has no class token."""
    return edit_golden(
        "llava",
        folder,
        config={
            "vision_config.model_type": "siglip_vision_model",
            "vision_feature_select_strategy": strategy,
        },
        processor_config={
            "num_additional_image_tokens": 0,
            "vision_feature_select_strategy": strategy,
            "image_processor.image_processor_type": "SiglipImageProcessor",
            "image_processor.size": {"height": 56, "width": 56},
            "image_processor.crop_size": None,
            "image_processor.do_center_crop": None,
        },
    )


@pytest.mark.parametrize(("strategy", "expected"), [("full", 16), ("default", 15)])
def test_siglip_has_no_class_token(tmp_path: Path, strategy: str, expected: int):
    path = siglip(tmp_path, strategy)
    assert num_tokens(path) == expected
    hf_processor: Any = LlavaProcessor(
        SiglipImageProcessorPil.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
        patch_size=14,
        vision_feature_select_strategy=strategy,
    )
    prompt, images = f"{IMAGE} a {IMAGE}", [draw(90, 70), draw(5, 9)]
    hf = hf_processor(text=prompt, images=images, return_tensors="np")
    ours = golden_processor("llava", path=path).apply(prompt, {"image": images})
    assert ours.prompt_token_ids == hf["input_ids"][0].tolist()
    pixels = make_pixels(ours.mm_kwargs.get_data())["pixel_values"]
    np.testing.assert_allclose(pixels, hf["pixel_values"], rtol=0, atol=1e-6)


def test_pictures_padded_to_squares_are_hfs(tmp_path: Path):
    """Some LLaVAs pad a picture with the mean colour, where others crop it."""
    path = edit_golden(
        "llava",
        tmp_path,
        processor_config={
            "image_processor.image_processor_type": "LlavaImageProcessorFast",
            "image_processor.do_pad": True,
        },
    )
    hf = LlavaImageProcessorPil.from_pretrained(path)([draw(90, 30)], return_tensors="np")
    ours = golden_processor("llava", path=path).apply(IMAGE, {"image": draw(90, 30)})
    pixels = make_pixels(ours.mm_kwargs.get_data())["pixel_values"]
    np.testing.assert_allclose(pixels, hf["pixel_values"], rtol=0, atol=1e-6)
    with pytest.raises(RequestError, match=r"9000x2 pixels; padded to a square it has 81000000"):
        golden_processor("llava", path=path).apply(IMAGE, {"image": draw(9000, 2)})


def test_what_an_old_checkpoint_lacks_comes_from_its_config(tmp_path: Path):
    """Without processor_config.json HF would know no patch size, and count no class token."""
    settings = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}}
    settings["crop_size"] = {"height": 56, "width": 56}
    path = edit_golden("llava", tmp_path, processor_config=None, preprocessor_config=settings)
    assert num_tokens(path) == 16
    whole, partial = golden_processor("llava"), golden_processor("llava", path=path)
    prompt, images = f"{IMAGE}\nwhat {IMAGE}", {"image": [draw(90, 70), draw(5, 9)]}
    assert partial.apply(prompt, images).mm_kwargs == whole.apply(prompt, images).mm_kwargs


def test_the_tokenizers_own_name_of_the_image_token_wins_as_in_hf(tmp_path: Path):
    path = edit_golden("llava", tmp_path, processor_config={"image_token": "<pad>"})
    assert num_tokens(path) == 16


@pytest.mark.parametrize("cache", [None, MultiModalProcessorOnlyCache(2**24)])
@pytest.mark.parametrize("rows", [16, 3])
def test_embeddings_stand_where_pictures_would(rows: int, cache: Any):
    processor = golden_processor("llava", processor_cache=cache, enable_mm_embeds=True)
    embeds = [torch.ones(rows, 64), torch.zeros(5, 64)]
    for prompt in both_kinds(processor, f"a {IMAGE} b {IMAGE}"):
        inputs = processor.apply(prompt, {"image": embeds})
        counts = [one.get_num_embeds() for one in inputs.mm_placeholders["image"]]
        assert counts == [rows, 5]
        assert inputs.prompt_token_ids.count(IMAGE_ID) == rows + 5
        items = [item.get_data() for item in inputs.mm_kwargs["image"] if item is not None]
        assert [np.asarray(item["image_embeds"]).shape for item in items] == [(rows, 64), (5, 64)]
