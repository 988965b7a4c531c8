"""Caches' bookkeeping: ids, hashes and sizes; no device arrays, no requests."""

from mmjax.cache.encoder_cache_manager import EncoderCacheManager
from mmjax.cache.kv.block_hash import (
    NONE_HASH,
    generate_block_hash_extra_keys,
    hash_block_tokens,
    iter_block_hashes,
)
from mmjax.cache.media.lru import CacheInfo, LRUCache
from mmjax.cache.media.processor_cache import (
    BaseMultiModalProcessorCache,
    BaseMultiModalReceiverCache,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
)
from mmjax.cache.media.selection import (
    config_with_directory,
    engine_receiver_cache_from_config,
    processor_cache_from_config,
)
from mmjax.cache.media.shared_cache import ShmObjectStoreReceiverCache, ShmObjectStoreSenderCache
from mmjax.errors import MultiModalCacheMissError

__all__ = [
    "NONE_HASH",
    "BaseMultiModalProcessorCache",
    "BaseMultiModalReceiverCache",
    "CacheInfo",
    "EncoderCacheManager",
    "LRUCache",
    "MultiModalCacheMissError",
    "MultiModalProcessorOnlyCache",
    "MultiModalProcessorSenderCache",
    "MultiModalReceiverCache",
    "ShmObjectStoreReceiverCache",
    "ShmObjectStoreSenderCache",
    "config_with_directory",
    "engine_receiver_cache_from_config",
    "generate_block_hash_extra_keys",
    "hash_block_tokens",
    "iter_block_hashes",
    "processor_cache_from_config",
]
