"""One model over several devices, or processes: the answers of one, each part in its place."""

import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from mmjax.cache.kv.kv_cache_manager import BlockCopy
from mmjax.config.engine_config import ParallelConfig
from mmjax.engine.core import EngineCore
from mmjax.engine.device.host_pool import HostPool
from mmjax.engine.device.mesh import make_placement
from mmjax.errors import ConfigError
from mmjax.layers.module import flatten_params
from tests.conftest import FOUR_DEVICES
from tests.engine.spread import (
    NUM_PROCESSES,
    adapted_config,
    params_with_heads,
    serve,
    serve_adapters,
    serve_embeds,
    spread_config,
)
from tests.engine.tiny import drain, message, start_tiny

LAYERS = 3


@lru_cache
def engine(num_kv_heads: int, size: int) -> EngineCore:
    """Start an engine on `size` devices."""
    config = spread_config(num_kv_heads, tensor_parallel_size=size)
    return start_tiny(config, params_with_heads(num_kv_heads))


SPREADS = [
    # One key-value head, held by all; two, held by two devices each; four, one each.
    pytest.param(1, 4, marks=pytest.mark.slow),
    (2, 4),
    pytest.param(4, 4, marks=pytest.mark.slow),
    pytest.param(1, 2, marks=pytest.mark.slow),
    pytest.param(4, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("num_kv_heads", "size"), SPREADS)
def test_answers_are_those_of_one_device(num_kv_heads: int, size: int):
    core = engine(num_kv_heads, size)
    assert serve(core) == serve(engine(num_kv_heads, 1))
    assert serve(core, temperature=1.0, seed=7) == serve(
        engine(num_kv_heads, 1), temperature=1.0, seed=7
    )
    assert core.compilations == 0


def test_logits_are_those_of_one_device_but_for_rounding():
    """Sums over devices add in another order: see docs/determinism.md for the figures."""
    reports = [_logprobs(engine(2, size)) for size in (1, 4)]
    np.testing.assert_allclose(reports[1], reports[0], atol=1e-5, rtol=0)


def _logprobs(core: EngineCore) -> np.ndarray:
    request = message("one", ([5, 6, 7], (1, 3), [8, 9]), logprobs=10, max_tokens=16)
    core.add_request(request)
    news = drain(core)["one"]
    return np.array([one.logprobs for delta in news for one in delta.new_logprobs or []])


def test_each_device_holds_its_part_and_no_more():
    core = engine(2, 4)
    params = flatten_params(core.params)
    layer = "language_model.layers.0.{}.weight"
    shapes = {
        name: params[layer.format(name)].sharding.shard_shape(params[layer.format(name)].shape)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")
    }
    assert shapes == {
        "self_attn.q_proj": (16, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.o_proj": (32, 16),
        "mlp.down_proj": (32, 12),
    }
    tower = [leaf for name, leaf in params.items() if "language_model" not in name]
    assert tower
    assert all(leaf.sharding.is_fully_replicated for leaf in tower)
    for blocks in jax.tree.leaves(core._runner._state.kv_cache):
        part = blocks.sharding.shard_shape(blocks.shape)
        cut = [pair for pair in zip(blocks.shape, part, strict=True) if pair[0] != pair[1]]
        assert cut == [(2, 1)], "one of two heads, and all of the rest"


def test_a_block_in_host_memory_has_all_devices_heads():
    core = engine(2, 4)
    core.reset_prefix_cache()  # no prompt finds what is written here
    runner = core._runner
    pool = HostPool(runner._programs, num_slots=20, max_staged=16)
    kv_cache = pool.warm_up(runner._state.kv_cache)
    rng = np.random.default_rng(0)
    slots, blocks = range(19, -1, -1), range(20)
    for array in pool._arrays:
        array[:] = rng.standard_normal(array.shape)
    sent = [array.copy() for array in pool._arrays]
    kv_cache = pool.move(kv_cache, [], list(zip(slots, blocks, strict=True)))
    # Arrays of one shape are one in host memory, [blocks, arrays, ...].
    held = sorted((one for rows in sent for one in np.moveaxis(rows[::-1], 1, 0)), key=np.shape)
    arrays = sorted(map(np.asarray, jax.tree.leaves(kv_cache)), key=np.shape)
    assert {one.ndim for one in held} == {4}
    for array, rows in zip(arrays, held, strict=True):
        np.testing.assert_array_equal(array[:20], rows)
    copied = [BlockCopy(number, number, b"") for number in blocks]
    kv_cache = pool.move(kv_cache, copied, [])
    while pool._copies:
        kv_cache = pool.move(kv_cache, [], [])
    for array, rows in zip(pool._arrays, sent, strict=True):
        np.testing.assert_array_equal(array, rows[::-1])
    runner._state = runner._state._replace(kv_cache=kv_cache)


def test_the_compiler_adds_one_sum_a_half_block_and_moves_no_weights():
    collectives = Counter(_collectives(engine(2, 4)))
    sums = 2 * LAYERS + 1  # of attention and of the MLP; of the embedding's lookup
    assert collectives == {("step", "all-reduce"): sums, ("sample", "all-gather"): 1} | {
        ("encode", "all-gather"): 1
    }


def _collectives(core: EngineCore) -> Iterator[tuple[str, str]]:
    """Find what devices say to each other in the largest program of each function."""
    by_kind = core._runner._programs.by_kind(core.num_kv_blocks)
    for kind, programs in by_kind.items():
        if not programs:  # of an encoder-decoder alone
            continue
        compiled = programs[0].jitted.lower(**programs[0].arguments).compile()
        pattern = r"= \S+ (all-\w+|reduce-scatter|collective-permute)(?:-start)?\("
        for found in re.findall(pattern, compiled.as_text()):
            yield kind, found


def test_devices_exchange_the_best_of_their_logits_alone():
    core = engine(2, 4)
    programs = core._runner._programs.by_kind(core.num_kv_blocks)["sample"]
    greedy = next(program for program in programs if program.arguments["is_plain"])
    text = greedy.jitted.lower(**greedy.arguments).compile().as_text()
    gathered = re.findall(r"= \(?\w+\[(\d+),(\d+)\].* all-gather(?:-start)?\(", text)
    assert gathered
    num_rows = greedy.arguments["num_rows"]
    assert {tuple(map(int, shape)) for shape in gathered} == {(num_rows, 4)}


def test_of_equal_logits_the_lowest_id_is_chosen_on_any_device():
    placement = engine(2, 4)._placement
    logits = np.random.default_rng(0).integers(0, 9, (200, 256)).astype(np.float32)
    found = jax.jit(placement.argmax)(placement.put(logits))
    np.testing.assert_array_equal(found, logits.argmax(1))
    uneven = logits[:, :-1]
    np.testing.assert_array_equal(
        jax.jit(placement.argmax)(placement.put(uneven)), uneven.argmax(1)
    )


def test_pictures_are_spread_where_there_is_one_for_each_device():
    placement = engine(2, 4)._placement
    assert [placement.padded_units(n) for n in (1, 2, 3, 4, 5, 8)] == [1, 2, 3, 4, 8, 8]
    assert placement.units(2).is_fully_replicated
    assert placement.units(8).shard_shape((8, 3, 28, 28)) == (2, 3, 28, 28)


# ---- settings that do not work -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_heads", "size", "words"),
    [
        (4, 3, r"`--tensor-parallel-size` is 3.*4 attention heads.*1, 2, 4"),
        (6, 4, r"6 attention heads.*1, 2, 3, 6"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(num_heads: int, size: int, words: str):
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(tensor_parallel_size=size).check_heads(num_heads)


def test_more_devices_than_there_are_are_refused():
    words = "8, 8 in each process, but a process has 4 cpu devices"
    with pytest.raises(ConfigError, match=words):
        make_placement(ParallelConfig(tensor_parallel_size=8), num_kv_heads=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"tensor_parallel_size": 0},
            "`tensor_parallel_size` is 0; expected an integer of at least 1",
        ),
        ({"num_processes": 2, "tensor_parallel_size": 2}, "--distributed-coordinator HOST:PORT"),
        ({"process_id": 1}, r"`--distributed-process-id`.* is 1, of 1 processes; give 0 to 0"),
        (
            {"num_processes": 2, "tensor_parallel_size": 3, "coordinator_address": "a:1"},
            "give `--tensor-parallel-size` a multiple of 2",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**settings)


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "shape"),
    [(8, 4, (1, 4, 1)), (4, 4, (1, 4, 1)), (2, 4, (1, 2, 2)), (1, 4, (1, 1, 4)), (3, 2, (1, 1, 2))],
)
def test_key_value_heads_are_cut_or_shared(num_kv_heads: int, size: int, shape: tuple[int, ...]):
    config = ParallelConfig(tensor_parallel_size=size)
    placement = make_placement(config, num_kv_heads=num_kv_heads)
    assert placement.mesh is not None
    assert tuple(placement.mesh.shape.values()) == shape
    # Others would have every operation of a model name its sharding.
    assert set(placement.mesh.axis_types) == {AxisType.Auto}


# ---- two processes -------------------------------------------------------------------------------


def test_two_processes_answer_as_one():
    alone = engine(2, 4)
    expected = {"greedy": serve(alone), "drawn": serve(alone, temperature=1.0, seed=7)}
    expected["embeds"] = serve_embeds(alone)
    assert _serve_together() == expected | {"again": expected["greedy"], "compilations": 0}


@pytest.mark.slow
def test_two_processes_answer_as_one_with_adapters(tmp_path: Path):
    config = adapted_config(2, tensor_parallel_size=4)
    alone = start_tiny(config, params_with_heads(2))
    expected = serve_adapters(alone, tmp_path / "alone", 2)
    assert len(set(map(tuple, expected))) == len(expected)
    report = _serve_together(str(tmp_path / "together"))
    assert report == {"adapters": expected, "compilations": 0}


def _serve_together(*more: str) -> dict[str, Any]:
    """Return what process 0 reports."""
    port = _free_port()
    leader, follower = _start(0, port, *more), _start(1, port, *more)
    try:
        said, _ = leader.communicate(timeout=300)
        heard, _ = follower.communicate(timeout=60)
    finally:
        for process in (leader, follower):
            process.kill()
    assert (leader.returncode, follower.returncode) == (0, 0)
    assert heard.splitlines()[-1] == "let go"
    return json.loads(said.splitlines()[-1])


def _start(process_id: int, port: int, *more: str) -> "subprocess.Popen[str]":
    devices = 4 // NUM_PROCESSES
    flags = os.environ["XLA_FLAGS"].replace(FOUR_DEVICES, FOUR_DEVICES[:-1] + str(devices))
    environment = {**os.environ, "XLA_FLAGS": flags}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.engine.one_of_two", str(process_id), str(port), *more],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
