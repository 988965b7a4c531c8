"""Engines with many adapters: each request has the answer of its own, whatever runs beside it."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mmjax.config.engine_config import LoRAConfig, ParallelConfig
from mmjax.engine.core import EngineCore
from mmjax.errors import ConfigError, RequestValueError
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.adapters import make_tensors, tower_layers, write_adapter
from tests.engine.tiny import (
    answer,
    answer_all,
    drain,
    engine_config,
    message,
    start_tiny,
    tiny_engine,
)

NAMES = ("a", "b", "c", "d", None)
SIZES: dict[str, Any] = {"max_num_batched_tokens": 16}
"""A step's tokens are then of one bucket, beside decoding."""
PARTS: list[Any] = [[5, 6, 7, 8, 9, 10, 11, 12, 13], (0, 1), [20, 21, 22, 23]]


def make_engine(
    *, lora: dict[str, Any] | None = None, size: int = 1, **settings: Any
) -> EngineCore:
    """Start an engine with room for adapters of rank 8.

    Unless told otherwise all have the same few programs.
    """
    own: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, **(lora or {})}
    config = replace(
        engine_config(**SIZES | settings),
        lora=LoRAConfig(**own),
        parallel=ParallelConfig(tensor_parallel_size=size),
    )
    return start_tiny(config)


def load(core: EngineCore, path: Path, names: Sequence[str | None] = NAMES) -> None:
    """Load an adapter of each name, of ranks 1, 2, ..."""
    for number, name in enumerate(filter(None, names)):
        core.load_adapter(name, write_adapter(path / name, seed=ord(name), rank=number + 1))
    core.wait_loaded()


def ask(
    name: str | None, request_id: str = "", parts: Any = None, **sampling: Any
) -> EngineCoreRequest:
    """Return a request that names an adapter."""
    sampling = {"max_tokens": 12, **sampling}
    request = message(request_id or str(name), PARTS if parts is None else parts, **sampling)
    return msgspec.structs.replace(request, lora_name=name)


@pytest.fixture(scope="module")
def lone_answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, list[int]]:
    """What each adapter answers alone, and what the model does without any."""
    core = make_engine()
    load(core, tmp_path_factory.mktemp("adapters"))
    answers = {name: answer(core, ask(name)) for name in NAMES}
    assert len({tuple(one) for one in answers.values()}) == len(NAMES)
    assert answers[None] == answer(tiny_engine(**SIZES), ask(None)), "as without room for adapters"
    assert core.compilations == 0 or core.config.precompile is None
    core.close()
    return answers


ENGINES: dict[str, dict[str, Any]] = {
    "together": {"max_num_seqs": 5, "lora": {"max_loras": 4}, "max_num_batched_tokens": 64},
    "two slots": {"lora": {"max_cpu_loras": 2}},
    "chunked, preempted": {
        "max_num_seqs": 5,
        "lora": {"max_loras": 4},
        "max_num_batched_tokens": 7,
        "num_blocks": 17,
    },
    "two devices": {"max_num_seqs": 5, "lora": {"max_loras": 4}, "size": 2},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "two slots" else pytest.mark.slow) for name in ENGINES],
)
def test_four_adapters_and_none_answer_as_alone(
    name: str, lone_answers: dict[str | None, list[int]], tmp_path: Path
) -> None:
    core = make_engine(**ENGINES[name])
    load(core, tmp_path)
    batch = [ask(one, f"{one}{turn}") for turn in range(2) for one in NAMES]
    assert answer_all(core, batch) == [lone_answers[request.lora_name] for request in batch]
    again = answer_all(core, batch)
    assert again == [lone_answers[request.lora_name] for request in batch], "out of the cache"
    assert core.stats().prefix_cache_hits > 0
    assert (core.num_preemptions > 0) == ("preempted" in name)
    assert core._scheduler.adapter_slots.num_running == 0
    core.close()


def test_nothing_compiles_once_it_serves(tmp_path: Path) -> None:
    core = make_engine(precompile="all")
    load(core, tmp_path)
    answer_all(core, [ask("a"), ask(None), ask("b")])
    answer_all(core, [ask("c", logprobs=2, prompt_logprobs=1), ask("d")])
    core.unload_adapter("a")
    core.load_adapter("a", write_adapter(tmp_path / "new", seed=99))
    core.wait_loaded()
    answer_all(core, [ask("a")])
    assert core.compilations == 0
    core.close()


def test_without_adapters_there_are_no_more_programs() -> None:
    plain, adapted = tiny_engine(**SIZES), make_engine()
    assert plain._runner._adapters is None
    assert not any(bucket.has_adapters for bucket in plain._runner.buckets.steps)
    num_steps = len(plain._runner.buckets.steps)
    assert adapted.num_programs == plain.num_programs + num_steps


def test_an_adapter_loaded_anew_meets_nothing_old(
    lone_answers: dict[str | None, list[int]], tmp_path: Path
) -> None:
    core = make_engine()
    load(core, tmp_path, ["a"])
    assert answer(core, ask("a")) == lone_answers["a"]
    core.unload_adapter("a")
    with pytest.raises(RequestValueError, match="no adapter `a`"):
        core.add_request(ask("a"))
    core.load_adapter("a", write_adapter(tmp_path / "other", seed=ord("b"), rank=2))
    core.wait_loaded()
    assert answer(core, ask("a")) == lone_answers["b"]
    assert core.stats().prefix_cache_hits == 0


def test_a_bad_adapter_changes_nothing(
    lone_answers: dict[str | None, list[int]], tmp_path: Path
) -> None:
    core = make_engine()
    load(core, tmp_path, ["a"])
    tensors = make_tensors(1)
    tensors[next(iter(tensors))][:] = float("nan")
    core.load_adapter("bad", write_adapter(tmp_path / "bad", tensors=tensors))
    with pytest.raises(RequestValueError, match="not finite"):
        core.wait_loaded()
    with pytest.raises(RequestValueError, match="loaded already"):
        core.load_adapter("a", tmp_path / "bad")
    assert answer(core, ask("a")) == lone_answers["a"]
    core.load_adapter("bad", write_adapter(tmp_path / "good", seed=ord("b"), rank=2))
    core.wait_loaded()
    assert answer(core, ask("bad")) == lone_answers["b"]


def test_requests_wait_for_an_adapter_that_is_being_read(
    lone_answers: dict[str | None, list[int]], tmp_path: Path
) -> None:
    """As those that are sent again to a new engine; those of a bad one fail."""
    core = make_engine()
    core.load_adapter("a", write_adapter(tmp_path / "a", seed=ord("a"), rank=1))
    core.load_adapter("bad", tmp_path / "nowhere")
    core.add_request(ask("a"))
    core.add_request(ask("bad"))
    core._adapters.wait()
    failed: list[Any] = []
    news: dict[str, list[int]] = {"a": []}
    while core.has_unfinished():
        for delta in core.step():
            news[delta.request_id] += delta.new_token_ids
        failed += core.pop_failed()
    assert news == {"a": lone_answers["a"]}
    assert [request_id for request_id, _ in failed] == ["bad"]


def test_one_that_is_being_read_while_weights_change_is_told_of(
    lone_answers: dict[str | None, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_engine()
    is_changed, read = threading.Event(), core._adapters._read

    def read_slowly(path: Path) -> Any:
        assert is_changed.wait(60.0)
        return read(path)

    monkeypatch.setattr(core._adapters, "_read", read_slowly)
    core.load_adapter("a", write_adapter(tmp_path / "a", seed=ord("a"), rank=1))
    core.replace_weights(core.match_weights(core.params))
    is_changed.set()
    core._adapters.wait()
    assert core.pop_loaded() == [("a", None)]
    assert not core.is_loading
    assert answer(core, ask("a")) == lone_answers["a"]


def test_the_figures_name_the_adapters_in_use(tmp_path: Path) -> None:
    core = make_engine()
    load(core, tmp_path)
    # One step has room for all, but two adapters alone.
    for name in ("a", "b", None, "c"):
        core.add_request(ask(name, parts=[[5, 6, 7]]))
    # Of more adapters than are kept, those that are named are read again, in a thread.
    core.wait_loaded()
    core.step()
    stats = core.stats()
    assert (stats.running_loras, stats.waiting_loras) == (["a", "b"], ["c"])
    drain(core)
    assert (core.stats().running_loras, core.stats().waiting_loras) == ([], [])


def test_a_failed_step_loses_no_adapter(
    lone_answers: dict[str | None, list[int]], tmp_path: Path
) -> None:
    core = make_engine()
    load(core, tmp_path)
    core.add_request(ask("a"))
    core.step()
    assert core.recover() == ["a"]
    assert answer(core, ask("a")) == lone_answers["a"]


def write_tower_adapter(folder: Path) -> Path:
    return write_adapter(folder / "tower", tensors=make_tensors(3, layers=tower_layers()))


def test_an_adapter_of_towers_is_refused_without_the_flag(tmp_path: Path) -> None:
    without = make_engine()
    without.load_adapter("tower", write_tower_adapter(tmp_path))
    with pytest.raises(RequestValueError, match="--enable-tower-connector-lora"):
        without.wait_loaded()


@pytest.mark.slow  # some adapters of `test_adapter_machine.py` adapt the tower
def test_towers_have_adapters_too(tmp_path: Path) -> None:
    path = write_tower_adapter(tmp_path)
    core = make_engine(lora={"enable_tower_connector_lora": True})
    core.load_adapter("tower", path)
    core.wait_loaded()
    adapted, plain = ask("tower", "1"), ask(None, "2")
    features = [replace(one, identifier=f"tower:{one.mm_hash}") for one in adapted.mm_features]
    adapted = msgspec.structs.replace(adapted, mm_features=features)
    alone = [answer(core, adapted), answer(core, plain)]
    assert alone[0] != alone[1]
    assert answer_all(core, [adapted, plain]) == alone
    assert answer(core, ask(None, "3")) == answer(tiny_engine(**SIZES), ask(None))


def test_too_many_slots_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="--max-loras"):
        make_engine(lora={"max_loras": 500_000, "max_lora_rank": 1024})


def test_adapters_are_cut_as_their_layers_are(tmp_path: Path) -> None:
    core = make_engine(size=2)
    arrays = core._runner._adapters
    assert arrays is not None
    layer = "language_model.layers.0.self_attn"
    for name, axis in ((f"{layer}.q_proj.lora.b", 0), (f"{layer}.o_proj.lora.a", 2)):
        array = arrays[name]
        assert array.sharding.shard_shape(array.shape)[axis] == array.shape[axis] // 2
