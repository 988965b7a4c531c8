"""The gradient of an answer's log-probability is torch's on HF's model, for all parameters."""

import copy
from collections.abc import Sequence
from dataclasses import replace
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
from tests.families.default_run import rows
from tests.families.tiny import TinyModel, Words, draw_words
from tests.oracle import params_of

RELATIVE = 1e-4
NOISE = 1e-6
"""Of the largest gradient of all: what sums that cancel leave, of biases of keys above all."""
SEEN_WHOLE = {"paligemma"}
"""HF's forward pass takes all tokens for the prompt, which sees itself, unless it is trained."""
WITHOUT_GRADIENT = {"chameleon": {"vqmodel"}}
"""Chameleon's tower gives numbers of codes."""
Pairs = Sequence[tuple[Sample, list[int]]]


@pytest.mark.parametrize(
    "name",
    rows("gradients", (name for name in TINY_FAMILIES if name not in SEEN_WHOLE)),
)
def test_gradients_of_every_parameter_are_torchs(name: str):
    family = TINY_FAMILIES[name]
    model = TinyModel(family, **family.served)
    kinds = ("text", "image", "two images", "clips")
    prompts = [family.prompts[kind] for kind in kinds if kind in family.prompts]
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
    loud = compare(flatten_params(found), flatten_params(expected))
    assert loud == {*model.params} - WITHOUT_GRADIENT.get(name, set()), "towers and connectors"


def test_parameters_of_another_dtype_get_gradients_in_theirs():
    family = TINY_FAMILIES["llava"]
    config = family.make_config()
    model = ScoredModel.build(family.model_class, config, dtype=jnp.bfloat16)
    batch = model.make_batch([(family.draw_sample(config, family.prompts["image"]), [1, 2])])
    wide = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), model.abstract)
    found = jax.eval_shape(jax.grad(lambda params: score(params, model, batch).sum()), wide)
    assert jax.tree.map(lambda leaf: leaf.dtype, found) == jax.tree.map(lambda x: x.dtype, wide)


def differentiate_reference(model: TinyModel, pairs: Pairs) -> tuple[float, Any]:
    """Return the mean log-probability of the answers by torch, and its gradient in our tree.

    NaN for what torch has no gradient of, as of buffers.
    """
    for one in model.reference.modules():
        if isinstance(one, torch.nn.Embedding):
            one.padding_idx = None  # whose row would have no gradient
    # HF freezes the sinusoids of its audio encoders.
    model.reference.requires_grad_(True)
    total, number = 0.0, sum(len(answer) for _, answer in pairs)
    for sample, answer in pairs:
        ids = np.append(sample.token_ids, answer).astype(np.int32)
        whole = replace(sample, token_ids=ids)
        module, inputs = model.family.torch_call(model.reference, whole)
        logits = module(**inputs).logits[0, sample.num_tokens - 1 : -1]
        chosen = torch.log_softmax(logits, -1)[range(len(answer)), answer].sum() / number
        chosen.backward()
        total += float(chosen.detach())
    gradient = copy.deepcopy(model.reference)
    with torch.no_grad():
        # Rules join, cut and turn a gradient as they do its parameter.
        for buffer in gradient.buffers():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)
        for own, parameter in zip(gradient.parameters(), model.reference.parameters(), strict=True):
            own.copy_(torch.zeros_like(own) if parameter.grad is None else parameter.grad)
    return total, params_of(gradient, model.params, model.rules)


def compare(found: dict[str, Any], expected: dict[str, Any]) -> set[str]:
    """Compare gradients by name; return which parts of the model have large ones."""
    known = {name: value for name, value in expected.items() if not np.isnan(value).any()}
    sizes = {name: float(np.abs(value).max()) for name, value in known.items()}
    noise, far = NOISE * max(sizes.values()), {}
    for name, value in known.items():
        difference = float(np.abs(np.asarray(found[name]) - value).max())
        if not difference <= RELATIVE * sizes[name] + noise:
            far[name] = (difference, sizes[name])
    assert far == {}, f"{noise=} {far}"
    return {name.split(".")[0] for name, size in sizes.items() if size > 100 * noise}
