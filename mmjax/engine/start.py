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
from mmjax.config.speculative_config import SpeculativeConfig
from mmjax.engine.device.compilation import CompiledPrograms
from mmjax.engine.device.compile_cache import enable_persistent_cache
from mmjax.engine.device.encoder import choose_clip_sizes, choose_sizes, largest_items
from mmjax.engine.device.functions import ModelShape
from mmjax.engine.device.host_pool import HostPool
from mmjax.engine.device.memory import count_host_slots, count_staged, fit_kv_cache
from mmjax.engine.device.mesh import Placement, join_processes, shard_bytes
from mmjax.engine.device.programs import Programs
from mmjax.engine.device.runner import ModelRunner
from mmjax.engine.device.threads import DeviceThreads, open_devices
from mmjax.engine.disk_caches import (
    EncoderIdentity,
    describe_encoder,
    digest_leaves,
    open_block_store,
    open_stored_rows,
)
from mmjax.engine.encoder_workers import EncoderWorkers
from mmjax.engine.model import (
    LoadedModel,
    describe_model,
    iter_encoder,
    iter_own_params,
    load_model,
)
from mmjax.engine.scheduling.adapters import Adapters
from mmjax.engine.scheduling.admission import AdmissionLimits
from mmjax.engine.scheduling.buckets import Buckets, ProgramKey, encode_sizes
from mmjax.engine.scheduling.scheduler import Scheduler
from mmjax.engine.scheduling.speculation import Speculation
from mmjax.engine.weights import EngineWeights, WeightsSource
from mmjax.errors import ConfigError
from mmjax.layers.attention.api import choose_cache_type, span_variants
from mmjax.layers.cpu.product import MAX_FEW_ROWS
from mmjax.layers.module import (
    Params,
    bind,
    flatten_params,
    unflatten_params,
)
from mmjax.layers.recurrent.chunks import CHUNK
from mmjax.models.host_inputs import EncoderSpec, HostInputs, PackedEncoderSpec, Sees
from mmjax.processing.encoder_budget import compute_mm_encoder_budget
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


class _MediaPlan(NamedTuple):
    """What items take of a step, and of the encoder cache; it does not depend on memory."""

    host_inputs: HostInputs
    has_tower: bool
    sizes: Mapping[str, Any]
    """Of the calls that encode items, here or elsewhere, as `Buckets.create` takes them."""
    takes_embeds: bool
    sees: Sees
    """What a prompt's tokens see, of what they may have."""
    keeps_runs_whole: bool
    largest_item: int
    """Embeddings that are encoded at once, at most; 0: none are."""
    encoder_budget: int
    """Embeddings that a step may encode."""
    num_encoder_rows: int
    """Embeddings that are kept."""
    max_encoder_len: int
    num_state_slots: int
    """Of recurrent layers' states; 0: the model has none."""


def start_engine(
    config: EngineConfig,
    *,
    model_class: Any = None,
    params: Params | None = None,
    devices: Sequence[Device] | None = None,
) -> EngineParts:
    """Load the weights, allocate the caches, and compile programs.

    Keywords replace the registry's class, the checkpoint's weights, and the first devices.
    """
    _check_config(config)
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
    plan = _plan_media(config, model)
    programs = _make_programs(config, model, plan)
    with timed("measure"):
        num_blocks = fit_kv_cache(config, programs, weights=shard_bytes(model.params))
    compiled, warm_up_keys = _order_programs(config, plan, programs, num_blocks)
    with timed("allocate", "allocating the caches"):
        pool = _make_host_pool(config, model, programs)
        workers = _open_workers(config, programs, encoder)
        limits, scheduler = _make_scheduler(config, plan, programs, num_blocks, pool, workers)
        options: dict[str, Any] = {"has_spans": plan.sees != "past", "host_pool": pool}
        runner = ModelRunner(programs, compiled, model.params, num_blocks=num_blocks, **options)
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
    logger.info(
        "ready on %s in %s: %d programs, %d to come, %d KV blocks of %d slots, %d encoder rows; %s",
        programs.placement.local_devices[0].device_kind,
        jnp.dtype(programs.dtype).name,
        compiled.num_programs - compiled.num_left,
        compiled.num_left,
        *(num_blocks, config.cache.block_size, programs.num_encoder_rows),
        ", ".join(f"{name} {elapsed:.1f} s" for name, elapsed in seconds.items()),
    )
    made = (programs, compiled, limits, scheduler, runner, adapters, reader, weights)
    return EngineParts(*made, device_threads, seconds, workers)


# ---- encoders apart ------------------------------------------------------------------------------


def start_encoder(
    config: EngineConfig, *, model_class: Any = None, params: Params | None = None
) -> EncoderParts:
    """Load what encodes items, and nothing else; compile its programs. Keywords as above."""
    _check_config(config)
    enable_persistent_cache(config.compilation_cache_dir)
    open_devices()
    model = describe_model(config, model_class, None)
    plan = _plan_media(config, model)
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
    compiled = CompiledPrograms(
        programs.buckets,
        partial(programs.make, 1),
        keys,
        len(keys),
        num_threads=config.compile_threads,
        use_tqdm=config.use_tqdm,
    )
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
    programs = _make_programs(alone, model, _plan_media(alone, model))
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
        read=partial(iter_own_params, config, model_class, left_out, mesh, programs.params),
        path=config.model.path,
        encoded_apart=encoder and encoder.params,
    )


# ---- adapters ------------------------------------------------------------------------------------


def _make_adapter_reader(
    config: EngineConfig, model: LoadedModel, get_params: Callable[[], Params]
) -> AdapterReader:
    """Return what reads adapters; `get_params` returns the present parameters."""

    def read_base(name: str) -> np.ndarray | None:
        leaf = flatten_params(get_params()).get(name)
        return None if leaf is None else np.asarray(leaf)

    lora = config.lora
    shapes = {} if model.adapted is None else model.adapted.shapes
    return AdapterReader(
        rules=model.model_class.rules(config.model.hf_config),
        shapes={name: leaf.shape for name, leaf in shapes.items()},
        dtype=next((leaf.dtype for leaf in shapes.values()), None),
        max_rank=lora.max_lora_rank,
        read_base=read_base,
        has_towers=lora.enable_tower_connector_lora,
        left_out=model.left_out,
    )


def _open_adapters(
    config: EngineConfig, model: LoadedModel, get_params: Callable[[], Params]
) -> tuple[Adapters, AdapterReader]:
    """Return the adapters, of which none is loaded, and what reads them."""
    lora, reader = config.lora, _make_adapter_reader(config, model, get_params)
    max_cpu_loras = lora.max_cpu_loras or 2 * lora.max_loras
    return Adapters(reader.read, max_cpu_loras=max_cpu_loras), reader


def _load_adapters(config: EngineConfig, adapters: Adapters) -> None:
    for name, path in config.lora.modules:
        adapters.load(name, Path(path))
    while adapters.wait(1.0):
        pass
    for name, error in adapters.pop_loaded():
        if error is not None:
            raise ConfigError(f"`lora_modules` gives `{name}`, which cannot be loaded: {error}")


# ---- sizes, memory and programs ------------------------------------------------------------------


def _plan_media(config: EngineConfig, model: LoadedModel) -> _MediaPlan:
    schedule, module = config.scheduler, bind(model.graphdef, model.params)
    _check_offload(config, has_states=bool(module.kv_cache_spec.states))
    host_inputs: HostInputs = model.model_class.host_inputs(config.model.hf_config)
    has_tower, takes_embeds = not model.left_out, config.model.mm.enable_mm_embeds
    encodes = has_tower or bool(config.cache.encoder_workers)
    has_items = encodes or takes_embeds or module.sees == "prompt"
    sees: Sees = module.sees if has_items else "past"
    keeps_runs_whole = sees != "past" or schedule.disable_chunked_mm_input
    if sees == "prompt":
        logger.info(
            "a prompt's tokens see each other: each prompt is computed in one step, so that it may "
            "have `--max-num-batched-tokens` %d at most",
            schedule.max_num_batched_tokens,
        )
    elif sees != "past" and not schedule.disable_chunked_mm_input:
        logger.info("a picture's embeddings go in one step: they see each other both ways")
    largest: Mapping[str, int] = {}
    if encodes or takes_embeds:
        largest = largest_items(
            host_inputs.encoder_spec, config.max_embeds_per_item, config.model.max_model_len
        )
    largest_item = max(largest.values(), default=0)
    longest_clip = 0 if host_inputs.clip_spec is None else largest.get("audio", 0)
    seen = (n for m, n in largest.items() if m != "audio" or not longest_clip)
    largest_seen = max(seen, default=0)
    if module.max_encoder_len:
        _check_offload(config, shares_blocks=False)
        if config.model.pools:
            raise ConfigError(
                f"`runner` is 'pooling', but `{config.model.architecture}` is an encoder-decoder, "
                "whose decoder reads no prompt; leave `--runner` out"
            )
        # The items have no positions in the decoder's prompt, which alone has chunks.
        keeps_runs_whole = False
        # A request starts in one step: with the encoder's hidden states, and, of the items in
        # its prompt, at most an embedding at each place.
        largest = {"encoder": 2 * module.max_encoder_len}
    encoder_budget, encoder_rows = compute_mm_encoder_budget(
        schedule,
        largest,
        encoder_cache_size=config.cache.encoder_cache_size,
        disable_chunked_mm_input=keeps_runs_whole,
        longest_runs={m: n for m, n in largest.items() if m not in host_inputs.cut_modalities},
    )
    return _MediaPlan(
        host_inputs=host_inputs,
        has_tower=has_tower,
        sizes=_choose_sizes(host_inputs, encoder_budget, largest_seen, longest_clip)
        if encodes
        else {"max_units": 0},
        takes_embeds=takes_embeds,
        sees=sees,
        keeps_runs_whole=keeps_runs_whole,
        largest_item=largest_item,
        encoder_budget=encoder_budget,
        num_encoder_rows=max(1, encoder_rows),
        max_encoder_len=module.max_encoder_len,
        num_state_slots=_count_state_slots(config, module, keeps_runs_whole=keeps_runs_whole),
    )


def _choose_sizes(
    host_inputs: HostInputs, encoder_budget: int, largest_seen: int, longest_clip: int
) -> dict[str, Any]:
    """Return what `Buckets.create` needs to know of the calls that encode items; 0: of none."""
    sizes: dict[str, Any] = {"max_units": 0}
    if largest_seen:
        sizes = choose_sizes(host_inputs.encoder_spec, encoder_budget, largest_seen)
    return sizes | {"clips": choose_clip_sizes(host_inputs.clip_spec, encoder_budget, longest_clip)}


def _count_state_slots(config: EngineConfig, module: Any, *, keeps_runs_whole: bool) -> int:
    """Return the slots of states that requests and snapshots have; 0 without recurrent layers."""
    schedule, cache = config.scheduler, config.cache
    if not module.kv_cache_spec.states:
        return 0
    if schedule.max_num_batched_tokens < CHUNK:
        raise ConfigError(
            f"`max_num_batched_tokens` is {schedule.max_num_batched_tokens}, but the model has "
            f"recurrent layers, which compute prompts in chunks of {CHUNK} tokens: give "
            f"`--max-num-batched-tokens {CHUNK}` or more"
        )
    if keeps_runs_whole:
        raise ConfigError(
            "`disable_chunked_mm_input` is set, but the model has recurrent layers, which compute "
            "prompts in chunks that end within items, too; leave it out"
        )
    if schedule.speculation is not None:
        logger.warning(
            "no tokens are guessed ahead: the model has recurrent layers, whose states cannot go "
            "back behind a wrong guess; leave `--speculative-config` out"
        )
    finds = cache.enable_prefix_caching and schedule.enable_chunked_prefill
    return schedule.max_num_seqs + (cache.num_state_snapshots if finds else 0)


def _find_speculation(config: EngineConfig, plan: _MediaPlan) -> SpeculativeConfig | None:
    """Return what is guessed ahead; nothing is where recurrent layers cannot take it back."""
    is_possible = not plan.num_state_slots and not config.model.pools
    return config.scheduler.speculation if is_possible else None


def _make_programs(
    config: EngineConfig, model: LoadedModel, plan: _MediaPlan, unread: Collection[str] = ()
) -> Programs:
    schedule, placement = config.scheduler, model.placement
    shape = ModelShape.of(model.graphdef, model.params)
    cache_type = choose_cache_type(
        placement.platform,
        bind(model.graphdef, model.params).kv_cache_spec,
        shape.dtype,
        num_shards=placement.num_kv_shards,
    )
    speculation = _find_speculation(config, plan)
    keeps_rows = plan.has_tower and config.cache.encoder_cache_dir is not None
    writes = plan.takes_embeds or keeps_rows or bool(config.cache.encoder_workers)
    heads: Sequence[tuple[int, int]] = ()
    if plan.has_tower:
        heads = model.model_class.find_alignment_heads(config.model.path, config.model.hf_config)
    buckets = Buckets.create(
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.max_num_batched_tokens,
        **(plan.sizes if plan.has_tower else {"max_units": 0}),
        max_written=plan.encoder_budget if writes else 0,
        span_variants=span_variants(cache_type, has_spans=plan.sees != "past"),
        max_encoder_len=plan.max_encoder_len,
        max_aligned=config.model.max_model_len if heads else 0,
        has_adapters=model.adapted is not None,
        num_guessed=0 if speculation is None else speculation.num_speculative_tokens,
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
        takes_embeds=plan.takes_embeds,
        keeps_rows=keeps_rows,
        num_state_slots=plan.num_state_slots,
        unread=unread,
        alignment_heads=heads,
    )


def _max_num_rows(config: EngineConfig, placement: Placement) -> int:
    """Return the rows of a step with guesses, at most.

    On the CPU those that are multiplied as one is, bit for bit (docs/determinism.md).
    """
    most = config.scheduler.max_num_seqs
    return MAX_FEW_ROWS if placement.platform == "cpu" else max(most, MAX_FEW_ROWS)


def _order_programs(
    config: EngineConfig, plan: _MediaPlan, programs: Programs, num_blocks: int
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
    compiled = CompiledPrograms(
        buckets,
        partial(programs.make, num_blocks),
        order,
        num_first,
        num_threads=config.compile_threads,
        use_tqdm=config.use_tqdm,
    )
    is_alone = not programs.placement.is_shared
    return compiled, warm_up_keys if is_alone else order[:num_first]


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
    config: EngineConfig, plan: _MediaPlan, num_blocks: int, pool: HostPool | None
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
    plan: _MediaPlan,
    programs: Programs,
    num_blocks: int,
    host_pool: HostPool | None,
    workers: EncoderWorkers | None,
) -> tuple[AdmissionLimits, Scheduler]:
    schedule, cache = config.scheduler, config.cache
    max_model_len, spec = config.model.max_model_len, plan.host_inputs.encoder_spec
    speculation = _find_speculation(config, plan)
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
        item_sizes=encode_sizes(**plan.sizes),
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
        speculation=None if speculation is None else Speculation(speculation),
        max_num_rows=min(_max_num_rows(config, programs.placement), programs.buckets.max_num_rows),
        state_slots=StateSlots(plan.num_state_slots) if plan.num_state_slots else None,
        awaited=None
        if workers is None
        else AwaitedRows(workers.fetch, max_requests=2 * schedule.max_num_seqs),
    )
    return limits, scheduler


def _check_offload(
    config: EngineConfig, *, shares_blocks: bool = True, has_states: bool = False
) -> None:
    """Raise ConfigError where no block is found by its hash, or no process has all of it."""
    if has_states and config.cache.kv_offload_dir is not None:
        raise ConfigError(
            f"`kv_offload_dir` is {str(config.cache.kv_offload_dir)!r}, but the model has "
            "recurrent layers, without whose states no later process can use a block; leave "
            "`--kv-offload-dir` out"
        )
    num_processes, reason = config.parallel.num_processes, None
    if not config.cache.enable_prefix_caching:
        reason = "`enable_prefix_caching` is off"
    elif not shares_blocks:
        reason = "the model is an encoder-decoder, whose requests share no blocks"
    elif num_processes > 1:
        reason = f"each of {num_processes} processes has a part of every block"
    if config.cache.kv_offload_gb and reason is not None:
        raise ConfigError(
            f"`kv_offload_gb` is {config.cache.kv_offload_gb}, but {reason}: no evicted block "
            "could be found again; leave `--kv-offload-gb` out"
        )


def _check_config(config: EngineConfig) -> None:
    schedule = config.scheduler
    _check_offload(config)
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
    if config.cache.encoder_cache_dir is not None and config.parallel.num_processes > 1:
        raise ConfigError(
            f"`encoder_cache_dir` is set with {config.parallel.num_processes} processes, of which "
            "none has all of an encoder's weights to name its outputs by; leave it out"
        )
    if config.cache.encoder_workers and config.parallel.num_processes > 1:
        raise ConfigError(
            f"`encoder_workers` is set with {config.parallel.num_processes} processes, of which "
            "only the first would have their outputs; leave it out"
        )
    max_model_len = config.model.max_model_len
    if not schedule.enable_chunked_prefill and schedule.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"`max_num_batched_tokens` is {schedule.max_num_batched_tokens}, below `max_model_len` "
            f"({max_model_len}), and without chunked prefill a step holds a whole prompt: give "
            f"`--max-num-batched-tokens {max_model_len}`, lower `--max-model-len`, or leave "
            "`--no-enable-chunked-prefill` out"
        )
