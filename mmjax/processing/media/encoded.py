"""An image that is still encoded: its limits on bytes are checked, the decoder waits until asked.

Most images that come again are never decoded: their bytes say what they are.
"""

import threading
from collections.abc import Callable

from mmjax.decoders.image_file import ImageHeader, read_image_header
from mmjax.decoders.limits import MediaLimits, check_image_bytes
from mmjax.decoders.workers import DecodeWorkers
from mmjax.errors import RequestError
from mmjax.processing.media.decode import MediaWithBytes, load_image_bytes


class EncodedImage:
    """One image as a file's bytes; many threads may share it."""

    __slots__ = (
        "_explain",
        "_header",
        "_lock",
        "_media",
        "_workers",
        "limits",
        "original_bytes",
        "param",
    )

    def __init__(
        self,
        original_bytes: bytes,
        limits: MediaLimits,
        param: str | None = "image",
        *,
        explain: Callable[[RequestError], RequestError] | None = None,
        workers: DecodeWorkers | None = None,
    ) -> None:
        """Refuse too many bytes at once; everything else that is wrong shows when it is decoded.

        Args:
            original_bytes: The file's content.
            limits: What is refused.
            param: The field that is wrong where this image is.
            explain: Puts an error of the decoder into words that a client may read.
            workers: Processes that decode it; None: the threads that ask for it.
        """
        self.original_bytes = original_bytes
        self.limits = limits
        self.param = param
        self._explain = explain
        self._workers = workers
        self._lock = threading.Lock()
        self._media: MediaWithBytes | None = None
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
        """Return the memory that decoding takes; 0 while the pixels are there."""
        return 0 if self._media is not None else self.read_header().num_decoded_bytes

    def decode(self) -> MediaWithBytes:
        """Return the image, upright in RGB, decoded once; MediaError where it is none.

        Again after `drop_pixels`.
        """
        with self._lock:
            if self._media is None:
                try:
                    self._media = self._load()
                except RequestError as error:
                    raise self._explained(error) from error
            return self._media

    def drop_pixels(self) -> None:
        """Forget what was decoded: a request that waits then holds no more than the file."""
        with self._lock:
            self._media = None

    def _load(self) -> MediaWithBytes:
        if self._workers is None:
            return load_image_bytes(self.original_bytes, self.limits, param=self.param)
        image, header = self._workers.decode_image(
            self.original_bytes, self.limits, param=self.param
        )
        return MediaWithBytes(image, self.original_bytes, header.io_config)

    def _explained(self, error: RequestError) -> RequestError:
        return error if self._explain is None else self._explain(error)
