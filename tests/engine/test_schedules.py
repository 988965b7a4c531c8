"""Random schedules: whatever an engine does at once, every answer is the one it gives alone.

What it gives alone is compared with passes over whole sequences, once for each prompt. Every
token's state is compared, too, bit for bit: answers alone would hide a difference until two tokens
tie.
"""

import random
from typing import Any

import pytest

from mmjax.engine.core import EngineCore
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.bench import (
    Bench,
    check_states,
    choose_max_model_len,
    random_parts,
    run_schedules,
)
from tests.engine.tiny import answer_all
from tests.families import TINY_FAMILIES, served_model
from tests.families.default_run import rows
from tests.families.tiny import TinyModel
from tests.models.served import count_least_blocks, make_request, start_engine

pytestmark = pytest.mark.as_served

WIDE_GAP = 1e-3
"""Where a wide model's two best logits are nearer, its answers may depend on the batch, for its
products do (docs/determinism.md)."""
SMALL = [name for name, one in TINY_FAMILIES.items() if max(one.max_embeds.values()) <= 128]
"""An image of DeepSeek-OCR 2 has 257 embeddings or more, of 4,096 patches: thousands of requests
would take hours. It is in the test of few schedules."""
FEW = rows("schedules", TINY_FAMILIES)
SAMPLING = (
    {"temperature": 1.0, "seed": 5, "top_k": 9},
    {"temperature": 0.7, "seed": 6, "top_p": 0.8},
    {"temperature": 1.3, "seed": 7, "min_p": 0.05},
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FEW)
def test_every_answer_is_the_lone_one_and_every_state_the_same(name: str) -> None:
    sizes = {"num_prompts": 8, "max_num_seqs": 3}
    chunk = max(16, TINY_FAMILIES[name].longest_run)
    bench = Bench(served_model(name), **sizes, max_num_batched_tokens=chunk)
    run_schedules(bench, range(8))
    for seed in range(8):
        bench.run(seed, is_recording=True)
    assert bench.differences == []
    paged = bench.model.paged
    # Of a recurrent layer, prompts of 64 tokens and more alone: few families have such here.
    if not paged.cache_spec.states:
        assert (bench.num_prefix_hits > 0) == paged.shares_prefixes
    check_states(bench, num_shared=30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SMALL)
def test_every_answer_is_the_lone_one_in_2000_schedules(name: str) -> None:
    step = max(64, TINY_FAMILIES[name].longest_run)
    bench = Bench(served_model(name), num_prompts=600, max_num_batched_tokens=step)
    run_schedules(bench, range(1000, 3000))
    assert bench.differences == []
    assert bench.excused == []
    assert bench.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SMALL)
def test_a_wide_model_differs_only_where_two_tokens_are_equal(name: str) -> None:
    family = TINY_FAMILIES[name]
    model = TinyModel(family, **family.resize(1024, 64, 16))
    bench = Bench(model, num_prompts=120, min_gap=WIDE_GAP)
    run_schedules(bench, range(100))
    assert len(bench.differences) <= bench.num_answers // 1000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SMALL)
def test_each_of_500_mixed_requests_is_answered_as_alone(name: str) -> None:
    model, rng = served_model(name), random.Random(500)
    max_model_len = choose_max_model_len(model)
    sizes: dict[str, Any] = {"max_model_len": max_model_len, "encoder_cache_size": 192}
    sizes |= {"max_num_encoder_input_tokens": 192}
    roomy = start_engine(model, **sizes, max_num_seqs=4)
    least = count_least_blocks(model, max_model_len)
    chunk = max(13, model.family.longest_run)
    cramped = start_engine(model, **sizes, max_num_batched_tokens=chunk, num_blocks=least)
    batch = []
    for number in range(500):
        sample = model.draw_sample(random_parts(rng, model.family))
        sampling: dict[str, Any] = rng.choice(SAMPLING) if number % 3 == 0 else {}
        max_tokens = rng.randint(1, 10)
        batch.append(make_request(f"{number}", sample, max_tokens=max_tokens, **sampling))
    alone = [answer_all(roomy, [request])[0] for request in batch]
    for engine in (roomy, cramped):
        assert serve_as_they_come(engine, batch, rng) == alone
        assert engine.compilations == 0
    assert cramped.num_preemptions > 0


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
