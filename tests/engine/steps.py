"""What tests of the scheduler alone share: no device, tokens invented."""

from typing import Any

from mmjax.cache.encoder_cache_manager import EncoderCacheManager
from mmjax.cache.kv.kv_cache_manager import KVCacheManager
from mmjax.engine.scheduling.outputs import ModelRunnerOutput, SampledToken, SchedulerOutput
from mmjax.engine.scheduling.scheduler import Scheduler

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64


def make_scheduler(
    *,
    num_blocks: int = 64,
    encoder_cache_size: int = 64,
    max_model_len: int = MAX_MODEL_LEN,
    max_encoder_len: int = 0,
    **settings: Any,
) -> Scheduler:
    kv_cache = KVCacheManager(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        max_encoder_len=max_encoder_len,
    )
    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_num_encoder_input_tokens": 16,
        **settings,
    }
    cache = EncoderCacheManager(encoder_cache_size)
    return Scheduler(kv_cache=kv_cache, encoder_cache=cache, **settings)


def sample(output: SchedulerOutput) -> ModelRunnerOutput:
    return {s.request.request_id: [SampledToken(7)] for s in output.requests if s.samples}


def step(scheduler: Scheduler) -> SchedulerOutput:
    """Schedule, and invent the tokens."""
    output = scheduler.schedule()
    scheduler.update_from_output(output, sample(output))
    return output


def windows(output: SchedulerOutput) -> dict[str, tuple[int, int]]:
    return {s.request.request_id: (s.start, s.end) for s in output.requests}


def encoded(output: SchedulerOutput) -> list[str]:
    return [item.identifier for item in output.encoder_items]
