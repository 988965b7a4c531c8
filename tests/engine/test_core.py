"""The engine over a tiny random Gemma 3: every answer is the one of a dense forward pass alone."""

import logging
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import jax
import msgspec
import numpy as np
import pytest

from mmjax.engine.core import EngineCore
from mmjax.engine.model import resolve_dtype
from mmjax.engine.scheduling import buckets
from mmjax.engine.scheduling.admission import resolve_features
from mmjax.errors import (
    ConfigError,
    MultiModalCacheMissError,
    RequestError,
    RequestValueError,
)
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import (
    TOKENS_PER_IMAGE,
    answer,
    answer_all,
    check_idle,
    dense_greedy,
    dense_logits,
    drain,
    image_feature,
    message,
    text,
    tiny_engine,
    tokens_of,
)


@pytest.fixture(scope="module")
def core() -> EngineCore:
    """Room for four requests at once."""
    return tiny_engine()


@pytest.fixture(scope="module")
def cramped() -> EngineCore:
    """Blocks for hardly more than one request, and an encoder pool of three pictures."""
    return tiny_engine(max_model_len=112, num_blocks=14, encoder_cache_size=12)


@pytest.fixture(autouse=True)
def no_compilation(core: EngineCore, cramped: EngineCore) -> Iterator[None]:
    """After warm-up nothing compiles, whatever a test asks for; and everything returns."""
    yield
    for engine in (core, cramped):
        check_idle(engine)


MIXED: list[tuple[Any, ...]] = [
    ([2],),
    (text(1, 7),),
    (text(2, 100),),
    (text(3, 3), (1, 1), text(4, 5)),
    ((1, 1), text(5, 9)),
    (text(6, 2), (1, 1), text(7, 2), (2, 1), (1, 1), text(8, 3)),
    (text(9, 60), (3, 1), text(10, 20)),
    (text(11, 5), (4, 3), text(12, 5)),
    (text(13, 57), (5, 2), (1, 1), text(14, 1)),
]
"""Text; pictures first, in the middle, at chunk borders, of several crops, the same one twice."""


def requests(prefix: str, **sampling: Any) -> list[EngineCoreRequest]:
    return [message(f"{prefix} {n}", parts, **sampling) for n, parts in enumerate(MIXED)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [dense_greedy(request) for request in requests("oracle")]


# ---- greedy answers ------------------------------------------------------------------------------


def test_answers_depend_on_text_and_picture(expected: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in expected}) == len(MIXED)
    other = (text(3, 3), (9, 1), text(4, 5))
    assert dense_greedy(message("other", other)) != expected[3]


def test_alone(core: EngineCore, expected: list[list[int]]) -> None:
    assert [answer(core, request) for request in requests("alone")] == expected


def test_cut_to_small_steps(core: EngineCore, expected: list[list[int]]) -> None:
    core.reset_prefix_cache()
    num_steps = sum(core._scheduler.step_token_counts)
    assert answer_all(core, requests("whole")) == expected
    num_whole = sum(core._scheduler.step_token_counts) - num_steps
    core.reset_prefix_cache()
    with patch.object(buckets, "STEP_COST", -64):  # whatever that costs
        assert answer_all(core, requests("cut")) == expected
    assert sum(core._scheduler.step_token_counts) - num_steps > 2 * num_whole


# ---- ends ----------------------------------------------------------------------------------------


def test_a_text_ends_at_eos_at_a_stop_id_or_by_length(
    core: EngineCore, expected: list[list[int]]
) -> None:
    place, tokens = next(
        (n, tokens) for n, tokens in enumerate(expected) if tokens.index(tokens[3]) == 3
    )
    cases: list[tuple[dict[str, Any], int, str, int | None]] = [
        ({"eos": [tokens[3]]}, 4, "stop", None),
        ({"eos": [tokens[3]], "ignore_eos": True}, 8, "length", None),
        ({"stop_token_ids": [tokens[3]]}, 4, "stop", tokens[3]),
        ({"max_tokens": 2}, 2, "length", None),
    ]
    for sampling, length, finish_reason, stop_reason in cases:
        core.add_request(message("a", MIXED[place], **sampling))
        news = drain(core)["a"]
        assert tokens_of(news) == tokens[:length]
        assert [delta.finish_reason for delta in news] == [*[None] * (length - 1), finish_reason]
        assert news[-1].stop_reason == stop_reason


def test_the_figures_and_the_words_of_the_log(
    core: EngineCore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = message("told", MIXED[0], max_tokens=4)
    before = core.stats()
    assert len(answer(core, request)) == 4
    caplog.set_level(logging.DEBUG, "mmjax.engine")
    monkeypatch.setattr(logging.getLogger("mmjax"), "propagate", True)
    assert len(answer(core, request)) == 4
    after = core.stats()
    num_prompt = len(request.prompt_token_ids)
    assert after.num_prompt_tokens - before.num_prompt_tokens == 2 * num_prompt
    assert after.num_generation_tokens - before.num_generation_tokens == 8
    assert after.prefix_cache_queries - before.prefix_cache_queries in (0, 2 * num_prompt)
    assert after.prefix_cache_hits >= before.prefix_cache_hits
    assert after.encoder_cache_queries >= after.encoder_cache_hits >= before.encoder_cache_hits
    assert after.time_s > before.time_s
    for words in (
        f"request told waits: {num_prompt} prompt tokens",
        "request told runs",
        "step: 1 requests in StepBucket(num_tokens=",
        "request told ends (length) with 4 tokens",
    ):
        assert words in caplog.text


def test_min_tokens_masks_the_end(core: EngineCore, expected: list[list[int]]) -> None:
    eos = expected[1][0]
    assert answer(core, message("a", MIXED[1], eos=[eos])) == [eos]
    tokens = answer(core, message("a", MIXED[1], eos=[eos], min_tokens=3, max_tokens=6))
    assert len(tokens) >= 3
    assert eos not in tokens[:3]


def test_the_context_length_ends_a_text(core: EngineCore) -> None:
    core.add_request(message("a", [text(1, 120)], max_tokens=None))
    news = drain(core)["a"]
    assert len(tokens_of(news)) == 8
    assert news[-1].finish_reason == "length"


# ---- sampling ------------------------------------------------------------------------------------


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 5},
    {"temperature": 1.5, "seed": 3, "top_p": 0.8},
    {"temperature": 1.0, "seed": 4, "min_p": 0.1},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "seed": -5, "top_p": 0.9, "logprobs": 20},
]


def test_a_seeded_answer_does_not_depend_on_the_batch(
    core: EngineCore, cramped: EngineCore
) -> None:
    batch = [
        message(f"sampled {n}", MIXED[3 + n % 3], **sampling) for n, sampling in enumerate(SAMPLING)
    ]
    alone = [answer(core, request) for request in batch]
    for engine in (core, cramped):
        for request in reversed(batch):
            engine.add_request(request)
        news = drain(engine)
        assert [tokens_of(news[request.request_id]) for request in batch] == alone


def test_answers_differ_by_seed(core: EngineCore) -> None:
    answers = {
        tuple(answer(core, message("a", MIXED[1], temperature=2.0, max_tokens=6, seed=seed)))
        for seed in range(4)
    }
    assert len(answers) > 1


def test_a_sampled_request_brings_its_seed(core: EngineCore) -> None:
    with pytest.raises(RequestError, match="no `seed`"):
        core.add_request(message("a", MIXED[1], temperature=1.0))
    assert not core.has_unfinished()


def test_logprobs_are_those_of_the_dense_model(core: EngineCore) -> None:
    request = message("a", MIXED[5], logprobs=4, max_tokens=3)
    core.add_request(request)
    news = drain(core)["a"]
    token_ids = [*request.prompt_token_ids, *tokens_of(news)]
    logits = dense_logits(token_ids, request.mm_features)
    start = len(request.prompt_token_ids)
    for place, delta in enumerate(news):
        assert delta.new_logprobs is not None
        (entry,) = delta.new_logprobs
        row = logits[start - 1 + place].astype(np.float64)
        expected = row - np.log(np.exp(row).sum())
        assert entry.token_ids[0] == delta.new_token_ids[0]
        assert entry.token_ids[1:] == np.argsort(-row)[:4].tolist()
        assert entry.sampled_rank == 1
        np.testing.assert_allclose(entry.logprobs, expected[entry.token_ids], atol=1e-4)


# ---- refusals and aborts -------------------------------------------------------------------------


def broken_feature(**changes: Any) -> MultiModalFeatureSpec:
    feature = image_feature(1, 0)
    for name, value in changes.items():
        setattr(feature, name, value)
    return feature


def with_feature(feature: MultiModalFeatureSpec) -> EngineCoreRequest:
    good = message("bad", ((1, 1), [5]))
    return EngineCoreRequest(
        request_id="bad",
        prompt_token_ids=good.prompt_token_ids,
        mm_features=[feature],
        sampling_params=good.sampling_params,
    )


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        (broken_feature(data=MultiModalKwargsItem()), "lacks what the model encodes"),
        (
            broken_feature(data=image_feature(1, 0, units=2).data),
            "has 8 embeddings, and placeholders for 4",
        ),
    ],
    ids=["no pixels", "too many units"],
)
def test_a_bad_item_fails_alone(
    core: EngineCore, feature: MultiModalFeatureSpec, words: str, expected: list[list[int]]
) -> None:
    good = message("good", MIXED[3])
    core.add_request(good)
    news = core.step()
    with pytest.raises(RequestError, match=words) as caught:
        core.add_request(with_feature(feature))
    assert caught.value.param == "multi_modal_data"
    assert tokens_of([*news, *drain(core)["good"]]) == expected[3]


def test_what_can_never_fit_is_refused(core: EngineCore, cramped: EngineCore) -> None:
    with pytest.raises(RequestValueError, match="128 tokens"):
        core.add_request(message("a", [text(1, 128)]))
    with pytest.raises(RequestValueError, match="112 tokens"):
        cramped.add_request(message("a", [text(1, 112)]))
    with pytest.raises(RequestValueError, match="16 embeddings"):
        cramped.add_request(message("a", [(1, 4)]))


# ---- items that P1 holds -------------------------------------------------------------------------


@pytest.fixture
def forgetful(core: EngineCore) -> EngineCore:
    """The engine, holding no tensors of earlier requests."""
    assert core._receiver_cache is not None
    core._receiver_cache.clear_cache()
    return core


def sent(place: int, *, with_data: set[int]) -> EngineCoreRequest:
    """Build a request of which only some items carry tensors."""
    request = message("sent", MIXED[place])
    for number, feature in enumerate(request.mm_features):
        feature.data = feature.data if number in with_data else None
    return request


def test_tensors_come_once(forgetful: EngineCore, expected: list[list[int]]) -> None:
    assert answer(forgetful, sent(5, with_data={0, 1})) == expected[5], "the third is the first"
    assert answer(forgetful, sent(5, with_data=set())) == expected[5]
    assert answer(forgetful, sent(8, with_data={0})) == expected[8]


def test_a_miss_names_all_that_lack_and_keeps_the_rest(
    forgetful: EngineCore, expected: list[list[int]]
) -> None:
    with pytest.raises(MultiModalCacheMissError) as caught:
        forgetful.add_request(sent(5, with_data=set()))
    assert caught.value.mm_hashes == ["picture-1-1", "picture-2-1"]
    with pytest.raises(MultiModalCacheMissError) as caught:
        forgetful.add_request(sent(5, with_data={1}))
    assert caught.value.mm_hashes == ["picture-1-1"]
    assert not forgetful.has_unfinished()
    assert answer(forgetful, sent(5, with_data={0})) == expected[5]


def test_a_refused_request_leaves_its_tensors(
    forgetful: EngineCore, expected: list[list[int]]
) -> None:
    request = sent(3, with_data={0})
    changes: list[dict[str, Any]] = [
        {"prompt_token_ids": request.prompt_token_ids * 20},
        {"prompt_token_ids": []},
        {"lora_name": "poet"},
        {"encoder_prompt_token_ids": [2]},
    ]
    for change in changes:
        assert forgetful._receiver_cache is not None
        forgetful._receiver_cache.clear_cache()
        with pytest.raises(RequestValueError):
            forgetful.add_request(msgspec.structs.replace(sent(3, with_data={0}), **change))
        assert answer(forgetful, sent(3, with_data=set())) == expected[3]


def test_without_a_cache_an_item_may_stand_twice(expected: list[list[int]]) -> None:
    features = sent(5, with_data={0, 1}).mm_features
    resolved = resolve_features(features, None)
    assert resolved[2].data is resolved[0].data is not None
    with pytest.raises(MultiModalCacheMissError):
        resolve_features(sent(5, with_data={1}).mm_features, None)


def test_places_must_be_sorted_and_apart(core: EngineCore) -> None:
    good = message("bad", MIXED[5])
    backwards = msgspec.structs.replace(good, mm_features=good.mm_features[::-1])
    with pytest.raises(RequestError, match="sorted"):
        core.add_request(backwards)
    twice = msgspec.structs.replace(good, mm_features=good.mm_features[:1] * 2)
    with pytest.raises(RequestError, match="two items"):
        core.add_request(twice)
    outside = msgspec.structs.replace(good, prompt_token_ids=good.prompt_token_ids[:10])
    with pytest.raises(RequestError, match="must lie in the prompt"):
        core.add_request(outside)
    assert not core.has_unfinished()


def test_recovery_begins_all_again(core: EngineCore, expected: list[list[int]]) -> None:
    batch = requests("again")
    for request in batch:
        core.add_request(request)
    core.step()
    assert core.recover() == []
    news = drain(core)
    assert [tokens_of(news[request.request_id]) for request in batch] == expected


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_and_is_given_up_leaves_nothing_to_be_found(
    core: EngineCore,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    """As `LLM` does it, which forgets its requests: nobody recovers."""

    def fail(output: Any) -> Any:
        raise error

    core.reset_prefix_cache()
    for number, parts in enumerate(MIXED):
        core.add_request(message(f"given up {number}", parts))
    monkeypatch.setattr(core._runner, "dispatch", fail)
    with pytest.raises(error):
        core.step()
    monkeypatch.undo()
    core.abort([f"given up {number}" for number in range(len(MIXED))])
    batch = requests("next")
    assert answer_all(core, batch) == expected


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_cannot_be_read_before_a_change_is_computed_again(
    core: EngineCore,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    """What it has sampled is unknown, and must not be taken for the tokens of the next."""

    def fail(in_flight: Any) -> Any:
        raise error

    batch = requests("drained")
    for request in batch:
        core.add_request(request)
    core.step()
    monkeypatch.setattr(core._runner, "read", fail)
    if error is RuntimeError:
        assert core.drain() == []
    else:
        with pytest.raises(error):
            core.drain()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="interrupted" if error is not RuntimeError else None):
        core.step()
    assert core.recover() == []
    news = drain(core)
    assert [tokens_of(news[request.request_id]) for request in batch] == expected


def test_recovery_gives_its_memory_back_before_it_takes_new(
    core: EngineCore, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KV cache fills the device: while the old one lives, there is no room for another."""
    answer(core, message("first", MIXED[0]))  # what fails below is called, not compiled
    runner = core._runner
    old = jax.tree.leaves((runner._state, runner._pool))
    shapes = {(leaf.shape, leaf.dtype) for leaf in old}
    make_arrays = runner._programs.make_arrays
    alive: list[int] = []

    def count_and_make(num_blocks: int) -> Any:
        live = (leaf for leaf in jax.live_arrays() if (leaf.shape, leaf.dtype) in shapes)
        alive.append(sum(leaf.nbytes for leaf in live) - others)
        return make_arrays(num_blocks)

    # Other tests' engines hold arrays of these shapes, too.
    others = sum(
        leaf.nbytes
        for leaf in jax.live_arrays()
        if (leaf.shape, leaf.dtype) in shapes and not any(leaf is one for one in old)
    )
    monkeypatch.setattr(runner._programs, "make_arrays", count_and_make)

    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("the device says no")

    core.add_request(message("lost", MIXED[0]))
    monkeypatch.setattr(runner, "_call_sample", fail)
    try:
        core.step()
    except RuntimeError:
        # As the loop does it: the error, and with it the frames of the step, are still there.
        core.recover()
    monkeypatch.undo()
    assert alive == [0]
    assert answer(core, message("a", MIXED[5])) == expected[5]


# ---- steps that hold a run of embeddings and no more ---------------------------------------------


@pytest.fixture(scope="module")
def narrow() -> EngineCore:
    """A step as long as a crop's embeddings: the marks around them go in other steps."""
    return tiny_engine(
        max_num_batched_tokens=TOKENS_PER_IMAGE,
        max_num_encoder_input_tokens=3 * TOKENS_PER_IMAGE,
        encoder_cache_size=3 * TOKENS_PER_IMAGE,
    )


def test_a_picture_needs_a_step_for_its_embeddings_alone(
    narrow: EngineCore, expected: list[list[int]]
) -> None:
    assert [answer(narrow, request) for request in requests("narrow")] == expected
    for request in (batch := requests("together")):
        narrow.add_request(request)
    news = drain(narrow)
    assert [tokens_of(news[request.request_id]) for request in batch] == expected


def test_a_step_that_holds_no_picture_ends_the_start() -> None:
    with pytest.raises(ConfigError, match=r"takes 4 tokens.*`--max-num-batched-tokens` is 3"):
        tiny_engine(max_num_seqs=2, max_num_batched_tokens=TOKENS_PER_IMAGE - 1)


# ---- the start -----------------------------------------------------------------------------------


def test_the_start_is_itemised(core: EngineCore) -> None:
    items = ["open_devices", "load_weights", "measure", "allocate", "compile", "warm_up"]
    assert list(core.startup_seconds) == items
    assert core.num_programs <= 31
    assert core.num_kv_blocks == 4 * 128 // 8


def test_settings_that_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="below `max_num_seqs`"):
        tiny_engine(max_num_seqs=8, max_num_batched_tokens=4)
    with pytest.raises(ConfigError, match=r"lower `--max-model-len` to 120\b"):
        tiny_engine(num_blocks=15)


@pytest.mark.parametrize(
    ("name", "platform", "stored", "prefers_bfloat16", "expected"),
    [
        ("auto", "cpu", "bfloat16", True, "bfloat16"),
        ("auto", "cpu", "float16", True, "bfloat16"),
        ("auto", "cpu", "float32", True, "float32"),
        ("auto", "cpu", None, True, "float32"),
        ("auto", "cpu", "bfloat16", False, "float32"),
        ("auto", "gpu", "float32", False, "bfloat16"),
        ("bfloat16", "cpu", "float32", False, "bfloat16"),
        ("float32", "gpu", "bfloat16", True, "float32"),
    ],
)
def test_the_dtype_is_chosen_by_platform_and_checkpoint(
    name: str, platform: str, stored: str | None, prefers_bfloat16: bool, expected: str
) -> None:
    chosen = resolve_dtype(name, platform, stored, prefers_bfloat16=prefers_bfloat16)
    assert chosen.name == expected


def test_pictures_of_the_kit_are_what_they_seem() -> None:
    assert image_feature(1, 0, units=2).mm_position.get_num_embeds() == 2 * TOKENS_PER_IMAGE
