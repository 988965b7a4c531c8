"""KV blocks in host memory: what comes back equals what went, and answers are those without it."""

import random
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from mmjax.cache.kv.host_blocks import HostBlocks
from mmjax.config.engine_config import ParallelConfig
from mmjax.engine.core import EngineCore
from mmjax.engine.device import host_pool
from mmjax.errors import ConfigError
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.bench import choose_max_model_len, random_parts
from tests.engine.spread import params_with_heads, spread_config
from tests.engine.tiny import (
    answer_all,
    dense_greedy,
    drain,
    engine_config,
    message,
    start_tiny,
    text,
    tiny_engine,
    tokens_of,
)
from tests.families import ALL_FAMILIES, TINY_FAMILIES, served_model
from tests.families.default_run import mark
from tests.models.served import count_least_blocks, make_request, start_engine

NUM_BLOCKS = 20
"""Two prompts of `parts` do not fit beside each other."""
BLOCK_BYTES = 2 * 3 * 16 * 8 * 4
ROOMY_GB = 200 * BLOCK_BYTES / 2**30


SIZES: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "max_num_batched_tokens": 16}
"""Of all engines of the tiny model, so that they have the same few programs."""


def parts(seed: int) -> tuple[Any, ...]:
    return text(seed, 40), (seed, 2), text(seed + 100, 40)


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return tiny_engine(**SIZES, kv_offload_gb=ROOMY_GB)


def serve(core: EngineCore, name: str, seed: int) -> tuple[list[int], int]:
    """Serve a prompt; return its answer, and how many of its tokens were found."""
    core.add_request(message(name, parts(seed)))
    news = drain(core)[name]
    return tokens_of(news), news[0].num_cached_tokens


# ---- laws ----------------------------------------------------------------------------------------

FAMILIES = [
    pytest.param(name, marks=mark("host memory", name))
    for name, family in TINY_FAMILIES.items()
    if max(family.max_embeds.values()) <= 128 and not ALL_FAMILIES[name].updates_encoder_prompt
]
"""Requests of an encoder-decoder share no blocks."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_answer_is_that_without_host_memory(name: str) -> None:
    """Random requests with pictures, chunks, hits, preemptions and aborts, in too few blocks."""
    model, rng = served_model(name), random.Random(35)
    max_model_len = choose_max_model_len(model)
    sizes = {"max_model_len": max_model_len, "encoder_cache_size": 192}
    sizes |= {"max_num_encoder_input_tokens": 192, "max_num_seqs": 4}
    plain = start_engine(model, **sizes)
    engine = start_engine(
        model,
        **sizes,
        max_num_batched_tokens=max(16, model.family.longest_run),
        num_blocks=count_least_blocks(model, max_model_len) + 2,
        kv_offload_gb=0.01,
    )
    samples = [model.draw_sample(random_parts(rng, model.family)) for _ in range(12)]
    batch = []
    for number in range(100):
        max_tokens = rng.randint(1, 24)
        batch.append(make_request(f"{number}", rng.choice(samples), max_tokens=max_tokens))
    expected = {one.request_id: answer_all(plain, [one])[0] for one in batch}
    nums_slots = (3, 40, engine._scheduler.kv_cache.host.num_slots)  # type: ignore[union-attr]
    for num_slots in nums_slots:
        engine.reset_prefix_cache()
        engine._scheduler.kv_cache.host = HostBlocks(num_slots)
        check_random(engine, batch, expected, rng)
    found = engine.stats()
    print(f"{engine.num_preemptions} preemptions, {found}")
    assert engine.num_preemptions > 0
    assert engine.compilations == 0
    # Of a recurrent layer prompts of 64 tokens and more alone, of which few families have any.
    if not model.paged.cache_spec.states:
        num_asked = len(nums_slots) * sum(len(one.prompt_token_ids) for one in batch)
        # A tenth where a picture is one token, whose prompts have half as many.
        assert found.kv_offload_hits > min(1000, num_asked // 10)


def check_random(
    core: EngineCore,
    batch: list[EngineCoreRequest],
    expected: dict[str, list[int]],
    rng: random.Random,
) -> None:
    """Serve requests that arrive, and of which some leave, between steps."""
    to_come, got, aborted = list(batch), {}, set()
    while to_come or core.has_unfinished():
        while to_come and rng.random() < 0.4:
            core.add_request(to_come.pop())
        if core.has_unfinished() and rng.random() < 0.02:
            victim = rng.choice(core._scheduler.request_ids)
            core.abort([victim])
            aborted.add(victim)
        for delta in core.step():
            got.setdefault(delta.request_id, []).extend(delta.new_token_ids)
    for name, tokens in got.items():
        whole = expected[name]
        assert tokens == (whole[: len(tokens)] if name in aborted else whole)
    assert got.keys() | aborted == expected.keys()


@pytest.mark.slow
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_of_several_devices(num_kv_heads: int) -> None:
    """Each has its heads of a block, or shares them with another; half a minute to compile.

    In the default run is `test_parallel.py`'s of blocks alone.
    """
    config = spread_config(num_kv_heads, tensor_parallel_size=4)
    small = {"kv_cache_memory_bytes": 20 * BLOCK_BYTES, "kv_offload_gb": 0.01}
    config = replace(config, cache=replace(config.cache, **small))
    core = start_tiny(config, params_with_heads(num_kv_heads))
    cold = [serve(core, f"cold {seed}", seed)[0] for seed in range(4)]
    warm = [serve(core, f"warm {seed}", seed) for seed in range(4)]
    assert [found for found, _ in warm] == cold
    assert core.stats().kv_offload_hits > 0
    assert core.compilations == 0


# ---- one engine ----------------------------------------------------------------------------------


def test_what_was_evicted_comes_back_as_it_went(core: EngineCore) -> None:
    core.reset_prefix_cache()
    before = core.stats()
    cold = {seed: serve(core, f"cold {seed}", seed) for seed in range(5)}
    assert all(
        found == dense_greedy(message("o", parts(seed))) for seed, (found, _) in cold.items()
    )
    warm = {seed: serve(core, f"warm {seed}", seed) for seed in range(5)}
    assert all(warm[seed][0] == cold[seed][0] for seed in range(5))
    assert {found for _, found in warm.values()} == {88}
    after = core.stats()
    num_back = after.kv_offload_restored_bytes - before.kv_offload_restored_bytes
    assert num_back // BLOCK_BYTES * 8 == after.kv_offload_hits - before.kv_offload_hits > 0
    assert core.compilations == 0


@pytest.mark.parametrize("max_padding_bytes", [0, 5 * BLOCK_BYTES])
def test_the_blocks_have_the_same_bits(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, max_padding_bytes: int
) -> None:
    """Eleven blocks, in five calls and in one."""

    def read(request_id: str) -> list[np.ndarray]:
        core.add_request(message(request_id, parts(7), max_tokens=4))
        while not core._scheduler.running or not core._scheduler.running[0].num_output_tokens:
            core.step()
        table = core._scheduler.kv_cache.get_block_table(request_id)[:11]
        arrays = jax.tree.leaves(core._runner._state.kv_cache)
        blocks = [np.asarray(array)[table].copy() for array in arrays]
        drain(core)
        return blocks

    monkeypatch.setattr(host_pool, "_MAX_PADDING_BYTES", max_padding_bytes)
    core.reset_prefix_cache()
    went = read("went")
    for seed in (8, 9):
        serve(core, f"{seed}", seed)
    hits = core.stats().kv_offload_hits
    came = read("came")
    assert core.stats().kv_offload_hits == hits + 88
    for one, other in zip(went, came, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_failed_step_a_reset_and_new_weights_leave_nothing_to_be_found(core: EngineCore) -> None:
    def change() -> None:
        core.replace_weights(core.match_weights(core.params))

    for number, forget in enumerate((core.recover, core.reset_prefix_cache, change)):
        for seed in (20, 21, 22):
            serve(core, f"{number} {seed}", seed)
        hits = core.stats().kv_offload_hits
        forget()
        assert serve(core, f"{number} again", 20)[1] == 0
        assert core.stats().kv_offload_hits == hits


def test_sleep_leaves_what_host_memory_has(core: EngineCore) -> None:
    core.reset_prefix_cache()
    cold = serve(core, "before", 30)[0]
    for seed in (31, 32):
        serve(core, f"{seed}", seed)
    core.sleep()
    core.wake_up()
    assert serve(core, "after", 30) == (cold, 88)
    assert core.compilations == 0


def test_nothing_is_on_its_way_in_an_engine_that_sleeps(core: EngineCore) -> None:
    pool = core._runner.host_pool
    assert pool is not None
    cold = [serve(core, f"cold {seed}", seed)[0] for seed in (40, 41, 42)]
    core._runner.wait()
    pool._copies.append(
        host_pool._Copy(
            (0,),
            (b"",),
            pool._programs.gather_blocks(core._runner._state.kv_cache, np.zeros(1, np.int32)),
        )
    )
    core.sleep()
    assert not pool._copies
    assert not pool._restores
    core.wake_up()
    core.reset_prefix_cache()  # the copy above was of no block, into a slot that may have one
    assert serve(core, "warm", 40)[0] == cold[0]


def test_what_a_failed_step_was_to_copy_fails_nobody_behind_a_sleep(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = core._runner.host_pool
    assert pool is not None
    cold = serve(core, "cold", 50)[0]

    def fail(output: Any) -> Any:
        pool._copies.append(host_pool._Copy((0,), (b"",), [Poisoned()]))
        raise RuntimeError("the device fails")

    with monkeypatch.context() as patch:
        patch.setattr(core._runner, "dispatch", fail)
        core.add_request(message("goes on", parts(50)))
        with pytest.raises(RuntimeError, match="the device fails"):
            drain(core)
    core.sleep()
    core.wake_up()
    assert tokens_of(drain(core)["goes on"]) == cold


class Poisoned:
    """An array of a program that failed."""

    shape = (1,)

    def is_ready(self) -> bool:
        return True

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the device has failed")


def test_host_memory_is_bounded() -> None:
    core = tiny_engine(**SIZES, kv_offload_gb=7.5 * BLOCK_BYTES / 2**30)
    pool, host = core._runner.host_pool, core._scheduler.kv_cache.host
    assert pool is not None
    assert host is not None
    for seed in (*range(4), *range(4)):
        assert serve(core, f"{seed}", seed)[0] == dense_greedy(message("oracle", parts(seed)))
    assert host.num_slots == host.num_used == 7
    assert sum(array.nbytes for array in pool._arrays) == 7 * BLOCK_BYTES
    assert core.stats().memory_bytes["kv_offload"] == 7 * BLOCK_BYTES


def test_little_room_for_what_is_on_its_way() -> None:
    """A step then waits for what went before, and nothing is lost."""
    core = tiny_engine(**SIZES, kv_offload_gb=ROOMY_GB)
    pool = core._runner.host_pool
    assert pool is not None
    pool._max_staged = 1
    for seed in (*range(4), *range(4)):
        assert serve(core, f"{seed}", seed)[0] == dense_greedy(message("oracle", parts(seed)))
    assert core.stats().kv_offload_hits > 0


def test_memory_that_a_device_still_reads_is_not_written_again() -> None:
    core = tiny_engine(**SIZES, kv_offload_gb=ROOMY_GB)
    pool, cache = core._runner.host_pool, core._runner._state.kv_cache
    assert pool is not None
    for _ in range(4):  # more than are kept
        cache = pool._restore(cache, [(0, 0)])
    stages = [one.stage for one in pool._restores]
    addresses = [array.ctypes.data for stage in stages for array in stage]
    assert len(set(addresses)) == 4 * len(stages[0])
    assert not any(address % 64 for address in addresses)
    jax.block_until_ready(cache)
    cache = pool.move(cache, [], [(0, 0)])
    assert any(pool._restores[-1].stage is stage for stage in stages)


def test_what_has_not_arrived_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    core = tiny_engine(**SIZES, kv_offload_gb=ROOMY_GB)
    monkeypatch.setattr(core._runner.host_pool, "_take_arrived", lambda: None)
    for seed in (*range(4), *range(4)):
        assert serve(core, f"{seed}", seed)[0] == dense_greedy(message("oracle", parts(seed)))
    assert core.stats().kv_offload_hits > 0


# ---- refusals ------------------------------------------------------------------------------------


def test_refused_where_it_would_be_of_no_use() -> None:
    with pytest.raises(ConfigError, match=r"`enable_prefix_caching` is off.*`--kv-offload-gb`"):
        tiny_engine(kv_offload_gb=0.01, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r"but a KV block takes 3\.0 KiB; raise"):
        tiny_engine(kv_offload_gb=1e-6)
    with pytest.raises(ConfigError, match=r"asks for 100000\.00 GiB of host memory.*lower"):
        tiny_engine(kv_offload_gb=1e5)


def test_refused_over_several_processes() -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=2, num_processes=2, coordinator_address="localhost:1"
    )
    with pytest.raises(ConfigError, match="each of 2 processes has a part of every block"):
        replace(engine_config(kv_offload_gb=0.01), parallel=parallel)
