"""Weights in 8 and 4 bits, of every family: their answers, chunked, preempted, cut."""

from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.layers.cpu.groups import Grouped, dequantize
from mmjax.layers.module import build_abstract, flatten_params, unflatten_params
from mmjax.layers.quantization import INT4, find_quantized, quantize_params
from mmjax.models.interface import build_model
from mmjax.parity.arrays import PagedModel
from mmjax.parity.compare import LOGITS
from tests.engine.tiny import answer_all
from tests.families import TINY_FAMILIES, served_model
from tests.families.default_run import mark
from tests.families.tiny import TinyModel
from tests.models.served import cramp, make_request, start_engine

MAX_TOKENS = 16
ENGINES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks, preempted": {"max_num_batched_tokens": 7, "is_cramped": True},
    "two devices": {"size": 2},
}
LAWS = {"int8-weights": "8 bits", "int4": "4 bits"}


def quantize(model: TinyModel, quantization: Any) -> PagedModel:
    parts = (model.family.model_class, model.config, None, quantization)
    _, abstract = build_abstract(build_model, *parts, dtype=jnp.float32)
    params = quantize_params(model.params, abstract)
    max_len = model.paged.max_len
    return PagedModel(*parts[:2], params, max_len, quantization=quantization)


def restore(params: Any, plain: Any) -> Any:
    """Return float32 weights of the values that quantised ones stand for, in shapes of `plain`."""
    leaves = flatten_params(params)
    of_plain = flatten_params(plain)
    for name, scales in find_quantized(leaves).items():
        codes, scale = leaves[name], leaves.pop(scales)
        if codes.dtype == jnp.uint8:
            weight = Grouped(layout=INT4, codes=jnp.asarray(codes), scale=jnp.asarray(scale))
            leaves[name] = dequantize(weight, of_plain[name].shape[-1], jnp.float32)
        else:
            leaves[name] = codes.astype(jnp.float32) * scale[:, None]
    return unflatten_params(leaves)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        pytest.param(name, one, marks=mark(law, name))
        for name, (one, law) in product(TINY_FAMILIES, LAWS.items())
    ],
)
def test_the_logits_are_those_of_the_rounded_weights(name: str, quantization: str):
    model = served_model(name)
    rounded = quantize(model, quantization)
    restored = model.with_weights(restore(rounded.params, model.params))
    plain = flatten_params(model.params)
    quantized = find_quantized(flatten_params(rounded.params))
    blocks = {one for one in plain if ".layers." in one and one.startswith("language_model.")}
    experts = {one for one in blocks if ".experts." in one or one.endswith("router.weight")}
    matrices = {one for one in blocks - experts if plain[one].ndim == 2}
    # Chameleon's norms have a row for each head. Attention to latents absorbs two matrices.
    kept = (".gate.weight", ".shared_expert_gate.weight", "_norm.weight", "_norm.bias")
    kept += (".k_b_proj.weight", ".v_b_proj.weight")
    assert quantized.keys() >= {one for one in matrices if not one.endswith(kept)}
    # Quantised are the decoder's weights, which a prompt of each kind goes through.
    sample = model.draw_sample(model.family.workload[0])
    found, expected = (one.run(sample)[LOGITS] for one in (rounded, restored))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert not np.allclose(found, model.paged.run(sample)[LOGITS], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_answers_are_those_of_one_pass(name: str, engine: str):
    """Sums of 8 bits are exact, so that even several devices give the same products."""
    model, settings = served_model(name), dict(ENGINES[engine])
    samples = [model.draw_sample(parts) for parts in model.family.workload]
    alone = quantize(model, "int8")
    expected = [list(alone.generate(sample, MAX_TOKENS)) for sample in samples]
    if is_cramped := settings.pop("is_cramped", False):
        settings |= cramp(model, samples, MAX_TOKENS)
        chunk = settings["max_num_batched_tokens"]
        settings["max_num_batched_tokens"] = max(chunk, model.family.longest_run)
    core = start_engine(model, quantization="int8", **settings)
    batch = [make_request(f"{n}", one, max_tokens=MAX_TOKENS) for n, one in enumerate(samples)]
    if "size" in settings and alone.cache_spec.states:
        # Recurrent layers add floats, over devices in another order: rounded to 8 bits, their last
        # bits may become a token. So these are the answers of one request at a time.
        expected = [answer_all(core, [request])[0] for request in batch]
    assert answer_all(core, batch) == expected
    assert answer_all(core, batch) == expected, "out of the cache"
    assert (core.num_preemptions > 0) == is_cramped
    assert core.compilations == 0
