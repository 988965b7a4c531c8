"""How large a model's items may be, and how many embeddings the encoder may compute and keep.

Counts embeddings, not tokens: marks around an image's embeddings cost the encoder nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mmjax.config.engine_config import CacheConfig, MultiModalConfig, SchedulerConfig
from mmjax.errors import CheckpointError, ConfigError
from mmjax.processing.prepared import PreparedInputs
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.tensors.inputs import MultiModalInputs, PlaceholderRange
from mmjax.processing.validation import validate_limited_modalities
from mmjax.system.logger import get_logger

logger = get_logger(__name__)


class MultiModalProfiler:
    """Processes a model's largest inputs; leaves the processor's cache as it is.

    `seq_len`, where a method takes it, is how long a prompt may be; `max_model_len` otherwise.
    """

    def __init__(self, processor: BaseMultiModalProcessor[Any]) -> None:
        self.processor = processor
        self.info = processor.info
        self.max_model_len = processor.info.ctx.model_config.max_model_len

    def get_mm_max_tokens_per_item(self, seq_len: int = 0) -> Mapping[str, int]:
        """Return the most embeddings of an item: as the model declares, or measured."""
        allowed = self.info.allowed_mm_limits
        counts = {m: 1 for m, limit in allowed.items() if limit or self.info.takes_embeds}
        declared = self.info.get_mm_max_tokens_per_item(seq_len, counts)
        if declared is None:
            return self.measure_mm_max_tokens_per_item(seq_len, counts)
        described = self.measure_described(seq_len)
        return {m: min(declared[m], described.get(m, declared[m])) for m in counts}

    def measure_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Process the dummy inputs, and count the embeddings of the largest item."""
        return self._measure(seq_len, mm_counts, PlaceholderRange.get_num_embeds)

    def measure_longest_runs(self) -> Mapping[str, int]:
        """Return the longest run of embeddings in the largest item of each modality."""
        counts = {m: 1 for m, limit in self.info.allowed_mm_limits.items() if limit}
        return self._measure(self.max_model_len, counts, PlaceholderRange.get_longest_run)

    def _measure(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        measure: Callable[[PlaceholderRange], int],
    ) -> Mapping[str, int]:
        if not mm_counts:
            return {}
        ranges_by_modality = self._prepare_dummies(seq_len, mm_counts).mm_placeholders
        return {m: max(map(measure, ranges)) for m, ranges in ranges_by_modality.items()}

    def measure_described(self, seq_len: int | None = None) -> Mapping[str, int]:
        """Return the embeddings of the items whose sizes `limit_mm_per_prompt` gives."""
        mm = self.info.ctx.get_mm_config()
        described = {
            modality: 1
            for modality, limit in self.info.allowed_mm_limits.items()
            if mm.media_options(modality) and (limit or self.info.takes_embeds)
        }
        length = self.max_model_len if seq_len is None else seq_len
        return self.measure_mm_max_tokens_per_item(length, described)

    def check_settings(self) -> None:
        """Process the largest input once: ConfigError for settings that HF refuses."""
        validate_limited_modalities(self.info)
        self.info.get_hf_processor()
        counts = {m: 1 for m, limit in self.info.allowed_mm_limits.items() if limit}
        self.measure_mm_max_tokens_per_item(self.max_model_len, counts)

    def get_dummy_mm_inputs(
        self, mm_counts: Mapping[str, int], *, max_num_batched_tokens: int | None = None
    ) -> MultiModalInputs:
        """Return the largest input with these items, its prompt filled up with token 0.

        As long as the model's longest prompt, or as one step of chunked prefill where
        `max_num_batched_tokens` says how much that takes.
        """
        seq_len = self.max_model_len
        if max_num_batched_tokens is not None:
            seq_len = min(seq_len, max_num_batched_tokens)
        prepared = self._prepare_dummies(seq_len, mm_counts)
        # A white image may be held from a request: dummies come with their tensors.
        hashes = [h for many in prepared.mm_hashes.values() for h in many]
        prepared = self.processor.rebuild(prepared, hashes)
        num_missing = seq_len - len(prepared.prompt_token_ids)
        prompt_token_ids = prepared.prompt_token_ids + [0] * num_missing
        return replace(prepared, prompt_token_ids=prompt_token_ids).to_inputs()

    def _prepare_dummies(self, seq_len: int, mm_counts: Mapping[str, int]) -> PreparedInputs:
        with _blaming_settings(self.info.ctx.get_mm_config()):
            inputs = self.processor.dummy_inputs.get_dummy_processor_inputs(seq_len, mm_counts)
            return self.processor.prepare(
                inputs.prompt,
                self.info.parse_mm_data(inputs.mm_data, validate=False),
                hf_processor_mm_kwargs=inputs.hf_processor_mm_kwargs,
            )


@contextmanager
def _blaming_settings(mm: MultiModalConfig) -> Iterator[None]:
    """Make a ConfigError of whatever the body raises, where the operator has set how media are.

    The body processes dummy inputs: there is no client to blame.
    """
    try:
        yield
    except (CheckpointError, ConfigError):
        raise
    # Under settings that make no sense, anything may fail.
    except Exception as error:
        settings = _describe_settings(mm)
        if not settings:
            raise
        raise ConfigError(
            f"the model's largest input cannot be processed with {settings}: {error}; correct it, "
            "or leave it out"
        ) from error


def _describe_settings(mm: MultiModalConfig) -> str:
    limits = mm.limit_mm_per_prompt
    settings = {
        "--mm-processor-kwargs": dict(mm.mm_processor_kwargs),
        "--limit-mm-per-prompt": {m: dict(limits[m]) for m in limits if mm.media_options(m)},
    }
    return " and ".join(f"`{flag}` {value}" for flag, value in settings.items() if value)


def compute_mm_encoder_budget(
    scheduler_config: SchedulerConfig,
    mm_max_toks_per_item: Mapping[str, int],
    *,
    encoder_cache_size: int | None = None,
    disable_chunked_mm_input: bool = False,
    longest_runs: Mapping[str, int] | None = None,
) -> tuple[int, int]:
    """Return (embeddings that one step may compute, embeddings that are kept).

    Each has room for the largest item. Both are `max_num_batched_tokens` unless the operator says
    otherwise. ConfigError where the engine would refuse every such item.

    Args:
        scheduler_config: How much work a step may hold.
        mm_max_toks_per_item: Per modality, the embeddings of its largest item.
        encoder_cache_size: As the operator sets it.
        disable_chunked_mm_input: Whether a run of an item's embeddings goes in one step, as
            attention in both directions over an image demands.
        longest_runs: Per modality, the longest run of such an item, where it is known; None: it is
            all one run.
    """
    if not mm_max_toks_per_item:
        logger.warning("no modality needs an encoder: its budget and its cache are 0")
        return 0, 0
    max_tokens = scheduler_config.max_num_batched_tokens
    largest = max(mm_max_toks_per_item.values())
    if disable_chunked_mm_input:
        _check_runs(mm_max_toks_per_item if longest_runs is None else longest_runs, max_tokens)
    compute = scheduler_config.max_num_encoder_input_tokens
    return (
        max(max_tokens if compute is None else compute, largest),
        max(max_tokens if encoder_cache_size is None else encoder_cache_size, largest),
    )


def _check_runs(longest_runs: Mapping[str, int], max_tokens: int) -> None:
    """Demand of the longest runs what the engine demands of each item that comes."""
    if not longest_runs:
        return
    modality, longest = max(longest_runs.items(), key=lambda item: (item[1], item[0]))
    if longest > max_tokens:
        raise ConfigError(
            f"one {modality} takes {longest} tokens, which must go in one step, but "
            f"`--max-num-batched-tokens` is {max_tokens}; set it to {longest} or more"
        )


class MultiModalBudget:
    """The encoder's budget for one model."""

    def __init__(
        self,
        profiler: MultiModalProfiler,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig | None = None,
        *,
        enable_chunked_prefill: bool = True,
        disable_chunked_mm_input: bool = False,
    ) -> None:
        limits = profiler.info.allowed_mm_limits
        seq_len = profiler.max_model_len
        if enable_chunked_prefill:
            seq_len = min(seq_len, scheduler_config.max_num_batched_tokens)
        # With embeddings alone (a limit of 0), a modality fills the cache and runs no tower.
        all_tokens = profiler.get_mm_max_tokens_per_item(seq_len)
        self.mm_max_toks_per_item = {m: n for m, n in all_tokens.items() if limits[m]}
        """Per modality that a tower encodes, the embeddings of its largest item."""
        self.encoder_compute_budget, self.encoder_cache_size = compute_mm_encoder_budget(
            scheduler_config,
            all_tokens,
            encoder_cache_size=None if cache_config is None else cache_config.encoder_cache_size,
            disable_chunked_mm_input=disable_chunked_mm_input,
            longest_runs=profiler.measure_longest_runs() if disable_chunked_mm_input else None,
        )

    def get_encoder_budget(self) -> int:
        """Return the embeddings that one step may compute and keep."""
        return min(self.encoder_compute_budget, self.encoder_cache_size)
