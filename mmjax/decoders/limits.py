"""What is refused of a file before it is decoded."""

from dataclasses import dataclass

from mmjax.errors import RequestValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """What is refused before it is decoded."""

    max_image_bytes: int = 64 * 2**20
    max_image_pixels: int = 50_000_000
    max_video_frames: int = 2048
    max_video_pixels: int = 500_000_000
    """Over all frames of one video."""
    max_audio_samples: int = 100_000_000
    """Of one item, over all channels, before and after resampling."""


def check_image_bytes(num_bytes: int, limits: MediaLimits, *, param: str | None = "image") -> None:
    """Refuse a file that is too large to be looked at."""
    if num_bytes > limits.max_image_bytes:
        raise RequestValueError(
            f"image has {num_bytes} encoded bytes, at most {limits.max_image_bytes} are accepted; "
            "send a smaller file",
            param=param,
        )


def check_image_size(
    size: tuple[int, int], limits: MediaLimits, *, param: str | None = "image"
) -> None:
    """Refuse an empty image and one with too many pixels; `size` is (width, height)."""
    width, height = size
    if width < 1 or height < 1:
        raise RequestValueError(
            f"image is {width}x{height} pixels; it must have at least one", param=param
        )
    if width * height > limits.max_image_pixels:
        raise RequestValueError(
            f"image is {width}x{height} = {width * height} pixels, at most "
            f"{limits.max_image_pixels} are accepted; scale it down",
            param=param,
        )
