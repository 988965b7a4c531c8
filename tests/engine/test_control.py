"""P1 is changed as a whole while it serves: halted, put to sleep, given weights of a directory."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from mmjax.config.lora_config import LoRAConfig
from mmjax.engine.core import EngineCore
from mmjax.engine.process import EngineControl
from mmjax.engine.start import _open_adapters
from mmjax.errors import CheckpointError
from mmjax.layers.module import flatten_params
from mmjax.transport.channel import IpcDirectory
from mmjax.transport.messages import (
    AbortRequests,
    ControlEngine,
    EngineChanged,
    Heartbeat,
    LoadAdapter,
    StepOutput,
    UnloadAdapter,
)
from tests.engine.test_process import Frontend
from tests.engine.test_weights import (
    KEYS,
    START,
    Token,
    answer,
    answer_of,
    ask,
    live_bytes,
    read,
    start,
    whole,
)


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    with IpcDirectory() as directory:
        made = Frontend(directory)
        yield made
        made.close()


@pytest.fixture
def core() -> EngineCore:
    return start()


def change(frontend: Frontend, action: Any, **fields: Any) -> None:
    """Send a change without waiting."""
    frontend.sender.send(ControlEngine(number=7, action=action, **fields))


def changed(frontend: Frontend, action: Any, **fields: Any) -> EngineChanged:
    """Send a change, and return what became of it."""
    change(frontend, action, **fields)
    found = frontend.receive(EngineChanged)
    assert found.number == 7
    return found


def collect(frontend: Frontend, request_id: str) -> tuple[list[Token], str]:
    """Return a request's answer, and why it ended."""
    news = []
    while not news or news[-1].finish_reason is None:
        deltas = frontend.receive(StepOutput).deltas
        news += [delta for delta in deltas if delta.request_id == request_id]
    return read(news), news[-1].finish_reason or ""


def write(path: Path, state: tuple[int, ...]) -> Path:
    """Write a state as a directory of weights, by the tree's own names."""
    path.mkdir()
    save_file(whole(state), path / "model.safetensors")
    return path


def test_a_pause_holds_requests_and_a_resume_serves_them(frontend: Frontend, core: EngineCore):
    frontend.serve(core)
    assert changed(frontend, "pause").is_paused
    frontend.sender.send(ask("held", KEYS[0]))
    frontend.sender.send(ask("given up", KEYS[0]))
    frontend.sender.send(AbortRequests(request_ids=["given up"]))
    assert frontend.receiver.receive(0.3) is None or not core.has_unfinished()
    assert any(frontend.receive(Heartbeat).num_waiting == 1 for _ in range(20))
    assert not changed(frontend, "resume").is_paused
    assert collect(frontend, "held")[0] == answer_of(START, KEYS[0], ())
    assert not core.has_unfinished()


@pytest.mark.parametrize("action", ["pause", "sleep"])
def test_adapters_are_not_held(core: EngineCore, action: Any):
    """Whoever asks for one waits for it, and may be the one who ends the halt."""
    control = EngineControl(core, lambda deltas: None, lambda reply: None)
    control.add(ControlEngine(number=1, action=action))
    load = LoadAdapter(lora_name="a", lora_path="/a")
    assert not control.hold(load)
    assert [*control.apply()] == []
    assert control.is_halted
    assert not control.hold(load)
    assert not control.hold(UnloadAdapter(lora_name="a"))


def test_an_adapter_s_bias_is_compared_with_no_weights_that_sleep_has_dropped():
    model: Any = SimpleNamespace(
        adapted=None,
        left_out=(),
        model_class=SimpleNamespace(rules=lambda config: (), unadapted=()),
    )
    config: Any = SimpleNamespace(
        lora=LoRAConfig(enable_lora=True), model=SimpleNamespace(hf_config=None)
    )
    params: Any = {}
    _, reader = _open_adapters(config, model, lambda: params)
    with pytest.raises(CheckpointError, match="wake it up first"):
        reader.read_base("layer.bias")
    params["layer"] = {"bias": np.ones(2)}
    assert reader.read_base("other.bias") is None


def test_nothing_is_kept_of_a_held_request_that_was_given_up_but_its_picture(core: EngineCore):
    control = EngineControl(core, lambda deltas: None, lambda reply: None)
    control.add(ControlEngine(number=1, action="pause"))
    assert [*control.apply()] == []
    kept, bare = ask("kept", KEYS[0]), ask("bare", KEYS[1])
    for feature in bare.mm_features:
        feature.data = None  # as P0 sends it behind the request that brings its picture
    for message in (ask("a", KEYS[1]), kept, bare, AbortRequests(request_ids=["a", "elsewhere"])):
        assert control.hold(message)
    control.add(ControlEngine(number=2, action="resume"))
    assert [*control.apply()] == [kept, bare]
    assert answer(core, bare) == answer_of(START, KEYS[1], ())


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_what_becomes_of_a_request_in_work_is_the_callers_choice(
    frontend: Frontend, core: EngineCore, mode: Any
):
    request = ask("a", KEYS[1])
    frontend.serve(core)
    frontend.sender.send(request)
    # Behind the request, in one turn of the loop or in the next.
    change(frontend, "pause", mode=mode)
    if mode == "wait":
        assert collect(frontend, "a") == (answer_of(START, KEYS[1], ()), "length")
        assert frontend.receive(EngineChanged).is_paused
        return
    if mode == "abort":
        assert collect(frontend, "a")[1] == "abort"
        assert frontend.receive(EngineChanged).is_paused
        return
    assert frontend.receive(EngineChanged).is_paused
    refused = changed(frontend, "sleep", mode="wait")
    assert refused.error is not None
    assert "cannot be finished first" in refused.error.message
    change(frontend, "resume")
    assert collect(frontend, "a")[1] == "length"


def test_sleep_frees_the_caches_and_a_request_waits_for_the_end(
    frontend: Frontend, core: EngineCore
):
    assert answer(core, ask("warm", KEYS[1])) == answer_of(START, KEYS[1], ())
    frontend.serve(core)
    before = live_bytes()
    caches = sum(leaf.nbytes for leaf in jax.tree.leaves((core._runner._state, core._runner._pool)))
    assert changed(frontend, "sleep").is_sleeping
    assert before - live_bytes() >= caches > 0
    frontend.sender.send(ask("a", KEYS[1]))
    assert not changed(frontend, "wake_up").is_sleeping
    assert collect(frontend, "a")[0] == answer_of(START, KEYS[1], ())
    assert live_bytes() == before


def test_a_directory_that_was_not_taken_is_not_what_sleep_reads_again(
    core: EngineCore, tmp_path: Path
):
    """As where requests are held that an update was to wait for."""
    good, other = write(tmp_path / "good", (1, 2, 1)), write(tmp_path / "other", (0, 1, 1))
    core.load_weights(core.open_weights(good))
    core.open_weights(other)
    core.sleep(level=2)
    core.wake_up()
    held = flatten_params(core.params)
    for name, leaf in whole((1, 2, 1)).items():
        np.testing.assert_array_equal(held[name], leaf, err_msg=name)


def test_weights_of_a_directory(frontend: Frontend, core: EngineCore, tmp_path: Path):
    good, other = write(tmp_path / "good", (1, 2, 1)), write(tmp_path / "other", (0, 1, 1))
    bad = tmp_path / "bad"
    bad.mkdir()
    leaves = whole((1, 1, 1))
    leaves.pop("language_model.norm.weight")
    save_file(leaves, bad / "model.safetensors")
    assert answer(core, ask("warm", KEYS[1])) == answer_of(START, KEYS[1], ())
    frontend.serve(core)
    reply = changed(frontend, "load_weights", path=str(good))
    assert (reply.error, reply.weights_version) == (None, 1)
    frontend.sender.send(ask("a", KEYS[1]))
    assert collect(frontend, "a")[0] == answer_of((1, 2, 1), KEYS[1], ())
    for path in (bad, tmp_path / "none"):
        refused = changed(frontend, "load_weights", path=str(path), mode="abort")
        assert refused.error is not None
        assert (refused.error.status, refused.weights_version) == (400, 1)
    refused = changed(frontend, "load_weights", path=str(bad))
    assert refused.error is not None
    assert "language_model.norm.weight" in refused.error.message
    frontend.sender.send(ask("b", KEYS[1]))
    assert collect(frontend, "b")[0] == answer_of((1, 2, 1), KEYS[1], ())
    # Weights that sleep has freed are read again, or come from elsewhere before.
    assert changed(frontend, "sleep", level=2).is_sleeping
    assert not core.has_weights
    assert changed(frontend, "wake_up").weights_version == 2
    frontend.sender.send(ask("c", KEYS[1]))
    assert collect(frontend, "c")[0] == answer_of((1, 2, 1), KEYS[1], ())
    changed(frontend, "sleep", level=2)
    assert changed(frontend, "load_weights", path=str(other), weights_version=9).is_sleeping
    assert changed(frontend, "wake_up").weights_version == 9
    frontend.sender.send(ask("d", KEYS[1]))
    assert collect(frontend, "d")[0] == answer_of((0, 1, 1), KEYS[1], ())
    held = flatten_params(core.params)
    for name, leaf in whole((0, 1, 1)).items():
        np.testing.assert_array_equal(held[name], leaf, err_msg=name)


def test_weights_that_another_process_had_are_served_or_none(
    frontend: Frontend, core: EngineCore, tmp_path: Path
):
    path = write(tmp_path / "step", (1, 2, 1))
    frontend.serve(core)
    mark = changed(frontend, "load_weights", path=str(path)).weights_mark
    again = {"path": str(path), "weights_version": 5, "weights_mark": mark}
    assert changed(frontend, "load_weights", **again).error is None
    # Other files under the same name, as trainers write them.
    save_file(whole((0, 1, 1)), path / "model.safetensors")
    lost = changed(frontend, "load_weights", **again)
    assert (lost.lacks_weights, lost.weights_version) == (True, 5)
    assert lost.error is not None
    assert "not those that were loaded as version 5" in lost.error.message
    frontend.sender.send(ask("held", KEYS[1]))
    assert frontend.receiver.receive(0.3) is None or not core.has_unfinished()
    # It stays where it is by what does not help, also by a nap.
    assert changed(frontend, "load_weights", path=str(tmp_path / "none")).lacks_weights
    assert changed(frontend, "sleep").is_sleeping
    assert changed(frontend, "wake_up").is_sleeping
    told = changed(frontend, "load_weights", path=str(path))
    assert (told.error, told.lacks_weights, told.weights_version) == (None, False, 6)
    assert not changed(frontend, "wake_up").is_sleeping
    assert collect(frontend, "held")[0] == answer_of((0, 1, 1), KEYS[1], ())


def test_weights_of_the_start_keep_the_version_that_they_had(frontend: Frontend, core: EngineCore):
    frontend.serve(core)
    reply = changed(frontend, "load_weights", path=None, weights_version=3)
    assert (reply.error, reply.weights_version, reply.lacks_weights) == (None, 3, False)
    frontend.sender.send(ask("a", KEYS[1]))
    news = frontend.receive(StepOutput).deltas
    assert news[0].weights_version == 3
