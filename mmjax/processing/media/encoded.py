"""One image in any form that the user may give it; and media that are still encoded.

The bytes of these are counted, the decoder waits until it is asked.

Most of them that come again are never decoded: their bytes say what they are.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from PIL import ExifTags, Image

from mmjax.decoders.audio_file import (
    BYTES_PER_SAMPLE,
    AudioHeader,
    decode_audio,
    decode_sound,
    read_audio_header,
    read_sound_header,
)
from mmjax.decoders.decode_workers import DecodeWorkers
from mmjax.decoders.image_file import (
    BYTES_PER_PIXEL,
    ImageHeader,
    convert_to_rgb,
    decode_image,
    read_image_header,
)
from mmjax.decoders.limits import (
    MediaLimits,
    check_bytes,
    check_image_size,
    check_num_frames,
    check_video_size,
)
from mmjax.decoders.video_file import VideoHeader, VideoSampling, decode_frames, read_video_header
from mmjax.errors import RequestError, RequestTypeError, RequestValueError
from mmjax.processing.media.decode import (
    FILES,
    MediaWithBytes,
    get_image_id,
    image_from_array,
    is_array_like,
    map_in_threads,
    read_media,
)
from mmjax.processing.media.decode_budget import DecodeBudget

HeaderT = TypeVar("HeaderT")
R = TypeVar("R")

_EARLY_SHARE = 0.5
"""What early decoding takes of the budget; the rest is for those whose turn has come."""


class PixelRange(NamedTuple):
    """How many pixels an image is scaled to have, both sides alike; 0 and None: any."""

    least: int = 0
    most: int | None = None

    def fit_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of an image within the range."""
        wanted = max(width * height, self.least)
        wanted = wanted if self.most is None else min(wanted, self.most)
        if wanted == width * height:
            return width, height
        scale = math.sqrt(wanted / (width * height))
        return max(1, math.floor(width * scale)), max(1, math.floor(height * scale))

    def fit(self, image: Image.Image) -> Image.Image:
        """Return the image within the range."""
        size = self.fit_size(*image.size)
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


class EncodedMedia(Generic[HeaderT]):
    """One image, video or clip as a file's bytes; many threads may share it."""

    __slots__ = (
        *("_digest", "_explain", "_header", "_lock", "_workers"),
        *("limits", "original_bytes", "param"),
    )
    modality: ClassVar[str]

    def __init__(
        self,
        original_bytes: bytes,
        limits: MediaLimits,
        param: str | None = None,
        *,
        explain: Callable[[RequestError], RequestError] | None = None,
        workers: DecodeWorkers | None = None,
    ) -> None:
        """Refuse too many bytes at once; everything else that is wrong shows when it is decoded.

        Args:
            original_bytes: The file's content.
            limits: What is refused.
            param: The field that is wrong where this file is; None: that of the modality's name.
            explain: Puts an error of the decoder into words that a client may read.
            workers: Processes that decode it; None: the threads that ask for it.
        """
        self.original_bytes = original_bytes
        self.limits = limits
        self.param = self.modality if param is None else param
        self._explain = explain
        self._workers = workers
        self._lock = threading.Lock()
        self._header: HeaderT | None = None
        self._digest: tuple[Callable[[bytes], Any], bytes] | None = None
        with self._explaining():
            check_bytes(self.modality, len(original_bytes), limits, param=self.param)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.original_bytes)} bytes)"

    def digest(self, new_hash: Callable[[bytes], Any]) -> bytes:
        """Return the digest of the file's content, computed once for one kind of hash."""
        if self._digest is None or self._digest[0] is not new_hash:
            self._digest = (new_hash, new_hash(self.original_bytes).digest())
        return self._digest[1]

    def read_header(self) -> HeaderT:
        """Return what the file says of itself, read once; MediaError where it is no such file."""
        with self._lock:
            if self._header is None:
                self._header = self._read_header()
            return self._header

    def _read_header(self) -> HeaderT:
        raise NotImplementedError(f"{type(self).__name__} must read its header")

    def _ask(self, here: Callable[..., R], name: str, *options: Any) -> R:
        """Return what a decoder makes of the file: `here`, or in a worker process by its name."""
        decode = here if self._workers is None else getattr(self._workers, name)
        with self._explaining():
            return decode(self.original_bytes, self.limits, *options, param=self.param)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except RequestError as error:
            if self._explain is None:
                raise
            raise self._explain(error) from error


class EncodedImage(EncodedMedia[ImageHeader]):
    """One image as a file's bytes."""

    __slots__ = ("_give_back", "_media", "_upright_size", "pixel_range")
    modality = "image"

    def __init__(self, *args: Any, pixel_range: PixelRange | None = None, **kwargs: Any) -> None:
        """`pixel_range`: what it is scaled to when it is decoded; None: nothing."""
        super().__init__(*args, **kwargs)
        self.pixel_range = pixel_range
        self._upright_size: tuple[int, int] | None = None
        self._media: MediaWithBytes | None = None
        self._give_back: Callable[[], None] | None = None
        """Frees what `decode_early` took of a budget."""

    def _read_header(self) -> ImageHeader:
        return self._ask(read_image_header, "read_header")

    @property
    def num_bytes_to_decode(self) -> int:
        """Return the memory that decoding takes; 0 while the pixels are there.

        Those that were decoded early count as if they were not there.
        """
        if self._media is not None and self._give_back is None:
            return 0
        least = 0 if self.pixel_range is None else self.pixel_range.least * BYTES_PER_PIXEL
        return max(self.read_header().num_decoded_bytes, least)

    @property
    def io_config(self) -> Mapping[str, Any] | None:
        """Return how decoding alters the pixels; see `MediaWithBytes`."""
        return self._with_range(self.read_header().io_config)

    def find_upright_size(self) -> tuple[int, int] | None:
        """Return the width and height of the image as it was sent; None: it must be decoded."""
        return self._upright_size or self.read_header().upright_size

    def _with_range(self, altered: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if self.pixel_range is None:
            return altered
        return {**(altered or {}), **self.pixel_range._asdict()}

    def decode(self) -> MediaWithBytes:
        """Return the image, upright in RGB, decoded once; MediaError where it is none.

        Again after `drop_pixels`.
        """
        with self._lock:
            return self._decode()

    def decode_early(self, budget: DecodeBudget) -> None:
        """Decode it before its turn, if half of `budget` is free; its bytes count there meanwhile.

        Until `drop_pixels`. MediaError where it is no image.
        """
        num_bytes = self.num_bytes_to_decode
        with self._lock:
            if self._media is not None or not budget.try_take(num_bytes, _EARLY_SHARE):
                return
            self._give_back = partial(budget.give_back, num_bytes)
            try:
                self._decode()
            finally:
                if self._media is None:
                    self._drop()

    def drop_pixels(self) -> None:
        """Forget what was decoded: a request that waits then holds no more than the file."""
        with self._lock:
            self._drop()

    def _decode(self) -> MediaWithBytes:
        if self._media is None:
            self._media = self._load()
        return self._media

    def _drop(self) -> None:
        self._media = None
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def _load(self) -> MediaWithBytes:
        image, header = self._ask(decode_image, "decode_image")
        self._upright_size = image.size
        media = MediaWithBytes(image, bytes(self.original_bytes), header.io_config)
        if self.pixel_range is None:
            return media
        scaled = self.pixel_range.fit(media.media)
        return MediaWithBytes(scaled, self.original_bytes, self._with_range(media.io_config))


class DecodedVideo(NamedTuple):
    """What a video's file holds."""

    frames: np.ndarray
    """uint8[frames, height, width, 3]."""
    metadata: Mapping[str, Any] | None
    """Under the names of HF's `VideoMetadata`; None where nobody says."""


class EncodedVideo(EncodedMedia[VideoHeader]):
    """One video as a file's bytes."""

    modality = "video"

    def __init__(self, *args: Any, sampling: VideoSampling | None = None, **kwargs: Any) -> None:
        """`sampling`: which frames are decoded."""
        super().__init__(*args, **kwargs)
        self.sampling = sampling or VideoSampling()
        self._video: DecodedVideo | None = None
        self._sound: np.ndarray | None = None

    def _read_header(self) -> VideoHeader:
        return self._ask(read_video_header, "read_video_header", self.sampling)

    @property
    def io_config(self) -> Mapping[str, Any]:
        """Return which frames are taken."""
        return self.sampling._asdict()

    @property
    def num_bytes_to_decode(self) -> int:
        """Return the memory that the frames take; 0 while they are there."""
        return 0 if self._video is not None else self.read_header().num_decoded_bytes

    def decode(self) -> DecodedVideo:
        """Return the sampled frames, and what HF's processors are told of them."""
        with self._lock:
            if self._video is None:
                frames, header, indices = self._ask(decode_frames, "decode_frames", self.sampling)
                self._video = DecodedVideo(frames, _metadata_of(header, indices))
            return self._video

    def count_sound_bytes(self) -> int:
        """Return the memory that its sound takes at its own rate; 0 while the samples are there."""
        if self._sound is not None:
            return 0
        header = self._ask(read_sound_header, "read_sound_header")
        return 0 if header is None else header.count_samples(header.rate) * BYTES_PER_SAMPLE

    def decode_sound(self, rate: int) -> np.ndarray:
        """Return float32[T], one channel, `rate` samples a second; of a silent video none."""
        with self._lock:
            if self._sound is None:
                self._sound = self._ask(decode_sound, "decode_sound", rate)
            return self._sound

    def drop_pixels(self) -> None:
        """Forget what was decoded."""
        with self._lock:
            self._video = self._sound = None


class EncodedAudio(EncodedMedia[AudioHeader]):
    """One clip as a file's bytes."""

    modality = "audio"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._samples: np.ndarray | None = None
        self._rate = 0
        """Of the samples."""

    def _read_header(self) -> AudioHeader:
        return self._ask(read_audio_header, "read_audio_header")

    @property
    def io_config(self) -> Mapping[str, Any]:
        """Return what tells it from a picture or a video of the same file."""
        return {"modality": "audio"}

    @property
    def num_bytes_to_decode(self) -> int:
        """Return the memory that its samples take at its own rate; 0 while they are there."""
        if self._samples is not None:
            return 0
        header = self.read_header()
        return header.count_samples(header.rate) * BYTES_PER_SAMPLE

    def decode(self, rate: int) -> np.ndarray:
        """Return float32[T], one channel, `rate` samples a second; decoded once for a rate."""
        with self._lock:
            if self._samples is None or self._rate != rate:
                self._samples = self._ask(decode_audio, "decode_audio", rate)
                self._rate = rate
            return self._samples

    def drop_pixels(self) -> None:
        """Forget what was decoded."""
        with self._lock:
            self._samples = None


def _metadata_of(header: VideoHeader, indices: Sequence[int]) -> Mapping[str, Any]:
    """Return what is known under the names of HF's `VideoMetadata`."""
    known = {"total_num_frames": header.total_num_frames, "frames_indices": list(indices)}
    if not header.fps:
        return known
    return {**known, "fps": header.fps, "duration": header.total_num_frames / header.fps}


class EncodedFrames:
    """One video as its frames, each an encoded image; all of one size."""

    def __init__(
        self, frames: Sequence[EncodedImage], limits: MediaLimits, param: str | None = "video"
    ) -> None:
        """Refuse too many frames at once."""
        check_num_frames(len(frames), limits, param=param)
        self.frames = tuple(frames)
        self.limits = limits
        self.param = param
        self.fps: float | None = None
        """Frames a second, where the request says so."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.frames)} frames)"

    def with_fps(self, fps: float) -> "EncodedFrames":
        """Return the same video of so many frames a second."""
        timed = copy(self)
        timed.fps = fps
        return timed

    @property
    def num_bytes_to_decode(self) -> int:
        """Return the memory that the frames take; 0 while they are there."""
        return sum(frame.num_bytes_to_decode for frame in self.frames)

    def decode(self) -> DecodedVideo:
        """Return the frames; how fast they are, the request alone may say."""
        sizes = {frame.read_header()[:2] for frame in self.frames}
        if len(sizes) == 1:
            (size,) = sizes
            check_video_size(len(self.frames), size, self.limits, param=self.param)
            images = map_in_threads(lambda frame: frame.decode().media, self.frames)
            sizes = {image.size for image in images}  # some may be turned
            if len(sizes) == 1:
                metadata = None if self.fps is None else {"fps": self.fps}
                return DecodedVideo(np.stack([np.asarray(image) for image in images]), metadata)
        shown = ", ".join(f"{width}x{height}" for width, height in sorted(sizes)[:3])
        raise RequestValueError(
            f"`{self.param}`: the frames have several sizes, {shown}; scale them to one",
            param=self.param,
        )

    def drop_pixels(self) -> None:
        """Forget what was decoded."""
        for frame in self.frames:
            frame.drop_pixels()


def parse_image(
    entry: Any, limits: MediaLimits, *, param: str
) -> Image.Image | MediaWithBytes | EncodedImage | None:
    """Return an upright RGB image; one that came encoded stays so, and decodes when used."""
    if entry is None or isinstance(entry, EncodedImage):
        return entry
    if isinstance(entry, MediaWithBytes):
        if isinstance(entry.media, Image.Image):
            check_image_size(entry.media.size, limits, param=param)
            return entry
        entry = entry.media  # an array, or nothing that is an image
    if isinstance(entry, Image.Image):
        check_image_size(entry.size, limits, param=param)
        return _convert(entry, param)
    if isinstance(entry, FILES):
        data = read_media(entry, limits, param=param, modality="image")
        return EncodedImage(data, limits, param)
    if is_array_like(entry):
        return image_from_array(entry, limits, param=param)
    raise RequestTypeError(
        f"{param} has the type `{type(entry).__name__}`; give a PIL image, an array, "
        "bytes, a path or a data URL",
        param=param,
    )


def _convert(image: Image.Image, param: str) -> Image.Image:
    image_id = get_image_id(image)
    try:
        rgb = convert_to_rgb(image)
        if image_id is not None and rgb is not image:
            # Conversion drops what a program wrote beside the pixels: the id goes with them.
            rgb.getexif()[ExifTags.Base.ImageID] = image_id
        return rgb
    except RequestError:
        raise
    # A lazily opened image decodes here, and a truncated one fails here.
    except Exception as error:
        raise RequestValueError(
            f"image cannot be decoded: {error or type(error).__name__}; give a whole image",
            param=param,
        ) from error
