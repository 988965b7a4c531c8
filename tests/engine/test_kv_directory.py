"""KV blocks in a directory: a later engine finds them, and a file that is not right is a miss."""

import logging
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import pytest

from mmjax.engine.core import EngineCore
from mmjax.errors import ConfigError
from tests.engine.recurrent import recurrent_engine
from tests.engine.test_kv_offload import ROOMY_GB, SIZES, parts, serve
from tests.engine.tiny import (
    dense_greedy,
    drain,
    engine_config,
    message,
    start_tiny,
    tiny_engine,
    tiny_params,
)


def start(folder: Path, *, seed: int = 0, **settings: Any) -> EngineCore:
    """Start an engine on a directory; `seed`: of its weights."""
    config = engine_config(**SIZES, kv_offload_gb=ROOMY_GB, kv_offload_dir=folder, **settings)
    return start_tiny(config, tiny_params(seed)[1])


def fill(folder: Path, seeds: range) -> list[list[int]]:
    """Serve prompts in an engine of its own; return their answers."""
    core = start(folder)
    answers = [serve(core, f"{seed}", seed)[0] for seed in seeds]
    core.close()
    return answers


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.mmjax"))


def test_a_later_engine_finds_the_blocks_of_one_that_ended(tmp_path: Path) -> None:
    answers = fill(tmp_path / "kv", range(3))
    core = start(tmp_path / "kv")
    encoded = core.stats().encoder_cache_queries
    assert [serve(core, f"{seed}", seed) for seed in range(3)] == [(one, 88) for one in answers]
    assert core.stats().encoder_cache_queries == encoded
    stats = core.stats()
    assert (stats.kv_files_hits, stats.kv_offload_hits) == (3 * 11, 3 * 88)
    assert core.compilations == 0
    # Nothing that was read is written again.
    core.close()
    assert stats.kv_files_written_bytes <= 3 * 3 * 3072  # of the answers


def test_blocks_are_there_before_the_engine_ends(tmp_path: Path) -> None:
    """As when it is killed: an idle turn of its loop writes what the last step filled."""
    core = start(tmp_path)
    expected = serve(core, "a", 1)[0]
    for _ in range(2):
        core.step()
    pool = core._runner.host_pool
    assert pool is not None
    assert pool.store is not None
    pool.store.flush()
    other = start(tmp_path)
    assert serve(other, "a", 1) == (expected, 88)


def test_requests_at_once_each_find_theirs(tmp_path: Path) -> None:
    answers = fill(tmp_path, range(6))
    core = start(tmp_path)
    for seed in range(6):
        core.add_request(message(f"{seed}", parts(seed)))
    core.add_request(message("new", ([5, 6, 7],)))
    core.abort(["5"])
    news = drain(core)
    found = [[token for one in news[f"{n}"] for token in one.new_token_ids] for n in range(5)]
    assert found == answers[:5]
    assert core.stats().kv_files_hits >= 5 * 11
    assert core._scheduler.kv_cache._reader is not None
    assert not core._scheduler.kv_cache._reader._jobs


@pytest.mark.parametrize("harm", ["truncated", "damaged", "foreign"])
def test_a_file_that_is_not_right_is_a_miss(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    (expected,) = fill(tmp_path, range(1))
    files = files_of(tmp_path)
    for number, path in enumerate(files):
        content = bytearray(path.read_bytes())
        if harm == "truncated":
            content = content[: len(content) // 2]
        elif harm == "damaged":
            content[-1 - number] ^= 1
        else:
            content = bytearray(np.random.default_rng(number).bytes(len(content)))
        path.write_bytes(content)
    core = start(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert serve(core, "a", 0) == (expected, 0)
    assert "counts as a miss" in caplog.text


def test_of_other_weights_settings_or_adapters_nothing_is_found(tmp_path: Path) -> None:
    fill(tmp_path, range(1))
    for other in (start(tmp_path, seed=1), start(tmp_path, block_size=16)):
        assert serve(other, "a", 0)[1] == 0
        assert other.stats().kv_files_hits == 0


def test_new_weights_leave_the_directory(tmp_path: Path) -> None:
    fill(tmp_path, range(2))
    core = start(tmp_path)
    assert serve(core, "a", 0)[1] == 88
    core.replace_weights(core.match_weights(core.params))
    assert core.stats().kv_files_hits == 11, "a counter that begins again"
    num_files = len(files_of(tmp_path))
    assert serve(core, "b", 1)[1] == 0
    core.close()
    assert len(files_of(tmp_path)) == num_files


def test_new_weights_behind_a_failed_step_write_nothing_of_it(tmp_path: Path) -> None:
    """On the device a step fails after it was dispatched, and so does each program behind it."""
    core = start(tmp_path)
    serve(core, "a", 0)
    core.add_request(message("b", parts(1)))

    def fail(in_flight: Any) -> Any:
        core._save_blocks()
        pool = core._runner.host_pool
        assert pool is not None
        assert pool._copies
        for array in (core._runner._pool, *(one for copy in pool._copies for one in copy.arrays)):
            array.delete()
        raise RuntimeError("the device fails")

    # As models with learned rows write them.
    write = partial(jax.block_until_ready, core._runner._pool)
    with patch.object(core._runner, "read", fail), patch.object(core._runner, "write_extra", write):
        core.step()
        core.drain()
        core.replace_weights(core.match_weights(core.params))
    assert core.weights_version == 1
    with pytest.raises(RuntimeError, match="the device fails"):
        core.step()
    assert core.recover() == ["b"]
    assert serve(core, "c", 0)[1] == 0


def test_little_host_memory_is_enough_for_what_it_holds(tmp_path: Path) -> None:
    answers = fill(tmp_path, range(3))
    core = tiny_engine(**SIZES, kv_offload_dir=tmp_path, kv_offload_gb=5 * 3072 / 2**30)
    assert [serve(core, f"{seed}", seed) for seed in range(3)] == [(one, 40) for one in answers]
    assert answers[0] == dense_greedy(message("oracle", parts(0)))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`kv_offload_gb` is 0.*give `--kv-offload-gb`"):
        tiny_engine(kv_offload_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"recurrent layers.*leave `--kv-offload-dir` out"):
        recurrent_engine(kv_offload_gb=0.01, kv_offload_dir=tmp_path)
