"""Weights that change under a running engine: its answers are those of one that started with them.

The oracle is a fresh engine with the same weights: of a few parts of the model, in a few versions.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from mmjax.engine.core import EngineCore
from mmjax.errors import CheckpointError
from mmjax.layers.module import flatten_params, unflatten_params
from mmjax.transport.messages import EngineCoreRequest, RequestOutputDelta
from tests.engine.tiny import (
    drain,
    engine_config,
    message,
    start_tiny,
    tiny_engine,
    tiny_params,
    with_embeds,
)

PARTS: Mapping[str, Callable[[str], bool]] = {
    "tower": lambda name: not name.startswith("language_model."),
    "lower": lambda name: name.startswith(("language_model.layers.0", "language_model.embed")),
    "upper": lambda name: (
        name.startswith("language_model.")
        and not name.startswith(("language_model.layers.0", "language_model.embed"))
    ),
}
"""Which parameters each part of the model has."""
NUM_SEEDS = 2
SIZES: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16}
"""Of all engines, so that they have the same few programs."""
START = (0, 0, 0)
"""The seeds of the parts that an engine starts with."""


def part_of(number: int, seed: int) -> dict[str, np.ndarray]:
    """Return one part's parameters in one version, by dotted names, on the host."""
    belongs = list(PARTS.values())[number]
    _, params = tiny_params(seed)
    return {n: np.asarray(x) for n, x in flatten_params(params).items() if belongs(n)}


def whole(state: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return all parameters of a state: a version of each part."""
    parts = [part_of(number, seed) for number, seed in enumerate(state)]
    return {name: leaf for part in parts for name, leaf in part.items()}


def on_device(leaves: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Return arrays of JAX that nobody else has."""
    return {name: jnp.array(leaf) for name, leaf in leaves.items()}


def start(state: tuple[int, ...] = START, **settings: Any) -> EngineCore:
    """Start an engine with the weights of a state."""
    params = unflatten_params(on_device(whole(state)))
    config = engine_config(**{**SIZES, **settings})
    return start_tiny(config, params)


@cache
def fresh(state: tuple[int, ...]) -> EngineCore:
    """Return an engine that never had other weights."""
    return start(state)


def update(core: EngineCore, params: Mapping[str, Any], **options: Any) -> None:
    """Replace weights between two steps."""
    donate = options.pop("donate", False)
    replacements = core.match_weights(params, **options)
    core.drain()
    core.replace_weights(replacements, donate=donate)


class Token(NamedTuple):
    """One token of an answer, with all that is told of it."""

    token_id: int
    logprobs: tuple[float, ...] = ()
    top_ids: tuple[int, ...] = ()


def read(news: list[RequestOutputDelta]) -> list[Token]:
    """Return the tokens that a request was given."""
    tokens = []
    for delta in news:
        told = delta.new_logprobs or [None] * len(delta.new_token_ids)
        for token_id, logprobs in zip(delta.new_token_ids, told, strict=True):
            if logprobs is None:
                tokens.append(Token(token_id))
                continue
            tokens.append(Token(token_id, tuple(logprobs.logprobs), tuple(logprobs.token_ids)))
    return tokens


def answer(core: EngineCore, request: EngineCoreRequest) -> list[Token]:
    """Serve one request alone."""
    core.add_request(request)
    return read(drain(core)[request.request_id])


@cache
def answer_of(state: tuple[int, ...], key: tuple[Any, ...], before: tuple[int, ...]) -> list[Token]:
    """Return what a fresh engine answers, behind tokens that it is given."""
    request = msgspec.structs.replace(ask(f"of {key}", key), output_token_ids=list(before))
    return answer(fresh(state), request)


def ask(request_id: str, key: tuple[Any, ...]) -> EngineCoreRequest:
    """Return a request: with pictures or without, greedy or sampled, of a few beginnings."""
    beginning, picture, is_sampled = key
    words = [2, *range(10 + beginning, 24 + beginning)]
    parts: list[Any] = [words] if picture is None else [words, (picture, 1), [40, 41, 42 + picture]]
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 7} if is_sampled else {}
    return message(request_id, parts, max_tokens=6, logprobs=2, **sampling)


KEYS = [(n, picture, n == 1) for n in range(2) for picture in (None, 0, 1)]


def live_bytes() -> int:
    """Return the bytes of all arrays of the process, each buffer once, without what is garbage."""
    gc.collect()
    buffers = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for array in jax.live_arrays()
        if not array.is_deleted()
        for shard in array.addressable_shards
    }
    return sum(buffers.values())


# ---- random updates ------------------------------------------------------------------------------


class Run:
    """An engine between updates, and what every request in work must answer."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.core = start()
        self.state: tuple[int, ...] = START
        self.news: dict[str, list[RequestOutputDelta]] = {}
        self.asked: dict[str, tuple[Any, ...]] = {}
        self.states: dict[int, tuple[int, ...]] = {0: START}
        """By the weights' version."""
        self.num_checked = self.num_over = self.num_requests = 0

    def add(self) -> None:
        """Ask something."""
        key = KEYS[self.rng.integers(len(KEYS))]
        request_id = f"request {self.num_requests}"
        self.num_requests += 1
        self.core.add_request(ask(request_id, key))
        self.asked[request_id] = key

    def take(self, deltas: list[RequestOutputDelta]) -> None:
        """Take in what a step told, and check what is finished."""
        for delta in deltas:
            self.news.setdefault(delta.request_id, []).append(delta)
            if delta.finish_reason is not None:
                self.check(delta.request_id)

    def check(self, request_id: str) -> None:
        """Compare an answer with those of fresh engines, part by part of one version."""
        news, key = self.news.pop(request_id), self.asked.pop(request_id)
        assert news[-1].finish_reason in ("length", "abort")
        tokens = read(news)
        versions = [delta.weights_version for delta in news for _ in delta.new_token_ids]
        assert versions == sorted(versions)
        self.num_over += len(set(versions)) > 1
        for version in dict.fromkeys(versions):
            first = versions.index(version)
            count = versions.count(version)
            before = tuple(token.token_id for token in tokens[:first])
            expected = answer_of(self.states[version], key, before)
            assert tokens[first : first + count] == expected[:count], (request_id, version)
        self.num_checked += 1

    def change(self) -> None:
        """Replace the weights, whole or in part, in any of the ways."""
        wanted = self.rng.integers(NUM_SEEDS, size=len(PARTS))
        if self.rng.integers(2):
            kept = self.rng.permutation(len(PARTS))[: self.rng.integers(1, len(PARTS))]
            wanted[kept] = np.array(self.state)[kept]
        leaves: dict[str, np.ndarray] = {}
        for number, seed in enumerate(wanted):
            if seed != self.state[number] or self.rng.integers(2):
                leaves |= part_of(number, int(seed))
        if not leaves:
            return
        mode = ("wait", "keep", "abort")[self.rng.integers(3)]
        while mode == "wait" and self.core.has_unfinished():
            self.take(self.core.step())
        self.take(self.core.drain())
        if mode == "abort":
            self.take(self.core.abort_all())
        gc.collect()
        before = live_bytes()
        donate, is_host = bool(self.rng.integers(2)), not self.rng.integers(3)
        given: Mapping[str, Any] = leaves if is_host else on_device(leaves)
        replacements = self.core.match_weights(given)
        self.core.replace_weights(replacements, donate=donate)
        del replacements
        # One copy: the engine's, beside what the caller has kept.
        if not donate:
            del given
        assert live_bytes() == before
        self.state = tuple(int(seed) for seed in wanted)
        self.states[self.core.weights_version] = self.state

    def go(self, num_updates: int) -> None:
        """Change the weights so often, with requests between."""
        for _ in range(num_updates):
            for _ in range(self.rng.integers(4)):
                self.add()
            for _ in range(self.rng.integers(8)):
                self.take(self.core.step())
            self.change()
        self.take([delta for news in drain(self.core).values() for delta in news])
        assert not self.asked
        assert self.core.compilations == 0
        held = flatten_params(self.core.params)
        for name, leaf in whole(self.state).items():
            np.testing.assert_array_equal(held[name], leaf, err_msg=name)


def test_answers_between_random_updates_are_those_of_fresh_engines():
    run = Run(seed=0)
    run.go(8)
    assert run.num_checked > 5
    assert run.num_over > 0


@pytest.mark.slow  # a minute: 500 updates, each against engines that started with those weights
@pytest.mark.timeout(1800)
def test_answers_between_500_updates_are_those_of_fresh_engines():
    run = Run(seed=1)
    run.go(500)
    assert run.num_checked > 500
    assert run.num_over > 50


# ---- what is kept, and what is not ---------------------------------------------------------------


def hits(core: EngineCore) -> tuple[int, int]:
    """Return tokens found in the prefix cache, and items found in the encoder cache."""
    stats = core.stats()
    return stats.prefix_cache_hits, stats.encoder_cache_hits


def test_a_new_language_model_keeps_the_towers_rows_and_a_new_tower_drops_them():
    core, key = start(), KEYS[1]
    assert answer(core, ask("first", key)) == answer_of(START, key, ())
    assert answer(core, ask("again", key)) == answer_of(START, key, ())
    assert hits(core) == (16, 1)
    update(core, part_of(2, 1))
    assert answer(core, ask("new language model", key)) == answer_of((0, 0, 1), key, ())
    assert hits(core) == (16, 2)
    update(core, part_of(0, 1))
    assert answer(core, ask("new tower", key)) == answer_of((1, 0, 1), key, ())
    assert hits(core) == (16, 2)
    rows, expected = (one.read_embeds("picture-0-1") for one in (core, fresh((1, 0, 1))))
    assert rows is not None
    np.testing.assert_array_equal(rows, expected)


def test_embeddings_that_were_given_stay_whatever_the_tower():
    rows = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    config = engine_config(**SIZES)
    config = config.with_mm(replace(config.model.mm, enable_mm_embeds=True))
    core = start_tiny(config, unflatten_params(on_device(whole(START))))
    request = with_embeds(message("a", [[2, 10, 11], (0, 1), [40]], logprobs=1), [rows])
    first = answer(core, request)
    update(core, part_of(0, 1))
    again = answer(core, msgspec.structs.replace(request, request_id="b"))
    assert again == first
    assert core.stats().encoder_cache_hits == 1


# ---- names, shapes, places -----------------------------------------------------------------------


def test_wrong_names_and_shapes_are_all_named_and_change_nothing():
    core, key = start(), KEYS[1]
    before = flatten_params(core.params)
    name = "language_model.layers.0.self_attn.q_proj.weight"
    good = part_of(2, 1)
    bad = {
        **good,
        "language_model.layers.7.mlp.up_proj.weight": np.zeros((2, 2), np.float32),
        name: np.zeros((3, 5), np.float32),
        "language_model.norm.weight": np.zeros(32, np.int32),
    }
    with pytest.raises(CheckpointError) as raised:
        core.match_weights(bad)
    text = str(raised.value)
    assert "1 unexpected, 2 misshapen" in text
    assert "`language_model.layers.7.mlp.up_proj.weight`" in text
    assert f"`{name}` must have shape (32, 32); got (3, 5)" in text
    assert "`language_model.norm.weight` must be of dtype float32; got int32" in text
    for given in ({}, {"language_model": {}}):
        with pytest.raises(CheckpointError, match="at least one array"):
            core.match_weights(given)
    with pytest.raises(TypeError, match=r"`language_model.norm.weight` .* is a `list`"):
        core.match_weights({"language_model.norm.weight": [1.0]})
    after = flatten_params(core.params)
    assert all(after[name] is leaf for name, leaf in before.items())
    assert core.weights_version == 0
    assert answer(core, ask("a", key)) == answer_of(START, key, ())


def test_a_prefix_stands_before_each_name_and_dtypes_are_cast():
    core, key = start(), KEYS[1]
    nested = unflatten_params(on_device({**part_of(1, 1), **part_of(2, 1)}))
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nested["language_model"])
    update(core, wide, prefix="language_model")
    assert answer(core, ask("a", key)) == answer_of((0, 1, 1), key, ())


def test_donated_arrays_are_taken_as_they_are_and_others_are_copied():
    core = start()
    name = "language_model.norm.weight"
    given = on_device({name: whole((0, 0, 1))[name]})
    update(core, given)
    held = flatten_params(core.params)[name]
    assert held.unsafe_buffer_pointer() != given[name].unsafe_buffer_pointer()
    given[name].delete()
    np.testing.assert_array_equal(flatten_params(core.params)[name], whole((0, 0, 1))[name])
    given = on_device({name: whole((0, 1, 1))[name]})
    pointer = given[name].unsafe_buffer_pointer()
    update(core, given, donate=True)
    assert flatten_params(core.params)[name].unsafe_buffer_pointer() == pointer
    # One in another dtype is gone, too.
    half = {name: jnp.asarray(whole((0, 0, 1))[name], jnp.bfloat16)}
    update(core, half, donate=True)
    assert half[name].is_deleted()
    with pytest.raises(ValueError, match="was deleted, or donated"):
        core.match_weights(half)
    # Numpy's arrays stay the caller's, who may change them.
    own = {name: np.array(whole((0, 0, 1))[name])}
    update(core, own)
    own[name][:] = 0
    np.testing.assert_array_equal(flatten_params(core.params)[name], whole((0, 0, 1))[name])
    # The engine's own may come back, changed in part.
    update(core, core.params, donate=True)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(core.params))


def test_programs_of_a_token_are_given_what_they_read() -> None:
    core = tiny_engine()
    runner = core._runner
    names = flatten_params(runner.params).keys()
    step, sample = (runner._programs.select_params(of, runner.params) for of in ("step", "sample"))
    assert set(sample) == {"language_model.embed_tokens.weight"}
    assert set(step) == {name for name in names if name.startswith("language_model.")}
    encoded = runner._programs.find_encoder_params()
    assert set(names) == encoded | set(step) | set(sample)
