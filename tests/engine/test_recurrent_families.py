"""Every served family with recurrent layers: answers have the bits of a request alone.

In steps of any size, from each snapshot, and preempted at any step. `test_recurrent.py` has more
laws, over a tiny model of both kinds of layers, in the default run.
"""

import random
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pytest

from mmjax.engine.core import EngineCore
from mmjax.layers.recurrent.chunks import CHUNK
from mmjax.transport.messages import EngineCoreRequest
from tests import shared_programs
from tests.engine.recurrent import Answer, check_random, serve, serve_found, serve_preempted
from tests.families import TINY_FAMILIES, served_model
from tests.families.tiny import Media, Parts, TinyFamily, TinyModel, Words
from tests.models.served import count_least_blocks, make_request, start_engine

pytestmark = pytest.mark.as_served

MAX_MODEL_LEN = 320
RECURRENT = [name for name, family in TINY_FAMILIES.items() if family.longest_run == CHUNK]


def test_the_table_has_them() -> None:
    names = ["lfm2_vl", "lfm3_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7"]
    assert [*names, "qwen3_5", "qwen3_5_moe"] == RECURRENT


def moving(family: TinyFamily, seed: int) -> Media:
    """Return a video where the family takes any, else a picture."""
    return Media(seed, "video" if "video" in family.max_embeds else "image")


def make_prompts(family: TinyFamily) -> list[Parts]:
    """Return prompts of one chunk to five; some begin alike, and items lie around chunks' ends."""
    return [
        (Words(0, 64), Words(1, 64), Words(2, 22)),
        (Words(1, 64),),
        (Words(2, 64), Words(3, 1)),
        (Words(3, 1),),
        (Words(4, 50), Media(1), Words(5, 30)),
        (Words(0, 64), Words(1, 64), Words(6, 40)),
        (Media(2), Media(3), Words(7, 64), Words(8, 30)),
        (Words(9, 64), moving(family, 1), Words(10, 60)),
        (Words(4, 50), Media(1), Words(8, 64), Words(9, 26)),
        long_prompt(family),
    ]


def long_prompt(family: TinyFamily) -> Parts:
    """Return a prompt whose beginnings end before, in and behind each chunk."""
    return (
        *(Words(20, 40), Words(21, 30), Media(0), Words(22, 64)),
        *(moving(family, 2), Words(23, 50), Words(24, 9)),
    )


class Served:
    """A family's engine whose steps hold most prompts, and what it answers alone."""

    def __init__(self, name: str) -> None:
        self.model: TinyModel = served_model(name)
        self.core = self.start(max_num_seqs=2, max_num_batched_tokens=256)
        assert self.core._scheduler.state_slots is not None, f"{name} has no recurrent layers"

    def start(self, **settings: Any) -> EngineCore:
        """Start another engine of the family, which compiles what it needs."""
        defaults = {"max_model_len": MAX_MODEL_LEN, "precompile": "none"}
        return start_engine(self.model, **{**defaults, **settings})

    def ask(self, request_id: str, parts: Parts, **sampling: Any) -> EngineCoreRequest:
        """Return a request whose log-probabilities are told."""
        sampling = {"max_tokens": 6, "logprobs": 3, **sampling}
        return make_request(request_id, self.model.draw_sample(parts), **sampling)

    def answer_cold(self, parts: Parts, **sampling: Any) -> Answer:
        """Return what the engine answers with nothing in its caches; nothing is left in them."""
        self.core.reset_prefix_cache()
        (answer,) = serve(self.core, [self.ask("cold", parts, **sampling)])
        self.core.reset_prefix_cache()
        return answer

    @cached_property
    def alone(self) -> list[Answer]:
        """Each prompt's answer, alone and with cold caches."""
        return [self.answer_cold(parts) for parts in make_prompts(self.model.family)]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT]
)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    served = Served(request.param)
    yield served
    served.core.close()
    # A dozen engines' programs of each family are more than a process may map.
    shared_programs.forget()


@pytest.mark.timeout(1200)
def test_a_hit_at_each_snapshot_there_may_be(served: Served) -> None:
    parts = long_prompt(served.model.family)
    cold, found = served.answer_cold(parts), []
    for number in range(2, len(parts)):
        shared = served.ask("shared", parts[:number])
        last = (len(shared.prompt_token_ids) - 1) // CHUNK * CHUNK
        served.core.reset_prefix_cache()
        serve(served.core, [shared])
        assert serve_found(served.core, served.ask("hit", parts)) == (last, cold)
        found.append(last)
    length = len(served.ask("whole", parts).prompt_token_ids)
    assert {*found} == {*range(CHUNK, length - 1, CHUNK)}


@pytest.mark.timeout(1200)
def test_another_question_about_an_item_begins_behind_it(served: Served) -> None:
    for item in (Media(1), moving(served.model.family, 2)):
        parts = (Words(30, 64), Words(31, 64), item)
        cold = served.answer_cold((*parts, Words(32, 40)))
        serve(served.core, [served.ask("first", (*parts, Words(33, 64), Words(34, 30)))])
        num_found, answer = serve_found(served.core, served.ask("hit", (*parts, Words(32, 40))))
        assert (num_found, answer) == (2 * CHUNK, cold)


@pytest.mark.timeout(1200)
def test_preempted_at_any_step(served: Served) -> None:
    parts, max_tokens = long_prompt(served.model.family), 5
    expected = served.answer_cold(parts, max_tokens=max_tokens)
    # One step for a prompt at least, and none when all is told.
    for after in range(max_tokens + 3):
        served.core.reset_prefix_cache()
        request = served.ask("preempted", parts, max_tokens=max_tokens)
        assert serve_preempted(served.core, request, after) == expected, f"{after=}"
    assert not served.core.has_unfinished()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("max_num_batched_tokens", [64, 100, 128, 512, 1024, 2048])
def test_in_steps_of_any_size_and_again_from_snapshots(
    served: Served, max_num_batched_tokens: int
) -> None:
    """An engine for each takes minutes to compile."""
    prompts = make_prompts(served.model.family)
    for is_async in (False, True):
        engine = served.start(
            max_num_seqs=len(prompts),
            max_num_batched_tokens=max_num_batched_tokens,
            async_scheduling=is_async,
        )
        for turn in ("cold", "warm"):
            requests = [served.ask(f"{turn} {n}", parts) for n, parts in enumerate(prompts)]
            assert serve(engine, requests) == served.alone, f"{is_async=} {turn=}"
        assert engine.stats().prefix_cache_hits > 0
        engine.close()


@pytest.mark.timeout(3600)
def test_1000_random_requests_stay_within_what_was_planned(served: Served) -> None:
    """In the smallest chunks, with blocks for a little more than the longest prompt."""
    core = served.start(
        num_blocks=count_least_blocks(served.model, MAX_MODEL_LEN) + 4,
        num_state_snapshots=2,
        precompile="all",
    )
    rng, prompts = random.Random(0), make_prompts(served.model.family)
    requests = [
        served.ask(f"{one}", rng.choice(prompts), max_tokens=rng.randint(1, 12))
        for one in range(1000)
    ]
    check_random(core, requests)
    assert core.num_preemptions > 0
    core.close()
