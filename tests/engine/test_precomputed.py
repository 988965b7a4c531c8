"""Embeddings that came with a request: written to the pool, and used as a tower's own."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest

from mmjax.config.engine_config import MultiModalConfig
from mmjax.engine.core import EngineCore
from mmjax.engine.device.encoder import WriteCalls
from mmjax.engine.scheduling.buckets import Buckets
from mmjax.engine.scheduling.request import EncoderItem
from mmjax.errors import RequestError
from mmjax.processing.tensors.inputs import PlaceholderRange
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import (
    answer,
    drain,
    engine_config,
    message,
    start_tiny,
    text,
    tokens_of,
    with_embeds,
)

WIDTH, ROWS = 32, 4
NO_TOWER = {"image": 0}


def make_engine(mm: MultiModalConfig, **settings: Any) -> EngineCore:
    return start_tiny(engine_config(**settings).with_mm(mm))


def count_programs(core: EngineCore) -> int:
    return core._runner.buckets.num_programs


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return make_engine(MultiModalConfig(enable_mm_embeds=True))


@lru_cache
def tower() -> EngineCore:
    """An engine of its own, whose pool is read: no test's requests lie in it."""
    return make_engine(MultiModalConfig())


@lru_cache
def encode(seed: int, units: int) -> np.ndarray:
    """Return the rows that the tower gives, as they lie in the pool."""
    engine = tower()
    answer(engine, message("encode", ((seed, units),), max_tokens=1))
    rows = engine._runner.rows.get(f"picture-{seed}-{units}")
    return np.asarray(engine._runner._pool)[rows]


def with_own_embeds(request: EngineCoreRequest) -> EngineCoreRequest:
    """Return the request with its pictures' own embeddings in their place."""
    names = [feature.identifier.split("-") for feature in request.mm_features]
    return with_embeds(request, [encode(int(seed), int(units)) for _, seed, units in names])


def report(core: EngineCore, request: EngineCoreRequest) -> list[Any]:
    """Return the tokens of an answer with their log-probabilities, bit for bit."""
    core.add_request(request)
    news = drain(core)[request.request_id]
    logprobs = [one.logprobs for delta in news for one in delta.new_logprobs or []]
    assert len(logprobs) == len(tokens_of(news))
    return [tokens_of(news), logprobs]


PROMPTS: dict[str, tuple[Any, ...]] = {
    "one": (text(1, 3), (1, 1), text(2, 5)),
    "crops": (text(3, 2), (2, 3), text(4, 2)),
    "several": ((1, 1), text(5, 2), (3, 2), (1, 1), text(6, 3)),
    "chunks": (text(7, 50), (4, 3), text(8, 40)),
    "across a step": (text(9, 62), (5, 2), text(10, 4)),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_pictures_own_embeddings_give_its_own_answer(core: EngineCore, name: str):
    request = message(name, PROMPTS[name], logprobs=5)
    # Longer prompts than a step holds are computed in chunks.
    assert report(core, with_own_embeds(request)) == report(tower(), request)
    assert core.compilations == 0


def test_other_embeddings_give_another_answer(core: EngineCore):
    request = message("other", PROMPTS["one"], logprobs=5)
    other = with_own_embeds(message("x", (text(1, 3), (9, 1), text(2, 5)), logprobs=5))
    assert report(core, other) != report(tower(), request)


def test_pictures_and_embeddings_share_a_batch(core: EngineCore):
    requests = []
    for name, parts in PROMPTS.items():
        picture = message(f"{name} picture", parts)
        both = with_own_embeds(message(f"{name} both", parts))
        pictures = [f for n, f in enumerate(picture.mm_features) if n % 2]
        embeds = [f for n, f in enumerate(both.mm_features) if not n % 2]
        features = sorted([*embeds, *pictures], key=lambda one: one.mm_position.offset)
        both = msgspec.structs.replace(both, mm_features=features)
        requests += [picture, with_own_embeds(message(f"{name} embeds", parts)), both]
    for request in requests:
        core.add_request(request)
    news = drain(core)
    for request in requests:
        name, _ = request.request_id.rsplit(" ", 1)
        expected = answer(tower(), message("alone", PROMPTS[name]))
        assert tokens_of(news[request.request_id]) == expected, request.request_id
    assert core.compilations == 0


def test_a_prefix_with_embeddings_is_found(core: EngineCore):
    parts = (text(20, 20), (6, 1), text(21, 20))
    first = report(core, with_own_embeds(message("first", parts, logprobs=5)))
    hits = core.stats().prefix_cache_hits
    again = with_own_embeds(message("again", parts, logprobs=5))
    assert report(core, again) == first
    assert core.stats().prefix_cache_hits > hits + 20
    hits = core.stats().prefix_cache_hits
    report(
        core, with_own_embeds(message("other", (text(20, 20), (7, 1), text(21, 20)), logprobs=5))
    )
    assert core.stats().prefix_cache_hits <= hits + 20, "not beyond other embeddings"


@lru_cache
def forgetful() -> EngineCore:
    """An engine that keeps two units' rows, and no block."""
    mm = MultiModalConfig(enable_mm_embeds=True)
    return make_engine(mm, encoder_cache_size=8, enable_prefix_caching=False)


def test_rows_that_were_evicted_are_written_again():
    core = forgetful()
    requests = [
        with_own_embeds(message(f"{seed}", (text(1, 3), (seed, 2), text(2, 3))))
        for seed in (1, 2, 3)
    ]
    expected = [answer(core, request) for request in requests]
    assert len({tuple(tokens) for tokens in expected}) > 1
    assert [answer(core, request) for request in requests] == expected
    core.recover()
    assert [answer(core, request) for request in requests] == expected


def test_a_dtype_of_16_bits_is_taken(core: EngineCore):
    for number, dtype in enumerate((np.float16, ml_dtypes.bfloat16, np.float64)):
        rows = encode(1, 1).astype(dtype)
        request = with_embeds(message(f"{number}", PROMPTS["one"]), [rows])
        features = [replace(request.mm_features[0], identifier=f"rows of {number}")]
        request = msgspec.structs.replace(request, mm_features=features)
        assert len(answer(core, request)) == 8


# ---- refusals ------------------------------------------------------------------------------------


NAN = np.full((ROWS, WIDTH), np.nan, np.float32)


@pytest.mark.parametrize(
    ("embeds", "words"),
    [
        (np.zeros((ROWS + 1, WIDTH), np.float32), r"have shape \(5, 32\); .* ask for \(4, 32\)"),
        (np.zeros((ROWS, WIDTH + 1), np.float32), r"have shape \(4, 33\); .* ask for \(4, 32\)"),
        (np.zeros((1, ROWS, WIDTH), np.float32), r"have shape \(1, 4, 32\)"),
        (np.zeros((ROWS, WIDTH), np.int32), "dtype int32; give one of float32"),
        (NAN, "values that are NaN"),
        (np.full((ROWS, WIDTH), 1e39, np.float64), "beyond float32"),
        ([np.zeros((ROWS, WIDTH), np.float32)] * 2, r"have shape \(2, 4, 32\)"),
    ],
)
def test_what_cannot_stand_in_the_pool_is_refused(core: EngineCore, embeds: Any, words: str):
    request = with_embeds(message("bad", PROMPTS["one"]), [embeds])
    with pytest.raises(RequestError, match=words) as caught:
        core.add_request(request)
    assert caught.value.status == 400
    assert not core.has_unfinished()


def test_they_are_refused_where_the_operator_does_not_take_them():
    with pytest.raises(RequestError, match="lacks what the model encodes"):
        tower().add_request(with_own_embeds(message("bad", PROMPTS["one"])))


def test_CVE_2026_105755_huge_values_reach_no_other_request(core: EngineCore):
    """A NaN in a block of the KV cache would stay there for whoever has the block next."""
    huge = np.full((ROWS, WIDTH), 3e38, np.float32)
    huge[::2] *= -1
    small = forgetful()
    request = with_embeds(message("huge", PROMPTS["one"], max_tokens=64), [huge])
    expected = answer(core, message("text", (text(30, 50),)))
    for number in range(3):
        small.add_request(msgspec.structs.replace(request, request_id=f"huge {number}"))
        small.add_request(message(f"text {number}", (text(30, 50),)))
        assert tokens_of(drain(small)[f"text {number}"]) == expected
    cache = small._runner._state.kv_cache
    assert all(bool(jnp.isfinite(array).all()) for array in _leaves(cache))


def _leaves(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


# ---- without a tower -----------------------------------------------------------------------------


def test_embeddings_need_no_tower(core: EngineCore):
    mm = MultiModalConfig(limit_mm_per_prompt=NO_TOWER, enable_mm_embeds=True)
    bare = make_engine(mm)
    assert count_programs(bare) < count_programs(core)
    for name, parts in PROMPTS.items():
        request = message(name, parts, logprobs=5)
        assert report(bare, with_own_embeds(request)) == report(tower(), request)
    with pytest.raises(RequestError, match=r"of a tower, which .* started without"):
        bare.add_request(message("picture", PROMPTS["one"]))
    assert bare.compilations == 0


def test_programs_are_there_only_where_they_are_taken(core: EngineCore):
    assert count_programs(core) == count_programs(tower()) + 1


# ---- calls ---------------------------------------------------------------------------------------


def test_items_are_cut_into_calls_of_few_sizes():
    buckets = Buckets.create(max_num_seqs=2, max_num_batched_tokens=64, max_written=3000)
    assert buckets.write == (256, 512, 1024, 2048)
    embeds = WriteCalls(num_rows=9000, width=2, dtype=np.float32)
    sizes = (1, 300, 2048, 100)
    items = [
        EncoderItem(
            identifier=str(number),
            mm_position=PlaceholderRange(offset=0, length=size),
            embeds=np.full((size, 2), number, np.float32),
        )
        for number, size in enumerate(sizes)
    ]
    starts = np.cumsum(sizes) - sizes
    rows = [
        np.arange(start, start + size, dtype=np.int32)[::-1]
        for start, size in zip(starts, sizes, strict=True)
    ]
    pool = np.full((9000, 2), -1, np.float32)
    calls = list(embeds.fill(items, rows, buckets.write))
    assert [len(call.dst_rows) for call in calls] == [2048, 512]
    for call in calls:
        inside = call.dst_rows < len(pool)
        pool[call.dst_rows[inside]] = call.embeds[inside]
    expected = np.repeat(np.arange(len(sizes)), sizes)
    np.testing.assert_array_equal(pool[: sum(sizes), 0], expected)
    assert (pool[sum(sizes) :] == -1).all()


@pytest.mark.parametrize(("most", "sizes"), [(0, ()), (64, (64,)), (300, (256, 300))])
def test_no_call_is_larger_than_a_step(most: int, sizes: tuple[int, ...]):
    sized = Buckets.create(max_num_seqs=2, max_num_batched_tokens=64, max_written=most)
    assert sized.write == sizes
