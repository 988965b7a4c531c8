"""What vLLM's own processors (HF's, for families that vLLM dropped) made of prompts and pictures.

Token ids, placeholder ranges, `is_embed`, tensors' shapes and means: equal in every case.
"""

import json
from typing import Any

import numpy as np
import pytest

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.parity.reference import make_pixels
from mmjax.processing import BaseMultiModalProcessor, PlaceholderRange
from mmjax.processing.encoder_budget import MultiModalProfiler
from mmjax.processing.image_processors.affine import AFFINE_KEYS
from tests.families import FAMILIES
from tests.families.directories import GOLDEN, golden_processor
from tests.families.family import Family

EXPECTED = {
    name: json.loads((GOLDEN / name / "expected.json").read_text())
    for name, family in FAMILIES.items()
    if family.has_golden
}
"""What the others' published code made is compared where their models are."""
STEP = 1 / 255 / 0.22
"""One 8-bit step of a normalised pixel; where vLLM keeps raw bytes, one of them."""


def vllm_cases(*, is_refused: bool) -> list[Any]:
    return [
        pytest.param(FAMILIES[name], case, id=f"{name}-{case_name}")
        for name, expected in EXPECTED.items()
        for case_name, case in expected.get("cases", {}).items()
        if ("error" in case) is is_refused
    ]


def hf_cases() -> list[Any]:
    return [
        pytest.param(FAMILIES[name], case, id=f"{name}-{case_name}")
        for name, expected in EXPECTED.items()
        for case_name, case in expected.get("generation", {}).items()
    ]


@pytest.fixture(params=["uncached", "cached"])
def is_cached(request: pytest.FixtureRequest) -> bool:
    return request.param == "cached"


def make(family: Family, *, is_cached: bool) -> BaseMultiModalProcessor[Any]:
    cache = MultiModalProcessorOnlyCache(2**26) if is_cached else None
    return golden_processor(family.name, processor_cache=cache)


def images_of(case: dict[str, Any]) -> dict[str, Any]:
    # A noisy PNG of this picture was too large to keep: token ids hang on its size alone.
    paths = [GOLDEN / image.replace("vga_0.png", "vga_0.jpg") for image in case["images"]]
    return {"image": paths} if paths else {}


def to_range(expected: dict[str, Any]) -> PlaceholderRange:
    is_embed = expected["is_embed"]
    mask = None if is_embed is None else np.array(is_embed, dtype=bool)
    return PlaceholderRange(expected["offset"], expected["length"], mask)


def test_every_golden_directory_is_of_a_family():
    folders = {path.name for path in GOLDEN.iterdir() if path.is_dir()}
    assert folders - {"images", "quantized"} == EXPECTED.keys()


@pytest.mark.parametrize("name", [one for one in EXPECTED if "processed_by" in EXPECTED[one]])
def test_limits_are_vllms(name: str):
    processor = golden_processor(name)
    assert dict(processor.info.supported_mm_limits) == EXPECTED[name]["supported_mm_limits"]
    most = EXPECTED[name]["mm_max_tokens_per_item"]  # vLLM measures where a family declares none
    if most is not None:
        assert MultiModalProfiler(processor).get_mm_max_tokens_per_item(4096) == most


@pytest.mark.parametrize(("family", "case"), vllm_cases(is_refused=False))
def test_tokens_ranges_and_shapes_are_vllms(family: Family, case: dict[str, Any], is_cached: bool):
    processor = make(family, is_cached=is_cached)
    prompt = case["prompt"]
    if case["kind"] == "tokens":
        prompt = processor.info.get_tokenizer().encode(prompt)
    inputs = processor.apply(prompt, images_of(case))

    assert inputs.prompt_token_ids == case["prompt_token_ids"]
    expected = case["mm_placeholders"].get("image", [])
    ranges = inputs.mm_placeholders.get("image", [])
    assert ranges == [to_range(one) for one in expected]
    assert [one.get_num_embeds() for one in ranges] == [one["num_embeds"] for one in expected]
    for item, tensors in zip(
        inputs.mm_kwargs.get("image", []), case["mm_kwargs"].get("image", []), strict=True
    ):
        assert item is not None
        assert item.keys() - AFFINE_KEYS.values() == tensors.keys()
        pixels = make_pixels(item.get_data(), colours_last=family.colours_last)
        for key, tensor in tensors.items():
            data = np.asarray(pixels[key])
            assert list(data.shape) == tensor["shape"]
            if tensor["dtype"] != "torch.uint8":  # vLLM keeps these bytes, too
                assert f"torch.{data.dtype}" == tensor["dtype"]
                assert abs(data.mean() - tensor["mean"]) < STEP
            assert type(item[key].field).__name__ == tensor.get(
                "field", type(item[key].field).__name__
            )


@pytest.mark.parametrize(("family", "case"), vllm_cases(is_refused=True))
def test_what_vllm_refuses_is_refused(family: Family, case: dict[str, Any], is_cached: bool):
    with pytest.raises(AssertionError, match=r"0 `.*` placeholders but 1 image|Failed to apply"):
        make(family, is_cached=is_cached).apply(case["prompt"], images_of(case))


@pytest.mark.parametrize(("family", "case"), hf_cases())
def test_tokens_and_places_are_hfs(family: Family, case: dict[str, Any], is_cached: bool):
    processor = make(family, is_cached=is_cached)
    inputs = processor.apply(case["prompt"], images_of(case))
    token_ids = family.prompt_ids(inputs)
    assert token_ids == case["input_ids"]
    embedded = set(family.embed_token_ids(processor))
    ranges = inputs.mm_placeholders.get("image", [])
    assert len(ranges) == len(case["images"])
    places = [p for one in ranges for a, b in one.extract_embeds_range() for p in range(a, b + 1)]
    if ranges:
        assert places == [i for i, token_id in enumerate(token_ids) if token_id in embedded]
    tensors = make_pixels(inputs.mm_kwargs.get_data(), colours_last=family.colours_last)
    for key in family.tensors.keys() & case["inputs"].keys():
        assert list(np.shape(tensors[key])) == case["inputs"][key]["shape"]
        assert abs(np.mean(tensors[key]) - case["inputs"][key]["mean"]) < STEP
