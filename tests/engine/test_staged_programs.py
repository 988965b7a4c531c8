"""An engine that serves while most of its programs are still compiled."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from mmjax.config.engine_config import ParallelConfig
from mmjax.engine.core import EngineCore
from mmjax.engine.device import compilation
from mmjax.engine.device.compilation import CompiledPrograms, Program
from mmjax.engine.scheduling.buckets import Buckets
from mmjax.errors import ConfigError
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from tests.engine.tiny import (
    answer,
    answer_all,
    dense_greedy,
    drain,
    engine_config,
    message,
    tiny_engine,
    tiny_params,
    tokens_of,
)

MAX_FREE_BYTES = 32 * 2**20
"""Left in malloc's heaps after a staged start: 187 MiB by the tiny engine if none were returned."""
MAX_PROGRAM_BYTES = 16 * 2**20
"""By which a program, and what came with requests, may grow the process; measured: 10 MiB."""

SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 128}


class Gate:
    """Lets the thread compile as many programs as it is told to."""

    def __init__(self, compile_programs: Callable[..., list[int]]) -> None:
        self._compile = compile_programs
        self._allowed = threading.Semaphore(0)
        self.fails = False

    def __call__(self, programs: Sequence[Program], **options: Any) -> list[int]:
        if threading.current_thread() is threading.main_thread():
            return self._compile(programs, **options)
        sizes = []
        for program in programs:
            assert self._allowed.acquire(timeout=60)
            if self.fails:
                raise MemoryError("no room for the program")
            sizes += self._compile([program], num_threads=1)
        return sizes

    def open(self, core: EngineCore, number: int) -> None:
        """Wait until `number` more programs are compiled."""
        goal = max(0, core.num_programs_left - number)
        self._allowed.release(number)
        while core.num_programs_left > goal:
            core._programs.wait(0.01)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(compilation.compile_programs)
    monkeypatch.setattr(compilation, "compile_programs", gate)
    return gate


@pytest.fixture
def early(gate: Gate) -> Iterator[EngineCore]:
    """An engine with its first programs alone."""
    config = engine_config(**SETTINGS, enable_prefix_caching=False, precompile="smallest")
    model_class, params = Gemma3ForConditionalGeneration, tiny_params()[1]
    core = EngineCore(config, model_class=model_class, params=params)
    yield core
    gate._allowed.release(1000)
    core.close()


def requests() -> list[Any]:
    """Long and short prompts, with pictures and without."""
    return [
        message("long", [[3 + n % 50 for n in range(100)]], max_tokens=6),
        message("short", [[2, 50, 60]], max_tokens=6),
        message("one", [[7]], max_tokens=6),
        message("pictures", [[2, 51], (0, 1), [41], (1, 3), [42]], max_tokens=6),
        message("last", [[2 + n % 30 for n in range(70)], (2, 2)], max_tokens=6),
    ]


def test_answers_are_the_same_at_every_stage(
    early: EngineCore, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while all that JAX traced is forgotten, as in a process that runs an engine alone."""
    monkeypatch.setattr(compilation, "_owns_process", True)
    whole = tiny_engine(**SETTINGS, enable_prefix_caching=False, precompile="all")
    expected = [answer(whole, request) for request in requests()]
    assert early.num_programs == whole.num_programs
    num_left = early.num_programs_left
    assert 0 < num_left < early.num_programs
    limits = []
    while True:
        early.step()
        limits.append(early._scheduler._limits[:2])
        assert answer_all(early, requests()) == expected
        assert early.stats().num_programs_left == early.num_programs_left
        if not early.num_programs_left:
            break
        gate.open(early, 3)
    assert early.compilations == 0, "no step compiles what the thread should have"
    assert limits[0] == (1, 64)
    assert limits == sorted(limits)
    assert limits[-1] == (4, 128)
    assert early._programs.ready == early._runner.buckets


def test_what_no_step_can_hold_yet_waits(early: EngineCore, gate: Gate) -> None:
    early._scheduler._enable_chunked_prefill = False
    early.add_request(message("long", [[3 + n % 50 for n in range(100)]], max_tokens=2))
    for _ in range(3):
        assert early.step() == []
    assert early.stats().num_waiting == 1
    gate.open(early, early.num_programs_left)
    assert len(tokens_of(drain(early)["long"])) == 2
    assert early.compilations == 0


def test_an_engine_whose_programs_never_come_ends(early: EngineCore, gate: Gate) -> None:
    gate.fails = True
    gate._allowed.release()
    early._scheduler._enable_chunked_prefill = False
    early.add_request(message("long", [[3 + n % 50 for n in range(100)]], max_tokens=2))
    early._programs._thread.join(timeout=60)
    with pytest.raises(RuntimeError, match="could not be compiled") as caught:
        drain(early)
    assert isinstance(caught.value.__cause__, MemoryError)


def test_nothing_is_compiled_after_the_end(early: EngineCore, gate: Gate) -> None:
    num_left = early.num_programs_left
    early.close(wait=False)
    assert early._programs._thread.is_alive()
    gate._allowed.release(num_left)
    early.close()
    assert not early._programs._thread.is_alive()
    assert early.num_programs_left == num_left
    early.close()


def test_where_all_are_compiled_first_there_is_no_thread() -> None:
    buckets = Buckets.create(max_num_seqs=1, max_num_batched_tokens=64)
    program = Program("one", jax.jit(lambda: 1), {})
    programs = CompiledPrograms(
        buckets, lambda keys: [program for _ in keys], buckets.keys, buckets.num_programs
    )
    programs.compile_first()
    programs.start_others()
    assert (programs.ready, programs.num_left) == (buckets, 0)
    assert programs._thread.ident is None
    programs.close()


def test_what_no_call_needs_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = []
    compile_programs = compilation.compile_programs

    def record(programs: Sequence[Program], **options: Any) -> list[int]:
        labels.extend(program.label for program in programs)
        return compile_programs(programs, **options)

    monkeypatch.setattr(compilation, "compile_programs", record)
    core = tiny_engine(**SETTINGS, precompile="none")
    assert labels == []
    request = message("a", [[2, 5, 60]])
    assert answer(core, request) == dense_greedy(request)
    assert sorted(labels) == ["sample 4 greedy", "step 1 x 1", "step 16 x 4"]
    answer(core, message("b", [[9, 5]]))
    assert len(labels) == 3
    answer(core, message("c", [[2, 5], (0, 1), [7]], temperature=1.0, seed=1))
    assert sorted(labels[3:]) == ["encode 1", "sample 4"]
    assert core.compilations == 0


def test_processes_that_call_together_start_together() -> None:
    config = engine_config(precompile="smallest")
    parallel = ParallelConfig(
        tensor_parallel_size=2, num_processes=2, coordinator_address="127.0.0.1:1"
    )
    with pytest.raises(ConfigError, match="`precompile` is 'smallest' with 2 processes"):
        replace(config, parallel=parallel)


@pytest.mark.slow  # a start without a compile cache, in a process of its own
@pytest.mark.parametrize("kind", ["tiny", "default"])
def test_compilations_leave_no_memory_behind(kind: str, tmp_path: Path) -> None:
    """Over a whole start with an empty compile cache, with requests meanwhile."""
    command = [sys.executable, "-m", "tests.engine.staged_memory", kind, str(tmp_path)]
    # No cache of other runs.
    env = {name: text for name, text in os.environ.items() if "COMPILATION_CACHE" not in name}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert (found["left"], found["compilations"]) == (0, 0)
    assert found["num_requests"] > 1
    assert found["free"] < MAX_FREE_BYTES
    assert found["end"] - found["ready"] < found["num_later"] * MAX_PROGRAM_BYTES
