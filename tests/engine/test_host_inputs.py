"""What the host says of items beside their tensors: which rows they are, and their positions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float
from transformers import Qwen2VLConfig

from mmjax.engine.core import EngineCore
from mmjax.engine.device.encoder import EncoderRows
from mmjax.errors import RequestError
from mmjax.layers.module import build_abstract, flatten_params, unflatten_params
from mmjax.models.host_inputs import PromptItem, RotaryPositions
from mmjax.models.text_model import build_text_model
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.processing.tensors.fields import MultiModalBatchedField, MultiModalFieldElem
from mmjax.processing.tensors.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from mmjax.requests.sampling_params import SamplingParams
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.packed import (
    PackedForConditionalGeneration,
    PackedHostInputs,
    PackedTower,
    picture,
)
from tests.engine.tiny import IMAGE_TOKEN, VOCAB_SIZE, drain, engine_config, tokens_of

NUM_EXTRA = 2
"""Learned rows: one at the end of each row of the picture, one behind it."""


class MarkedHostInputs(PackedHostInputs):
    """Rows of a picture with learned rows between them; M-RoPE, as Qwen2-VL has it."""

    num_extra_rows = NUM_EXTRA

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return each row without its first column, its last column twice, and the marks."""
        height, width = item["grid"] // 2
        grid = np.arange(height * width, dtype=np.int32).reshape(height, width)
        ends = np.full((height, 1), -1, np.int32)
        rows = np.concatenate([grid[:, 1:], grid[:, -1:], ends], axis=1)
        return np.append(rows.reshape(-1), np.int32(-2))

    def rotary_positions(self, num_tokens: int, items: Sequence[PromptItem]) -> RotaryPositions:
        """Give a picture's embeddings their row and column; go on behind the larger of both."""
        parts, index, place = [], 0, 0
        for item in items:
            start, height = item.position.offset, int(item.tensors["grid"][0]) // 2
            parts.append(np.tile(np.arange(start - index) + place, (3, 1)))
            place += start - index
            cells = np.arange(item.position.length)
            width = item.position.length // height
            parts.append(np.stack([0 * cells, cells // width, cells % width]) + place)
            place += max(height, width) + 1
            index = item.position.offset + item.position.length
        parts.append(np.tile(np.arange(num_tokens - index) + place, (3, 1)))
        prompt = np.concatenate(parts, axis=1).astype(np.int32)
        return RotaryPositions(prompt, int(place + num_tokens - index) - num_tokens)


class MarkedModel(PackedForConditionalGeneration):
    """The packed tower before a Llama with three axes of positions."""

    host_inputs = MarkedHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        self.language_model = build_text_model(hf_config, dtype=dtype)
        width = hf_config.get_text_config().hidden_size
        self.visual = PackedTower(width, dtype=dtype)
        self.marks = nnx.Param(jnp.zeros((NUM_EXTRA, width), dtype))

    def extra_embeds(self) -> Float[Array, "_extra D"]:
        return self.marks[...]


@lru_cache
def marked_config() -> Any:
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 3, 3],
            },
        }
    )
    config.tie_word_embeddings = True
    return config


@lru_cache
def marked_params() -> Any:
    """Return random parameters, loud enough that every position changes the answer."""
    _, abstract = build_abstract(MarkedModel, marked_config(), dtype=jnp.dtype(jnp.float32))
    rng, leaves = np.random.default_rng(7), {}
    for name, leaf in sorted(flatten_params(abstract).items()):
        value = rng.standard_normal(leaf.shape) * 2.0 / np.sqrt(leaf.shape[-1])
        if "norm" in name:
            value = value * 0.1 + (0.0 if name.endswith("bias") else 1.0)
        leaves[name] = jnp.asarray(value, jnp.float32)
    return unflatten_params(leaves)


def marked_engine(**settings: Any) -> EngineCore:
    settings = {"max_num_batched_tokens": 256, "max_num_seqs": 4} | settings
    config = engine_config(**settings)
    model = replace(config.model, hf_config=marked_config())
    config = replace(config, model=model, max_embeds_per_item={"image": 120})
    return EngineCore(config, model_class=MarkedModel, params=marked_params())


def num_embeds(grid: tuple[int, int]) -> int:
    return grid[0] // 2 * (grid[1] // 2 + 1) + 1


def marked_message(request_id: str, parts: Sequence[Any], **sampling: Any) -> EngineCoreRequest:
    """Build a request: a part is a list of token ids, or (picture seed, grid)."""
    token_ids: list[int] = []
    features = []
    for part in parts:
        if not isinstance(part, tuple):
            token_ids += part
            continue
        seed, grid = part
        elems = {
            key: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
            for key, value in picture(seed, grid).items()
        }
        name = f"marked-{seed}-{grid}"
        features.append(
            MultiModalFeatureSpec(
                data=MultiModalKwargsItem(elems),
                modality="image",
                identifier=name,
                mm_position=PlaceholderRange(offset=len(token_ids), length=num_embeds(grid)),
                mm_hash=name,
            )
        )
        token_ids += [IMAGE_TOKEN] * num_embeds(grid)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        mm_features=features,
        sampling_params=SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
    )


def serve(core: EngineCore, batch: Sequence[EngineCoreRequest]) -> list[list[int]]:
    for request in batch:
        core.add_request(request)
    news = drain(core)
    return [tokens_of(news[request.request_id]) for request in batch]


PROMPTS = [
    [[5, 6, 7], (1, (4, 6)), [8, 9]],
    [(2, (8, 4)), [11], (1, (4, 6)), [12, 13, 14]],
    [[20, 21, 22, 23]],
    [[5, 6, 7], (1, (4, 6)), [8, 9, 30]],
]


def messages(prefix: str) -> list[EngineCoreRequest]:
    return [marked_message(f"{prefix} {n}", parts) for n, parts in enumerate(PROMPTS)]


@lru_cache
def expected_answers() -> list[list[int]]:
    """Return the greedy answers of one pass over each whole prompt, without the engine."""
    alone = PagedModel(MarkedModel, marked_config(), marked_params(), 256)
    answers = []
    for message in messages("alone"):
        items = [
            PromptItem(feature.mm_position, feature.tensors.get_data())
            for feature in message.mm_features
            if feature.tensors is not None
        ]
        sample = Sample(token_ids=np.array(message.prompt_token_ids, np.int32), items=items)
        answers.append(list(alone.generate(sample, 8)))
    return answers


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="whole prompts", marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 7, "num_blocks": 12}, id="chunks, preempted"),
    ],
)
def test_answers_are_those_of_one_pass(settings: dict[str, Any]):
    core = marked_engine(**settings)
    assert serve(core, messages("batch")) == expected_answers()
    for n, message in enumerate(messages("alone")):  # found in the prefix cache, but for the end
        assert serve(core, [message]) == [expected_answers()[n]]
    assert core.stats().prefix_cache_hits > 0
    assert core.compilations == 0
    core.recover()
    assert serve(core, messages("after a failed step")) == expected_answers()
    assert core.compilations == 0


def test_positions_and_marks_change_the_answer():
    """The oracle above would not see what neither side obeys."""
    plain = type("Plain", (MarkedHostInputs,), {"rotary_positions": lambda *_: None})
    model = type("PlainModel", (MarkedModel,), {"host_inputs": plain})
    message = marked_message("plain", PROMPTS[1])
    config = replace(engine_config(max_num_batched_tokens=256, max_num_seqs=4))
    config = replace(
        config,
        model=replace(config.model, hf_config=marked_config()),
        max_embeds_per_item={"image": 120},
    )
    core = EngineCore(config, model_class=model, params=marked_params())
    assert serve(core, [message]) != [expected_answers()[1]]
    louder = marked_params() | {"marks": marked_params()["marks"] + 3.0}
    core = EngineCore(config, model_class=MarkedModel, params=louder)
    assert serve(core, [message]) != [expected_answers()[1]]


def test_an_item_whose_rows_are_not_its_placeholders_is_refused():
    core = marked_engine()
    message = marked_message("bad", [(1, (4, 6)), [3]])
    place = PlaceholderRange(offset=0, length=6)
    message.mm_features[0] = replace(message.mm_features[0], mm_position=place)
    with pytest.raises(RequestError, match="has 9 embeddings, and placeholders for 6"):
        core.add_request(message)


def test_positions_go_on_behind_the_prompt():
    prompt = np.array([[0, 1, 1, 2], [0, 1, 2, 2], [0, 1, 1, 2]], np.int32)
    positions = RotaryPositions(prompt, -1)
    np.testing.assert_array_equal(positions.between(1, 3), prompt[:, 1:3])
    np.testing.assert_array_equal(positions.between(3, 6), [[2, 3, 4]] * 3)
    np.testing.assert_array_equal(positions.between(7, 8), [[6]] * 3)


def test_rows_are_given_to_the_outputs_that_are_embeddings():
    rows = EncoderRows(8, num_extra_rows=2)
    places = rows.allocate_chosen("a", np.array([4, -1, 1, 4, -2], np.int32), 6)
    assert (places[[0, 2, 3, 5]] == 10).all()  # beyond the pool of 8 + 2 rows
    assert rows.num_free == 6
    assert rows.get("a").tolist() == [places[4], 8, places[1], places[4], 9]
    rows.free("a")
    assert rows.num_free == 8
    assert rows.allocate("b", 8).tolist() == rows.get("b").tolist()
