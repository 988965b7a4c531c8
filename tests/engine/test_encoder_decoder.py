"""The engine over a tiny random encoder-decoder: every answer is the one of a dense pass alone."""

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from mmjax.engine.core import EngineCore
from mmjax.errors import ConfigError, RequestError
from mmjax.layers.attention.kv_cache import InterleavedCache
from mmjax.processing.tensors.inputs import MultiModalKwargsItem
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import abort_every_other, answer, drain, tokens_of
from tests.engine.tiny_encoder_decoder import (
    BLOCK_SIZE,
    HEAD_DIM,
    MAX_ENCODER_LEN,
    MAX_MODEL_LEN,
    NUM_HEADS,
    OWN_HEADS,
    VOCAB_SIZE,
    dense_greedy,
    message,
    picture_feature,
    tiny_encoder_decoder,
)

ENCODER_BLOCKS = -(-MAX_ENCODER_LEN // BLOCK_SIZE)
LEAST_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE + ENCODER_BLOCKS


@pytest.fixture(scope="module")
def core() -> EngineCore:
    """Room for four requests at once."""
    return tiny_encoder_decoder(max_num_encoder_input_tokens=48, encoder_cache_size=84)


@pytest.fixture(scope="module")
def cramped() -> EngineCore:
    """Blocks for one longest request, and the least encoder pool."""
    return tiny_encoder_decoder(num_blocks=LEAST_BLOCKS, encoder_cache_size=1)


@pytest.fixture(autouse=True)
def all_returns(core: EngineCore, cramped: EngineCore) -> Iterator[None]:
    """After warm-up nothing compiles, whatever a test asks for; and everything returns."""
    yield
    for engine in (core, cramped):
        assert engine.compilations == 0
        assert not engine.has_unfinished()
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
        assert engine.encoder_usage() == 0
        assert engine.stats().prefix_cache_hits == 0


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 90, length).tolist()


MIXED: list[dict[str, Any]] = [
    {"encoder_ids": [2], "decoder_ids": [2]},
    {"encoder_ids": text(1, 7), "decoder_ids": [2]},
    {"encoder_ids": text(2, 7), "decoder_ids": [2]},
    {"encoder_ids": text(2, 7), "decoder_ids": [2], "picture": 1},
    {"encoder_ids": text(2, 7), "decoder_ids": [2], "picture": 2},
    {"encoder_ids": text(3, 8), "decoder_ids": text(4, 16), "picture": 2},
    {"encoder_ids": text(5, MAX_ENCODER_LEN), "decoder_ids": text(6, 40), "picture": 3},
    {"encoder_ids": text(7, MAX_ENCODER_LEN), "decoder_ids": text(6, 40), "picture": 3},
    {"encoder_ids": text(8, 16), "decoder_ids": text(9, 56)},
    {"encoder_ids": text(10, 19), "decoder_ids": text(11, 17), "picture": 4},
]
"""Encoders of every kind of length; equal decoder prompts behind them, of one token and of several
chunks; one text with another picture, one picture with another text."""


def requests(prefix: str, **sampling: Any) -> list[EngineCoreRequest]:
    return [message(f"{prefix} {n}", **parts, **sampling) for n, parts in enumerate(MIXED)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [dense_greedy(request) for request in requests("oracle")]


# ---- greedy answers ------------------------------------------------------------------------------


def test_answers_depend_on_all_that_is_read(expected: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in expected}) == len(MIXED)


def test_alone(core: EngineCore, expected: list[list[int]]) -> None:
    assert [answer(core, request) for request in requests("alone")] == expected


def test_an_id_that_comes_again_has_another_encoder(
    core: EngineCore, expected: list[list[int]]
) -> None:
    for parts, tokens in zip(MIXED, expected, strict=True):
        assert answer(core, message("a", **parts)) == tokens


def test_together(core: EngineCore, expected: list[list[int]]) -> None:
    batch = requests("together")
    for request in batch:
        core.add_request(request)
    news = drain(core)
    assert [tokens_of(news[request.request_id]) for request in batch] == expected
    assert {delta.num_cached_tokens for deltas in news.values() for delta in deltas} == {0}


def test_arriving_one_by_one_in_another_order(core: EngineCore, expected: list[list[int]]) -> None:
    batch = requests("arriving")
    news: dict[str, list[int]] = {request.request_id: [] for request in batch}
    for place in random.Random(3).sample(range(len(batch)), len(batch)):
        core.add_request(batch[place])
        for delta in core.step():
            news[delta.request_id] += delta.new_token_ids
    for request_id, deltas in drain(core).items():
        news[request_id] += tokens_of(deltas)
    assert list(news.values()) == expected


def test_under_preemption(cramped: EngineCore) -> None:
    """Short prompts and long answers: they begin together, and grow out of the cache."""
    batch = [
        message(f"{n}", text(n, 5 + n), text(20 + n, 3), picture=n, max_tokens=40) for n in range(6)
    ]
    for request in batch:
        cramped.add_request(request)
    before = cramped.num_preemptions
    news = drain(cramped)
    for request in batch:
        assert tokens_of(news[request.request_id]) == dense_greedy(request)
    assert cramped.num_preemptions > before + 3


def test_cross_attention_may_have_heads_of_its_own() -> None:
    """They are cached in entries of their own, whose values are narrower than their keys."""
    engine = tiny_encoder_decoder(heads=OWN_HEADS, num_blocks=LEAST_BLOCKS, encoder_cache_size=21)
    assert engine.num_kv_blocks == LEAST_BLOCKS
    assert {(c.num_kv_heads, c.value_dim) for c in engine._runner._state.kv_cache} == {
        (NUM_HEADS, HEAD_DIM),
        (OWN_HEADS.num_kv, OWN_HEADS.value),
    }
    batch = requests("own")
    expected = [dense_greedy(request, OWN_HEADS) for request in batch]
    for request in batch:
        engine.add_request(request)
    news = drain(engine)
    assert [tokens_of(news[request.request_id]) for request in batch] == expected
    assert len({tuple(answer) for answer in expected}) >= len(batch) - 1
    assert engine.compilations == 0


def test_a_step_is_read_at_once_or_later(expected: list[list[int]]) -> None:
    engine = tiny_encoder_decoder(async_scheduling=False, max_num_seqs=2)
    batch = requests("at once")
    for request in batch:
        engine.add_request(request)
    news = drain(engine)
    assert [tokens_of(news[request.request_id]) for request in batch] == expected


def test_over_the_layout_of_a_tpu(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    """Both tables are of blocks that lie as the kernel wants them; our walk reads the second."""
    monkeypatch.setattr(
        "mmjax.layers.attention.api.choose_backend", lambda platform, **options: "ragged"
    )
    engine = tiny_encoder_decoder()
    assert isinstance(engine._runner._state.kv_cache[0], InterleavedCache)
    batch = requests("interleaved")
    for request in batch:
        engine.add_request(request)
    news = drain(engine)
    assert [tokens_of(news[request.request_id]) for request in batch] == expected
    assert engine.compilations == 0


def test_a_seeded_answer_does_not_depend_on_the_batch(
    core: EngineCore, cramped: EngineCore
) -> None:
    batch = requests("sampled", temperature=1.0, seed=5, top_k=9)
    alone = [answer(core, request) for request in batch]
    for engine in (core, cramped):
        for request in reversed(batch):
            engine.add_request(request)
        news = drain(engine)
        assert [tokens_of(news[request.request_id]) for request in batch] == alone


def test_an_image_is_encoded_once_for_several_prompts(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, calls = core._runner, []
    encode = runner._run_encode
    monkeypatch.setattr(runner, "_run_encode", lambda call: (calls.append(call), encode(call)))
    batch = [message(f"{n}", text(n, 9), [2], picture=71) for n in range(6)]
    for request in batch[:3]:
        core.add_request(request)
    news = drain(core)
    assert [tokens_of(news[request.request_id]) for request in batch[:3]] == [
        dense_greedy(request) for request in batch[:3]
    ]
    assert len(calls) == 1
    for request in batch[3:]:
        assert answer(core, request) == dense_greedy(request)
    assert len(calls) == 1
    assert answer(core, message("other", text(1, 9), [2], picture=72))
    assert len(calls) == 2


# ---- refusals, aborts, failures ------------------------------------------------------------------


def test_an_aborted_request_leaves_the_others_alone(
    core: EngineCore, cramped: EngineCore, expected: list[list[int]]
) -> None:
    for engine, num_steps in [(engine, n) for engine in (core, cramped) for n in range(6)]:
        batch = requests(f"abort after {num_steps}")
        assert abort_every_other(engine, batch, num_steps) == expected[1::2]


def test_recovery_begins_all_again(core: EngineCore, expected: list[list[int]]) -> None:
    batch = requests("again")
    for request in batch:
        core.add_request(request)
    core.step()
    assert core.recover() == []
    news = drain(core)
    assert [tokens_of(news[request.request_id]) for request in batch] == expected


def with_picture(**changes: Any) -> EngineCoreRequest:
    feature = picture_feature(1)
    for name, value in changes.items():
        setattr(feature, name, value)
    return msgspec.structs.replace(message("bad", text(1, 3), [2]), mm_features=[feature])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (message("bad", None, [2]), "no encoder's prompt"),
        (message("bad", [], [2]), "encoder's prompt is empty"),
        (message("bad", text(1, MAX_ENCODER_LEN + 1), [2]), "21 tokens.* reads 20"),
        (message("bad", [VOCAB_SIZE], [2]), "token id 96"),
        (message("bad", [2], [VOCAB_SIZE]), "token id 96"),
        (message("bad", [2], text(1, MAX_MODEL_LEN)), "64 tokens"),
        (with_picture(), "must lie in the prompt"),
    ],
    ids=["no prompt", "empty", "too long", "unknown", "unknown to decode", "context", "outside"],
)
def test_a_bad_request_fails_alone(
    core: EngineCore, request_: EngineCoreRequest, words: str, expected: list[list[int]]
) -> None:
    core.add_request(message("good", **MIXED[3]))
    news = core.step()
    with pytest.raises(RequestError, match=words):
        core.add_request(request_)
    assert tokens_of([*news, *drain(core)["good"]]) == expected[3]


def test_an_item_that_lacks_what_the_encoder_reads_is_refused(core: EngineCore) -> None:
    broken = with_picture(data=MultiModalKwargsItem(), identifier="broken", mm_hash="broken")
    broken = msgspec.structs.replace(broken, encoder_prompt_token_ids=text(1, 7))
    with pytest.raises(RequestError, match="lacks what the model encodes"):
        core.add_request(broken)


# ---- the start -----------------------------------------------------------------------------------


def test_memory_counts_the_blocks_of_encoders(core: EngineCore, cramped: EngineCore) -> None:
    assert core.num_kv_blocks == 4 * LEAST_BLOCKS
    assert cramped.num_kv_blocks == LEAST_BLOCKS
    words = rf"encoder {MAX_ENCODER_LEN}\).*lower `--max-model-len` to {MAX_MODEL_LEN - BLOCK_SIZE}"
    with pytest.raises(ConfigError, match=words):
        tiny_encoder_decoder(num_blocks=LEAST_BLOCKS - 1)


def test_the_longest_request_runs_alone(cramped: EngineCore) -> None:
    request = message("a", text(1, MAX_ENCODER_LEN), text(2, 30), max_tokens=34)
    assert answer(cramped, request) == dense_greedy(request)


# ---- random workloads ----------------------------------------------------------------------------


def random_request(rng: random.Random, name: str) -> EngineCoreRequest:
    encoder_ids = text(rng.randrange(1000), rng.randint(4, MAX_ENCODER_LEN))
    decoder_ids = text(rng.randrange(4), rng.choice([1, 1, 3, 17, 40]))
    picture = rng.choice([None, 1, 2, 3])
    return message(name, encoder_ids, decoder_ids, picture=picture, max_tokens=rng.randint(1, 20))


def test_every_answer_of_a_random_workload_is_the_one_it_gets_alone(
    core: EngineCore, cramped: EngineCore
) -> None:
    rng = random.Random(0)
    batch = [random_request(rng, f"{n}") for n in range(60)]
    expected = {request.request_id: dense_greedy(request) for request in batch}
    for engine in (core, cramped):
        news: dict[str, list[int]] = {}
        to_come = list(batch)
        while to_come or engine.has_unfinished():
            while to_come and rng.random() < 0.5:
                engine.add_request(to_come.pop())
            for delta in engine.step():
                news.setdefault(delta.request_id, []).extend(delta.new_token_ids)
        assert news == expected
