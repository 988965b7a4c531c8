"""Async scheduling does not change outputs."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor
from transformers.models.unlimited_ocr.generation_unlimited_ocr import (
    UnlimitedOcrSlidingWindowNoRepeatNgramLogitsProcessor,
)

from mmjax.engine.core import EngineCore
from mmjax.engine.device import compilation
from mmjax.engine.scheduling.outputs import SampledToken, SchedulerOutput
from mmjax.engine.scheduling.request import BlockHasher, Request
from mmjax.engine.scheduling.scheduler import Scheduler
from mmjax.params.sampling_params import SamplingParams
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.steps import BLOCK_SIZE, MAX_MODEL_LEN, make_scheduler
from tests.engine.tiny import (
    answer,
    dense_greedy,
    dense_logits,
    drain,
    message,
    text,
    tiny_engine,
    tokens_of,
)

FEW = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
"""Sizes of an engine with few programs."""


# ---- the scheduler, one step ahead of the tokens -------------------------------------------------


def make_request(name: str, token_ids: list[int], **sampling: Any) -> Request:
    sampling = {"max_tokens": 4, **sampling}
    return Request(
        request_id=name,
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(**sampling),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[1],
        block_hasher=BlockHasher(block_size=BLOCK_SIZE, none_hash=b"start"),
    )


class Ahead:
    """Schedules a step, then reads the one before: every token is 7, unless `choose` says else."""

    def __init__(self, scheduler: Scheduler, choose: Callable[[Request], int] | None = None):
        self.scheduler = scheduler
        self.choose = choose or (lambda request: 7)
        self.before = SchedulerOutput()
        self.sample: list[str] = []
        """Whose tokens lie in the rows of the last sample."""

    def step(self) -> dict[str, tuple[int, int, int]]:
        """Return the windows: (start, end, row of the token in flight)."""
        output = self.scheduler.schedule()
        for scheduled in output.requests:
            if scheduled.token_from >= 0:
                assert self.sample[scheduled.token_from] == scheduled.request.request_id
                assert scheduled.num_tokens == 1
        sampled = [scheduled.request for scheduled in output.requests if scheduled.samples]
        self.sample = [request.request_id for request in sampled] or self.sample
        self.read()
        self.before = output
        return {s.request.request_id: (s.start, s.end, s.token_from) for s in output.requests}

    def read(self) -> None:
        tokens = {
            scheduled.request.request_id: [SampledToken(self.choose(scheduled.request))]
            for scheduled in self.before.requests
            if scheduled.samples
        }
        self.scheduler.update_from_output(self.before, tokens)
        self.before = SchedulerOutput()


def test_a_step_takes_its_tokens_from_the_sample_before() -> None:
    ahead = Ahead(make_scheduler())
    ahead.scheduler.add_request(make_request("a", [5] * 3))
    assert ahead.step() == {"a": (0, 3, -1)}
    ahead.scheduler.add_request(make_request("b", [5] * 20))
    assert ahead.step() == {"a": (3, 4, 0), "b": (0, 15, -1)}
    assert ahead.step() == {"a": (4, 5, 0), "b": (15, 20, -1)}
    assert ahead.step() == {"a": (5, 6, 0), "b": (20, 21, 1)}
    # The fourth token of `a` is in flight, and known to be its last.
    assert ahead.step() == {"b": (21, 22, 1)}
    assert ahead.step() == {"b": (22, 23, 0)}
    assert ahead.step() == {}
    assert not ahead.scheduler.has_unfinished()
    assert ahead.scheduler.kv_cache.usage == 0


def test_the_token_after_an_end_is_wasted_and_nothing_else() -> None:
    ahead = Ahead(make_scheduler(), lambda request: 1)
    request = make_request("a", [5] * 3)
    ahead.scheduler.add_request(request)
    ahead.step()
    assert ahead.step() == {"a": (3, 4, 0)}
    assert not ahead.scheduler.has_unfinished()
    assert request.output_token_ids == [1]
    ahead.scheduler.add_request(make_request("a", [6] * 3))
    assert ahead.step() == {"a": (0, 3, -1)}, "another request of the same name"
    ahead.step()
    assert not ahead.scheduler.has_unfinished()
    ahead.read()
    assert ahead.scheduler.kv_cache.usage == 0


def test_an_aborted_request_s_token_is_dropped() -> None:
    ahead = Ahead(make_scheduler())
    first = make_request("a", [5] * 3)
    ahead.scheduler.add_request(first)
    ahead.step()
    ahead.scheduler.abort(["a"])
    second = make_request("a", [6] * 9)
    ahead.scheduler.add_request(second)
    assert ahead.step() == {"a": (0, 9, -1)}
    assert (first.num_output_tokens, second.num_output_tokens) == (0, 0)
    ahead.step()
    assert second.num_output_tokens == 1


def test_a_preempted_request_gets_the_token_that_was_in_flight() -> None:
    ahead = Ahead(make_scheduler(num_blocks=4))
    for name in "ab":
        ahead.scheduler.add_request(make_request(name, [5] * 7, max_tokens=6))
    assert ahead.step() == {"a": (0, 7, -1), "b": (0, 7, -1)}
    assert ahead.step() == {"a": (7, 8, 0), "b": (7, 8, 1)}
    assert ahead.step() == {"a": (8, 9, 0)}
    (b,) = ahead.scheduler.waiting
    assert b.num_output_tokens == 2
    assert b.num_in_flight == 0
    while "b" not in (now := ahead.step()):
        pass
    assert now["b"][1:] == (9, -1)
    while ahead.scheduler.has_unfinished():
        ahead.step()
    assert ahead.scheduler.kv_cache.usage == 0


def test_a_preempted_request_may_end_by_the_token_in_flight() -> None:
    ahead = Ahead(make_scheduler(num_blocks=4), lambda request: 1 if request.num_tokens > 7 else 7)
    for name in "ab":
        ahead.scheduler.add_request(
            make_request(name, [5] * 7, max_tokens=6, ignore_eos=name < "b")
        )
    for _ in range(3):
        ahead.step()
    assert [request.request_id for request in ahead.scheduler.running] == ["a"]
    assert not ahead.scheduler.waiting
    while ahead.scheduler.has_unfinished():
        ahead.step()
    assert ahead.scheduler.kv_cache.usage == 0


def test_a_block_gets_its_name_when_its_last_token_is_known() -> None:
    ahead = Ahead(make_scheduler())
    first = make_request("a", [5] * 6, max_tokens=7)
    ahead.scheduler.add_request(first)
    while ahead.scheduler.has_unfinished():
        ahead.step()
        named = len(ahead.scheduler.kv_cache._pool._by_hash)
        assert named <= first.num_tokens // 4, "a block is named before its tokens are known"
    # 12 of the 13 tokens were computed; the last of them was in flight then.
    ahead.scheduler.add_request(make_request("b", [5] * 6 + [7] * 7 + [8]))
    assert ahead.step() == {"b": (12, 14, -1)}


# ---- the engine ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    engine = tiny_engine(precompile="all")
    yield engine
    assert engine.compilations == 0
    assert engine.num_programs == engine._runner.buckets.num_programs


def test_an_idle_engine_runs_each_program_once_on_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request waits for a first run's preparations; what is cached stays as it is."""
    engine = tiny_engine(**FEW, precompile="all")
    request = message("a", [text(77, 50)], max_tokens=3)
    expected = answer(engine, request)
    monkeypatch.setattr(compilation, "_MAX_FIRST_RUN_S", 60.0)
    num_left = [len(engine._programs._uncalled)]
    engine.step()
    assert len(engine._programs._uncalled) == num_left[0], "another request may come at once"
    assert engine.is_warming
    monkeypatch.setattr(compilation, "_PAUSE_S", 0.0)
    engine.step()
    num_left = [len(engine._programs._uncalled)]
    while engine.is_warming:
        engine.step()
        num_left.append(len(engine._programs._uncalled))
    # The last turn finds nothing to run.
    assert num_left[:-1] == list(range(num_left[0], num_left[-1] - 1, -1))
    assert {key.function for key in engine._programs._uncalled} == {"encode"}
    assert engine.compilations == 0
    engine.add_request(msgspec.structs.replace(request, request_id="again"))
    news = drain(engine)["again"]
    assert tokens_of(news) == expected == dense_greedy(request)
    assert news[0].num_cached_tokens == 48


@pytest.mark.usefixtures("all_sizes")
def test_of_slow_programs_one_is_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(max_num_batched_tokens=16, precompile="all")
    monkeypatch.setattr(compilation, "_MAX_FIRST_RUN_S", 0.0)
    monkeypatch.setattr(compilation, "_PAUSE_S", 0.0)
    before = set(engine._programs._uncalled)
    engine.step()
    while engine.is_warming:
        engine.step()
    called = before - engine._programs._uncalled
    assert sorted(key.function for key in called) == ["sample", "step"]
    assert len(before) > len(called) + 3


def test_a_step_is_given_before_the_last_is_read(core: EngineCore) -> None:
    """Counts, in place of times: what the host still waits for when it gives the next step."""
    core.step()  # reads what an aborted request of another test may have left in flight
    assert core._in_flight is None
    core.reset_prefix_cache()
    model_runner, calls = core._runner, []
    dispatch, read = model_runner.dispatch, model_runner.read
    model_runner.dispatch = lambda output: (calls.append("dispatch"), dispatch(output))[1]
    model_runner.read = lambda in_flight: (calls.append("read"), read(in_flight))[1]
    try:
        core.add_request(message("a", [text(77, 100)], max_tokens=3))
        assert core.step() == []
        drain(core)
    finally:
        model_runner.dispatch, model_runner.read = dispatch, read
    # Two chunks of the prompt, two tokens, and at the end a call that finds nothing to give.
    assert calls == ["dispatch"] * 2 + ["read", "dispatch"] * 3 + ["read"]


def test_a_step_is_one_transfer(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[str, Any]] = []
    placement = core._runner._placement
    for name in ("give", "put"):
        move = getattr(placement, name)
        seen = lambda array, *rest, name=name, move=move: (  # noqa: E731
            moved.append((name, array)),
            move(array, *rest),
        )[1]
        monkeypatch.setattr(placement, name, seen)
    core.add_request(message("a", [text(1, 20)], max_tokens=6, temperature=1.0, seed=0))
    drain(core)
    assert [name for name, _ in moved] == ["give"] * 6
    assert all(isinstance(array, np.ndarray) for _, array in moved)


CASES: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.5, "seed": 3, "top_p": 0.8, "min_tokens": 4},
    {"min_tokens": 3},
    {"logprobs": 5},
    {"temperature": 0.8, "seed": 5, "logprobs": 2, "min_tokens": 2},
    {"temperature": 0.8, "seed": 6, "no_repeat_ngram_size": 1},
    {},
]


def cases(name: str) -> list[EngineCoreRequest]:
    """Requests that may end at some of the tokens that they like to give."""
    return [
        message(f"{name} {n}", [text(n, 12 + 9 * n), (n, 1), text(n, 3)], eos=range(20, 45), **case)
        for n, case in enumerate(CASES)
    ]


def test_all_settings_give_what_they_give_without_overlap(core: EngineCore) -> None:
    in_order = tiny_engine(async_scheduling=False)
    expected = []
    for request in cases("alone"):
        in_order.add_request(request)
        expected.append(drain(in_order)[request.request_id])
    assert {len(news) for news in expected} > {8}, "none ends early"
    for request in reversed(cases("together")):
        core.add_request(request)
    news = drain(core)
    for request, wanted in zip(cases("together"), expected, strict=True):
        got = news[request.request_id]
        assert tokens_of(got) == tokens_of(wanted)
        assert [delta.finish_reason for delta in got] == [delta.finish_reason for delta in wanted]
        mine = [entry for delta in got for entry in delta.new_logprobs or ()]
        others = [entry for delta in wanted for entry in delta.new_logprobs or ()]
        for one, two in zip(mine, others, strict=True):
            assert one.token_ids == two.token_ids
            np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_abort_in_flight_leaves_the_name_free(core: EngineCore, num_steps: int) -> None:
    first, second = [text(1, 70)], [text(2, 30), (1, 1)]
    core.add_request(message("a", first))
    for _ in range(num_steps):
        core.step()
    core.abort(["a"])
    assert not core.has_unfinished()
    assert answer(core, message("a", second)) == dense_greedy(message("oracle", second))
    assert core.step() == []
    assert core.stats().kv_cache_usage == 0


def test_what_fails_on_the_device_is_found_at_the_read(core: EngineCore) -> None:
    runner = core._runner
    read = runner.read

    def fail(in_flight: object) -> Any:
        raise RuntimeError("the device is out of order")

    core.add_request(message("a", [text(1, 9)]))
    core.step()
    runner.read = fail
    try:
        with pytest.raises(RuntimeError, match="out of order"):
            core.step()
        assert core.recover() == ["a"]
    finally:
        runner.read = read
    request = message("a", [text(3, 11)])
    assert answer(core, request) == dense_greedy(request)


def test_closing_in_flight_is_quiet() -> None:
    engine = tiny_engine()
    engine.add_request(message("a", [text(1, 9)]))
    engine.step()
    engine.close()
    engine.close()


@pytest.mark.parametrize(("size", "window"), [(1, 0), (2, 0), (3, 0), (1, 4), (2, 7), (3, 2)])
def test_what_may_not_be_repeated_depends_on_the_token_in_flight(
    core: EngineCore, size: int, window: int
) -> None:
    """The oracle: HF's processor on the logits of dense passes. Others of the batch are plain."""
    rule: dict[str, Any] = {
        "no_repeat_ngram_size": size,
        "no_repeat_ngram_window_size": window,
    }
    banned = message("banned", [text(5, 30)], max_tokens=24, **rule)
    plain = [message(f"{n}", [text(n, 9)], max_tokens=12) for n in (2, 3)]
    for request in (plain[0], banned, plain[1]):
        core.add_request(request)
    news = drain(core)
    process: Any = NoRepeatNGramLogitsProcessor(size)
    if window:
        process = UnlimitedOcrSlidingWindowNoRepeatNgramLogitsProcessor(size, window)
    token_ids = list(banned.prompt_token_ids)
    for _ in range(24):
        logits = dense_logits(token_ids, ())[len(token_ids) - 1]
        scores = process(torch.tensor(token_ids)[None], torch.tensor(logits)[None])
        token_ids.append(int(scores[0].argmax()))
    assert tokens_of(news["banned"]) == token_ids[30:]
    free = dense_greedy(message("free", [text(5, 30)], max_tokens=24))
    assert (tokens_of(news["banned"]) == free) == (window == 2)  # too short for three tokens
    for request in plain:
        assert tokens_of(news[request.request_id]) == dense_greedy(request)
