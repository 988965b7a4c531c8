"""`detail` of an image: fewer or more embeddings where sizes are free, and another name."""

import numpy as np
import pytest

from mmjax.decoders.limits import MediaLimits
from mmjax.processing.media.encoded import EncodedImage, PixelRange
from tests.families import FAMILIES, qwen2_vl
from tests.kit import draw
from tests.processing.test_media import encode


def test_low_and_high_change_what_qwen2_vl_sees():
    """The same file under three details is three items, of no more and no fewer pixels."""
    processor = qwen2_vl.make_processor(
        mm_processor_kwargs={"size": {"shortest_edge": 28 * 28, "longest_edge": 2048 * 2048}}
    )
    info = processor.info
    details = {"auto": None, "low": info.get_detail_range("low")}
    details["high"] = info.get_detail_range("high")
    data = encode(draw(700, 600))
    images = [EncodedImage(data, MediaLimits(), pixel_range=one) for one in details.values()]
    prompt = f"{qwen2_vl.IMAGE} " * 3
    prepared = processor.prepare(prompt, {"image": images})
    assert len(set(prepared.mm_hashes["image"])) == 3
    auto, low, high = (one.get_num_embeds() for one in prepared.mm_placeholders["image"])
    assert low < auto < high
    assert low * 28 * 28 <= 1.05 * 512 * 512  # rounded to whole patches
    assert high * 28 * 28 >= 0.95 * 1024 * 1024


def test_families_of_fixed_sizes_have_no_use_for_it():
    ranges = {
        name: family.make_processor().info.get_detail_range("low")
        for name, family in FAMILIES.items()
        if name in ("gemma3", "llava", "qwen2_vl")
    }
    assert ranges == {"gemma3": None, "llava": None, "qwen2_vl": PixelRange(most=512 * 512)}


@pytest.mark.parametrize(
    ("pixel_range", "size"),
    [
        (PixelRange(), (40, 30)),
        (PixelRange(most=1200), (40, 30)),
        (PixelRange(most=300), (20, 15)),
        (PixelRange(least=4800), (80, 60)),
        (PixelRange(most=1), (1, 1)),
    ],
)
def test_both_sides_are_scaled_alike(pixel_range: PixelRange, size: tuple[int, int]):
    picture = draw(40, 30)
    scaled = pixel_range.fit(picture)
    assert scaled.size == size
    if size == picture.size:
        assert scaled is picture
    image = EncodedImage(encode(picture), MediaLimits(), pixel_range=pixel_range)
    assert image.num_bytes_to_decode >= 4 * max(1200, size[0] * size[1])
    np.testing.assert_array_equal(np.asarray(image.decode().media), np.asarray(scaled))
