"""Open what outlives the engine process on disk: KV blocks, encoder outputs.

Of one model's weights, code and devices alone: another one's files are never found.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from blake3 import blake3
from jaxtyping import Array

from mmjax.cache.disk_store import DiskStore, check_directory
from mmjax.cache.fingerprint import (
    describe_cpu,
    describe_libraries,
    digest_class,
    digest_settings,
    fingerprint,
)
from mmjax.cache.stored_rows import StoredRows
from mmjax.config.engine_config import EngineConfig
from mmjax.engine.device.programs import Programs
from mmjax.errors import ConfigError
from mmjax.layers.module import Params, flatten_params

_GIB = 2**30


def open_block_store(
    config: EngineConfig, model_class: Any, programs: Programs, params: Params
) -> DiskStore | None:
    """Return the directory of KV blocks (`--kv-offload-dir`); None: there is none."""
    cache, mm = config.cache, config.model.mm
    if cache.kv_offload_dir is None:
        return None
    # A block's hash has the names of its prompt's items, and not what they were processed with.
    settings = digest_settings(config.model.path, *config.model.parts.values())
    processing = mm.mm_processor_kwargs, mm.media_io_kwargs, settings
    namespace = fingerprint(
        "KV blocks",
        *_describe_engine(config, model_class, programs, params),
        *(cache.block_size, cache.prefix_caching_hash_algo),
        [(one.shape, one.dtype.name) for one in programs.describe_block()],
        *processing,
    )
    return DiskStore(cache.kv_offload_dir, int(cache.kv_offload_dir_gb * _GIB), namespace)


def open_stored_rows(
    config: EngineConfig, model_class: Any, programs: Programs, params: Params
) -> StoredRows | None:
    """Return the encoder outputs on disk (`--encoder-cache-dir`); None: there are none."""
    directory = config.cache.encoder_cache_dir
    if directory is None or not programs.keeps_rows:
        return None
    of_encoder = programs.find_encoder_params()
    read = {name: leaf for name, leaf in flatten_params(params).items() if name in of_encoder}
    namespace = fingerprint("encoder", *_describe_engine(config, model_class, programs, read))
    max_bytes = int(config.cache.encoder_cache_dir_gb * _GIB)
    return StoredRows(
        DiskStore(directory, max_bytes, namespace),
        width=programs.embed_width,
        dtype=np.dtype(programs.dtype),
    )


class EncoderIdentity(NamedTuple):
    """Whose rows an encoder's are."""

    parts: Mapping[str, str]
    """All that their bits depend on, by what it is."""
    params: frozenset[str]
    """The names of the parameters that it reads."""


def describe_encoder(
    config: EngineConfig, model_class: Any, programs: Programs, digest: str
) -> dict[str, str]:
    """Return what rows that another process encodes must be of; `digest`: of the parameters.

    Not the number of devices: engines that share an encoder may have different ones.
    """
    placement = programs.placement
    cpu = describe_cpu() if placement.platform == "cpu" else []
    return {
        "version of mmjax": fingerprint().hex(),
        "model": f"{digest_class(model_class)} {fingerprint(str(config.model.hf_config)).hex()}",
        "weights": digest,
        "dtype": np.dtype(programs.dtype).name,
        "device": f"{placement.local_devices[0].device_kind} {fingerprint(cpu).hex()}",
        "version of JAX": ", ".join(describe_libraries("jax", "jaxlib")),
    }


def _describe_engine(
    config: EngineConfig, model_class: Any, programs: Programs, params: Params
) -> list[Any]:
    """Return what the bits of all that is computed with parameters on these devices depend on."""
    digest = digest_leaves(flatten_params(params).items())
    parts = describe_encoder(config, model_class, programs, digest)
    return [*parts.values(), programs.placement.size]


def digest_leaves(leaves: Iterable[tuple[str, Array]]) -> str:
    """Return a digest of parameters' values: no file's name or time can stand for others."""
    found = []
    for name, leaf in leaves:
        # A copy, since an array keeps what it was read into on the host.
        is_on_host = next(iter(leaf.devices())).platform == "cpu"
        array = np.ascontiguousarray(np.asarray(leaf if is_on_host else jnp.copy(leaf)))
        hasher = blake3(max_threads=blake3.AUTO)
        hasher.update(array.reshape(-1).view(np.uint8).data)
        found.append((name, array.dtype.name, array.shape, hasher.hexdigest()))
    return blake3(repr(sorted(found)).encode()).hexdigest()


def check_offload(
    config: EngineConfig, *, shares_blocks: bool = True, has_states: bool = False
) -> None:
    """Raise ConfigError where the model's blocks cannot be found again, or cannot be used."""
    if has_states and config.cache.kv_offload_dir is not None:
        raise ConfigError(
            f"`kv_offload_dir` is {str(config.cache.kv_offload_dir)!r}, but the model has "
            "recurrent layers, without whose states no later process can use a block; leave "
            "`--kv-offload-dir` out"
        )
    if config.cache.kv_offload_gb and not shares_blocks:
        raise ConfigError(
            f"`kv_offload_gb` is {config.cache.kv_offload_gb}, but the model is an "
            "encoder-decoder, whose requests share no blocks: no evicted block could be found "
            "again; leave `--kv-offload-gb` out"
        )


def check_directories(config: EngineConfig) -> None:
    """Raise ConfigError for a directory that cannot be a cache's, before weights are loaded."""
    for directory in (config.cache.kv_offload_dir, config.cache.encoder_cache_dir):
        if directory is not None:
            check_directory(directory)
