"""Which caches a configuration asks for: P0's half and P1's."""

from typing import Literal

from mmjax.cache.mirrored import MultiModalProcessorSenderCache, MultiModalReceiverCache
from mmjax.cache.processor_cache import (
    BaseMultiModalProcessorCache,
    BaseMultiModalReceiverCache,
    MultiModalProcessorOnlyCache,
)
from mmjax.config import MultiModalConfig

_GIB = 2**30


def processor_cache_from_config(
    config: MultiModalConfig, *, num_api_processes: int = 1
) -> BaseMultiModalProcessorCache | None:
    """Return P0's cache, or None where there is none."""
    match _get_cache_type(config, num_api_processes):
        case "processor_only":
            return MultiModalProcessorOnlyCache(_capacity_bytes(config))
        case "lru":
            return MultiModalProcessorSenderCache(_capacity_bytes(config))
        case _:
            return None


def engine_receiver_cache_from_config(
    config: MultiModalConfig, *, num_api_processes: int = 1
) -> BaseMultiModalReceiverCache | None:
    """Return P1's cache, or None where requests bring their tensors themselves."""
    match _get_cache_type(config, num_api_processes):
        case "lru":
            return MultiModalReceiverCache(_capacity_bytes(config))
        case _:
            return None


def _get_cache_type(
    config: MultiModalConfig, num_api_processes: int
) -> Literal["lru", "shm", "processor_only"] | None:
    if config.mm_processor_cache_gb <= 0:
        return None
    # Several senders cannot keep one receiver's order.
    return "processor_only" if num_api_processes > 1 else config.mm_processor_cache_type


def _capacity_bytes(config: MultiModalConfig) -> int:
    return int(config.mm_processor_cache_gb * _GIB)
