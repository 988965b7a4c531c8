"""The engine: take requests in, schedule, run, report. Runs in P1, or in the caller's process."""

import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from mmjax.cache import engine_receiver_cache_from_config
from mmjax.cache.kv.block_hash import make_none_hash
from mmjax.config import CacheConfig, EngineConfig
from mmjax.engine.device.compilation import CompilationCounter
from mmjax.engine.device.runner import InFlight
from mmjax.engine.encoder_inputs import EncoderInputs
from mmjax.engine.scheduling.deadlines import Deadlines
from mmjax.engine.scheduling.features import check_places, resolve_features
from mmjax.engine.scheduling.outputs import SchedulerOutput
from mmjax.engine.scheduling.request import BlockHasher, EncoderItem, Request
from mmjax.engine.start import EngineStart
from mmjax.errors import RequestRuntimeError, RequestValueError
from mmjax.layers.module import Params
from mmjax.logger import get_logger
from mmjax.models.interface import EncoderSpec, PackedEncoderSpec
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec
from mmjax.transport.messages import EngineCoreRequest, Heartbeat, RequestOutputDelta

logger = get_logger(__name__)


class EngineCore:
    """One model, its caches, and all requests that are being served."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        model_class: Any = None,
        params: Params | None = None,
    ) -> None:
        """Load, allocate, compile everything; ready for requests on return.

        `model_class` and `params` replace what the registry and the checkpoint give.
        """
        self.config = config
        parts = EngineStart(config, model_class).start(params)
        self._model_class = parts.model_class
        self._encoder_spec = parts.encoder_spec
        self._precomputed = parts.precomputed
        self._placement = parts.placement
        self._limits = parts.limits
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self.num_kv_blocks = parts.limits.num_blocks
        self.num_programs = parts.num_programs
        """Compiled programs: `encode`, `step` and `sample` over all buckets."""
        self.startup_seconds = parts.seconds
        """What the start took, item by item."""
        self._in_flight: tuple[SchedulerOutput, InFlight] | None = None
        """What the device computes, and nobody has read."""
        self.num_preemptions = 0
        self._receiver_cache = (
            engine_receiver_cache_from_config(config.model.mm)
            if self._placement.is_leader
            else None
        )
        self._encoder_inputs = None
        self._block_hasher = _make_block_hasher(config.cache)
        if parts.limits.max_encoder_len:
            self._encoder_inputs = EncoderInputs(
                parts.model_class, parts.encoder_spec, parts.limits
            )
            # A decoder's blocks depend on all that its encoder read, which no hash of them covers.
            self._block_hasher = None
        self._counter = CompilationCounter()
        self._has_priorities = config.scheduler.scheduling_policy == "priority"
        self._deadlines = Deadlines()

    @classmethod
    def from_model(
        cls, model_class: type[nnx.Module], params: Params, config: EngineConfig
    ) -> "EngineCore":
        """Serve arrays that are in memory already: `model_class` over `config.model.hf_config`."""
        return cls(config, model_class=model_class, params=params)

    # ---- serving -------------------------------------------------------------------------------

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request; raise `RequestError`, and keep nothing of it, where it cannot be served.

        All that could fail on a client's data fails here: a step holds many clients' requests.
        MultiModalCacheMissError names items that came without tensors and are not here.
        """
        # First of all: P0 noted these items when it sent them, whatever becomes of the request.
        features = resolve_features(message.mm_features, self._receiver_cache)
        _check_is_served(message, has_encoder=self._encoder_inputs is not None)
        check_places(features)
        items, encoder = [], None
        if self._encoder_inputs is None:
            items = [self._to_item(feature) for feature in features]
        else:
            encoder = self._encoder_inputs.make(message.encoder_prompt_token_ids, features)
        self._limits.check_prompt(message.prompt_token_ids, items)
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            sampling_params=message.sampling_params,
            max_model_len=self.config.model.max_model_len,
            items=items,
            encoder=encoder,
            eos_token_ids=message.eos_token_ids,
            priority=message.priority if self._has_priorities else 0,
            cache_salt=message.cache_salt,
            lora_name=message.lora_name,
            block_hasher=self._block_hasher,
        )
        self._limits.check_request(request)
        self._scheduler.add_request(request)
        logger.debug(
            "request %s waits: %d prompt tokens, %d items",
            *(message.request_id, request.num_prompt_tokens, len(features)),
        )
        self._deadlines.set(message.request_id, message.deadline)

    def expire(self, now: float | None = None) -> list[str]:
        """Abort the requests whose deadline has passed, wherever they are; return which."""
        expired = self._deadlines.pop_expired(time.monotonic() if now is None else now)
        if not expired:
            return []
        unfinished = set(self._scheduler.request_ids)
        expired = [request_id for request_id in expired if request_id in unfinished]
        self._scheduler.abort(expired)
        return expired

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests wherever they are; unknown ids are ignored."""
        self._scheduler.abort(request_ids)

    def step(self) -> list[RequestOutputDelta]:
        """Give the device a step, and return what the one before it gave to whom.

        While the device computes, the host reads the last step and prepares the next; so the first
        call returns nothing. Without `async_scheduling` a step is read at once.
        """
        if not self._scheduler.has_unfinished():
            # Whoever was to get what is still computed has ended, or was aborted.
            self._in_flight = None
            self._runner.wait()
            return []
        with self._counter.watching():
            before, self._in_flight = self._in_flight, self._dispatch()
            if not self.config.scheduler.async_scheduling:
                before, self._in_flight = self._in_flight, None
            if before is None:
                return []
            output, in_flight = before
            return self._scheduler.update_from_output(output, self._runner.read(in_flight))

    def _dispatch(self) -> tuple[SchedulerOutput, InFlight] | None:
        output = self._scheduler.schedule()
        self.num_preemptions += output.num_preempted
        in_flight = self._runner.dispatch(output)
        return None if in_flight is None else (output, in_flight)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self._scheduler.has_unfinished()

    def follow(self) -> None:
        """Compute along with the process that takes the requests, until it closes its engine.

        Nothing of this engine's own is asked: what is computed, and of what, comes from there.
        """
        assert not self._placement.is_leader, "requests come to this process"
        self._runner.follow()

    def close(self) -> None:
        """Give back what is held outside of Python. Idempotent."""
        self._runner.end()
        if self._receiver_cache is not None:
            self._receiver_cache.close()

    def recover(self) -> list[str]:
        """Drop all requests and caches after a step that failed; return the lost requests."""
        self._in_flight = None
        request_ids = self._scheduler.request_ids
        self._scheduler.abort(request_ids)
        self._deadlines.clear()
        self._scheduler.encoder_cache.reset()
        self._scheduler.kv_cache.reset_prefix_cache()
        self._runner.reset()
        return request_ids

    @property
    def compilations(self) -> int:
        """Programs that were compiled while serving: 0 unless something is wrong."""
        return self._counter.count

    def reset_prefix_cache(self) -> None:
        """Forget all blocks by hash; running requests keep theirs."""
        self._scheduler.kv_cache.reset_prefix_cache()

    def encoder_usage(self) -> float:
        """Return the share of the encoder cache that requests hold, between 0 and 1."""
        cache = self._scheduler.encoder_cache
        return 1.0 - cache.num_freeable_slots / cache.cache_size

    def stats(self) -> Heartbeat:
        """Return the figures of the moment; from any thread."""
        scheduler = self._scheduler
        prefix, encoder = scheduler.kv_cache.prefix_info, scheduler.encoder_cache.info
        return Heartbeat(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=scheduler.kv_cache.usage,
            num_compilations=self.compilations,
            time_s=time.monotonic(),
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generation_tokens=scheduler.num_generation_tokens,
            prefix_cache_hits=prefix.hits,
            prefix_cache_queries=prefix.total,
            encoder_cache_hits=encoder.hits,
            encoder_cache_queries=encoder.total,
        )

    def _to_item(self, feature: MultiModalFeatureSpec) -> EncoderItem:
        """Cut a feature into units, and check them against what `encode` was compiled for.

        Embeddings that came with the request stay whole.
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
        spec = self._encoder_spec
        try:
            units = self._model_class.encoder_units(item.get_data())
            arrays = {
                name: np.asarray(units[name], dtype) for name, (_, dtype) in spec.inputs.items()
            }
        except (KeyError, TypeError, ValueError) as error:
            raise RequestRuntimeError(
                f"item {feature.identifier} lacks what the model encodes; each needs "
                f"{', '.join(sorted(spec.inputs))}",
                param="multi_modal_data",
            ) from error
        _check_shapes(feature, arrays, spec)
        return EncoderItem(
            identifier=feature.identifier, mm_position=feature.mm_position, units=arrays
        )


def _make_block_hasher(cache: CacheConfig) -> BlockHasher | None:
    if not cache.enable_prefix_caching:
        return None
    return BlockHasher(
        block_size=cache.block_size,
        # Of this start alone: nobody outside can know the name of a block.
        none_hash=make_none_hash(secrets.token_hex(16)),
        algorithm=cache.prefix_caching_hash_algo,
    )


def _check_is_served(message: EngineCoreRequest, *, has_encoder: bool) -> None:
    if message.sampling_params.seed is None and not message.sampling_params.is_greedy:
        raise RequestRuntimeError(
            "the request is sampled and brings no `seed`; expected the one that P0 draws where its "
            "client gives none",
            param="seed",
        )
    if message.lora_name is not None:
        raise RequestValueError(
            f"`lora_name` is {message.lora_name!r}, but this engine serves no adapters; "
            "leave it out",
            param="lora_name",
        )
    if message.encoder_prompt_token_ids is not None and not has_encoder:
        raise RequestValueError(
            "the request has an encoder's prompt, but the model is a decoder alone; leave it out",
            param="encoder_prompt",
        )


def _check_shapes(
    feature: MultiModalFeatureSpec,
    arrays: Mapping[str, np.ndarray],
    spec: EncoderSpec | PackedEncoderSpec,
) -> None:
    is_packed = isinstance(spec, PackedEncoderSpec)
    counts = set()
    for name, (shape, _) in spec.inputs.items():
        if arrays[name].ndim == 0 or arrays[name].shape[1:] != tuple(shape):
            raise RequestRuntimeError(
                f"`{name}` of item {feature.identifier} has shape {arrays[name].shape}; "
                f"each {'patch' if is_packed else 'unit'} must have shape {tuple(shape)}",
                param="multi_modal_data",
            )
        counts.add(len(arrays[name]))
    num_embeds = feature.mm_position.get_num_embeds()
    if isinstance(spec, PackedEncoderSpec):
        _check_patches(feature.identifier, counts, num_embeds, spec)
    else:
        _check_units(feature.identifier, counts, num_embeds, spec)


def _check_patches(
    identifier: str, counts: set[int], num_embeds: int, spec: PackedEncoderSpec
) -> None:
    if counts != {num_embeds * spec.patches_per_token}:
        raise RequestRuntimeError(
            f"item {identifier} has {sorted(counts)} patches, {spec.patches_per_token} for each "
            f"embedding, and placeholders for {num_embeds}; they must agree",
            param="multi_modal_data",
        )
    if max(counts) > spec.max_patches:
        raise RequestRuntimeError(
            f"item {identifier} has {max(counts)} patches; the model takes {spec.max_patches}",
            param="multi_modal_data",
        )


def _check_units(identifier: str, counts: set[int], num_embeds: int, spec: EncoderSpec) -> None:
    if counts != {num_embeds // spec.tokens_per_unit} or num_embeds % spec.tokens_per_unit:
        raise RequestRuntimeError(
            f"item {identifier} has {sorted(counts)} units of {spec.tokens_per_unit} "
            f"embeddings, and placeholders for {num_embeds}; they must agree",
            param="multi_modal_data",
        )
