"""The hash: the same content, the same digest; anything else, another one."""

import hashlib
import uuid
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from mmjax.processing import MediaWithBytes, MultiModalHasher
from tests.kit import draw

hasher = MultiModalHasher()


def digest(value: object) -> str:
    return hasher.hash_kwargs(x=value)


def with_image_id(image: Image.Image, image_id: object) -> Image.Image:
    image = image.copy()
    image.getexif()[ExifTags.Base.ImageID] = image_id
    return image


def paletted(colour: int) -> Image.Image:
    image = Image.new("P", (2, 2))
    image.putpalette([colour, 0, 0])
    return image


def test_the_algorithms():
    stream = b"".join(bytes(chunk) for chunk in hasher.iter_item_to_bytes("x", 1))
    assert hasher.hash_kwargs(x=1) == blake3(stream).hexdigest()
    assert MultiModalHasher("sha256").hash_kwargs(x=1) == hashlib.sha256(stream).hexdigest()
    assert MultiModalHasher("sha512").hash_kwargs(x=1) == hashlib.sha512(stream).hexdigest()
    with pytest.raises(ValueError, match="`md5` is unknown; choose one of `blake3`"):
        MultiModalHasher("md5")


def test_the_order_of_arguments_does_not_matter():
    assert hasher.hash_kwargs(a=1, b=2) == hasher.hash_kwargs(b=2, a=1)
    assert hasher.hash_kwargs(a=1, b=2) != hasher.hash_kwargs(a=2, b=1)


ADVERSARIES: list[Any] = [
    *(None, "", b"", [], {}, [None], [[]], {"a": None}, {"a": {}}),
    *(0, 0.0, -0.0, False, "0", b"0", [0], 2**63, -(2**63), 2**64, 1, True, 1.0),
    *("a", b"a", ["a"], {"a": "a"}, "ab", ["ab"], ["a", "b"], ["", "ab"], ["ab", ""], "\ud800"),
    *({"a": {"b": 1}}, {"a.b": 1}, {"0": "a", "1": "b"}, {"a": "b"}, {"ab": ""}),
    *(np.zeros(2), np.zeros(2, np.float32), np.zeros(2, np.int64), np.zeros((1, 2))),
    *(np.zeros((2, 1)), np.zeros(1), np.zeros(()), np.zeros(0), np.zeros((0, 1)), np.float64(0)),
    *(np.zeros(2, ">f8"), np.zeros(2, ml_dtypes.bfloat16), np.zeros(2, np.float16), b"\0" * 16),
    *(Image.new(mode, (2, 3)) for mode in ("1", "L", "RGB", "RGBA", "CMYK", "P")),
    *(Image.new("RGB", (3, 2)), draw(2, 3), paletted(1), paletted(2)),
    *(MediaWithBytes(draw(2, 3), b"a"), MediaWithBytes(draw(2, 3), b"b")),
    MediaWithBytes(draw(2, 3), b"a", {"background": (0, 0, 0)}),
    with_image_id(draw(2, 3), uuid.UUID(int=1)),
]


def test_different_values_have_different_digests():
    digests: dict[str, object] = {}
    for value in ADVERSARIES:
        one = digest(value)
        if one in digests:
            # Equal arrays of different classes only: np.float64(0) and np.zeros(()).
            assert isinstance(value, np.float64), (value, digests[one])
        digests[one] = value


def test_the_key_belongs_to_the_value():
    pairs = [{"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"a": ["b", "c"]}]
    assert len({hasher.hash_kwargs(**pair) for pair in pairs}) == len(pairs)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def typed(value: Any) -> Any:
    """A value that compares by type too (True is 1, and 1 is 1.0, in Python)."""
    if isinstance(value, list):
        return ("list", [typed(one) for one in value])
    if isinstance(value, dict):
        return ("dict", [(key, typed(one)) for key, one in value.items()])
    return (type(value), repr(value))


@given(values, values)
def test_digests_are_equal_exactly_for_equal_values(a: Any, b: Any):
    assert (digest(a) == digest(b)) == (typed(a) == typed(b))
    assert hasher.serialize_item(a) == hasher.serialize_item(a)


def test_the_same_content_has_the_same_digest():
    pixels = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert digest(pixels) == digest(pixels.copy())
    assert digest(pixels[:, ::2]) == digest(np.ascontiguousarray(pixels[:, ::2]))
    assert digest(pixels.T) != digest(pixels)
    assert digest(jnp.asarray(pixels)) == digest(pixels)
    assert digest(jnp.ones(3, jnp.bfloat16)) == digest(np.ones(3, ml_dtypes.bfloat16))
    assert digest([1, 2]) == digest((1, 2))
    assert digest(memoryview(b"abc")) == digest(b"abc") == digest(bytearray(b"abc"))
    assert digest(draw(4, 4)) == digest(draw(4, 4).copy())


def test_an_exif_uuid_stands_for_the_picture():
    image_id = uuid.UUID(int=7)
    one, other = with_image_id(draw(2, 2), image_id), with_image_id(draw(5, 5), image_id)
    assert digest(one) == digest(other) == digest(image_id.bytes)
    assert digest(MediaWithBytes(one, b"a")) == digest(image_id.bytes)
    assert digest(with_image_id(draw(2, 2), "no uuid")) == digest(draw(2, 2))


def test_encoded_bytes_stand_for_a_decoded_picture():
    assert digest(MediaWithBytes(draw(2, 2), b"a")) == digest(MediaWithBytes(draw(3, 3), b"a"))
    assert digest(MediaWithBytes(draw(2, 2), b"a")) != digest(draw(2, 2))
    frames = np.zeros((2, 2), np.uint8)
    assert digest(MediaWithBytes(frames, b"a" * 9)) == digest(frames)
    assert digest(MediaWithBytes(frames, b"a")) == digest(MediaWithBytes(draw(2, 2), b"a"))


@pytest.mark.parametrize("value", [object(), {1, 2}, {1: 2}, np.array([object()]), 1j, [object()]])
def test_an_unknown_type_is_refused(value: object):
    with pytest.raises(TypeError, match="cannot hash"):
        digest(value)
