"""Which devices an engine runs on, and where each of its arrays lies on them.

The collectives are XLA's: here stands only what is cut where, and the compiler does the rest.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Shaped

from mmjax.config import ParallelConfig
from mmjax.errors import ConfigError
from mmjax.layers.module import Params, flatten_params, unflatten_params
from mmjax.weights.sharding import DATA_AXIS, GROUP_AXIS, MODEL_AXIS, param_sharding

_AXES = (DATA_AXIS, MODEL_AXIS, GROUP_AXIS)


class Placement:
    """Where the arrays of one engine lie: on one device (no mesh), or cut over a mesh.

    Keys and values are cut by heads. Hidden states and the pool of encoder outputs are whole
    everywhere: each half of a block ends with the sum that leaves them so, every device reads any
    row of the pool, and both are small beside the KV cache.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.mesh = mesh
        self.replicated: Sharding = self._named()
        self.kv_cache: Sharding = self._named(None, MODEL_AXIS)
        """Of `LayerCache.keys` and `.values`."""
        self.num_kv_shards = 1 if mesh is None else mesh.shape[MODEL_AXIS]
        self.size = 1 if mesh is None else mesh.size
        devices = [jax.local_devices()[0]] if mesh is None else list(mesh.devices.flat)
        owners = [device.process_index for device in devices]
        self.local_devices = [d for d in devices if d.process_index == jax.process_index()]
        self.is_shared = len(set(owners)) > 1
        """Whether other processes hold parts: then each must make the same calls, in one order."""
        self.is_leader = not self.is_shared or jax.process_index() == 0
        """Whether requests come to this process."""
        self._leaders_row = owners.index(0) if self.is_shared else 0

    def units(self, num_units: int) -> Sharding:
        """Return where the inputs of `encode` lie: cut over the devices if each gets as many."""
        return self.replicated if num_units % self.size else self._named(_AXES)

    def padded_units(self, num_units: int) -> int:
        """Return the size of an encoder call: a multiple of the devices if it has one for each."""
        return num_units if num_units < self.size else -(-num_units // self.size) * self.size

    def place_params(self, params: Params) -> Params:
        """Move parameters that are in memory to their places; those that are there stay."""
        leaves = flatten_params(params)
        return unflatten_params({name: self._place(name, leaf) for name, leaf in leaves.items()})

    def put(self, arrays: Any, sharding: Sharding | None = None) -> Any:
        """Move a tree of the leader's host arrays to the devices; a follower's tell their shape."""
        target = sharding or self.replicated
        if not self.is_shared:
            return jax.device_put(arrays, target)
        return jax.tree.map(partial(self._broadcast, target=target), arrays)

    def make(self, build: Callable[[], Any], shardings: Any) -> Any:
        """Return what `build` makes, made in its place: no device ever holds all of it."""
        return jax.jit(build, out_shardings=shardings)()

    def replicate(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Under jit: have all of `x` on every device."""
        return x if self.mesh is None else jax.lax.with_sharding_constraint(x, self.replicated)

    def least(self, value: int) -> int:
        """Return the smallest that any process says."""
        if not self.is_shared:
            return value
        return int(multihost_utils.process_allgather(np.int32(min(value, 2**31 - 1))).min())

    def _named(self, *spec: Any) -> Sharding:
        if self.mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0])
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def _place(self, name: str, leaf: Any) -> Array:
        sharding = param_sharding(name, leaf.shape, self.mesh)
        if not self.is_shared or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
            return jax.device_put(leaf, sharding)
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)

    def _broadcast(self, array: np.ndarray, *, target: Sharding) -> Array:
        """Sum a row for every device, all 0 but the leader's."""
        array = np.asarray(array)

        def row(index: tuple[slice, ...]) -> np.ndarray:
            is_source = self.is_leader and index[0].start == self._leaders_row
            return array[None] if is_source else np.zeros_like(array)[None]

        shape = (self.size, *array.shape)
        return _sum_rows(jax.make_array_from_callback(shape, self._named(_AXES), row), target)


@partial(jax.jit, static_argnums=1)
def _sum_rows(rows: Shaped[Array, "N ..."], target: Sharding) -> Shaped[Array, "..."]:
    return jax.lax.with_sharding_constraint(rows.sum(0, dtype=rows.dtype), target)


def make_placement(config: ParallelConfig, *, num_heads: int, num_kv_heads: int) -> Placement:
    """Spread the engine over the devices of all processes; they have met before.

    Args:
        config: Over how many.
        num_heads: Attention heads of the language model: each device gets as many.
        num_kv_heads: Its key-value heads; fewer than devices are shared by groups of these.
    """
    size = config.tensor_parallel_size
    if num_heads % size:
        fitting = [
            n for n in range(1, num_heads + 1) if not (num_heads % n or n % config.num_processes)
        ]
        raise ConfigError(
            f"`--tensor-parallel-size` is {size}, but the language model has {num_heads} attention "
            f"heads, which {size} devices cannot share evenly; give one of "
            f"{', '.join(map(str, fitting))}"
        )
    if size == 1:
        return Placement()
    devices = _choose_devices(config)
    num_shards = _num_kv_shards(num_kv_heads, size)
    shape = (1, num_shards, size // num_shards)
    if len(devices) == jax.device_count():
        # The order in which neighbours on the wire are neighbours in the mesh.
        return Placement(Mesh(mesh_utils.create_device_mesh(shape, devices), _AXES))
    return Placement(Mesh(np.array(devices).reshape(shape), _AXES))


def join_processes(config: ParallelConfig) -> None:
    """Meet the other processes; before anything else asks JAX for a device."""
    if config.num_processes > 1 and not jax.distributed.is_initialized():
        jax.distributed.initialize(
            config.coordinator_address, config.num_processes, config.process_id
        )


def _choose_devices(config: ParallelConfig) -> list[Any]:
    share = config.tensor_parallel_size // config.num_processes
    by_process: dict[int, list[Any]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    fewest = min(map(len, by_process.values()))
    if share > fewest:
        here = f"{fewest} {jax.default_backend()} devices"
        raise ConfigError(
            f"`--tensor-parallel-size` is {config.tensor_parallel_size}, {share} in each process, "
            f"but a process has {here}; lower it, or add devices"
        )
    return [device for devices in by_process.values() for device in devices[:share]]


def _num_kv_shards(num_kv_heads: int, size: int) -> int:
    """Return over how many devices key-value heads are cut; the rest hold the same ones.

    8 heads on 4 devices: 4, two each. 4 heads on 8: 4, each held by two. 1 head: 1, held by all.
    """
    if num_kv_heads % size == 0:
        return size
    return num_kv_heads if size % num_kv_heads == 0 else 1
