"""The engine core: admit requests, schedule, run steps. In P1, or in the process of `LLM`."""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from mmjax.cache import engine_receiver_cache_from_config
from mmjax.cache.kv.block_hash import make_none_hash
from mmjax.config.engine_config import CacheConfig, EngineConfig
from mmjax.engine.device.compilation import CompilationCounter
from mmjax.engine.device.memory import resident_by_cause
from mmjax.engine.device.runner import InFlight
from mmjax.engine.encoder_inputs import EncoderInputs
from mmjax.engine.scheduling.adapters import RegisteredAdapter
from mmjax.engine.scheduling.admission import check_is_served
from mmjax.engine.scheduling.deadlines import Deadlines
from mmjax.engine.scheduling.features import check_places, check_shapes, resolve_features
from mmjax.engine.scheduling.grammar import Grammars
from mmjax.engine.scheduling.logit_rules import LogitRules
from mmjax.engine.scheduling.outputs import SchedulerOutput
from mmjax.engine.scheduling.request import BlockHasher, EncoderItem, Request
from mmjax.engine.start import EngineStart
from mmjax.errors import RequestError, RequestRuntimeError, RequestValueError
from mmjax.layers.module import Params
from mmjax.models.host_inputs import PackedEncoderSpec, PromptItem, RotaryPositions
from mmjax.models.registry import MULTIMODAL_REGISTRY
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec
from mmjax.system.logger import get_logger
from mmjax.transport.messages import (
    MAX_LISTED_LORAS,
    EngineCoreRequest,
    Heartbeat,
    RequestOutputDelta,
)

logger = get_logger(__name__)

_PROGRAM_WAIT_S = 0.05
_MASK_WAIT_S = 0.005
"""How long a step waits for its grammars to read a token, while the device computes: those of
schemas take some hundred microseconds. A later one is not in the step, which others are."""
_ADAPTER_WAIT_S = 1.0


class _Dispatched(NamedTuple):
    """A step on the device."""

    output: SchedulerOutput
    in_flight: InFlight
    begun_at: float
    """When it was dispatched, in `time.monotonic()` seconds."""

    @property
    def awaits_masks(self) -> bool:
        """Whether it is not sampled yet."""
        return self.in_flight.tables is not None


class EngineCore:
    """One model, its caches, and all unfinished requests."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        model_class: Any = None,
        params: Params | None = None,
    ) -> None:
        """Load the model, allocate the caches, compile programs as `config.precompile` says.

        `model_class` and `params` replace the registry's class and the checkpoint's weights.
        """
        self.config = config
        parts = EngineStart(config, model_class).start(params)
        self._host_inputs = parts.host_inputs
        self._precomputed = parts.precomputed
        self._placement = parts.placement
        self._limits = parts.limits
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._adapters = parts.adapters
        self.num_kv_blocks = parts.limits.num_blocks
        self._programs = parts.programs
        self._limits_of = parts.limits_of
        self._host_bytes = parts.host_bytes
        self.num_programs = parts.programs.num_programs
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
        """Of the step on the device; the next call raises it, after all tokens that were read."""
        self._read_at = 0.0
        """When the last step was read, in `time.monotonic()` seconds."""
        self.num_preemptions = 0
        self._receiver_cache = (
            engine_receiver_cache_from_config(config.model.mm)
            if self._placement.is_leader
            else None
        )
        self._encoder_inputs = None
        self._block_hasher = _make_block_hasher(config.cache)
        if parts.limits.max_encoder_len:
            self._encoder_inputs = EncoderInputs(parts.limits)
            # A decoder's blocks depend on all that its encoder read, which no hash of them covers.
            self._block_hasher = None
        self._counter = CompilationCounter()
        self._has_priorities = config.scheduler.scheduling_policy == "priority"
        self._deadlines = Deadlines()
        self._grammars = Grammars(
            partial(MULTIMODAL_REGISTRY.load_tokenizer, config.model), parts.limits.vocab_size
        )
        if self._runner.ready != self._runner.buckets:
            self._scheduler.limit_steps(self._limits_of(self._runner.ready))

    @classmethod
    def from_model(
        cls, model_class: type[nnx.Module], params: Params, config: EngineConfig
    ) -> "EngineCore":
        """Serve `params`, which are in memory, with `model_class` over `config.model.hf_config`."""
        return cls(config, model_class=model_class, params=params)

    # ---- serving -------------------------------------------------------------------------------

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request; raise `RequestError`, without a change, if it cannot be served.

        Everything that may fail on a client's data fails here, not in a step, which computes many
        requests. Raises MultiModalCacheMissError for items without tensors that are not cached.
        """
        # Before any check: P0's sender cache has recorded these items, refused or not.
        features = resolve_features(message.mm_features, self._receiver_cache)
        check_is_served(
            message,
            has_encoder=self._encoder_inputs is not None,
            has_adapters=self.config.lora.enable_lora,
        )
        check_places(features)
        adapter = None if message.lora_name is None else self._adapters.use(message.lora_name)
        encoder, rotary = None, None
        if self._encoder_inputs is None:
            items = [self._to_item(feature, adapter) for feature in features]
            rotary = self._find_positions(len(message.prompt_token_ids), features)
        else:
            encoder_ids = self._encoder_inputs.check(message.encoder_prompt_token_ids, features)
            encoder_items = [self._to_item(feature, adapter) for feature in features]
            items, encoder = [], self._encoder_inputs.make(encoder_ids, encoder_items)
        self._limits.check_prompt(message.prompt_token_ids, items)
        self._limits.check_sampling(message)
        params = message.sampling_params
        grammar = None
        if message.grammar is not None:
            grammar = self._grammars.start(
                message.grammar,
                message.eos_token_ids,
                message.output_token_ids,
                allowed_token_ids=params.allowed_token_ids,
            )
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            output_token_ids=message.output_token_ids,
            sampling_params=params,
            max_model_len=self.config.model.max_model_len,
            items=items,
            encoder=encoder,
            rotary=rotary,
            eos_token_ids=message.eos_token_ids,
            priority=message.priority if self._has_priorities else 0,
            cache_salt=message.cache_salt,
            lora_request=adapter,
            # All of the prompt is computed where its log-probabilities are wanted, as in vLLM.
            block_hasher=self._block_hasher if params.prompt_logprobs is None else None,
            logit_rules=LogitRules(
                params,
                vocab_size=self._limits.vocab_size,
                bad_words_token_ids=message.bad_words_token_ids,
                grammar=grammar,
            ),
        )
        self._limits.check_request(request)
        self._scheduler.add_request(request)
        logger.debug(
            "request %s waits: %d prompt tokens, %d items",
            *(message.request_id, request.num_prompt_tokens, len(features)),
        )
        self._deadlines.set(message.request_id, message.deadline)

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
        while self._adapters.wait(_ADAPTER_WAIT_S):
            pass
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
        if not self._scheduler.has_unfinished():
            # The requests of the step in flight have finished, or were aborted.
            self._in_flight = self._failure = None
            self._open_outputs.clear()
            self._runner.wait()
            self.note_computing(())
            return []
        failure, self._failure = self._failure, None
        if failure is not None:
            self._in_flight = None
            raise failure
        self._use_compiled()
        with self._counter.watching():
            before, self._in_flight = self._in_flight, self._dispatch()
            if self._in_flight is not None and self._in_flight.awaits_masks:
                assert before is not None, "a token in flight is of the step before"
                deltas = self._read(before)
                try:
                    self._in_flight = self._sample(self._in_flight)
                except Exception as error:
                    self._failure = error
                return deltas
            if not self.config.scheduler.async_scheduling:
                before, self._in_flight = self._in_flight, None
            if before is None:
                if self._in_flight is None and not (
                    self._grammars.wait(_PROGRAM_WAIT_S) or self._adapters.wait(_PROGRAM_WAIT_S)
                ):
                    # What waits needs a larger program than there is yet.
                    self._programs.wait(_PROGRAM_WAIT_S)
                    self._programs.check()
                return []
            return self._read(before)

    def _sample(self, dispatched: _Dispatched) -> _Dispatched:
        """Sample a step when its grammars have read what the one before sampled."""
        deadline = time.monotonic() + _MASK_WAIT_S
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
        output, in_flight, begun_at = dispatched
        self._runner.wait_encoded(in_flight)
        # The device computes one step after the other.
        encode_s = time.monotonic() - max(begun_at, self._read_at)
        sampled = self._runner.read(in_flight)
        self._read_at = time.monotonic()
        deltas = self._scheduler.update_from_output(output, sampled, encode_s=encode_s)
        self._open_outputs.pop(0)
        return deltas

    def _use_compiled(self) -> None:
        """Use the programs that were compiled since the last step."""
        if self._programs.ready != self._runner.ready:
            self._runner.ready = self._programs.ready
            self._scheduler.limit_steps(self._limits_of(self._runner.ready))

    def _dispatch(self) -> _Dispatched | None:
        self._open_outputs.append(None)
        output = self._open_outputs[-1] = self._scheduler.schedule()
        self.num_preemptions += output.num_preempted
        self.note_computing(self._find_computed(output))
        begun_at = time.monotonic()
        in_flight = self._runner.dispatch(output)
        if in_flight is None:
            self._open_outputs.pop()
            return None
        return _Dispatched(output, in_flight, begun_at)

    def _find_computed(self, output: SchedulerOutput) -> list[str]:
        """Return the requests of the steps that are on the device, and of grammars in threads."""
        steps = [output] if self._in_flight is None else [self._in_flight.output, output]
        ids = {one.request.request_id: None for step in steps for one in step.requests}
        if self._grammars.is_computing:
            ids.update(dict.fromkeys(self._scheduler.blocked_ids))
        return list(ids)

    def has_unfinished(self) -> bool:
        """Return whether any request waits or runs."""
        return self._scheduler.has_unfinished()

    def follow(self) -> None:
        """Make the calls that the leading process broadcasts, until it closes its engine."""
        assert not self._placement.is_leader, "requests come to this process"
        self._runner.follow()

    def close(self, *, wait: bool = True) -> None:
        """Free resources outside of Python; `wait` for threads that compile. Idempotent."""
        self._grammars.close()
        self._adapters.close()
        self._programs.close(wait=wait)
        self._runner.end()
        if self._receiver_cache is not None:
            self._receiver_cache.close()

    def recover(self) -> list[str]:
        """Compute all requests again after a failed step, on empty caches.

        Returns the id of the request that it ends, if one was alone in the step: else those of the
        step are computed one by one, to find the one at fault.
        """
        self._in_flight = self._failure = None
        # Without any, it failed before one was scheduled.
        outputs, self._open_outputs = self._open_outputs or [None], []
        at_fault = self._scheduler.begin_again(outputs)
        self._runner.reset()
        return at_fault

    @property
    def platform(self) -> str:
        """JAX's name of the platform: "cpu", "gpu" or "tpu"."""
        return self._placement.platform

    @property
    def num_programs_left(self) -> int:
        """Programs that are not compiled yet. Thread-safe."""
        return self._programs.num_left

    @property
    def compilations(self) -> int:
        """Programs that a step had to wait for since warm-up: 0 unless something is wrong."""
        return self._counter.count

    def reset_prefix_cache(self) -> None:
        """Drop the hashes of all blocks; running requests keep their blocks."""
        self._scheduler.kv_cache.reset_prefix_cache()

    def encoder_usage(self) -> float:
        """Return the referenced share of the encoder cache, between 0 and 1."""
        cache = self._scheduler.encoder_cache
        return 1.0 - cache.num_freeable_slots / cache.cache_size

    def stats(self) -> Heartbeat:
        """Return the current statistics. Thread-safe."""
        scheduler = self._scheduler
        prefix, encoder = scheduler.kv_cache.prefix_info, scheduler.encoder_cache.info
        return Heartbeat(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=scheduler.kv_cache.usage,
            num_compilations=self.compilations,
            num_programs_left=self.num_programs_left,
            time_s=time.monotonic(),
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generation_tokens=scheduler.num_generation_tokens,
            prefix_cache_hits=prefix.hits,
            prefix_cache_queries=prefix.total,
            encoder_cache_hits=encoder.hits,
            encoder_cache_queries=encoder.total,
            encoder_cache_usage=self.encoder_usage(),
            num_preemptions=self.num_preemptions,
            num_step_tokens=scheduler.num_step_tokens,
            step_token_counts=list(scheduler.step_token_counts),
            running_loras=self._name_loras(list(scheduler.running)),
            waiting_loras=self._name_loras(scheduler.waiting),
            memory_bytes=self._measure_memory(),
        )

    def _measure_memory(self) -> dict[str, int]:
        cache = self._receiver_cache
        items = 0 if cache is None else cache.currsize
        return resident_by_cause({**self._host_bytes, "processed_items": items})

    def _name_loras(self, requests: Iterable[Request]) -> list[str]:
        if not self.config.lora.enable_lora:
            return []
        adapters = (request.lora_request for request in requests)
        names = dict.fromkeys(one.lora_name for one in adapters if one is not None)
        return list(islice(names, MAX_LISTED_LORAS))

    def _to_item(
        self, feature: MultiModalFeatureSpec, adapter: RegisteredAdapter | None
    ) -> EncoderItem:
        """Split a feature into encoder units of the compiled shapes; keep precomputed embeddings.

        Raises `RequestError` for tensors of other shapes or dtypes.
        """
        embeds = self._precomputed.find(feature)
        if embeds is not None:
            return self._precomputed.make_item(feature, embeds)
        if not self._runner.buckets.encode:
            raise RequestValueError(
                f"item {feature.identifier} asks for embeddings of a tower, which this engine was "
                "started without; allow media with `--limit-mm-per-prompt`",
                param="multi_modal_data",
            )
        item = feature.tensors
        assert item is not None, "resolved already"
        spec = self._host_inputs.encoder_spec
        try:
            arrays = self._host_inputs.encoder_inputs(item.get_data())
            rows = self._host_inputs.embed_rows(item.get_data())
        except (KeyError, TypeError, ValueError) as error:
            raise RequestRuntimeError(
                f"item {feature.identifier} lacks what the model encodes; each needs "
                f"{', '.join(sorted(spec.inputs))}",
                param="multi_modal_data",
            ) from error
        num_outputs = check_shapes(feature, arrays, spec)
        if isinstance(spec, PackedEncoderSpec):
            self._check_patches(feature.identifier, num_outputs * spec.patches_per_token)
        num_embeds = feature.mm_position.get_num_embeds()
        if num_embeds != (num_outputs if rows is None else len(rows)):
            raise RequestRuntimeError(
                f"item {feature.identifier} has {num_outputs if rows is None else len(rows)} "
                f"embeddings, and placeholders for {num_embeds}; they must agree",
                param="multi_modal_data",
            )
        identifier = feature.identifier
        if adapter is not None and self.config.lora.enable_tower_connector_lora:
            # Of this adapter, and not of one that had its name before.
            identifier = f"{identifier}@{adapter.lora_version}"
        return EncoderItem(
            identifier=identifier,
            mm_hash=feature.mm_hash,
            mm_position=feature.mm_position,
            units=arrays,
            rows=rows,
        )

    def _check_patches(self, identifier: str, num_patches: int) -> None:
        largest = self._runner.buckets.encode[-1]
        if num_patches > largest:
            raise RequestRuntimeError(
                f"item {identifier} has {num_patches} patches; the encoder takes {largest}",
                param="multi_modal_data",
            )

    def _find_positions(
        self, num_tokens: int, features: Sequence[MultiModalFeatureSpec]
    ) -> RotaryPositions | None:
        items = [
            PromptItem(feature.mm_position, feature.tensors.get_data())
            for feature in sorted(features, key=lambda one: one.mm_position.offset)
            if feature.tensors is not None
        ]
        return self._host_inputs.rotary_positions(num_tokens, items)


def _make_block_hasher(cache: CacheConfig) -> BlockHasher | None:
    if not cache.enable_prefix_caching:
        return None
    return BlockHasher(
        block_size=cache.block_size,
        # Random, so that no client can compute the hash of a block.
        none_hash=make_none_hash(secrets.token_hex(16)),
        algorithm=cache.prefix_caching_hash_algo,
    )
