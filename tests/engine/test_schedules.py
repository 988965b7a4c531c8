"""Random schedules: whatever an engine does at once, every answer is the one it gives alone.

What it gives alone is compared with dense passes over whole sequences, once for each prompt.

A schedule draws the engine's settings (sizes of both caches and of a step, prefix cache, overlap,
attention inside pictures), then requests that arrive, share pictures and beginnings, end early, and
are aborted. One compiled engine serves them all: what it may hold is lowered, never its shapes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import Gemma3Config

from mmjax.cache.encoder_cache_manager import EncoderCacheManager
from mmjax.cache.kv.kv_cache_manager import KVCacheManager
from mmjax.engine.core import EngineCore
from mmjax.engine.scheduling.scheduler import Scheduler
from mmjax.errors import RequestValueError
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.dense import Answer, DenseOracle, Parts
from tests.engine.tiny import (
    EOS,
    drain,
    engine_config,
    loud_params,
    message,
    tiny_config,
    tokens_of,
)

MAX_SEQS, MAX_TOKENS, MAX_ANSWER = 8, 64, 20
ULPS = 2e-6
"""Where the two best logits are nearer than this, the engine alone and the oracle may differ: one
adds block by block, the other over whole sequences."""
WIDE_GAP = 1e-3
"""Where a wide model's are nearer, its answers may depend on the batch, for its products do
(docs/determinism.md)."""


@dataclass
class Served:
    """One request of a schedule, and what came of it."""

    message: EngineCoreRequest
    parts: Parts
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    is_aborted: bool = False


class Bench:
    """A compiled engine, its oracle, and what was found over all schedules."""

    def __init__(self, config: Gemma3Config, *, num_prompts: int, min_gap: float = 0.0) -> None:
        graphdef, params = loud_params(config)
        settings = engine_config(max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS)
        model = replace(settings.model, hf_config=config)
        cache = replace(settings.cache, kv_cache_memory_bytes=None)
        self.core = EngineCore.from_model(
            Gemma3ForConditionalGeneration, params, replace(settings, model=model, cache=cache)
        )
        width = config.get_text_config().hidden_size
        self.oracle = DenseOracle(graphdef, params, width)
        self.num_prompts = num_prompts
        self.min_gap = min_gap
        self.block_hasher = self.core._block_hasher
        self.limits = self.core._limits
        self.num_answers = 0
        self.num_preemptions = 0
        self.num_evictions = 0
        self.num_prefix_hits = 0
        self.differences: list[str] = []
        """Of answers, beyond what the gap of the lone answer excuses."""
        self.excused: list[str] = []
        self.ties: list[str] = []
        """Lone answers that are not the oracle's, where two logits are one number."""
        self._lone_answers: dict[tuple[Parts, bool], Answer] = {}

    def run(self, seed: int) -> None:
        """Serve one schedule, and check all of it."""
        rng = random.Random(seed)
        is_causal = self._configure(rng)
        requests = [self._draw(rng, number) for number in range(rng.randint(3, 12))]
        self._serve(rng, requests)
        self._check_all_returned()
        for served in requests:
            self._check_answer(served, seed, is_causal)
        assert self.core.compilations == 0, f"{seed=}"

    def _configure(self, rng: random.Random) -> bool:
        """Give the idle engine other limits; return whether pictures are causal."""
        core, is_causal = self.core, rng.random() < 0.3
        num_blocks = rng.choice([12, 14, 16, 20, 30, self.limits.num_blocks])
        encoder_rows = rng.choice([8, 12, 24, core._runner.rows.num_rows])
        max_num_seqs = rng.choice([1, 2, 3, 5, MAX_SEQS])
        max_tokens = rng.choice([4, 5, 7, 13, 16, 21, 40, MAX_TOKENS])
        budget = rng.choice([8, 16, MAX_TOKENS])
        core._block_hasher = self.block_hasher if rng.random() < 0.7 else None
        self._limit(
            num_blocks=num_blocks,
            encoder_rows=encoder_rows,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(max_tokens, max_num_seqs),
            budget=budget,
            is_causal=is_causal,
        )
        overlap = replace(core.config.scheduler, async_scheduling=rng.random() < 0.8)
        core.config = replace(core.config, scheduler=overlap)
        return is_causal

    def _limit(
        self,
        *,
        num_blocks: int,
        encoder_rows: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        budget: int,
        is_causal: bool,
    ) -> None:
        core, runner = self.core, self.core._runner
        core._scheduler = Scheduler(
            kv_cache=KVCacheManager(
                num_blocks=num_blocks,
                block_size=self.limits.block_size,
                max_model_len=self.limits.max_model_len,
            ),
            encoder_cache=EncoderCacheManager(encoder_rows),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_encoder_input_tokens=budget,
            keeps_runs_whole=not is_causal,
        )
        core._limits = replace(
            self.limits,
            num_blocks=num_blocks,
            max_num_batched_tokens=max_num_batched_tokens,
            encoder_budget=min(encoder_rows, budget),
            keeps_runs_whole=not is_causal,
        )
        runner.rows.reset()
        runner._builder.has_spans = not is_causal

    def _draw(self, rng: random.Random, number: int) -> Served:
        """One of few prompts, so that answers are known and beginnings are shared."""
        parts = random_parts(random.Random(rng.randrange(self.num_prompts)))
        ends = rng.sample(range(2, 90), 6) if rng.random() < 0.3 else [EOS]
        request = message(
            f"{number}",
            unfreeze(parts),
            max_tokens=rng.randint(1, MAX_ANSWER),
            eos=ends,
        )
        priority = rng.choice([0, 0, 0, 1, -1])
        return Served(msgspec.structs.replace(request, priority=priority), parts)

    def _serve(self, rng: random.Random, requests: Sequence[Served]) -> None:
        core, by_id = self.core, {served.message.request_id: served for served in requests}
        to_come, eagerness = list(requests), rng.choice([0.2, 0.6, 1.0])
        preemptions, idle_steps = core.num_preemptions, 0
        while to_come or core.has_unfinished():
            while to_come and rng.random() < eagerness:
                served = to_come.pop()
                try:
                    core.add_request(served.message)
                except RequestValueError:
                    served.is_aborted = True  # it could never fit
            running = core._scheduler.request_ids
            if running and rng.random() < 0.03:
                victim = rng.choice(running)
                by_id[victim].is_aborted = True
                core.abort([victim])
            deltas = core.step()
            for delta in deltas:
                served = by_id[delta.request_id]
                assert not served.is_aborted
                assert served.finish_reason is None
                served.token_ids += delta.new_token_ids
                served.finish_reason = delta.finish_reason
            idle_steps = 0 if deltas or not core.has_unfinished() else idle_steps + 1
            assert idle_steps < 60, "nobody gets anything"
        assert core.step() == []
        self.num_preemptions += core.num_preemptions - preemptions
        self.num_prefix_hits += core.stats().prefix_cache_hits

    def _answer_alone(self, parts: Parts, is_causal: bool) -> Answer:
        """Return what the engine answers with nothing else to do, and nothing in its caches."""
        if (parts, is_causal) in self._lone_answers:
            return self._lone_answers[parts, is_causal]
        self._limit(
            num_blocks=self.limits.num_blocks,
            encoder_rows=self.core._runner.rows.num_rows,
            max_num_seqs=1,
            max_num_batched_tokens=MAX_TOKENS,
            budget=MAX_TOKENS,
            is_causal=is_causal,
        )
        self.core.add_request(message("alone", unfreeze(parts), max_tokens=MAX_ANSWER))
        token_ids = tokens_of(drain(self.core)["alone"])
        oracle = self.oracle.answer(parts, MAX_ANSWER, is_causal)
        gaps = list(oracle.gaps)
        place = first_difference(token_ids, oracle.token_ids[: len(token_ids)])
        if place is not None:
            kind = (
                self.ties
                if gaps[place] <= ULPS or gaps[place] <= self.min_gap
                else self.differences
            )
            kind.append(f"{parts} alone {token_ids}, oracle {oracle}")
            gaps[place + 1 :] = [float("inf")] * (len(gaps) - place - 1)
        answer = self._lone_answers[parts, is_causal] = Answer(token_ids, gaps)
        return answer

    def _check_answer(self, served: Served, seed: int, is_causal: bool) -> None:
        alone = self._answer_alone(served.parts, is_causal)
        room = self.limits.max_model_len - len(served.message.prompt_token_ids)
        expected = alone.token_ids[: min(served.message.sampling_params.max_tokens or room, room)]
        ends = [n for n, token in enumerate(expected) if token in served.message.eos_token_ids]
        expected = expected[: ends[0] + 1] if ends else expected
        got = served.token_ids
        if served.is_aborted:
            assert served.finish_reason is None
            expected = expected[: len(got)]
        self.num_answers += 1
        if got == expected:
            if not served.is_aborted:
                assert served.finish_reason == ("stop" if ends else "length")
            return
        place = first_difference(got, expected)
        place = len(expected) - 1 if place is None else place
        kind = self.excused if alone.gaps[place] <= self.min_gap else self.differences
        kind.append(
            f"{seed=} request {served.message.request_id}: {got}, alone {expected}; the gap at "
            f"place {place} is {alone.gaps[place]:.2e}"
        )

    def _check_all_returned(self) -> None:
        core, scheduler = self.core, self.core._scheduler
        pool, encoder = scheduler.kv_cache._pool, scheduler.encoder_cache
        assert core._in_flight is None
        assert not any(pool._ref_counts)
        assert sorted(pool._free) == list(range(pool.num_blocks))
        assert not scheduler.kv_cache._tables
        assert not scheduler.kv_cache._block_ids
        assert not scheduler.kv_cache._num_hashed
        assert not scheduler.running
        assert not scheduler.waiting
        assert not scheduler.waiting._arrivals
        assert not scheduler._deferred
        assert not scheduler._item_sizes._entries
        assert not any(encoder.cached.values())
        assert not encoder._identifiers
        assert encoder.num_freeable_slots == encoder.cache_size
        rows = core._runner.rows
        num_held = sum(map(len, rows._rows.values()))
        self.num_evictions += len(encoder.freed)
        assert num_held + rows.num_free == rows.num_rows
        assert set(rows._rows) - set(encoder.freed) <= set(encoder.cached)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first place at which two answers differ, as far as both go."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (first, second) in pairs if first != second), None)


def unfreeze(parts: Parts) -> list[Any]:
    """Return parts as `tiny.message` takes them."""
    return [list(part) if len(part) != 2 else part for part in parts]


def random_parts(rng: random.Random) -> Parts:
    """Text and pictures; few of each, so that beginnings and pictures are shared."""
    parts: list[Any] = [text(rng.randrange(4), rng.choice([1, 3, 9, 17, 30]))]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        parts.append((rng.randrange(6), rng.choice([1, 1, 2, 3])))
        if rng.random() < 0.7:
            parts.append(text(rng.randrange(4), rng.choice([1, 3, 5, 12])))
    return tuple(parts)


def text(seed: int, length: int) -> tuple[int, ...]:
    """Return token ids; texts of one seed begin alike."""
    return tuple(np.random.default_rng(seed).integers(2, 90, 64).tolist()[:length])


def run_schedules(bench: Bench, seeds: range) -> None:
    """Run schedules, and print what they met."""
    for seed in seeds:
        bench.run(seed)
    print(
        f"{len(seeds)} schedules, {bench.num_answers} answers: {bench.num_preemptions} "
        f"preemptions, {bench.num_prefix_hits} prompt tokens found in the prefix cache, "
        f"{len(bench.excused)} swaps of tokens nearer than {bench.min_gap}, "
        f"{len(bench.differences)} other differences, {len(bench.ties)} lone answers that are not "
        "the oracle's",
        *bench.excused,
        *bench.ties,
        *bench.differences,
        sep="\n",
    )


@pytest.fixture(scope="module")
def narrow() -> Bench:
    """Width 32: everything there is bit-equal whatever the number of rows."""
    return Bench(tiny_config(), num_prompts=60)


def test_every_answer_is_the_lone_one(narrow: Bench) -> None:
    run_schedules(narrow, range(40))
    assert narrow.differences == []
    assert narrow.excused == []
    assert narrow.num_preemptions > 0
    assert narrow.num_prefix_hits > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_answer_is_the_lone_one_in_2000_schedules() -> None:
    bench = Bench(tiny_config(), num_prompts=600)
    run_schedules(bench, range(1000, 3000))
    assert bench.differences == []
    assert bench.excused == []


def wide_config() -> Gemma3Config:
    """Return the tiny model at a width where rows of a product depend on how many there are."""
    config = tiny_config().to_dict()
    config["text_config"].update(hidden_size=1024, intermediate_size=1024, head_dim=64)
    return Gemma3Config.from_dict(config)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_wide_model_differs_only_where_two_tokens_are_equal() -> None:
    bench = Bench(wide_config(), num_prompts=120, min_gap=WIDE_GAP)
    run_schedules(bench, range(100))
    assert len(bench.differences) <= bench.num_answers // 1000
