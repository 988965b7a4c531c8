"""Start an engine from a configuration: weights, memory, programs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.cache.encoder_cache_manager import EncoderCacheManager
from mmjax.cache.kv.kv_cache_manager import KVCacheManager
from mmjax.config.engine_config import EngineConfig
from mmjax.engine.device.compile_cache import enable_persistent_cache
from mmjax.engine.device.encoder import choose_patches, count_units, largest_items
from mmjax.engine.device.functions import AdaptedModel, ModelShape
from mmjax.engine.device.memory import KVDemand, fit_kv_cache
from mmjax.engine.device.mesh import Placement, join_processes, make_placement, shard_bytes
from mmjax.engine.device.precomputed import PrecomputedEmbeds
from mmjax.engine.device.programs import Programs
from mmjax.engine.device.runner import ModelRunner
from mmjax.engine.device.staged_programs import ProgramsWhenNeeded, Stage, StagedPrograms
from mmjax.engine.device.threads import DeviceThreads, open_devices
from mmjax.engine.scheduling.adapters import Adapters
from mmjax.engine.scheduling.admission import AdmissionLimits
from mmjax.engine.scheduling.buckets import NO_SIZES, Buckets
from mmjax.engine.scheduling.scheduler import Scheduler, StepLimits
from mmjax.errors import CheckpointError, ConfigError, SnapshotDamagedError
from mmjax.layers.attention.api import choose_cache_type, span_variants
from mmjax.layers.cpu.product import has_bfloat16
from mmjax.layers.module import Params, bind, build_abstract, flatten_params
from mmjax.layers.quantization import quantize_params
from mmjax.models.host_inputs import HostInputs, PackedEncoderSpec
from mmjax.models.interface import AdapterSizes, build_model, left_out_names
from mmjax.models.model_source import DEFAULT_MODEL, resolve_model, stored_dtype
from mmjax.models.registry import load_model_class
from mmjax.processing.encoder_budget import compute_mm_encoder_budget
from mmjax.rounding import cdiv
from mmjax.system.logger import get_logger, reporting
from mmjax.weights.adapter import AdapterReader
from mmjax.weights.load import load_params
from mmjax.weights.safetensors import is_snapshot
from mmjax.weights.snapshot import load_snapshot

logger = get_logger(__name__)


class EngineParts(NamedTuple):
    """The parts of a started engine."""

    host_inputs: HostInputs
    precomputed: PrecomputedEmbeds
    placement: Placement
    limits: AdmissionLimits
    scheduler: Scheduler
    runner: ModelRunner
    adapters: Adapters
    programs: StagedPrograms
    limits_of: Callable[[Buckets], StepLimits]
    """What a step may hold that has no other buckets."""
    host_bytes: dict[str, int]
    """Bytes of the device's arrays in the host's memory, by cause."""
    device_threads: DeviceThreads
    seconds: dict[str, float]
    """Seconds that the start took, by phase."""


class EngineStart:
    """Starts one engine."""

    def __init__(self, config: EngineConfig, model_class: Any = None) -> None:
        """`model_class` replaces the registry's class."""
        _check_config(config)
        self.config = config
        self._precompile = config.precompile or "none"
        self.seconds: dict[str, float] = {}
        enable_persistent_cache(config.compilation_cache_dir)
        # Before any other use of JAX, which opens the devices.
        join_processes(config)
        self._model_class = model_class or load_model_class(
            config.model.architecture, config.model.model_class
        )

    def start(self, params: Params | None = None) -> EngineParts:
        """Load the weights (unless `params` are given), allocate, and compile programs."""
        config = self.config
        with self._timed("open_devices"), reporting(logger, lambda: "opening the devices"):
            device_threads = open_devices()
        device = jax.local_devices()[0]
        dtype = resolve_dtype(
            config.model.dtype,
            device.platform,
            stored_dtype(config.model.hf_config),
            cpu_has_bfloat16=has_bfloat16(),
        )
        with self._timed("load_weights"), reporting(logger, lambda: "loading the weights"):
            graphdef, params = self._load(params, dtype)
        model = bind(graphdef, params)
        self._host_inputs: HostInputs = self._model_class.host_inputs(config.model.hf_config)
        self._encoder_spec = self._host_inputs.encoder_spec
        self._plan(model)
        programs = self._make_programs(graphdef, params)
        with self._timed("measure"):
            self.num_kv_blocks = self._fit_kv_cache(programs, params)
        with self._timed("allocate"), reporting(logger, lambda: "allocating the caches"):
            self._allocate(programs, params)
        self._adapters = self._open_adapters(params)
        staged = self._stage(programs)
        with self._timed("compile"):
            staged.compile_first()
        with self._timed("warm_up"), reporting(logger, lambda: "running the first programs"):
            self._runner.ready = staged.ready
            self._warm_up(programs.buckets)
        self._runner.lead()
        staged.start_others()
        logger.info(
            "ready on %s in %s: %d programs, %d to come, %d KV blocks of %d slots, "
            "%d encoder rows; %s",
            device.device_kind,
            jnp.dtype(dtype).name,
            staged.num_programs - staged.num_left,
            staged.num_left,
            self.num_kv_blocks,
            config.cache.block_size,
            self._encoder_cache.cache_size,
            ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items()),
        )
        return EngineParts(
            self._host_inputs,
            programs.precomputed,
            self._placement,
            self._limits,
            self._scheduler,
            self._runner,
            self._adapters,
            staged,
            self._limits_of,
            programs.host_bytes(self.num_kv_blocks),
            device_threads,
            self.seconds,
        )

    def _stage(self, programs: Programs) -> StagedPrograms:
        """Return what is compiled before the first request, and what meanwhile."""
        make = partial(programs.all, self.num_kv_blocks)
        options = {"num_threads": self.config.compile_threads, "use_tqdm": self.config.use_tqdm}
        every = programs.buckets
        if self._precompile == "none":
            programs_when_needed = ProgramsWhenNeeded(every, make, **options)
            self._runner.prepare = programs_when_needed.compile
            return programs_when_needed
        stages, before = [], NO_SIZES
        is_staged = self._precompile == "smallest"
        for buckets in every.stages(least_tokens=self._least_tokens) if is_staged else [every]:
            stages.append(Stage(buckets, make(buckets.sizes.but_not(before))))
            before = buckets.sizes
        return StagedPrograms(stages, **options)

    def _warm_up(self, buckets: Buckets) -> None:
        """Run the smallest programs, which shows that each function runs.

        With other processes all of them: what sends a call's arrays is compiled as it runs.
        """
        if self._precompile == "none":
            return
        if not self._placement.is_shared:
            buckets = buckets.stages(least_tokens=self._least_tokens)[0]
        self._runner.warm_up(buckets)

    @property
    def _least_tokens(self) -> int:
        """Tokens of an image that cannot be divided."""
        return self._largest_item if self._keeps_runs_whole else 1

    def _limits_of(self, buckets: Buckets) -> StepLimits:
        spec, num_embeds = self._encoder_spec, self._encoder_budget
        if isinstance(spec, PackedEncoderSpec) and buckets.encode:
            # An item is not divided over calls.
            num_embeds = buckets.encode[-1] // spec.patches_per_token
        return StepLimits(buckets.max_num_seqs, buckets.max_num_batched_tokens, num_embeds)

    def _load(self, params: Params | None, dtype: Any) -> tuple[Any, Params]:
        """Return the model's graphdef, and its sharded parameters."""
        config = self.config
        parts = (config.model.hf_config, config.model.mm, config.model.quantization)
        graphdef, abstract = build_abstract(build_model, self._model_class, *parts, dtype=dtype)
        model = bind(graphdef, abstract)
        self._adapted = self._make_room(model, parts, dtype)
        self._left_out = left_out_names(model, config.model.mm)
        self._has_tower = not self._left_out
        if self._left_out:
            logger.info("no media are allowed: left out are %s", ", ".join(self._left_out))
        self._placement = make_placement(
            config.parallel, num_kv_heads=model.kv_cache_spec.num_kv_heads
        )
        if params is None:
            params = self._read(abstract)
        elif config.model.quantization is not None:
            params = quantize_params(params, abstract)
        given = {name: part for name, part in params.items() if name not in self._left_out}
        return graphdef, self._placement.place_params(given)

    def _make_room(self, model: Any, parts: Any, dtype: Any) -> AdaptedModel | None:
        """Return the model with room for adapters; None without `enable_lora`."""
        lora = self.config.lora
        if not lora.enable_lora:
            return None
        if model.max_encoder_len:
            raise ConfigError(
                f"`enable_lora` is set, but `{self._model_class.__name__}` is an encoder-decoder "
                "model, whose adapters mmjax does not serve; leave it out"
            )
        own = dtype if lora.lora_dtype == "auto" else jnp.dtype(lora.lora_dtype)
        has_towers = lora.enable_tower_connector_lora
        sizes = AdapterSizes(lora.max_loras, lora.max_lora_rank, own, has_towers)
        graphdef, abstract = build_abstract(
            build_model, self._model_class, *parts, sizes, dtype=dtype
        )
        return AdaptedModel.of(graphdef, abstract, has_towers=has_towers)

    def _open_adapters(self, params: Params) -> Adapters:
        """Return the adapters, those of `lora_modules` loaded."""
        lora, adapted = self.config.lora, self._adapted
        leaves = flatten_params(params)

        def read_base(name: str) -> np.ndarray | None:
            return np.asarray(leaves[name]) if name in leaves else None

        shapes = {} if adapted is None else adapted.shapes
        reader = AdapterReader(
            rules=self._model_class.rules(self.config.model.hf_config),
            shapes={name: leaf.shape for name, leaf in shapes.items()},
            dtype=next((leaf.dtype for leaf in shapes.values()), None),
            max_rank=lora.max_lora_rank,
            read_base=read_base,
            has_towers=lora.enable_tower_connector_lora,
            left_out=self._left_out,
        )
        adapters = Adapters(reader.read, max_cpu_loras=lora.max_cpu_loras or 2 * lora.max_loras)
        if lora.modules:
            with self._timed("load_adapters"), reporting(logger, lambda: "loading the adapters"):
                self._load_adapters(adapters)
        return adapters

    def _load_adapters(self, adapters: Adapters) -> None:
        for name, path in self.config.lora.modules:
            adapters.load(name, Path(path))
        while adapters.wait(1.0):
            pass
        for name, error in adapters.pop_loaded():
            if error is not None:
                raise ConfigError(f"`lora_modules` gives `{name}`, which cannot be loaded: {error}")

    def _read(self, abstract: Params) -> Params:
        config, mesh = self.config, self._placement.mesh
        path, left_out = config.model.path, self._left_out
        if is_snapshot(path):
            agree = self._placement.agree
            try:
                return load_snapshot(path, abstract, mesh=mesh, left_out=left_out, agree=agree)
            except SnapshotDamagedError as error:
                path = _find_source(error, config.model.download_dir)
        return load_params(
            path,
            abstract,
            self._model_class.rules(config.model.hf_config),
            mesh=mesh,
            left_out=left_out,
            use_tqdm=config.use_tqdm,
        )

    def _plan(self, model: Any) -> None:
        """Set limits and buckets, which do not depend on memory."""
        schedule = self.config.scheduler
        self._max_encoder_len = model.max_encoder_len
        self._takes_embeds = self.config.model.mm.enable_mm_embeds
        has_items = self._has_tower or self._takes_embeds
        self._has_spans = has_items and model.has_bidirectional_spans
        self._keeps_runs_whole = self._has_spans or schedule.disable_chunked_mm_input
        if self._has_spans and not schedule.disable_chunked_mm_input:
            logger.info("a picture's embeddings go in one step: they see each other both ways")
        largest: dict[str, int] = {}
        if has_items:
            largest |= largest_items(
                self._encoder_spec,
                self.config.max_embeds_per_item,
                self.config.model.max_model_len,
            )
        self._largest_item = max(largest.values(), default=0)
        if self._max_encoder_len:
            # The items have no positions in the decoder's prompt, which alone has chunks.
            self._keeps_runs_whole = False
            # A request starts in one step: with the encoder's hidden states, and, of the items in
            # its prompt, at most an embedding at each place.
            largest = {"encoder": 2 * self._max_encoder_len}
        self._encoder_budget, encoder_rows = compute_mm_encoder_budget(
            schedule,
            largest,
            encoder_cache_size=self.config.cache.encoder_cache_size,
            disable_chunked_mm_input=self._keeps_runs_whole,
        )
        self._encoder_cache = EncoderCacheManager(max(1, encoder_rows))

    def _make_programs(self, graphdef: Any, params: Params) -> Programs:
        schedule, block_size = self.config.scheduler, self.config.cache.block_size
        shape = ModelShape.of(graphdef, params)
        spec = bind(graphdef, params).kv_cache_spec
        placement = self._placement
        cache_type = choose_cache_type(
            placement.platform, spec, shape.dtype, num_shards=placement.num_kv_shards
        )
        budget = self._encoder_budget if self._has_tower else 0
        buckets = Buckets.create(
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            max_units=count_units(self._encoder_spec, budget),
            patches=choose_patches(self._encoder_spec, budget, self._largest_item)
            if self._has_tower
            else (),
            max_written=self._encoder_budget if self._takes_embeds else 0,
            span_variants=span_variants(cache_type, has_spans=self._has_spans),
            max_encoder_len=self._max_encoder_len,
            has_adapters=self._adapted is not None,
        )
        return Programs(
            shape,
            params,
            cache_type=cache_type,
            buckets=buckets,
            placement=self._placement,
            host_inputs=self._host_inputs,
            num_encoder_rows=self._encoder_cache.cache_size,
            block_size=block_size,
            max_blocks=cdiv(self.config.model.max_model_len, block_size),
            max_encoder_len=self._max_encoder_len,
            adapted=self._adapted,
        )

    def _fit_kv_cache(self, programs: Programs, params: Params) -> int:
        schedule = self.config.scheduler
        demand = KVDemand(
            bytes_per_block=programs.bytes_per_block,
            block_size=self.config.cache.block_size,
            max_model_len=self.config.model.max_model_len,
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            max_encoder_len=self._max_encoder_len,
        )
        return fit_kv_cache(
            programs,
            demand,
            self.config.cache,
            self._placement,
            weights=shard_bytes(params),
            max_loras=self.config.lora.max_loras,
            num_threads=self.config.compile_threads,
            is_hurried=self._precompile != "all",
        )

    def _allocate(self, programs: Programs, params: Params) -> None:
        schedule, cache = self.config.scheduler, self.config.cache
        max_model_len = self.config.model.max_model_len
        self._limits = AdmissionLimits(
            max_model_len=max_model_len,
            num_token_ids=programs.num_token_ids,
            vocab_size=programs.vocab_size,
            num_blocks=self.num_kv_blocks,
            block_size=cache.block_size,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            encoder_budget=min(self._encoder_budget, self._encoder_cache.cache_size),
            keeps_runs_whole=self._keeps_runs_whole,
            enable_chunked_prefill=schedule.enable_chunked_prefill,
            max_encoder_len=self._max_encoder_len,
        )
        self._scheduler = Scheduler(
            kv_cache=KVCacheManager(
                num_blocks=self.num_kv_blocks,
                block_size=cache.block_size,
                max_model_len=max_model_len,
                max_encoder_len=self._max_encoder_len,
            ),
            encoder_cache=self._encoder_cache,
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            max_num_encoder_input_tokens=self._encoder_budget,
            max_num_queued_reqs=schedule.max_num_queued_reqs,
            max_num_encoder_states=programs.buckets.num_states,
            keeps_runs_whole=self._keeps_runs_whole,
            enable_chunked_prefill=schedule.enable_chunked_prefill,
            max_loras=self.config.lora.max_loras if self._adapted is not None else 0,
        )
        self._runner = ModelRunner(
            programs,
            params,
            num_blocks=self.num_kv_blocks,
            block_size=cache.block_size,
            max_blocks=cdiv(max_model_len, cache.block_size),
            has_spans=self._has_spans,
            placement=self._placement,
            max_encoder_blocks=cdiv(self._max_encoder_len, cache.block_size),
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def _find_source(damage: SnapshotDamagedError, download_dir: Path | None) -> Path:
    """Return the directory that a damaged snapshot was made of; raise `damage` if it is gone."""
    model = None if damage.source == DEFAULT_MODEL else damage.source
    try:
        source = resolve_model(model, revision=damage.revision, download_dir=download_dir)
    except CheckpointError as error:
        raise damage from error
    logger.error("%s; until then the weights of `%s` are loaded", damage, damage.source)
    return source


def resolve_dtype(name: str, platform: str, stored: str | None, *, cpu_has_bfloat16: bool) -> Any:
    """Return the dtype of weights and caches.

    "auto" is bfloat16 on accelerators. On a CPU it is bfloat16 where the weights are stored in 16
    bits and the CPU multiplies bfloat16 itself, which is then faster (docs/performance.md); else
    float32. `stored`: as `stored_dtype` returns it.
    """
    if name == "auto":
        is_half = stored in ("bfloat16", "float16")
        name = "bfloat16" if platform != "cpu" or (is_half and cpu_has_bfloat16) else "float32"
        logger.info(
            "dtype auto: %s, on %s%s with weights stored in %s",
            name,
            platform,
            "" if platform != "cpu" else f" {'with' if cpu_has_bfloat16 else 'without'} bfloat16",
            stored or "no named dtype",
        )
    return jnp.dtype(name)


def _check_config(config: EngineConfig) -> None:
    schedule = config.scheduler
    if schedule.max_num_batched_tokens < schedule.max_num_seqs:
        raise ConfigError(
            f"`max_num_batched_tokens` is {schedule.max_num_batched_tokens}, below `max_num_seqs` "
            f"({schedule.max_num_seqs}); every running request gets a token a step: raise the "
            "first or lower the second"
        )
    if config.precompile == "smallest" and config.parallel.num_processes > 1:
        raise ConfigError(
            f"`precompile` is 'smallest' with {config.parallel.num_processes} processes; they make "
            "the same calls, and so need the same programs: give `--precompile all` or none"
        )
    max_model_len = config.model.max_model_len
    if not schedule.enable_chunked_prefill and schedule.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"`max_num_batched_tokens` is {schedule.max_num_batched_tokens}, below `max_model_len` "
            f"({max_model_len}), and without chunked prefill a step holds a whole prompt: give "
            f"`--max-num-batched-tokens {max_model_len}`, lower `--max-model-len`, or leave "
            "`--no-enable-chunked-prefill` out"
        )
