"""Open the encoder outputs on disk (`--encoder-cache-dir`), of one model's weights alone."""

from typing import Any

import jax
import numpy as np
from blake3 import blake3

from mmjax.cache.disk_store import DiskStore
from mmjax.cache.fingerprint import (
    describe_cpu,
    describe_libraries,
    digest_class,
    fingerprint,
)
from mmjax.cache.stored_rows import StoredRows
from mmjax.config.engine_config import EngineConfig
from mmjax.engine.device.programs import Programs
from mmjax.layers.module import Params, flatten_params

_GIB = 2**30


def open_stored_rows(
    config: EngineConfig, model_class: Any, programs: Programs, params: Params
) -> StoredRows | None:
    """Return the rows on disk that these parameters give; None without a directory for them."""
    directory = config.cache.encoder_cache_dir
    if directory is None or not programs.keeps_rows:
        return None
    placement = programs.placement
    namespace = fingerprint(
        "encoder",
        digest_class(model_class),
        str(config.model.hf_config),
        _digest_params(params, programs.find_encoder_params()),
        *(np.dtype(programs.dtype).name, placement.platform, len(placement.local_devices)),
        placement.local_devices[0].device_kind,
        describe_cpu() if placement.platform == "cpu" else "",
        describe_libraries("jax", "jaxlib"),
    )
    max_bytes = int(config.cache.encoder_cache_dir_gb * _GIB)
    return StoredRows(
        DiskStore(directory, max_bytes, namespace),
        width=programs.embed_width,
        dtype=np.dtype(programs.dtype),
    )


def _digest_params(params: Params, names: frozenset[str]) -> str:
    """Return a digest of parameters' values: no file's name or time can stand for others."""
    hasher = blake3(max_threads=blake3.AUTO)
    for name, leaf in sorted(flatten_params(params).items()):
        if name in names:
            array = np.ascontiguousarray(jax.device_get(leaf))
            hasher.update(repr((name, array.dtype.name, array.shape)).encode())
            hasher.update(array.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()
