"""The engine over a tiny random encoder-decoder: every answer is the one of a dense pass alone."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from mmjax.engine.core import EngineCore
from mmjax.errors import ConfigError, RequestError
from mmjax.layers.attention.kv_cache import InterleavedCache, TransposedCache
from mmjax.processing.tensors.inputs import MultiModalKwargsItem
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import answer, answer_all, check_idle, drain, text, tokens_of
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
        check_idle(engine)
        assert engine.stats().prefix_cache_hits == 0


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


def test_cross_attention_may_have_heads_of_its_own() -> None:
    """They are cached in entries of their own, whose values are narrower than their keys."""
    engine = tiny_encoder_decoder(heads=OWN_HEADS, num_blocks=LEAST_BLOCKS, encoder_cache_size=21)
    assert engine.num_kv_blocks == LEAST_BLOCKS
    caches = engine._runner._state.kv_cache
    assert {(c.num_kv_heads, c.value_dim) for c in caches if isinstance(c, TransposedCache)} == {
        (NUM_HEADS, HEAD_DIM),
        (OWN_HEADS.num_kv, OWN_HEADS.value),
    }
    batch = requests("own")
    expected = [dense_greedy(request, OWN_HEADS) for request in batch]
    assert answer_all(engine, batch) == expected
    assert len({tuple(answer) for answer in expected}) >= len(batch) - 1
    assert engine.compilations == 0


@pytest.mark.slow
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
    assert answer_all(engine, batch) == expected
    assert engine.compilations == 0


# ---- refusals, aborts, failures ------------------------------------------------------------------


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
