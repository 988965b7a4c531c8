"""Gradients of what has loops or kernels are those of the plain formula."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.layers.attention.segments import PADDING, segment_attention
from mmjax.layers.module import bind, build_abstract
from mmjax.layers.moe import Experts

SCALE = 0.3


def attend_densely(query: Any, key: Any, value: Any, ids: Any) -> Any:
    """Return attention within equal ids, all scores at once; zeros for padding."""
    is_same = (ids[:, None] == ids[None, :]) & (ids >= 0)[:, None]
    scores = jnp.einsum("pnh,snh->nps", query, key) * SCALE
    weights = jax.nn.softmax(jnp.where(is_same[None], scores, -1e30), axis=-1)
    return jnp.einsum("nps,snh->pnh", jnp.where(is_same[None], weights, 0.0), value)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([7, 5], id="one block", marks=pytest.mark.slow),
        pytest.param([300, 41, 280], id="three blocks"),
        pytest.param([1, 512], id="whole blocks", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "is_shuffled",
    [
        pytest.param(False, id="ascending", marks=pytest.mark.slow),
        pytest.param(True, id="in any order"),
    ],
)
def test_attention_within_segments(lengths: list[int], is_shuffled: bool):
    generator = np.random.default_rng(len(lengths))
    ids = np.repeat(np.arange(len(lengths)), lengths)
    ids = np.append(ids, np.full(9, PADDING)).astype(np.int32)
    if is_shuffled:
        generator.shuffle(ids)
    arrays = generator.normal(size=(4, len(ids), 3, 8)).astype(np.float32)
    *arguments, weights = (jnp.asarray(one) for one in arrays)
    is_token = jnp.asarray(ids >= 0)[:, None, None]

    def total(attend: Any) -> Any:
        def of(*qkv: Any) -> Any:
            return (jnp.where(is_token, attend(*qkv), 0.0) * weights).sum()

        return of

    segment_ids = jnp.asarray(ids)
    ours = total(lambda q, k, v: segment_attention(q, k, v, segment_ids, scale=SCALE))
    plain = total(lambda q, k, v: attend_densely(q, k, v, segment_ids))
    found = jax.jit(jax.grad(ours, argnums=(0, 1, 2)))(*arguments)
    expected = jax.jit(jax.grad(plain, argnums=(0, 1, 2)))(*arguments)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)
        assert np.abs(other).max() > 0.1


def test_it_is_in_the_dtype_of_its_arguments():
    arrays = jnp.ones((3, 6, 2, 8), jnp.bfloat16)
    ids = jnp.zeros(6, jnp.int32)

    def total(q: Any, k: Any, v: Any) -> Any:
        return segment_attention(q, k, v, ids, scale=SCALE).astype(jnp.float32).sum()

    found = jax.eval_shape(jax.grad(total, argnums=(0, 1, 2)), *arrays)
    assert {one.dtype.name for one in found} == {"bfloat16"}


@pytest.mark.parametrize("sizes", [[3, 0, 2, 1], [0, 40, 0, 90]], ids=["few", "many"])
def test_experts(sizes: list[int]):
    generator = np.random.default_rng(0)
    options: dict[str, Any] = {"activation": "silu", "use_bias": True, "dtype": jnp.float32}
    graphdef, abstract = build_abstract(Experts, len(sizes), 8, 16, **options)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(generator.normal(size=leaf.shape), leaf.dtype), abstract
    )
    rows = jnp.asarray(generator.normal(size=(sum(sizes), 8)), jnp.float32)
    weights = jnp.asarray(generator.normal(size=rows.shape), jnp.float32)
    owners = np.repeat(np.arange(len(sizes)), sizes)

    def ours(params: Any, rows: Any) -> Any:
        counts = jnp.asarray(sizes, jnp.int32)
        return (bind(graphdef, params)(rows, counts) * weights).sum()

    def plain(params: Any, rows: Any) -> Any:
        def project(name: str, x: Any) -> Any:
            product = jnp.einsum("rd,rfd->rf", x, params[f"{name}_proj"][owners])
            return product + params[f"{name}_proj_bias"][owners]

        gated = jax.nn.silu(project("gate", rows)) * project("up", rows)
        return (project("down", gated) * weights).sum()

    found = jax.jit(jax.grad(ours, argnums=(0, 1)))(params, rows)
    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(params, rows)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * float(np.abs(other).max()))
