"""Configuration: frozen dataclasses, one per subject.

A setting is one field, declared by `setting(...)`: its flag of `mmjax.serve`, its keyword of `LLM`,
its key in a YAML file and its row in docs/configuration.md are derived from it. Other fields are
set by mmjax. No logic beyond validation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mmjax.config.lora_config import LoRAConfig
from mmjax.config.multimodal_config import MultiModalConfig
from mmjax.config.pooler_config import PoolerConfig
from mmjax.config.server_config import ServerConfig
from mmjax.config.settings import Setting, check_settings, setting, settings_of
from mmjax.config.speculative_config import SpeculativeConfig
from mmjax.errors import ConfigError
from mmjax.system.logger import LogFormat, LogLevel

ChatContentFormat = Literal["auto", "string", "openai"]
DtypeName = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["int8", "int8-weights", "int4"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
Precompile = Literal["all", "smallest", "none"]
PrefixCachingHashAlgorithm = Literal["sha256", "blake3"]
Runner = Literal["auto", "generate", "pooling"]
SchedulingPolicy = Literal["fcfs", "priority"]

_RETRIEVAL = "ForRetrieval"
"""How architectures end that give vectors alone, one for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The checkpoint, and its own configuration."""

    model: str = setting(
        help="Directory or hub id of the checkpoint.",
        unset="tiny_scenes, which is part of mmjax",
    )
    path: Path
    """The local directory."""
    hf_config: Any
    """The checkpoint's `PreTrainedConfig`."""
    architecture: str
    """The registry's key: the first of config.json's `architectures`, unless `model_source` names
    a family by its vision tower."""
    parts: Mapping[str, Path] = field(default_factory=dict)
    """Directories of the checkpoints that this one was trained from, where config.json names them,
    by what their tensors' names begin with here: they have the tensors that this one's files lack.
    """
    model_class: str | None = None
    """The import path of the model's class, for a process that computes: what is registered in the
    one that starts it is not known there. None: as the registry says."""
    max_model_len: int = setting(
        help="Maximum number of tokens of a prompt and its output.",
        unset="the checkpoint's, at most 8192",
        minimum=1,
    )
    dtype: DtypeName = setting(
        "auto",
        "Of weights and activations. auto: bfloat16 on GPU and TPU, and, of weights stored in 16 "
        "bits, on a CPU with kernels for it or that multiplies it itself; else float32.",
    )
    load_format: LoadFormat = setting(
        "auto",
        """Where weights are from. auto, safetensors: the checkpoint's files, or a snapshot's;
        dummy: random ones of the right shapes, for which no files are needed: the engine gets its
        weights later (docs/serving.md).""",
    )
    quantization: Quantization | None = setting(
        None,
        """Of the language model's weights, but for experts, while they are loaded. int8: to 8 bits
        for each output channel, and what they are multiplied with to 8 bits for each token;
        int8-weights: the weights alone; int4: the weights alone, to 4 bits, in groups of 32 inputs.
        The table of tokens and the head get 8 bits, and their inputs stay, in each of them. A
        checkpoint that is published quantised stays as it is.""",
        unset="none",
    )
    runner: Runner = setting(
        "auto",
        """What is served. generate: text; pooling: vectors of prompts (docs/serving.md); auto: what
        the model was trained for.""",
    )
    pooler_config: Mapping[str, Any] = setting(
        {},
        "How a prompt becomes a vector, with `runner` pooling.",
        unset="the last token's state, normalised",
        expected="""a mapping (JSON object), as in '{"pooling_type": "MEAN"}'""",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "Names of the model in requests and `/v1/models`; the first is in answers and metrics.",
        unset="`model`, as given",
        is_valid=bool,
        expected="names that are not empty",
    )
    revision: str | None = setting(
        None, "Branch, tag or commit of a hub id.", unset="the hub's main branch"
    )
    download_dir: Path | None = setting(
        None, "Where checkpoints of the hub are kept.", unset="`~/.cache/huggingface/hub`"
    )
    generation_config: str = setting(
        "auto",
        """Where the defaults of sampling are from. auto: the checkpoint's generation_config.json;
        vllm: none, as vLLM's name for its own neutral ones; else a directory with such a file.""",
    )
    override_generation_config: Mapping[str, Any] = setting(
        {},
        "Defaults of sampling that replace those of `generation_config`.",
        unset="none",
        expected="""a mapping (JSON object), as in '{"temperature": 0.5}'""",
    )
    chat_template: str | None = setting(
        None,
        "Chat template that replaces the checkpoint's: a file, or the template itself.",
        unset="the checkpoint's, else the family's",
    )
    chat_template_content_format: ChatContentFormat = setting(
        "auto",
        """What the chat template takes as a message's content. string: one text; openai: a list of
        parts; auto: as its syntax tree says.""",
    )
    interleave_mm_strings: bool = setting(
        False,
        """Whether placeholders stand where the parts stood, for templates that take one text;
        otherwise before the message's text.""",
    )
    seed: int = setting(
        0,
        "Seed for requests without one.",
        minimum=-(2**63),
        maximum=2**63 - 1,
        expected="an integer of 64 bits",
    )
    logprobs_mode: LogprobsMode = setting(
        "raw_logprobs",
        """What log-probabilities of answers are of. raw_logprobs: the model's own distribution;
        processed_logprobs: the one that is sampled from, after biases, penalties, temperature,
        min-p, top-k and top-p.""",
    )
    mm: MultiModalConfig = field(default_factory=MultiModalConfig)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.runner == "generate" and self.is_multi_vector:
            raise ConfigError(
                f"`runner` is 'generate', but `{self.architecture}` gives vectors, and no text; "
                "leave `--runner` out"
            )
        if self.pooler_config and not self.pools:
            raise ConfigError(
                "`pooler_config` is of no use to a server of text; give `--runner pooling`, too"
            )
        if self.pooler.dimensions is not None:
            self.check_dimensions(self.pooler.dimensions)

    @property
    def pools(self) -> bool:
        """Whether prompts become vectors; else they are answered by text."""
        return self.runner == "pooling" or (self.runner == "auto" and self.is_multi_vector)

    @property
    def is_multi_vector(self) -> bool:
        """Whether the model was trained to give a vector for each token, and nothing else."""
        return self.architecture.endswith(_RETRIEVAL)

    @property
    def pooler(self) -> PoolerConfig:
        """What requests for vectors do not say."""
        return PoolerConfig.parse(self.pooler_config)

    def check_dimensions(self, dimensions: int) -> None:
        """Raise ConfigError unless vectors may be cut to so many numbers, as vLLM decides it."""
        known = getattr(self.hf_config, "matryoshka_dimensions", None)
        may_cut = getattr(self.hf_config, "is_matryoshka", False) if known is None else True
        if not may_cut:
            raise ConfigError(
                f"`dimensions` is {dimensions}, but the model was not trained to have its vectors "
                "cut (config.json has no `is_matryoshka`); leave it out"
            )
        width = self.hf_config.get_text_config().hidden_size
        if (known is not None and dimensions not in known) or dimensions > width:
            allowed = f"at most {width}" if known is None else f"one of {known}"
            raise ConfigError(f"`dimensions` is {dimensions}; this model takes {allowed}")

    @property
    def public_names(self) -> tuple[str, ...]:
        """The model's names in `/v1/models` and in requests."""
        return tuple(dict.fromkeys(self.served_model_name)) or (self.model,)

    @property
    def public_name(self) -> str:
        """The model's name in answers and metrics."""
        return self.public_names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of the queue."""

    max_num_seqs: int = setting(16, "Maximum number of running sequences.", minimum=1)
    max_num_batched_tokens: int = setting(2048, "Maximum number of tokens of a step.", minimum=1)
    max_num_queued_reqs: int = setting(
        1024,
        "Maximum number of waiting sequences, besides running ones; further requests get 429.",
        minimum=1,
        is_for_serve_alone=True,
    )
    max_num_queued_tokens: int | None = setting(
        None,
        """Maximum number of prompt tokens of requests without output; one that exceeds it gets 429,
        unless it is alone.""",
        unset="no limit",
        minimum=1,
        is_for_serve_alone=True,
    )
    max_num_encoder_input_tokens: int | None = setting(
        None,
        """Maximum number of encoder outputs (embeddings) that a step computes; at least those of
        the largest item.""",
        unset="`max_num_batched_tokens`",
        minimum=1,
    )
    disable_chunked_mm_input: bool = setting(
        False,
        """Whether each contiguous run of an item's embeddings is computed in one step; always so
        with bidirectional attention.""",
    )
    enable_chunked_prefill: bool = setting(
        True,
        """Whether a prompt may be computed over several steps; never one whose tokens see each
        other (PaliGemma), which `max_num_batched_tokens` must hold.""",
    )
    scheduling_policy: SchedulingPolicy = setting(
        "fcfs",
        """Order of waiting requests. fcfs: by arrival; priority: by the requests' `priority`,
        lowest first, then by arrival.""",
    )
    async_scheduling: bool = setting(
        True, "Whether the host prepares a step while the device computes the previous one."
    )
    speculative_config: Mapping[str, Any] = setting(
        {},
        """Tokens that are guessed ahead and verified, several in a step; answers stay what they
        are (docs/serving.md).""",
        unset="none are guessed",
        expected="a mapping (JSON object), as in "
        """'{"method": "ngram", "num_speculative_tokens": 4}'""",
    )

    @property
    def max_num_unfinished_seqs(self) -> int:
        """Maximum number of running and waiting sequences."""
        return self.max_num_seqs + self.max_num_queued_reqs

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """What is guessed ahead; None: nothing is."""
        return SpeculativeConfig.parse(self.speculative_config)

    def __post_init__(self) -> None:
        check_settings(self)
        SpeculativeConfig.parse(self.speculative_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache and the encoder cache."""

    block_size: int = setting(
        32,
        "Tokens per block of the KV cache.",
        minimum=1,
        is_valid=lambda size: not size & (size - 1),
        expected="a power of two",
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "Size of the KV cache in bytes, on each device. A CPU takes it as blocks are first used.",
        unset="room for `max_num_seqs` requests of `max_model_len`, capped by the device's memory",
        minimum=1,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "Fraction of an accelerator's memory that the engine may use; on CPU, of free memory.",
        above=0,
        maximum=1,
    )
    encoder_cache_size: int | None = setting(
        None,
        "Size of the encoder cache in embeddings; at least those of the largest item.",
        unset="`max_num_batched_tokens`",
        minimum=1,
    )
    encoder_cache_dir: Path | None = setting(
        None,
        """Directory where outputs of encoders are kept, for later engine processes; of this user
        alone, and of any number of processes.""",
        unset="none are kept",
    )
    encoder_cache_dir_gb: float = setting(
        16.0, "Size of the files in `encoder_cache_dir` in GiB.", above=0
    )
    encoder_workers: tuple[str, ...] = setting(
        (),
        """Addresses of `mmjax encode-worker` processes that encode items in place of this engine,
        which then loads no encoder: unix:///PATH or tcp://HOST:PORT (docs/scaling.md).""",
        unset="none; the engine encodes",
        is_valid=bool,
        expected="addresses such as unix:///run/mmjax/encoder",
    )
    encoder_workers_key: Path | None = setting(
        None,
        """File with the key of `encoder_workers` at other hosts, as
        `mmjax encode-worker --make-key` makes it.""",
        unset="none; only addresses of this host are taken",
    )
    encoder_workers_timeout: float = setting(
        60.0, "Seconds after which an item that no worker has encoded fails its request.", above=0
    )
    keep_encoder: bool = setting(
        False,
        "Whether an engine with `encoder_workers` loads its encoders, too, and encodes what no "
        "worker can be asked for, or answers in time.",
    )
    enable_prefix_caching: bool = setting(
        True, "Whether requests with a common prefix share its KV cache."
    )
    prefix_caching_hash_algo: PrefixCachingHashAlgorithm = setting(
        "sha256", "Hash that identifies blocks of tokens."
    )
    kv_offload_gb: float = setting(
        0.0,
        """Host memory, in GiB, for blocks that are evicted from the device; requests find them
        there, and copy them back in place of computing them (docs/caches.md). 0 disables it.""",
        minimum=0,
    )
    kv_offload_dir: Path | None = setting(
        None,
        """Directory, of this user alone, in which blocks of the KV cache outlive the process;
        engines of the same model may share it. It takes `kv_offload_gb` (docs/caches.md).""",
        unset="none",
    )
    kv_offload_dir_gb: float = setting(
        16.0, "Size of `kv_offload_dir` in GiB; the least recently used blocks go.", above=0
    )
    num_state_snapshots: int = setting(
        16,
        """Prefixes of prompts of which a model with recurrent layers keeps the state, beside those
        of `max_num_seqs` requests; other models have none.""",
        minimum=0,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.encoder_workers and self.encoder_cache_dir is not None:
            raise ConfigError(
                "`encoder_cache_dir` and `encoder_workers` are both set; outputs are kept where "
                "they are computed: give `--encoder-cache-dir` to `mmjax encode-worker`"
            )
        if self.kv_offload_dir is not None and not self.kv_offload_gb:
            raise ConfigError(
                f"`kv_offload_dir` is {str(self.kv_offload_dir)!r}, but `kv_offload_gb` is 0, and "
                "blocks come from a directory by way of host memory; give `--kv-offload-gb`"
            )

    @property
    def finds_items(self) -> bool:
        """Whether an engine finds by an item's name what a former request had of its content."""
        keeps_outputs = self.encoder_cache_dir is not None or bool(self.encoder_workers)
        return self.enable_prefix_caching or keeps_outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Devices and processes that one model is sharded over."""

    tensor_parallel_size: int = setting(
        1, "Devices of all processes that the model is sharded over.", alias="-tp", minimum=1
    )
    coordinator_address: str | None = setting(
        None,
        "HOST:PORT of process 0, the coordinator of `jax.distributed`.",
        name="distributed_coordinator",
        unset="none; required for more than one process",
        is_for_serve_alone=True,
    )
    num_processes: int = setting(
        1,
        """Processes that the model is sharded over, one per host; all need the same settings but
        `distributed_process_id`.""",
        name="distributed_num_processes",
        minimum=1,
        is_for_serve_alone=True,
    )
    process_id: int = setting(
        0,
        "0 runs the HTTP server, on the coordinator's host; the others only compute.",
        name="distributed_process_id",
        minimum=0,
        is_for_serve_alone=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.process_id >= self.num_processes:
            raise ConfigError(
                f"`process_id` (`--distributed-process-id`) is {self.process_id}, of "
                f"{self.num_processes} processes; give 0 to {self.num_processes - 1}"
            )
        if self.num_processes > 1 and self.coordinator_address is None:
            raise ConfigError(
                f"`num_processes` is {self.num_processes}, but nothing says where they meet; "
                "give `coordinator_address` (`--distributed-coordinator HOST:PORT`)"
            )
        if self.tensor_parallel_size % self.num_processes:
            raise ConfigError(
                f"`tensor_parallel_size` is {self.tensor_parallel_size}, which "
                f"{self.num_processes} processes cannot share evenly; give "
                f"`--tensor-parallel-size` a multiple of {self.num_processes}"
            )

    def check_heads(self, num_heads: int) -> None:
        """Raise ConfigError unless the devices can share a language model's attention heads."""
        size, num_processes = self.tensor_parallel_size, self.num_processes
        if num_heads % size:
            sizes = range(num_processes, num_heads + 1, num_processes)
            fitting = ", ".join(str(n) for n in sizes if num_heads % n == 0)
            raise ConfigError(
                f"`--tensor-parallel-size` is {size}, but the language model has {num_heads} "
                f"attention heads, which {size} devices cannot share evenly; give one of {fitting}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The configuration of the engine process: the other groups, compilation and logs.

    Picklable, since the process is spawned with it.
    """

    model: ModelConfig
    draft: ModelConfig | None = None
    """Of the model that guesses tokens ahead; None: none does."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    compilation_cache_dir: Path | None = setting(
        None,
        "JAX's persistent compilation cache.",
        unset="`$XDG_CACHE_HOME/mmjax/xla`, or `~/.cache/mmjax/xla`",
    )
    compile_threads: int | None = setting(
        None,
        "Programs that are compiled in parallel.",
        unset="one per core, at most 8",
        minimum=1,
    )
    precompile: Precompile | None = setting(
        None,
        """What is compiled before the first request. "all": every program. "smallest": the smallest
        sizes; a thread compiles the rest, and until then requests run in smaller steps, and what no
        step can hold yet waits. "none": nothing; a request waits for each program that nothing has
        needed before.""",
        unset="smallest in a server of one process, all in one of several, none in `LLM`",
    )
    use_tqdm: bool = setting(
        True,
        """Whether progress is shown while the model loads: bars on a terminal, lines of the log
        elsewhere.""",
        name="use_tqdm_on_load",
    )
    log_level: LogLevel = setting(
        "info",
        "Log level of both processes; debug logs every request and step.",
        is_for_serve_alone=True,
    )
    log_format: LogFormat = setting(
        "text",
        "text: lines to read; json: one JSON object a line, with time, level, logger and message.",
        is_for_serve_alone=True,
    )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """What is guessed ahead: nothing of a model that gives vectors."""
        return None if self.model.pools else self.scheduler.speculation

    @property
    def num_guessed(self) -> int:
        """Tokens that are guessed at once, at most."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    max_embeds_per_item: Mapping[str, int] = field(default_factory=dict)
    """By modality, the embeddings of the largest item, which P0's processor knows.

    No setting: it follows from those for media. Empty: the processor was not asked.
    """

    def __post_init__(self) -> None:
        check_settings(self)
        check_together(self.cache, self.scheduler, self.parallel, self.lora, self.precompile)
        schedule, max_model_len = self.scheduler, self.model.max_model_len
        if not schedule.enable_chunked_prefill and schedule.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"`max_num_batched_tokens` is {schedule.max_num_batched_tokens}, below "
                f"`max_model_len` ({max_model_len}), and without chunked prefill a step holds a "
                f"whole prompt: give `--max-num-batched-tokens {max_model_len}`, lower "
                "`--max-model-len`, or leave `--no-enable-chunked-prefill` out"
            )
        taken = [name for name, _ in self.lora.modules if name in self.model.public_names]
        if taken:
            raise ConfigError(
                f"`lora_modules` names an adapter {taken[0]!r}, as the model itself; give one of "
                "them another name"
            )

    def with_mm(self, mm: MultiModalConfig) -> "EngineConfig":
        """Return a copy with other media settings."""
        return replace(self, model=replace(self.model, mm=mm))


def check_together(
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelConfig,
    lora: LoRAConfig,
    precompile: Precompile | None,
) -> None:
    """Raise ConfigError for settings of several groups that exclude each other, of any model."""
    num_processes = parallel.num_processes
    if cache.encoder_workers and lora.enable_tower_connector_lora:
        raise ConfigError(
            "`enable_tower_connector_lora` and `encoder_workers` are both set, but workers "
            "have no adapters; leave one of them out"
        )
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"`max_num_batched_tokens` is {scheduler.max_num_batched_tokens}, below `max_num_seqs` "
            f"({scheduler.max_num_seqs}); every running request gets a token a step: raise the "
            "first or lower the second"
        )
    if precompile == "smallest" and num_processes > 1:
        raise ConfigError(
            f"`precompile` is 'smallest' with {num_processes} processes; they make the same calls, "
            "and so need the same programs: give `--precompile all` or none"
        )
    if cache.encoder_cache_dir is not None and num_processes > 1:
        raise ConfigError(
            f"`encoder_cache_dir` is set with {num_processes} processes, of which none has all of "
            "an encoder's weights to name its outputs by; leave it out"
        )
    if cache.encoder_workers and num_processes > 1:
        raise ConfigError(
            f"`encoder_workers` is set with {num_processes} processes, of which only the first "
            "would have their outputs; leave it out"
        )
    reason = None
    if not cache.enable_prefix_caching:
        reason = "`enable_prefix_caching` is off"
    elif num_processes > 1:
        reason = f"each of {num_processes} processes has a part of every block"
    if cache.kv_offload_gb and reason is not None:
        raise ConfigError(
            f"`kv_offload_gb` is {cache.kv_offload_gb}, but {reason}: no evicted block could be "
            "found again; leave `--kv-offload-gb` out"
        )


SETTING_CLASSES: dict[str, type] = {
    "server": ServerConfig,
    "model": ModelConfig,
    "multimodal": MultiModalConfig,
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "parallel": ParallelConfig,
    "lora": LoRAConfig,
    "engine": EngineConfig,
}
"""The dataclasses with settings, by the title of their group in `--help` and in the docs."""


def serve_settings() -> dict[str, Setting]:
    """Return the settings of `mmjax.serve`, by name."""
    return _by_name(*SETTING_CLASSES)


def llm_settings() -> dict[str, Setting]:
    """Return the settings of `LLM`, by name."""
    found = _by_name(*(group for group in SETTING_CLASSES if group != "server"))
    return {name: one for name, one in found.items() if not one.is_for_serve_alone}


def group_fields(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a group's dataclass from parsed values, by the settings' names."""
    found = _by_name(group)
    return {found[name].field: value for name, value in values.items() if name in found}


def _by_name(*groups: str) -> dict[str, Setting]:
    return {one.name: one for group in groups for one in settings_of(SETTING_CLASSES[group])}
