"""LLaVA-OneVision beyond the laws: files that contradict each other, the largest picture."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import LlavaOnevisionConfig

from mmjax.errors import RequestError
from mmjax.models.llava.host_inputs import LlavaOnevisionHostInputs
from mmjax.processing.items.items import ImageSize
from tests.families import FAMILIES

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
