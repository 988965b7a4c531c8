"""The containers of items, sentence by sentence of their contract."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image

from mmjax.errors import RequestError, RequestTypeError, RequestValueError
from mmjax.processing import (
    AudioProcessorItems,
    EmbeddingItems,
    ImageEmbeddingItems,
    ImageProcessorItems,
    ImageSize,
    MediaLimits,
    MediaWithBytes,
    MultiModalDataItems,
    MultiModalDataParser,
    VideoProcessorItems,
    VisionChunkProcessorItems,
)
from tests.kit import draw

PICTURE = draw(6, 4)
FRAMES = np.stack([np.asarray(PICTURE)] * 2)


@pytest.mark.parametrize(
    ("items", "key"),
    [
        (ImageProcessorItems([PICTURE, PICTURE]), "images"),
        (VideoProcessorItems([FRAMES, FRAMES]), "videos"),
        (AudioProcessorItems([np.ones(3), np.ones(3)]), "audios"),
        (VisionChunkProcessorItems([{"type": "image", "image": PICTURE}] * 2), "vision_chunks"),
    ],
)
def test_a_list_that_the_processor_takes(items: Any, key: str):
    assert len(items) == items.get_count() == len(items.get_all()) == 2
    assert len(list(items)) == 2
    assert items[1] is items.get(1) or items[1] == items.get(1)
    assert list(items.get_processor_data()) == [key]
    assert items.get_passthrough_data() == {}
    assert items.get_all_items_for_hash() == [items.get_item_for_hash(i) for i in range(2)]
    chosen = items.select([1])
    assert (type(chosen), len(chosen)) == (type(items), 1)
    assert "len=2" in repr(items)


@pytest.mark.parametrize(
    "items",
    [
        ImageProcessorItems([MediaWithBytes(PICTURE, b"png")]),
        AudioProcessorItems([MediaWithBytes(np.ones(2), b"wav")]),
        VideoProcessorItems([MediaWithBytes(FRAMES, b"mp4")]),
    ],
)
def test_encoded_bytes_are_for_the_hash_alone(items: Any):
    assert not isinstance(items.get(0), MediaWithBytes)
    assert isinstance(items.get_item_for_hash(0), MediaWithBytes)


@pytest.mark.parametrize(
    ("picture", "size"),
    [
        (Image.new("L", (6, 4)), (6, 4)),
        (np.zeros((4, 6, 3)), (6, 4)),
        (np.zeros((4, 6, 1)), (6, 4)),
        (np.zeros((4, 6, 4)), (6, 4)),
        (np.zeros((3, 4, 6)), (6, 4)),
        (np.zeros((3, 4, 3)), (4, 3)),
        (np.zeros((5, 4, 6)), (6, 4)),
        (jnp.zeros((3, 4, 6)), (6, 4)),
        (torch.zeros(3, 4, 6), (6, 4)),
    ],
)
def test_sizes_of_pictures(picture: Any, size: tuple[int, int]):
    assert ImageProcessorItems([picture]).get_image_size(0) == ImageSize(*size)


@pytest.mark.parametrize(
    "measure",
    [
        ImageProcessorItems([None]).get_image_size,
        ImageEmbeddingItems([None]).get_feature_size,
    ],
)
def test_an_item_known_by_its_uuid_alone_has_no_measure(measure: Any):
    with pytest.raises(RequestValueError, match="cached"):
        measure(0)


class TestAllItems:
    items = MultiModalDataItems(
        {
            "image": ImageProcessorItems([PICTURE, None]),
            "audio": AudioProcessorItems([]),
        }
    )

    def test_counts(self):
        assert self.items.get_all_counts() == {"image": 2, "audio": 0}
        assert self.items.get_count("image") == 2
        assert self.items.get_count("video", strict=False) == 0
        with pytest.raises(KeyError, match="`video` not found; available: `image`, `audio`"):
            self.items.get_count("video")

    def test_selecting_modalities(self):
        chosen = self.items.select(["audio", "video"])
        assert isinstance(chosen, MultiModalDataItems)
        assert list(chosen) == ["audio"]
        assert list(self.items.select({"image"})) == ["image"]

    def test_kinds_of_items(self):
        image = self.items["image"]
        assert self.items.get_items("image", ImageProcessorItems) is image
        assert self.items.get_items("image", (EmbeddingItems, ImageProcessorItems)) is image
        with pytest.raises(KeyError, match="`video` not found"):
            self.items.get_items("video", VideoProcessorItems)
        for kind in (EmbeddingItems, (EmbeddingItems, VideoProcessorItems)):
            with pytest.raises(TypeError, match="image items are ImageProcessorItems, expected"):
                self.items.get_items("image", kind)


class TestVisionChunks:
    parser = MultiModalDataParser(
        limits=MediaLimits(max_image_pixels=100, max_video_frames=4, max_video_pixels=90)
    )

    def parse(self, data: Any) -> VisionChunkProcessorItems:
        items = self.parser.parse_mm_data({"vision_chunk": data})
        return items.get_items("vision_chunk", VisionChunkProcessorItems)

    def test_pictures_and_pieces_of_videos(self):
        picture = {"type": "image", "image": np.asarray(PICTURE), "uuid": "a"}
        piece = {"type": "video_chunk", "video_chunk": [PICTURE] * 3, "prompt": "0:00"}
        items = self.parse([picture, piece, None])
        assert items.get(0)["image"].size == (6, 4)
        assert items.get(0)["uuid"] == "a"
        assert [frame.size for frame in items.get(1)["video_chunk"]] == [(6, 4)] * 3
        assert items.get(1)["prompt"] == "0:00"
        assert items.get(2) is None
        assert len(self.parse(picture)) == 1
        assert len(self.parse([])) == 0
        assert self.parser.parse_mm_data({"vision_chunk": None}) == {}

    @pytest.mark.parametrize(
        ("data", "error", "message"),
        [
            (7, RequestTypeError, r"vision_chunk\[0\] has the type `int`"),
            ({}, RequestValueError, "has the type None and the keys"),
            ({"type": "smell"}, RequestValueError, "has the type 'smell'"),
            ({"type": "image"}, RequestValueError, "has the type 'image' and the keys"),
            ({"type": "image", "image": 7}, RequestTypeError, "has the type `int`"),
            ({"type": "video_chunk", "video_chunk": []}, RequestError, "no frames"),
            (
                {"type": "video_chunk", "video_chunk": [PICTURE] * 4},
                RequestValueError,
                "96 pixels, at most 90",
            ),
            (jnp.ones((2, 3, 5)), RequestValueError, "embeddings of vision chunks"),
        ],
    )
    def test_other_things_are_refused(self, data: Any, error: type[Exception], message: str):
        with pytest.raises(error, match=message):
            self.parse(data)


@pytest.mark.parametrize(
    ("modality", "data", "expected"),
    [
        ("image", None, None),
        ("image", [], 0),
        ("image", PICTURE, 1),
        ("image", [PICTURE, b"", None], 3),
        ("image", np.zeros((5, 2, 2, 3)), 5),
        ("image", b"not read", 1),
        ("image", jnp.ones((2, 7, 16)), None),
        ("image", {"image_embeds": 1}, None),
        ("video", [PICTURE, PICTURE], 1),
        ("video", [[PICTURE], b"not read"], 2),
        ("video", np.zeros((5, 2, 2, 2, 3)), 5),
        ("audio", [0.5, 0.5], 1),
        ("audio", [[0.5], "not read"], 2),
        ("smell", [1, 2], None),
    ],
)
def test_entries_are_counted_before_they_are_read(modality: str, data: Any, expected: int | None):
    assert MultiModalDataParser().count_entries(modality, data) == expected
