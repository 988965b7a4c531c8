"""Device memory: what the engine may use, and how much of it the KV cache gets.

All sizes are bytes on one device: of several, the one with the least free memory.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from mmjax.config.engine_config import CacheConfig, EngineConfig
from mmjax.engine.device.compilation import compile_programs
from mmjax.engine.device.mesh import shard_bytes
from mmjax.engine.device.programs import Programs
from mmjax.errors import ConfigError
from mmjax.rounding import cdiv
from mmjax.system.host_memory import host_memory
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

_CPU_CACHE_LIMIT = 4 * 2**30
"""Cap of the KV cache on CPU, unless the longest request needs more: host memory is shared."""
_CPU_CACHE_SHARE = 0.5
_TOKENS_STEP = 64
_MAX_UTILIZATION = 0.98
_POOL_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Variables of the environment that say how much of a GPU JAX takes; the second is the older."""
_DEFAULT_POOL_SHARE, _MAX_POOL_SHARE = 0.75, 0.95
_MOST_OF_POOL = 0.95
"""What is planned of that; the rest is for programs that XLA tries while it compiles others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory after the weights are loaded."""

    total: int
    """All memory of the device, or of the host within a container's limit."""
    free: int
    """What may still be allocated, within `gpu_memory_utilization`."""
    is_shared: bool
    """Whether it is the host's memory (the device is a CPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedMemory:
    """What the engine needs besides the KV cache."""

    weights: int
    """Allocated already."""
    draft_weights: int = 0
    """Those of a draft model, as well."""
    programs: int
    """Temporary memory of the largest program of each kind."""
    encoder_pool: int
    hidden_states: int
    adapters: int = 0
    """All slots."""
    max_loras: int = 0
    states: int = 0
    """All slots of recurrent layers' states."""
    num_state_slots: int = 0
    states_per_seq: int = 1
    """Slots of a request. Those that are left are of snapshots."""
    max_num_seqs: int = 0
    offload: int = 0
    """KV blocks on their way between device and host; on a CPU also those that the host keeps."""

    @property
    def to_come(self) -> int:
        """What is not allocated yet."""
        caches = self.encoder_pool + self.hidden_states + self.adapters + self.states
        return self.programs + caches + self.offload


@dataclass(frozen=True, slots=True, kw_only=True)
class KVDemand:
    """What the KV cache must hold."""

    bytes_per_block: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_encoder_len: int = 0
    """Hidden states of an encoder-decoder model's longest encoder input."""

    @property
    def least(self) -> int:
        """Blocks of one request of `max_model_len`, with its cross-attention blocks."""
        return cdiv(self.max_model_len, self.block_size) + self.encoder_blocks

    @property
    def encoder_blocks(self) -> int:
        """Cross-attention blocks of one request."""
        return cdiv(self.max_encoder_len, self.block_size)

    @property
    def useful(self) -> int:
        """Blocks with which no request ever waits for blocks."""
        return self.max_num_seqs * self.least


def fit_kv_cache(
    config: EngineConfig, programs: Programs, weights: int, *, draft: Programs | None = None
) -> int:
    """Compile the largest programs, and return how many KV blocks fit besides them.

    They are compiled for the number of blocks that would fit without them: if that is the result
    (usually on CPU), they need not be compiled again. Unless all programs are compiled first, they
    are not compiled here, if as many blocks fit though they took half of the memory that is free.
    `weights`: their bytes on a device. `draft`: the programs of a draft model, which is loaded as
    well and has as many blocks.
    """
    models = [programs] if draft is None else [programs, draft]
    loaded = weights if draft is None else weights + shard_bytes(draft.own_params)
    cache, placement = config.cache, programs.placement
    demand = KVDemand(
        bytes_per_block=sum(one.bytes_per_block for one in models),
        block_size=programs.block_size,
        max_model_len=config.model.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_encoder_len=programs.max_encoder_len,
    )
    memory = device_memory(
        placement.local_devices,
        cache.gpu_memory_utilization,
        own_bytes=loaded if placement.is_chosen else None,
    )
    fixed = _find_fixed(config, models, demand, weights)
    num_blocks = placement.least(choose_num_blocks(cache, demand, memory, fixed))
    is_hurried = config.precompile != "all"
    program_bytes = memory.free // 2
    if not (is_hurried and _fits_beside(program_bytes, num_blocks, cache, demand, memory, fixed)):
        kinds = [kind for one in models for kind in one.by_kind(num_blocks).values()]
        largest = [kind[0] for kind in kinds if kind]
        sizes = compile_programs(largest, num_threads=config.compile_threads)
        # Summed, although they run in turn: a program's memory is allocated while another runs.
        fixed = replace(fixed, programs=sum(sizes))
        num_blocks = placement.least(choose_num_blocks(cache, demand, memory, fixed))
    num_blocks = find_allocatable(models, num_blocks, demand.least)
    for line in memory_table(memory, fixed, demand, num_blocks):
        logger.info("memory of a device: %s", line)
    return num_blocks


def _find_fixed(
    config: EngineConfig, models: Sequence[Programs], demand: KVDemand, weights: int
) -> FixedMemory:
    """Return what is needed besides the KV cache and the programs; `models`: the engine's first."""
    programs, *drafts = models
    arrays = [one.describe_arrays(demand.least) for one in models]
    return FixedMemory(
        weights=weights,
        draft_weights=shard_bytes([one.own_params for one in drafts]),
        programs=0,
        encoder_pool=shard_bytes([one.pool for one in arrays]),
        hidden_states=shard_bytes([(one.state.hidden, one.previous) for one in arrays]),
        adapters=shard_bytes(programs.describe_adapters()),
        max_loras=config.lora.max_loras,
        states=programs.state_bytes,
        num_state_slots=programs.num_state_slots,
        states_per_seq=programs.states_per_seq,
        max_num_seqs=config.scheduler.max_num_seqs,
        offload=_find_offload_bytes(config, programs),
    )


def count_host_slots(config: EngineConfig, programs: Programs) -> int:
    """Return how many KV blocks host memory keeps; ConfigError for a size that is no use."""
    size = int(config.cache.kv_offload_gb * 2**30)
    if not size:
        return 0
    _, available = host_memory()
    if size > available:
        raise ConfigError(
            f"`kv_offload_gb` asks for {format_bytes(size)} of host memory, of which "
            f"{format_bytes(available)} are free; lower `--kv-offload-gb`"
        )
    block = programs.bytes_per_host_block
    if size < block:
        raise ConfigError(
            f"`kv_offload_gb` gives {format_bytes(size)}, but a KV block takes "
            f"{format_bytes(block)}; raise `--kv-offload-gb`, or leave it out"
        )
    return size // block


def count_staged(config: EngineConfig) -> int:
    """Return how many KV blocks may be on their way between device and host, in each direction.

    As many as a step's tokens fill.
    """
    schedule = config.scheduler
    return cdiv(schedule.max_num_batched_tokens, config.cache.block_size) + schedule.max_num_seqs


def _find_offload_bytes(config: EngineConfig, programs: Programs) -> int:
    num_slots = count_host_slots(config, programs)
    if not num_slots:
        return 0
    block = programs.bytes_per_host_block
    logger.info(
        "memory of the host: %s for %d evicted KV blocks",
        format_bytes(num_slots * block),
        num_slots,
    )
    staged = 2 * count_staged(config) * programs.bytes_per_block
    return staged + (num_slots * block if programs.placement.platform == "cpu" else 0)


def _fits_beside(
    program_bytes: int,
    num_blocks: int,
    cache: CacheConfig,
    demand: KVDemand,
    memory: DeviceMemory,
    fixed: FixedMemory,
) -> bool:
    try:
        found = choose_num_blocks(cache, demand, memory, replace(fixed, programs=program_bytes))
    except ConfigError:
        return False
    return found == num_blocks


def choose_num_blocks(
    cache: CacheConfig, demand: KVDemand, memory: DeviceMemory, fixed: FixedMemory
) -> int:
    """Return how many KV blocks to allocate; `ConfigError` if the longest request does not fit.

    On an accelerator, all that is free. On CPU the least of what `max_num_seqs` requests can use,
    half of what is free, and 4 GiB.
    """
    room = memory.free - fixed.to_come
    size = cache.kv_cache_memory_bytes
    if size is None:
        size = room
        if memory.is_shared:
            need = demand.least * demand.bytes_per_block
            modest = min(int(room * _CPU_CACHE_SHARE), _CPU_CACHE_LIMIT)
            useful = demand.useful * demand.bytes_per_block
            size = min(useful, max(need, modest), room)
    num_blocks = size // demand.bytes_per_block
    if size > room or num_blocks < demand.least:
        raise ConfigError(_too_little(cache, demand, memory, fixed))
    return num_blocks


def _too_little(
    cache: CacheConfig, demand: KVDemand, memory: DeviceMemory, fixed: FixedMemory
) -> str:
    """Return the error's message, with every flag and value that would help."""
    room = memory.free - fixed.to_come
    given = cache.kv_cache_memory_bytes
    need = demand.least * demand.bytes_per_block
    if given is not None and given > max(room, 0):
        what = f"`--kv-cache-memory-bytes` asks for {format_bytes(given)}"
    else:
        encoder = f", encoder {demand.max_encoder_len}" if demand.max_encoder_len else ""
        what = (
            f"the KV cache of one request of `max_model_len` ({demand.max_model_len} tokens"
            f"{encoder}) needs {format_bytes(need)}"
        )
    available = max(room, 0) if given is None else min(max(room, 0), given)
    remedies = [
        *(["lower `--kv-offload-gb`"] if fixed.offload > 0 and need > room else []),
        *_cache_remedies(cache, demand, room, available),
        *(["leave `--speculative-config` out"] if fixed.draft_weights and need > room else []),
        *_adapter_remedies(fixed, need - room),
        *_state_remedies(fixed, need - room),
        *_step_remedies(demand, memory, fixed, need),
        *_utilization_remedies(cache, memory, need - room),
    ] or ["take a larger device, or `--tensor-parallel-size`: the model leaves no room"]
    uses = ", ".join(f"{name} {format_bytes(size)}" for name, size, _ in _list_uses(fixed))
    return (
        f"{what}, but {format_bytes(available)} are there (of {format_bytes(memory.total)}: "
        f"{uses}); {'; or '.join(remedies)}"
    )


def _cache_remedies(cache: CacheConfig, demand: KVDemand, room: int, available: int) -> list[str]:
    remedies = []
    need = demand.least * demand.bytes_per_block
    given = cache.kv_cache_memory_bytes
    if given is not None and given > room >= need:
        remedies.append(f"lower `--kv-cache-memory-bytes` to {room}")
    elif given is not None and given < need <= room:
        remedies.append(f"raise `--kv-cache-memory-bytes` to {need}")
    num_blocks = available // demand.bytes_per_block - demand.encoder_blocks
    longest = num_blocks * demand.block_size
    if 0 < longest < demand.max_model_len:
        remedies.append(f"lower `--max-model-len` to {longest}")
    return remedies


def _adapter_remedies(fixed: FixedMemory, missing: int) -> list[str]:
    if missing <= 0 or not fixed.adapters:
        return []
    num_slots = int(fixed.max_loras * (1 - missing / fixed.adapters))
    if num_slots < 1:
        return ["lower `--max-lora-rank`"]
    return [f"lower `--max-loras` to {num_slots}", "lower `--max-lora-rank`"]


def _state_remedies(fixed: FixedMemory, missing: int) -> list[str]:
    """Return what frees slots of states: fewer snapshots, or none and fewer requests."""
    if missing <= 0 or not fixed.states:
        return []
    num_slots = int(fixed.num_state_slots * (1 - missing / fixed.states))
    num_seqs = num_slots // fixed.states_per_seq
    if num_seqs >= fixed.max_num_seqs:
        num_snapshots = num_slots - fixed.max_num_seqs * fixed.states_per_seq
        return [f"lower `--num-state-snapshots` to {num_snapshots}"]
    remedies = []
    if num_seqs:
        remedies.append(f"lower `--max-num-seqs` to {num_seqs} and `--num-state-snapshots` to 0")
    if fixed.states_per_seq > 1:
        remedies.append("leave `--speculative-config` out, with which a request has several states")
    return remedies


def _step_remedies(
    demand: KVDemand, memory: DeviceMemory, fixed: FixedMemory, need: int
) -> list[str]:
    # Programs, hidden states and encoder outputs grow with the tokens of a step.
    share = (memory.free - need) / max(fixed.to_come, 1)
    tokens = int(demand.max_num_batched_tokens * share) // _TOKENS_STEP * _TOKENS_STEP
    if not _TOKENS_STEP <= tokens < demand.max_num_batched_tokens:
        return []
    remedy = f"lower `--max-num-batched-tokens` to about {tokens}"
    if tokens < demand.max_num_seqs:
        remedy += f" and `--max-num-seqs` to {tokens}"
    return [remedy]


def _utilization_remedies(cache: CacheConfig, memory: DeviceMemory, missing: int) -> list[str]:
    wanted = cache.gpu_memory_utilization + max(missing, 0) / memory.total
    wanted = np.ceil(wanted * 100) / 100
    if cache.gpu_memory_utilization < wanted <= _MAX_UTILIZATION:
        return [f"raise `--gpu-memory-utilization` to {wanted:.2f}"]
    return []


# ---- measurement ---------------------------------------------------------------------------------


def device_memory(
    devices: Sequence[Any], utilization: float, *, own_bytes: int | None = None
) -> DeviceMemory:
    """Return the memory of that one of a process's devices which has the least that is free.

    Args:
        devices: The engine's.
        utilization: The share that may be used, `gpu_memory_utilization`.
        own_bytes: What the engine has allocated already, if it gets a share of what the others
            on its devices leave; None: a share of all.
    """
    found = [_of_device(device, len(devices), utilization, own_bytes) for device in devices]
    return min(found, key=lambda memory: memory.free)


def _of_device(
    device: Any, num_neighbours: int, utilization: float, own_bytes: int | None
) -> DeviceMemory:
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is not None and "bytes_limit" in stats:
        limit, in_use = int(stats["bytes_limit"]), int(stats["bytes_in_use"])
        own = in_use if own_bytes is None else min(own_bytes, in_use)
        # On a GPU JAX's limit is a share itself.
        pool_share = _pool_share() if device.platform == "gpu" else 1.0
        free = int((limit - (in_use - own)) * min(utilization / pool_share, _MOST_OF_POOL)) - own
        return DeviceMemory(total=int(limit / pool_share), free=free, is_shared=False)
    total, available = host_memory()
    free = int(available * utilization) // num_neighbours
    return DeviceMemory(total=total, free=free, is_shared=True)


def _pool_share() -> float:
    """Return how much of a GPU's memory JAX takes."""
    given = next(filter(None, map(os.environ.get, _POOL_SHARES)), None)
    return _DEFAULT_POOL_SHARE if given is None else float(given)


def reserve_memory(utilization: float) -> None:
    """Let JAX take so much of a GPU, and a little for what it compiles, when it opens the devices.

    By default it takes 75%. What the environment says stays.
    """
    if not any(map(os.environ.get, _POOL_SHARES)):
        share = min(utilization / _MOST_OF_POOL, _MAX_POOL_SHARE)
        os.environ[_POOL_SHARES[0]] = f"{share:.3f}"


def find_allocatable(models: Sequence[Programs], num_blocks: int, least: int) -> int:
    """Return how many KV blocks the devices can allocate now: at most, and nearly, `num_blocks`.

    Fewer than are free where these lie in pieces, as those of a GPU's pool that grows on demand do.
    `models`: whose arrays they are, in the same number for each. Raises what the allocation of
    `least` raised, and `ConfigError` where that was another process.
    """
    placement = models[0].placement
    if placement.platform == "cpu":
        return num_blocks
    while True:
        error = _try_arrays(models, num_blocks)
        if placement.agree(error is None):
            return num_blocks
        fewer = max(least, num_blocks - max(1, num_blocks // 10))
        if fewer == num_blocks:
            raise error or ConfigError(
                f"another process cannot allocate {num_blocks} KV blocks, the fewest that one "
                "request needs; lower `--max-model-len`, or free memory there"
            )
        logger.warning(
            "%d KV blocks cannot be allocated, since free memory lies in pieces: %d are tried",
            *(num_blocks, fewer),
        )
        num_blocks = fewer


def _try_arrays(models: Sequence[Programs], num_blocks: int) -> Exception | None:
    """Allocate all caches, and free them; return why that was not possible."""
    arrays: list[Any] = []
    error = None
    try:
        for programs in models:
            arrays.append(jax.block_until_ready(programs.make_arrays(num_blocks)))
    except jax.errors.JaxRuntimeError as raised:
        if "RESOURCE_EXHAUSTED" not in f"{raised}":
            raise
        error = raised
    for array in jax.tree.leaves(arrays):
        array.delete()
    return error


# ---- reports -------------------------------------------------------------------------------------


def memory_table(
    memory: DeviceMemory, fixed: FixedMemory, demand: KVDemand, num_blocks: int
) -> list[str]:
    """Return a table of memory for the log, a line for each use."""
    cache_bytes = num_blocks * demand.bytes_per_block
    left = memory.free - fixed.to_come - cache_bytes
    rows = [
        *_list_uses(fixed),
        ("KV cache", cache_bytes, f"{num_blocks} blocks of {demand.block_size} slots"),
        ("left", left, f"of {format_bytes(memory.total)}"),
    ]
    return [f"{name:<16}{format_bytes(size):>12}  {note}".rstrip() for name, size, note in rows]


def _list_uses(fixed: FixedMemory) -> list[tuple[str, int, str]]:
    """Return what memory is for besides the KV cache: names, bytes, and notes."""
    programs = "largest encode, step and sample" if fixed.programs else "not compiled yet"
    uses = [
        ("weights", fixed.weights, ""),
        ("programs", fixed.programs, programs),
        ("encoder outputs", fixed.encoder_pool, ""),
        ("hidden states", fixed.hidden_states, ""),
    ]
    some = [
        ("draft model", fixed.draft_weights, ""),
        ("adapters", fixed.adapters, f"{fixed.max_loras} slots"),
        ("recurrent states", fixed.states, _count_slots(fixed)),
        ("evicted blocks", fixed.offload, "to and from the host"),
    ]
    return uses + [use for use in some if use[1]]


def _count_slots(fixed: FixedMemory) -> str:
    num_snapshots = fixed.num_state_slots - fixed.max_num_seqs * fixed.states_per_seq
    each = f" of {fixed.states_per_seq} each" if fixed.states_per_seq > 1 else ""
    return f"{fixed.max_num_seqs} requests{each}, {num_snapshots} snapshots"


def format_bytes(size: int) -> str:
    """Return a size with a binary unit: 1536 is "1.5 KiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
