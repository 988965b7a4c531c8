"""The devices of an engine, and the shardings of its arrays on them.

Only shardings are declared here: XLA inserts the collectives.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum, IntFlag
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jaxtyping import Array, Float, Int, Shaped

from mmjax.config.engine_config import EngineConfig, ParallelConfig
from mmjax.engine.device.sampler import sample_greedy
from mmjax.errors import ConfigError
from mmjax.layers.attention.kv_cache import HeadSharding
from mmjax.layers.module import Params, flatten_params, unflatten_params
from mmjax.rounding import round_up
from mmjax.weights.sharding import (
    DATA_AXIS,
    GROUP_AXIS,
    MODEL_AXIS,
    Device,
    param_sharding,
)

_AXES = (DATA_AXIS, MODEL_AXIS, GROUP_AXIS)
_MAX_IN_FLIGHT = 16
"""Arrays that are broadcast before one is waited for: of an adapter's, two processes on CPUs waited
for each other for ever at the 157th that was not."""


class Call(IntEnum):
    """The leader's next call, which followers make as well; broadcast with two integers."""

    WAIT = 0
    """No call; sent while idle, since a collective may not wait for ever."""
    END = 1
    RESET = 2
    RUN = 3
    """A program: its place in `Buckets.keys`; a `SampleKind` if it samples."""
    LOAD_ADAPTER = 4
    """The slot."""
    COPY_STATES = 5
    """From one slot to another."""


class SampleKind(IntFlag):
    """What is sent to the devices with a sample."""

    NO_TABLES = 0
    REPORTS = 1
    """Its batch: it reports log-probabilities of a prompt's tokens, and draws none."""
    HISTORY = 2
    MASKS = 4
    EDITS = 8


class Placement:
    """Shardings of one engine's arrays: on one device (no mesh), or over a mesh.

    Keys and values are sharded by heads. Hidden states and the encoder-output pool are replicated:
    attention and MLP each end with an all-reduce, every device reads any row of the pool, and both
    are small compared with the KV cache.
    """

    def __init__(
        self, mesh: Mesh | None = None, *, device: Device | None = None, is_chosen: bool = False
    ) -> None:
        """`device`: where there is no mesh; None: the first local one."""
        self.mesh = mesh
        self.home: Mesh | Device = mesh or device or jax.local_devices()[0]
        """The mesh, or the device."""
        self.is_chosen = is_chosen
        """Whether the devices were given by the caller, whose own arrays may lie there, too."""
        self.replicated: Sharding = self._sharding()
        self.num_kv_shards = 1 if mesh is None else mesh.shape[MODEL_AXIS]
        self.size = 1 if mesh is None else mesh.size
        home = self.home
        devices = list(home.devices.flat) if isinstance(home, Mesh) else [home]
        owners = [device.process_index for device in devices]
        self.local_devices = [d for d in devices if d.process_index == jax.process_index()]
        self.is_shared = len(set(owners)) > 1
        """Whether other processes hold shards: all must then make the same calls, in one order."""
        self.is_leader = not self.is_shared or jax.process_index() == 0
        """Whether this process receives the requests."""
        self._leaders_row = owners.index(0) if self.is_shared else 0

    @property
    def platform(self) -> str:
        """JAX's name of the platform: "cpu", "gpu" or "tpu"."""
        return self.local_devices[0].platform

    def heads(self, axis: int) -> Sharding:
        """Return the sharding of keys and values whose heads are axis `axis`."""
        return self._sharding(*[None] * axis, MODEL_AXIS)

    def slots(self, shape: tuple[int, ...], axis: int) -> Sharding:
        """Return the sharding of slots of `shape`, cut along `axis` if the devices divide it."""
        if shape[axis] % self.size:
            return self.replicated
        return self._sharding(*[None] * (1 + axis), _AXES)

    @property
    def head_sharding(self) -> HeadSharding | None:
        """Return the sharding of attention by heads; None on one device."""
        if self.mesh is None:
            return None
        axes = {"query_axes": (MODEL_AXIS, GROUP_AXIS), "kv_axes": (MODEL_AXIS,)}
        return HeadSharding(mesh=self.mesh, **axes)

    def units(self, num_units: int) -> Sharding:
        """Return the sharding of encoder units: over the devices if that divides evenly."""
        return self.replicated if num_units % self.size else self._sharding(_AXES)

    def padded_units(self, num_units: int) -> int:
        """Return the size of an encoder call, rounded up to the devices unless units are fewer."""
        return num_units if num_units < self.size else round_up(num_units, self.size)

    def place_params(self, params: Params) -> dict[Any, Any]:
        """Move parameters to their shardings; those that have them stay."""
        leaves = flatten_params(params)
        return unflatten_params({name: self._place(name, leaf) for name, leaf in leaves.items()})

    def put(self, arrays: Any, sharding: Sharding | None = None) -> Any:
        """Move the leader's host arrays to the devices; a follower's only give the shapes."""
        target = sharding or self.replicated
        if not self.is_shared:
            return jax.device_put(arrays, target)
        leaves, structure = jax.tree.flatten(arrays)
        placed: list[Array] = []
        for leaf in leaves:
            placed.append(self._broadcast(leaf, target=target))
            if not len(placed) % _MAX_IN_FLIGHT:
                jax.block_until_ready(placed[-1])
        return structure.unflatten(placed)

    def give(self, array: np.ndarray) -> Any:
        """Return a host array as a call takes it, which moves it faster than `put` does.

        It must not change any more.
        """
        return self.put(array) if self.is_shared else array

    def broadcast_call(self, call: Call, first: int = 0, second: int = 0) -> None:
        """Broadcast a call and its integers to the followers, without waiting for them."""
        self.put(np.array((call, first, second), np.int32))

    def receive_call(self) -> tuple[Call, int, int]:
        """Wait for the leader's next call and its integers."""
        call, first, second = np.asarray(self.put(np.zeros(3, np.int32))).tolist()
        return Call(call), first, second

    def gather(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
        """Replicate `x`, under jit, after computing it sharded along `axis` if that divides evenly.

        Without the first constraint XLA may gather the weights instead.
        """
        if self.mesh is None:
            return x
        if x.shape[axis] % self.size == 0:
            x = jax.lax.with_sharding_constraint(x, self._sharding(*[None] * axis, _AXES))
        return jax.lax.with_sharding_constraint(x, self.replicated)

    def spread(self, function: Callable[[Any, Any], Array]) -> Callable[[Any, Any], Array]:
        """Return a function of weights and inputs, under jit, that devices compute each by itself.

        They have even parts of the inputs, and give those of the result, along the first axis. The
        weights that are read are whole on each, so devices exchange nothing.
        """
        if self.mesh is None:
            return function
        parts = PartitionSpec(_AXES)
        options = {"mesh": self.mesh, "in_specs": (PartitionSpec(), parts), "out_specs": parts}
        return jax.shard_map(function, **options, check_vma=False)

    def argmax(self, logits: Float[Array, "R V"]) -> Int[Array, " R"]:
        """Return each row's highest column, the lowest of equals, under jit.

        Where the columns can be cut evenly, devices exchange only the best of their own.
        """
        if self.mesh is None or logits.shape[1] % self.size:
            return sample_greedy(self.gather(logits, 1))

        def find(part: Float[Array, "R _part"]) -> tuple[Float[Array, "R 1"], Int[Array, "R 1"]]:
            best = sample_greedy(part)[:, None]
            first = jax.lax.axis_index(_AXES) * part.shape[1]
            return jnp.take_along_axis(part, best, axis=1), best + first

        columns = PartitionSpec(None, _AXES)
        options = {"mesh": self.mesh, "in_specs": columns, "out_specs": (columns, columns)}
        values, ids = (self.gather(x, 1) for x in jax.shard_map(find, **options)(logits))
        return jnp.take_along_axis(ids, values.argmax(1, keepdims=True), axis=1)[:, 0]

    def least(self, value: int) -> int:
        """Return the smallest value of all processes."""
        if not self.is_shared:
            return value
        return int(multihost_utils.process_allgather(np.int32(min(value, 2**31 - 1))).min())

    def agree(self, is_so: bool) -> bool:
        """Return whether it is so in all processes."""
        return bool(self.least(is_so))

    def _sharding(self, *spec: Any) -> Sharding:
        if not isinstance(self.home, Mesh):
            return SingleDeviceSharding(self.home)
        return NamedSharding(self.home, PartitionSpec(*spec))

    def _place(self, name: str, leaf: Any) -> Array:
        sharding = param_sharding(name, leaf.shape, self.home)
        if not self.is_shared or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
            return jax.device_put(leaf, sharding)
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)

    def _broadcast(self, array: np.ndarray, *, target: Sharding) -> Array:
        """Send the leader's array to all: a sum over devices, to which the others add zeros."""
        array = np.asarray(array)

        def row(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "asked for rows of this process alone"
            is_source = self.is_leader and index[0].start == self._leaders_row
            return array[None] if is_source else np.zeros_like(array)[None]

        shape = (self.size, *array.shape)
        return _sum_rows(jax.make_array_from_callback(shape, self._sharding(_AXES), row), target)


def shard_bytes(tree: Any) -> int:
    """Return the bytes of a tree's arrays (or `ShapeDtypeStruct`s) on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


@partial(jax.jit, static_argnums=1)
def _sum_rows(rows: Shaped[Array, "N ..."], target: Sharding) -> Shaped[Array, "..."]:
    return jax.lax.with_sharding_constraint(rows.sum(0, dtype=rows.dtype), target)


def make_placement(
    config: ParallelConfig, *, num_kv_heads: int, devices: Sequence[Device] | None = None
) -> Placement:
    """Return the placement over the devices of all processes, after `join_processes`.

    Args:
        config: The number of devices, which divides the language model's attention heads.
        num_kv_heads: Its key-value heads; if fewer than devices, groups of devices share one.
        devices: As many of this process's; None: the first ones.
    """
    size, is_chosen = config.tensor_parallel_size, devices is not None
    if size == 1:
        return Placement(device=devices[0] if devices else None, is_chosen=is_chosen)
    chosen = _choose_devices(config) if devices is None else devices
    num_shards = _num_kv_shards(num_kv_heads, size)
    shape = (1, num_shards, size // num_shards)
    return Placement(_make_mesh(shape, chosen), is_chosen=is_chosen)


def _make_mesh(shape: tuple[int, ...], devices: Sequence[Any]) -> Mesh:
    """Return a mesh with automatic sharding propagation."""
    if len(devices) == jax.device_count():
        # Orders devices so that neighbours in the mesh are connected directly.
        axis_types = (AxisType.Auto,) * len(_AXES)
        return jax.make_mesh(shape, _AXES, axis_types=axis_types, devices=devices)
    return Mesh(np.array(devices).reshape(shape), _AXES)


def join_processes(config: EngineConfig) -> None:
    """Initialise `jax.distributed` if there are several processes, before any other use of JAX.

    Raises `ConfigError` in all processes if their settings differ: shapes depend on these, and
    processes with different shapes would deadlock.
    """
    parallel = config.parallel
    if parallel.num_processes == 1:
        return
    if not jax.distributed.is_initialized():
        jax.distributed.initialize(
            parallel.coordinator_address, parallel.num_processes, parallel.process_id
        )
    digests = multihost_utils.process_allgather(np.uint32(settings_digest(config)))
    mismatched = np.flatnonzero(digests != digests[0]).tolist()
    if mismatched:
        raise ConfigError(
            f"processes {mismatched} have other settings than process 0, or another JAX; give all "
            "the same model and flags, but for `--distributed-process-id`"
        )


def settings_digest(config: EngineConfig) -> int:
    """Return a digest of the settings that shapes depend on, which must be equal on all hosts."""
    model = config.model
    settings = (
        jax.__version__,
        model.max_model_len,
        model.dtype,
        model.quantization,
        model.logprobs_mode,
        model.hf_config.to_json_string(use_diff=False),
        config.cache,
        config.scheduler,
        replace(config.lora, lora_modules=()),  # only the leader reads files
        config.precompile,  # warming up makes calls, too
        # They decide whether there is a tower, and whether there are programs of `write_rows`.
        (model.mm.enable_mm_embeds, sorted(model.mm.limit_mm_per_prompt.items())),
        replace(config.parallel, process_id=0),
    )
    return zlib.crc32(repr(settings).encode())


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
    """Return the number of shards of the key-value heads; further devices hold copies.

    8 heads on 4 devices: 4, of two heads. 4 heads on 8: 4, on two devices each. 1 head: 1, on all.
    """
    if num_kv_heads % size == 0:
        return size
    return num_kv_heads if size % num_kv_heads == 0 else 1
