"""A draft model: a smaller one of the same family, which guesses what the engine's model says next.

It computes the same prompts, items included, and its keys lie in the same blocks, so that a prefix
which is found is found for both. What it gets wrong costs time, and changes no answer: all that it
guesses is verified (`engine/scheduling/speculation.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import msgspec
from jaxtyping import Array

from mmjax.config.engine_config import EngineConfig, ModelConfig
from mmjax.config.lora_config import LoRAConfig
from mmjax.engine.device.compilation import CompiledPrograms
from mmjax.engine.device.programs import Programs
from mmjax.engine.device.runner import ModelRunner
from mmjax.engine.scheduling.buckets import ProgramKey, SampleBucket, next_bucket
from mmjax.engine.scheduling.outputs import ScheduledRequest, SchedulerOutput, WantedGuess
from mmjax.engine.weights import EngineWeights
from mmjax.errors import ConfigError
from mmjax.models.host_inputs import HostInputs


class DraftRunner(ModelRunner):
    """Holds the draft model's arrays, and runs it over the requests of the engine's steps."""

    @property
    def is_ready(self) -> bool:
        """Whether all of its programs may be called; until then it computes nothing."""
        return self._compiled.is_complete

    # ---- prompts -------------------------------------------------------------------------------

    def compute(self, output: SchedulerOutput) -> None:
        """Compute a step's parts of prompts, and encode what items they have.

        Decoded tokens are computed when a guess is wanted behind them.
        """
        for identifier in output.freed_identifiers:
            if identifier in self.rows:
                self.rows.free(identifier)
        if not self.is_ready:
            return
        windows = [self._cut(one) for one in output.requests if _is_of_prompt(one)]
        windows = [one for one in windows if one.num_tokens]
        # There is room: the engine's encoder cache holds them as well.
        needed = {
            item.identifier: item
            for one in windows
            for item in one.request.items_between(one.start, one.end)
            if item.has_embeds_between(one.start, one.end)
        }
        self._encode_items(list(needed.values()))
        self._run_windows(windows)

    def _run_windows(self, windows: Sequence[ScheduledRequest]) -> None:
        """Compute windows, of which nothing is sampled."""
        if windows:
            bucket = self._find_bucket(windows)
            self._run_step(bucket, self._builder.build_step(windows, bucket)[0])
        for window in windows:
            window.request.num_drafted_tokens = window.end

    def _find_bucket(self, windows: Sequence[ScheduledRequest]) -> Any:
        return self.buckets.step_bucket(
            sum(window.num_tokens for window in windows),
            len(windows),
            has_spans=self._builder.needs_spans(windows),
        )

    # ---- guesses -------------------------------------------------------------------------------

    def guess(self, wanted: Sequence[WantedGuess]) -> list[list[int]]:
        """Return what it would give each request: as many tokens as are wanted.

        The device computes them one behind the other; the host waits for all of them once.
        """
        samples: list[Array] = []
        rows: list[dict[int, int]] = []
        """For each sample, the rows of the requests that it is of, by their places in `wanted`."""
        for number in range(max(one.num_tokens for one in wanted)):
            places = [place for place, one in enumerate(wanted) if one.num_tokens > number]
            chosen = [wanted[place] for place in places]
            if number:
                windows = [
                    make_window(one, self._place_guess(one, number), token_from=rows[-1][place])
                    for one, place in zip(chosen, places, strict=True)
                ]
            else:
                windows = self._compute_lacking(chosen)
            samples.append(self._sample_windows(windows))
            rows.append({place: row for row, place in enumerate(places)})
        for one in wanted:
            one.request.num_drafted_tokens = self._count_kept(one)
        drawn = jax.device_get(samples)
        return [
            [int(drawn[number][rows[number][place]]) for number in range(one.num_tokens)]
            for place, one in enumerate(wanted)
        ]

    def _place_guess(self, wanted: WantedGuess, number: int) -> int:
        """Return where the n-th guessed token is computed, from 1."""
        return wanted.request.num_tokens + number - 1

    def _count_kept(self, wanted: WantedGuess) -> int:
        """Return the tokens that are computed, and need not be again if the guess is right."""
        return wanted.request.num_tokens + wanted.num_tokens - 1

    def _compute_lacking(self, wanted: Sequence[WantedGuess]) -> list[ScheduledRequest]:
        """Compute all tokens of requests that it has not; return what is left for one step.

        Those are windows of one token each: a request's last one, and, where they are few, those
        before it.
        """
        windows = [window for one in wanted for window in self._list_lacking(one)]
        if len(windows) <= self.buckets.max_num_rows:
            return windows
        buckets, part, num_tokens = self.buckets, list[ScheduledRequest](), 0
        for one in wanted:
            last = one.request.num_tokens - 1
            start = self._find_lacking(one)
            while start < last:
                room = buckets.max_num_batched_tokens - num_tokens
                if not room or len(part) == buckets.max_num_seqs:
                    self._run_windows(part)
                    part, num_tokens = [], 0
                    continue
                size = min(last - start, room)
                part.append(make_window(one, start, size))
                start, num_tokens = start + size, num_tokens + size
        self._run_windows(part)
        return [make_window(one, one.request.num_tokens - 1) for one in wanted]

    def _find_lacking(self, wanted: WantedGuess) -> int:
        """Return the first token that was not computed; the last one's state is always wanted.

        What a wrong guess has left behind the known tokens is none of theirs.
        """
        request = wanted.request
        first = max(request.num_drafted_tokens, request.items_end, self.slot_lag)
        return min(first, request.num_tokens - 1)

    def _list_lacking(self, wanted: WantedGuess) -> Iterator[ScheduledRequest]:
        end = wanted.request.num_tokens
        for place in range(self._find_lacking(wanted), end):
            yield make_window(wanted, place, samples=place == end - 1)

    def _cut(self, window: ScheduledRequest) -> ScheduledRequest:
        """Return a window without the tokens that stand nowhere."""
        if window.start >= self.slot_lag:
            return window
        start = min(self.slot_lag, window.end)
        return msgspec.structs.replace(window, start=start, num_tokens=window.end - start)

    def _sample_windows(self, windows: Sequence[ScheduledRequest]) -> Array:
        """Compute windows, and return the tokens that come behind those that sample, in order."""
        bucket = self._find_bucket(windows)
        flat, last_rows = self._builder.build_step(windows, bucket)
        sampled = [window for window in windows if window.samples]
        rows = last_rows[[window.samples for window in windows]]
        packed = flat[-self._builder.sample_layout.size :]
        is_plain = self._builder.fill_guess(packed, sampled, rows)
        size = next_bucket(self.buckets.sample, len(sampled))
        self._run_sample(SampleBucket(size, is_plain), self._run_step(bucket, flat))
        return self._previous


def _is_of_prompt(scheduled: ScheduledRequest) -> bool:
    """Return whether a window is of a prompt, or of all that is computed again, and known."""
    is_decoded = scheduled.start >= scheduled.request.num_prompt_tokens
    return scheduled.token_from < 0 and (scheduled.num_tokens > 1 or not is_decoded)


def make_window(
    wanted: WantedGuess,
    start: int,
    num_tokens: int = 1,
    *,
    samples: bool = True,
    token_from: int = -1,
) -> ScheduledRequest:
    return ScheduledRequest(
        wanted.request, start, num_tokens, wanted.block_table, samples, token_from
    )


class DraftModel(NamedTuple):
    """A draft model that is loaded, and what keeps it so."""

    runner: DraftRunner
    compiled: CompiledPrograms
    weights: EngineWeights
    warm_up_keys: Sequence[ProgramKey]
    host_bytes: Callable[[int], dict[str, int]]
    """Bytes of all arrays in the host's memory, by cause, with a number of KV blocks."""

    def start(self, after: CompiledPrograms) -> None:
        """Compile its programs: all of them now, or in a thread, once others are compiled."""
        self.compiled.compile_first()
        self.runner.warm_up(self.warm_up_keys)
        self.compiled.start_others(after)

    def sleep(self, level: int) -> None:
        """Free the caches' memory, with `level` 2 the weights' too."""
        self.runner.release_arrays()
        if level == 2:
            self.weights.release()

    def wake_up(self) -> None:
        """Allocate the caches, and read weights that were released."""
        if self.weights.num_missing:
            self.weights.load(self.weights.open())
        self.runner.make_arrays()

    def close(self, *, wait: bool) -> None:
        """Compile no more; `wait` for what compiles now."""
        self.compiled.close(wait=wait)
        self.runner.end()


# ---- which models may guess for which ------------------------------------------------------------


def make_draft_config(config: EngineConfig, draft: ModelConfig) -> EngineConfig:
    """Return an engine's configuration with the draft model in the model's place."""
    cache = replace(config.cache, encoder_cache_dir=None, kv_offload_dir=None, kv_offload_gb=0.0)
    return replace(config, model=draft, draft=None, cache=cache, lora=LoRAConfig())


def check_draft_settings(config: EngineConfig) -> None:
    """Raise ConfigError where no draft model is served."""
    assert config.draft is not None, "there is no draft model"
    reason = None
    if config.parallel.num_processes > 1:
        reason = f"the model is sharded over {config.parallel.num_processes} processes"
    elif config.cache.encoder_workers:
        reason = "with `encoder_workers` nobody encodes the items for it"
    elif config.model.mm.enable_mm_embeds:
        reason = "`enable_mm_embeds` lets requests have embeddings, which are of one model alone"
    if reason is not None:
        raise ConfigError(_refusal(config.draft.model, reason))


def check_draft_model(name: str, engine: Programs, draft: Programs) -> None:
    """Raise ConfigError unless a draft model takes, and answers in, the engine's model's tokens."""
    ours, its = engine.host_inputs, draft.host_inputs
    reason = None
    if engine.vocab_size != draft.vocab_size:
        reason = (
            f"it has logits of {draft.vocab_size} tokens, and the engine's model of "
            f"{engine.vocab_size}"
        )
    elif draft.num_state_slots or draft.max_encoder_len or engine.max_encoder_len:
        reason = "a draft model and its engine's are decoders without recurrent layers"
    elif not _takes_same_items(ours, its):
        reason = "it encodes other units of an item, or other embeddings of one, than the model"
    if reason is not None:
        raise ConfigError(_refusal(name, reason))


def _takes_same_items(ours: HostInputs, its: HostInputs) -> bool:
    return (
        type(ours) is type(its)
        and ours.encoder_spec == its.encoder_spec
        and ours.clip_spec == its.clip_spec
        and ours.num_extra_rows == its.num_extra_rows
    )


def _refusal(name: str, reason: str) -> str:
    return (
        f"`speculative_config` names `{name}` as its `model`, which cannot guess here: {reason}; "
        "give a smaller model of the same family, or the method 'ngram'"
    )
