"""The gradient of an answer's log-probability is torch's on HF's model, for all parameters."""

import copy
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mmjax import ScoredModel, score
from mmjax.layers.module import flatten_params
from mmjax.parity.arrays import Sample
from tests.families import TINY_FAMILIES
from tests.families.tiny import TinyModel, Words, draw_words
from tests.oracle import params_of

RELATIVE = 1e-4
NOISE = 1e-6
"""Of the largest gradient of all: what sums that cancel leave, of biases of keys above all."""
IN_DEFAULT_RUN = {"llava"}
Pairs = Sequence[tuple[Sample, list[int]]]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_DEFAULT_RUN else pytest.mark.slow)
        for name in ("llava", "gemma3", "qwen2_vl", "internvl")
    ],
)
def test_gradients_of_every_parameter_are_torchs(name: str):
    family = TINY_FAMILIES[name]
    model = TinyModel(family, **family.served)
    prompts = [family.prompts[kind] for kind in ("text", "image", "two images")]
    pairs = [
        (model.draw_sample(parts), draw_words(Words(50 + number, 4 + number), family.word_ids))
        for number, parts in enumerate(prompts)
    ]
    scored = ScoredModel.build(family.model_class, model.config)
    batch = scored.make_batch(pairs)

    def mean(params: Any) -> jax.Array:
        return score(params, scored, batch).sum() / batch.answer_mask.sum().astype(jnp.float32)

    value, found = jax.value_and_grad(mean)(model.params)
    expected_value, expected = differentiate_reference(model, pairs)
    assert float(value) == pytest.approx(expected_value, abs=1e-5)
    compare(flatten_params(found), flatten_params(expected))


def differentiate_reference(model: TinyModel, pairs: Pairs) -> tuple[float, Any]:
    """Return the mean log-probability of the answers by torch, and its gradient in our tree."""
    total, number = 0.0, sum(len(answer) for _, answer in pairs)
    for sample, answer in pairs:
        ids = np.append(sample.token_ids, answer).astype(np.int32)
        whole = Sample(token_ids=ids, items=sample.items)
        module, inputs = model.family.torch_call(model.reference, whole)
        logits = module(**inputs).logits[0, sample.num_tokens - 1 : -1]
        chosen = torch.log_softmax(logits, -1)[range(len(answer)), answer].sum() / number
        chosen.backward()
        total += float(chosen.detach())
    gradient = copy.deepcopy(model.reference)
    with torch.no_grad():
        # Rules join, cut and turn a gradient as they do its parameter.
        for own, parameter in zip(gradient.parameters(), model.reference.parameters(), strict=True):
            own.copy_(torch.zeros_like(own) if parameter.grad is None else parameter.grad)
    return total, params_of(gradient, model.params, model.rules)


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    largest = max(float(np.abs(value).max()) for value in expected.values())
    far = {}
    for name, value in expected.items():
        difference = float(np.abs(np.asarray(found[name]) - value).max())
        if not difference <= RELATIVE * float(np.abs(value).max()) + NOISE * largest:
            far[name] = (difference, float(np.abs(value).max()))
    assert far == {}, f"{largest=} {far}"
    parts = {name.split(".")[0] for name in expected}
    loud = {name.split(".")[0] for name, value in expected.items() if np.abs(value).max() > 1e-3}
    assert loud == parts, "the tower, the connector and the language model"
