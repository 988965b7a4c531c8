"""One image in any form that the user may give it; and images and videos that are still encoded.

The bytes of these are counted, the decoder waits until it is asked.

Most of them that come again are never decoded: their bytes say what they are.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image

from mmjax.decoders.decode_workers import DecodeWorkers
from mmjax.decoders.image_file import (
    BYTES_PER_PIXEL,
    ImageHeader,
    convert_to_rgb,
    read_image_header,
)
from mmjax.decoders.limits import (
    MediaLimits,
    check_image_bytes,
    check_image_size,
    check_num_frames,
    check_video_bytes,
    check_video_size,
)
from mmjax.decoders.video_file import VideoHeader, VideoSampling, decode_frames, read_video_header
from mmjax.errors import RequestError, RequestTypeError, RequestValueError
from mmjax.processing.media.decode import (
    MediaWithBytes,
    get_image_id,
    image_from_array,
    is_array_like,
    load_image_bytes,
    map_in_threads,
    read_media_path,
    read_media_url,
)
from mmjax.processing.media.decode_budget import DecodeBudget

_EARLY_SHARE = 0.5
"""What early decoding takes of the budget; the rest is for those whose turn has come."""


class PixelRange(NamedTuple):
    """How many pixels an image is scaled to have, both sides alike; 0 and None: any."""

    least: int = 0
    most: int | None = None

    def fit(self, image: Image.Image) -> Image.Image:
        """Return the image within the range."""
        width, height = image.size
        wanted = max(width * height, self.least)
        wanted = wanted if self.most is None else min(wanted, self.most)
        if wanted == width * height:
            return image
        scale = math.sqrt(wanted / (width * height))
        size = (max(1, math.floor(width * scale)), max(1, math.floor(height * scale)))
        return image.resize(size, Image.Resampling.BICUBIC)


class EncodedImage:
    """One image as a file's bytes; many threads may share it."""

    __slots__ = (
        "_explain",
        "_give_back",
        "_header",
        "_lock",
        "_media",
        "_workers",
        "limits",
        "original_bytes",
        "param",
        "pixel_range",
    )

    def __init__(
        self,
        original_bytes: bytes,
        limits: MediaLimits,
        param: str | None = "image",
        *,
        explain: Callable[[RequestError], RequestError] | None = None,
        workers: DecodeWorkers | None = None,
        pixel_range: PixelRange | None = None,
    ) -> None:
        """Refuse too many bytes at once; everything else that is wrong shows when it is decoded.

        Args:
            original_bytes: The file's content.
            limits: What is refused.
            param: The field that is wrong where this image is.
            explain: Puts an error of the decoder into words that a client may read.
            workers: Processes that decode it; None: the threads that ask for it.
            pixel_range: What it is scaled to when it is decoded; None: nothing.
        """
        self.original_bytes = original_bytes
        self.limits = limits
        self.param = param
        self.pixel_range = pixel_range
        self._explain = explain
        self._workers = workers
        self._lock = threading.Lock()
        self._media: MediaWithBytes | None = None
        self._give_back: Callable[[], None] | None = None
        """Frees what `decode_early` took of a budget."""
        self._header: ImageHeader | None = None
        try:
            check_image_bytes(len(original_bytes), limits, param=param)
        except RequestError as error:
            raise self._explained(error) from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.original_bytes)} bytes)"

    def read_header(self) -> ImageHeader:
        """Return what the file says of the image, read once; MediaError where it is none."""
        with self._lock:
            if self._header is None:
                try:
                    read = read_image_header if self._workers is None else self._workers.read_header
                    self._header = read(self.original_bytes, self.limits, param=self.param)
                except RequestError as error:
                    raise self._explained(error) from error
            return self._header

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
            try:
                self._media = self._load()
            except RequestError as error:
                raise self._explained(error) from error
        return self._media

    def _drop(self) -> None:
        self._media = None
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def _load(self) -> MediaWithBytes:
        if self._workers is None:
            media = load_image_bytes(self.original_bytes, self.limits, param=self.param)
        else:
            image, header = self._workers.decode_image(
                self.original_bytes, self.limits, param=self.param
            )
            media = MediaWithBytes(image, self.original_bytes, header.io_config)
        if self.pixel_range is None:
            return media
        scaled = self.pixel_range.fit(media.media)
        return MediaWithBytes(scaled, self.original_bytes, self._with_range(media.io_config))

    def _explained(self, error: RequestError) -> RequestError:
        return error if self._explain is None else self._explain(error)


class DecodedVideo(NamedTuple):
    """What a video's file holds."""

    frames: np.ndarray
    """uint8[frames, height, width, 3]."""
    metadata: Mapping[str, Any] | None
    """Under the names of HF's `VideoMetadata`; None where nobody says."""


class EncodedVideo:
    """One video as a file's bytes; many threads may share it."""

    def __init__(
        self,
        original_bytes: bytes,
        limits: MediaLimits,
        param: str | None = "video",
        *,
        sampling: VideoSampling | None = None,
        explain: Callable[[RequestError], RequestError] | None = None,
        workers: DecodeWorkers | None = None,
    ) -> None:
        """Refuse too many bytes at once; the arguments are those of `EncodedImage`."""
        self.original_bytes = original_bytes
        self.limits = limits
        self.param = param
        self.sampling = sampling or VideoSampling()
        self._explain = explain
        self._workers = workers
        self._lock = threading.Lock()
        self._header: VideoHeader | None = None
        self._video: DecodedVideo | None = None
        try:
            check_video_bytes(len(original_bytes), limits, param=param)
        except RequestError as error:
            raise self._explained(error) from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.original_bytes)} bytes)"

    @property
    def io_config(self) -> Mapping[str, Any]:
        """Return which frames are taken."""
        return self.sampling._asdict()

    @property
    def num_bytes_to_decode(self) -> int:
        """Return the memory that the frames take; 0 while they are there."""
        if self._video is not None:
            return 0
        with self._lock:
            header = self._header
            if header is None:
                workers = self._workers
                read = read_video_header if workers is None else workers.read_video_header
                header = self._header = self._ask(read)
            return header.num_decoded_bytes

    def decode(self) -> DecodedVideo:
        """Return the sampled frames, and what HF's processors are told of them."""
        with self._lock:
            if self._video is None:
                decode = decode_frames if self._workers is None else self._workers.decode_frames
                frames, header, indices = self._ask(decode)
                self._video = DecodedVideo(frames, _metadata_of(header, indices))
            return self._video

    def drop_pixels(self) -> None:
        """Forget what was decoded."""
        with self._lock:
            self._video = None

    def _ask(self, function: Callable[..., Any]) -> Any:
        try:
            return function(self.original_bytes, self.limits, self.sampling, param=self.param)
        except RequestError as error:
            raise self._explained(error) from error

    def _explained(self, error: RequestError) -> RequestError:
        return error if self._explain is None else self._explain(error)


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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.frames)} frames)"

    @property
    def num_bytes_to_decode(self) -> int:
        """Return the memory that the frames take; 0 while they are there."""
        return sum(frame.num_bytes_to_decode for frame in self.frames)

    def decode(self) -> DecodedVideo:
        """Return the frames; how fast they are, nobody says."""
        sizes = {frame.read_header()[:2] for frame in self.frames}
        if len(sizes) == 1:
            (size,) = sizes
            check_video_size(len(self.frames), size, self.limits, param=self.param)
            images = map_in_threads(lambda frame: frame.decode().media, self.frames)
            sizes = {image.size for image in images}  # some may be turned
            if len(sizes) == 1:
                return DecodedVideo(np.stack([np.asarray(image) for image in images]), None)
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
    if isinstance(entry, bytes | bytearray | memoryview):
        return EncodedImage(bytes(entry), limits, param)
    if isinstance(entry, Path):
        return EncodedImage(read_media_path(entry, limits, param=param), limits, param)
    if isinstance(entry, str):
        is_url = "://" in entry[:16] or entry[:5].lower() == "data:"
        if is_url:
            return EncodedImage(read_media_url(entry, limits, param=param), limits, param)
        return EncodedImage(read_media_path(Path(entry), limits, param=param), limits, param)
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
