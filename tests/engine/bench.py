"""Random schedules of one compiled engine, and how every answer and every state is checked.

A schedule draws the engine's settings (sizes of both caches and of a step, prefix cache, overlap,
attention inside images), then requests that arrive, share images and beginnings, end early, and
are aborted. One compiled engine serves them all: what it may hold is lowered, never its shapes.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from mmjax.cache.encoder_cache_manager import EncoderCacheManager
from mmjax.cache.kv.kv_cache_manager import KVCacheManager
from mmjax.cache.state_slots import StateSlots
from mmjax.engine.scheduling.buckets import StepBucket
from mmjax.engine.scheduling.outputs import SchedulerOutput
from mmjax.engine.scheduling.request import Request
from mmjax.engine.scheduling.scheduler import Scheduler
from mmjax.errors import RequestValueError
from mmjax.layers.recurrent.chunks import CHUNK
from mmjax.models.host_inputs import AHEAD
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.dense import Answer, DenseOracle
from tests.engine.tiny import EOS, drain, tokens_of
from tests.families.tiny import Media, Part, Parts, TinyFamily, TinyModel, Words
from tests.models.served import (
    count_encoded_together,
    count_least_blocks,
    make_request,
    start_engine,
)

MAX_ANSWER = 20
ULPS = 2e-6
"""Where the two best logits are nearer than this, the engine alone and the oracle may differ: one
adds block by block, the other over whole sequences."""
Prefix = tuple[bool, tuple[int, ...], tuple[str, ...], int, tuple[int, ...]]
"""All that a state depends on: whether images are causal, the tokens that it sees, the images that
begin among them (of an encoder-decoder: all that its encoder read), its place, and where recurrent
layers cut what is before it."""


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

    def __init__(
        self,
        model: TinyModel,
        *,
        num_prompts: int,
        min_gap: float = 0.0,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
    ) -> None:
        self.model = model
        self.largest = max(*model.family.max_embeds.values(), model.paged.max_encoder_len)
        self.max_num_seqs, self.max_tokens = max_num_seqs, max_num_batched_tokens
        self.most_encoded = self.largest * max(2, count_encoded_together(model))
        self.core = start_engine(
            model,
            max_model_len=choose_max_model_len(model),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            encoder_cache_size=4 * self.largest,
            max_num_encoder_input_tokens=self.most_encoded,
        )
        self.oracle = DenseOracle(model)
        self.has_spans = model.paged.sees != "past"
        self.num_states = self.core._scheduler._max_num_encoder_states
        slots = self.core._scheduler.state_slots
        self.num_state_slots = 0 if slots is None else slots.num_slots
        self.num_prompts = num_prompts
        self.min_gap = min_gap
        self.block_hasher = self.core._requests.block_hasher
        self.limits = self.core._requests.limits
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
        self.states: dict[Prefix, dict[bytes, set[StepBucket]]] = {}
        """Each token's state by what it depends on, and the programs that computed it."""
        self._is_recording = self._is_causal = False
        self._dispatch = self.core._runner.dispatch
        self.core._runner.dispatch = self._record  # type: ignore[method-assign]

    def run(self, seed: int, *, is_recording: bool = False) -> None:
        """Serve one schedule, and check all of it.

        `is_recording`: keep the states. No overlap and no prefix cache: the host then knows every
        token, and every token is computed.
        """
        rng = random.Random(seed)
        self._is_causal = is_causal = self._configure(rng)
        self._is_recording = is_recording
        if is_recording:
            self.core._requests.block_hasher = None
            scheduler = replace(self.core.config.scheduler, async_scheduling=False)
            self.core.config = replace(self.core.config, scheduler=scheduler)
        requests = [self._draw(rng, number) for number in range(rng.randint(3, 12))]
        self._serve(rng, requests)
        self._check_all_returned()
        for served in requests:
            self._check_answer(served, seed, is_causal)
        assert self.core.compilations == 0, f"{seed=}"

    def _record(self, output: SchedulerOutput):
        in_flight = self._dispatch(output)
        if in_flight is None or not self._is_recording:
            return in_flight
        runner = self.core._runner
        bucket = runner.buckets.step_bucket(
            output.num_tokens,
            len(output.requests),
            has_spans=runner._builder.needs_spans(output.requests),
        )
        states = np.asarray(runner._state.hidden)[: output.num_tokens]
        for prefix, state in zip(self._prefixes(output), states, strict=True):
            self.states.setdefault(prefix, {}).setdefault(state.tobytes(), set()).add(bucket)
        return in_flight

    def _prefixes(self, output: SchedulerOutput) -> Iterator[Prefix]:
        for scheduled in output.requests:
            request = scheduled.request
            for place in range(scheduled.start, scheduled.end):
                seen = place if self._is_causal else find_last_seen(request, place)
                images = find_images(request, seen)
                cuts = find_cuts(request, place) if self.num_state_slots else ()
                if request.spans.reference_end is not None:
                    cuts = (min(place + 1, request.spans.reference_end),)
                seen_ids = tuple(request.token_ids[: seen + 1].tolist())
                yield self._is_causal, seen_ids, images, place, cuts

    def _configure(self, rng: random.Random) -> bool:
        """Give the idle engine other limits; return whether pictures are causal."""
        core, is_causal = self.core, rng.random() < 0.3 or not self.has_spans
        # What is behind its prompt always sees less.
        is_causal = is_causal and self.limits.sees != "reference"
        least, largest = count_least_blocks(self.model, self.limits.max_model_len), self.largest
        shares = (0.5, 0.625, 0.75, 1, 1.5)
        num_blocks = rng.choice([*(int(least * part) for part in shares), self.limits.num_blocks])
        encoder_rows = rng.choice([largest * 2 // 3, largest, 2 * largest, 4 * largest])
        max_num_seqs = rng.choice([n for n in (1, 2, 3, 5, 8) if n <= self.max_num_seqs])
        sizes = [n for n in (4, 5, 7, 13, 16, 21, 40, 64, 96) if n <= self.max_tokens]
        max_tokens = max(rng.choice(sizes), CHUNK if self.num_state_slots else 0)
        budget = rng.choice([largest * 2 // 3, largest, self.most_encoded])
        core._requests.block_hasher = self.block_hasher if rng.random() < 0.7 else None
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
                max_encoder_len=self.limits.max_encoder_len,
            ),
            encoder_cache=EncoderCacheManager(encoder_rows),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_encoder_input_tokens=budget,
            max_num_encoder_states=self.num_states,
            keeps_runs_whole=not is_causal and self.limits.sees in AHEAD,
            state_slots=StateSlots(self.num_state_slots) if self.num_state_slots else None,
        )
        core._requests.limits = replace(
            self.limits,
            num_blocks=num_blocks,
            max_num_batched_tokens=max_num_batched_tokens,
            encoder_budget=min(encoder_rows, budget),
            keeps_runs_whole=not is_causal and self.limits.sees in AHEAD,
            # As at a start: runs go in parts only of what sees nothing behind it.
            sees="past" if is_causal else self.limits.sees,
        )
        runner.rows.reset()
        runner._builder.has_spans = not is_causal

    def _draw(self, rng: random.Random, number: int) -> Served:
        """One of few prompts, so that answers are known and beginnings are shared."""
        parts = random_parts(random.Random(rng.randrange(self.num_prompts)), self.model.family)
        ends = rng.sample(range(2, 90), 6) if rng.random() < 0.3 else [EOS]
        sample = self.model.draw_sample(parts)
        request = make_request(f"{number}", sample, max_tokens=rng.randint(1, MAX_ANSWER), eos=ends)
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
            # A long prompt in small chunks gives nothing for as long.
            assert idle_steps < max(60, self.limits.max_model_len), "nobody gets anything"
        assert core.step() == []
        self.num_preemptions += core.num_preemptions - preemptions
        self.num_prefix_hits += core.stats().prefix_cache_hits

    def _answer_alone(self, parts: Parts, is_causal: bool) -> Answer:
        """Return what the engine answers with nothing else to do, and nothing in its caches."""
        if (parts, is_causal) in self._lone_answers:
            return self._lone_answers[parts, is_causal]
        self._limit(
            num_blocks=self.limits.num_blocks,
            encoder_rows=4 * self.largest,
            max_num_seqs=1,
            max_num_batched_tokens=self.max_tokens,
            budget=self.most_encoded,
            is_causal=is_causal,
        )
        self._is_recording = False
        sample = self.model.draw_sample(parts)
        self.core.add_request(make_request("alone", sample, max_tokens=MAX_ANSWER))
        token_ids = tokens_of(drain(self.core)["alone"])
        oracle = self.oracle.answer(parts, len(token_ids), is_causal)
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
        if served.is_aborted and not served.token_ids:
            return  # one that could never fit has no answer alone, either
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


def choose_max_model_len(model: TinyModel) -> int:
    """Return room for `random_parts` and an answer; an encoder-decoder's are in two prompts."""
    family = model.family
    return max(160, family.max_model_len) if family.max_items > 1 else family.max_model_len


def find_last_seen(request: Request, place: int) -> int:
    """Return the last place that a token's state depends on, beside the image that it is of."""
    first = request.spans.first_ahead
    return place if first is None or place < first else max(place, request.spans.stop - 1)


def find_images(request: Request, place: int) -> tuple[str, ...]:
    """Return what a token sees beside tokens: the images that begin up to it, by their content."""
    if request.encoder is None:
        return tuple(item.identifier for item in request.items if item.start <= place)
    prompt = request.encoder.prompt
    assert prompt is not None
    return (repr(prompt.token_ids.tobytes()), *(item.identifier for item in prompt.items))


def find_cuts(request: Request, place: int) -> tuple[int, ...]:
    """Return where chunks end before a token, and the end of its own if it is one by itself."""
    ends = [end for end in request.chunk_ends.tolist() if end <= place]
    is_alone = place >= request.num_prompt_tokens or place + 1 in request.chunk_ends.tolist()
    start = ends[-1] if ends else 0
    return (
        (*ends, place + 1) if is_alone and start in (place, request.num_prompt_tokens) else (*ends,)
    )


def random_parts(rng: random.Random, family: TinyFamily) -> Parts:
    """Return text and images; few of each, so that beginnings and images are shared."""
    parts: list[Part] = [Words(rng.randrange(4), rng.choice([1, 3, 9, 17, 30]))]
    for _ in range(min(family.max_items, rng.choice([0, 1, 1, 2, 3]))):
        parts.append(Media(rng.randrange(6), rng.choice(list(family.max_embeds))))
        if rng.random() < 0.7:
            parts.append(Words(rng.randrange(4), rng.choice([1, 3, 5, 12])))
    return tuple(parts)


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


def check_states(bench: Bench, *, num_shared: int) -> None:
    """Every token has one state, and at least `num_shared` were computed by several programs."""
    shared = [found for found in bench.states.values() if len(set().union(*found.values())) > 1]
    assert len(shared) >= num_shared
    several = {prefix: found for prefix, found in bench.states.items() if len(found) > 1}
    assert not several, (
        f"{len(several)} of {len(bench.states)}: {next(iter(several.values())).values()}"
    )
