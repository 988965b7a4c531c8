"""Weights that change under engines of other kinds: adapters, 8 bits, two devices, an encoder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.engine.core import EngineCore
from mmjax.errors import CheckpointError, ModelNotFoundError
from mmjax.layers.module import flatten_params, unflatten_params
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.adapters import PREFIX, make_tensors, tower_layers, write_adapter
from tests.engine.test_adapters import ask, make_engine
from tests.engine.test_weights import Token, answer, read, update
from tests.engine.tiny import serve_all, tiny_params
from tests.families import served_model
from tests.families.tiny import TinyModel
from tests.models.served import make_request, start_engine, start_model


def changed(params: Any, seed: int, part: str = "") -> dict[str, np.ndarray]:
    """Return other values of the parameters whose names begin with `part`."""
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(leaf) * rng.uniform(0.7, 1.4, leaf.shape).astype(np.float32)
        for name, leaf in sorted(flatten_params(params).items())
        if name.startswith(part)
    }


def start_kind(model: TinyModel, **settings: Any) -> EngineCore:
    """Start an engine whose steps, beside decoding, are of one size."""
    return start_engine(model, max_num_batched_tokens=16, **settings)


def start_changed(model: TinyModel, leaves: Mapping[str, Any], **settings: Any) -> EngineCore:
    """Start an engine with some other weights."""
    family = model.family
    params = unflatten_params({**flatten_params(model.params), **leaves})
    sizes = {"max_model_len": family.max_model_len, "max_num_batched_tokens": 16, **settings}
    return start_model(
        family.model_class, model.config, params, max_embeds=family.max_embeds, **sizes
    )


def workload(model: TinyModel, turn: int = 0) -> list[EngineCoreRequest]:
    """Return a few requests, with items."""
    return [
        make_request(f"{turn} {n}", model.draw_sample(parts), logprobs=1)
        for n, parts in enumerate(model.family.workload[:3])
    ]


def serve(core: EngineCore, requests: Sequence[EngineCoreRequest]) -> list[list[Token]]:
    """Serve requests at once."""
    return [read(news) for news in serve_all(core, requests)]


# ---- kinds of engines ----------------------------------------------------------------------------

KINDS = {
    "in 8 bits": ("gemma3", {"quantization": "int8"}),
    "in 4 bits": ("gemma3", {"quantization": "int4"}),
    "two devices": ("gemma3", {"size": 2}),
    "an encoder-decoder": ("florence2", {}),
    "learned embeddings among an item's": ("deepseek_ocr2", {}),
    "items of tokens": ("chameleon", {}),
}
# `test_whole_numbers_in_8_bits_come_with_their_scales` has each leaf in 8 bits, and the test of
# other devices those on two, by default; engines of equal leaves are one engine.
MARKS = {name: () if name == "an encoder-decoder" else pytest.mark.slow for name in KINDS}


@pytest.mark.parametrize("kind", [pytest.param(name, marks=MARKS[name]) for name in KINDS])
def test_answers_are_those_of_an_engine_that_started_so(kind: str):
    name, settings = KINDS[kind]
    model = served_model(name)
    core = start_kind(model, **settings)
    first = serve(core, workload(model))
    assert first == serve(core, workload(model, 1))
    # All that is not the language model, then that; as arrays of JAX, then of numpy.
    tower = {
        name: jnp.array(leaf)
        for name, leaf in changed(model.params, 1).items()
        if not name.startswith("language_model.")
    }
    text = changed(model.params, 2, "language_model.")
    steps: list[tuple[dict[str, Any], dict[str, Any]]] = [(tower, tower), (text, {**tower, **text})]
    for turn, (given, whole) in enumerate(steps):
        kept = {name: np.array(leaf) for name, leaf in whole.items()}
        update(core, given, donate=turn == 0)
        fresh = start_changed(model, kept, **settings)
        expected = serve(fresh, workload(model))
        assert serve(core, workload(model, 2 + turn)) == expected
        assert expected != first
        check_equal(core, fresh)


def check_equal(core: EngineCore, fresh: EngineCore) -> None:
    """Compare the leaves of two engines, bit for bit, and where they lie."""
    held, wanted = flatten_params(core.params), flatten_params(fresh.params)
    assert held.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert held[name].sharding == leaf.sharding, name
        np.testing.assert_array_equal(held[name], leaf, err_msg=name)


@pytest.mark.parametrize("name", ["florence2"])
def test_requests_in_work_go_on_by_the_new_weights(name: str):
    """An encoder's states are computed again, too: they are of no other request."""
    model = served_model(name)
    core = start_kind(model)
    (request, *_) = workload(model)
    core.add_request(request)
    news = []
    while len(news) < 3:
        news += core.step()
    leaves = changed(model.params, 1)
    replacements = core.match_weights(leaves)
    news += core.drain()
    core.replace_weights(replacements)
    while core.has_unfinished():
        news += core.step()
    tokens, versions = read(news), [delta.weights_version for delta in news]
    assert versions == [0] * versions.count(0) + [1] * versions.count(1)
    assert versions.count(1) > 2
    first = versions.index(1)
    before = [token.token_id for token in tokens[:first]]
    fresh = start_changed(model, leaves)
    again = msgspec.structs.replace(request, output_token_ids=before)
    assert tokens[first:] == answer(fresh, again)


# Answers over two devices are slow: their programs take half a minute.
@pytest.mark.parametrize("is_serving", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_arrays_of_other_devices_and_shardings_are_moved(*, is_serving: bool):
    model = served_model("gemma3")
    core = start_kind(model, size=2)
    mesh = Mesh(np.array(jax.devices()[2:4]), ("fsdp",))
    leaves = changed(model.params, 3)
    given = {}
    for name, leaf in leaves.items():
        is_even = leaf.ndim and leaf.shape[0] % 2 == 0
        spec = PartitionSpec("fsdp") if is_even else PartitionSpec()
        given[name] = jax.device_put(leaf, NamedSharding(mesh, spec))
    update(core, given, donate=True)
    fresh = start_changed(model, leaves, size=2)
    check_equal(core, fresh)
    if is_serving:
        assert serve(core, workload(model)) == serve(fresh, workload(model))


def test_whole_numbers_in_8_bits_come_with_their_scales():
    model = served_model("gemma3")
    core, other = (start_kind(model, quantization="int8") for _ in range(2))
    leaves = changed(model.params, 4)
    update(other, leaves)
    check_equal(other, start_changed(model, leaves, quantization="int8"))
    name = "language_model.layers.0.mlp.up_proj.weight"
    own = flatten_params(other.params)
    with pytest.raises(CheckpointError, match=f"`{name}_scale`, the scales of `{name}`"):
        core.match_weights({name: own[name]})
    floats = jnp.zeros(own[name].shape, jnp.float32)
    with pytest.raises(CheckpointError, match="which is not quantised"):
        core.match_weights({name: floats, f"{name}_scale": own[f"{name}_scale"]})
    update(core, other.params)
    check_equal(core, other)


# ---- adapters ------------------------------------------------------------------------------------


def test_an_adapter_alone_gets_other_arrays(tmp_path: Path):
    core = make_engine()
    for name, seed in (("a", 1), ("b", 2)):
        core.load_adapter(name, write_adapter(tmp_path / name, seed=seed))
    core.load_adapter("new a", write_adapter(tmp_path / "new", seed=3))
    core.wait_loaded()
    names = ("a", "b", None, "new a")
    first = {name: answer(core, ask(name)) for name in names}
    assert first["a"] != first["new a"]
    base = flatten_params(core.params)
    found = core.stats().prefix_cache_hits
    new = {name: jnp.array(leaf) for name, leaf in make_tensors(3).items()}
    core.drain()
    core.replace_adapter("a", core.match_adapter("a", new))
    assert core.weights_version == 1
    assert answer(core, ask("a", "again a")) == first["new a"]
    assert core.stats().prefix_cache_hits == found, "its blocks are not found again"
    assert answer(core, ask("b", "again b")) == first["b"]
    assert answer(core, ask(None, "again")) == first[None]
    assert core.stats().prefix_cache_hits > found, "those of others are"
    assert all(flatten_params(core.params)[name] is leaf for name, leaf in base.items())
    with pytest.raises(ModelNotFoundError):
        core.match_adapter("c", new)
    with pytest.raises(CheckpointError, match="rank is 4"):
        core.match_adapter("a", make_tensors(3, rank=2))
    core.close()


def test_biases_that_an_adapter_was_given_stay_what_they_are_by_other_weights(tmp_path: Path):
    """What is added to the model's own depends on these."""
    lora = {"enable_tower_connector_lora": True}
    layers, rng = tower_layers(), np.random.default_rng(5)
    given = make_tensors(1, layers=layers) | {
        f"{PREFIX}{name}.base_layer.bias": rng.standard_normal(rows).astype(np.float32)
        for name, (rows, _) in layers.items()
    }
    _, params = tiny_params()
    leaves = changed(params, 6, "vision_tower")
    leaves |= {n: leaf + 1 for n, leaf in leaves.items() if n.endswith("q_proj.bias")}
    cores = [make_engine(lora=lora) for _ in range(2)]
    for core in cores:
        core.load_adapter("a", write_adapter(tmp_path / "a", tensors=make_tensors(1)))
        core.wait_loaded()
    update(cores[0], leaves)
    cores[0].replace_adapter("a", cores[0].match_adapter("a", given))
    cores[1].replace_adapter("a", cores[1].match_adapter("a", given))
    update(cores[1], leaves)
    assert answer(cores[1], ask("a")) == answer(cores[0], ask("a"))


def test_requests_of_an_adapter_go_on_by_its_new_arrays(tmp_path: Path):
    lora = {"enable_tower_connector_lora": True}
    core = make_engine(lora=lora)
    layers = {**tower_layers()}
    old, new = make_tensors(1, layers=layers), make_tensors(2, layers=layers)
    core.load_adapter("a", write_adapter(tmp_path / "a", tensors=old))
    core.load_adapter("new", write_adapter(tmp_path / "new", tensors=new))
    core.wait_loaded()
    core.add_request(ask("a", "first"))
    core.add_request(ask(None, "beside"))
    alone = answer(make_engine(lora=lora), ask(None))
    news: dict[str, list[Any]] = {"first": [], "beside": []}

    def take(deltas: list[Any]) -> None:
        for delta in deltas:
            news[delta.request_id].append(delta)

    while len(news["first"]) < 3:
        take(core.step())
    take(core.drain())
    core.replace_adapter("a", core.match_adapter("a", new))
    while core.has_unfinished():
        take(core.step())
    assert read(news["beside"]) == alone
    versions = [delta.weights_version for delta in news["first"]]
    before = read(news["first"])[: versions.index(1)]
    again = msgspec.structs.replace(
        ask("new", "again"), output_token_ids=[token.token_id for token in before]
    )
    assert read(news["first"])[len(before) :] == answer(core, again)
    core.close()


def test_adapters_stay_when_the_model_under_them_changes(tmp_path: Path):
    core = make_engine()
    core.load_adapter("a", write_adapter(tmp_path / "a", seed=1))
    core.wait_loaded()
    assert answer(core, ask("a"))
    _, params = tiny_params(1)
    update(core, params)
    other = make_engine()
    update(other, params)
    other.load_adapter("a", tmp_path / "a")
    other.wait_loaded()
    assert answer(core, ask("a", "again")) == answer(other, ask("a"))
    core.close()
    other.close()
