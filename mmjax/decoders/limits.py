"""What is refused of a file before it is decoded."""

import math
from dataclasses import dataclass, fields

from mmjax.errors import RequestValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """What is refused before it is decoded."""

    max_image_bytes: int = 64 * 2**20
    max_image_pixels: int = 50_000_000
    max_video_bytes: int = 128 * 2**20
    max_video_frames: int = 2048
    """Frames of one video, after sampling."""
    max_video_pixels: int = 500_000_000
    """Over all frames of one video."""
    max_audio_bytes: int = 64 * 2**20
    max_audio_seconds: int = 1800
    max_audio_rate: int = 384_000
    """Samples a second of a clip as it is sent."""
    max_audio_channels: int = 8
    max_audio_samples: int = 100_000_000
    """Samples of one clip, before and after resampling; over all channels where it comes as
    samples, whereas those of a file are mixed to one as they are decoded."""

    @classmethod
    def of(cls, settings: object) -> "MediaLimits":
        """Return what an operator's settings say, under the same names."""
        names = [field.name for field in fields(cls) if hasattr(settings, field.name)]
        return cls(**{name: getattr(settings, name) for name in names})

    def max_bytes(self, modality: str) -> int:
        """Return the most bytes of an encoded file of `modality`."""
        return int(getattr(self, f"max_{modality}_bytes"))


def check_bytes(modality: str, num_bytes: int, limits: MediaLimits, *, param: str | None) -> None:
    """Refuse a file that is too large to be looked at."""
    most = limits.max_bytes(modality)
    if num_bytes > most:
        mend = "a smaller file" if modality == "image" else "a shorter or smaller one"
        raise RequestValueError(
            f"{modality} has {num_bytes} encoded bytes, at most {most} are accepted; send {mend}",
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


def check_num_frames(num_frames: int, limits: MediaLimits, *, param: str | None = "video") -> None:
    """Refuse a video without frames, and one with too many of them after sampling."""
    if num_frames < 1:
        raise RequestValueError("video has no frames; give at least one", param=param)
    if num_frames > limits.max_video_frames:
        raise RequestValueError(
            f"video has {num_frames} frames, at most {limits.max_video_frames} are accepted; "
            "sample fewer",
            param=param,
        )


def check_video_size(
    num_frames: int, size: tuple[int, int], limits: MediaLimits, *, param: str | None = "video"
) -> None:
    """Refuse frames that are too many or too large; `size` is (width, height) of each."""
    check_num_frames(num_frames, limits, param=param)
    check_image_size(size, limits, param=param)
    width, height = size
    num_pixels = num_frames * width * height
    if num_pixels > limits.max_video_pixels:
        raise RequestValueError(
            f"video is {num_frames} frames of {width}x{height} = {num_pixels} pixels, at most "
            f"{limits.max_video_pixels} are accepted; sample fewer frames or scale them down",
            param=param,
        )


def check_audio_size(
    rate: float,
    num_channels: int,
    seconds: float,
    limits: MediaLimits,
    *,
    param: str | None = "audio",
) -> None:
    """Refuse a clip with too many samples a second, channels or seconds, or too many in all."""
    if not (1 <= rate <= limits.max_audio_rate and rate == int(rate)):  # NaN fails too
        raise RequestValueError(
            f"audio has the sampling rate {rate}; it must be a whole number from 1 to "
            f"{limits.max_audio_rate}: resample it",
            param=param,
        )
    if not 1 <= num_channels <= limits.max_audio_channels:
        raise RequestValueError(
            f"audio has {num_channels} channels; it must have 1 to {limits.max_audio_channels}: "
            "mix them",
            param=param,
        )
    if seconds > limits.max_audio_seconds:
        raise RequestValueError(
            f"audio lasts {seconds:.1f} s, at most {limits.max_audio_seconds} s are accepted; send "
            "a shorter clip",
            param=param,
        )
    check_num_samples(math.ceil(seconds * rate), limits, param=param)


def check_num_samples(
    num_samples: int, limits: MediaLimits, *, param: str | None = "audio"
) -> None:
    """Refuse a clip with too many samples."""
    if num_samples > limits.max_audio_samples:
        raise RequestValueError(
            f"audio has {num_samples} samples, at most {limits.max_audio_samples} are accepted; "
            "send a shorter clip, or one of a lower sampling rate",
            param=param,
        )
