"""The directory in which KV blocks outlive their process, and what a block there depends on."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from blake3 import blake3

from mmjax import __version__
from mmjax.cache.disk_store import DiskStore
from mmjax.config.engine_config import EngineConfig
from mmjax.engine.device.programs import Programs
from mmjax.layers.module import Params, flatten_params

_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


def open_block_store(config: EngineConfig, programs: Programs, params: Params) -> DiskStore | None:
    """Open the directory of a configuration; None: it has none."""
    cache = config.cache
    if cache.kv_offload_dir is None:
        return None
    size = int(cache.kv_offload_dir_gb * 2**30)
    return DiskStore(cache.kv_offload_dir, size, _make_namespace(config, programs, params))


def _make_namespace(config: EngineConfig, programs: Programs, params: Params) -> bytes:
    """Return all that a block's bits depend on beside its hash: another one's are never found."""
    model, placement = config.model, programs.placement
    device = placement.local_devices[0]
    parts: list[Any] = [
        *("mmjax KV blocks", __version__, jax.__version__, device.platform, device.device_kind),
        *(placement.size, config.cache.block_size, config.cache.prefix_caching_hash_algo),
        model.hf_config.to_json_string(use_diff=False),
        {**model.mm.mm_processor_kwargs},
        {**model.mm.media_io_kwargs},
        [_read(model.path / name) for name in _PROCESSOR_FILES],
        [[one.shape, str(one.dtype)] for one in programs.describe_block()],
        str(programs.dtype),
        hash_params(params),
    ]
    return json.dumps(parts, sort_keys=True, default=str).encode()


def hash_params(params: Params) -> str:
    """Return a digest of all parameters, as they are on their devices."""
    hasher = blake3(max_threads=blake3.AUTO)
    for name, leaf in sorted(flatten_params(params).items()):
        hasher.update(f"{name} {leaf.dtype} {leaf.shape} ".encode())
        # A copy, since an array keeps what it was read into on the host.
        is_on_host = next(iter(leaf.devices())).platform == "cpu"
        array = np.ascontiguousarray(np.asarray(leaf if is_on_host else jnp.copy(leaf)))
        hasher.update(array.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
