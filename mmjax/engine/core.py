"""The engine core: admit requests, schedule, run steps. In P1, or in the process of `LLM`."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array

from mmjax.cache import engine_receiver_cache_from_config
from mmjax.config.engine_config import EngineConfig
from mmjax.engine.device.compilation import CompilationCounter
from mmjax.engine.device.runner import InFlight
from mmjax.engine.scheduling.admission import resolve_features
from mmjax.engine.scheduling.buckets import Buckets
from mmjax.engine.scheduling.logit_rules import Grammars
from mmjax.engine.scheduling.outputs import SchedulerOutput
from mmjax.engine.scheduling.queues import Deadlines
from mmjax.engine.scheduling.request import Request
from mmjax.engine.scheduling.request_maker import RequestMaker
from mmjax.engine.start import start_engine
from mmjax.errors import ConfigError, MMJaxError, RequestError, RequestValueError
from mmjax.layers.module import Params
from mmjax.models.registry import MULTIMODAL_REGISTRY
from mmjax.system.host_memory import resident_by_cause
from mmjax.system.logger import get_logger
from mmjax.transport.messages import (
    MAX_LISTED_LORAS,
    EngineCoreRequest,
    Heartbeat,
    RequestOutputDelta,
)
from mmjax.weights.adapter import Adapter
from mmjax.weights.sharding import Device
from mmjax.weights.update import Replacement, flatten_given

logger = get_logger(__name__)

_WAIT_S = 0.05
_MASK_WAIT_S = 0.005
"""How long a step waits for its grammars to read a token, while the device computes: those of
schemas take some hundred microseconds. A later one is not in the step, which others are."""
_STATE_WAIT_S = 1.0
"""Likewise of a model with recurrent layers, whose requests compute their prompts again if a step
has to go without them."""


class _Dispatched(NamedTuple):
    """A step on the device."""

    output: SchedulerOutput
    in_flight: InFlight
    begun_at: float
    """When it was dispatched, in `time.monotonic()` seconds."""
    host_s: float = 0.0
    """Seconds that scheduling and dispatching it took."""
    sent_at: float = 0.0
    """When the device had all of it."""

    @property
    def awaits_masks(self) -> bool:
        """Whether it is not sampled yet."""
        return self.in_flight.tables is not None


class EngineCore:
    """One model, its caches, and all unfinished requests."""

    is_warming = False
    """Whether more steps without a request have programs to run for the first time."""
    _has_failed = False
    """Whether a step has failed, or was interrupted, and `recover` was not called since."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        model_class: Any = None,
        params: Params | None = None,
        devices: Sequence[Device] | None = None,
        draft_params: Params | None = None,
    ) -> None:
        """Load the model, allocate the caches, compile programs as `config.precompile` says.

        Args:
            config: All settings.
            model_class: In place of the registry's.
            params: In place of the checkpoint's weights.
            devices: `tensor_parallel_size` of this process's, in place of the first ones.
            draft_params: In place of the weights of a draft model's checkpoint.
        """
        self.config = config
        given = {"model_class": model_class, "params": params, "draft_params": draft_params}
        parts = start_engine(config, devices=devices, **given)
        self._placement = parts.programs.placement
        self._scheduler, self._runner = parts.scheduler, parts.runner
        self._adapters, self._adapter_reader = parts.adapters, parts.adapter_reader
        self._weights, self._workers, self._draft = parts.weights, parts.workers, parts.draft
        self.weights_version = 0
        """Of the present weights: how often they were changed since the start."""
        self.is_sleeping = False
        """Whether the caches' memory is released; nothing can be computed."""
        self.num_kv_blocks = parts.limits.num_blocks
        self._programs = parts.compiled
        self._host_bytes = parts.describe_host()
        self.num_programs = parts.num_programs
        """Programs, compiled or to come: `encode`, `step` and `sample` over all buckets."""
        self.device_threads = parts.device_threads
        self.startup_seconds = parts.seconds
        """Seconds that the start took, by phase."""
        self._in_flight: _Dispatched | None = None
        """The step that was dispatched and is not read yet."""
        self.note_computing: Callable[[Sequence[str]], None] = lambda request_ids: None
        """Called with the requests that the device computes, before it does."""
        self._open_outputs: list[SchedulerOutput | None] = []
        """What was scheduled and is not read yet; None: what is being scheduled."""
        self._failure: Exception | None = None
        """Why the step on the device failed; the next call raises it, once all tokens are read."""
        self._read_at = 0.0
        """When the last step was read, in `time.monotonic()` seconds."""
        self.num_preemptions = 0
        self._receiver_cache = (
            engine_receiver_cache_from_config(config.model.mm)
            if self._placement.is_leader
            else None
        )
        self._requests = RequestMaker(
            config,
            limits=parts.limits,
            host_inputs=parts.programs.host_inputs,
            embed_width=parts.programs.embed_width,
            dtype=parts.programs.dtype,
            adapters=parts.adapters,
        )
        self._counter = CompilationCounter()
        self._deadlines = Deadlines()
        self._grammars = Grammars(
            partial(MULTIMODAL_REGISTRY.load_tokenizer, config.model), parts.limits.vocab_size
        )
        self._ready: Buckets | None = None
        """The buckets that steps are scheduled for."""
        self._use_compiled()

    # ---- serving -------------------------------------------------------------------------------

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request; raise `RequestError` if it cannot be served.

        A refused one changes nothing but the receiver cache.

        Everything that may fail on a client's data fails here, not in a step, which computes many
        requests. Raises MultiModalCacheMissError for items without tensors that are not cached.
        """
        self._mend()
        # Before any check: P0's sender cache has recorded these items, refused or not.
        features = resolve_features(message.mm_features, self._receiver_cache)
        request = self._requests.make(message, features)
        # The last check, behind which nothing is refused.
        self._scheduler.add_request(request)
        if request.lora_request is not None:
            self._adapters.use(request.lora_request)
        request.logit_rules.grammar = self._grammars.start_for(message)
        logger.debug(
            "request %s waits: %d prompt tokens, %d items",
            *(message.request_id, request.num_prompt_tokens, len(features)),
        )
        self._deadlines.set(message.request_id, message.deadline)

    def take_items(self, message: EngineCoreRequest) -> None:
        """Take in the items that a request brings to the receiver cache, and not the request."""
        # What is missing is reported for the next request that needs it.
        with suppress(MMJaxError):
            resolve_features(message.mm_features, self._receiver_cache)

    def expire(self, now: float | None = None) -> list[str]:
        """Abort the requests whose deadline has passed; return their ids."""
        expired = self._deadlines.pop_expired(time.monotonic() if now is None else now)
        if not expired:
            return []
        unfinished = set(self._scheduler.request_ids)
        expired = [request_id for request_id in expired if request_id in unfinished]
        self._scheduler.abort(expired)
        return expired

    def pop_failed(self) -> list[tuple[str, RequestError]]:
        """Abort the requests that cannot go on, as by their grammar; return their ids, and why."""
        failed = self._scheduler.find_failed()
        self._scheduler.abort([request_id for request_id, _ in failed])
        return failed

    def load_adapter(self, lora_name: str, path: Path) -> None:
        """Begin to load an adapter, which requests may name from now on; see `pop_loaded`.

        Raises RequestValueError for a name that is in use.
        """
        if not self.config.lora.enable_lora:
            raise RequestValueError(
                "this engine serves no adapters; start it with `enable_lora`", param="lora_name"
            )
        self._adapters.load(lora_name, path)

    def unload_adapter(self, lora_name: str) -> None:
        """Forget an adapter; unfinished requests that name it go on. ModelNotFoundError."""
        self._scheduler.adapter_slots.forget(self._adapters.unload(lora_name))

    def wait_loaded(self) -> None:
        """Wait until all adapters are read; raise what is wrong with the first bad one."""
        self._adapters.wait()
        for _, error in self._adapters.pop_loaded():
            if error is not None:
                raise error

    @property
    def is_loading(self) -> bool:
        """Whether adapters are being loaded that `pop_loaded` has not returned."""
        return self._adapters.is_loading

    def pop_loaded(self) -> list[tuple[str, RequestError | None]]:
        """Return the names of adapters that were loaded, or could not be, and why."""
        return self._adapters.pop_loaded()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests, waiting or running; unknown ids are ignored."""
        self._scheduler.abort(request_ids)

    def step(self) -> list[RequestOutputDelta]:
        """Dispatch a step, and return the outputs of the one before it.

        The device computes a step while the host reads the last one and prepares the next; so the
        first call returns nothing. Without `async_scheduling` a step is read at once.
        """
        self._mend()
        is_idle = not self._scheduler.has_unfinished()
        if not is_idle:
            self._check_ready()
        try:
            return self._rest() if is_idle else self._go_on()
        except BaseException:
            self._has_failed = True
            raise

    def _check_ready(self) -> None:
        """Raise RuntimeError where nothing can be computed."""
        if self.is_sleeping:
            raise RuntimeError("the engine sleeps; call `wake_up` first")
        if self._weights.num_missing:
            raise RuntimeError(
                f"{self._weights.num_missing} of the model's parameters are missing since an "
                "update failed, or since they were released; give them all"
            )
        if self._has_failed and self._failure is None:
            raise RuntimeError(
                "a step has failed, or was interrupted, so that its requests cannot go on; call "
                "`recover`, or abort them all"
            )

    def _mend(self) -> None:
        """Begin on empty caches where a step has failed whose requests have all left since.

        What it should have written is counted as written, and would be found.
        """
        is_idle = self._has_failed and not self._scheduler.has_unfinished()
        if is_idle and not self.is_sleeping and not self._weights.num_missing:
            self.recover()

    def _rest(self) -> list[RequestOutputDelta]:
        """Do what may be done without requests; those of the step in flight have ended."""
        self._in_flight = self._failure = None
        self._open_outputs.clear()
        self._save_blocks()
        self._runner.wait()
        self.note_computing(())
        self.is_warming = self._run_ahead()
        return []

    def _go_on(self) -> list[RequestOutputDelta]:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._in_flight = None
            raise failure
        self._use_compiled()
        with self._counter.watching():
            before = self._in_flight
            if before is not None and self._scheduler.waits_for_read(before.output):
                return self._read_first(before)
            self._in_flight = self._dispatch()
            if self._in_flight is not None and self._in_flight.awaits_masks:
                assert before is not None, "a token in flight is of the step before"
                deltas = self._read(before)
                with self._keeping_failure():
                    self._in_flight = self._sample(self._in_flight)
                return deltas
            if not self.config.scheduler.async_scheduling:
                before, self._in_flight = self._in_flight, None
            if before is None:
                if self._in_flight is None:
                    self._wait()
                return []
            return self._read(before)

    @contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        """Keep an error of the block for the next call: this one has tokens to return."""
        try:
            yield
        except Exception as error:
            self._failure, self._has_failed = error, True
        except BaseException:
            self._has_failed = True
            raise

    def _run_ahead(self) -> bool:
        can_run = not self.is_sleeping and not self._weights.num_missing
        num_used = self._scheduler.kv_cache.num_ever_used
        if not can_run or self._runner.run_ahead(num_used):
            return can_run
        return self._draft is not None and self._draft.runner.run_ahead(num_used)

    def _wait(self) -> None:
        """Wait a little for what lets a request start, or go on."""
        scheduler = self._scheduler
        rows = [] if scheduler.awaited is None else scheduler.awaited.pending
        jobs: list[Future[Any]] = [*scheduler.kv_cache.pending, *rows]
        jobs += [*self._grammars.pending, *self._adapters.pending]
        if jobs:
            wait(jobs, _WAIT_S, FIRST_COMPLETED)
        else:
            # What waits needs a larger program than there is yet.
            self._programs.wait(_WAIT_S)
            self._programs.check()

    def _read_first(self, before: _Dispatched) -> list[RequestOutputDelta]:
        """Read the step on the device, and dispatch the next one only then.

        So all tokens are known, behind which others are guessed.
        """
        deltas = self._read(before)
        self._in_flight = None
        deadline = time.monotonic() + _MASK_WAIT_S
        for request in self._scheduler.running:
            # With no token in flight, a step holds only what has its mask.
            request.logit_rules.is_ready_by(deadline)
        with self._keeping_failure():
            self._in_flight = self._dispatch()
        return deltas

    def _sample(self, dispatched: _Dispatched) -> _Dispatched:
        """Sample a step when its grammars have read what the one before sampled."""
        has_states = self._scheduler.state_slots is not None
        deadline = time.monotonic() + (_STATE_WAIT_S if has_states else _MASK_WAIT_S)
        late = [
            scheduled
            for scheduled in dispatched.output.requests
            if scheduled.awaits_mask
            and not scheduled.request.is_finished
            and not scheduled.request.logit_rules.is_ready_by(deadline)
        ]
        self._scheduler.withdraw(late)
        ids = {scheduled.request.request_id for scheduled in late}
        return dispatched._replace(in_flight=self._runner.sample(dispatched.in_flight, ids))

    def _read(self, dispatched: _Dispatched) -> list[RequestOutputDelta]:
        output, in_flight, _, host_s, sent_at = dispatched
        # The device computes one step after the other.
        start = max(dispatched.begun_at, self._read_at)
        self._runner.wait_encoded(in_flight)
        encode_s = time.monotonic() - start
        sampled = self._runner.read(in_flight)
        self._read_at = time.monotonic()
        deltas = self._scheduler.update_from_output(output, sampled, encode_s=encode_s)
        self._open_outputs.pop(0)
        speculation = self._scheduler.speculation
        has_guesses = speculation is not None and output.has_guesses
        if speculation is not None and (has_guesses or output.is_plain):
            host_s += time.monotonic() - self._read_at
            # What the host takes where the device waits for it counts apart (`note_step`).
            start = max(start, sent_at) if has_guesses else start
            waited = None if has_guesses else host_s
            speculation.note_step(len(output.requests), self._read_at - start, waited)
        return deltas

    def _use_compiled(self) -> None:
        """Schedule for the programs that were compiled since the last step, too."""
        ready = self._programs.ready
        if ready is not self._ready:
            self._ready = ready
            is_partial = ready != self._runner.buckets
            self._scheduler.limit_steps(ready if is_partial else None)

    def _dispatch(self) -> _Dispatched | None:
        start = time.monotonic()
        self._open_outputs.append(None)
        output = self._open_outputs[-1] = self._scheduler.schedule()
        self.num_preemptions += output.num_preempted
        self.note_computing(self._find_computed(output))
        begun_at = time.monotonic()
        in_flight = self._runner.dispatch(output)
        if self._draft is not None:
            self._draft.runner.compute(output)
        if in_flight is not None and in_flight.found:
            for scheduled in output.requests:
                scheduled.request.note_found(in_flight.found)
        if in_flight is None:
            self._open_outputs.pop()
            return None
        sent_at = time.monotonic()
        return _Dispatched(output, in_flight, begun_at, sent_at - start, sent_at)

    def _find_computed(self, output: SchedulerOutput) -> list[str]:
        """Return the requests of the steps that are on the device, and of grammars in threads."""
        steps = [output] if self._in_flight is None else [self._in_flight.output, output]
        ids = {one.request.request_id: None for step in steps for one in step.requests}
        if self._grammars.pending:
            ids.update(dict.fromkeys(self._scheduler.blocked_ids))
        return list(ids)

    def _save_blocks(self) -> None:
        """Copy the KV blocks that the last steps filled, where they go to a directory."""
        copied = self._scheduler.kv_cache.pop_copied()
        if not self.is_sleeping:
            self._runner.move_blocks(SchedulerOutput(copied_blocks=copied))

    def _leave_directory(self) -> None:
        self._scheduler.kv_cache.leave_directory()
        if (pool := self._runner.host_pool) is not None:
            pool.close(has_failed=self._has_failed)

    def has_unfinished(self) -> bool:
        """Return whether any request waits or runs."""
        return self._scheduler.has_unfinished()

    def follow(self) -> None:
        """Make the calls that the leading process broadcasts, until it closes its engine."""
        assert not self._placement.is_leader, "requests come to this process"
        self._runner.follow()

    def close(self, *, wait: bool = True) -> None:
        """Free resources outside of Python; `wait` for threads that compile. Idempotent."""
        try:
            self._save_blocks()
            self._leave_directory()
        except Exception:
            logger.exception("the last KV blocks could not be written to `kv_offload_dir`")
        self._grammars.close()
        self._adapters.close()
        if self._workers is not None:
            self._workers.close()
        self._programs.close(wait=False)
        if self._draft is not None:
            self._draft.close(wait=wait)
        self._programs.close(wait=wait)
        self._runner.end()
        self._runner.forget_stored_rows()
        if self._receiver_cache is not None:
            self._receiver_cache.close()

    def recover(self) -> list[str]:
        """Compute all requests again after a failed step, on empty caches.

        Returns the id of the request that it ends, if one was alone in the step: else those of the
        step are computed one by one, to find the one at fault.
        """
        self._in_flight = self._failure = None
        self._has_failed = False
        # Without any, it failed before one was scheduled.
        outputs, self._open_outputs = self._open_outputs or [None], []
        at_fault = self._scheduler.begin_again(outputs)
        self._runner.reset()
        if self._draft is not None:
            self._draft.runner.reset()
        return at_fault

    # ---- weights -------------------------------------------------------------------------------

    @property
    def params(self) -> Params:
        """The model's parameters on its devices, by names of its tree."""
        return self._weights.params

    @property
    def has_weights(self) -> bool:
        """Whether all parameters are there: none was released, or lost by an update that failed."""
        return not self._weights.num_missing

    def match_weights(self, params: Mapping[Any, Any], *, prefix: str = "") -> list[Replacement]:
        """Return what `replace_weights` takes; CheckpointError for what does not fit the model.

        See `LLM.update_weights`.
        """
        self._check_alone()
        return self._weights.match(params, prefix=prefix)

    def replace_weights(self, replacements: Sequence[Replacement], *, donate: bool = False) -> None:
        """Replace parameters, after `drain`; all unfinished requests are computed again by them."""
        with self._changing_weights():
            has_new_tower = self._weights.replace(replacements, donate=donate)
            self._change_keys(has_new_tower=has_new_tower)

    def match_adapter(self, lora_name: str, params: Mapping[Any, Any], prefix: str = "") -> Adapter:
        """Return what `replace_adapter` takes: PEFT's arrays of an adapter that is loaded.

        ModelNotFoundError for an unknown name; CheckpointError for what does not fit.
        """
        path = self._adapters.find(lora_name).path
        return self._adapter_reader.read_arrays(path, flatten_given(params, prefix))

    def replace_adapter(self, lora_name: str, arrays: Adapter) -> None:
        """Replace an adapter's arrays, after `drain`; its requests are computed again by them."""
        assert self._in_flight is None or self._failure is not None, "a step is on the device"
        self.weights_version += 1
        old, new = self._adapters.find(lora_name), self._adapters.replace(lora_name, arrays)
        rename = self._requests.rename_adapted
        self._scheduler.change_adapter(self.weights_version, old, new, rename)

    def open_weights(self, path: Path | None = None) -> Iterator[tuple[str, Array]]:
        """Return what `load_weights` takes, of a checkpoint's directory.

        None: of the one that was read last. CheckpointError for what does not fit.
        """
        self._check_alone()
        return self._weights.open(path)

    def load_weights(
        self, leaves: Iterator[tuple[str, Array]] | None, *, version: int | None = None
    ) -> None:
        """Replace all parameters (None: by themselves); `version` None: the next one."""
        with self._changing_weights():
            has_new_tower = leaves is not None and self._weights.load(leaves)
            self._change_keys(has_new_tower=has_new_tower, version=version)

    @property
    def weights_mark(self) -> str:
        """What tells the files of the present weights from others of their directory."""
        return self._weights.mark

    def lose_weights(self, version: int) -> None:
        """Drop the weights; compute nothing until others come, which get a later version."""
        self._weights.lose()
        self.weights_version = version

    def drain(self) -> list[RequestOutputDelta]:
        """Read the step on the device, and dispatch none; return its outputs."""
        self._mend()
        if self._failure is not None:
            # The next call of `step` raises it.
            return []
        before, self._in_flight = self._in_flight, None
        if before is None or not self._scheduler.has_unfinished():
            self._open_outputs.clear()
            return []
        with self._keeping_failure(), self._counter.watching():
            return self._read(before)
        return []

    def abort_all(self) -> list[RequestOutputDelta]:
        """Abort all requests, and return what tells so."""
        request_ids = self._scheduler.request_ids
        self._scheduler.abort(request_ids)
        return [
            RequestOutputDelta(
                request_id=request_id,
                new_token_ids=[],
                finish_reason="abort",
                weights_version=self.weights_version,
            )
            for request_id in request_ids
        ]

    def sleep(self, level: int = 1) -> None:
        """Free the caches' memory, with `level` 2 the weights' too, after `drain`.

        Unfinished requests wait, and are computed again after `wake_up`.
        """
        self._check_alone()
        assert self._in_flight is None or self._failure is not None, "a step is on the device"
        has_failed, self._has_failed = self._has_failed, False
        self._in_flight = self._failure = None
        self._open_outputs.clear()
        self._scheduler.forget_all(keeps_host=not has_failed)
        if (pool := self._runner.host_pool) is not None:
            pool.settle(has_failed=has_failed)
        self._runner.release_arrays()
        if level == 2:
            self._weights.release()
        if self._draft is not None:
            self._draft.sleep(level)
        self.is_sleeping = True

    def wake_up(self) -> None:
        """Allocate the caches, and read weights that were released and not replaced since."""
        if not self.is_sleeping:
            return
        if self._weights.num_missing:
            self.load_weights(self.open_weights())
        self._runner.make_arrays()
        if self._draft is not None:
            self._draft.wake_up()
        self.is_sleeping = False

    @contextmanager
    def _changing_weights(self) -> Iterator[None]:
        assert self._in_flight is None or self._failure is not None, "a step is on the device"
        try:
            yield
        except Exception:
            if self._weights.num_missing:
                # Some are replaced, and nothing of before may be served with them.
                self._change_keys(has_new_tower=True)
            raise

    def _change_keys(self, *, has_new_tower: bool, version: int | None = None) -> None:
        """Let nothing be found any more that other weights have computed."""
        # Others' blocks there are of the weights that the engine was started with.
        self._leave_directory()
        self.weights_version = self.weights_version + 1 if version is None else version
        self._requests.change_weights(self.weights_version, has_new_tower=has_new_tower)
        if has_new_tower:
            self._runner.forget_stored_rows()
        self._scheduler.change_weights(self.weights_version, self._requests.rename)
        if self.config.lora.enable_lora:
            self._adapters.read_again()
            self._scheduler.adapter_slots.reset()
        # What a failed step has left is allocated again by `recover`.
        if not (self._weights.num_missing or self.is_sleeping or self._has_failed):
            self._runner.write_extra()

    def _check_alone(self) -> None:
        if self._placement.is_shared:
            raise ConfigError(
                f"the model is sharded over {self.config.parallel.num_processes} processes, whose "
                "weights cannot be changed while they run; start them again"
            )

    @property
    def platform(self) -> str:
        """JAX's name of the platform: "cpu", "gpu" or "tpu"."""
        return self._placement.platform

    @property
    def num_programs_left(self) -> int:
        """Programs that are not compiled yet. Thread-safe."""
        of_draft = 0 if self._draft is None else self._draft.compiled.num_left
        return self._programs.num_left + of_draft

    @property
    def compilations(self) -> int:
        """Programs that a step had to wait for since warm-up: 0 unless something is wrong."""
        return self._counter.count

    def read_embeds(self, mm_hash: str) -> np.ndarray | None:
        """Return an item's embeddings, `[rows, D]`; None: the encoder cache has them no more.

        Those that the present towers give without an adapter, or that a client gave.
        """
        encoded = self._runner.read_embeds(self._requests.name_encoded(mm_hash))
        return self._runner.read_embeds(mm_hash) if encoded is None else encoded

    def reset_prefix_cache(self) -> None:
        """Drop the hashes of all blocks; running requests keep their blocks."""
        self._scheduler.reset_prefix_cache()

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return len(self._scheduler.waiting)

    def stats(self) -> Heartbeat:
        """Return the current statistics. Thread-safe."""
        scheduler = self._scheduler
        guessed = scheduler.speculation
        prefix, encoder = scheduler.kv_cache.prefix_info, scheduler.encoder_cache.info
        disk = self._runner.disk_stats
        return Heartbeat(
            num_running=len(scheduler.running),
            num_waiting=self.num_waiting,
            kv_cache_usage=scheduler.kv_cache.usage,
            num_compilations=self.compilations,
            num_programs_left=self.num_programs_left,
            time_s=time.monotonic(),
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generation_tokens=scheduler.num_generation_tokens,
            prefix_cache_hits=prefix.hits,
            prefix_cache_queries=prefix.total,
            **self._offload_stats(),
            encoder_cache_hits=encoder.hits,
            encoder_cache_queries=encoder.total,
            encoder_disk_hits=disk.hits,
            encoder_disk_queries=disk.hits + disk.misses,
            encoder_disk_read_bytes=disk.bytes_read,
            encoder_disk_written_bytes=disk.bytes_written,
            **({} if self._workers is None else self._workers.stats()),
            encoder_cache_usage=scheduler.encoder_cache.usage,
            num_preemptions=self.num_preemptions,
            num_drafts=0 if guessed is None else guessed.num_drafts,
            num_draft_tokens=0 if guessed is None else guessed.num_draft_tokens,
            num_accepted_tokens=0 if guessed is None else guessed.num_accepted_tokens,
            num_step_tokens=scheduler.num_step_tokens,
            step_token_counts=list(scheduler.step_token_counts),
            running_loras=self._name_loras(list(scheduler.running)),
            waiting_loras=self._name_loras(scheduler.waiting),
            memory_bytes=self._measure_memory(),
        )

    def _offload_stats(self) -> dict[str, Any]:
        """Return the heartbeat's fields about KV blocks in host memory."""
        pool, info = self._runner.host_pool, self._scheduler.kv_cache.host_info
        if pool is None:
            return {}
        files = pool.file_stats
        return {
            "kv_files_hits": files.hits,
            "kv_files_misses": files.misses,
            "kv_files_read_bytes": files.bytes_read,
            "kv_files_written_bytes": files.bytes_written,
            "kv_offload_hits": info.hits,
            "kv_offload_queries": info.total,
            "kv_offload_copied_bytes": pool.copied_bytes,
            "kv_offload_restored_bytes": pool.restored_bytes,
            "kv_offload_copied_s": pool.copied_s,
            "kv_offload_restored_s": pool.restored_s,
        }

    def _measure_memory(self) -> dict[str, int]:
        cache, pool, kv = self._receiver_cache, self._runner.host_pool, self._scheduler.kv_cache
        items = 0 if cache is None else cache.currsize
        num_blocks = max(kv.num_ever_used, self._runner.num_taken)
        known = {**self._host_bytes(num_blocks), "processed_items": items}
        if kv.host is not None and pool is not None:
            known["kv_offload"] = kv.host.num_used * pool.bytes_per_block
        return resident_by_cause(known)

    def _name_loras(self, requests: Iterable[Request]) -> list[str]:
        if not self.config.lora.enable_lora:
            return []
        adapters = (request.lora_request for request in requests)
        names = dict.fromkeys(one.lora_name for one in adapters if one is not None)
        return list(islice(names, MAX_LISTED_LORAS))
