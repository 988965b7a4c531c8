"""Qwen2-VL and Qwen2.5-VL in the engine: the answers of one pass over each whole prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from mmjax.config import MultiModalConfig, ParallelConfig
from mmjax.engine.core import EngineCore
from mmjax.errors import RequestError
from mmjax.processing.tensors.fields import MultiModalBatchedField, MultiModalFieldElem
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from mmjax.sampling_params import SamplingParams
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import drain, engine_config, tokens_of
from tests.models.qwen2_vl import CLASSES, Part, draw_sample, qwen_config, tiny_qwen

PROMPTS: list[list[Part]] = [
    [3, ("image", 1, (1, 4, 6)), 4],
    [("video", 2, (3, 4, 2), 1.5), 2, ("image", 6, (1, 6, 4)), 3],
    [21],
    [3, ("image", 1, (1, 4, 6)), 4, ("image", 3, (1, 6, 12)), 2],
    [5, ("image", 4, (1, 12, 6)), 1, ("video", 5, (3, 4, 6), 0.5), 6],
]
"""Items of 24 patches and of 72: two programs of the oracle."""
MAX_TOKENS = 8


def make_engine(
    kind: str = "qwen2_vl", *, size: int = 1, mm: MultiModalConfig | None = None, **settings: Any
) -> EngineCore:
    """Start an engine over the tiny model, on `size` devices."""
    config = engine_config(**{"max_num_batched_tokens": 64, "max_num_seqs": 4, **settings})
    config = replace(
        config,
        model=replace(config.model, hf_config=qwen_config(kind)),
        parallel=ParallelConfig(tensor_parallel_size=size),
        max_embeds_per_item={"image": 18, "video": 18},
    )
    config = config.with_mm(mm or MultiModalConfig())
    return EngineCore.from_model(CLASSES[kind][1], tiny_qwen(kind)[1].params, config)


def make_message(
    name: str,
    parts: Sequence[Part],
    *,
    tensors: Sequence[Mapping[str, np.ndarray]] | None = None,
    **sampling: Any,
) -> EngineCoreRequest:
    """Build a request; `tensors`: what the items hold instead."""
    sample = draw_sample(parts)
    features = []
    for n, (place, own) in enumerate(sample.items):
        held = own if tensors is None else tensors[n]
        elems = {
            key: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
            for key, value in held.items()
        }
        identifier = f"{[part for part in parts if isinstance(part, tuple)][n]} {sorted(held)}"
        features.append(
            MultiModalFeatureSpec(
                data=MultiModalKwargsItem(elems),
                modality="image" if "image_grid_thw" in own else "video",
                identifier=identifier,
                mm_position=place,
                mm_hash=identifier,
            )
        )
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=sample.token_ids.tolist(),
        mm_features=features,
        sampling_params=SamplingParams(
            **{"temperature": 0.0, "max_tokens": MAX_TOKENS, **sampling}
        ),
    )


def serve(core: EngineCore, messages: Sequence[EngineCoreRequest]) -> list[list[int]]:
    for message in messages:
        core.add_request(message)
    news = drain(core)
    return [tokens_of(news[message.request_id]) for message in messages]


@lru_cache
def expected_answers(kind: str) -> list[list[int]]:
    """Return the greedy answers of one pass over each whole prompt."""
    _, alone = tiny_qwen(kind)
    return [list(alone.generate(draw_sample(parts), MAX_TOKENS)) for parts in PROMPTS]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen2_vl", {"max_num_batched_tokens": 7}),
        ("qwen2_5_vl", {"num_blocks": 6, "max_model_len": 64}),
    ],
    ids=["qwen2_vl: chunks of seven", "qwen2_5_vl: preempted"],
)
def test_answers_are_those_of_one_pass(kind: str, settings: dict[str, Any]):
    core = make_engine(kind, **settings)
    batch = [make_message(f"batch {n}", parts) for n, parts in enumerate(PROMPTS)]
    assert serve(core, batch) == expected_answers(kind)
    for n, parts in enumerate(PROMPTS):  # found in the prefix cache, but for the end
        assert serve(core, [make_message(f"again {n}", parts)]) == [expected_answers(kind)[n]]
    assert core.stats().prefix_cache_hits > 0
    assert (core.num_preemptions > 0) == ("num_blocks" in settings)
    assert core.compilations == 0


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_answers_over_devices_are_those_of_one(size: int):
    core = make_engine("qwen2_5_vl", size=size)
    batch = [make_message(f"batch {n}", parts) for n, parts in enumerate(PROMPTS)]
    assert serve(core, batch) == expected_answers("qwen2_5_vl")
    assert core.compilations == 0


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return make_engine(mm=MultiModalConfig(enable_mm_embeds=True))


def test_embeddings_stand_in_for_pictures_and_videos(core: EngineCore):
    parts = PROMPTS[4]
    answers = serve(core, [make_message("pictures", parts)])
    rows = [
        np.asarray(core._runner._pool)[core._runner.rows.get(feature.identifier)]
        for feature in make_message("pictures", parts).mm_features
    ]
    tensors = [
        {"image_embeds": rows[0], "image_grid_thw": np.array([1, 12, 6])},
        {"video_embeds": rows[1], "video_grid_thw": np.array([3, 4, 6])},
    ]
    assert serve(core, [make_message("embeddings", parts, tensors=tensors)]) == answers
    assert answers == [expected_answers("qwen2_vl")[4]]
    assert core.compilations == 0
    # A grid of as many embeddings, but no whole ones: positions would not be the prompt's.
    tensors[0]["image_grid_thw"] = np.array([1, 9, 8])
    with pytest.raises(RequestError, match="grid has 16 embeddings, and the prompt placeholders"):
        core.add_request(make_message("wrong grid", parts, tensors=tensors))


def test_an_item_whose_patches_are_not_its_grids_is_refused(core: EngineCore):
    parts = [2, ("image", 1, (1, 4, 6)), 3]
    tensors = [{**draw_sample(parts).items[0].tensors, "image_grid_thw": np.array([1, 4, 4])}]
    with pytest.raises(RequestError, match="all must have as many"):
        core.add_request(make_message("bad", parts, tensors=tensors))
