"""LLaVA-OneVision beyond the laws: the largest picture, and several, as of DeepSeek-VL2."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import LlavaOnevisionConfig

from mmjax.cache import MultiModalProcessorOnlyCache
from mmjax.errors import RequestError
from mmjax.models.llava.host_inputs import LlavaOnevisionHostInputs
from mmjax.processing.items.items import ImageSize
from tests.families import FAMILIES
from tests.kit import draw

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())


def test_the_largest_picture_of_the_published_canvases():
    """One that fills its canvas is mixed to 9 tiles; one of 9 * 1.1 ** 2 of them is not."""
    config = LlavaOnevisionConfig(**PUBLISHED["llava_onevision 0.5b"]["config"])
    made = LlavaOnevisionHostInputs(config)
    fills = made.count_embeds(ImageSize(width=2304, height=2304))
    assert fills == 729 + 81 * (81 + 1)
    most = made.count_embeds(made.find_largest())
    assert most == 729 + 98 * (81 + 1)
    generator = torch.Generator().manual_seed(0)
    sides = torch.randint(1, 4000, (2000, 2), generator=generator).tolist()
    assert max(made.count_embeds(ImageSize(*one)) for one in sides) <= most


def test_several_pictures_are_not_cut_and_slivers_of_them_are_refused():
    processor = FAMILIES["llava_onevision"].make_processor(max_image_pixels=10_000)
    sliver, picture = Image.new("RGB", (200, 20)), Image.new("RGB", (60, 40))
    found = processor.apply("<image>what", {"image": [sliver]})
    assert found.mm_placeholders["image"][0].length > 17
    found = processor.apply("<image><image>what", {"image": [picture] * 2})
    assert [place.length for place in found.mm_placeholders["image"]] == [17, 17]
    with pytest.raises(RequestError, match="padded to a square it has 40000"):
        processor.apply("<image><image>what", {"image": [picture, sliver]})


@pytest.mark.parametrize(("name", "count"), [("llava_onevision", 2), ("deepseek_vl2", 3)])
def test_several_pictures_are_processed_once_and_never_cut(name: str, count: int):
    """Nor where the engine has lost them, and their tensors are made again of the files."""
    family = FAMILIES[name]
    processor = family.make_processor(processor_cache=MultiModalProcessorOnlyCache(2**26))
    images = [draw(300, 150, seed) for seed in range(count)]
    prompt = f"{family.placeholder * count}what"
    first = processor.prepare(prompt, {"image": images})
    assert {*first.fresh} == {*first.mm_hashes["image"]}
    processor.commit(first)
    again = processor.prepare(prompt, {"image": images})
    assert not again.fresh
    assert again.mm_placeholders == first.mm_placeholders
    assert processor.rebuild(again, first.mm_hashes["image"]).fresh == first.fresh
