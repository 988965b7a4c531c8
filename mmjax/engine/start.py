"""Start an engine from a configuration: weights, memory, programs."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mmjax.cache.awaited_rows import AwaitedRows
from mmjax.cache.encoder_cache_manager import EncoderCacheManager
from mmjax.cache.kv.block_reader import BlockReader
from mmjax.cache.kv.host_blocks import HostBlocks
from mmjax.cache.kv.kv_cache_manager import KVCacheManager
from mmjax.cache.state_slots import StateSlots
from mmjax.cache.stored_rows import StoredRows
from mmjax.config.engine_config import EngineConfig
from mmjax.engine.device.compilation import CompiledPrograms
from mmjax.engine.device.compile_cache import enable_persistent_cache
from mmjax.engine.device.functions import ModelShape
from mmjax.engine.device.host_pool import HostPool
from mmjax.engine.device.memory import count_host_slots, count_staged, fit_kv_cache
from mmjax.engine.device.mesh import Placement, join_processes, shard_bytes
from mmjax.engine.device.programs import Programs
from mmjax.engine.device.runner import ModelRunner
from mmjax.engine.device.threads import DeviceThreads, open_devices
from mmjax.engine.disk_caches import (
    EncoderIdentity,
    check_directories,
    describe_encoder,
    digest_leaves,
    open_block_store,
    open_stored_rows,
)
from mmjax.engine.draft import (
    DraftModel,
    DraftRunner,
    check_draft_model,
    check_draft_settings,
    make_draft_config,
)
from mmjax.engine.encoder_workers import EncoderWorkers
from mmjax.engine.media_plan import MediaPlan, plan_media
from mmjax.engine.model import (
    LoadedModel,
    describe_model,
    iter_encoder,
    iter_own_params,
    load_model,
)
from mmjax.engine.mtp import (
    AssistantRunner,
    Eagle3Runner,
    MtpRunner,
    check_eagle3,
    check_mtp,
    find_lent,
    find_shared,
    is_assistant,
    load_beside,
)
from mmjax.engine.scheduling.adapters import Adapters
from mmjax.engine.scheduling.admission import AdmissionLimits
from mmjax.engine.scheduling.buckets import Buckets, ProgramKey
from mmjax.engine.scheduling.scheduler import Scheduler
from mmjax.engine.scheduling.speculation import Speculation
from mmjax.engine.weights import EngineWeights, WeightsSource
from mmjax.errors import CheckpointError, ConfigError
from mmjax.layers.attention.api import choose_cache_type, span_variants
from mmjax.layers.attention.kv_cache import LayerCache
from mmjax.layers.cpu.product import MAX_FEW_ROWS
from mmjax.layers.module import (
    Params,
    bind,
    flatten_params,
    unflatten_params,
)
from mmjax.layers.recurrent.chunks import CHUNK
from mmjax.models.eagle3.model import Eagle3Head, is_eagle3
from mmjax.models.host_inputs import EncoderSpec, PackedEncoderSpec
from mmjax.rounding import cdiv
from mmjax.system.logger import get_logger, reporting
from mmjax.weights.adapter import AdapterReader
from mmjax.weights.sharding import Device

logger = get_logger(__name__)


class EngineParts(NamedTuple):
    """The parts of a started engine."""

    programs: Programs
    compiled: CompiledPrograms
    limits: AdmissionLimits
    scheduler: Scheduler
    runner: ModelRunner
    adapters: Adapters
    adapter_reader: AdapterReader
    weights: EngineWeights
    device_threads: DeviceThreads
    seconds: dict[str, float]
    """Seconds that the start took, by phase."""
    workers: EncoderWorkers | None
    """None: the engine encodes itself."""
    draft: DraftModel | None
    """None: no model guesses tokens ahead."""

    @property
    def num_programs(self) -> int:
        """Programs of all models."""
        own = self.compiled.num_programs
        return own if self.draft is None else own + self.draft.compiled.num_programs

    def describe_host(self) -> Callable[[int], dict[str, int]]:
        """Return what tells the bytes of all arrays in the host's memory, by cause.

        Its argument: how many KV blocks were ever used; others take none (`Programs.make_arrays`).
        """

        def count(num_blocks: int) -> dict[str, int]:
            own = self.programs.host_bytes(num_blocks)
            return own if self.draft is None else own | self.draft.host_bytes(num_blocks)

        one, two = count(1), count(2)
        return lambda num_used: {
            cause: size + (num_used - 1) * (two[cause] - size) for cause, size in one.items()
        }


class EncoderParts(NamedTuple):
    """The parts of an encoder that is started without the rest of its model."""

    programs: Programs
    runner: ModelRunner
    identity: EncoderIdentity
    stored_rows: StoredRows | None
    budget: int
    """Embeddings that are encoded at once."""
    sizes: Mapping[str, Sequence[int]]
    """Units, or patches, of the calls, by function."""


def start_engine(
    config: EngineConfig,
    *,
    model_class: Any = None,
    params: Params | None = None,
    devices: Sequence[Device] | None = None,
    draft_params: Params | None = None,
) -> EngineParts:
    """Load the weights, allocate the caches, and compile programs.

    Keywords replace the registry's class, the checkpoints' weights, and the first devices.
    """
    check_directories(config)
    enable_persistent_cache(config.compilation_cache_dir)
    # Before any other use of JAX, which opens the devices.
    join_processes(config)
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str, doing: str | None = None) -> Iterator[None]:
        start = time.perf_counter()
        with nullcontext() if doing is None else reporting(logger, lambda: doing):
            yield
        seconds[name] = time.perf_counter() - start

    with timed("open_devices", "opening the devices"):
        device_threads = open_devices()
    with timed("load_weights", "loading the weights"):
        encoder = _identify_encoder(config, model_class, params, devices)
        model = load_model(config, model_class, params, devices)
        plan = plan_media(config, model)
        programs = _make_programs(config, model, plan)
        draft_parts = _load_draft(config, model, programs, draft_params, plan=plan, devices=devices)
    with timed("measure"):
        guessing = None if draft_parts is None else draft_parts.programs
        num_blocks = fit_kv_cache(config, programs, shard_bytes(model.params), draft=guessing)
    compiled, warm_up_keys = _order_programs(config, plan, programs, num_blocks)
    with timed("allocate", "allocating the caches"):
        pool = _make_host_pool(config, model, programs)
        workers = _open_workers(config, programs, encoder)
        limits, scheduler = _make_scheduler(config, plan, programs, num_blocks, pool, workers)
        options: dict[str, Any] = {"has_spans": plan.sees != "past", "host_pool": pool}
        runner = ModelRunner(programs, compiled, model.params, num_blocks=num_blocks, **options)
        draft = None if draft_parts is None else _make_draft(draft_parts, num_blocks, runner)
        scheduler.speculation = _make_speculation(config, draft)
        runner.stored_rows = open_stored_rows(config, model.model_class, programs, model.params)
    weights = EngineWeights(programs, runner, _make_source(config, model, programs, encoder))
    adapters, reader = _open_adapters(config, model, lambda: runner.params)
    model = None  # The runner alone holds the parameters from here on.
    if config.lora.modules:
        with timed("load_adapters", "loading the adapters"):
            _load_adapters(config, adapters)
    with timed("compile"):
        compiled.compile_first()
    with timed("warm_up", "running the first programs"):
        runner.warm_up(warm_up_keys)
    runner.lead()
    compiled.start_others()
    if draft is not None:
        draft.start(after=compiled)
    _log_ready(programs, compiled, limits, seconds)
    made = (programs, compiled, limits, scheduler, runner, adapters, reader, weights)
    return EngineParts(*made, device_threads, seconds, workers, draft)


def _log_ready(
    programs: Programs,
    compiled: CompiledPrograms,
    limits: AdmissionLimits,
    seconds: Mapping[str, float],
) -> None:
    logger.info(
        "ready on %s in %s: %d programs, %d to come, %d KV blocks of %d slots, %d encoder rows; %s",
        programs.placement.local_devices[0].device_kind,
        jnp.dtype(programs.dtype).name,
        compiled.num_programs - compiled.num_left,
        compiled.num_left,
        *(limits.num_blocks, limits.block_size, programs.num_encoder_rows),
        ", ".join(f"{name} {elapsed:.1f} s" for name, elapsed in seconds.items()),
    )


# ---- a model that guesses ------------------------------------------------------------------------


class _DraftParts(NamedTuple):
    """What guesses tokens ahead, loaded before memory is planned."""

    config: EngineConfig
    model: LoadedModel
    plan: MediaPlan
    programs: Programs
    make_runner: Callable[..., DraftRunner]
    """Takes the `engine`'s, too, where it guesses beside that."""


def _load_draft(
    config: EngineConfig,
    model: LoadedModel,
    programs: Programs,
    params: Params | None,
    *,
    plan: MediaPlan,
    devices: Sequence[Device] | None,
) -> _DraftParts | None:
    """Load the model, or the layer, that guesses tokens ahead; None: none does."""
    speculation = config.speculation
    if speculation is None:
        return None
    if speculation.method == "mtp" and config.draft is None:
        check_mtp(config, model.model_class, sees=plan.sees)
        own = make_draft_config(config, config.model)
        layer = load_beside(own, model.model_class.mtp_class, model, params, devices)
        return _plan_beside(own, layer, plan, MtpRunner)
    if config.draft is None:
        return None
    own = make_draft_config(config, config.draft)
    if is_eagle3(config.draft):
        check_eagle3(config, model)
        # The table of tokens is the model's.
        dtype: Any = jnp.dtype(programs.dtype).name  # one of those that a model may be told
        named = replace(own.model, dtype=dtype)
        layer = load_beside(replace(own, model=named), Eagle3Head, model, params, devices)
        own_plan = plan._replace(sees="past", num_encoder_rows=1)
        return _plan_beside(own, layer, own_plan, Eagle3Runner)
    if is_assistant(config, model.model_class):
        layer = load_beside(own, model.model_class.assistant_class, model, params, devices)
        make = partial(AssistantRunner, lent=find_lent(layer, model))
        own_plan = plan._replace(sees="past")
        return _plan_beside(own, layer, own_plan, make, cache_type=programs.cache_type)
    check_draft_settings(config)
    small = load_model(own, None, params, devices)
    own_plan = plan_media(own, small)
    own_programs = _make_programs(own, small, own_plan)
    check_draft_model(config.draft.model, programs, own_programs)
    return _DraftParts(own, small, own_plan, own_programs, DraftRunner)


def _plan_beside(
    config: EngineConfig,
    layer: LoadedModel,
    plan: MediaPlan,
    make_runner: Callable[..., DraftRunner],
    *,
    cache_type: type[LayerCache] | None = None,
) -> _DraftParts:
    """Return the parts of what guesses beside the engine's model, which encodes the items."""
    own_plan = plan._replace(has_tower=False, sizes={}, takes_embeds=False)
    shared = find_shared(layer)
    programs = _make_programs(config, layer, own_plan, shared=shared, cache_type=cache_type)
    return _DraftParts(config, layer, own_plan, programs, make_runner)


def _make_draft(parts: _DraftParts, num_blocks: int, engine: ModelRunner) -> DraftModel:
    """Allocate a draft model's caches: as many blocks as the engine's model has."""
    config, model, plan, programs, make = parts
    compiled, warm_up_keys = _order_programs(config, plan, programs, num_blocks, is_draft=True)
    more = {"engine": engine} if programs.shared else {"has_spans": plan.sees != "past"}
    own = {n: leaf for n, leaf in flatten_params(model.params).items() if n not in programs.shared}
    runner = make(programs, compiled, unflatten_params(own), num_blocks=num_blocks, **more)
    weights = EngineWeights(programs, runner, _make_source(config, model, programs, None))

    def host_bytes(num_used: int) -> dict[str, int]:
        held = programs.host_bytes(num_used)
        if programs.shared:
            held.pop("encoder_outputs", None)  # which are the engine's
        return {"draft_model": sum(held.values())}

    return DraftModel(runner, compiled, weights, warm_up_keys, host_bytes)


def _make_speculation(config: EngineConfig, draft: DraftModel | None) -> Speculation | None:
    if config.speculation is None:
        return None
    return Speculation(config.speculation, None if draft is None else draft.runner)


# ---- encoders apart ------------------------------------------------------------------------------


def start_encoder(
    config: EngineConfig, *, model_class: Any = None, params: Params | None = None
) -> EncoderParts:
    """Load what encodes items, and nothing else; compile its programs. Keywords as above."""
    check_directories(config)
    enable_persistent_cache(config.compilation_cache_dir)
    open_devices()
    model = describe_model(config, model_class, None)
    plan = plan_media(config, model)
    read = _make_programs(config, model, plan).find_encoder_params()
    if not read:
        raise ConfigError(
            f"`{model.model_class.__name__}` encodes nothing here; allow media with "
            "`--limit-mm-per-prompt`, or serve it without `mmjax encode-worker`"
        )
    held = dict(iter_encoder(config, model, params, read))
    digest = digest_leaves(held.items())
    abstract = flatten_params(model.params)
    unread = abstract.keys() - held.keys()
    mixed = {name: held.get(name, leaf) for name, leaf in abstract.items()}
    model = model._replace(params=unflatten_params(mixed))
    programs = _make_programs(config, model, plan, unread)
    keys = [key for key in programs.buckets.keys if key.function in programs.buckets.encode_sizes]
    compiled = _plan_programs(config, programs, 1, keys, len(keys))
    tree = unflatten_params(held)
    runner = ModelRunner(programs, compiled, tree, num_blocks=1, has_spans=plan.sees != "past")
    compiled.compile_first()
    runner.warm_up(keys)
    parts = describe_encoder(config, model.model_class, programs, digest)
    return EncoderParts(
        programs,
        runner,
        EncoderIdentity(parts, read),
        open_stored_rows(config, model.model_class, programs, tree),
        min(plan.encoder_budget, plan.num_encoder_rows),
        programs.buckets.encode_sizes,
    )


def _identify_encoder(
    config: EngineConfig,
    model_class: Any,
    params: Params | None,
    devices: Sequence[Device] | None,
) -> EncoderIdentity | None:
    """Return what a worker's encoder must be; its weights are read, and dropped one by one.

    None: there are no workers.
    """
    if not config.cache.encoder_workers:
        return None
    alone = replace(config, cache=replace(config.cache, encoder_workers=()))
    model = describe_model(alone, model_class, devices)
    programs = _make_programs(alone, model, plan_media(alone, model))
    read = programs.find_encoder_params()
    digest = digest_leaves(iter_encoder(alone, model, params, read))
    return EncoderIdentity(describe_encoder(alone, model.model_class, programs, digest), read)


def _open_workers(
    config: EngineConfig, programs: Programs, encoder: EncoderIdentity | None
) -> EncoderWorkers | None:
    if encoder is None:
        return None
    cache = config.cache
    return EncoderWorkers(
        cache.encoder_workers,
        encoder.parts,
        key_file=cache.encoder_workers_key,
        timeout_s=cache.encoder_workers_timeout,
        has_own=cache.keep_encoder,
        width=programs.embed_width,
        dtype=np.dtype(programs.dtype),
        max_rows=programs.num_encoder_rows,
    )


def _make_source(
    config: EngineConfig,
    model: LoadedModel,
    programs: Programs,
    encoder: EncoderIdentity | None,
) -> WeightsSource:
    """Return where an engine's weights may come from later."""
    model_class, left_out, mesh = model.model_class, model.left_out, model.placement.home
    return WeightsSource(
        rules=model_class.rules(config.model.hf_config),
        left_out=left_out,
        read=partial(iter_own_params, config, model_class, left_out, mesh, programs.own_params),
        path=config.model.path,
        encoded_apart=None if encoder is None else encoder.params,
    )


# ---- adapters ------------------------------------------------------------------------------------


def _open_adapters(
    config: EngineConfig, model: LoadedModel, get_params: Callable[[], Params]
) -> tuple[Adapters, AdapterReader]:
    """Return the adapters, of which none is loaded, and what reads them.

    `get_params` returns the present parameters.
    """

    def read_base(name: str) -> np.ndarray | None:
        leaves = flatten_params(get_params())
        if not leaves:
            raise CheckpointError(
                "the adapter brings biases or weights, which those of the model must be compared "
                "with, and the engine has dropped its own; wake it up first"
            )
        leaf = leaves.get(name)
        return None if leaf is None else np.asarray(leaf)

    lora = config.lora
    shapes = {} if model.adapted is None else model.adapted.shapes
    reader = AdapterReader(
        rules=model.model_class.rules(config.model.hf_config),
        shapes={name: leaf.shape for name, leaf in shapes.items()},
        dtype=next((leaf.dtype for leaf in shapes.values()), None),
        max_rank=lora.max_lora_rank,
        read_base=read_base,
        has_towers=lora.enable_tower_connector_lora,
        left_out=model.left_out,
        unadapted=model.model_class.unadapted,
    )
    max_cpu_loras = lora.max_cpu_loras or 2 * lora.max_loras
    return Adapters(reader.read, max_cpu_loras=max_cpu_loras), reader


def _load_adapters(config: EngineConfig, adapters: Adapters) -> None:
    for name, path in config.lora.modules:
        adapters.load(name, Path(path))
    adapters.wait()
    for name, error in adapters.pop_loaded():
        if error is not None:
            raise ConfigError(f"`lora_modules` gives `{name}`, which cannot be loaded: {error}")


# ---- sizes, memory and programs ------------------------------------------------------------------


def _make_programs(
    config: EngineConfig,
    model: LoadedModel,
    plan: MediaPlan,
    unread: Collection[str] = (),
    *,
    shared: Collection[str] = (),
    cache_type: type[LayerCache] | None = None,
) -> Programs:
    """`cache_type` None: the platform's; others are as of `Programs`."""
    schedule, placement = config.scheduler, model.placement
    shape = ModelShape.of(model.graphdef, model.params)
    spec = bind(model.graphdef, model.params).kv_cache_spec
    has_states = bool(spec.states)
    cache_type = cache_type or choose_cache_type(
        placement.platform,
        spec,
        shape.dtype,
        num_shards=placement.num_kv_shards,
    )
    keeps_rows = plan.has_tower and config.cache.encoder_cache_dir is not None
    writes = plan.takes_embeds or keeps_rows or bool(config.cache.encoder_workers)
    heads: Sequence[tuple[int, int]] = ()
    if plan.has_tower:
        heads = model.model_class.find_alignment_heads(config.model.path, config.model.hf_config)
    buckets = Buckets.create(
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.max_num_batched_tokens,
        encode_sizes=plan.sizes if plan.has_tower else {},
        max_written=plan.encoder_budget if writes else 0,
        span_variants=span_variants(cache_type, has_spans=plan.sees != "past"),
        max_encoder_len=plan.max_encoder_len,
        max_aligned=config.model.max_model_len if heads else 0,
        has_adapters=model.adapted is not None,
        num_guessed=config.num_guessed,
        max_num_rows=_max_num_rows(config, placement),
        pools=config.model.pools,
    )
    return Programs(
        shape,
        model.params,
        cache_type=cache_type,
        buckets=buckets,
        placement=placement,
        host_inputs=plan.host_inputs,
        num_encoder_rows=plan.num_encoder_rows,
        block_size=config.cache.block_size,
        max_blocks=cdiv(config.model.max_model_len, config.cache.block_size),
        max_encoder_len=plan.max_encoder_len,
        adapted=model.adapted,
        logprobs_mode=config.model.logprobs_mode,
        keeps_rows=keeps_rows,
        num_state_slots=plan.num_state_slots if has_states else 0,
        states_per_seq=plan.states_per_seq if has_states else 0,
        unread=unread,
        shared=shared,
        alignment_heads=heads,
    )


def _max_num_rows(config: EngineConfig, placement: Placement) -> int:
    """Return the rows of a step with guesses, at most.

    On the CPU those that are multiplied as one is, bit for bit (docs/determinism.md).
    """
    most = config.scheduler.max_num_seqs
    return MAX_FEW_ROWS if placement.platform == "cpu" else max(most, MAX_FEW_ROWS)


def _order_programs(
    config: EngineConfig,
    plan: MediaPlan,
    programs: Programs,
    num_blocks: int,
    *,
    is_draft: bool = False,
) -> tuple[CompiledPrograms, Sequence[ProgramKey]]:
    """Return the programs, and which of them run before the first request.

    The smallest, which shows that each function runs. With other processes all of them: what sends
    a call's arrays is compiled as it runs.
    """
    buckets = programs.buckets
    least_tokens = plan.largest_item if plan.keeps_runs_whole else 1
    if plan.num_state_slots:
        least_tokens = CHUNK
    order, num_first = buckets.compile_order(least_tokens=least_tokens)
    warm_up_keys = order[:num_first]
    if config.precompile == "all":
        order, num_first = buckets.keys, buckets.num_programs
    elif config.precompile != "smallest":
        order, num_first, warm_up_keys = [], 0, []
    elif is_draft:
        # Nobody waits for a guess: a draft model has all of its programs, or uses none.
        num_first, warm_up_keys = 0, []
    compiled = _plan_programs(config, programs, num_blocks, order, num_first)
    is_alone = not programs.placement.is_shared
    return compiled, warm_up_keys if is_alone else order[:num_first]


def _plan_programs(
    config: EngineConfig,
    programs: Programs,
    num_blocks: int,
    order: Sequence[ProgramKey],
    num_first: int,
) -> CompiledPrograms:
    return CompiledPrograms(
        programs.buckets,
        partial(programs.make, num_blocks),
        order,
        num_first,
        num_threads=config.compile_threads,
        use_tqdm=config.use_tqdm,
    )


def _make_host_pool(
    config: EngineConfig, model: LoadedModel, programs: Programs
) -> HostPool | None:
    """Return what keeps evicted KV blocks; None: nothing does."""
    num_slots = count_host_slots(config, programs)
    if not num_slots:
        return None
    store = open_block_store(config, model.model_class, programs, model.params)
    staged = count_staged(config)
    return HostPool(programs, num_slots=num_slots, max_staged=staged, store=store)


def _make_kv_cache(
    config: EngineConfig, plan: MediaPlan, num_blocks: int, pool: HostPool | None
) -> KVCacheManager:
    store = None if pool is None else pool.store
    return KVCacheManager(
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        max_model_len=config.model.max_model_len,
        max_encoder_len=plan.max_encoder_len,
        host=None if pool is None else HostBlocks(pool.num_slots),
        reader=None
        if pool is None or store is None
        else BlockReader(
            store.get,
            block_bytes=pool.bytes_per_block,
            max_blocks=pool.num_slots,
            max_requests=config.scheduler.max_num_seqs,
        ),
    )


def _make_scheduler(
    config: EngineConfig,
    plan: MediaPlan,
    programs: Programs,
    num_blocks: int,
    host_pool: HostPool | None,
    workers: EncoderWorkers | None,
) -> tuple[AdmissionLimits, Scheduler]:
    schedule, cache = config.scheduler, config.cache
    max_model_len, spec = config.model.max_model_len, plan.host_inputs.encoder_spec
    limits = AdmissionLimits(
        max_model_len=max_model_len,
        num_token_ids=programs.num_token_ids,
        vocab_size=programs.vocab_size,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_num_batched_tokens=schedule.max_num_batched_tokens,
        encoder_budget=min(plan.encoder_budget, plan.num_encoder_rows),
        keeps_runs_whole=plan.keeps_runs_whole,
        enable_chunked_prefill=schedule.enable_chunked_prefill,
        sees=plan.sees,
        max_encoder_len=plan.max_encoder_len,
        has_states=bool(plan.num_state_slots),
        item_sizes=plan.sizes,
        aligns=bool(programs.alignment_heads),
    )
    scheduler = Scheduler(
        kv_cache=_make_kv_cache(config, plan, num_blocks, host_pool),
        encoder_cache=EncoderCacheManager(plan.num_encoder_rows),
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.max_num_batched_tokens,
        max_num_encoder_input_tokens=plan.encoder_budget,
        max_num_queued_reqs=schedule.max_num_queued_reqs,
        max_num_encoder_states=programs.buckets.num_states,
        patches_per_token=0
        if isinstance(spec, EncoderSpec)
        else spec.patches_per_kept or spec.patches_per_token,
        packs_clips=isinstance(plan.host_inputs.clip_spec, PackedEncoderSpec),
        keeps_runs_whole=plan.keeps_runs_whole,
        enable_chunked_prefill=schedule.enable_chunked_prefill,
        max_loras=config.lora.max_loras if config.lora.enable_lora else 0,
        max_num_rows=min(_max_num_rows(config, programs.placement), programs.buckets.max_num_rows),
        state_slots=StateSlots(plan.num_state_slots, plan.states_per_seq)
        if plan.num_state_slots
        else None,
        awaited=None
        if workers is None
        else AwaitedRows(workers.fetch, max_requests=2 * schedule.max_num_seqs),
        buckets=programs.buckets,
    )
    return limits, scheduler
