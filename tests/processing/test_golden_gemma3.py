"""What vLLM's own processor made of the same prompts and pictures: equal in every case."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmjax.cache.processor_cache import MultiModalProcessorOnlyCache
from mmjax.processing import PlaceholderRange
from tests.processing import gemma3

GOLDEN = Path(__file__).parent.parent / "golden" / "gemma3"
IMAGES = GOLDEN.parent
CASES = json.loads((GOLDEN / "expected.json").read_text())["cases"]
GOOD = {name: case for name, case in CASES.items() if "error" not in case}

STEP = 1 / 255 / 0.5
"""One 8-bit step of a normalised pixel."""


@pytest.fixture(params=["uncached", "cached"])
def processor(request: pytest.FixtureRequest) -> Any:
    cache = MultiModalProcessorOnlyCache(2**26) if request.param == "cached" else None
    return gemma3.make_processor(GOLDEN, processor_cache=cache)


def to_range(expected: dict[str, Any]) -> PlaceholderRange:
    return PlaceholderRange(
        expected["offset"], expected["length"], np.array(expected["is_embed"], dtype=bool)
    )


@pytest.mark.parametrize("case", GOOD.values(), ids=GOOD)
def test_tokens_ranges_and_shapes_are_vllms(processor: Any, case: dict[str, Any]):
    prompt = case["prompt"]
    if case["kind"] == "tokens":
        prompt = processor.info.get_tokenizer().encode(prompt)
    images = [IMAGES / image for image in case["images"]]
    inputs = processor.apply(prompt, {"image": images} if images else None)

    assert inputs.prompt_token_ids == case["prompt_token_ids"]
    expected = case["mm_placeholders"].get("image", [])
    ranges = inputs.mm_placeholders.get("image", [])
    assert ranges == [to_range(one) for one in expected]
    assert [one.get_num_embeds() for one in ranges] == [one["num_embeds"] for one in expected]
    for item, tensors in zip(
        inputs.mm_kwargs.get("image", []), case["mm_kwargs"].get("image", []), strict=True
    ):
        assert item.keys() == tensors.keys()
        for key, tensor in tensors.items():
            data = item[key].data
            assert list(data.shape) == tensor["shape"]
            assert f"torch.{data.dtype}" == tensor["dtype"]
            assert abs(data.mean() - tensor["mean"]) < STEP


def test_a_picture_without_placeholder_is_refused(processor: Any):
    case = CASES["sq/bad_no_placeholder"]
    with pytest.raises(AssertionError, match="0 `<start_of_image>` placeholders but 1 image"):
        processor.apply(case["prompt"], {"image": IMAGES / case["images"][0]})
