"""How much the encoder must hold: asked of the processor, whose dummy inputs are the worst case."""

from dataclasses import replace

from mmjax.config import EngineConfig
from mmjax.models.registry import MODELS, create_processor
from mmjax.processing.encoder_budget import MultiModalBudget


def with_encoder_budget(config: EngineConfig) -> EngineConfig:
    """Return the same with room for the model's largest item in a step, and in the encoder cache.

    P1 loads no processor: by itself it has room for a unit of its tower. Where that is the largest
    item, nobody is asked, which saves seconds of imports before P1 starts.
    """
    row = MODELS.get(config.model.architecture)
    if row is not None and row.has_one_unit_items and not config.model.mm.mm_processor_kwargs:
        return config
    budget = MultiModalBudget(
        create_processor(config.model),
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
    )
