"""Random schedules: whatever an engine does at once, every answer is the one it gives alone.

What it gives alone is compared with passes over whole sequences, once for each prompt. Every
token's state is compared, too, bit for bit: answers alone would hide a difference until two tokens
tie.
"""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from mmjax.engine.core import EngineCore
from mmjax.structured_outputs import make_grammar
from mmjax.transport.messages import EngineCoreRequest, RequestOutputDelta
from tests.engine.bench import (
    Bench,
    check_states,
    choose_max_model_len,
    random_parts,
    run_schedules,
)
from tests.engine.test_structured_outputs import choice, install_tokenizer, prompt, regex
from tests.engine.tiny import EOS, message, tiny_engine
from tests.models.families import TINY_FAMILIES, served_model
from tests.models.families.family import TinyModel
from tests.models.served import count_least_blocks, make_request, serve, start_engine

WIDE_GAP = 1e-3
"""Where a wide model's two best logits are nearer, its answers may depend on the batch, for its
products do (docs/determinism.md)."""
SAMPLING = (
    {"temperature": 1.0, "seed": 5, "top_k": 9},
    {"temperature": 0.7, "seed": 6, "top_p": 0.8},
    {"temperature": 1.3, "seed": 7, "min_p": 0.05},
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_every_answer_is_the_lone_one_and_every_state_the_same(name: str) -> None:
    bench = Bench(served_model(name), num_prompts=8, max_num_seqs=3, max_num_batched_tokens=16)
    run_schedules(bench, range(12))
    for seed in range(12):
        bench.run(seed, is_recording=True)
    assert bench.differences == []
    assert (bench.num_prefix_hits > 0) == (not bench.model.paged.max_encoder_len)
    check_states(bench, num_shared=30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_every_answer_is_the_lone_one_in_2000_schedules(name: str) -> None:
    bench = Bench(served_model(name), num_prompts=600)
    run_schedules(bench, range(1000, 3000))
    assert bench.differences == []
    assert bench.excused == []
    assert bench.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_a_wide_model_differs_only_where_two_tokens_are_equal(name: str) -> None:
    family = TINY_FAMILIES[name]
    model = TinyModel(family, **family.resize(1024, 64, 16))
    bench = Bench(model, num_prompts=120, min_gap=WIDE_GAP)
    run_schedules(bench, range(100))
    assert len(bench.differences) <= bench.num_answers // 1000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_each_of_500_mixed_requests_is_answered_as_alone(name: str) -> None:
    model, rng = served_model(name), random.Random(500)
    max_model_len = choose_max_model_len(model)
    sizes = {"max_model_len": max_model_len, "encoder_cache_size": 192}
    sizes |= {"max_num_encoder_input_tokens": 192}
    roomy = start_engine(model, **sizes, max_num_seqs=4)
    least = count_least_blocks(model, max_model_len)
    cramped = start_engine(model, **sizes, max_num_batched_tokens=13, num_blocks=least)
    batch = []
    for number in range(500):
        sample = model.draw_sample(random_parts(rng, model.family))
        sampling = rng.choice(SAMPLING) if number % 3 == 0 else {}
        max_tokens = rng.randint(1, 10)
        batch.append(make_request(f"{number}", sample, max_tokens=max_tokens, **sampling))
    alone = [serve(roomy, [request])[0] for request in batch]
    for engine in (roomy, cramped):
        assert serve_as_they_come(engine, batch, rng) == alone
        assert engine.compilations == 0
    assert cramped.num_preemptions > 0


NUM_MIXED, NUM_MIXED_SLOW = 30, 1000


def draw_fields(rng: random.Random) -> dict[str, Any]:
    """Return some of the sampling fields, at random."""
    choices: dict[str, Any] = {
        "repetition_penalty": rng.uniform(0.7, 2.0),
        "presence_penalty": rng.uniform(-2.0, 2.0),
        "frequency_penalty": rng.uniform(-2.0, 2.0),
        "logit_bias": {rng.randrange(2, 90): rng.uniform(-20.0, 20.0) for _ in range(5)},
        "allowed_token_ids": rng.sample(range(2, 90), 40),
        "min_tokens": rng.randint(1, 6),
        "no_repeat_ngram_size": rng.randint(1, 4),
        "logprobs": rng.randint(0, 5),
        "prompt_logprobs": rng.randint(0, 3),
    }
    if rng.random() < 0.6:
        drawn = {"temperature": rng.uniform(0.3, 1.5), "min_p": rng.uniform(0.0, 0.1)}
        choices |= {**drawn, "top_p": rng.uniform(0.5, 1.0), "top_k": rng.randint(3, 60)}
    return {name: choices[name] for name in rng.sample(sorted(choices), rng.randint(0, 5))}


def draw_request(rng: random.Random, name: str) -> EngineCoreRequest:
    """Return a request with sampling fields, words that are banned, or a grammar."""
    fields = draw_fields(rng) | {"max_tokens": rng.randint(1, 16), "seed": rng.randrange(99)}
    token_ids = prompt(rng.randrange(6), rng.choice([3, 12, 30]))
    parts = [token_ids, (rng.randrange(4), 1), prompt(rng.randrange(6), 5)]
    if rng.random() < 0.3:
        structure = rng.choice([regex("[a-e]{3,9}-[0-9]{2}"), choice("red", "green", "blue")])
        allowed = {k: v for k, v in fields.items() if k not in ("allowed_token_ids", "logit_bias")}
        request = message(name, parts, eos=[EOS], structured_outputs=structure, **allowed)
        return msgspec.structs.replace(request, grammar=make_grammar(structure))
    request = message(name, parts, eos=[EOS], **fields)
    if rng.random() < 0.3:
        words = [rng.choices(range(2, 90), k=rng.randint(1, 3)) for _ in range(20)]
        params = msgspec.structs.replace(request.sampling_params, bad_words=["x"])
        return msgspec.structs.replace(request, sampling_params=params, bad_words_token_ids=words)
    return request


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "count",
    [NUM_MIXED, pytest.param(NUM_MIXED_SLOW, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_each_mix_of_sampling_fields_is_answered_as_alone(count: int) -> None:
    """Tokens and log-probabilities, bit for bit, whatever runs beside, in chunks and preempted."""
    rng = random.Random(count)
    batch = [draw_request(rng, f"{number}") for number in range(count)]
    roomy = install_tokenizer(tiny_engine(max_model_len=96, max_num_seqs=4))
    sizes = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 13, "num_blocks": 12}
    cramped = install_tokenizer(tiny_engine(**sizes))
    alone = {}
    for request in batch:
        roomy.add_request(request)
        alone |= told(serve_deltas(roomy, [], rng))
    for engine in (roomy, cramped):
        assert told(serve_deltas(engine, batch, rng)) == alone
        assert engine.compilations == 0
    assert cramped.num_preemptions > 0


def told(deltas: Sequence[RequestOutputDelta]) -> dict[str, Any]:
    """Return each request's tokens, reason to end, and log-probabilities of both kinds."""
    found: dict[str, Any] = {}
    for delta in deltas:
        tokens, logprobs, of_prompt, _ = found.get(delta.request_id, ([], [], None, None))
        tokens = tokens + delta.new_token_ids
        logprobs = logprobs + list(delta.new_logprobs or ())
        of_prompt = of_prompt or delta.prompt_logprobs
        found[delta.request_id] = (tokens, logprobs, of_prompt, delta.finish_reason)
    return found


def serve_deltas(
    core: EngineCore, batch: list[EngineCoreRequest], rng: random.Random
) -> list[RequestOutputDelta]:
    """Serve requests that arrive between steps; return all that was said."""
    said: list[RequestOutputDelta] = []
    to_come = list(reversed(batch))
    while to_come or core.has_unfinished():
        while to_come and rng.random() < 0.4:
            core.add_request(to_come.pop())
        assert core.pop_failed() == []
        said += core.step()
    return said


def serve_as_they_come(
    core: EngineCore, batch: list[EngineCoreRequest], rng: random.Random
) -> list[list[int]]:
    """Serve requests that arrive between steps; return their answers."""
    news: dict[str, list[int]] = {}
    to_come = list(reversed(batch))
    while to_come or core.has_unfinished():
        while to_come and rng.random() < 0.4:
            core.add_request(to_come.pop())
        for delta in core.step():
            news.setdefault(delta.request_id, []).extend(delta.new_token_ids)
    return [news[request.request_id] for request in batch]
