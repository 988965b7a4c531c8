"""Adapters under random events: loads, unloads, swaps, requests of any of them and of none, aborts.

There are more adapters than slots and than host copies, names are given to other files again, and
some adapt the tower. Yet every answer is the lone one of the files that the request's name stood
for, whatever runs beside it; afterwards nothing is in use.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    rule,
    run_state_machine_as_test,
)

from mmjax.config.engine_config import LoRAConfig
from mmjax.engine.core import EngineCore
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.adapters import make_tensors, text_layers, tower_layers, write_adapter
from tests.engine.tiny import (
    TOKENS_PER_IMAGE,
    answer,
    check_idle,
    engine_config,
    message,
    start_tiny,
    tiny_engine,
)

NAMES = ("a", "b", "c")
NUM_FILES = 5
"""Adapters that can be read; one more cannot."""
BAD = NUM_FILES
PROMPTS: list[Any] = [
    [[5, 6, 7, 8, 9, 10, 11, 12, 13], (0, 1), [20, 21]],
    [[5, 6, 7, 8, 9, 10, 11, 12, 14, 15, 16, 17, 18, 19]],
    [(0, 1), [30, 31, 32], (1, 1)],
]
MAX_TOKENS = 6


def make_engine(*, max_loras: int, max_num_seqs: int) -> EngineCore:
    """Start an engine whose steps and blocks are few."""
    config = engine_config(
        max_model_len=48,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        num_blocks=8,
        max_num_encoder_input_tokens=2 * TOKENS_PER_IMAGE,
    )
    lora = LoRAConfig(
        enable_lora=True,
        max_loras=max_loras,
        max_cpu_loras=max_loras,
        max_lora_rank=4,
        enable_tower_connector_lora=True,
    )
    return start_tiny(replace(config, lora=lora))


def make_request(request_id: str, prompt: int, name: str | None) -> EngineCoreRequest:
    """Return a request as P0 sends it: a picture is another one for each adapter."""
    request = message(request_id, PROMPTS[prompt], max_tokens=MAX_TOKENS)
    features = request.mm_features
    if name is not None:
        features = [replace(one, identifier=f"{name}:{one.mm_hash}") for one in features]
    return msgspec.structs.replace(request, lora_name=name, mm_features=features)


@dataclass
class Stage:
    """What all runs share: the files, what each answers alone, and one engine."""

    paths: list[Path]
    core: EngineCore
    alone: EngineCore
    """Serves one request at a time."""
    plain: EngineCore
    """Has no adapters."""
    answers: dict[tuple[int | None, int], list[int]] = field(default_factory=dict)
    num_requests: int = 0

    def lone_answer(self, file: int | None, prompt: int) -> list[int]:
        """Return what a file answers alone; without any, what an engine without adapters does."""
        if (file, prompt) not in self.answers:
            name = None if file is None else f"file {file}"
            request = make_request(f"{name} {prompt}", prompt, name)
            core = self.plain if file is None else self.alone
            self.answers[file, prompt] = answer(core, request)
        return self.answers[file, prompt]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Write the files; start the engines."""
    root = tmp_path_factory.mktemp("adapters")
    paths = []
    for number in range(NUM_FILES):
        layers = text_layers() | (tower_layers() if number % 2 else {})
        tensors = make_tensors(number + 1, rank=number % 4 + 1, layers=layers)
        path = root / f"{number}"
        paths.append(write_adapter(path, rank=number % 4 + 1, tensors=tensors))
    bad = make_tensors(0)
    bad[next(iter(bad))][:] = float("nan")
    paths.append(write_adapter(root / "bad", tensors=bad))
    stage = Stage(
        paths,
        make_engine(max_loras=2, max_num_seqs=3),
        make_engine(max_loras=NUM_FILES, max_num_seqs=1),
        tiny_engine(max_model_len=48, max_num_seqs=1, max_num_batched_tokens=16),
    )
    for number in range(NUM_FILES):
        stage.alone.load_adapter(f"file {number}", paths[number])
    stage.alone.wait_loaded()
    yield stage
    stage.core.close()
    stage.alone.close()
    stage.plain.close()


@dataclass
class Asked:
    """A request, and the file that its name stood for."""

    file: int | None
    prompt: int
    tokens: list[int] = field(default_factory=list)


class AdapterMachine(RuleBasedStateMachine):
    """One engine and what it should hold."""

    stage: Stage

    def __init__(self) -> None:
        super().__init__()
        self.core = self.stage.core
        self.files: dict[str, int] = {}
        """What each loaded name stands for."""
        self.open: dict[str, Asked] = {}

    # What is drawn must not depend on how soon files are read, or requests answered: hence rules
    # that may find nothing to do.

    @rule(name=st.sampled_from(NAMES), file=st.integers(0, BAD))
    def load(self, name: str, file: int) -> None:
        self.unload(name)
        self.core.load_adapter(name, self.stage.paths[file])
        self.files[name] = file

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        if name in self.files:
            self.core.unload_adapter(name)
            del self.files[name]

    @rule(name=st.sampled_from([None, *NAMES]), prompt=st.integers(0, len(PROMPTS) - 1))
    def ask(self, name: str | None, prompt: int) -> None:
        name = name if name in self.files else None
        self.stage.num_requests += 1
        request_id = f"{self.stage.num_requests}"
        self.open[request_id] = Asked(None if name is None else self.files[name], prompt)
        self.core.add_request(make_request(request_id, prompt, name))

    @rule(number=st.integers(0, 5))
    def abort(self, number: int) -> None:
        if number < len(self.open):
            request_id = list(self.open)[number]
            self.core.abort([request_id])
            del self.open[request_id]

    @rule(count=st.integers(1, 4))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        self.core.pop_loaded()
        for name in self.files.keys() - self.core._adapters._registered.keys():
            assert self.files.pop(name) == BAD
        for request_id, _ in self.core.pop_failed():
            assert self.open.pop(request_id).file == BAD
        for delta in self.core.step():
            asked = self.open.get(delta.request_id)
            if asked is None:
                continue  # aborted
            asked.tokens += delta.new_token_ids
            if delta.finish_reason is not None:
                del self.open[delta.request_id]
                assert asked.tokens == self.stage.lone_answer(asked.file, asked.prompt)

    def teardown(self) -> None:
        while self.core.has_unfinished() or self.core.is_loading:
            self.step()
        self.step()
        assert self.open == {}
        for name in list(self.files):
            self.core.unload_adapter(name)
        scheduler, adapters = self.core._scheduler, self.core._adapters
        assert scheduler.adapter_slots.num_running == 0
        assert not scheduler.adapter_slots._slots, "of adapters that are gone"
        assert len(scheduler.adapter_slots._free) == 2
        assert not adapters._kept, "host copies of adapters that are gone"
        check_idle(self.core)


def check(stage: Stage, num_examples: int, num_steps: int) -> None:
    machine = type("Machine", (AdapterMachine,), {"stage": stage})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=num_examples, stateful_step_count=num_steps)
    )


def test_every_answer_is_its_own_adapters(stage: Stage) -> None:
    check(stage, num_examples=6, num_steps=30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_answer_is_its_own_adapters_in_1000_runs(stage: Stage) -> None:
    check(stage, num_examples=1000, num_steps=60)
