"""Frames in all their forms -> videos."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.processing import (
    MediaLimits,
    MediaWithBytes,
    MultiModalDataParser,
    VideoEmbeddingItems,
    VideoProcessorItems,
)
from tests.kit import draw

FRAMES = [draw(6, 4, seed) for seed in range(3)]
PIXELS = np.stack([np.asarray(frame) for frame in FRAMES])
META = {"fps": 2.0, "total_num_frames": 30}
FORMS = {
    "list of PIL": FRAMES,
    "tuple of PIL": tuple(FRAMES),
    "list of numpy": list(PIXELS),
    "list of jax": list(jnp.asarray(PIXELS)),
    "list of torch": list(torch.from_numpy(PIXELS)),
    "numpy": PIXELS,
    "jax": jnp.asarray(PIXELS),
    "torch": torch.from_numpy(PIXELS),
    "channels first": np.moveaxis(PIXELS, -1, 1),
    "floats": PIXELS / 255,
    "jax floats": jnp.asarray(PIXELS, jnp.float32) / 255,
    "floats up to 255": PIXELS.astype(np.float64),
    "torch floats up to 255, channels first": torch.from_numpy(PIXELS).permute(0, 3, 1, 2).float(),
    "bfloat16 up to 255": torch.from_numpy(PIXELS).bfloat16(),
    "int64": PIXELS.astype(np.int64),
    "with metadata": (PIXELS, META),
    "PIL with metadata": (FRAMES, META),
    "without metadata": (PIXELS, None),
    "with bytes": MediaWithBytes(PIXELS, b"mp4"),
}

parser = MultiModalDataParser(
    limits=MediaLimits(max_image_pixels=1000, max_video_frames=8, max_video_pixels=4000)
)


def parse(data: Any, parser: MultiModalDataParser = parser) -> VideoProcessorItems:
    return parser.parse_mm_data({"video": data}).get_items("video", VideoProcessorItems)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_a_video_gives_the_same_frames(form: Any):
    for items, index in [(parse(form), 0), (parse([form]), 0), (parse([None, form]), 1)]:
        assert len(items) == index + 1
        frames = items.get_processor_data()["videos"][index]
        assert frames.dtype == np.uint8
        np.testing.assert_array_equal(frames, PIXELS)


@pytest.mark.parametrize("form", ["numpy", "jax", "torch", "channels first", "floats"])
def test_an_array_stays_the_object_that_it_is(form: str):
    assert parse(FORMS[form]).get(0) is FORMS[form]
    assert parse(FORMS["numpy"]).get_processor_data()["videos"][0] is PIXELS


def test_all_frames_tell_whether_floats_are_bytes():
    """A dark frame of a video of 0..255 has values that would be bright ones of 0..1."""
    pixels = PIXELS.copy()
    pixels[0] %= 2
    assert pixels[0].max() == 1
    np.testing.assert_array_equal(
        parse(pixels.astype(np.float32)).get_processor_data()["videos"][0], pixels
    )


def test_a_list_of_frames_becomes_one_array():
    assert isinstance(parse(FRAMES).get(0), np.ndarray)
    assert parse(list(jnp.asarray(PIXELS))).get(0).shape == PIXELS.shape


def test_what_is_one_video_and_what_are_several():
    assert parser.parse_mm_data({"video": None}) == {}
    assert len(parse([])) == 0
    assert len(parse([FRAMES, FRAMES])) == 2
    assert len(parse(np.stack([PIXELS, PIXELS]))) == 2
    assert len(parse(jnp.stack([PIXELS, PIXELS]))) == 2
    assert len(parse([(PIXELS, META), PIXELS])) == 2
    assert len(parse((PIXELS, PIXELS))) == 2
    assert len(parse((None, None))) == 2


def test_metadata_go_along_where_the_model_needs_them():
    needs = MultiModalDataParser(video_needs_metadata=True)
    items = parse([(PIXELS, META), None], needs)
    assert items.get(0) == (PIXELS, META)
    assert items.get_processor_data()["videos"] == [(PIXELS, META), None]
    assert items.metadata == [META, None]
    assert items.select([1, 0]).metadata == [None, META]
    with pytest.raises(RequestValueError, match="metadata is required but not found"):
        parse([(PIXELS, META), PIXELS], needs)
    items = parse([(PIXELS, META), PIXELS])
    assert items.get(0) is PIXELS
    assert items.metadata == [META, None]


def test_metadata_enter_the_hash_beside_encoded_bytes():
    media = MediaWithBytes(PIXELS, b"mp4")
    assert parse([(media, META)]).get_item_for_hash(0)[1] == META
    assert isinstance(parse([media]).get_item_for_hash(0), MediaWithBytes)
    assert parse([(PIXELS, META)]).get_item_for_hash(0) is PIXELS
    inner = parse([MediaWithBytes((PIXELS, META), b"mp4")])
    assert inner.get_item_for_hash(0)[0].original_bytes == b"mp4"
    assert inner.get(0) is PIXELS


def test_metadata_are_one_for_all_or_one_for_each():
    assert VideoProcessorItems([PIXELS, PIXELS], META).metadata == [META, META]
    with pytest.raises(ValueError, match="1 metadata were given for 2 videos"):
        VideoProcessorItems([PIXELS, PIXELS], [META])


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"mp4", RequestTypeError, "encoded video .*give its frames"),
        ("clip.mp4", RequestTypeError, "encoded video .*give its frames"),
        (["https://host/clip.mp4"], RequestTypeError, "encoded video .*give its frames"),
        (Path("clip.mp4"), RequestTypeError, "encoded video .*give its frames"),
        (7, RequestTypeError, r"video\[0\] has the type `int`"),
        ([PIXELS, 7], RequestTypeError, r"video\[1\] has the type `int`"),
        ([[FRAMES[0], b"png"]], RequestTypeError, r"frame 1 of .* has the type `bytes`"),
        (FRAMES[0], RequestTypeError, "has the type `Image`"),
        ([[FRAMES[0], draw(5, 4)]], RequestValueError, r"shapes \(6, 4\), \(5, 4\)"),
        ([[FRAMES[0], PIXELS[0]]], RequestValueError, "the frames of"),
        ([[]], RequestValueError, "no frames"),
        (PIXELS[:0], RequestValueError, "no frames"),
        (PIXELS[0], RequestValueError, r"shape \(4, 6, 3\)"),
        (np.zeros((2, 5, 5, 5), np.uint8), RequestValueError, r"shape \(2, 5, 5, 5\)"),
        (np.zeros((9, 4, 4, 3), np.uint8), RequestValueError, "9 frames, at most 8"),
        (np.zeros((1, 40, 40, 3), np.uint8), RequestValueError, "1600 pixels, at most 1000"),
        (np.zeros((5, 30, 30, 3), np.uint8), RequestValueError, "4500 pixels, at most 4000"),
        ([Image.new("RGB", (30, 30))] * 5, RequestValueError, "4500 pixels, at most 4000"),
        (PIXELS * 2.0, RequestValueError, "must lie in 0..1"),
        (PIXELS.astype(bool), RequestTypeError, "dtype bool"),
    ],
)
def test_other_things_are_refused(data: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        parse(data)


def test_frames_of_one_size_of_which_one_is_turned_are_refused():
    turned = draw(6, 4)
    turned.getexif()[ExifTags.Base.Orientation] = 6
    with pytest.raises(RequestValueError, match="scale them to one"):
        parse([draw(6, 4), turned])
    assert parse([turned, turned]).get(0).shape == (2, 6, 4, 3)


def test_limits_hold_before_a_frame_is_decoded():
    class Untouchable(Image.Image):
        def load(self) -> Any:
            raise AssertionError("decoded")

    frame = Untouchable()
    frame._size = (30, 30)
    with pytest.raises(RequestValueError, match="4500 pixels"):
        parse([frame] * 5)


def test_embeddings_of_videos():
    embeds = jnp.ones((2, 7, 16))
    items = parser.parse_mm_data({"video": embeds}).get_items("video", VideoEmbeddingItems)
    assert (len(items), items.get_feature_size(1)) == (2, 7)
    assert list(items.get_passthrough_data()) == ["video_embeds"]
