"""P1's loop over real pipes: what goes in, what comes out, and what a fault does."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from transformers import AutoConfig

from mmjax.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mmjax.engine.core import EngineCore
from mmjax.engine.process import (
    HEARTBEAT_INTERVAL_S,
    EngineLoop,
    HeartbeatThread,
    _start,
    run_engine,
)
from mmjax.errors import ConfigError
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.tensors.fields import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalSharedField,
)
from mmjax.processing.tensors.inputs import MultiModalKwargsItem, PlaceholderRange
from mmjax.system.logger import get_logger
from mmjax.transport import channel
from mmjax.transport.channel import IpcDirectory, Receiver, Sender, step_record_path
from mmjax.transport.codec import Buffer, Message, encode
from mmjax.transport.messages import (
    MESSAGES_LOST_STATUS,
    AbortRequests,
    CacheMiss,
    EngineCoreRequest,
    Heartbeat,
    Ready,
    RequestFailed,
    Shutdown,
    StepOutput,
)
from mmjax.transport.step_record import StepRecord, create_step_record, read_step_record
from tests.engine.tiny import answer, dense_greedy, engine_config, message, tiny_engine


@pytest.fixture(autouse=True)
def _keep_priority() -> Iterator[None]:
    """Let no engine lower the priority of all tests that come later in this process."""
    with patch("mmjax.engine.process.give_way"):
        yield


class Frontend:
    """P0's two ends of the pipes, and the thread that plays P1."""

    def __init__(self, directory: IpcDirectory) -> None:
        self.addresses = directory.address("in"), directory.address("out")
        self.sender = Sender(self.addresses[0], bind=True)
        self.receiver = Receiver(self.addresses[1], bind=True)
        self.thread: threading.Thread | None = None

    def serve(self, core: EngineCore) -> None:
        """Run the engine's loop, without its start."""
        receiver, sender = Receiver(self.addresses[0]), Sender(self.addresses[1])

        def loop() -> None:
            try:
                record = StepRecord(step_record_path(self.addresses[0]))
                loop = EngineLoop(core, receiver, sender, record)
                with HeartbeatThread(loop, self.addresses[1]):
                    loop.run()
            finally:
                receiver.close()
                sender.close()

        self.start(loop)

    def start(self, target: Callable[..., Any], *args: Any) -> None:
        self.thread = threading.Thread(target=target, args=args, daemon=True)
        self.thread.start()

    def receive(self, *kinds: type, timeout_s: float = 60.0) -> Any:
        """Return the next message of these kinds; skip others, for `timeout_s` in all."""
        deadline = time.monotonic() + timeout_s
        while True:
            # An engine that beats is never silent.
            found = self.receiver.receive(max(0.0, deadline - time.monotonic()))
            assert found is not None, f"no {kinds} in {timeout_s} s"
            if isinstance(found, kinds):
                return found

    def answer_of(self, request_id: str) -> list[int]:
        tokens: list[int] = []
        while True:
            for delta in self.receive(StepOutput).deltas:
                if delta.request_id == request_id:
                    tokens += delta.new_token_ids
                    if delta.finish_reason is not None:
                        return tokens

    def close(self) -> None:
        if self.thread is not None and self.thread.is_alive():
            # Without a reader a send would wait for ever.
            self.sender.send(Shutdown())
            self.thread.join(timeout=30)
            assert not self.thread.is_alive()
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    with IpcDirectory() as directory:
        frontend = Frontend(directory)
        yield frontend
        frontend.close()


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return tiny_engine(max_num_seqs=2, max_num_encoder_input_tokens=4)


@pytest.fixture
def serving(frontend: Frontend, core: EngineCore) -> Frontend:
    frontend.serve(core)
    return frontend


def test_requests_are_answered(serving: Frontend) -> None:
    request = message("a", ([2, 5], (1, 1), [7]))
    serving.sender.send(request)
    assert serving.answer_of("a") == dense_greedy(request)


def test_an_idle_loop_beats(serving: Frontend) -> None:
    for _ in range(2):
        beat = serving.receive(Heartbeat, timeout_s=5.0)
        assert (beat.num_running, beat.num_waiting, beat.num_compilations) == (0, 0, 0)


def test_the_heart_beats_during_a_long_step(
    frontend: Frontend, core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def step() -> list[Any]:
        is_over.wait(30)
        return []

    monkeypatch.setattr(core, "step", step)
    frontend.serve(core)
    frontend.sender.send(message("a", ([2],)))
    beats = [frontend.receive(Heartbeat) for _ in range(6)]
    # The step's age grows from beat to beat, and its idleness: no CPU is used meanwhile.
    assert beats[-1].loop.idle_s >= HEARTBEAT_INTERVAL_S
    ages = [beat.loop.turn_s for beat in beats[1:]]
    assert ages == sorted(ages)
    assert ages[-1] >= 3 * HEARTBEAT_INTERVAL_S
    assert len({beat.loop.num_turns for beat in beats[1:]}) == 1
    frontend.sender.send(AbortRequests(request_ids=["a"]))
    is_over.set()


def test_a_bad_request_fails_alone(serving: Frontend) -> None:
    good = message("good", ([2, 5], (1, 1), [7]))
    serving.sender.send(good)
    serving.sender.send(message("bad", ([2] * 200,)))
    failure = serving.receive(RequestFailed)
    assert (failure.request_id, failure.status, failure.param) == ("bad", 400, "prompt")
    assert "200 tokens" in failure.message
    serving.sender.send(good := message("again", ([2, 5], (1, 1), [7])))
    assert serving.answer_of("again") == dense_greedy(good)


def test_a_request_that_cannot_be_decoded_fails_alone(
    serving: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = message("good", ([2, 5], (1, 1), [7]))
    bad = message("bad", ([2],))
    header = bytes(encode(bad)[0]).replace(b"prompt_token_ids", b"prompt_token_idx")

    def encode_wrongly(sent: Message) -> list[Buffer]:
        # The engine's thread sends through the same module meanwhile.
        return [header] if sent is bad else encode(sent)

    monkeypatch.setattr(channel, "encode", encode_wrongly)
    serving.sender.send(bad)
    serving.sender.send(good)
    failure = serving.receive(RequestFailed)
    assert (failure.request_id, failure.status) == ("bad", 500)
    assert serving.answer_of("good") == dense_greedy(good)


def test_a_miss_is_said_and_the_request_may_come_again(serving: Frontend) -> None:
    request = message("a", ([2, 5], (7, 1), [7], (8, 1)))
    tensors = [feature.data for feature in request.mm_features]
    for feature in request.mm_features:
        feature.data = None
    serving.sender.send(request)
    miss = serving.receive(CacheMiss, RequestFailed, StepOutput)
    assert miss == CacheMiss(request_id="a", mm_hashes=["picture-7-1", "picture-8-1"])
    for feature, data in zip(request.mm_features, tensors, strict=True):
        feature.data = data
    serving.sender.send(request)
    assert serving.answer_of("a") == dense_greedy(request)


def test_any_request_that_can_be_read_is_answered(serving: Frontend) -> None:
    rng = random.Random(5)
    for number in range(300):
        serving.sender.send(contradictory(f"r{number}", rng))
        news = serving.receive(CacheMiss, RequestFailed, StepOutput)
        if isinstance(news, StepOutput):
            serving.sender.send(AbortRequests(request_ids=[f"r{number}"]))
        else:
            assert news.request_id == f"r{number}"
            assert not isinstance(news, RequestFailed) or news.message
    request = message("good", ([2, 5], (1, 1), [7]))
    serving.sender.send(request)
    assert serving.answer_of("good") == dense_greedy(request)


def contradictory(request_id: str, rng: random.Random) -> EngineCoreRequest:
    """Build a request of the right types in which nothing need fit together."""
    good = message(request_id, ([2, 5], (rng.randrange(3), 1), [7], (rng.randrange(3), 2)))
    arrays = [
        np.zeros((1, 3, 7, 7), np.float32),
        np.zeros((), np.int64),
        np.full((2, 3, 14, 14), np.nan, np.float16),
        np.zeros((1, 3, 14, 14), np.bool_),
        [np.zeros(2), np.zeros((0, 3))],
        None,
    ]
    fields = [
        MultiModalBatchedField(),
        MultiModalSharedField(batch_size=rng.choice((0, -1, 2**40))),
        MultiModalFlatField(slices=[], dim=9),
    ]
    for feature in good.mm_features:
        length = rng.choice((0, 1, 6, 12, 10**12))
        mask = np.array([rng.random() < 0.5 for _ in range(length)]) if 0 < length < 99 else None
        elem = MultiModalFieldElem(data=rng.choice(arrays), field=rng.choice(fields))
        key = rng.choice(("pixel_values", "other"))
        for change in rng.sample(range(5), rng.randrange(4)):
            match change:
                case 0:
                    feature.data = rng.choice((None, MultiModalKwargsItem({key: elem})))
                case 1:
                    feature.mm_position = PlaceholderRange(
                        rng.choice((0, 3, 9, 10**12)), length, mask
                    )
                case 2:
                    feature.mm_hash = rng.choice((None, "", "picture-1-1", "unknown"))
                case 3:
                    feature.identifier = rng.choice(("", "picture-1-1", "x" * 1000))
                case 4:
                    feature.modality = "smell"
    changes: dict[str, Any] = {
        "prompt_token_ids": rng.choice(([], [2], [2**40] * 5, [-1] * 9, [2] * 20)),
        "eos_token_ids": [2**60],
        "mm_features": rng.choice((good.mm_features[::-1], good.mm_features * 3)),
        "cache_salt": "\0",
        "lora_name": "",
        "encoder_prompt_token_ids": [],
        "priority": -(2**60),
        "deadline": rng.choice((float("nan"), float("inf"), 1e300)),
    }
    kept = {name: value for name, value in changes.items() if rng.random() < 0.2}
    return msgspec.structs.replace(good, **kept)


def test_settings_that_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="`max_num_batched_tokens` is 4"):
        _start(engine_config(max_num_seqs=8, max_num_batched_tokens=4))
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 128"):
        _start(engine_config(enable_chunked_prefill=False))


def test_the_log_level_reaches_the_process(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(config: EngineConfig) -> EngineCore:
        get_logger("mmjax.engine").debug("a word for those who asked")
        raise SystemExit(1)

    logger = get_logger("mmjax")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    monkeypatch.setattr("mmjax.engine.process._start", start)
    for level in ("warning", "debug"):
        with pytest.raises(SystemExit):
            run_engine(replace(engine_config(), log_level=level), *frontend.addresses)
        assert logger.level == getattr(logging, level.upper())


def test_figures_that_cannot_be_had_do_not_stop_the_heart(
    frontend: Frontend, core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = core.stats

    def fail_once() -> Heartbeat:
        monkeypatch.setattr(core, "stats", stats)
        raise RuntimeError("no figures")

    monkeypatch.setattr(core, "stats", fail_once)
    frontend.serve(core)
    # The first without figures, the next with them.
    assert [frontend.receive(Heartbeat).num_running for _ in range(2)] == [0, 0]


def test_a_look_at_threads_that_fails_does_not_stop_the_heart(
    frontend: Frontend, core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no such thread")

    monkeypatch.setattr(HeartbeatThread, "_see_loop", fail)
    frontend.serve(core)
    turns = [frontend.receive(Heartbeat, timeout_s=5.0).loop.num_turns for _ in range(4)]
    assert turns[-1] > turns[0], "P0 still learns that the loop goes on"


def test_what_a_step_computes_is_noted_before_it(
    frontend: Frontend, core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P0 finds it there after P1's death; nothing once all have ended."""
    path = step_record_path(frontend.addresses[0])
    create_step_record(path)
    dispatch, seen = core._runner.dispatch, []

    def look_and_dispatch(output: Any) -> Any:
        seen.append((read_step_record(path), [one.request.request_id for one in output.requests]))
        return dispatch(output)

    monkeypatch.setattr(core._runner, "dispatch", look_and_dispatch)
    frontend.serve(core)
    for name in ("a", "b"):
        frontend.sender.send(message(name, ([2, 5], (1, 1), [7])))
    frontend.answer_of("b")
    assert all(set(ids) <= set(noted) for noted, ids in seen)
    assert {name for noted, _ in seen for name in noted} == {"a", "b"}
    while read_step_record(path):
        frontend.receive(Heartbeat)


def test_lost_messages_end_the_process(
    frontend: Frontend, core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmjax.engine.process._start", lambda config: core)
    monkeypatch.setattr(core, "close", lambda *, wait: None)
    logger = get_logger("mmjax")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    statuses: list[Any] = []

    def serve() -> None:
        try:
            run_engine(engine_config(), *frontend.addresses)
        except SystemExit as ended:
            statuses.append(ended.code)

    frontend.start(serve)
    frontend.receive(Ready)
    frontend.sender.num_sent += 1
    frontend.sender.send(AbortRequests(request_ids=[]))
    assert frontend.thread is not None
    frontend.thread.join()
    assert statuses == [MESSAGES_LOST_STATUS]


def test_an_aborted_request_says_nothing_more(serving: Frontend) -> None:
    serving.sender.send(message("long", ([2, 5],), max_tokens=100))
    serving.receive(StepOutput)
    serving.sender.send(AbortRequests(request_ids=["long", "unknown"]))
    request = message("next", ([4],), max_tokens=3)
    serving.sender.send(request)
    assert serving.answer_of("next") == dense_greedy(request)


def test_a_failed_step_loses_its_requests_and_not_the_engine(
    frontend: Frontend, core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[Any]:
        monkeypatch.undo()
        raise RuntimeError("the device caught fire")

    assert core.step() == []  # no step of the test before is open, as one in flight at its end
    monkeypatch.setattr(core, "step", lambda: fail() if core.has_unfinished() else [])
    frontend.serve(core)
    frontend.sender.send(message("lost", ([2, 5],)))
    failure = frontend.receive(RequestFailed)
    assert (failure.request_id, failure.status) == ("lost", 500)
    assert "fire" not in failure.message
    request = message("kept", ([2, 5], (1, 1)))
    frontend.sender.send(request)
    assert frontend.answer_of("kept") == dense_greedy(request)


@pytest.mark.usefixtures("all_sizes")
def test_run_engine_serves_a_checkpoint(frontend: Frontend, tiny_gemma3: Path) -> None:
    logger = get_logger("mmjax")
    before = (logger.handlers, logger.level, logger.propagate)
    config = EngineConfig(
        model=ModelConfig(
            model="tiny",
            path=tiny_gemma3,
            hf_config=AutoConfig.from_pretrained(tiny_gemma3),
            architecture="Gemma3ForConditionalGeneration",
            max_model_len=64,
        ),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(
            max_num_seqs=1, max_num_batched_tokens=64, max_num_encoder_input_tokens=4
        ),
        use_tqdm=False,
    )
    frontend.start(run_engine, config, *frontend.addresses)
    ready = frontend.receive(Ready, timeout_s=240.0)
    assert ready.num_kv_blocks == 4
    assert ready.num_programs == 7
    items = {"open_devices", "load_weights", "measure", "allocate", "compile", "warm_up"}
    assert set(ready.startup_seconds) == items
    frontend.sender.send(
        EngineCoreRequest(
            request_id="a",
            prompt_token_ids=[2, 50, 60],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=5),
        )
    )
    assert len(frontend.answer_of("a")) == 5
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_the_loop_adds_nothing_to_an_answer(core: EngineCore) -> None:
    request = message("a", ([2, 5], (1, 1), [7]))
    assert answer(core, request) == dense_greedy(request)
