"""One clip that is still encoded: its bytes are counted, the decoder waits until it is asked."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mmjax.decoders.audio_file import (
    BYTES_PER_SAMPLE,
    AudioHeader,
    decode_audio,
    read_audio_header,
)
from mmjax.decoders.decode_workers import DecodeWorkers
from mmjax.decoders.limits import MediaLimits, check_audio_bytes
from mmjax.errors import RequestError


class EncodedAudio:
    """One clip as a file's bytes; many threads may share it."""

    def __init__(
        self,
        original_bytes: bytes,
        limits: MediaLimits,
        param: str | None = "audio",
        *,
        explain: Callable[[RequestError], RequestError] | None = None,
        workers: DecodeWorkers | None = None,
    ) -> None:
        """Refuse too many bytes at once; the arguments are those of `EncodedImage`."""
        self.original_bytes = original_bytes
        self.limits = limits
        self.param = param
        self._explain = explain
        self._workers = workers
        self._lock = threading.Lock()
        self._header: AudioHeader | None = None
        self._samples: np.ndarray | None = None
        self._rate = 0
        """Of the samples."""
        try:
            check_audio_bytes(len(original_bytes), limits, param=param)
        except RequestError as error:
            raise self._explained(error) from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.original_bytes)} bytes)"

    @property
    def io_config(self) -> Mapping[str, Any]:
        """Return what tells it from a picture or a video of the same file."""
        return {"modality": "audio"}

    def read_header(self) -> AudioHeader:
        """Return the clip's own rate, channels and seconds, read once; MediaError: it is none."""
        with self._lock:
            if self._header is None:
                read = (self._workers.read_audio_header) if self._workers else read_audio_header
                try:
                    self._header = read(self.original_bytes, self.limits, param=self.param)
                except RequestError as error:
                    raise self._explained(error) from error
            return self._header

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
                decode = self._workers.decode_audio if self._workers else decode_audio
                try:
                    self._samples = decode(self.original_bytes, self.limits, rate, param=self.param)
                except RequestError as error:
                    raise self._explained(error) from error
                self._rate = rate
            return self._samples

    def drop_pixels(self) -> None:
        """Forget what was decoded."""
        with self._lock:
            self._samples = None

    def _explained(self, error: RequestError) -> RequestError:
        return error if self._explain is None else self._explain(error)
