"""The engine: take requests in, schedule, run, report. Runs in P1, or in the caller's process."""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmjax.cache import engine_receiver_cache_from_config
from mmjax.cache.block_hash import make_none_hash
from mmjax.cache.encoder_cache_manager import EncoderCacheManager
from mmjax.cache.kv_cache_manager import KVCacheManager, cdiv
from mmjax.cache.lru import CacheInfo
from mmjax.config import CacheConfig, EngineConfig
from mmjax.engine.admission import AdmissionLimits
from mmjax.engine.buckets import Buckets
from mmjax.engine.compilation import (
    CompilationCounter,
    compile_programs,
    enable_persistent_cache,
)
from mmjax.engine.features import check_places, resolve_features
from mmjax.engine.memory import KVDemand, fit_kv_cache, shard_bytes
from mmjax.engine.mesh import join_processes, make_placement
from mmjax.engine.outputs import SchedulerOutput
from mmjax.engine.programs import ModelShape, Programs
from mmjax.engine.request import BlockHasher, EncoderItem, Request
from mmjax.engine.runner import InFlight, ModelRunner
from mmjax.engine.scheduler import Scheduler
from mmjax.errors import ConfigError, RequestRuntimeError, RequestValueError
from mmjax.layers.module import Params, bind, build_abstract
from mmjax.logger import get_logger
from mmjax.models.interface import EncoderSpec
from mmjax.models.registry import load_model_class
from mmjax.processing.encoder_budget import compute_mm_encoder_budget
from mmjax.processing.inputs import MultiModalFeatureSpec
from mmjax.transport.messages import EngineCoreRequest, Heartbeat, RequestOutputDelta
from mmjax.weights.load import load_params

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
        _check_config(config)
        self.config = config
        self.startup_seconds: dict[str, float] = {}
        """What the start took, item by item."""
        enable_persistent_cache(config.compilation_cache_dir)
        # First of all: JAX learns of the other processes before it opens a device.
        join_processes(config)
        device = jax.local_devices()[0]
        dtype = resolve_dtype(config.model.dtype, device.platform)
        self._model_class = model_class or load_model_class(config.model.architecture)
        with self._timed("load_weights"):
            graphdef, params = self._load(params, dtype)
        model = bind(graphdef, params)
        self._encoder_spec: EncoderSpec = model.encoder_spec
        self._plan(model)
        programs = self._make_programs(graphdef, params)
        with self._timed("measure"):
            self.num_kv_blocks = self._fit_kv_cache(programs, params)
        with self._timed("allocate"):
            self._allocate(programs, params)
        with self._timed("compile"):
            every = programs.all(self.num_kv_blocks)
            compile_programs(every, num_threads=config.compile_threads, use_tqdm=config.use_tqdm)
        with self._timed("warm_up"):
            self._runner.warm_up()
        self.num_programs = len(every)
        """Compiled programs: `encode`, `step` and `sample` over all buckets."""
        self._in_flight: tuple[SchedulerOutput, InFlight] | None = None
        """What the device computes, and nobody has read."""
        self.num_preemptions = 0
        self._receiver_cache = (
            engine_receiver_cache_from_config(config.model.mm)
            if self._placement.is_leader
            else None
        )
        self._block_hasher = _make_block_hasher(config.cache)
        self._counter = CompilationCounter()
        self._seeds = np.random.default_rng(config.model.seed)
        logger.info(
            "ready on %s in %s: %d programs, %d KV blocks of %d slots, %d encoder rows; %s",
            device.device_kind,
            jnp.dtype(dtype).name,
            self.num_programs,
            self.num_kv_blocks,
            config.cache.block_size,
            self._scheduler.encoder_cache.cache_size,
            ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.startup_seconds.items()),
        )

    def _load(self, params: Params | None, dtype: Any) -> tuple[Any, Params]:
        """Return the model's graph, and its parameters spread over the devices."""
        config = self.config
        graphdef, abstract = build_abstract(self._model_class, config.model.hf_config, dtype=dtype)
        self._placement = make_placement(
            config.parallel,
            num_heads=config.model.hf_config.get_text_config().num_attention_heads,
            num_kv_heads=bind(graphdef, abstract).kv_cache_spec.num_kv_heads,
        )
        if params is None:
            params = load_params(
                config.model.path,
                abstract,
                self._model_class.RULES,
                dtype=dtype,
                mesh=self._placement.mesh,
                use_tqdm=config.use_tqdm,
            )
        return graphdef, self._placement.place_params(params)

    @classmethod
    def from_model(
        cls, model_class: type[nnx.Module], params: Params, config: EngineConfig
    ) -> "EngineCore":
        """Serve arrays that are in memory already: `model_class` over `config.model.hf_config`."""
        return cls(config, model_class=model_class, params=params)

    def _plan(self, model: Any) -> None:
        """Settle what does not depend on memory."""
        schedule = self.config.scheduler
        self._has_spans = model.has_bidirectional_spans
        self._keeps_items_whole = self._has_spans or schedule.disable_chunked_mm_input
        if self._has_spans and not schedule.disable_chunked_mm_input:
            logger.info("an item's tokens go in one step: its embeddings see each other both ways")
        self._encoder_budget, encoder_rows = compute_mm_encoder_budget(
            schedule,
            self.config.mm_max_toks_per_item or {"image": self._encoder_spec.tokens_per_unit},
            encoder_cache_size=self.config.cache.encoder_cache_size,
            disable_chunked_mm_input=self._keeps_items_whole,
        )
        self._encoder_cache = EncoderCacheManager(max(1, encoder_rows))

    def _make_programs(self, graphdef: Any, params: Params) -> Programs:
        schedule, block_size = self.config.scheduler, self.config.cache.block_size
        buckets = Buckets.create(
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            max_units=self._encoder_budget // self._encoder_spec.tokens_per_unit,
        )
        return Programs(
            ModelShape.of(graphdef, params),
            params,
            buckets=buckets,
            placement=self._placement,
            num_encoder_rows=self._encoder_cache.cache_size,
            block_size=block_size,
            max_blocks=cdiv(self.config.model.max_model_len, block_size),
        )

    def _fit_kv_cache(self, programs: Programs, params: Params) -> int:
        schedule = self.config.scheduler
        demand = KVDemand(
            bytes_per_block=programs.bytes_per_block,
            block_size=self.config.cache.block_size,
            max_model_len=self.config.model.max_model_len,
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
        )
        return fit_kv_cache(
            programs,
            demand,
            self.config.cache,
            self._placement,
            weights=shard_bytes(params),
            num_threads=self.config.compile_threads,
        )

    def _allocate(self, programs: Programs, params: Params) -> None:
        schedule, cache = self.config.scheduler, self.config.cache
        max_model_len = self.config.model.max_model_len
        self._limits = AdmissionLimits(
            max_model_len=max_model_len,
            vocab_size=programs.vocab_size,
            num_blocks=self.num_kv_blocks,
            block_size=cache.block_size,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            encoder_budget=min(self._encoder_budget, self._encoder_cache.cache_size),
            keeps_items_whole=self._keeps_items_whole,
        )
        self._scheduler = Scheduler(
            kv_cache=KVCacheManager(
                num_blocks=self.num_kv_blocks,
                block_size=cache.block_size,
                max_model_len=max_model_len,
            ),
            encoder_cache=self._encoder_cache,
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            max_num_encoder_input_tokens=self._encoder_budget,
            max_num_queued_reqs=schedule.max_num_queued_reqs,
            keeps_items_whole=self._keeps_items_whole,
        )
        self._runner = ModelRunner(
            programs,
            params,
            num_blocks=self.num_kv_blocks,
            block_size=cache.block_size,
            max_blocks=cdiv(max_model_len, cache.block_size),
            has_spans=self._has_spans,
            placement=self._placement,
        )

    # ---- serving -------------------------------------------------------------------------------

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request; raise `RequestError`, and keep nothing of it, where it cannot be served.

        All that could fail on a client's data fails here: a step holds many clients' requests.
        MultiModalCacheMissError names items that came without tensors and are not here.
        """
        # First of all: P0 noted these items when it sent them, whatever becomes of the request.
        features = resolve_features(message.mm_features, self._receiver_cache)
        _check_is_served(message)
        check_places(features)
        items = [self._to_item(feature) for feature in features]
        self._limits.check_prompt(message.prompt_token_ids, items)
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            sampling_params=message.sampling_params,
            max_model_len=self.config.model.max_model_len,
            items=items,
            eos_token_ids=message.eos_token_ids,
            seed=int(self._seeds.integers(2**63)),
            priority=message.priority,
            cache_salt=message.cache_salt,
            lora_name=message.lora_name,
            block_hasher=self._block_hasher,
        )
        self._limits.check_request(request)
        self._scheduler.add_request(request)

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
        self._scheduler.encoder_cache.reset()
        self._scheduler.kv_cache.reset_prefix_cache()
        self._runner.reset()
        return request_ids

    @property
    def compilations(self) -> int:
        """Programs that were compiled while serving: 0 unless something is wrong."""
        return self._counter.count

    @property
    def prefix_cache_info(self) -> CacheInfo:
        """Prompt tokens that were found in the prefix cache, of all that were admitted."""
        return self._scheduler.kv_cache.prefix_info

    def reset_prefix_cache(self) -> None:
        """Forget all blocks by hash; running requests keep theirs."""
        self._scheduler.kv_cache.reset_prefix_cache()

    def encoder_usage(self) -> float:
        """Return the share of the encoder cache that requests hold, between 0 and 1."""
        cache = self._scheduler.encoder_cache
        return 1.0 - cache.num_freeable_slots / cache.cache_size

    def stats(self) -> Heartbeat:
        """Return the figures of the moment."""
        return Heartbeat(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_cache_usage=self._scheduler.kv_cache.usage,
            num_compilations=self.compilations,
        )

    def _to_item(self, feature: MultiModalFeatureSpec) -> EncoderItem:
        """Cut a feature into units, and check them against what `encode` was compiled for."""
        assert feature.data is not None, "resolved already"
        spec = self._encoder_spec
        try:
            units = self._model_class.encoder_units(feature.data.get_data())
            arrays = {
                name: np.asarray(units[name], dtype) for name, (_, dtype) in spec.inputs.items()
            }
        except (KeyError, TypeError, ValueError) as error:
            raise RequestRuntimeError(
                f"item {feature.identifier} lacks what the model encodes; each needs "
                f"{', '.join(sorted(spec.inputs))}",
                param="multi_modal_data",
            ) from error
        _check_units(feature, arrays, spec)
        return EncoderItem(
            identifier=feature.identifier, mm_position=feature.mm_position, units=arrays
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.startup_seconds[name] = time.perf_counter() - start


def resolve_dtype(name: str, platform: str) -> Any:
    """Return the dtype of weights and caches; "auto" is float32 on CPU, bfloat16 elsewhere."""
    if name == "auto":
        # XLA's bfloat16 products on CPU are several times slower than float32.
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def _make_block_hasher(cache: CacheConfig) -> BlockHasher | None:
    if not cache.enable_prefix_caching:
        return None
    return BlockHasher(
        block_size=cache.block_size,
        # Of this start alone: nobody outside can know the name of a block.
        none_hash=make_none_hash(secrets.token_hex(16)),
        algorithm=cache.prefix_caching_hash_algo,
    )


def _check_config(config: EngineConfig) -> None:
    schedule = config.scheduler
    if schedule.max_num_batched_tokens < schedule.max_num_seqs:
        raise ConfigError(
            f"`max_num_batched_tokens` is {schedule.max_num_batched_tokens}, below `max_num_seqs` "
            f"({schedule.max_num_seqs}); every running request gets a token a step: raise the "
            "first or lower the second"
        )


def _check_is_served(message: EngineCoreRequest) -> None:
    if message.lora_name is not None:
        raise RequestValueError(
            f"`lora_name` is {message.lora_name!r}, but this engine serves no adapters; "
            "leave it out",
            param="lora_name",
        )
    if message.encoder_prompt_token_ids is not None:
        raise RequestValueError(
            "the request has an encoder's prompt, but the model is a decoder alone; leave it out",
            param="encoder_prompt",
        )


def _check_units(
    feature: MultiModalFeatureSpec, arrays: Mapping[str, np.ndarray], spec: EncoderSpec
) -> None:
    counts = set()
    for name, (shape, _) in spec.inputs.items():
        if arrays[name].shape[1:] != tuple(shape):
            raise RequestRuntimeError(
                f"`{name}` of item {feature.identifier} has shape {arrays[name].shape}; "
                f"each unit must have shape {tuple(shape)}",
                param="multi_modal_data",
            )
        counts.add(len(arrays[name]))
    num_embeds = feature.mm_position.get_num_embeds()
    if counts != {num_embeds // spec.tokens_per_unit} or num_embeds % spec.tokens_per_unit:
        raise RequestRuntimeError(
            f"item {feature.identifier} has {sorted(counts)} units of {spec.tokens_per_unit} "
            f"embeddings, and placeholders for {num_embeds}; they must agree",
            param="multi_modal_data",
        )
