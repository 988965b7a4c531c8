"""The encoder budget that the model's largest item needs, from the processor's dummy inputs."""

from dataclasses import replace

from mmjax.config.engine_config import EngineConfig
from mmjax.models.registry import MULTIMODAL_REGISTRY, create_processor, with_model_class
from mmjax.processing.encoder_budget import MultiModalBudget, MultiModalProfiler


def as_engine_process_config(config: EngineConfig) -> EngineConfig:
    """Return what each process of an engine is started with, whichever host it runs on.

    It can import the model's class, and shapes follow from the largest item: so all have the same.
    """
    return with_encoder_budget(replace(config, model=with_model_class(config.model)))


def with_encoder_budget(config: EngineConfig) -> EngineConfig:
    """Return a configuration whose steps and encoder cache have room for the model's largest item.

    P1 loads no processor, and by itself has room for one unit of the tower. If that is the largest
    item, no processor is loaded here either, which saves seconds before P1 starts. Raises
    ConfigError for media settings that the HF processor refuses.
    """
    row, mm = MULTIMODAL_REGISTRY.find_row(config.model.architecture), config.model.mm
    # A number of images needs no question; sizes do, and names that no model may know.
    limits = mm.limit_mm_per_prompt
    has_settings = bool(mm.mm_processor_kwargs or limits.keys() - {"image"})
    has_settings |= any(mm.media_options(modality) for modality in limits)
    has_one_unit_items = row is not None and row.has_one_unit_items
    if has_one_unit_items and not has_settings and not mm.trust_request_mm_kwargs:
        return config
    processor = create_processor(config.model)
    profiler = MultiModalProfiler(processor)
    if has_settings:
        profiler.check_settings()
    budget = MultiModalBudget(
        profiler,
        config.scheduler,
        config.cache,
        enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
        disable_chunked_mm_input=config.scheduler.disable_chunked_mm_input,
    )
    if not budget.get_encoder_budget():
        return config
    return replace(
        config,
        scheduler=replace(
            config.scheduler, max_num_encoder_input_tokens=budget.encoder_compute_budget
        ),
        cache=replace(config.cache, encoder_cache_size=budget.encoder_cache_size),
        # Where the tower is left out, embeddings may come in place of what it would give.
        max_embeds_per_item=budget.mm_max_toks_per_item or profiler.get_mm_max_tokens_per_item(),
    )
