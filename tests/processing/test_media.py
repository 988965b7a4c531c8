"""Decoding within limits: transparency, EXIF, arrays, data URLs, and everything that is refused."""

import base64
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, PngImagePlugin

from mmjax.decoders.image_file import convert_to_rgb, decode_image
from mmjax.decoders.limits import MediaLimits
from mmjax.errors import MediaError, RequestError, RequestTypeError, RequestValueError
from mmjax.processing.media.decode import (
    MediaWithBytes,
    decode_data_url,
    image_from_array,
    read_media,
)
from tests.kit import draw

LIMITS = MediaLimits(max_image_bytes=100_000, max_image_pixels=10_000)


def load_image_bytes(data: bytes, limits: MediaLimits, **options: Any) -> MediaWithBytes:
    image, header = decode_image(data, limits, **options)
    return MediaWithBytes(image, data, header.io_config)


def encode(image: Image.Image, kind: str = "PNG", **kwargs: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **kwargs)
    return buffer.getvalue()


def as_url(data: bytes, header: str = "data:image/png;base64,") -> str:
    return header + base64.b64encode(data).decode()


def png_header(width: int, height: int) -> bytes:
    """A PNG that promises a picture, with nothing behind the promise."""
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    chunk = b"IHDR" + size + b"\x08\x02\x00\x00\x00"
    checksum = zlib.crc32(chunk).to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0d" + chunk + checksum + b"\x00\x00\x00\x00IDAT"


def two_colours(mode: str) -> Image.Image:
    """A red pixel that is seen, and one that is not."""
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (255, 0, 0, 0))
    if mode in ("P", "PA"):
        paletted = Image.new(mode, (2, 1))
        paletted.putpalette([255, 0, 0, 0, 255, 0])
        paletted.putpixel((0, 0), 0 if mode == "P" else (0, 255))
        paletted.putpixel((1, 0), 1 if mode == "P" else (1, 0))
        if mode == "P":
            paletted.info["transparency"] = 1
        return paletted
    return image.quantize(2) if mode == "P of RGBA" else image.convert(mode)


class TestDecoding:
    @pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF"])
    def test_lossless_formats_give_back_the_picture(self, kind: str):
        image = draw(16, 9).quantize(64).convert("RGB")
        options = {"lossless": True} if kind == "WEBP" else {}
        media = load_image_bytes(encode(image, kind, **options), LIMITS)
        assert media.mode == "RGB"
        if kind != "GIF":
            np.testing.assert_array_equal(np.asarray(media), np.asarray(image))

    @pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "P of RGBA"])
    def test_transparency_shows_white(self, mode: str):
        rgb = convert_to_rgb(two_colours(mode))
        assert rgb.mode == "RGB"
        assert rgb.getpixel((1, 0)) == (255, 255, 255)
        seen = rgb.getpixel((0, 0))
        assert seen == ((76, 76, 76) if mode == "LA" else (255, 0, 0))

    def test_a_transparent_palette_survives_its_file(self):
        media = load_image_bytes(encode(two_colours("P"), transparency=1), LIMITS)
        assert media.getpixel((1, 0)) == (255, 255, 255)
        assert media.io_config == {
            "image_mode": "RGB",
            "rgba_background_color": (255, 255, 255),
        }
        assert load_image_bytes(encode(draw(2, 2)), LIMITS).io_config is None

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_exif_turns_the_picture_upright_once(self, orientation: int):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        media = load_image_bytes(encode(draw(8, 4), exif=exif), LIMITS)
        assert media.size == ((4, 8) if orientation > 4 else (8, 4))
        again = convert_to_rgb(media.media)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(media.media))

    def test_malformed_exif_does_not_spoil_a_sound_picture(self):
        data = encode(draw(4, 4), exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
        assert load_image_bytes(data, LIMITS).size == (4, 4)

    def test_the_first_frame_of_many_is_taken(self):
        frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
        data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
        assert load_image_bytes(data, LIMITS).getpixel((0, 0)) == (255, 0, 0)

    def test_sixteen_bit_greys_are_scaled_not_clipped(self):
        grey = Image.fromarray(np.array([[0, 32768, 65535]], dtype=np.uint16))
        rgb = load_image_bytes(encode(grey), LIMITS)
        assert [rgb.getpixel((x, 0))[0] for x in range(3)] == [0, 128, 255]

    def test_an_upright_rgb_picture_is_not_copied(self):
        image = draw(3, 3)
        assert convert_to_rgb(image) is image


class TestLimits:
    def test_too_many_bytes(self):
        with pytest.raises(RequestValueError, match="100001 encoded bytes, at most 100000"):
            load_image_bytes(b"x" * 100_001, LIMITS)

    def test_pixels_are_counted_before_decoding(self):
        with pytest.raises(RequestValueError, match="5000x2000 = 10000000 pixels") as caught:
            load_image_bytes(png_header(5000, 2000), LIMITS, param="messages")
        assert caught.value.status == 400
        assert caught.value.param == "messages"

    @pytest.mark.parametrize("format", ["PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF"])
    def test_what_pillow_itself_refuses_is_told_its_size(
        self, format: str, monkeypatch: pytest.MonkeyPatch
    ):
        data = encode(draw(300, 200), format)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
        words = "300x200 = 60000 pixels, at most 100 are accepted"
        if format == "WEBP":  # its plugin does not tell the sides
            words = r"\(60000 pixels\).*at most 100 pixels are accepted"
        with pytest.raises(RequestValueError, match=words):
            load_image_bytes(data, MediaLimits(max_image_pixels=100))
        with pytest.raises(RequestValueError, match=r"\(60000 pixels\) exceeds limit of 20 pixels"):
            load_image_bytes(data, MediaLimits())

    def test_a_text_bomb_in_a_png_is_refused(self):
        text = PngImagePlugin.PngInfo()
        text.add_text("comment", "a" * 3_000_000, zip=True)
        with pytest.raises(RequestError):
            load_image_bytes(encode(draw(2, 2), pnginfo=text), LIMITS)

    @pytest.mark.parametrize("kind", ["ICO", "PPM", "TGA", "EPS"])
    def test_other_formats_are_not_even_tried(self, kind: str):
        with pytest.raises(MediaError, match="PNG, JPEG, WEBP, GIF, BMP, TIFF") as caught:
            load_image_bytes(encode(draw(16, 16), kind), LIMITS)
        assert caught.value.status == 422

    @pytest.mark.parametrize("data", [b"", b"not a picture", encode(draw(30, 30))[:200]])
    def test_broken_files(self, data: bytes):
        with pytest.raises(MediaError, match="Failed to load image"):
            load_image_bytes(data, LIMITS)

    @settings(max_examples=200, deadline=None)
    @given(
        st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]),
        st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=6),
        st.integers(0, 2000),
    )
    def test_damaged_files_decode_or_are_refused(
        self, kind: str, damage: list[tuple[int, int]], cut: int
    ):
        data = bytearray(encode(draw(20, 15), kind))
        for place, value in damage:
            data[place % len(data)] = value
        try:
            media = load_image_bytes(bytes(data[: len(data) - cut % 40]), LIMITS)
        except RequestError:
            return
        assert media.mode == "RGB"


def read(entry: str | Path) -> bytes:
    return read_media(entry, LIMITS, param="photo", modality="image")


class TestUrls:
    def test_a_data_url_holds_a_picture(self):
        data = encode(draw(4, 5))
        for header in ("data:image/png;base64,", "DATA:;charset=x;base64,", "data:;base64,"):
            assert read(as_url(data, header)) == data

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("http://host/a.png", "`http:` URLs are fetched for messages alone"),
            ("HTTPS://host/a.png", "`https:` URLs are fetched for messages"),
            ("file:///etc/passwd", "`file:` URLs are fetched for messages"),
            ("ftp://host/a.png", "must be a base64 `data:` URL"),
            ("data:image/png;base64", "missing ','"),
            ("data:image/png,abc", "only base64 payloads"),
            ("data:image/png;BASE64,AAAA", "only base64 payloads"),
            ("data:image/png; base64,AAAA", "only base64 payloads"),
            ("data:image/png;base64,AA\nAA", r"invalid base64: it is several lines.*base64 -w0"),
            ("data:image/png;base64,AAA=\n", "several lines"),
            ("data:image/png;base64,AAA", "invalid base64"),
            ("data:image/png;base64,ÄÖ==", "invalid base64"),
            ("data:image/png;base64," + "A" * 200_000, "at most 100000"),
        ],
    )
    def test_everything_else_is_refused(self, url: str, message: str):
        with pytest.raises(RequestError, match=message) as caught:
            read(url)
        assert caught.value.param == "photo"


class TestPaths:
    def test_a_file_is_read(self, tmp_path: Path):
        path = tmp_path / "a.png"
        path.write_bytes(encode(draw(6, 7)))
        assert read(path) == read(str(path)) == path.read_bytes()

    def test_what_cannot_be_read_is_named(self, tmp_path: Path):
        big = tmp_path / "big.png"
        big.write_bytes(b"x" * 100_001)
        cases = [
            (tmp_path / "no.png", "cannot be read"),
            (tmp_path, "cannot be read"),
            (big, "100001"),
        ]
        for path, message in [*cases, (Path("a\0b"), "cannot be read")]:
            with pytest.raises(RequestValueError, match=message):
                read(path)


class TestArrays:
    @pytest.mark.parametrize("shape", [(4, 6, 3), (3, 4, 6), (4, 6, 1), (1, 4, 6), (4, 6, 4)])
    def test_layouts(self, shape: tuple[int, ...]):
        pixels = np.full(shape, 255, dtype=np.uint8)
        assert image_from_array(pixels, LIMITS).size == (6, 4)

    def test_values_survive(self):
        image = draw(5, 4)
        pixels = np.asarray(image)
        for array in (
            pixels,
            pixels.astype(np.int64),
            jnp.asarray(pixels),
            pixels / 255,
            jnp.asarray(pixels / np.float32(255)),
            np.moveaxis(pixels, -1, 0),
        ):
            np.testing.assert_array_equal(np.asarray(image_from_array(array, LIMITS)), pixels)

    def test_bfloat16_is_a_float(self):
        array = np.ones((2, 2, 3), dtype=ml_dtypes.bfloat16)
        assert image_from_array(array, LIMITS).getpixel((0, 0)) == (255, 255, 255)

    @pytest.mark.parametrize(
        ("array", "error", "message"),
        [
            (np.zeros((4, 6), np.uint8), RequestValueError, r"shape \(4, 6\)"),
            (np.zeros((5, 6, 5), np.uint8), RequestValueError, "1, 3 or 4 channels"),
            (np.zeros((0, 6, 3), np.uint8), RequestValueError, "6x0 pixels"),
            (np.zeros((200, 200, 3), np.uint8), RequestValueError, "40000 pixels"),
            (np.full((2, 2, 3), 256), RequestValueError, "0..255 for integers"),
            (np.full((2, 2, 3), -1), RequestValueError, "0..255 for integers"),
            (np.full((2, 2, 3), 2.0), RequestValueError, "0..1 for floats"),
            (np.full((2, 2, 3), np.nan), RequestValueError, "0..1 for floats"),
            (np.full((2, 2, 3), "a"), RequestTypeError, "must be uint8"),
            (np.full((2, 2, 3), True), RequestTypeError, "must be uint8"),
        ],
    )
    def test_what_is_no_picture_is_refused(
        self, array: np.ndarray, error: type[Exception], message: str
    ):
        with pytest.raises(error, match=message):
            image_from_array(array, LIMITS)


def test_one_transparent_grey_of_16_bits_leaves_the_others():
    greys = Image.fromarray(np.array([[0, 0x2000, 0xE0FF]], np.uint16))
    image, header = decode_image(encode(greys, transparency=0x2000), LIMITS)
    assert header.has_transparency
    assert np.asarray(image)[0, :, 0].tolist() == [0, 255, 0xE0]


def test_media_with_bytes_behaves_as_its_medium():
    image = draw(3, 2)
    media = MediaWithBytes(image, b"")
    assert media.size == (3, 2)
    np.testing.assert_array_equal(np.asarray(media), np.asarray(image))
    assert list(MediaWithBytes([1, 2], b"")) == [1, 2]
    assert MediaWithBytes([1, 2], b"")[1] == 2


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 3, 196_607, 196_608, 196_609, 500_000])
def test_long_payloads_are_decoded_in_pieces(num_bytes: int):
    """262,144 characters, which 196,608 bytes have, are one piece."""
    data = bytes(index * 7 % 256 for index in range(num_bytes))
    limits = MediaLimits()
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    assert decode_data_url(url, limits, param=None, modality="image") == data
    for damaged in (
        url[:40] + "=" + url[41:],
        url + "A",
        url[:-1] + "é",
        url[:30] + " " + url[31:],
    ):
        if num_bytes > 3:
            with pytest.raises(MediaError, match="invalid base64"):
                decode_data_url(damaged, limits, param=None, modality="image")
