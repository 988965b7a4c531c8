"""What an operator may set: frozen dataclasses, one per subject.

No logic beyond their validation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from mmjax.errors import ConfigError

DtypeName = Literal["auto", "float32", "bfloat16"]
HasherAlgorithm = Literal["blake3", "sha256", "sha512"]
ProcessorCacheType = Literal["lru", "shm", "processor_only"]
SchedulingPolicy = Literal["fcfs", "priority"]

DEFAULT_SHM_OBJECT_SIZE_MB = 128
"""The largest item that shared memory takes, when the operator does not say."""

DEFAULT_MAX_IMAGES = 16
"""Images a prompt may hold when `limit_mm_per_prompt` does not say (vLLM: 999, hardly safe)."""

_MEDIA_OPTIONS = {
    "image": ("width", "height"),
    "video": ("num_frames", "width", "height"),
    "audio": ("length",),
}
"""What `limit_mm_per_prompt` may say of a modality's largest item, beside its count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalConfig:
    """How media are limited, processed and cached."""

    limit_mm_per_prompt: Mapping[str, Any] = field(default_factory=dict)
    """Items of a modality in one prompt: a number, or options that describe the largest item.

    `{"image": 4, "video": {"count": 1, "num_frames": 32, "width": 512, "height": 512}}`. Memory is
    planned for items of that size; one with more embeddings is refused.
    """
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Defaults for the HF processor; a request's own win where they are trusted."""
    mm_processor_cache_type: ProcessorCacheType = "lru"
    """Where processed items are kept: lru: in P1, and P0 knows which; shm: in memory that both
    share; processor_only: in P0, which sends them every time."""
    mm_processor_cache_gb: float = 4.0
    """0 switches the processor cache off."""
    mm_shm_cache_max_object_size_mb: int = DEFAULT_SHM_OBJECT_SIZE_MB
    """A larger item goes to P1 by message; for the type shm alone."""
    mm_shm_name: str | None = None
    """The segment that P0 made and P1 attaches; for the type shm alone."""
    mm_hasher_algorithm: HasherAlgorithm = "blake3"
    max_image_pixels: int = 50_000_000
    """An image with more pixels is refused before it is decoded."""
    max_image_bytes: int = 64 * 2**20
    """An encoded image with more bytes is refused."""
    max_media_request_decode_bytes: int = 715_827_880
    """What one request's images may take in memory, decoded, at 4 bytes a pixel; a request with
    more is refused before any is decoded. (vLLM's default: what Pillow takes for a bomb.)"""
    max_media_decode_bytes: int = 512 * 2**20
    """What the images of all requests may take at once, decoded; those that come next wait. A
    larger image is decoded alone. HF's processor takes some 2.5 times as much beside it."""
    trust_request_mm_kwargs: bool = False
    """Whether HTTP clients may send `mm_processor_kwargs`; memory is planned for what they may ask
    for: as much as the checkpoint's own settings or the operator's, whichever is more."""
    trust_media_ids: bool = False
    """Whether an HTTP client's `uuid` of an image is its identity, for all clients; else it is a
    claim: good for one API key, and for the content that it came with."""
    enable_mm_embeds: bool = False
    """Whether prompts may hold embeddings in place of media: only for trusted callers."""

    def __post_init__(self) -> None:
        for modality, limit in self.limit_mm_per_prompt.items():
            _check_media_limit(modality, limit)
        if self.mm_processor_cache_type not in get_args(ProcessorCacheType):
            raise ConfigError(
                f"`mm_processor_cache_type` is {self.mm_processor_cache_type!r}; "
                f"give one of {', '.join(get_args(ProcessorCacheType))}"
            )
        if not math.isfinite(self.mm_processor_cache_gb):
            raise ConfigError(
                f"`mm_processor_cache_gb` is {self.mm_processor_cache_gb}; give a size, or 0"
            )
        max_object_size_mb = self.mm_shm_cache_max_object_size_mb
        if max_object_size_mb < 1:
            raise ConfigError(
                f"`mm_shm_cache_max_object_size_mb` is {max_object_size_mb}; give at least 1"
            )
        for name in ("max_media_request_decode_bytes", "max_media_decode_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` is {getattr(self, name)}; give at least 1")
        is_set = max_object_size_mb != DEFAULT_SHM_OBJECT_SIZE_MB
        if is_set and self.mm_processor_cache_type != "shm":
            raise ConfigError(
                f"`mm_shm_cache_max_object_size_mb` is {max_object_size_mb}, but "
                f"`mm_processor_cache_type` is {self.mm_processor_cache_type!r}; set it to shm, or "
                "leave the size out"
            )

    def limit(self, modality: str) -> int:
        """Return how many items of `modality` the operator allows in one prompt."""
        limit = self.limit_mm_per_prompt.get(modality, DEFAULT_MAX_IMAGES)
        return limit if isinstance(limit, int) else limit.get("count", DEFAULT_MAX_IMAGES)

    def media_options(self, modality: str) -> Mapping[str, int]:
        """Return what the operator says of the largest item of `modality`, beside the count."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which checkpoint is served, and what its own configuration says."""

    model: str
    """As the operator wrote it: a directory or a hub id."""
    path: Path
    """The local directory."""
    hf_config: Any
    """The checkpoint's `PreTrainedConfig`."""
    architecture: str
    """The first of config.json's `architectures`; the registry's key."""
    max_model_len: int
    dtype: DtypeName = "auto"
    """auto: float32 on CPU, bfloat16 on GPU and TPU, decided where the device is known."""
    served_model_name: str = ""
    revision: str | None = None
    chat_template: str | None = None
    """A template that replaces the checkpoint's."""
    seed: int = 0
    mm: MultiModalConfig = field(default_factory=MultiModalConfig)

    def __post_init__(self) -> None:
        if self.max_model_len < 1:
            raise ConfigError(f"`max_model_len` is {self.max_model_len}; give at least 1")

    @property
    def public_name(self) -> str:
        """The name that `/v1/models` shows and requests must use."""
        return self.served_model_name or self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache and the pool of encoder outputs."""

    block_size: int = 32
    """Slots in a block."""
    kv_cache_memory_bytes: int | None = None
    """None: room for `max_num_seqs` requests of `max_model_len`, capped by the device's memory."""
    gpu_memory_utilization: float = 0.9
    """Of an accelerator's memory, what the engine may take in all; on CPU, of what is free."""
    encoder_cache_size: int | None = None
    """Encoder outputs (embeddings) that are kept; None: `max_num_batched_tokens`. Never less than
    the largest item has."""
    enable_prefix_caching: bool = True
    """Whether requests that begin alike share the KV cache of their beginning."""
    prefix_caching_hash_algo: Literal["sha256", "blake3"] = "sha256"
    """What names a block of tokens."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"`block_size` is {self.block_size}; give a power of two")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"`gpu_memory_utilization` is {self.gpu_memory_utilization}; give a share, as 0.9"
            )
        if self.encoder_cache_size is not None and self.encoder_cache_size < 1:
            raise ConfigError(f"`encoder_cache_size` is {self.encoder_cache_size}; give at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much work one step may hold."""

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    max_num_encoder_input_tokens: int | None = None
    """Encoder outputs (embeddings) that one step may compute; None: `max_num_batched_tokens`.
    Never less than the largest item has."""
    disable_chunked_mm_input: bool = False
    """Whether each run of an item's embeddings (up to a mark between rows, between crops) goes in
    one step; always so where they see each other both ways."""
    max_num_queued_reqs: int = 1024
    """Sequences that may wait beside `max_num_seqs` that run; a request beyond both gets 429."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps; else a step must hold the longest."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """priority: waiting requests are ordered by their `priority`, lowest first, then by arrival."""
    async_scheduling: bool = True
    """Whether the host prepares a step while the device computes the one before."""

    @property
    def max_num_unfinished_seqs(self) -> int:
        """Sequences that may run and wait, together."""
        return self.max_num_seqs + self.max_num_queued_reqs

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` is {getattr(self, name)}; give at least 1")
        if self.max_num_encoder_input_tokens is not None and self.max_num_encoder_input_tokens < 1:
            raise ConfigError(
                f"`max_num_encoder_input_tokens` is {self.max_num_encoder_input_tokens}; "
                "give at least 1"
            )
        if self.scheduling_policy not in get_args(SchedulingPolicy):
            raise ConfigError(
                f"`scheduling_policy` is {self.scheduling_policy!r}; "
                f"give one of {', '.join(get_args(SchedulingPolicy))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Over how many devices, of how many processes, one model is spread."""

    tensor_parallel_size: int = 1
    """Devices that share one model, of all processes together."""
    coordinator_address: str | None = None
    """HOST:PORT of process 0, where the processes meet."""
    num_processes: int = 1
    process_id: int = 0
    """0 takes the requests; the others compute along."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "num_processes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` is {getattr(self, name)}; give at least 1")
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"`process_id` (`--distributed-process-id`) is {self.process_id}, of "
                f"{self.num_processes} processes; give 0 to {self.num_processes - 1}"
            )
        if self.num_processes > 1 and self.coordinator_address is None:
            raise ConfigError(
                f"`num_processes` is {self.num_processes}, but nothing says where they meet; "
                "give `coordinator_address` (`--distributed-coordinator HOST:PORT`)"
            )
        if self.tensor_parallel_size % self.num_processes:
            raise ConfigError(
                f"`tensor_parallel_size` is {self.tensor_parallel_size}, which "
                f"{self.num_processes} processes cannot share evenly; give "
                f"`--tensor-parallel-size` a multiple of {self.num_processes}"
            )


class EngineSettings(TypedDict, total=False):
    """Fields of the configs that `LLM` takes by name as well."""

    block_size: int
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    encoder_cache_size: int | None
    enable_prefix_caching: bool
    max_num_encoder_input_tokens: int | None
    disable_chunked_mm_input: bool
    enable_chunked_prefill: bool
    async_scheduling: bool
    scheduling_policy: SchedulingPolicy
    compile_threads: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that P1 needs to start; picklable, since P1 is spawned with it."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compilation_cache_dir: Path | None = None
    """None: `~/.cache/mmjax/xla`."""
    compile_threads: int | None = None
    """Programs that are compiled at once; None: as many as there are cores, at most 8."""
    use_tqdm: bool = True
    log_level: str = "info"
    """Of P1's log; "debug" tells of every request and every step."""

    def with_mm(self, mm: MultiModalConfig) -> "EngineConfig":
        """Return the same with other settings for media."""
        return replace(self, model=replace(self.model, mm=mm))

    def with_settings(self, settings: EngineSettings) -> "EngineConfig":
        """Return the same with these fields set, in whichever part they are."""
        config = self
        for name, value in settings.items():
            if name not in EngineSettings.__annotations__:
                known = ", ".join(f"`{key}`" for key in EngineSettings.__annotations__)
                raise TypeError(f"there is no setting `{name}`; beside the named ones take {known}")
            for part in ("cache", "scheduler"):
                if name in {field.name for field in fields(getattr(config, part))}:
                    changed = replace(getattr(config, part), **{name: value})
                    config = replace(config, **{part: changed})
                    break
            else:
                config = replace(config, **{name: value})
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP door."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    max_request_bytes: int = 32 * 2**20
    request_timeout_s: float = 0.0
    """A request that is not finished by then gets 408 (a stream that has begun, an error event);
    0: none is sent away."""
    request_body_timeout_s: float = 30.0
    """Silence in the middle of a body after which the request gets 408; 0: it waits for ever."""
    sse_keep_alive_interval_s: float = 15.0
    """Silence after which a stream gets a comment; from its first token on, for nothing of a stream
    goes out before (its status is not known). 0: never."""
    shutdown_timeout_s: float = 30.0
    """What running requests get after SIGTERM or Ctrl-C; a second signal ends them at once."""
    trust_request_chat_template: bool = False
    """Whether HTTP clients may send a `chat_template`: it runs, sandboxed, in P0."""
    uvicorn_log_level: str = "info"
    disable_access_log_for_endpoints: tuple[str, ...] = ("/health", "/ready", "/metrics")
    """Paths whose requests get no access line: probes ask for them all the time."""
    renderer_num_workers: int = 2
    """Threads that process prompts and media; half as many more take the requests that have much
    to decode."""
