"""Mixtures of experts: the chosen ones alone, whatever computes them; routers as published."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.engine.device.compilation import compiler_options
from mmjax.layers.cpu.library import find_kernels
from mmjax.layers.cpu.product import MAX_FEW_ROWS
from mmjax.layers.moe import (
    ClampedGate,
    Experts,
    ExpertWeights,
    MixtureOfExperts,
    Router,
    RouterConfig,
    _ragged_product,
)
from mmjax.layers.tpu.groups import choose_tiles, tpu_group_product
from tests.kit import each_once

WIDTH, INNER, NUM_EXPERTS = 24, 20, 8


def fill(module: nnx.Module, seed: int = 0) -> Any:
    """Give every parameter random numbers."""
    rng = np.random.default_rng(seed)
    state = nnx.state(module)
    nnx.update(
        module,
        jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 3, x.dtype), state),
    )
    return module


def router_config(**changes: Any) -> RouterConfig:
    values: dict[str, Any] = {"num_experts": NUM_EXPERTS, "top_k": 3, "has_sigmoid": False}
    return RouterConfig(**values | {"has_correction_bias": False, **changes})


def draw_rows(num_rows: int, seed: int = 1) -> Any:
    rows = np.random.default_rng(seed).normal(size=(num_rows, WIDTH))
    return jnp.asarray(rows, jnp.float32)


def params_of(experts: Experts) -> list[Any]:
    return [getattr(experts, name) for name in ExpertWeights._fields]


def one_expert(experts: Experts, number: int, x: np.ndarray) -> np.ndarray:
    """Compute one expert in float64."""
    gate, up, down, *biases = (
        0.0 if one is None else np.asarray(one[...][number], np.float64)
        for one in params_of(experts)
    )
    gated, raised = x @ np.transpose(gate) + biases[0], x @ np.transpose(up) + biases[1]
    clamped = experts.clamped_gate
    if clamped is None:
        inner = gated / (1 + np.exp(-gated)) * raised
    else:
        gated = np.minimum(gated, clamped.limit)
        raised = np.clip(raised, -clamped.limit, clamped.limit)
        inner = gated / (1 + np.exp(-gated * clamped.alpha)) * (raised + 1)
    return inner @ np.transpose(down) + biases[2]


SIZES = {
    "one": [0, 0, 0, 1, 0, 0, 0, 0],
    "few": [3, 0, 2, 1, 0, 0, 5, 2],
    "tiles": [MAX_FEW_ROWS, MAX_FEW_ROWS + 1, 0, 0, 0, 2 * MAX_FEW_ROWS, 0, 1],
    "many": [0, 300, 0, 0, 0, 0, 0, 129],
    "none": [0] * 8,
}
GATES: dict[str, dict[str, Any]] = {
    "clamped, with biases": {"use_bias": True, "clamped_gate": ClampedGate(alpha=1.7, limit=0.8)},
    "plain": {},
}


@pytest.mark.parametrize(("rows_of", "gate"), each_once(SIZES, GATES))
def test_each_row_meets_its_expert(rows_of: str, gate: str):
    """By a kernel or in tiles, on the CPU, and by `ragged_dot`, elsewhere; the last are of none."""
    sizes = SIZES[rows_of]
    settings: dict[str, Any] = {"activation": "silu", "dtype": jnp.float32, **GATES[gate]}
    experts = fill(Experts(NUM_EXPERTS, WIDTH, INNER, **settings))
    x = draw_rows(sum(sizes) + 2)
    counts = jnp.asarray(sizes, jnp.int32)
    owners = np.repeat(np.arange(NUM_EXPERTS), sizes).tolist()
    rows = [one_expert(experts, n, row) for n, row in zip(owners, np.asarray(x), strict=False)]
    arrays: list[Any] = [one if one is None else one[...] for one in params_of(experts)]
    weights = ExpertWeights(*arrays)
    by_kernel = (experts._by_kernel,) if find_kernels() else ()
    for compute in (experts._by_tiles, experts._by_ragged_dot, *by_kernel):
        ours = np.asarray(jax.jit(compute)(x, counts, weights))[: len(rows)]
        np.testing.assert_allclose(ours, np.reshape(rows, ours.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("width", "num_devices"), each_once([128, 200], [1, 4]))
def test_the_kernel_for_tpus_multiplies_as_xla_does(width: int, num_devices: int):
    """By rows of weights, or by columns (of 200); each device has its part of all experts."""
    sizes = jnp.asarray([3, 0, 200, 1], jnp.int32)
    rng = np.random.default_rng(0)
    x, raise_, lower = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in [(204, width), (4, 264, width), (4, width, 264)]
    )
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("model",))
    if num_devices > 1:
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
        raise_ = jax.device_put(raise_, NamedSharding(mesh, PartitionSpec(None, "model")))
        lower = jax.device_put(lower, NamedSharding(mesh, PartitionSpec(None, None, "model")))

    def compute(multiply: Any, x: Any, raise_: Any, lower: Any) -> Any:
        inner = multiply(x, raise_, sizes, cuts_inputs=False)
        return multiply(inner, lower, sizes, cuts_inputs=True)

    kernel = partial(tpu_group_product, interpret=True)
    ours, theirs = (
        np.asarray(jax.jit(partial(compute, multiply))(x, raise_, lower))
        for multiply in (kernel, _ragged_product)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 2048, 768), (16, 2048, 768)),
        ((16384, 768, 2048), (128, 768, 2048)),
        ((4096, 2880, 2880), (128, 2880, 640)),
        ((64, 7168, 2048), (64, 3584, 512)),
    ],
)
def test_the_kernels_parts_fit_into_a_tpu(shape: tuple[int, int, int], expected: tuple[int, ...]):
    """Rows, inputs and outputs: libtpu 0.0.42 compiled each for TPU v5e, in bfloat16."""
    assert choose_tiles(*shape, 2) == expected


@pytest.mark.parametrize(("platform", "expected"), [("tpu", "tpu_custom_call"), ("cuda", "while")])
def test_no_accelerator_copies_the_matrices_of_all_experts(platform: str, expected: str):
    """As XLA's `ragged_dot` would in every step, by what libtpu and ptxas compile."""
    experts = Experts(NUM_EXPERTS, 128, 256, activation="silu", dtype=jnp.bfloat16)
    x, sizes = jnp.zeros((64, 128), jnp.bfloat16), jnp.full(NUM_EXPERTS, 8, jnp.int32)
    traced = jax.jit(lambda x, sizes: experts(x, sizes)).trace(x, sizes)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert expected in text
    assert "ragged_dot" not in text


@pytest.mark.as_served
def test_a_row_has_the_same_bits_among_any_others():
    """Shapes are static, and a token's experts are summed in the order of its choices."""
    moe = fill(
        MixtureOfExperts(
            WIDTH, INNER, router_config(), num_shared=2, activation="silu", dtype=jnp.float32
        )
    )
    compute = jax.jit(lambda x: moe(x), compiler_options=compiler_options("cpu"))
    x = draw_rows(200)
    whole = np.asarray(compute(x))
    for start, stop in [(0, 2), (3, 10), (40, 104), (7, 140)]:
        np.testing.assert_array_equal(np.asarray(compute(x[start:stop])), whole[start:stop])
    order = np.random.default_rng(3).permutation(200)
    np.testing.assert_array_equal(np.asarray(compute(x[order])), whole[order])


def route(logits: np.ndarray, bias: np.ndarray | None, config: RouterConfig) -> np.ndarray:
    """Return every expert's weight for each token, one token and one rule at a time."""
    weights = np.zeros_like(logits)
    for token, row in enumerate(logits):
        if config.has_sigmoid:
            scores = 1 / (1 + np.exp(-row))
        else:
            scores = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        ranks = scores if bias is None else scores + bias
        groups = np.split(np.arange(len(row)), config.num_groups)
        best = 1 if bias is None else 2
        worth = [np.sort(ranks[group])[-best:].sum() for group in groups]
        allowed = np.concatenate(
            [groups[g] for g in np.argsort(worth)[-config.num_chosen_groups :]]
        )
        chosen = allowed[np.argsort(ranks[allowed])[-config.top_k :]]
        total = scores[chosen].sum() if config.is_normalized else 1.0
        weights[token, chosen] = scores[chosen] / total * config.scale
    return weights


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_normalized": True, "scale": 2.5},
        {"num_groups": 4, "num_chosen_groups": 2},
        {"has_logit_bias": True, "is_normalized": True},
        {"has_sigmoid": True, "has_correction_bias": True, "is_normalized": True, "scale": 2.0},
        {
            **{"has_sigmoid": True, "has_correction_bias": True, "top_k": 2},
            **{"num_groups": 2, "num_chosen_groups": 1},
        },
    ],
    ids=["greedy", "normalised", "groups", "logits-bias", "bias", "groups-and-bias"],
)
def test_routers_choose_and_weigh_as_their_keys_say(changes: dict[str, Any]):
    config = router_config(**changes)
    router = fill(Router(WIDTH, config, dtype=jnp.float32))
    x = draw_rows(50)
    weights, experts = router(x)
    assert weights.dtype == jnp.float32
    ours = np.zeros((50, NUM_EXPERTS))
    np.put_along_axis(ours, np.asarray(experts), np.asarray(weights), axis=1)
    logits = np.asarray(x, np.float64) @ np.asarray(router.weight[...], np.float64).T
    if config.has_logit_bias:
        assert router.bias is not None
        logits = logits + np.asarray(router.bias[...])
    bias = router.e_score_correction_bias
    expected = route(logits, None if bias is None else np.asarray(bias[...], np.float64), config)
    np.testing.assert_allclose(ours, expected, atol=1e-6)


@pytest.mark.as_served
def test_a_router_computes_in_float32_whatever_the_models_dtype():
    router = fill(Router(WIDTH, router_config(), dtype=jnp.bfloat16))
    x = draw_rows(40).astype(jnp.bfloat16)
    exact = Router(WIDTH, router_config(), dtype=jnp.float32)
    exact.weight[...] = router.weight[...].astype(jnp.float32)
    for ours, theirs in zip(router(x), exact(x.astype(jnp.float32)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
