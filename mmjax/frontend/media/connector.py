"""The one way from the URL of a medium, of any scheme, to the file's bytes.

`data:` URLs are decoded at once, in the caller's thread. Others are noted while a request is
parsed, and fetched together once the rest of it is known to be right.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mmjax.config.engine_config import MultiModalConfig
from mmjax.decoders.image_file import IMAGE_FORMATS
from mmjax.decoders.limits import MediaLimits, check_num_frames, check_video_bytes
from mmjax.decoders.video_file import SHOWN_FORMATS, VideoSampling
from mmjax.decoders.workers import DecodeWorkers
from mmjax.errors import CapacityError, MediaError, RequestError, RequestValueError
from mmjax.frontend.media.ahead import DecodeAhead, RequestAhead
from mmjax.frontend.media.http import FetchPolicy, HttpFetcher
from mmjax.frontend.media.local_file import read_local_file
from mmjax.frontend.media.urls import HttpUrl, parse_http_url
from mmjax.frontend.prompt.prompts import PromptDict, PromptType
from mmjax.processing.media.decode import decode_data_url, decode_payload, find_payload
from mmjax.processing.media.encoded import EncodedFrames, EncodedImage, EncodedVideo, PixelRange
from mmjax.requests.request_times import measuring

EncodedMedium = EncodedImage | EncodedVideo | EncodedFrames

_MAX_FETCHED_AT_ONCE = 8
"""Of one request."""
_FRAMES_START = "data:video/jpeg;base64,"
"""Of a URL that holds frames, with commas between them, as vLLM takes it."""


@dataclass(frozen=True, slots=True)
class PendingMedia:
    """A medium that is yet to be fetched; stands in `multi_modal_data` until then."""

    url: HttpUrl | str
    """A text is a `file:` URL."""
    place: str
    """The field of the request."""
    pixel_range: PixelRange | None = None
    """Of an image."""
    sampling: VideoSampling | None = None
    """Of a video; None: this is an image."""


class MediaConnector:
    """Turns URLs into encoded media, under one set of limits; threads share it."""

    def __init__(
        self,
        mm: MultiModalConfig,
        *,
        workers: DecodeWorkers | None = None,
        ahead: DecodeAhead | None = None,
    ) -> None:
        """Open media by the settings.

        Args:
            mm: The settings.
            workers: Processes that decode what comes from here; None: the threads that use it.
            ahead: What decodes images as they arrive; None: they wait until all have.
        """
        self._mm = mm
        self._workers = workers
        self._ahead = ahead
        self._policy = FetchPolicy(
            allowed_domains=mm.allowed_media_domains,
            are_private_addresses_allowed=mm.allow_private_media_addresses,
            are_redirects_allowed=mm.media_url_allow_redirects,
            timeout_s=mm.media_fetch_timeout_s,
        )
        self._limits = MediaLimits.of(mm)
        self._fetcher = HttpFetcher(self._policy)
        self._turns = asyncio.Semaphore(mm.media_fetch_concurrency)
        self.num_held_bytes = 0
        """Fetched, of requests that are not processed yet."""

    @classmethod
    def with_workers(
        cls, mm: MultiModalConfig, *, num_cores: int, ahead: DecodeAhead | None = None
    ) -> "MediaConnector":
        """Return one that decodes in processes, unless the settings say otherwise."""
        num_workers = mm.media_decode_workers
        if num_workers is None:
            num_workers = min(num_cores, 4)
        if num_workers == 0:
            return cls(mm, ahead=ahead)
        return cls(
            mm,
            ahead=ahead,
            workers=DecodeWorkers(
                num_workers,
                timeout_s=mm.media_decode_timeout_s,
                memory_bytes=mm.decode_memory_bytes,
            ),
        )

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
        sampling = VideoSampling(**{**self._mm.media_io_kwargs.get("video", {}), **(options or {})})
        return self._open(url, PendingMedia(url, place, sampling=sampling))

    def _open_frames(self, url: str, place: str) -> EncodedFrames:
        with _explaining(place, "frames"), measuring("fetch"):
            # Counted before one is copied out.
            check_num_frames(url.count(","), self._limits, param=place)
            check_video_bytes(len(url) // 4 * 3, self._limits, param=place)
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
            modality = "image" if medium.sampling is None else "video"
            with _explaining(place, modality), measuring("fetch"):
                data = decode_data_url(url, self._limits, param=place, modality=modality)
            return self._encoded(data, medium)
        if scheme == "file":
            return medium
        if scheme not in ("http", "https"):
            raise RequestValueError(
                f"`{place}` is a URL of another scheme than `https`, `http`, `data` and `file`; "
                "send the file itself as `data:image/png;base64,...`",
                param=place,
            )
        if not self._mm.enable_media_fetch:
            raise RequestValueError(
                f"`{place}` is an `{scheme}:` URL, which this server does not fetch "
                "(`--no-enable-media-fetch`); send the file itself as a base64 `data:` URL",
                param=place,
            )
        return replace(medium, url=parse_http_url(url, param=place))

    def is_whole(self, prompt: PromptType) -> bool:
        """Return whether nothing of the prompt is yet to be fetched."""
        return not any(_pending(prompt))

    @asynccontextmanager
    async def fetched(self, prompt: PromptType) -> AsyncIterator[PromptType]:
        """Yield the prompt with all of its media; their bytes count as held meanwhile."""
        download = _Download(self, self._mm)
        try:
            yield await self._fetch(prompt, download)
        finally:
            self.num_held_bytes -= download.num_bytes
            if download.ahead is not None:
                download.ahead.end()

    def fetch_now(self, prompt: PromptType) -> PromptType:
        """Return the prompt with all of its media, from a thread of any kind."""
        if self.is_whole(prompt):
            return prompt

        async def fetch() -> PromptType:
            # Of its own: fetchers and semaphores belong to one event loop.
            connector = MediaConnector(self._mm, workers=self._workers)
            try:
                async with connector.fetched(prompt) as whole:
                    return whole
            finally:
                connector._fetcher.close()

        with ThreadPoolExecutor(1, thread_name_prefix="mmjax-fetch") as pool:
            return pool.submit(lambda: asyncio.run(fetch())).result()

    def close(self) -> None:
        """End the threads and the processes."""
        self._fetcher.close()
        if self._ahead is not None:
            self._ahead.close()
        if self._workers is not None:
            self._workers.close()

    # ---- parts ----------------------------------------------------------------------------------

    async def _fetch(self, prompt: PromptType, download: "_Download") -> PromptType:
        pending = list(dict.fromkeys(_pending(prompt)))
        if self._ahead is not None and len(pending) > 1 and isinstance(prompt, Mapping):
            is_salted = prompt.get("cache_salt") is not None
            download.ahead = RequestAhead(self._ahead, is_salted=is_salted)
        turns = asyncio.Semaphore(_MAX_FETCHED_AT_ONCE)
        tasks: dict[PendingMedia, asyncio.Task[EncodedMedium]] = {}
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    medium: group.create_task(self._fetch_one(medium, turns, download))
                    for medium in pending
                }
        except* RequestError as errors:
            failure = _first(errors)
        if failure is not None:
            raise failure
        return _replace(prompt, {medium: task.result() for medium, task in tasks.items()})

    async def _fetch_one(
        self, medium: PendingMedia, turns: asyncio.Semaphore, download: "_Download"
    ) -> EncodedMedium:
        async with turns, self._turns:
            data = await self._read(medium, download)
        item = self._encoded(data, medium)
        if download.ahead is not None and isinstance(item, EncodedImage):
            await download.ahead.decode(item)
        return item

    async def _read(self, medium: PendingMedia, download: "_Download") -> bytes:
        limits, is_image = self._limits, medium.sampling is None
        max_bytes = limits.max_image_bytes if is_image else limits.max_video_bytes
        if isinstance(medium.url, HttpUrl):
            take = partial(download.take, param=medium.place)
            return await self._fetcher.fetch(medium.url, max_bytes, param=medium.place, take=take)
        root = self._mm.allowed_local_media_path
        data = await asyncio.to_thread(
            read_local_file, medium.url, root, max_bytes, param=medium.place
        )
        download.take(len(data), param=medium.place)
        return data

    def _encoded(self, data: bytes, medium: PendingMedia) -> EncodedImage | EncodedVideo:
        if medium.sampling is None:
            return EncodedImage(
                data,
                self._limits,
                medium.place,
                explain=partial(_explain, medium.place, "image"),
                workers=self._workers,
                pixel_range=medium.pixel_range,
            )
        return EncodedVideo(
            data,
            self._limits,
            medium.place,
            sampling=medium.sampling,
            explain=partial(_explain, medium.place, "video"),
            workers=self._workers,
        )


class _Download:
    """What one request has fetched."""

    def __init__(self, connector: MediaConnector, mm: MultiModalConfig) -> None:
        self._connector = connector
        self._max_request_bytes = mm.max_media_request_download_bytes
        self._max_bytes = mm.max_media_download_bytes
        self.num_bytes = 0
        self.ahead: RequestAhead | None = None

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


def _pending(prompt: PromptType) -> Sequence[PendingMedia]:
    data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    lists = [] if data is None else [entry for entry in data.values() if isinstance(entry, list)]
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


_FORMATS = {"image": ", ".join(IMAGE_FORMATS), "video": SHOWN_FORMATS, "frames": "JPEG"}


@contextmanager
def _explaining(place: str, kind: str) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise _explain(place, kind, error) from error


def _explain(place: str, kind: str, error: RequestError) -> RequestError:
    """Return an error for the client about the image, the video or the frames at `place`."""
    if isinstance(error, MediaError):
        # The decoder's message may hold memory addresses.
        return MediaError(
            f"`{place}` holds no {kind} that can be decoded; send a whole file, base64 encoded, "
            f"of one of the formats {_FORMATS[kind]}",
            param=place,
        )
    return type(error)(f"`{place}`: {error}", param=place)
