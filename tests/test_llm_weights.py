"""`LLM` under updates of its weights: whole calls, streams, another thread, sleep, dummies."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mmjax import LLM, SamplingParams
from mmjax.errors import CheckpointError, InternalError
from tests.kit import draw, tiny_gemma3_checkpoint
from tests.models.served import ask

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SETTINGS = {
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "use_tqdm_on_load": False,
}


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gemma3_checkpoint(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def other(other_path: Path) -> Iterator[LLM]:
    with LLM(str(other_path), **SETTINGS) as made:
        yield made


@pytest.fixture
def llm(tiny_gemma3: Path) -> Iterator[LLM]:
    with LLM(str(tiny_gemma3), **SETTINGS) as made:
        yield made


def say(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    prompts: Any = ["a red circle", "a star"]
    conversation = ask(draw(40, 40), "what is it?")
    texts = llm.generate(prompts, params, use_tqdm=False)
    pictures = llm.chat([conversation], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in (*texts, *pictures)]


def test_an_engine_of_dummies_says_what_its_first_update_has(tiny_gemma3: Path, other: LLM):
    with LLM(str(tiny_gemma3), load_format="dummy", **SETTINGS) as llm:
        dummy = say(llm)
        assert llm.weights_version == 0
        assert llm.update_weights(other.params) == llm.weights_version == 1
        assert say(llm) == say(other) != dummy
        output = llm.generate("a star", GREEDY, use_tqdm=False)[0].outputs[0]
        assert (output.weights_version, output.weights_versions) == (1, None)
        # The two have nothing in common.
        ours, theirs = jax.tree.leaves(llm.params), jax.tree.leaves(other.params)
        pointers = {leaf.unsafe_buffer_pointer() for leaf in theirs}
        assert not pointers & {leaf.unsafe_buffer_pointer() for leaf in ours}


def test_dummies_need_no_weight_files(tiny_gemma3: Path, tmp_path: Path, other: LLM):
    for file in tiny_gemma3.iterdir():
        if not file.name.endswith(".safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path), **SETTINGS)
    with LLM(str(tmp_path), load_format="dummy", **SETTINGS) as llm:
        llm.update_weights(other.params["language_model"], prefix="language_model")
        llm.update_weights(
            {name: part for name, part in other.params.items() if name != "language_model"}
        )
        assert say(llm) == say(other)


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_a_stream_goes_on_or_ends_as_its_caller_wants(llm: LLM, other: LLM, mode: Any):
    before = say(llm, LONG)[2]
    stream = llm.stream_chat(ask(draw(40, 40), "what is it?"), LONG)
    outputs = [next(stream) for _ in range(3)]
    llm.update_weights(other.params, mode=mode)
    outputs += stream
    pieces = [output.outputs[0] for output in outputs]
    tokens = [token for piece in pieces for token in piece.token_ids]
    versions = [piece.weights_version for piece in pieces for _ in piece.token_ids]
    count = versions.count(0)
    assert versions == sorted(versions)
    assert tokens[:count] == before[:count]
    if mode == "wait":
        assert (count, pieces[-1].finish_reason) == (40, "length")
    elif mode == "abort":
        assert pieces[-1].finish_reason == "abort"
        assert 2 < count < 40 == len(before)
        assert len(tokens) == count
    else:
        assert 2 < count < 40 == len(tokens)
        assert pieces[-1].finish_reason == "length"
    assert say(llm) == say(other)


def test_a_request_that_fails_during_an_update_is_told_to_who_has_asked(
    llm: LLM, other: LLM, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> Any:
        raise ValueError("this request's token cannot be taken")

    stream = llm.stream_chat(ask(draw(40, 40), "what is it?"), LONG)
    next(stream)
    monkeypatch.setattr(llm.engine._scheduler, "_append", fail)
    assert llm.update_weights(other.params, mode="wait") == 1
    monkeypatch.undo()
    with pytest.raises(InternalError):
        list(stream)
    assert say(llm) == say(other)


def test_another_thread_may_change_the_weights_and_let_it_sleep(llm: LLM, other: LLM):
    params = [jax.tree.map(jnp.copy, one.params) for one in (llm, other)]
    found: list[Any] = []
    has_begun = threading.Event()
    step = llm.engine.step

    def watch() -> Any:
        has_begun.set()
        return step()

    llm.engine.step = watch
    prompts: Any = [f"a star {n}" for n in range(12)]
    asking = threading.Thread(
        target=lambda: found.extend(llm.generate(prompts, LONG, use_tqdm=False))
    )
    asking.start()
    has_begun.wait()
    for turn in range(6):
        llm.update_weights(params[(turn + 1) % 2], mode="keep")
    llm.sleep(mode="keep")
    assert llm.is_sleeping
    is_over = asking.is_alive() is False
    assert not is_over
    llm.wake_up()
    asking.join()
    outputs = [output.outputs[0] for output in found]
    assert [output.finish_reason for output in outputs] == ["length"] * 12
    over = [output for output in outputs if output.weights_versions is not None]
    assert over
    for output in over:
        assert output.weights_versions is not None
        assert len(output.weights_versions) == len(output.token_ids) == 40
        assert output.weights_version == output.weights_versions[-1]
    # The weights are those of the start again.
    assert llm.weights_version == 6
    assert llm.engine.compilations == 0 or llm.config.precompile is None


def test_a_stream_ends_where_an_update_was_interrupted_within_a_step(
    llm: LLM, other: LLM, monkeypatch: pytest.MonkeyPatch
):
    """Its requests are counted as computed, and are not."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    before = say(llm)
    stream = llm.stream_chat(ask(draw(40, 40), "what is it?"), LONG)
    next(stream)
    monkeypatch.setattr(llm.engine._runner, "dispatch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.update_weights(other.params, mode="wait")
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="interrupted"):
        list(stream)
    assert say(llm) == before


def test_sleep_and_what_is_refused_meanwhile(llm: LLM, other: LLM):
    first = say(llm)
    llm.sleep()
    assert llm.is_sleeping
    with pytest.raises(RuntimeError, match="sleeps; call `wake_up`"):
        say(llm)
    llm.wake_up()
    assert not llm.is_sleeping
    assert say(llm) == first
    # Level 2: weights that are given meanwhile, or the checkpoint's.
    llm.sleep(level=2)
    assert not llm.params
    llm.update_weights(other.params)
    llm.wake_up()
    assert say(llm) == say(other)
    llm.sleep(level=2)
    llm.update_weights(other.params["language_model"], prefix="language_model")
    llm.wake_up()
    assert say(llm) == first


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda llm: llm.update_weights(llm.params, mode="now"), "`mode` is 'now'; expected one"),
        (lambda llm: llm.sleep(level=3), "`level` is 3; expected 1 or 2"),
        (lambda llm: llm.sleep(mode="now"), "`mode` is 'now'"),
    ],
)
def test_wrong_arguments_are_named(other: LLM, call: Any, says: str):
    with pytest.raises(ValueError, match=says):
        call(other)
