"""Florence-2 through the engine: every answer is the one of a request alone, without batches."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from mmjax.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    SchedulerConfig,
)
from mmjax.engine.core import EngineCore
from mmjax.errors import RequestError
from mmjax.models.florence2.model import Florence2ForConditionalGeneration as Model
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.processing.tensors.fields import MultiModalBatchedField, MultiModalFieldElem
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from mmjax.sampling_params import SamplingParams
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import drain, tokens_of
from tests.models.random_florence2 import (
    TEXT,
    draw_sample,
    paged_florence2,
    random_florence2,
    tiny_config,
)

MAX_MODEL_LEN, BLOCK_SIZE = 48, 8
LEAST_BLOCKS = (MAX_MODEL_LEN + TEXT["max_position_embeddings"]) // BLOCK_SIZE
ONE_LAYER: dict[str, Any] = {"text": {"encoder_layers": 1, "decoder_layers": 1}}
BYTES_PER_BLOCK = 2 * TEXT["d_model"] * BLOCK_SIZE * 4
MAX_TOKENS = 26
"""So many that requests which begin together grow out of the least cache."""


@lru_cache
def alone() -> PagedModel:
    """Weights, and the answers of one request at a time."""
    return paged_florence2(random_florence2(is_loud=True, **ONE_LAYER), MAX_MODEL_LEN)


def samples() -> list[Sample]:
    """One task with another picture, one picture with another task, decoder prompts of chunks."""
    config = tiny_config(**ONE_LAYER)
    return [
        draw_sample(config, 7),
        draw_sample(config, 1),
        draw_sample(config, 7, picture=1),
        draw_sample(config, 7, picture=2),
        draw_sample(config, 54, picture=2, answer=range(20, 37)),
        draw_sample(config, 64, answer=range(20, 37)),
    ]


@lru_cache
def expected_answers() -> list[list[int]]:
    return [list(alone().generate(sample, MAX_TOKENS)) for sample in samples()]


def start(
    num_blocks: int | None = None, *, tensor_parallel_size: int = 1, image_limit: int = 1
) -> EngineCore:
    """Start an engine whose steps are of seven tokens."""
    size = None if num_blocks is None else num_blocks * BYTES_PER_BLOCK
    config = EngineConfig(
        model=ModelConfig(
            model="tiny",
            path=Path("."),
            hf_config=tiny_config(**ONE_LAYER),
            architecture=Model.__name__,
            max_model_len=MAX_MODEL_LEN,
            mm=MultiModalConfig(limit_mm_per_prompt={"image": image_limit}),
        ),
        cache=CacheConfig(block_size=BLOCK_SIZE, kv_cache_memory_bytes=size),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=7),
        parallel=ParallelConfig(tensor_parallel_size=tensor_parallel_size),
        use_tqdm=False,
    )
    return EngineCore.from_model(Model, alone().params, config)


def message(request_id: str, sample: Sample) -> EngineCoreRequest:
    assert sample.encoder_token_ids is not None
    features = []
    for place, tensors in sample.items:
        elems = {
            name: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
            for name, value in tensors.items()
        }
        identifier = f"picture {tensors['pixel_values'].sum()}"
        features.append(
            MultiModalFeatureSpec(
                data=MultiModalKwargsItem(elems),
                modality="image",
                identifier=identifier,
                mm_position=place,
                mm_hash=identifier,
            )
        )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=sample.token_ids.tolist(),
        encoder_prompt_token_ids=sample.encoder_token_ids.tolist(),
        mm_features=features,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
    )


def serve(core: EngineCore, prefix: str) -> list[list[int]]:
    batch = [message(f"{prefix} {n}", sample) for n, sample in enumerate(samples())]
    for request in batch:
        core.add_request(request)
    news = drain(core)
    return [tokens_of(news[request.request_id]) for request in batch]


def test_answers_differ_by_all_that_is_read():
    assert len({tuple(answer) for answer in expected_answers()}) == len(samples())


@pytest.fixture(scope="module")
def core() -> EngineCore:
    """A cache that holds one longest request."""
    return start(LEAST_BLOCKS)


def test_answers_are_those_of_a_request_alone(core: EngineCore):
    """In chunks of seven tokens; some start anew."""
    assert serve(core, "first") == expected_answers()
    assert core.num_preemptions > 0
    assert serve(core, "again") == expected_answers()
    assert core.compilations == 0
    assert core.encoder_usage() == 0


def test_davit_runs_once_for_three_prompts_about_an_image(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
):
    shapes: list[tuple[int, ...]] = []
    runner = core._runner
    encode = runner._run_encode
    monkeypatch.setattr(
        runner,
        "_run_encode",
        lambda call: (shapes.append(call.inputs["pixel_values"].shape), encode(call)),
    )
    batch = [draw_sample(tiny_config(**ONE_LAYER), number, picture=71) for number in (7, 20, 54)]
    for number, sample in enumerate(batch):
        core.add_request(message(f"{number}", sample))
        news = drain(core)
        assert tokens_of(news[f"{number}"]) == list(alone().generate(sample, MAX_TOKENS))
    assert shapes == [(1, 3, 24, 24)]
    assert core.compilations == 0


def test_without_images_davit_is_left_out():
    core = start(image_limit=0)
    assert core._runner.buckets.encode == ()
    assert "vision_tower" not in core._runner._params
    text = samples()[0]
    core.add_request(message("text", text))
    assert tokens_of(drain(core)["text"]) == expected_answers()[0]
    with pytest.raises(RequestError, match="which this engine was started without"):
        core.add_request(message("image", samples()[2]))


def test_answers_over_two_devices_are_those_of_one():
    core = start(tensor_parallel_size=2)
    assert serve(core, "spread") == expected_answers()
    assert core.compilations == 0
