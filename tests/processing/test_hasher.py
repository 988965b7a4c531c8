"""The hash: the same content, the same digest; anything else, another one."""

import hashlib
import itertools
import random
import struct
import subprocess
import sys
import time
import tracemalloc
import uuid
from collections import OrderedDict
from io import BytesIO
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from mmjax.errors import RequestError
from mmjax.processing import MediaLimits, MediaWithBytes, MultiModalHasher
from mmjax.processing.hashing.hasher import LARGE_CHUNK, ContentHasher
from mmjax.processing.media.decode import has_parsed_exif
from mmjax.processing.media.encoded import EncodedImage
from tests.kit import draw
from tests.processing.test_media import encode

hasher = MultiModalHasher()
ALGORITHMS = ("blake3", "sha256", "sha512")


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


def palette_mode(mode: str) -> Image.Image:
    """Twelve bytes: four colours without alpha, or three with."""
    image = Image.new("P", (2, 2))
    image.putpalette(bytes(range(12)), mode)
    image.load()
    return image


def see_through(colour: int) -> Image.Image:
    image = paletted(1)
    image.info["transparency"] = colour
    return image


def nan(payload: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", 0x7FF8 << 48 | payload))[0]


LARGE = bytes(range(256)) * (LARGE_CHUNK // 128)

ADVERSARIES: list[Any] = [
    *(None, "", b"", [], {}, [None], [[]], [{}], {"a": None}, {"a": {}}, {"a": []}, {"": None}),
    *([[], []], [[[]]], [[[], []]], [[[]], []], [[], [[]]], [None, None], [[None], None]),
    *(0, 0.0, -0.0, False, "0", b"0", [0], 2**63, -(2**63), 2**64, 1, True, 1.0, -1, 255, 256),
    *(2**63 - 1, -(2**64), 2**1000, -(2**1000), 2**1000 + 1, float("inf"), -float("inf")),
    *(nan(0), nan(1), -nan(0), 5e-324, 0.1, "True", "None", "1.0"),
    *("a", b"a", ["a"], {"a": "a"}, "ab", ["ab"], ["a", "b"], ["", "ab"], ["ab", ""], "\ud800"),
    *(["a", "", "b"], [b"a", "b"], ["a", b"b"], [["a"], "b"], ["a", ["b"]], [["a", "b"]]),
    *("\0", "\0\0", b"\0", b"\0\0", "é", "e\u0301", "é".encode(), "\ud800\udc00", "\U00010000"),
    *({"a": {"b": 1}}, {"a.b": 1}, {"0": "a", "1": "b"}, {"a": "b"}, {"ab": ""}, {"": "ab"}),
    *({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2, "b": 1}, {"a": [1, 2]}, {"a": 1, "b": [2]}),
    *([{"a": 1}, {"b": 2}], [{"a": 1, "b": 2}], {"0": {"a": 1}, "1": {"b": 2}}, {"a.0": 1}),
    *(np.zeros(2), np.zeros(2, np.float32), np.zeros(2, np.int64), np.zeros((1, 2))),
    *(np.zeros((2, 1)), np.zeros(1), np.zeros(()), np.zeros(0), np.zeros((0, 1)), np.zeros((1, 0))),
    *(np.zeros((0, 1), np.float32), np.zeros((2, 1, 1)), np.zeros((1, 1, 2)), np.ones(2)),
    *(np.zeros(2, ">f8"), np.zeros(2, ml_dtypes.bfloat16), np.zeros(2, np.float16), b"\0" * 16),
    *(np.zeros(2, np.uint8), np.zeros(2, np.int8), np.zeros(2, bool), np.zeros(2, np.int16)),
    *(np.zeros(2, ml_dtypes.float8_e4m3fn), np.zeros(2, ml_dtypes.float8_e5m2)),
    *(np.zeros(2, np.complex64), np.zeros(2, "M8[s]"), np.zeros(2, "M8[ms]"), np.zeros(2, "m8[s]")),
    *(np.zeros(2, ">u2"), np.zeros(2, "<u2"), np.zeros(2, "S2"), np.zeros(2, "U1")),
    *(np.zeros(2, [("a", "u1"), ("b", "u1")]), np.zeros(2, [("b", "u1"), ("a", "u1")])),
    *(np.arange(6).reshape(2, 3), np.arange(6).reshape(3, 2), np.arange(6).reshape(2, 3).T),
    *(np.arange(6), np.arange(6)[::-1], [0, 1, 2, 3, 4, 5], np.array([-0.0, 0.0])),
    *(Image.new(mode, (2, 3)) for mode in ("1", "L", "RGB", "RGBA", "CMYK", "P", "I", "F", "HSV")),
    *(Image.new(mode, (2, 3)) for mode in ("LA", "PA", "RGBa", "RGBX", "YCbCr", "LAB", "I;16")),
    *(Image.new("RGB", (3, 2)), draw(2, 3), draw(2, 3).transpose(Image.Transpose.TRANSPOSE)),
    *(paletted(1), paletted(2), see_through(0), see_through(1)),
    *(palette_mode("RGB"), palette_mode("RGBA")),
    *(
        Image.merge("RGB", draw(2, 3).split()[::-1]),
        Image.new("RGB", (6, 1)),
        Image.new("RGB", (1, 6)),
    ),
    *(MediaWithBytes(draw(2, 3), b"a"), MediaWithBytes(draw(2, 3), b"b")),
    *(MediaWithBytes(draw(2, 3), b"a", {"background": (0, 0, n)}) for n in range(2)),
    *(MediaWithBytes(np.zeros((n, 2, 2), np.uint8), b"a" * 99) for n in range(1, 4)),
    (MediaWithBytes(np.zeros((9, 9, 9), np.uint8), b"mp4"), {"fps": 1}),
    (MediaWithBytes(np.zeros((9, 9, 9), np.uint8), b"mp4"), {"fps": 2}),
    [MediaWithBytes(np.zeros((9, 9, 9), np.uint8), b"mp4")],
    *(with_image_id(draw(2, 3), uuid.UUID(int=n)) for n in (1, 2)),
    *(LARGE, LARGE + b"\0", LARGE[:-1], LARGE[:LARGE_CHUNK], LARGE[: LARGE_CHUNK - 1]),
    *([LARGE], {"a": LARGE}, LARGE.decode("latin-1"), np.frombuffer(LARGE, np.uint8)),
    *(blake3(LARGE).digest(), hashlib.sha256(LARGE).digest(), [LARGE, LARGE], LARGE + LARGE),
    *(struct.pack("<Q", len(LARGE)) + digest for digest in (blake3(LARGE).digest(), LARGE)),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_different_values_have_different_digests(algorithm: str):
    hashed = MultiModalHasher(algorithm)
    digests: dict[str, object] = {}
    for value in ADVERSARIES:
        one = hashed.hash_kwargs(x=value)
        assert one not in digests, (value, digests[one])
        digests[one] = value
    assert len({hasher.serialize_item(value) for value in ADVERSARIES}) == len(ADVERSARIES)


def test_no_stream_begins_another():
    """Prefix-free streams stay apart wherever they are put together."""
    streams = sorted(hasher.serialize_item(value) for value in ADVERSARIES)
    assert not any(b.startswith(a) for a, b in itertools.pairwise(streams))


def test_the_key_belongs_to_the_value():
    pairs: list[dict[str, Any]] = [
        *({"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"a": ["b", "c"]}, {"abc": ""}),
        *({"a": None}, {}, {"a": {}}, {"a": {"b": "c"}}, {"a.b": "c"}, {"b": "c", "a": None}),
        *({"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": {"b": 2}, "c": 1}, {"a": {"b": 2, "c": 1}}),
    ]
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
    if isinstance(value, list | tuple):
        return ("list", [typed(one) for one in value])
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return ("dict", [(key, typed(one)) for key, one in value.items()])
    return (type(value), repr(value))


@given(values, values)
def test_digests_are_equal_exactly_for_equal_values(a: Any, b: Any):
    assert (digest(a) == digest(b)) == (typed(a) == typed(b))
    assert hasher.serialize_item(a) == hasher.serialize_item(a)


def make(rng: random.Random, depth: int = 3) -> Any:
    """Return a value, small and often like others."""
    kind = rng.randrange(10 if depth else 6)
    match kind:
        case 0:
            return rng.choice([None, True, False])
        case 1:
            return rng.choice([0, 1, -1, 255, 256, 2**63, 2**64, rng.getrandbits(70)])
        case 2:
            return rng.choice([0.0, -0.0, 1.0, 0.5, rng.random()])
        case 3:
            return "".join(rng.choices("ab.0\0", k=rng.randrange(4)))
        case 4:
            return bytes(rng.choices(b"ab\x00\x01\x03", k=rng.randrange(10)))
        case 5:
            dtype = rng.choice(["u1", "i1", "<u2", ">u2", "<f4"])
            shape = rng.choice([(), (1,), (2,), (1, 2), (2, 1), (0,)])
            return np.full(shape, rng.randrange(2), dtype)
        case 6 | 7:
            return [make(rng, depth - 1) for _ in range(rng.randrange(4))]
        case _:
            keys = ["a", "b", "ab", "a.b", "", "0"]
            return {rng.choice(keys): make(rng, depth - 1) for _ in range(rng.randrange(4))}


def change(rng: random.Random, value: Any) -> Any:
    """Return a near neighbour of a value: often another, sometimes the same."""
    if isinstance(value, list) and value:
        index = rng.randrange(len(value))
        match rng.randrange(5):
            case 0:
                return value[:index] + value[index + 1 :]
            case 1:
                return [*value[:index], value[index:]]
            case 2:
                return {str(place): item for place, item in enumerate(value)}
            case _:
                return [*value[:index], change(rng, value[index]), *value[index + 1 :]]
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        match rng.randrange(4):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return {(name + "a" if name == key else name): i for name, i in value.items()}
            case 2:
                return dict(reversed(value.items()))
            case _:
                return {**value, key: change(rng, value[key])}
    if isinstance(value, np.ndarray):
        return rng.choice([value.T, value[None], value.view("u1" if value.ndim else value.dtype)])
    if isinstance(value, str | bytes) and value:
        cut = rng.randrange(len(value))
        return rng.choice([[value[:cut], value[cut:]], value[cut:], [value], (value,)])
    return rng.choice([value, [value], {"": value}, make(rng, 0)])


def assert_injective(num_pairs: int, seed: int) -> None:
    rng = random.Random(seed)
    num_equal = 0
    for _ in range(num_pairs):
        one = make(rng)
        other = change(rng, one)
        is_equal = typed(one) == typed(other)
        num_equal += is_equal
        streams = hasher.serialize_item(one), hasher.serialize_item(other)
        assert (streams[0] == streams[1]) == is_equal, (one, other)
    assert num_pairs // 100 < num_equal < num_pairs // 2


def test_random_neighbours_have_different_streams():
    assert_injective(10_000, seed=0)


@pytest.mark.slow
def test_a_million_random_neighbours_have_different_streams():
    run_plain("assert_injective(1_000_000, seed=1)")


def run_plain(code: str) -> None:
    """Run code with this module's names where no type checks slow every call."""
    source = f"from tests.processing.test_hasher import *; {code}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", source], check=True, timeout=280)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_random_values_have_different_digests(algorithm: str):
    rng, hashed = random.Random(2), MultiModalHasher(algorithm)
    by_digest: dict[str, object] = {}
    for _ in range(4_000):
        value = make(rng)
        seen = by_digest.setdefault(hashed.hash_kwargs(x=value), value)
        assert typed(seen) == typed(value)
    assert len(by_digest) > 500


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


def test_every_kind_of_array_by_its_content():
    pixels = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tensor = torch.from_numpy(pixels.copy())
    assert digest(tensor) == digest(pixels)
    assert digest(tensor.requires_grad_()) == digest(torch.nn.Parameter(tensor)) == digest(pixels)
    assert digest(tensor.transpose(0, 2)) == digest(pixels.transpose(2, 1, 0))
    assert digest(np.asfortranarray(pixels)) == digest(pixels)
    assert digest(pixels[::-1]) == digest(pixels[::-1].copy())
    assert digest(np.broadcast_to(pixels[0], (2, 3, 4))) == digest(np.stack([pixels[0]] * 2))
    pixels.flags.writeable = False
    assert digest(pixels) == digest(tensor)
    assert digest(torch.tensor(2.5)) == digest(np.float32(2.5)) == digest(jnp.float32(2.5))
    assert digest(torch.tensor(True)) == digest(np.True_) == digest(np.array(True))
    rotated = torch.tensor([1 + 2j]).conj()
    assert digest(rotated) == digest(np.array([1 - 2j], np.complex64))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_the_dtypes_that_numpy_lacks(name: str):
    floats = np.array([[0.5, -1.0, 2.0], [3.0, 0.0, -0.0]], np.float32)
    expected = digest(floats.astype(getattr(ml_dtypes, name)))
    tensor = torch.from_numpy(floats).to(getattr(torch, name))
    assert digest(tensor) == expected == digest(jnp.asarray(floats).astype(name))
    assert digest(tensor.T) == digest(floats.T.astype(getattr(ml_dtypes, name)))
    assert digest(tensor[0, 0]) == digest(floats[0, 0].astype(getattr(ml_dtypes, name)))
    assert digest(tensor.view(torch.uint8)) != expected


def test_the_same_scalars_and_containers():
    class Pair(NamedTuple):
        a: int
        b: str

    assert digest(Pair(1, "x")) == digest([1, "x"])
    assert digest(OrderedDict(a=1)) == digest({"a": 1})
    assert digest(np.arange(6, dtype="u1").reshape(2, 3).data) == digest(bytes(range(6)))
    assert digest(memoryview(bytes(range(6)))[::2]) == digest(bytes([0, 2, 4]))
    assert digest(np.zeros((0, 3)).data) == digest(b"")


def test_encoded_pictures_hash_as_what_they_decode_to():
    data = encode(draw(4, 4))
    image = EncodedImage(data, MediaLimits())
    assert digest(image) == digest(image.decode()) == digest(MediaWithBytes(draw(1, 1), data))
    clear = encode(Image.new("RGBA", (2, 2)))
    assert digest(EncodedImage(clear, MediaLimits())) != digest(MediaWithBytes(draw(2, 2), clear))


def test_a_contents_hash_takes_no_pictures_word_for_it():
    contents = ContentHasher()
    one, other = (with_image_id(draw(2, n), uuid.UUID(int=7)) for n in (2, 3))
    assert contents.hash_kwargs(x=one) == digest(draw(2, 2))
    assert contents.hash_kwargs(x=one) != contents.hash_kwargs(x=other)
    media = [MediaWithBytes(one, data) for data in (b"a", b"b")]
    assert len({contents.hash_kwargs(x=item) for item in media}) == 2


def test_malformed_exif_is_no_id():
    image = Image.open(encode_to_file(draw(4, 4), exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff"))
    assert digest(image) == digest(draw(4, 4))
    image.info["exif"] = b"\0\1\2"
    assert digest(with_image_id(draw(4, 4), None)) == digest(draw(4, 4))


def encode_to_file(image: Image.Image, **kwargs: Any) -> Any:
    return BytesIO(encode(image, **kwargs))


def test_large_arrays_are_hashed_in_place():
    array = np.zeros(32 * 2**20, np.uint8).reshape(64, -1)
    frames = MediaWithBytes(array, bytes(64 * 2**20))
    digest(array[:1])
    tracemalloc.start()
    try:
        for value in (array, array.data, frames, frames.original_bytes):
            digest(value)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_many_small_values_are_hashed_as_they_come():
    numbers = list(range(3_000))
    one = digest(numbers)
    stream = b"".join(hasher.iter_item_to_bytes("x", numbers))
    assert one == blake3(stream).hexdigest() == digest(tuple(numbers))
    numbers[2_000] += 1
    assert one != digest(numbers)


def test_values_that_never_end_are_refused():
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="holds itself") as caught:
        digest(circle)
    assert isinstance(caught.value, RequestError)


def assert_fast(size: int, num_calls: int) -> None:
    media = MediaWithBytes(draw(2, 2), random.Random(0).randbytes(size))

    def seconds(call: Any) -> float:
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        return time.perf_counter() - start

    rounds = [
        (seconds(lambda: blake3(media.original_bytes).hexdigest()), seconds(lambda: digest(media)))
        for _ in range(50)
    ]
    raw, ours = (min(times) for times in zip(*rounds, strict=True))
    assert raw / ours >= 0.85, f"{raw / ours:.2f} of blake3's own speed"


@pytest.mark.slow
def test_hashing_costs_what_its_bytes_cost():
    run_plain("assert_fast(300_000, 100); assert_fast(1_000_000, 40)")


UNKNOWN = [
    *(object(), {1, 2}, {1: 2}, np.array([object()]), 1j, [object()], range(3), frozenset()),
    *(np.ma.masked_array([1, 2], [True, False]), np.zeros(2, [("a", object)])),
    *(torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta"), {"a": [object()]}),
]


@pytest.mark.parametrize("value", UNKNOWN, ids=lambda value: type(value).__name__)
def test_an_unknown_type_is_refused(value: object):
    with pytest.raises(TypeError, match="cannot hash") as caught:
        digest(value)
    assert isinstance(caught.value, RequestError)


def test_an_io_config_that_says_nothing_counts_as_none():
    data = encode(draw(4, 4))
    assert digest(MediaWithBytes(draw(4, 4), data, {})) == digest(MediaWithBytes(draw(4, 4), data))
    said = MediaWithBytes(draw(4, 4), data, {"image_mode": "RGB"})
    assert digest(said) != digest(MediaWithBytes(draw(4, 4), data))


def test_pillow_still_keeps_parsed_exif_where_we_look():
    """`has_parsed_exif` reads a private attribute: a Pillow without it must be looked at."""
    image = draw(2, 2)
    assert "_exif" in vars(image), "Pillow keeps EXIF elsewhere: mend has_parsed_exif"
    assert not has_parsed_exif(image)
    image.getexif()
    assert has_parsed_exif(image), "Pillow keeps parsed EXIF elsewhere: mend has_parsed_exif"
    with Image.open(BytesIO(encode(draw(2, 2)))) as opened:
        assert not has_parsed_exif(opened)
