"""The scheduler: which tokens and items the next step computes, without prefill/decode phases.

Every running request gets at least one token a step, oldest first; then waiting ones are admitted
strictly in order, so that none starves. No device arrays.
"""

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import msgspec

from mmjax.cache.adapter_slots import NO_SLOT, AdapterSlots
from mmjax.cache.awaited_rows import AwaitedRows
from mmjax.cache.encoder_cache_manager import EncoderCacheManager
from mmjax.cache.kv.kv_cache_manager import BlockSource, KVCacheManager
from mmjax.cache.state_slots import NO_STATE, StateSlots
from mmjax.engine.scheduling.adapters import RegisteredAdapter
from mmjax.engine.scheduling.admission import ItemSizes
from mmjax.engine.scheduling.buckets import Buckets
from mmjax.engine.scheduling.outputs import (
    AdapterLoad,
    ModelRunnerOutput,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
    WantedGuess,
    make_delta,
)
from mmjax.engine.scheduling.queues import WaitingQueue
from mmjax.engine.scheduling.request import EncoderItem, Request, RequestStatus
from mmjax.engine.scheduling.speculation import Speculation
from mmjax.engine.scheduling.windows import WindowFitter
from mmjax.errors import (
    CapacityError,
    InternalError,
    MediaIdConflictError,
    RequestError,
    RequestValueError,
)
from mmjax.system.logger import get_logger
from mmjax.transport.messages import STEP_TOKEN_BOUNDS, RequestOutputDelta

logger = get_logger(__name__)


class StepLimits(NamedTuple):
    """What a step may hold until all programs are compiled."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_encoder_input_tokens: int
    max_num_rows: int
    """Sampled tokens, and guesses that are verified beside them."""


@dataclass(slots=True)
class _Plan:
    """The step that is being scheduled."""

    tokens_left: int
    embeds_left: int
    states_left: int
    """Encoder hidden states that the step may still write for new requests."""
    requests: list[tuple[Request, int, bool]] = field(default_factory=list)
    """With how many tokens are computed, and whether items are encoded for them."""
    items: list[EncoderItem] = field(default_factory=list)
    loads: list[AdapterLoad] = field(default_factory=list)
    restored_states: list[tuple[int, int]] = field(default_factory=list)
    kept_states: list[tuple[int, int]] = field(default_factory=list)
    restored_blocks: list[tuple[BlockSource, int]] = field(default_factory=list)
    num_preempted: int = 0

    @property
    def is_decoding(self) -> bool:
        """Whether every request computes one token behind its prompt."""
        return all(
            number == 1 and request.num_output_tokens and not has_items
            for request, number, has_items in self.requests
        )


class Scheduler:
    """Holds all unfinished requests, and schedules steps."""

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        encoder_cache: EncoderCacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_encoder_input_tokens: int,
        max_num_queued_reqs: int = 1024,
        max_num_encoder_states: int = 0,
        patches_per_token: int = 0,
        packs_clips: bool = False,
        keeps_runs_whole: bool = False,
        enable_chunked_prefill: bool = True,
        max_loras: int = 0,
        speculation: Speculation | None = None,
        max_num_rows: int = 0,
        state_slots: StateSlots | None = None,
        awaited: AwaitedRows | None = None,
        buckets: Buckets | None = None,
    ) -> None:
        """`patches_per_token`: of an encoder that takes packs of patches; 0: it takes units.

        `packs_clips`: whether another takes packs of clips.
        `max_num_rows`: of a step with guesses, of which `speculation` decides; None: without any.
        `state_slots` None: no recurrent layers. `awaited` None: the engine encodes all itself.
        `buckets`: of steps, whose padding is spared; None: there is none.
        """
        self._buckets = self._final_buckets = buckets
        self.awaited = awaited
        self.state_slots = state_slots
        self.adapter_slots = AdapterSlots(max_loras)
        self.kv_cache, self.encoder_cache = kv_cache, encoder_cache
        self.running: list[Request] = []
        """In the order of the waiting queue; all hold blocks."""
        self.waiting = WaitingQueue()
        self._limits = self._final_limits = StepLimits(
            max_num_seqs, max_num_batched_tokens, max_num_encoder_input_tokens, max_num_rows
        )
        self.speculation = speculation
        self._max_num_unfinished_seqs = max_num_seqs + max_num_queued_reqs
        self._max_num_encoder_states, self._packs_clips = max_num_encoder_states, packs_clips
        self._patches_per_token = patches_per_token
        self._windows = WindowFitter(
            kv_cache=kv_cache,
            encoder_cache=encoder_cache,
            keeps_runs_whole=keeps_runs_whole,
            state_slots=state_slots,
            keeps_snapshots=enable_chunked_prefill,
            awaited=awaited,
        )
        self._enable_chunked_prefill = enable_chunked_prefill
        self.num_prompt_tokens = self.num_generation_tokens = self.num_step_tokens = 0
        self.step_token_counts = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        """Steps by their number of tokens."""
        self._requests: dict[str, Request] = {}
        self._item_sizes = ItemSizes()
        self._deferred: set[str] = set()
        """Running requests that got no token in the last step; they go first in the next."""
        self._suspects: dict[str, None] = {}
        """Requests of a failed step that have got no token since: they run one by one."""
        self._failed: dict[str, RequestError] = {}
        """Requests whose outputs could not be made."""
        self.weights_version = 0
        """Of the weights that tokens are sampled with."""

    def limit_steps(self, ready: Buckets | None) -> None:
        """Schedule only steps that the buckets hold, which never shrink; None: all are ready.

        What does not fit waits.
        """
        self._buckets = ready or self._final_buckets
        if ready is None:
            self._limits = self._final_limits
            return
        num_embeds = self._final_limits.max_num_encoder_input_tokens
        # An item is not divided over calls of packs.
        if self._patches_per_token and ready.encode:
            num_embeds = min(num_embeds, ready.encode[-1] // self._patches_per_token)
        if self._packs_clips:
            num_embeds = min([num_embeds, *ready.clips[-1:]])
        self._limits = StepLimits(
            min(ready.max_num_seqs, self._final_limits.max_num_seqs),
            min(ready.max_num_batched_tokens, self._final_limits.max_num_batched_tokens),
            num_embeds,
            min(ready.max_num_rows, self._final_limits.max_num_rows),
        )

    # ---- requests ------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request; `RequestError` if the queue is full or it conflicts with others."""
        if request.request_id in self._requests:
            raise RequestValueError(
                f"`request_id` {request.request_id!r} is in use; give each request its own",
                param="request_id",
            )
        if len(self._requests) >= self._max_num_unfinished_seqs:
            # It is not known which of the waiting ones will run in the next step: all count.
            numbers = f"{len(self.running)} requests run and {len(self.waiting)} wait already"
            raise CapacityError(f"{numbers}; try again later")
        for item in request.media_items:
            known = self.encoder_cache.get_num_embeds(item.identifier)
            if known not in (None, item.num_embeds):
                raise MediaIdConflictError(
                    f"the media id {item.identifier} stood for {known} embeddings before and for "
                    f"{item.num_embeds} here; give other content another id",
                    param="multi_modal_uuids",
                )
        assert request.encoder_len <= self._max_num_encoder_states, f"{request.encoder_len=}"
        self._item_sizes.add(request.media_items)
        self._requests[request.request_id] = request
        if request.lora_request is not None:
            request.lora_request.num_users += 1
        request.queued_at = time.monotonic()
        if self.speculation is not None and not request.logit_rules.has_grammar:
            request.forecast = self.speculation.watch()
        self.waiting.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests, waiting or running; unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                request.status = RequestStatus.FINISHED_ABORTED
                self._finish(request)

    def find_failed(self) -> list[tuple[str, RequestError]]:
        """Return the requests that cannot go on, and why."""
        failed = list(self._failed.items())
        if self.awaited is not None:
            failed += self.awaited.find_failed()
        for request_id, request in self._requests.items():
            adapter = request.lora_request
            if adapter is not None and adapter.error is not None:
                failed.append((request_id, adapter.error))
                continue
            grammar = request.logit_rules.grammar
            if grammar is not None and (error := grammar.error) is not None:
                failed.append((request_id, error))
        return failed

    def begin_again(self, outputs: Sequence[SchedulerOutput | None]) -> list[str]:
        """Compute all requests again after a failed step; end, and return, the one at fault.

        The requests of the failed steps are scheduled one by one, until each has got a token: one
        whose step fails alone is at fault.

        Args:
            outputs: The steps that were scheduled and not read; None: one that failed before.
        """
        if None in outputs:
            computed = [self._requests[one] for one in [*self._suspects][:1] or self._requests]
        else:
            windows = [one for output in outputs if output is not None for one in output.requests]
            computed = [*dict.fromkeys(window.request for window in windows)]
        # One that has ended since may have been at fault, too.
        failed = [one.request_id for one in computed if not one.is_finished]
        at_fault = failed if len(computed) == 1 else []
        self._suspects = dict.fromkeys([*failed, *self._suspects])
        self.stop_running()
        self.abort(at_fault)
        if self.awaited is not None:
            # Others, which may not run meanwhile, would keep the suspects from asking for rows.
            for request_id in self._requests:
                self.awaited.forget(request_id)
        self.forget_all()
        return at_fault

    def change_weights(self, version: int, rename: Callable[[Request], None]) -> None:
        """Compute all requests again from their tokens, by other weights.

        What the former ones computed is kept where its key is still asked for. `rename` gives a
        request, which holds nothing, its new keys.
        """
        self.stop_running()
        self.weights_version = version
        for request in self._requests.values():
            if request.encoder is not None:
                self.encoder_cache.discard(request.encoder.identifier)
            self._item_sizes.remove(request.media_items)
            rename(request)
            self._item_sizes.add(request.media_items)
        self.reset_prefix_cache()

    def change_adapter(
        self,
        version: int,
        old: RegisteredAdapter,
        new: RegisteredAdapter,
        rename: Callable[[Request, str], None],
    ) -> None:
        """Let requests of an adapter go on with another one, by which they are computed again.

        `rename` gives a request its new keys; it is told the version of its old adapter.
        """
        self.weights_version = version
        requests = [one for one in self._requests.values() if one.lora_request is old]
        self._stop(requests)
        for request in requests:
            request.lora_request = new
            self._item_sizes.remove(request.media_items)
            rename(request, old.lora_version)
            self._item_sizes.add(request.media_items)
        self.adapter_slots.forget(old)

    def forget_all(self, *, keeps_host: bool = False) -> None:
        """Let all requests wait, after what they hold is lost; `keeps_host`: on the device."""
        self.stop_running()
        self.encoder_cache.reset()
        self.reset_prefix_cache(keeps_host=keeps_host)
        self.kv_cache.renew_blocks()
        self.adapter_slots.reset()

    def reset_prefix_cache(self, *, keeps_host: bool = False) -> None:
        """Let no prefix be found; requests keep what they have, `keeps_host`: and host memory."""
        self.kv_cache.reset_prefix_cache(keeps_host=keeps_host)
        if self.state_slots is not None:
            self.state_slots.forget_snapshots()

    def stop_running(self) -> None:
        """Let all requests wait and hold nothing, in whatever state a failure has left them."""
        self.running.clear()
        self._stop(self._requests.values())

    def _stop(self, requests: Iterable[Request]) -> None:
        waiting = {request.request_id for request in self.waiting}
        for request in requests:
            if request in self.running:
                self.running.remove(request)
            self._release(request)
            request.num_computed_tokens = request.num_in_flight = 0
            if request.request_id not in waiting:
                request.status = RequestStatus.PREEMPTED
                request.num_preemptions += 1
                self.waiting.add(request)

    def has_unfinished(self) -> bool:
        """Return whether any request waits or runs."""
        return bool(self._requests)

    @property
    def blocked_ids(self) -> list[str]:
        """Ids of the requests that wait for their grammars."""
        return [request_id for request_id, one in self._requests.items() if one.is_blocked]

    @property
    def request_ids(self) -> list[str]:
        """Ids of all unfinished requests."""
        return list(self._requests)

    def update_from_output(
        self, output: SchedulerOutput, sampled: ModelRunnerOutput, *, encode_s: float = 0.0
    ) -> list[RequestOutputDelta]:
        """Append the sampled tokens, finish requests that ended; return each request's output.

        `encode_s`: seconds that the step's items took.
        """
        deltas = []
        now = time.monotonic()
        for scheduled in output.requests:
            request = scheduled.request
            if scheduled.encodes:
                request.times.encode += encode_s
            tokens = sampled.get(request.request_id)
            # The request may have ended since the step was scheduled: drop its tokens.
            if tokens is None or request.is_finished or scheduled.is_guessed:
                continue
            try:
                delta = self._take_tokens(scheduled, tokens, now)
            except Exception:
                # What one request cannot take must not end the others.
                logger.exception("request %s cannot take its token", request.request_id)
                self._failed[request.request_id] = InternalError("internal error in the engine")
                continue
            if delta is not None:
                deltas.append(delta)
        return deltas

    def withdraw(self, scheduled: Iterable[ScheduledRequest]) -> None:
        """Take back windows of one token, which get none: they are scheduled again."""
        for window in scheduled:
            request = window.request
            request.num_in_flight -= 1
            if self.state_slots is not None and request.status is RequestStatus.RUNNING:
                # Its states have taken the token in, and would do so twice.
                self._preempt(request)
            # A request that was preempted since computes all again in any case.
            request.num_computed_tokens = min(request.num_computed_tokens, window.start)

    def _take_tokens(
        self, scheduled: ScheduledRequest, tokens: Sequence[SampledToken], now: float
    ) -> RequestOutputDelta | None:
        """Append the sampled tokens that are right, and finish the request if it ends there."""
        request = scheduled.request
        if tokens[0].states is not None:
            request.add_states(scheduled.start, tokens[0].states)
        if tokens[0].prompt_logprobs:
            request.add_prompt_logprobs(scheduled.start, tokens[0].prompt_logprobs)
        request.alignment = tokens[0].alignment or request.alignment
        if not scheduled.samples:
            return None
        holds_blocks = request.status is RequestStatus.RUNNING
        request.num_in_flight -= 1
        num_hashed = len(request.block_hashes)
        taken = self._append(request, tokens)
        if holds_blocks:
            # Keys, values and states of the guesses that were right are in the cache.
            request.num_computed_tokens += len(taken) - 1
            request.accept_states(len(taken) - 1)
        if holds_blocks and len(request.block_hashes) > num_hashed:
            # The tokens may complete a block, which gets a hash.
            self.kv_cache.cache_blocks(
                request.request_id, request.block_hashes, request.num_computed_tokens
            )
        self.num_generation_tokens += len(taken)
        is_first = request.num_output_tokens <= 1
        if is_first:
            self.num_prompt_tokens += request.num_prompt_tokens
            request.times.prefill = now - request.started_at - request.times.encode
        delta = make_delta(request, taken, self.weights_version, is_first=is_first)
        if request.is_finished:
            self._finish(request)
        elif request.request_id in self._suspects:
            self._clear(request)
        return delta

    def _append(self, request: Request, tokens: Sequence[SampledToken]) -> Sequence[SampledToken]:
        """Append the first token, and each that was sampled behind a right guess; return them.

        The guesses stand where the tokens go. A prompt that becomes vectors is at its end.
        """
        if tokens[0].states is not None:
            request.status = RequestStatus.FINISHED_STOPPED
            return []
        num_taken = 0
        for token in tokens:
            guessed = request.token_ids[request.num_tokens]
            request.append_token(token.token_id)
            num_taken += 1
            if request.is_finished or token.token_id != guessed:
                break
        if self.speculation is not None:
            known, num_guessed = request.known_token_ids, len(tokens) - 1
            self.speculation.note_tokens(request.forecast, known, num_guessed, num_taken)
        return tokens[:num_taken]

    def _clear(self, request: Request) -> None:
        """Note that a suspect was computed alone; it makes room for the next one."""
        del self._suspects[request.request_id]
        if self._suspects and request.status is RequestStatus.RUNNING:
            self._preempt(request)

    def _may_run(self, request: Request) -> bool:
        """Whether a request may be scheduled at all; of suspects the first, beside nobody."""
        if request.is_blocked:
            return False
        if not self._suspects:
            return True
        return request.request_id == next(iter(self._suspects)) and not any(
            other.num_in_flight for other in self._requests.values() if other is not request
        )

    def _finish(self, request: Request) -> None:
        request.log_end()
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request)
        self.kv_cache.forget_request(request.request_id)
        self.waiting.forget(request)
        if self.awaited is not None:
            self.awaited.forget(request.request_id)
        self._item_sizes.remove(request.media_items)
        if request.encoder is not None:
            # No other request has an encoder's hidden states.
            self.encoder_cache.discard(request.encoder.identifier)
        if request.lora_request is not None:
            request.lora_request.num_users -= 1
        self._suspects.pop(request.request_id, None)
        self._failed.pop(request.request_id, None)
        del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        self.kv_cache.free(request.request_id)
        self.encoder_cache.free(request.request_id)
        self._deferred.discard(request.request_id)
        if self.state_slots is not None:
            self.state_slots.release(request.state_slots)
            request.state_slots = ()
        if request.adapter_slot != NO_SLOT:
            assert request.lora_request is not None, f"{request.adapter_slot=} of no adapter"
            self.adapter_slots.release(request.lora_request)
            request.adapter_slot = NO_SLOT
            if request.lora_request.is_removed:
                self.adapter_slots.forget(request.lora_request)

    # ---- one step ------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Return the next step, and count its tokens as computed."""
        plan = _Plan(
            self._limits.max_num_batched_tokens,
            self._limits.max_num_encoder_input_tokens,
            self._max_num_encoder_states,
        )
        self._schedule_running(plan)
        if not plan.num_preempted and not self._deferred:
            self._admit_waiting(plan)
        self._spare_padding(plan)
        guessed = self._guess(plan)
        # All blocks of the step are allocated, and none of its own has a hash yet.
        copied_blocks = self.kv_cache.pop_copied()
        scheduled: list[ScheduledRequest] = []
        for request, num_tokens, encodes in plan.requests:
            window = self._advance(plan, request, num_tokens, encodes)
            scheduled += [window, *_follow(window, guessed.get(request.request_id, 0))]
        self._count_step(sum(window.num_tokens for window in scheduled))
        sampled = (window for window in scheduled if window.samples)
        for row, window in enumerate(sampled):
            if not window.is_guessed:
                window.request.sampled_row = row
                window.request.num_in_flight += 1
        return SchedulerOutput(
            requests=scheduled,
            encoder_items=plan.items,
            freed_identifiers=self.encoder_cache.get_freed_mm_hashes(),
            num_preempted=plan.num_preempted,
            adapter_loads=plan.loads,
            restored_states=plan.restored_states,
            kept_states=plan.kept_states,
            copied_blocks=copied_blocks,
            restored_blocks=plan.restored_blocks,
        )

    def waits_for_read(self, before: SchedulerOutput) -> bool:
        """Return whether the step before must be read before the next one is scheduled.

        It has guesses, or the next one is to have some, for which all tokens must be known. Behind
        a step with a prompt there may be another.
        """
        if self.speculation is None:
            return False
        if before.has_guesses:
            return True
        if self._suspects:
            return False
        shares = self._share_out(self.running, self._limits.max_num_rows - len(self.running))
        return bool(shares) and before.is_plain

    def _share_out(self, requests: Sequence[Request], num_rows: int) -> Mapping[int, int]:
        """Return how many guessed tokens the requests get, by their places."""
        assert self.speculation is not None, "nothing is guessed"
        forecasts = (request.forecast for request in requests)
        chances = [0.0 if one is None else one.chance for one in forecasts]
        return self.speculation.share_out(chances, num_rows)

    def _guess(self, plan: _Plan) -> dict[str, int]:
        """Place guesses behind the tokens of requests; return how many, by request id.

        Only where all tokens are known, and where no prompt is computed beside them: a token has
        the same bits in any such step.
        """
        if self.speculation is None or self._suspects or not plan.is_decoding:
            return {}
        requests = [request for request, _, _ in plan.requests]
        if plan.num_preempted or any(request.num_in_flight for request in requests):
            return {}
        wanted: list[WantedGuess] = []
        num_rows = min(self._limits.max_num_rows - len(requests), plan.tokens_left)
        for place, most in self._share_out(requests, num_rows).items():
            request = requests[place]
            number = min(most, request.room_for_guess)
            total = request.num_tokens + number
            # Nobody is preempted for a guess.
            if number and self.kv_cache.allocate_slots(request.request_id, total):
                table = self.kv_cache.get_block_table(request.request_id)
                wanted.append(WantedGuess(request, number, table))
        return self.speculation.guess(wanted)

    def _count_step(self, num_tokens: int) -> None:
        if num_tokens:
            self.num_step_tokens += num_tokens
            self.step_token_counts[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1

    def _schedule_running(self, plan: _Plan) -> None:
        queue = deque(request for request in self.running if not request.is_last_in_flight)
        if self._deferred:
            queue = deque(sorted(queue, key=lambda r: r.request_id not in self._deferred))
        went_first, self._deferred = self._deferred, set()
        while queue and plan.tokens_left:
            request = queue.popleft()
            if not self._may_run(request):
                continue
            # Reserve one token for each request after this one, but not against deferred ones.
            reserve = 0 if request.request_id in went_first else len(queue)
            num_tokens, items = self._windows.fit(
                request, plan.tokens_left - reserve, plan.embeds_left
            )
            if num_tokens == 0:
                if not self._windows.is_waiting(request):  # else others go on, too
                    self._deferred.add(request.request_id)
            elif self._make_room(plan, request, num_tokens, queue):
                self._commit(plan, request, num_tokens, items)
        # The rest got no token, since deferred requests took them.
        self._deferred.update(request.request_id for request in queue)

    def _make_room(
        self, plan: _Plan, request: Request, num_tokens: int, queue: deque[Request]
    ) -> bool:
        """Allocate blocks, preempting from the end of `queue`; False: `request` was preempted."""
        total = request.num_computed_tokens + num_tokens
        while not self.kv_cache.allocate_slots(request.request_id, total):
            victim = queue.pop() if queue else request
            self._preempt(victim)
            plan.num_preempted += 1
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Free a request's blocks; all its tokens are computed again later."""
        self.running.remove(request)
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.add(request)

    def _admit_waiting(self, plan: _Plan) -> None:
        most = self._limits.max_num_seqs
        while plan.tokens_left and len(self.running) < most:
            request = next(filter(partial(self._may_start, set()), self.waiting), None)
            if request is None:
                return
            num_tokens, items = 0, []
            if self._windows.start(request, plan.states_left):
                num_tokens, items = self._windows.fit(request, plan.tokens_left, plan.embeds_left)
            num_computed = request.num_computed_tokens + num_tokens
            is_whole = num_computed == request.num_tokens
            may_run = num_tokens and (is_whole or self._enable_chunked_prefill)
            if not (may_run and self.kv_cache.allocate_slots(request.request_id, num_computed)):
                self._release(request)
                return
            self.waiting.remove(request)
            plan.restored_blocks += self.kv_cache.restore_blocks(
                request.request_id, request.num_tokens
            )
            self._take_slots(plan, request)
            request.status = RequestStatus.RUNNING
            request.start(time.monotonic())
            if request.num_preemptions == 0 and not request.num_output_tokens:
                request.num_cached_tokens = request.num_computed_tokens
                self.kv_cache.note_prefix(request.num_cached_tokens, request.num_prompt_tokens)
            request.log_start()
            insort(self.running, request, key=self.waiting.key)
            plan.states_left -= request.encoder_len
            self._commit(plan, request, num_tokens, items)

    def _may_start(self, draining: set[Hashable], request: Request) -> bool:
        """Return whether a request may run, and its adapter; called in the queue's order."""
        adapter = request.lora_request
        asked = (request.request_id, request.block_hashes, request.num_tokens)
        return (
            (adapter is None or self.adapter_slots.may_start(adapter, draining))
            and self._may_run(request)
            and self.kv_cache.is_read(*asked, is_idle=not self.running)
            and self._windows.has_rows(request)
        )

    def _spare_padding(self, plan: _Plan) -> None:
        """Leave the end of a prompt to the next step where both have less padding than one."""
        if self._buckets is None or plan.is_decoding or not self._enable_chunked_prefill:
            return
        total = sum(number for _, number, _ in plan.requests)
        spare = total - self._buckets.cut(total, len(plan.requests))
        for place, (request, number, encodes) in enumerate(plan.requests):
            if spare and number > spare and self._windows.may_end(request, number - spare):
                plan.requests[place] = (request, number - spare, encodes)
                return

    def _take_slots(self, plan: _Plan, request: Request) -> None:
        """Give a request that starts its slots, of adapters and of states."""
        if self.state_slots is not None:
            request.state_slots = self.state_slots.acquire()
            if request.num_computed_tokens:
                plan.restored_states.append((request.found_state, request.state_slots[0]))
        adapter = request.lora_request
        if adapter is not None:
            request.adapter_slot, is_new = self.adapter_slots.acquire(adapter)
            if is_new:
                plan.loads.append(AdapterLoad(request.adapter_slot, adapter.host_copy))

    def _commit(
        self, plan: _Plan, request: Request, num_tokens: int, items: list[EncoderItem]
    ) -> None:
        plan.tokens_left -= num_tokens
        plan.requests.append((request, num_tokens, bool(items)))
        self.encoder_cache.note_found(request.request_id)
        for item in items:
            self.encoder_cache.allocate(request.request_id, item.identifier, item.num_embeds)
            plan.embeds_left -= item.num_embeds
            slot, given = request.adapter_slot, self._windows.take(item)
            plan.items.append(given if slot == NO_SLOT else replace(given, adapter_slot=slot))
            named = request.encoded if given is item else request.encoded_apart
            named.append(item.mm_hash or item.identifier)

    def _keep_state(self, plan: _Plan, request: Request, end: int) -> None:
        """Keep a snapshot behind a window that ends where one is wanted."""
        if self.state_slots is None or end not in request.snapshot_places:
            return
        block_hash = request.block_hashes[end // self.kv_cache.block_size - 1]
        target = self.state_slots.keep(block_hash)
        if target != NO_STATE:
            plan.kept_states.append((request.state_slots[0], target))

    def _advance(
        self, plan: _Plan, request: Request, num_tokens: int, encodes: bool
    ) -> ScheduledRequest:
        """Count the window as computed, and release the items that end in it."""
        start = request.num_computed_tokens
        end = start + num_tokens
        request.num_computed_tokens = end
        if end // self.kv_cache.block_size > start // self.kv_cache.block_size:
            self.kv_cache.cache_blocks(request.request_id, request.block_hashes, end)
        self._keep_state(plan, request, end)
        if start < request.items_end:
            self._windows.free_items(request, start, end)
        encoder_table = None
        if request.encoder is not None:
            encoder_table = self.kv_cache.get_encoder_block_table(request.request_id)
            if start == request.num_found_tokens:
                self._windows.free_encoder(request)
        return ScheduledRequest(
            request,
            start,
            num_tokens,
            self.kv_cache.get_block_table(request.request_id),
            samples=end == request.num_tokens_with_in_flight,
            token_from=request.sampled_row if end > request.num_tokens else -1,
            encodes=encodes,
            encoder_table=encoder_table,
        )


def _follow(window: ScheduledRequest, num_guessed: int) -> Iterator[ScheduledRequest]:
    """Yield a window for each of the tokens that are guessed behind another."""
    for place in range(window.end, window.end + num_guessed):
        yield msgspec.structs.replace(window, start=place, is_guessed=True)
