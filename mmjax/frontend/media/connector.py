"""The one way from the URL of a medium, of any scheme, to the file's bytes.

`data:` URLs are decoded at once, in the caller's thread. Others are noted while a request is
parsed, and fetched together once the rest of it is known to be right.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeGuard

from mmjax.config.engine_config import MultiModalConfig
from mmjax.decoders.audio_file import SHOWN_AUDIO_FORMATS
from mmjax.decoders.decode_workers import DecodeWorkers
from mmjax.decoders.image_file import IMAGE_FORMATS
from mmjax.decoders.limits import MediaLimits, check_bytes, check_num_frames
from mmjax.decoders.video_file import SHOWN_FORMATS, VideoSampling
from mmjax.errors import CapacityError, MediaError, RequestError, RequestValueError
from mmjax.frontend.media.http import HttpFetcher
from mmjax.frontend.media.local_file import read_local_file
from mmjax.frontend.media.urls import HttpUrl, parse_http_url, refuse_url
from mmjax.frontend.requests.prompts import PromptDict, PromptType
from mmjax.processing.media.decode import decode_data_url, decode_payload, find_payload
from mmjax.processing.media.decode_budget import MAX_BATCH_BYTES, DecodeBudget
from mmjax.processing.media.encoded import (
    EncodedAudio,
    EncodedFrames,
    EncodedImage,
    EncodedVideo,
    PixelRange,
)
from mmjax.system.request_times import measuring

EncodedMedium = EncodedImage | EncodedVideo | EncodedFrames | EncodedAudio

_MAX_FETCHED_AT_ONCE = 8
"""Files of one request."""
_FRAMES_START = "data:video/jpeg;base64,"
"""How a URL begins that holds frames, with commas between them, as vLLM takes it."""


@dataclass(frozen=True, slots=True)
class PendingMedia:
    """A medium that is yet to be fetched; stands in `multi_modal_data` until then."""

    url: HttpUrl | str
    """A text is a `file:` URL."""
    place: str = field(compare=False)
    """The field of the request; the same file at several is fetched once."""
    pixel_range: PixelRange | None = None
    """What an image is scaled to; None: its own size."""
    sampling: VideoSampling | None = None
    """Which frames of a video are taken."""
    modality: Literal["image", "video", "audio"] = "image"


class MediaConnector:
    """Turns URLs into encoded media, under one set of limits; threads share it."""

    def __init__(
        self,
        mm: MultiModalConfig,
        *,
        workers: DecodeWorkers | None = None,
        budget: DecodeBudget | None = None,
        is_cached: Callable[[str, EncodedMedium, str | None], bool] = lambda *item: False,
    ) -> None:
        """Open media by the settings.

        Args:
            mm: The settings.
            workers: Processes that decode what comes from here; None: the threads that use it.
            budget: What images take that are decoded as they arrive; None: they wait for the others
                of their request.
            is_cached: Whether an item, of a modality, is there already, of prompts with a salt.
        """
        self.mm = mm
        self.is_cached = is_cached
        self.budget = budget
        self._workers = workers
        self.threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="mmjax-fetched")
        self._limits = MediaLimits.of(mm)
        self._fetcher = HttpFetcher(mm)
        self._turns = asyncio.Semaphore(mm.media_fetch_concurrency)
        self.num_held_bytes = 0
        """Fetched, of requests that are not processed yet."""

    @classmethod
    def with_workers(
        cls, mm: MultiModalConfig, *, num_cores: int, **decoding: Any
    ) -> "MediaConnector":
        """Return one that decodes in processes, unless the settings say otherwise."""
        num_workers = mm.media_decode_workers
        if num_workers is None:
            num_workers = min(num_cores, 4)
        if num_workers == 0:
            return cls(mm, **decoding)
        workers = DecodeWorkers(
            num_workers, timeout_s=mm.media_decode_timeout_s, memory_bytes=mm.decode_memory_bytes
        )
        return cls(mm, workers=workers, **decoding)

    def open_image(
        self, url: str, place: str, pixel_range: PixelRange | None = None
    ) -> EncodedMedium | PendingMedia:
        """Return the image of a URL, decoded from base64 or noted; RequestError names `place`."""
        return self._open(url, PendingMedia(url, place, pixel_range))

    def open_video(
        self, url: str, place: str, options: Mapping[str, Any] | None = None
    ) -> EncodedMedium | PendingMedia:
        """Return the video of a URL, as `open_image` does; `options`: of `media_io_kwargs`."""
        if url[: len(_FRAMES_START)].lower() == _FRAMES_START:
            return self._open_frames(url, place)
        sampling = VideoSampling(**{**self.mm.media_io_kwargs.get("video", {}), **(options or {})})
        return self._open(url, PendingMedia(url, place, sampling=sampling, modality="video"))

    def open_audio(self, url: str, place: str) -> EncodedMedium | PendingMedia:
        """Return the clip of a URL, as `open_image` does."""
        return self._open(url, PendingMedia(url, place, modality="audio"))

    def open_audio_base64(self, text: str, place: str) -> EncodedMedium:
        """Return the clip whose file is `text`, in base64; RequestError names `place`."""
        with _explaining(place, "audio"), measuring("fetch"):
            check_bytes("audio", len(text) // 4 * 3 - 2, self._limits, param=place)
            data = decode_payload(text, 0, place)
        return self.open_audio_file(data, place)

    def open_audio_file(self, data: bytes, place: str) -> EncodedMedium:
        """Return the clip of a file that came as it is; RequestError names `place`."""
        return self._encoded(data, PendingMedia("", place, modality="audio"))

    def _open_frames(self, url: str, place: str) -> EncodedFrames:
        with _explaining(place, "frames"), measuring("fetch"):
            # Counted before one is copied out.
            check_num_frames(url.count(","), self._limits, param=place)
            check_bytes("video", len(url) // 4 * 3, self._limits, param=place)
            find_payload(url[: len(_FRAMES_START)], place)
            pieces = url[len(_FRAMES_START) :].split(",")
            files = [decode_payload(piece, 0, place) for piece in pieces]
            explain = partial(_explain, place, "frames")
            frames = [
                EncodedImage(file, self._limits, place, explain=explain, workers=self._workers)
                for file in files
            ]
            return EncodedFrames(frames, self._limits, place)

    def _open(self, url: str, medium: PendingMedia) -> EncodedMedium | PendingMedia:
        scheme, place = url[:8].partition(":")[0].lower(), medium.place
        if scheme == "data":
            modality = medium.modality
            with _explaining(place, modality), measuring("fetch"):
                data = decode_data_url(url, self._limits, param=place, modality=modality)
            return self._encoded(data, medium)
        if scheme == "file":
            return medium
        if scheme not in ("http", "https"):
            raise RequestValueError.about(
                place,
                "is a URL of another scheme than `https`, `http`, `data` and `file`; send the file "
                "itself as `data:image/png;base64,...`",
            )
        if not self.mm.enable_media_fetch:
            reason = f"is an `{scheme}:` URL, which this server does not fetch"
            raise refuse_url(place, f"{reason} (`--no-enable-media-fetch`)")
        return replace(medium, url=parse_http_url(url, param=place))

    def is_whole(self, prompt: PromptType) -> bool:
        """Return whether nothing of the prompt is yet to be fetched."""
        return not any(_pending(prompt))

    def is_heavy(self, prompt: PromptType) -> bool:
        """Return whether a prompt has more to decode than one batch, by its files' headers.

        In a thread: the headers are read. What is wrong with a file, whoever decodes it will say.
        """
        data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
        num_bytes = 0
        with suppress(RequestError):
            for modality, items in (data or {}).items():
                for item in items if isinstance(items, list) else [items]:
                    is_encoded = isinstance(item, EncodedMedium)
                    if is_encoded and not self._is_known(prompt, modality, item):
                        num_bytes += item.num_bytes_to_decode
        return num_bytes > MAX_BATCH_BYTES

    @asynccontextmanager
    async def fetched(self, prompt: PromptType) -> AsyncIterator[PromptType]:
        """Yield the prompt with all of its media; their bytes count as held meanwhile."""
        download = _Download(self, partial(self._is_known, prompt, "image"))
        try:
            yield await self._fetch(prompt, download)
        finally:
            download.end()

    def fetch_now(self, prompt: PromptType) -> PromptType:
        """Return the prompt with all of its media, from a thread of any kind.

        Of an image that is given by its URL, too: whoever calls this gave it, and no client.
        """
        prompt = self._open_urls(prompt)
        if self.is_whole(prompt):
            return prompt

        async def fetch() -> PromptType:
            # Of its own: fetchers and semaphores belong to one event loop.
            connector = MediaConnector(self.mm, workers=self._workers)
            try:
                async with connector.fetched(prompt) as whole:
                    return whole
            finally:
                connector._fetcher.close()
                connector.threads.shutdown(wait=False)

        with ThreadPoolExecutor(1, thread_name_prefix="mmjax-fetch") as pool:
            return pool.submit(lambda: asyncio.run(fetch())).result()

    def close(self) -> None:
        """End the threads and the processes."""
        self._fetcher.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self._workers is not None:
            self._workers.close()

    # ---- parts ----------------------------------------------------------------------------------

    def _is_known(self, prompt: PromptType, modality: str, item: EncodedMedium) -> bool:
        """Return whether an item of a prompt is cached; unknown where more than a salt names it."""
        fields = prompt if isinstance(prompt, Mapping) else PromptDict()
        if fields.get("mm_processor_kwargs") or fields.get("multi_modal_uuids"):
            return False
        return self.is_cached(modality, item, fields.get("cache_salt"))

    def _open_urls(self, prompt: PromptType) -> PromptType:
        fields = prompt if isinstance(prompt, Mapping) else PromptDict()
        data = fields.get("multi_modal_data")
        if not isinstance(data, Mapping):
            return prompt  # without media, or with what `parse_prompt` refuses
        opened = dict[str, Any]()
        for modality, open_one in (("image", self.open_image), ("audio", self.open_audio)):
            given = data.get(modality)
            entries = list(given) if isinstance(given, list | tuple) else [given]
            if any(map(_is_web_url, entries)):
                opened[modality] = [
                    open_one(entry, f"{modality}[{index}]") if _is_web_url(entry) else entry
                    for index, entry in enumerate(entries)
                ]
        return {**fields, "multi_modal_data": {**data, **opened}} if opened else prompt

    async def _fetch(self, prompt: PromptType, download: "_Download") -> PromptType:
        pending = list(dict.fromkeys(_pending(prompt)))
        turns = asyncio.Semaphore(_MAX_FETCHED_AT_ONCE)
        tasks: dict[PendingMedia, asyncio.Task[EncodedMedium]] = {}
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    medium: group.create_task(
                        self._fetch_one(medium, turns, download, is_alone=len(pending) == 1)
                    )
                    for medium in pending
                }
        except* RequestError as errors:
            failure = _first(errors)
        if failure is not None:
            raise failure
        return _replace(prompt, {medium: task.result() for medium, task in tasks.items()})

    async def _fetch_one(
        self,
        medium: PendingMedia,
        turns: asyncio.Semaphore,
        download: "_Download",
        *,
        is_alone: bool,
    ) -> EncodedMedium:
        async with turns, self._turns:
            data = await self._read(medium, download)
        item = self._encoded(data, medium)
        if isinstance(item, EncodedImage) and self.budget is not None and not is_alone:
            await asyncio.get_running_loop().run_in_executor(
                self.threads, download.decode, item, self.budget
            )
        return item

    async def _read(self, medium: PendingMedia, download: "_Download") -> bytes:
        max_bytes = self._limits.max_bytes(medium.modality)
        if isinstance(medium.url, HttpUrl):
            take = partial(download.take, param=medium.place)
            return await self._fetcher.fetch(medium.url, max_bytes, param=medium.place, take=take)
        root = self.mm.allowed_local_media_path
        data = await asyncio.to_thread(
            read_local_file, medium.url, root, max_bytes, param=medium.place
        )
        download.take(len(data), param=medium.place)
        return data

    def _encoded(self, data: bytes, medium: PendingMedia) -> EncodedMedium:
        explain = partial(_explain, medium.place, medium.modality)
        common: Any = {"explain": explain, "workers": self._workers}
        if medium.modality == "audio":
            return EncodedAudio(data, self._limits, medium.place, **common)
        if medium.modality == "video":
            common["sampling"] = medium.sampling
            return EncodedVideo(data, self._limits, medium.place, **common)
        common["pixel_range"] = medium.pixel_range
        return EncodedImage(data, self._limits, medium.place, **common)


class _Download:
    """What one request has fetched, and what of it is decoded already."""

    def __init__(self, connector: MediaConnector, is_known: Callable[[EncodedImage], bool]) -> None:
        """`is_known`: whether an image is cached."""
        mm = connector.mm
        self._connector = connector
        self._is_known = is_known
        self._max_request_bytes = mm.max_media_request_download_bytes
        self._max_bytes = mm.max_media_download_bytes
        self._max_decoded_bytes = min(mm.max_media_request_decode_bytes, MAX_BATCH_BYTES)
        self._num_decoded_bytes = 0
        self._decoded: list[EncodedImage] = []
        self._lock = threading.Lock()
        self._has_ended = False
        self.num_bytes = 0

    def take(self, num_bytes: int, *, param: str) -> None:
        """Count bytes before they are kept; RequestError where they are too many."""
        if (total := self.num_bytes + num_bytes) > self._max_request_bytes:
            raise RequestValueError(
                f"the files up to `{param}` have {total} bytes or more, at most "
                f"{self._max_request_bytes} are fetched for one request; send fewer or smaller "
                "ones",
                param=param,
            )
        if self._connector.num_held_bytes + num_bytes > self._max_bytes:
            raise CapacityError("too many files are being fetched; try again in a moment")
        self.num_bytes += num_bytes
        self._connector.num_held_bytes += num_bytes

    def decode(self, image: EncodedImage, budget: DecodeBudget) -> None:
        """Decode an image in a thread, if it may be; RequestError where it cannot be.

        It stays encoded where the budget or the request's share of it has no room, and where it is
        cached.
        """
        if self._is_known(image):
            return
        num_bytes = image.num_bytes_to_decode
        with self._lock:
            if self._num_decoded_bytes + num_bytes > self._max_decoded_bytes:
                return
            self._num_decoded_bytes += num_bytes
            self._decoded.append(image)
        image.decode_early(budget)
        if self._has_ended:
            image.drop_pixels()

    def end(self) -> None:
        """Free what is still held, without waiting."""
        self._connector.num_held_bytes -= self.num_bytes
        self._has_ended = True
        for image in self._decoded:
            # In a thread: whoever decodes it holds its lock, and this is the event loop's.
            with suppress(RuntimeError):  # closed
                self._connector.threads.submit(image.drop_pixels)


def _is_web_url(entry: object) -> TypeGuard[str]:
    return isinstance(entry, str) and entry[:8].lower().startswith(("http://", "https://"))


def _pending(prompt: PromptType) -> Sequence[PendingMedia]:
    data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    entries = data.values() if isinstance(data, Mapping) else ()
    lists = [entry for entry in entries if isinstance(entry, list)]
    return [item for items in lists for item in items if isinstance(item, PendingMedia)]


def _replace(prompt: PromptType, fetched: Mapping[PendingMedia, EncodedMedium]) -> PromptType:
    if not isinstance(prompt, Mapping):
        return prompt
    data: dict[str, Any] = dict(prompt.get("multi_modal_data") or {})
    for modality, items in data.items():
        if isinstance(items, list):
            data[modality] = [
                fetched[item] if isinstance(item, PendingMedia) else item for item in items
            ]
    whole: PromptDict = {**prompt, "multi_modal_data": data}
    return whole


def _first(errors: BaseExceptionGroup) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


_FORMATS = {
    "image": ", ".join(IMAGE_FORMATS),
    "video": SHOWN_FORMATS,
    "frames": "JPEG",
    "audio": SHOWN_AUDIO_FORMATS,
}


@contextmanager
def _explaining(place: str, kind: str) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise _explain(place, kind, error) from error


def _explain(place: str, kind: str, error: RequestError) -> RequestError:
    """Return an error for the client about the image, video, frames or audio at `place`."""
    if isinstance(error, MediaError):
        # The decoder's message may hold memory addresses.
        return MediaError.about(
            place,
            f"holds no {kind} that can be decoded; send a whole file, base64 encoded, of one of "
            f"the formats {_FORMATS[kind]}",
        )
    return type(error)(f"`{place}`: {error}", param=place)
