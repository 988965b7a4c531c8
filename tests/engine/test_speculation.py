"""Guessed tokens change what a step computes, and not a bit of an answer."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax import LLM, SamplingParams
from mmjax.config.engine_config import Precompile, SchedulerConfig
from mmjax.config.speculative_config import SpeculativeConfig
from mmjax.engine.core import EngineCore
from mmjax.engine.scheduling.speculation import (
    MAX_PLACES,
    LookupForecast,
    NgramProposer,
    Speculation,
)
from mmjax.errors import ConfigError
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.bench import choose_max_model_len
from tests.engine.grammars import prompt
from tests.engine.guesses import NGRAM, make_eager
from tests.engine.test_mixed_fields import draw_request, serve, start
from tests.engine.tiny import answer, drain, drain_through_failures, message, tiny_engine, tokens_of
from tests.families import TINY_FAMILIES, served_model
from tests.families.tiny import TinyModel
from tests.kit import draw
from tests.models.served import count_least_blocks

pytestmark = pytest.mark.as_served

NUM_REQUESTS = 24

# ---- who guesses what ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_ids", "guess"),
    [
        ([7, 8, 9, 5, 7, 8], [9, 5, 7, 8]),
        ([7, 8, 9, 7, 8, 4, 7, 8], [4, 7, 8, 4]),  # the last time
        ([1, 7, 8, 9, 2, 7, 8, 4, 1, 7, 8], [9, 2, 7, 8]),  # where more agree
        ([4, 4, 4], [4, 4, 4, 4]),
        ([5, 8, 6, 8], []),  # one token alone is no n-gram of two
        ([8, 8], []),
        ([8], []),
    ],
)
def test_what_came_behind_the_last_tokens_is_guessed(token_ids: Any, guess: list[int]) -> None:
    found = NgramProposer(longest=4, shortest=2).propose(np.array(token_ids, np.int32), 4)
    assert found == guess


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=MAX_PLACES),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_the_longest_agreement_is_found(tokens: list[int], one: int, two: int, most: int) -> None:
    shortest, longest = sorted((one, two))
    expected: list[int] = []
    for size in range(longest, shortest - 1, -1):
        last = tokens[-size:]
        ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == last]
        if len(tokens) > size and ends:
            whole = list(tokens)
            for place in range(ends[-1], ends[-1] + most):
                expected.append(whole[place])
                whole.append(whole[place])
            break
    # Tokens are copied one by one: those that are guessed, too.
    found = NgramProposer(longest, shortest).propose(np.array(tokens, np.int32), most)
    assert found == expected
    proposer = NgramProposer(longest, shortest)
    for number in range(1, len(tokens) + 1):
        found = proposer.propose(np.array(tokens[:number], np.int32), most)
    assert found == expected, "not the same as its tokens come one by one"


def forecast_of(token_ids: list[int], most: int = 4) -> LookupForecast:
    """Return a forecast that was told of the tokens one by one."""
    forecast = LookupForecast(NgramProposer(4, 2), most)
    for number in range(1, len(token_ids) + 1):
        forecast.note(np.array(token_ids[:number], np.int32), 0, 1)
    return forecast


def test_what_repeats_is_trusted_and_what_does_not_is_not() -> None:
    repeating = [3, 4, 5, 6] * 6
    assert forecast_of(repeating).chance > 0.8
    assert forecast_of(repeating[:6]).chance == 0.0, "nothing was right yet"
    assert forecast_of([*repeating, 9, 8]).chance == 0.0, "nothing to guess"
    broken = [*repeating, 3, 4, 50, 5, 6, 51, 3, 4, 52, 5, 6, 53, 3, 4]
    assert 0 < forecast_of(broken).chance < 0.3
    assert forecast_of([*range(60)]).chance == 0.0


def test_looks_that_find_nothing_are_spaced_and_a_repeat_is_found_soon() -> None:
    looks: list[int] = []

    class Counted(NgramProposer):
        def propose(self, token_ids: np.ndarray, most: int) -> list[int]:
            looks.append(len(token_ids))
            return super().propose(token_ids, most)

    forecast, tokens = LookupForecast(Counted(4, 2), 4), [*range(40), *range(10)]
    for number in range(1, len(tokens) + 1):
        forecast.note(np.array(tokens[:number], np.int32), 0, 1)
    assert looks[:5] == [1, 3, 6, 10, 14]
    assert len(looks) < 20
    assert forecast.chance > 0, "10 tokens stood before"


def test_a_long_answer_without_repetition_is_hardly_guessed() -> None:
    """Pairs repeat by chance: a wrong guess takes a row of the device's time, or some."""
    rng, decides = random.Random(1), Speculation(SpeculativeConfig.parse(NGRAM))  # type: ignore[arg-type]
    forecast, tokens, num_rows = LookupForecast(NgramProposer(4, 2), 4), np.zeros(0, np.int32), 0
    for _ in range(2000):
        tokens = np.append(tokens, np.int32(rng.randrange(30)))
        num_rows += decides.share_out([forecast.chance], 15).total()
        forecast.note(tokens, 0, 1)
    assert num_rows < 60


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=20),
    st.integers(0, 16),
    st.lists(st.tuples(st.floats(0, 0.1), st.floats(0.001, 0.1)), max_size=40),
)
def test_rows_go_to_the_likeliest(chances: list[float], num_rows: int, steps: Any) -> None:
    decides = Speculation(SpeculativeConfig.parse(NGRAM))  # type: ignore[arg-type]
    for host_s, step_s in steps:
        decides.note_step(len(chances), step_s, host_s)
    shares = decides.share_out(chances, num_rows)
    assert shares.total() <= num_rows
    assert all(0 < number <= 4 and chances[place] > 0 for place, number in shares.items())
    for place, number in shares.items():
        better = [other for other, one in enumerate(chances) if one > chances[place]]
        assert all(shares[other] >= min(number, 4) for other in better)


def test_it_must_pay() -> None:
    decides = Speculation(SpeculativeConfig.parse(NGRAM))  # type: ignore[arg-type]
    assert decides.share_out([0.9], 15) == {0: 4}
    assert decides.share_out([0.9], 2) == {0: 2}
    assert decides.share_out([0.1], 15) == {}, "too rarely right"
    assert decides.share_out([0.9, *[0.0] * 15], 15) == {}, "one of sixteen is not waited for"
    for _ in range(200):
        decides.note_step(1, 0.1, host_s=0.09)
    assert decides.share_out([0.5], 15) == {}, "the host takes most of a step"
    assert decides.share_out([0.9], 15) == {0: 4}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"heads": "small"}, "a field `heads`, which mmjax does not know; known are `method`"),
        ({"model": "small"}, "a field `model`, which is of the method 'draft_model', and 'ngram'"),
        (
            {"method": "eagle"},
            "'eagle' as its `method`; give 'ngram', 'draft_model' or 'eagle3' with",
        ),
        ({"method": None}, "None as its `method`"),
        ({"num_speculative_tokens": 16}, "16 as `num_speculative_tokens`; give an integer from 1"),
        ({"num_speculative_tokens": True}, "True as `num_speculative_tokens`"),
        ({"num_speculative_tokens": None}, "lacks `num_speculative_tokens`"),
        ({"prompt_lookup_max": 1}, "2 as `prompt_lookup_min`, above `prompt_lookup_max`, 1"),
        ({"prompt_lookup_min": 0}, "0 as `prompt_lookup_min`"),
    ],
)
def test_a_wrong_field_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SchedulerConfig(speculative_config={**NGRAM, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": None}, "None as `model`; give the directory or hub id of a smaller model"),
        ({"model": 3}, "3 as `model`"),
        ({"revision": ""}, "'' as `revision`; give a branch, tag or commit"),
        ({"num_speculative_tokens": None}, "lacks `num_speculative_tokens`"),
        ({"prompt_lookup_max": 2}, "`prompt_lookup_max`, which is of the method 'ngram', and"),
    ],
)
def test_a_wrong_field_of_a_draft_model_is_refused_by_name(
    changes: dict[str, Any], said: str
) -> None:
    given = {"method": "draft_model", "model": "small", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=said):
        SchedulerConfig(speculative_config={**given, **changes})


def test_a_model_without_a_method_is_a_draft_model() -> None:
    config = SpeculativeConfig.parse({"model": "small", "num_speculative_tokens": 2})
    assert config is not None
    assert (config.method, config.model) == ("draft_model", "small")


def test_sizes_that_are_not_given_are_those_of_vllm() -> None:
    def sizes(**given: int) -> tuple[int, int]:
        config = SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 3, **given})
        assert config is not None
        return config.prompt_lookup_min, config.prompt_lookup_max

    assert sizes() == (5, 5)
    assert sizes(prompt_lookup_max=3) == (3, 3)
    assert sizes(prompt_lookup_min=2) == (2, 2)
    assert SchedulerConfig().speculation is None


# ---- answers -------------------------------------------------------------------------------------


class Pair:
    """An engine that serves one request at a time and guesses nothing, and a cramped one."""

    def __init__(self, model: TinyModel) -> None:
        self.model = model
        largest = max(*model.family.max_embeds.values(), model.paged.max_encoder_len)
        sizes: dict[str, Any] = {
            "encoder_cache_size": 4 * largest,
            "max_num_encoder_input_tokens": 2 * largest,
        }
        least = count_least_blocks(model, choose_max_model_len(model))
        whole = max(64, model.family.longest_run)
        self.plain = start(model, max_num_batched_tokens=whole, max_num_seqs=1, **sizes)
        self.guessing = start(
            model,
            max_num_seqs=4,
            # Beside a chunk of a long prompt there is no room for guesses.
            max_num_batched_tokens=max(21, model.family.longest_run, largest // 8),
            num_blocks=least * 5 // 4,
            scheduling_policy="priority",
            speculative_config=NGRAM,
            **sizes,
        )

    def find_differences(self, seed: int) -> Iterator[tuple[EngineCoreRequest, Any, Any]]:
        """Serve a batch with guesses; yield the requests with another answer than without."""
        rng = random.Random(seed)
        eager = make_eager(self.guessing, rng)
        batch = [draw_request(rng, number, self.model) for number in range(NUM_REQUESTS)]
        alone = {}
        for request in batch:
            alone |= serve(self.plain, [request], rng)
            eager.answers.learn(request, alone[request.request_id].token_ids)
        found = serve(self.guessing, batch, rng)
        assert eager.num_draft_tokens > eager.num_accepted_tokens > 10
        for request in batch:
            if found[request.request_id] != alone[request.request_id]:
                yield request, found[request.request_id], alone[request.request_id]


# By default the same requests are in `test_draft.py`, of this model with a draft model, and lookups
# are below; the layers that guess, of three more families, are in their own files.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_answer_is_the_one_without_guesses() -> None:
    """Of sliding windows, and images that see each other both ways."""
    pair = Pair(served_model("gemma3"))
    assert [*pair.find_differences(0)] == []
    assert pair.guessing.num_preemptions > 0
    assert pair.guessing.stats().prefix_cache_hits > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_every_answer_of_a_family_is_the_one_without_guesses(name: str) -> None:
    """Of every family, encoder-decoders and experts among them: half an hour in all."""
    model = served_model(name)
    pair = Pair(model)
    for seed in range(6):
        assert [*pair.find_differences(seed)] == [], f"{seed=}"
    # Answers of 24 tokens do not grow out of a pool for prompts of a thousand (DeepSeek-OCR).
    has_long_prompts = max(model.family.max_embeds.values(), default=0) > 100
    assert pair.guessing.num_preemptions > 0 or has_long_prompts


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl_moe"])
def test_a_wide_model_has_the_same_bits_with_guesses(name: str) -> None:
    """Its products are the kernels', where there are any: a row's bits do not depend on the rows.

    One request at a time: a token beside a prompt's is another kind of product
    (docs/determinism.md).
    """
    family = TINY_FAMILIES[name]
    model = TinyModel(family, **family.resize(1024, 64, 16))
    plain = start(model, max_num_seqs=1, max_num_batched_tokens=160, enable_prefix_caching=False)
    guessing = start(
        model,
        max_num_seqs=1,
        max_num_batched_tokens=160,
        enable_prefix_caching=False,
        speculative_config=NGRAM,
    )
    rng = random.Random(5)
    eager = make_eager(guessing, rng)
    for number in range(60):
        request = draw_request(rng, number, model)
        params = msgspec.structs.replace(request.sampling_params, logprobs=3)
        request = msgspec.structs.replace(request, sampling_params=params)
        alone = serve(plain, [request], rng)
        eager.answers.learn(request, alone[request.request_id].token_ids)
        assert serve(guessing, [request], rng) == alone, number
    assert eager.num_accepted_tokens > 200


@pytest.fixture(scope="module")
def core() -> EngineCore:
    """An engine that guesses."""
    sizes: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16}
    return tiny_engine(**sizes, speculative_config=NGRAM)


def without_guesses(core: EngineCore, request: EngineCoreRequest) -> list[int]:
    """Serve one request alone; nothing of it stays in the cache."""
    core._scheduler.speculation = None
    token_ids = answer(core, request)
    core.reset_prefix_cache()
    return token_ids


REQUEST = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**40), "max_tokens": st.integers(1, 40)},
    optional={
        "temperature": st.sampled_from([0.3, 0.8]),
        "repetition_penalty": st.sampled_from([0.8, 1.1]),
        "logprobs": st.integers(0, 3),
        "stop_token_ids": st.lists(st.integers(2, 90), max_size=6),
        "min_tokens": st.just(1),
    },
)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), REQUEST), min_size=1, max_size=5), st.booleans())
def test_prompts_that_repeat_are_guessed_by_lookup(
    core: EngineCore, drawn: list[tuple[int, dict[str, Any]]], overlap: bool
) -> None:
    """The proposer and the decisions as they are, over prompts that say the same four times."""
    scheduler = replace(core.config.scheduler, async_scheduling=overlap)
    core.config = replace(core.config, scheduler=scheduler)
    news = []
    for speculation in (None, Speculation(SpeculativeConfig.parse(NGRAM))):  # type: ignore[arg-type]
        core._scheduler.speculation = speculation
        core.reset_prefix_cache()
        for number, (words, fields) in enumerate(drawn):
            core.add_request(message(f"{number}", [prompt(words, 6) * 4], **fields))
        news.append({name: (tokens_of(one), _end(one)) for name, one in drain(core).items()})
    assert news[0] == news[1]
    assert core.compilations == 0


def _end(news: Any) -> tuple[Any, ...]:
    logprobs = [entry for delta in news for entry in delta.new_logprobs or []]
    return news[-1].finish_reason, news[-1].stop_reason, logprobs


def test_fewer_steps_give_the_same_answer(core: EngineCore) -> None:
    request = message("a", [prompt(3, 6) * 4], max_tokens=60)
    expected = without_guesses(core, request)
    eager = make_eager(core, random.Random(1), wrong=0.0)
    eager.answers.learn(request, expected)
    core.add_request(request)
    deltas = drain(core)["a"]
    assert tokens_of(deltas) == expected
    assert len(deltas) < 40
    assert max(len(delta.new_token_ids) for delta in deltas) == 5
    stats = core.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20
    assert stats.num_drafts == sum(len(delta.new_token_ids) > 1 for delta in deltas)
    assert core.compilations == 0


def test_a_wrong_guess_leaves_nothing_in_the_prefix_cache(core: EngineCore) -> None:
    """Blocks hold keys of wrong guesses for a step; none is found before it is written anew."""
    first = message("a", [prompt(3)], max_tokens=50)
    expected = without_guesses(core, first)
    eager = make_eager(core, random.Random(2), wrong=0.6)
    eager.answers.learn(first, expected)
    assert answer(core, first) == expected
    assert 0 < eager.num_accepted_tokens < eager.num_draft_tokens
    second = message("b", [[*first.prompt_token_ids, *expected, 5]], max_tokens=10)
    core.add_request(second)
    (*found,) = drain(core)["b"]
    assert found[0].num_cached_tokens >= 56
    core.reset_prefix_cache()
    assert tokens_of(found) == answer(core, second)


def test_an_answer_goes_on_behind_its_tokens_so_far(core: EngineCore) -> None:
    """As when the engine process was killed: wherever that was, and whatever was guessed then."""
    request = message("a", [prompt(3, 6) * 3], max_tokens=30, temperature=0.5, seed=4)
    expected = without_guesses(core, request)
    eager = make_eager(core, random.Random(3))
    eager.answers.learn(request, expected)
    for cut in (1, 2, 15, 28, 29):
        core.reset_prefix_cache()
        rest = msgspec.structs.replace(request, output_token_ids=expected[:cut])
        assert answer(core, rest) == expected[cut:], cut
    assert eager.num_accepted_tokens > 10


def test_a_step_with_guesses_that_fails_is_computed_again(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [message(f"{number}", [prompt(number, 6) * 3], max_tokens=20) for number in range(3)]
    expected = {one.request_id: without_guesses(core, one) for one in requests}
    eager = make_eager(core, random.Random(4), wrong=0.3)
    for request in requests:
        eager.answers.learn(request, expected[request.request_id])
        core.add_request(request)
    read, num_failures = core._runner.read, 0

    def fail(in_flight: Any) -> Any:
        nonlocal num_failures
        if num_failures < 3 and any(one.is_guessed for one in in_flight.sampled):
            num_failures += 1
            raise RuntimeError("the device fails")
        return read(in_flight)

    monkeypatch.setattr(core._runner, "read", fail)
    assert drain_through_failures(core) == expected
    assert num_failures == 3


def test_what_fails_behind_a_guess_and_is_given_up_is_not_found(core: EngineCore) -> None:
    """The failure is told of with the next call, and the request leaves before."""
    dispatch, has_failed = core._runner.dispatch, False

    def fail(output: Any) -> Any:
        nonlocal has_failed
        assert output.requests, "the request has ended"
        # Its own token fills a block of 8, which gets its hash.
        if not has_failed and output.has_guesses and output.requests[0].end % 8 == 0:
            has_failed = True
            raise RuntimeError("the device fails")
        return dispatch(output)

    def share_out(chances: Any, num_rows: int) -> Counter[int]:
        """Guess in each step, so that each waits for the last; right guesses lead to such a one."""
        return Counter({0: max(1, min(4, 7 - core._scheduler.running[0].num_tokens % 8))})

    request = message("first", [prompt(0, 12)], max_tokens=30)
    expected = without_guesses(core, request)
    eager = make_eager(core, random.Random(0), wrong=0.0)
    eager.answers.learn(request, expected)
    got: list[int] = []
    with (
        patch.object(core._runner, "dispatch", fail),
        patch.object(eager, "share_out", share_out),
    ):
        core.add_request(request)
        while not has_failed:
            with suppress(RuntimeError):  # at once, where no other step is in flight
                got += [token for delta in core.step() for token in delta.new_token_ids]
    core.abort(["first"])
    assert core.step() == []
    # The block that the failed step would have filled is full, and a token stands behind it.
    known = expected[: len(got) + 1]
    rest = msgspec.structs.replace(request, request_id="second", output_token_ids=known)
    assert answer(core, rest) == expected[len(known) :]


# ---- texts ---------------------------------------------------------------------------------------


def mixed_params(rng: random.Random) -> SamplingParams:
    """Return what is asked of tiny_scenes, which would end after a few tokens by itself."""
    least = rng.randint(8, 40)
    fields: dict[str, Any] = {
        "n": rng.choice([1, 2]),
        "temperature": rng.choice([0.0, 0.7, 1.2]),
        "stop": rng.choice([[" star"], ["red", "e, a"], ["blue square, a"]]),
        "include_stop_str_in_output": True,
        "logprobs": rng.choice([0, 2]),
        "frequency_penalty": rng.choice([-0.3, 0.2]),
        "repetition_penalty": 1.05,
        "bad_words": [" green"],
        "stop_token_ids": [338],
    }
    chosen = {name: value for name, value in fields.items() if rng.random() < 0.35}
    return SamplingParams(
        **{"temperature": 0.0, **chosen},
        # Without one the server draws another for each request.
        seed=rng.randrange(99),
        min_tokens=rng.choice([0, least]),
        max_tokens=least + 8,
        ignore_eos=False,
    )


def compare_texts(num_answers: int, precompile: Precompile) -> Speculation:
    """Ask tiny_scenes with and without guesses; all that the outputs hold must be equal."""
    rng = random.Random(num_answers)
    with LLM(
        max_num_seqs=8,
        max_model_len=512,
        precompile=precompile,
        use_tqdm_on_load=False,
        speculative_config=NGRAM,
    ) as llm:
        scheduler = llm.engine._scheduler
        speculation = scheduler.speculation
        assert speculation is not None
        # As if the host took no time: whatever is likely is guessed.
        speculation.note_step = lambda num_rows, step_s, host_s: None  # type: ignore[method-assign]
        speculation._read_cost = 0.0
        while num_answers > 0:
            number = min(num_answers, 50)
            num_answers -= number
            chats: Any = [_ask(rng) for _ in range(number)]
            params = [mixed_params(rng) for _ in range(number)]
            outputs = []
            for one in (None, speculation):
                scheduler.speculation = one
                found = llm.chat(chats, params, use_tqdm=False)
                outputs.append([output.outputs for output in found])
            assert outputs[0] == outputs[1]
        assert llm.engine.compilations == 0
    return speculation


def _ask(rng: random.Random) -> list[dict[str, Any]]:
    question = rng.choice(
        ["Describe the picture.", "What color is the circle?", "Say red red red."]
    )
    text = {"type": "text", "text": question}
    picture = {"type": "image_pil", "image_pil": draw(96, 128, seed=rng.randrange(40))}
    return [{"role": "user", "content": [picture, text]}]


@pytest.mark.slow  # tokens are compared by default; texts are made of them
def test_texts_and_stop_strings_are_those_without_guesses() -> None:
    speculation = compare_texts(40, "none")
    assert speculation.num_accepted_tokens > 15
    assert speculation.num_draft_tokens > speculation.num_accepted_tokens


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_none_of_2000_answers_differs() -> None:
    """Some minutes, over the embedded default."""
    assert compare_texts(2000, "all").num_accepted_tokens > 2000
