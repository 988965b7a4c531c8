"""The configuration of media; `mmjax.config.engine_config` has it among the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmjax.config.settings import check_settings, setting
from mmjax.errors import ConfigError
from mmjax.params.media_io import find_media_io_fault

HasherAlgorithm = Literal["blake3", "sha256", "sha512"]
ProcessorCacheType = Literal["lru", "shm", "processor_only"]

DEFAULT_SHM_OBJECT_SIZE_MB = 128
"""Default of the largest item in shared memory."""

DEFAULT_MAX_IMAGES = 16
"""Default limit on images in a prompt (vLLM's, 999, is unsafe)."""

_MEDIA_OPTIONS = {
    "image": ("width", "height"),
    "video": ("num_frames", "width", "height"),
    "audio": ("length",),
}
"""Options of `limit_mm_per_prompt` by modality, besides `count`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalConfig:
    """Limits, processing and caching of media."""

    limit_mm_per_prompt: Mapping[str, Any] = setting(
        {},
        """Maximum number of items per prompt, by modality: a number, or a mapping with `count` and
        the size of the largest item (image: `width`, `height`; video: `num_frames`, `width`,
        `height`; audio: `length`). Memory is planned for items of that size; one with more
        embeddings is refused. With 0 the modality's tower is not loaded.""",
        unset=f"{DEFAULT_MAX_IMAGES} of each",
        expected="""a mapping (JSON object), as in '{"image": 4}'""",
    )
    mm_processor_kwargs: Mapping[str, Any] = setting(
        {},
        "Defaults for the HF processor; overridden by a request's own, if these are trusted.",
        unset="the checkpoint's",
        expected="""a mapping (JSON object), as in '{"do_pan_and_scan": true}'""",
    )
    mm_processor_cache_type: ProcessorCacheType = setting(
        "lru",
        """Where processed items are cached. lru: in the engine process, mirrored by the server's;
        shm: in shared memory; processor_only: in the server process, which sends them every
        time.""",
    )
    mm_processor_cache_gb: float = setting(
        4.0, "Size of the processor cache in GiB; 0 disables it.", minimum=0
    )
    mm_processor_cache_dir: Path | None = setting(
        None,
        """Directory where processed items are kept, for later servers; of this user alone, and of
        any number of processes.""",
        unset="none are kept",
    )
    mm_processor_cache_dir_gb: float = setting(
        16.0, "Size of the files in `mm_processor_cache_dir` in GiB.", above=0
    )
    mm_shm_cache_max_object_size_mb: int = setting(
        DEFAULT_SHM_OBJECT_SIZE_MB,
        """Size of the largest item in shared memory in MiB, with the cache type shm; larger ones
        are sent in messages.""",
        minimum=1,
    )
    mm_shm_name: str | None = None
    """The directory in shared memory that P0 makes and P1 opens; only for the cache type shm."""
    mm_hasher_algorithm: HasherAlgorithm = setting("blake3", "Hash that identifies items.")
    max_image_pixels: int = setting(
        50_000_000, "An image with more pixels is refused before it is decoded.", minimum=1
    )
    max_image_bytes: int = setting(
        64 * 2**20, "An encoded image with more bytes is refused.", minimum=1
    )
    max_video_bytes: int = setting(
        128 * 2**20, "An encoded video with more bytes is refused.", minimum=1
    )
    max_video_frames: int = setting(
        2048,
        """Frames of one video, after sampling, and of `video/jpeg`; one with more is refused before
        it is decoded.""",
        minimum=1,
        maximum=16_000,  # the places of as many, of six digits each, fit a worker's message
    )
    max_video_pixels: int = setting(
        500_000_000, "Pixels of all frames of one video, after sampling.", minimum=1
    )
    max_audio_bytes: int = setting(
        64 * 2**20, "An encoded audio clip with more bytes is refused.", minimum=1
    )
    max_audio_seconds: int = setting(
        1800, "An audio clip that lasts longer is refused before it is decoded.", minimum=1
    )
    max_audio_rate: int = setting(
        384_000, "An audio clip with more samples a second is refused.", minimum=1
    )
    max_audio_channels: int = setting(8, "An audio clip with more channels is refused.", minimum=1)
    max_audio_samples: int = setting(
        100_000_000,
        """Samples of one audio clip, before and after it is resampled; over all channels where it
        comes as samples (`LLM`), whereas those of a file are mixed to one as it is decoded.""",
        minimum=1,
    )
    media_io_kwargs: Mapping[str, Any] = setting(
        {},
        """How media are read. `video`: `num_frames`, 32 unless said otherwise, and `fps`; the
        smaller number of frames is sampled, evenly spread, and -1 does not limit it. A request's
        own replace these, if `trust_request_mm_kwargs` is set.""",
        unset="32 frames of a video",
        expected="""a mapping (JSON object), as in '{"video": {"num_frames": 16}}'""",
    )
    max_media_request_decode_bytes: int = setting(
        715_827_880,
        """Bytes of one request's decoded images and frames, at 4 per pixel; a request with more is
        refused before its turn to be decoded. (vLLM's default: Pillow's limit against decompression
        bombs.)""",
        minimum=1,
    )
    max_media_decode_bytes: int = setting(
        512 * 2**20,
        """Bytes of all requests' decoded images at a time; further ones wait. A larger image is
        decoded alone. HF's processor takes about 2.5 times as much in addition.""",
        minimum=1,
    )
    max_media_request_download_bytes: int = setting(
        256 * 2**20,
        "Bytes of all files that are fetched for one request; one with more is refused.",
        minimum=1,
    )
    max_media_download_bytes: int = setting(
        2**30,
        """Bytes of fetched files that all requests hold until they are processed; a request that
        needs more gets 429.""",
        minimum=1,
    )
    media_fetch_timeout_s: float = setting(
        10.0,
        "Seconds that fetching one file may take, redirects included.",
        name="media_fetch_timeout",
        above=0,
    )
    media_fetch_concurrency: int = setting(
        64, "Files that are fetched at a time; further ones wait.", minimum=1
    )
    enable_media_fetch: bool = setting(
        True,
        """Whether `http:` and `https:` URLs of media are fetched, from public addresses; else only
        `data:` URLs are taken.""",
    )
    allowed_media_domains: tuple[str, ...] = setting(
        (),
        "Hosts that media are fetched from, by their full names.",
        unset="all",
        is_valid=lambda host: bool(host) and host == host.lower().strip(" ./"),
        expected="names of hosts in lower case, as in images.example.com",
    )
    allow_private_media_addresses: bool = setting(
        False,
        """Whether media are fetched from hosts with private, local or otherwise special addresses,
        too: every client can then reach this machine's networks.""",
    )
    media_url_allow_redirects: bool = setting(
        True, "Whether redirects are followed, five at most, each checked like the first URL."
    )
    allowed_local_media_path: Path | None = setting(
        None,
        "Directory whose files clients may name in `file:` URLs, after links are resolved.",
        unset="none",
    )
    media_decode_workers: int | None = setting(
        None,
        """Processes of limited memory that decode clients' media; 0: threads of the server do,
        which is faster by some milliseconds an image (docs/security.md).""",
        unset="one per core, at most 4",
        minimum=0,
        is_for_serve_alone=True,
    )
    media_decode_timeout_s: float = setting(
        30.0,
        "Seconds that such a process has for one file.",
        name="media_decode_timeout",
        above=0,
        is_for_serve_alone=True,
    )
    media_decode_memory_bytes: int | None = setting(
        None,
        "Memory that such a process may take for one file.",
        unset="24 bytes for each of `max_image_pixels`, twice the largest of `max_image_bytes`, "
        "`max_video_bytes` and `max_audio_bytes`, and 64 MiB; 12 for each of `max_audio_samples` "
        "in place of the pixels where that is more",
        minimum=16 * 2**20,
        is_for_serve_alone=True,
    )
    trust_request_mm_kwargs: bool = setting(
        False,
        """Whether HTTP clients may send `mm_processor_kwargs` and `media_io_kwargs`; memory is
        planned for the larger of the checkpoint's settings and the operator's.""",
    )
    trust_media_ids: bool = setting(
        False,
        """Whether an HTTP client's `uuid` identifies an image for all clients; else only for its
        API key, and only with the content that it was first sent with.""",
        is_for_serve_alone=True,
    )
    enable_mm_embeds: bool = setting(
        False,
        """Whether prompts may contain precomputed embeddings, if the model supports them; only for
        trusted clients.""",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        for modality, limit in self.limit_mm_per_prompt.items():
            _check_media_limit(modality, limit)
        if (fault := find_media_io_fault(self.media_io_kwargs)) is not None:
            raise ConfigError(f"`media_io_kwargs{fault[0]}` {fault[1]}")
        if self.mm_processor_cache_dir is not None and not self.mm_processor_cache_gb:
            raise ConfigError(
                "`mm_processor_cache_dir` is set, but `mm_processor_cache_gb` is 0, with which no "
                "item is kept; give it room, or leave the directory out"
            )
        max_object_size_mb = self.mm_shm_cache_max_object_size_mb
        is_set = max_object_size_mb != DEFAULT_SHM_OBJECT_SIZE_MB
        if is_set and self.mm_processor_cache_type != "shm":
            raise ConfigError(
                f"`mm_shm_cache_max_object_size_mb` is {max_object_size_mb}, but "
                f"`mm_processor_cache_type` is {self.mm_processor_cache_type!r}; set it to shm, or "
                "leave the size out"
            )

    @property
    def decode_memory_bytes(self) -> int:
        """Memory that a decoding process may take: an image, its copies on the way, a file."""
        num_file_bytes = max(self.max_image_bytes, self.max_video_bytes, self.max_audio_bytes)
        num_decoded_bytes = max(24 * self.max_image_pixels, 12 * self.max_audio_samples)
        largest = num_decoded_bytes + 2 * num_file_bytes + 64 * 2**20
        return self.media_decode_memory_bytes or largest

    def limit(self, modality: str) -> int:
        """Return the maximum number of items of `modality` in a prompt."""
        limit = self.limit_mm_per_prompt.get(modality, DEFAULT_MAX_IMAGES)
        return limit if isinstance(limit, int) else limit.get("count", DEFAULT_MAX_IMAGES)

    def media_options(self, modality: str) -> Mapping[str, int]:
        """Return the options of `limit_mm_per_prompt` for `modality`, besides `count`."""
        limit = self.limit_mm_per_prompt.get(modality, 0)
        options = {} if isinstance(limit, int) else limit
        return {name: value for name, value in options.items() if name != "count"}


def _check_media_limit(modality: str, limit: object) -> None:
    options = limit if isinstance(limit, Mapping) else {"count": limit}
    known = ("count", *_MEDIA_OPTIONS.get(modality, ()))
    for name, value in options.items():
        if name not in known:
            raise ConfigError(
                f"`limit_mm_per_prompt` gives `{modality}` the option `{name}`; "
                f"known are {', '.join(f'`{one}`' for one in known)}"
            )
        least = 0 if name == "count" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                f"`limit_mm_per_prompt` gives {value!r} as `{name}` of `{modality}`; give a number "
                f"of at least {least}, as in '{{\"image\": 4}}'"
            )
