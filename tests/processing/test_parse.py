"""The user's media in all their forms -> items."""

from io import BytesIO
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from mmjax.errors import RequestKeyError, RequestTypeError, RequestValueError
from mmjax.processing import (
    EmbeddingItems,
    ImageEmbeddingItems,
    ImageProcessorItems,
    MediaLimits,
    MediaWithBytes,
    MultiModalDataItems,
    MultiModalDataParser,
)
from tests.kit import draw
from tests.processing.test_media import as_url, encode

parser = MultiModalDataParser(limits=MediaLimits(max_image_pixels=10_000))


def parse(data: Any) -> ImageProcessorItems:
    return parser.parse_mm_data({"image": data}).get_items("image", ImageProcessorItems)


def test_every_form_of_a_picture_gives_the_same_pixels(tmp_path: Path):
    image = draw(7, 5)
    path = tmp_path / "a.png"
    path.write_bytes(encode(image))
    forms = [
        image,
        np.asarray(image),
        jnp.asarray(np.asarray(image)),
        path,
        str(path),
        encode(image),
        bytearray(encode(image)),
        memoryview(encode(image)),
        as_url(encode(image)),
        MediaWithBytes(image, encode(image)),
        Image.open(BytesIO(encode(image))),
    ]
    for items in [parse(forms), *(parse(form) for form in forms)]:
        for index in range(len(items)):
            np.testing.assert_array_equal(np.asarray(items.get(index)), np.asarray(image))
            assert items.get_image_size(index) == (7, 5)
    assert len(parse(forms)) == len(forms)


def test_encoded_forms_keep_their_bytes_for_the_hash():
    data = encode(draw(3, 3))
    items = parse([data, draw(3, 3)])
    assert items.get_item_for_hash(0).original_bytes == data
    assert isinstance(items.get(0), Image.Image)
    assert isinstance(items.get_item_for_hash(1), Image.Image)
    assert items.get_processor_data()["images"] == [items.get(0), items.get(1)]
    assert items.get_passthrough_data() == {}


def test_none_drops_a_modality_and_an_empty_list_does_not():
    assert parser.parse_mm_data({"image": None}) == {}
    items = parser.parse_mm_data({"image": []})
    assert items.get_all_counts() == {"image": 0}


def test_a_4d_array_is_a_list_of_pictures():
    assert len(parse(np.zeros((3, 4, 5, 3), np.uint8))) == 3


def test_a_none_item_stands_for_a_cached_one():
    items = parse([None, draw(2, 2)])
    assert items.get(0) is None
    with pytest.raises(RequestValueError, match="cached"):
        items.get_image_size(0)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"a": 1}, RequestTypeError, r"image\[0\] has the type `dict`"),
        ([draw(2, 2), 7], RequestTypeError, r"image\[1\] has the type `int`"),
        ([[draw(2, 2)]], RequestTypeError, r"image\[0\] has the type `list`"),
        ("http://host/a.png", RequestValueError, "are fetched for messages alone"),
        ("file:///etc/passwd", RequestValueError, "are fetched for messages alone"),
        ("no such file.png", RequestValueError, "cannot be read"),
        (np.zeros((4, 4)), RequestValueError, r"shape \(4, 4\)"),
        (Image.new("RGB", (200, 200)), RequestValueError, "40000 pixels"),
        (Image.new("RGB", (0, 5)), RequestValueError, "0x5 pixels"),
        (MediaWithBytes(Image.new("RGB", (200, 200)), b""), RequestValueError, "40000 pixels"),
        (
            Image.open(BytesIO(encode(draw(30, 30))[:200])),
            RequestValueError,
            "image cannot be decoded",
        ),
    ],
)
def test_other_things_are_refused(data: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        parse(data)


def test_an_unknown_modality_is_named():
    with pytest.raises(RequestValueError, match="Unsupported modality: smell"):
        parser.parse_mm_data({"smell": []})
    items = MultiModalDataItems({"image": ImageProcessorItems([])})
    assert items.get_count("audio", strict=False) == 0
    with pytest.raises(RequestKeyError, match="`audio` not found"):
        items.get_count("audio")
    with pytest.raises(KeyError):
        items.get_items("audio", ImageProcessorItems)
    with pytest.raises(TypeError, match="ImageProcessorItems"):
        items.get_items("image", ImageEmbeddingItems)
    assert items.select(["audio"]) == {}


def test_embeddings_are_told_from_pictures():
    embeds = jnp.ones((2, 7, 16))
    assert parser.is_embeddings(embeds)
    assert parser.is_embeddings([jnp.ones((7, 16))])
    assert not parser.is_embeddings(np.ones((2, 7, 16)))
    assert not parser.is_embeddings(jnp.ones((7, 16)))
    assert not parser.is_embeddings(jnp.ones((20, 30, 3)))
    assert not parser.is_embeddings([])
    items = parser.parse_mm_data({"image": embeds}).get_items("image", ImageEmbeddingItems)
    assert (len(items), items.get_feature_size(0)) == (2, 7)
    assert items.get_processor_data() == {}
    assert list(items.get_passthrough_data()) == ["image_embeds"]
    with pytest.raises(ValueError, match="must be 2D"):
        EmbeddingItems([jnp.ones(3)], "image")
    with pytest.raises(ValueError, match="hidden dimension mismatch: got 16, the model has 8"):
        EmbeddingItems(embeds, "image", expected_hidden_size=8)
