"""A picture that waits to be decoded: bytes are checked at once, the decoder runs once."""

import gc
import threading
import uuid
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from mmjax.errors import MediaError, RequestError, RequestValueError
from mmjax.processing import ImageProcessorItems, MediaLimits, MultiModalDataParser
from mmjax.processing.hashing.hasher import MultiModalHasher
from mmjax.processing.media.encoded import EncodedImage, parse_image
from tests.kit import draw
from tests.processing.test_media import as_url, encode, png_header

LIMITS = MediaLimits(max_image_bytes=100_000, max_image_pixels=10_000)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What Pillow was asked to open."""
    calls: list[object] = []
    open_image = Image.open

    def note(*args: Any, **kwargs: Any) -> Image.Image:
        calls.append(args)
        return open_image(*args, **kwargs)

    monkeypatch.setattr(Image, "open", note)
    return calls


def test_encoded_forms_stay_encoded(tmp_path: Path, opened: list[object]) -> None:
    data = encode(draw(7, 5))
    path = tmp_path / "a.png"
    path.write_bytes(data)
    forms = [data, bytearray(data), memoryview(data), path, str(path), as_url(data)]
    parser = MultiModalDataParser(limits=LIMITS)
    items = parser.parse_mm_data({"image": forms}).get_items("image", ImageProcessorItems)
    assert all(item.original_bytes == data for item in items.get_all_items_for_hash())
    assert len(items) == 6
    assert items.select([1, 2]).get_count() == 2
    assert opened == []
    for index in range(6):
        assert items.get_image_size(index) == (7, 5)
        np.testing.assert_array_equal(np.asarray(items.get(index)), np.asarray(draw(7, 5)))
    assert len(opened) == 6


def test_the_bytes_are_a_copy() -> None:
    data = bytearray(encode(draw(2, 2)))
    image = parse_image(data, LIMITS, param="x")
    data[:] = b""
    assert isinstance(image, EncodedImage)
    assert image.decode().size == (2, 2)


def test_many_threads_decode_once(opened: list[object]) -> None:
    image = EncodedImage(encode(draw(60, 60)), LIMITS)
    barrier = threading.Barrier(8)
    seen: list[object] = []

    def decode() -> None:
        barrier.wait()
        seen.append(image.decode())

    threads = [threading.Thread(target=decode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len({id(media) for media in seen}) == 1
    assert len(opened) == 1


def test_pixels_can_be_dropped_and_made_again(opened: list[object]) -> None:
    image = EncodedImage(encode(draw(4, 4)), LIMITS)
    image.drop_pixels()
    first = weakref.ref(image.decode().media)
    assert first() is not None
    image.drop_pixels()
    gc.collect()
    assert first() is None
    np.testing.assert_array_equal(np.asarray(image.decode().media), np.asarray(draw(4, 4)))
    assert len(opened) == 2


def test_too_many_bytes_are_refused_at_once() -> None:
    with pytest.raises(RequestValueError, match="100001 encoded bytes") as caught:
        EncodedImage(b"x" * 100_001, LIMITS, "there")
    assert caught.value.param == "there"


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (b"", MediaError, "Failed to load image"),
        (b"no picture", MediaError, "Failed to load image"),
        (encode(draw(30, 30))[:200], MediaError, "Failed to load image"),
        (png_header(5000, 2000), RequestValueError, "5000x2000"),
    ],
)
def test_other_faults_show_when_it_is_decoded(
    data: bytes, error: type[RequestError], match: str
) -> None:
    image = EncodedImage(data, LIMITS, "there")
    for _ in range(2):
        with pytest.raises(error, match=match) as caught:
            image.decode()
        assert caught.value.param == "there"
        assert caught.value.status == (422 if error is MediaError else 400)


def test_faults_are_put_into_other_words() -> None:
    def explain(error: RequestError) -> RequestError:
        return MediaError(f"safe {type(error).__name__}", param="here")

    for data in (b"no picture", png_header(5000, 2000)):
        with pytest.raises(MediaError, match="safe") as caught:
            EncodedImage(data, LIMITS, explain=explain).decode()
        assert caught.value.param == "here"
    with pytest.raises(MediaError, match="safe RequestValueError"):
        EncodedImage(b"x" * 100_001, LIMITS, explain=explain)


def test_parsing_twice_keeps_the_picture() -> None:
    image = EncodedImage(encode(draw(2, 2)), LIMITS)
    assert parse_image(image, MediaLimits(), param="x") is image
    assert repr(image) == f"EncodedImage({len(image.original_bytes)} bytes)"


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_programs_id_survives_conversion(mode: str, orientation: int) -> None:
    image_id = uuid.UUID(int=5)
    image = draw(4, 3).convert(mode)
    image.getexif()[ExifTags.Base.ImageID] = image_id
    image.getexif()[ExifTags.Base.Orientation] = orientation
    parsed = parse_image(image, LIMITS, param="x")
    assert isinstance(parsed, Image.Image)
    assert parsed.mode == "RGB"
    assert MultiModalHasher.get_image_id(parsed) == image_id
