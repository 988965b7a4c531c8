"""InternVL through the engine: chunks, warm prefixes and preemption change no token."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mmjax.engine.core import EngineCore
from mmjax.layers.module import build_abstract, flatten_params, unflatten_params
from mmjax.models.internvl.model import InternVLForConditionalGeneration
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.processing.tensors.fields import MultiModalBatchedField, MultiModalFieldElem
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from mmjax.sampling_params import SamplingParams
from mmjax.transport.messages import EngineCoreRequest
from mmjax.weights.sharding import param_sharding
from tests.engine.tiny import drain, engine_config, tokens_of
from tests.models.tiny_internvl import draw_sample, tiny_config, words
from tests.oracle import assert_close

MAX_TOKENS = 8
QWEN3 = {"model_type": "qwen3", "head_dim": 16, "num_hidden_layers": 1}
PROMPTS: Sequence[tuple[Any, ...]] = (
    (words(0, 5), 3, words(1, 4)),
    (1, words(2, 3), 2, words(3, 2)),
    (words(4, 20),),
    (words(0, 5), 3, words(5, 9)),
)
"""Text, and pictures by their number of tiles; the first prompt and the last begin alike."""


@lru_cache
def config() -> Any:
    return tiny_config(text=QWEN3, vision={"num_hidden_layers": 1})


@lru_cache
def params() -> Any:
    """Return random parameters, loud enough that every input changes the answer."""
    model_class = InternVLForConditionalGeneration
    _, abstract = build_abstract(model_class, config(), dtype=jnp.dtype(jnp.float32))
    rng, leaves = np.random.default_rng(7), {}
    for name, leaf in sorted(flatten_params(abstract).items()):
        value = rng.standard_normal(leaf.shape) * 2.0 / np.sqrt(leaf.shape[-1])
        if "norm" in name:
            value = value * 0.1 + (0.0 if name.endswith("bias") else 1.0)
        leaves[name] = jnp.asarray(value, jnp.float32)
    return unflatten_params(leaves)


@lru_cache
def samples() -> list[Sample]:
    return [draw_sample(config(), parts) for parts in PROMPTS]


def message(request_id: str, sample: Sample) -> EngineCoreRequest:
    features = []
    for place, tensors in sample.items:
        elems = {
            key: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
            for key, value in tensors.items()
        }
        name = f"picture of {float(tensors['pixel_values'].sum())}"
        features.append(
            MultiModalFeatureSpec(
                data=MultiModalKwargsItem(elems),
                modality="image",
                identifier=name,
                mm_position=place,
                mm_hash=name,
            )
        )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=sample.token_ids.tolist(),
        mm_features=features,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
    )


def serve(core: EngineCore, prefix: str) -> list[list[int]]:
    batch = [message(f"{prefix} {n}", sample) for n, sample in enumerate(samples())]
    for request in batch:
        core.add_request(request)
    news = drain(core)
    return [tokens_of(news[request.request_id]) for request in batch]


@lru_cache
def alone() -> PagedModel:
    return PagedModel(InternVLForConditionalGeneration, config(), params(), 128)


@lru_cache
def expected_answers() -> list[list[int]]:
    return [list(alone().generate(sample, MAX_TOKENS)) for sample in samples()]


def test_chunks_prefixes_and_preemption_change_nothing():
    made = engine_config(
        max_model_len=40,
        max_num_seqs=2,
        max_num_batched_tokens=7,
        num_blocks=4,  # of the tiny Gemma; room for one request and the half of another
        encoder_cache_size=24,
        max_num_encoder_input_tokens=24,
    )
    core = EngineCore.from_model(
        InternVLForConditionalGeneration,
        params(),
        replace(made, model=replace(made.model, hf_config=config())),
    )
    assert serve(core, "cold") == expected_answers()
    assert core.num_preemptions > 0
    assert serve(core, "warm") == expected_answers()
    assert core.stats().prefix_cache_hits > 0
    assert core.compilations == 0
    assert len({tuple(answer) for answer in expected_answers()}) == len(PROMPTS)


@pytest.mark.parametrize("size", [2, 4])
def test_devices_together_say_the_same(size: int):
    mesh = Mesh(np.array(jax.devices()[:size]), ("model",))
    flat = flatten_params(params())
    spread = {
        name: jax.device_put(leaf, param_sharding(name, leaf.shape, mesh))
        for name, leaf in flat.items()
    }
    cut = {name for name, leaf in spread.items() if not leaf.sharding.is_fully_replicated}
    assert {name.split(".")[0] for name in cut} == {"language_model"}
    assert len(cut) == 2 + 7 * config().text_config.num_hidden_layers
    together = PagedModel(InternVLForConditionalGeneration, config(), unflatten_params(spread), 128)
    sample = samples()[0]
    assert_close(together.run(sample), alone().run(sample))
