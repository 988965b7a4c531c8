"""Make the processor caches that a configuration asks for: P0's and P1's."""

from dataclasses import replace

from mmjax.cache.media.mirrored import MultiModalProcessorSenderCache, MultiModalReceiverCache
from mmjax.cache.media.processor_cache import (
    BaseMultiModalProcessorCache,
    BaseMultiModalReceiverCache,
    MultiModalProcessorOnlyCache,
)
from mmjax.cache.media.shm.directory import NoSharedMemoryError
from mmjax.cache.media.shm.receiver import ShmObjectStoreReceiverCache
from mmjax.cache.media.shm.sender import ShmObjectStoreSenderCache
from mmjax.config.engine_config import MultiModalConfig
from mmjax.config.multimodal_config import DEFAULT_SHM_OBJECT_SIZE_MB, ProcessorCacheType
from mmjax.errors import ConfigError
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

_MIB, _GIB = 2**20, 2**30


def processor_cache_from_config(
    config: MultiModalConfig, *, num_api_processes: int = 1
) -> BaseMultiModalProcessorCache | None:
    """Return P0's cache, or None if it is off; the type shm makes its directory here.

    Without room for it, it is one of the type lru.
    """
    match _get_cache_type(config, num_api_processes):
        case "processor_only":
            return MultiModalProcessorOnlyCache(_capacity_bytes(config))
        case "lru":
            return MultiModalProcessorSenderCache(_capacity_bytes(config))
        case "shm":
            try:
                return ShmObjectStoreSenderCache(
                    _capacity_bytes(config),
                    max_object_bytes=config.mm_shm_cache_max_object_size_mb * _MIB,
                    name=config.mm_shm_name,
                )
            except NoSharedMemoryError as error:
                logger.warning("without shared memory, the processor cache is `lru`: %s", error)
                return MultiModalProcessorSenderCache(_capacity_bytes(config))
        case None:
            return None


def engine_receiver_cache_from_config(
    config: MultiModalConfig, *, num_api_processes: int = 1
) -> BaseMultiModalReceiverCache | None:
    """Return P1's cache, or None if every request brings its tensors."""
    match _get_cache_type(config, num_api_processes):
        case "lru":
            return MultiModalReceiverCache(_capacity_bytes(config))
        case "shm":
            if config.mm_shm_name is None:
                raise ConfigError(
                    "`mm_shm_name` is None; make P0's cache first, and give P1 "
                    "`config_with_directory` of it"
                )
            return ShmObjectStoreReceiverCache(config.mm_shm_name)
        case _:
            return None


def config_with_directory(
    config: MultiModalConfig, cache: BaseMultiModalProcessorCache | None
) -> MultiModalConfig:
    """Return P1's configuration: with the type of P0's `cache`, and the name of its directory."""
    if isinstance(cache, ShmObjectStoreSenderCache):
        return replace(config, mm_shm_name=cache.name)
    had_no_room = isinstance(cache, MultiModalProcessorSenderCache)
    if had_no_room and config.mm_processor_cache_type == "shm":
        return replace(
            config,
            mm_processor_cache_type="lru",
            mm_shm_cache_max_object_size_mb=DEFAULT_SHM_OBJECT_SIZE_MB,
        )
    return config


def _get_cache_type(config: MultiModalConfig, num_api_processes: int) -> ProcessorCacheType | None:
    if config.mm_processor_cache_gb <= 0:
        return None
    # With several senders, no sender cache can mirror the receiver's order.
    return "processor_only" if num_api_processes > 1 else config.mm_processor_cache_type


def _capacity_bytes(config: MultiModalConfig) -> int:
    return int(config.mm_processor_cache_gb * _GIB)
