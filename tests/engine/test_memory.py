"""How much KV cache fits, and what an operator is told where too little does."""

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.config.engine_config import CacheConfig
from mmjax.engine.device import memory as memory_module
from mmjax.engine.device.compilation import compile_programs
from mmjax.engine.device.memory import (
    DeviceMemory,
    FixedMemory,
    KVDemand,
    choose_num_blocks,
    device_memory,
    find_allocatable,
    format_bytes,
    memory_table,
    reserve_memory,
)
from mmjax.engine.device.mesh import shard_bytes
from mmjax.engine.device.programs import Programs
from mmjax.errors import ConfigError
from mmjax.system.host_memory import host_memory, resident_by_cause
from tests.engine.tiny import answer_all, message, tiny_engine

DEMAND = KVDemand(
    bytes_per_block=10,
    block_size=4,
    max_model_len=32,
    max_num_seqs=3,
    max_num_batched_tokens=1024,
)
"""80 bytes for one long request, 240 for all that run at once."""
FIXED = FixedMemory(weights=500, programs=100, encoder_pool=50, hidden_states=50)
CPU = DeviceMemory(total=10_000, free=2000, is_shared=True)
GPU = DeviceMemory(total=10_000, free=2000, is_shared=False)


def blocks(device: DeviceMemory, free: int = 2000, **cache: Any) -> int:
    device = DeviceMemory(total=device.total, free=free, is_shared=device.is_shared)
    return choose_num_blocks(CacheConfig(**cache), DEMAND, device, FIXED)


def test_a_request_of_an_encoder_decoder_needs_blocks_for_its_encoder() -> None:
    demand = replace(DEMAND, max_encoder_len=9)
    assert (demand.least, demand.useful) == (8 + 3, 3 * (8 + 3))
    assert choose_num_blocks(CacheConfig(), demand, CPU, FIXED) == 33
    small = replace(GPU, free=200 + 100)
    with pytest.raises(ConfigError, match=r"32 tokens, encoder 9\) needs 110 B.*model-len` to 28"):
        choose_num_blocks(CacheConfig(), demand, small, FIXED)
    fits = replace(demand, max_model_len=28)
    assert choose_num_blocks(CacheConfig(), fits, small, FIXED) == 10
    # Where not even the encoder fits, no length would do.
    with pytest.raises(ConfigError) as caught:
        choose_num_blocks(CacheConfig(), demand, replace(GPU, free=200 + 30), FIXED)
    assert "--max-model-len" not in str(caught.value)


def test_an_accelerators_rest_is_kv_cache() -> None:
    assert blocks(GPU) == (2000 - 200) // 10


def test_a_cpu_gives_what_is_useful_or_half_of_what_is_free() -> None:
    assert blocks(CPU) == 24
    assert blocks(CPU, free=200 + 300) == 15
    # One long request may have more than half.
    assert blocks(CPU, free=200 + 100) == 8


def test_a_cpus_cache_is_modest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_CPU_CACHE_LIMIT", 170)
    assert blocks(CPU) == 17
    monkeypatch.setattr(memory_module, "_CPU_CACHE_LIMIT", 10)
    assert blocks(CPU) == 8


def test_the_operators_size_holds_on_both() -> None:
    assert blocks(CPU, kv_cache_memory_bytes=139) == 13
    assert blocks(GPU, kv_cache_memory_bytes=1800) == 180


@pytest.mark.parametrize(
    ("free", "cache", "remedies"),
    [
        # Room for 7 blocks: 28 tokens. Programs and the like shrink with the step.
        (270, {}, ["--max-model-len` to 28", "--max-num-batched-tokens` to about 960"]),
        (100, {}, ["--max-num-batched-tokens` to about 64"]),
        (2000, {"kv_cache_memory_bytes": 79}, ["raise `--kv-cache-memory-bytes` to 80", "to 28"]),
        (500, {"kv_cache_memory_bytes": 301}, ["lower `--kv-cache-memory-bytes` to 300"]),
        (270, {"gpu_memory_utilization": 0.5}, ["raise `--gpu-memory-utilization` to 0.51"]),
        (10, {"gpu_memory_utilization": 0.98}, ["take a larger device"]),
    ],
)
def test_too_little_memory_names_the_flags(
    free: int, cache: dict[str, Any], remedies: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        blocks(GPU, free=free, **cache)
    for remedy in remedies:
        assert remedy in str(caught.value)


@pytest.mark.parametrize("free", range(80, 280, 10))
def test_every_remedy_mends(free: int) -> None:
    """What the message says of lengths and shares is enough, and no more than a step too much."""
    with pytest.raises(ConfigError) as caught:
        blocks(GPU, free=free)
    text = str(caught.value)
    if found := re.search(r"--max-model-len` to (\d+)", text):
        fits = KVDemand(**{**as_dict(DEMAND), "max_model_len": int(found[1])})
        device = DeviceMemory(total=10_000, free=free, is_shared=False)
        assert choose_num_blocks(CacheConfig(), fits, device, FIXED) * 4 == int(found[1])
    if found := re.search(r"--gpu-memory-utilization` to ([\d.]+)", text):
        more = round(10_000 * (float(found[1]) - 0.9))
        assert blocks(GPU, free=free + more) >= 8
    if found := re.search(r"--max-num-batched-tokens` to about (\d+)", text):
        share = int(found[1]) / 1024
        smaller = FixedMemory(
            weights=500,
            programs=int(100 * share),
            encoder_pool=int(50 * share),
            hidden_states=int(50 * share),
        )
        device = DeviceMemory(total=10_000, free=free, is_shared=False)
        assert choose_num_blocks(CacheConfig(), DEMAND, device, smaller) >= 8


def as_dict(demand: KVDemand) -> dict[str, int]:
    return {name: getattr(demand, name) for name in demand.__slots__}


def test_the_account_names_every_item() -> None:
    lines = memory_table(GPU, FIXED, DEMAND, 180)
    names = ["weights", "programs", "encoder", "hidden", "KV", "left"]
    assert [line.split()[0] for line in lines] == names
    assert "180 blocks of 4 slots" in lines[4]
    assert lines[5].split()[1] == "0"
    assert [format_bytes(n) for n in (5, 1536, 3 * 2**30)] == ["5 B", "1.5 KiB", "3.00 GiB"]


# ---- what is there -------------------------------------------------------------------------------


def machine(
    root: Path, group: str, files: dict[str, str], *, available_kb: int = 8_000_000
) -> Path:
    """Draw the files of a machine in which this process is in control group `group`."""
    files = {
        "proc/meminfo": f"MemTotal: 9000000 kB\nMemAvailable: {available_kb} kB\n",
        "proc/self/cgroup": group,
        **files,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_machine_without_limits(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}
    _, available = host_memory(machine(tmp_path, "0::/\n", files, available_kb=1000))
    assert available == 1_024_000


def test_a_containers_limit_counts_and_its_file_cache_does_not(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory.max": "1000000\n",
        "sys/fs/cgroup/memory.current": "700000\n",
        "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 200000\n",
    }
    # A container that sees its host's path, which is not there: its own group is the root.
    root = machine(tmp_path, "0::/docker/abc\n", files)
    assert host_memory(root) == (1_000_000, 500_000)


def test_a_parents_limit_holds_as_well(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "1\n",
        "sys/fs/cgroup/a/memory.max": "5000\n",
        "sys/fs/cgroup/a/memory.current": "6000\n",
    }
    assert host_memory(machine(tmp_path, "0::/a/b\n", files)) == (5000, 0)


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "3000\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
    }
    group = "5:cpu,cpuacct:/x\n4:memory:/box\n1:name=systemd:/\n"
    assert host_memory(machine(tmp_path, group, files)) == (3000, 2000)


def test_this_machine_has_memory() -> None:
    found = device_memory(jax.local_devices(), 0.5)
    assert found.is_shared
    assert 0 < found.free <= found.total // 2


class Accelerator:
    """A device that says how full it is."""

    platform = "gpu"

    def __init__(self, in_use: int) -> None:
        self._in_use = in_use

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 1000, "bytes_in_use": self._in_use}


@pytest.fixture
def whole_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let JAX have taken all of a GPU."""
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "1.0")


@pytest.mark.usefixtures("whole_pool")
def test_the_fullest_device_counts() -> None:
    found = device_memory([Accelerator(100), Accelerator(300)], 0.8)
    assert found == DeviceMemory(total=1000, free=500, is_shared=False)


@pytest.mark.parametrize(
    ("given", "utilization", "free"),
    [
        (None, 0.9, 950),  # more than the 75% that JAX takes by itself
        (None, 0.3, 400),
        ("0.5", 0.4, 800),
    ],
)
def test_a_share_is_of_the_gpu_and_not_of_what_jax_has_taken(
    given: str | None, utilization: float, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", given)
    found = device_memory([Accelerator(0)], utilization)
    assert found.free == pytest.approx(free, abs=1)
    assert found.total == int(1000 / float(given or 0.75))


@pytest.mark.parametrize(
    ("given", "utilization", "expected"),
    [(None, 0.9, "0.947"), (None, 0.4, "0.421"), (None, 1.0, "0.950"), ("0.2", 0.9, "0.2")],
)
def test_an_engine_process_takes_its_share_of_a_gpu(
    given: str | None, utilization: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", given or "")
    reserve_memory(utilization)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == expected


class _Pieces(Programs):
    """Programs of a device whose free memory lies in pieces."""

    def __init__(self, most: int, reason: str = "RESOURCE_EXHAUSTED: Out of memory") -> None:
        self.placement: Any = SimpleNamespace(platform="gpu", agree=bool)
        self._most, self._reason = most, reason
        self.tried: list[int] = []

    def make_arrays(self, num_blocks: int) -> Any:
        self.tried.append(num_blocks)
        if num_blocks > self._most:
            raise jax.errors.JaxRuntimeError(self._reason)
        return [jnp.zeros(1)]


def test_fewer_blocks_are_allocated_where_memory_lies_in_pieces() -> None:
    programs = _Pieces(85)
    assert find_allocatable([programs], 100, least=10) == 81
    assert programs.tried == [100, 90, 81]


def test_too_few_blocks_are_an_error() -> None:
    programs = _Pieces(5)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        find_allocatable([programs], 100, least=10)
    assert programs.tried[-1] == 10
    programs = _Pieces(5, reason="INTERNAL: lost")
    with pytest.raises(jax.errors.JaxRuntimeError, match="lost"):
        find_allocatable([programs], 100, least=10)
    assert programs.tried == [100]


def test_too_few_blocks_of_another_process_are_an_error() -> None:
    """Which would be asked again for ever, where this one has enough."""
    programs = _Pieces(100)
    programs.placement = SimpleNamespace(platform="gpu", agree=lambda is_so: False)
    with pytest.raises(ConfigError, match="another process cannot allocate 10 KV blocks"):
        find_allocatable([programs], 100, least=10)
    assert programs.tried[-1] == 10


@pytest.mark.usefixtures("whole_pool")
def test_of_given_devices_the_share_is_of_what_others_leave() -> None:
    """Of 1000 a trainer has 400, and the engine's weights 100: half of 600 is the engine's."""
    found = device_memory([Accelerator(500)], 0.5, own_bytes=100)
    assert found == DeviceMemory(total=1000, free=200, is_shared=False)
    assert device_memory([Accelerator(500)], 0.5).free == 0


# ---- programs ------------------------------------------------------------------------------------


def test_what_programs_take_is_known_and_does_not_grow_with_the_cache() -> None:
    programs = tiny_engine(max_num_seqs=2)._runner._programs
    few, many = (
        {
            kind: compile_programs(found[:1])[0]
            for kind, found in programs.by_kind(n).items()
            if found  # nothing writes embeddings unless they are enabled
        }
        for n in (16, 640)
    )
    assert all(size > 0 for size in few.values())
    # Blocks are written in place: no program holds a second cache.
    assert few == many
    one_block = programs.bytes_per_block
    kv_cache = programs.describe_arrays(16).state.kv_cache
    assert shard_bytes(kv_cache) == 16 * one_block == 16 * 2 * 3 * 16 * 8 * 4


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system tells no memory")
def test_a_block_takes_memory_when_it_is_first_written() -> None:
    """On the CPU; until then the cache's pages are none of the process's."""
    core = tiny_engine(max_num_seqs=2, max_num_batched_tokens=64)
    programs = core._runner._programs
    num_blocks = 2**28 // programs.bytes_per_block
    before = resident_by_cause({})["rest"]
    arrays = programs.make_arrays(num_blocks)
    taken = resident_by_cause({})["rest"] - before
    assert taken < 2**26
    cache = arrays.state.kv_cache
    assert sum(one.nbytes for one in jax.tree.leaves(cache)) > 2**28 - 2**20
    assert not any(np.asarray(one).any() for one in jax.tree.leaves(cache))
    # Or before it is written, when nothing runs.
    num_taken = num_blocks // 2
    programs.take_blocks(cache, 0, num_taken)
    taken = resident_by_cause({})["rest"] - before
    assert 0.9 < taken / (num_taken * programs.bytes_per_block) < 1.5


def test_an_idle_engine_has_memory_for_the_next_blocks() -> None:
    core = tiny_engine(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=64)
    runner = core._runner
    prompt = [2 + n for n in range(40)]
    expected = answer_all(core, [message("a", [prompt], max_tokens=2)])
    runner._num_ahead = 5
    core.step()
    num_used = core._scheduler.kv_cache.num_ever_used
    assert runner.num_taken == num_used + 5 < 64
    taken_bytes = runner.num_taken * runner._programs.bytes_per_block
    assert core.stats().memory_bytes["kv_cache"] == taken_bytes
    # What is in the blocks stays, and is found.
    assert answer_all(core, [message("b", [prompt], max_tokens=2)]) == expected
    runner._num_ahead = 100
    core.step()
    assert runner.num_taken == 64
    core.sleep()
    core.wake_up()
    assert runner.num_taken == 0


def test_only_blocks_that_were_used_count_as_memory() -> None:
    core = tiny_engine(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=64)
    told = [core.stats().memory_bytes["kv_cache"]]
    for number in range(1, 3):
        request = message(f"{number}", [[2 + n for n in range(20 * number)]], max_tokens=2)
        answer_all(core, [request])
        told.append(core.stats().memory_bytes["kv_cache"])
    one_block = core._runner._programs.bytes_per_block
    # Of 8 slots each; what the second finds in the first one's blocks it has in them.
    assert [size / one_block for size in told] == [0, 3, 6]
    core.sleep()
    core.wake_up()
    assert core.stats().memory_bytes["kv_cache"] == 0


@pytest.mark.slow  # 20 s; that nothing compiles behind a start is asked of most engines
@pytest.mark.usefixtures("own_programs")
def test_no_shape_compiles_twice() -> None:
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    core = tiny_engine(precompile="none", max_num_seqs=2, max_num_batched_tokens=64)
    programs = core._runner._programs
    compiled.clear()
    compile_programs(programs.make(core.num_kv_blocks))
    assert len(compiled) >= core.num_programs - 1, "encoding one unit is encoding two"
    compiled.clear()
    # What was measured, what was compiled, and what is called are the same programs.
    core._programs._compile(programs.buckets.keys)
    core._runner.warm_up(programs.buckets.keys)
    assert compiled == []
