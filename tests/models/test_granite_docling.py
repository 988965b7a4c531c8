"""Granite for Docling beyond the laws: routes of a prompt's pages, its rule for dense pages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.granite_docling.modeling_granite_docling import (
    GraniteDoclingPositionEmbedding,
)

from mmjax import LLM, SamplingParams
from mmjax.errors import CheckpointError, RequestValueError
from mmjax.models.granite_docling.model import find_sinusoids
from mmjax.parity.reference import (
    generate_reference,
    load_reference,
    make_reference_inputs,
)
from mmjax.processing.encoder_budget import MultiModalProfiler
from tests.families import FAMILIES
from tests.families.directories import edit_json, golden_processor
from tests.families.family import hf_of
from tests.families.granite_docling import (
    FINE,
    HF_CLASSES,
    IMAGE,
    SIDE,
    TINY,
    draw_item,
    torch_inputs,
    write_files,
)
from tests.families.tiny import DrawnItem, Media, TinyModel
from tests.kit import draw
from tests.oracle import assert_close


@pytest.mark.parametrize(("width", "side"), [(4, 1), (1024, 8), (32, 16)])
def test_places_in_a_tile_are_told_as_by_hf(width: int, side: int):
    expected = GraniteDoclingPositionEmbedding(width, side).pos_embed.numpy()
    np.testing.assert_allclose(find_sinusoids(side, width), expected, rtol=0, atol=1e-7)


def test_pages_of_both_routes_share_a_prompt():
    """HF's class has one route for all pages of a prompt; each page is as HF has it alone."""

    def draw_by_turns(config: Any, media: Media) -> DrawnItem:
        return draw_item(config, media, is_fine=media.seed % 2 == 0)

    model = TinyModel(replace(TINY, draw_item=draw_by_turns))
    pages = (Media(0), Media(1), Media(2))
    found = model.paged.embed(model.draw_sample(pages))
    assert len(found) == 16 + 3 * 4 + 5 * 16
    expected = []
    for page in pages:
        inputs = torch_inputs(model.reference, model.draw_sample((page,)))
        del inputs["input_ids"], inputs["attention_mask"]
        with torch.no_grad():
            of_page = model.reference.model.get_image_features(**inputs)
        parts = [of_page.pooler_output, *of_page.deepstack_features]
        expected.append(torch.cat([one for (one,) in parts], dim=-1).numpy())
    assert_close({"rows": found}, {"rows": np.concatenate(expected)})


@pytest.mark.slow
def test_requests_of_both_routes_share_an_engine():
    family, page, text = FAMILIES["granite_docling"], draw(90, 70), f"{IMAGE} which color"
    reference = load_reference(family.checkpoint, family.architecture)
    expected, prompts = [], list[Any]()
    for kwargs in ({}, FINE):
        ids, hf = family.call_hf(text, [page], kwargs)
        taken = {name: hf[name] for name in ("pixel_values", "pixel_attention_mask")}
        taken |= {name: hf[name] for name in ("tile_fine_mask",) if kwargs}
        expected.append(list(generate_reference(reference, make_reference_inputs(ids, taken), 24)))
        media = {"multi_modal_data": {"image": page}, "mm_processor_kwargs": kwargs}
        prompts.append({"prompt": text, **media})
    assert expected[0] != expected[1]
    settings = {**family.llm_settings, "trust_request_mm_kwargs": True}
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(family.checkpoint, use_tqdm_on_load=False, **settings) as llm:
        for _ in ("cold", "warm"):
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected


# ---- the rule for dense pages --------------------------------------------------------------------


DENSE: dict[str, Any] = {"max_patches": 4, "dense_max_patches": 12, "dense_max_scale": 0.5}
RULES: dict[str, dict[str, Any]] = {
    "small": DENSE,
    "small and wide": {**DENSE, "dense_min_aspect": 1.3},
    "small and of some shapes": {**DENSE, "dense_min_aspect": 1.45, "dense_max_aspect": 1.7},
    "wide": {**DENSE, "dense_max_scale": 0.0, "dense_min_aspect": 1.2},
    "none": {**DENSE, "dense_max_scale": 0.0},
}
SIZES = [(56, 56), (230, 120), (300, 225), (480, 300), (900, 100), (640, 500), (200, 460), (90, 70)]


def write_with_rule(path: Path, rule: dict[str, Any]) -> Path:
    path = write_files(path)
    edit_json(path / "preprocessor_config.json", rule)
    return path


@pytest.mark.parametrize("name", RULES)
def test_pages_that_the_rule_is_for_have_hfs_tiles(name: str, tmp_path: Path):
    path = write_with_rule(tmp_path, RULES[name])
    hf = hf_of(*HF_CLASSES, lambda: path, image_seq_len=4)()
    processor = golden_processor("granite_docling", path=path)
    most = MultiModalProfiler(processor).get_mm_max_tokens_per_item(4096)["image"]
    counts = set[int]()
    for size in SIZES:
        image = draw(*size)
        expected = hf(text=[f"look {IMAGE}"], images=[image], return_tensors="np")
        found = processor.apply(f"look {IMAGE}", {"image": image})
        assert found.prompt_token_ids == expected["input_ids"][0].tolist()
        assert (
            found.mm_kwargs.get_data()["pixel_values"].shape == expected["pixel_values"].shape[1:]
        )
        counts.add(found.mm_placeholders["image"][0].get_num_embeds())
    assert (max(counts) > 5 * 4) == (name != "none"), "the rule gives no page more tiles"
    assert max(counts) <= most
    measured = MultiModalProfiler(processor).measure_mm_max_tokens_per_item(4096, {"image": 1})
    assert measured == {"image": most}


def test_the_largest_page_may_have_to_be_larger_than_its_tiles(tmp_path: Path):
    path = write_with_rule(tmp_path, {**DENSE, "dense_max_aspect": 2.0})
    size, most = golden_processor("granite_docling", path=path).info.find_largest_image()
    assert most == (12 + 1) * 4
    assert size.width * size.height > 12 * SIDE**2
    # With as many pixels as six tiles have, the rule is for no page.
    limited = golden_processor("granite_docling", path=path, max_image_pixels=6 * SIDE**2)
    assert limited.info.get_max_image_tokens() == (4 + 1) * 4


def test_the_rule_is_the_checkpoints():
    family = FAMILIES["granite_docling"]
    with pytest.raises(RequestValueError, match="`dense_max_patches`, which this model's process"):
        family.make_processor().apply(IMAGE, {"image": draw(9, 9)}, {"dense_max_patches": 48})


# ---- the fine route ------------------------------------------------------------------------------


def write_coarse(path: Path) -> Path:
    path = write_files(path)
    edit_json(path / "config.json", {"vision_config.use_fine_route": False})
    return path


def test_a_checkpoint_of_one_route_refuses_the_other(tmp_path: Path):
    path, media = write_coarse(tmp_path), {"image": draw(9, 9)}
    processor = golden_processor("granite_docling", path=path, trust_request_mm_kwargs=True)
    processor.apply(IMAGE, media)
    assert MultiModalProfiler(processor).get_mm_max_tokens_per_item(4096)["image"] == 4 * 10
    with pytest.raises(RequestValueError, match=r"`fine_route` is true in .* no such route"):
        processor.apply(IMAGE, media, FINE)
    edit_json(path / "preprocessor_config.json", FINE)
    with pytest.raises(
        CheckpointError, match="`fine_route` of the image processor is True, but by"
    ):
        golden_processor("granite_docling", path=path).info.get_hf_processor()


def test_a_route_is_true_or_false():
    processor = FAMILIES["granite_docling"].make_processor()
    with pytest.raises(RequestValueError, match=r"`fine_route` is 2 in .*; it must be true or fal"):
        processor.apply(IMAGE, {"image": draw(9, 9)}, {"fine_route": 2})


def test_an_operator_may_choose_the_route():
    served = FAMILIES["granite_docling"].make_processor(mm_processor_kwargs=FINE)
    (place,) = served.apply(IMAGE, {"image": draw(9, 9)}).mm_placeholders["image"]
    assert place.get_num_embeds() == 16
