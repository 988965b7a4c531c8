"""The kernel for weights of 4 bits on CUDA is XLA's product; interpreted without a GPU."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.layers.cpu.groups import (
    Grouped,
    Layout,
    _by_group_sums,
    _can_sum_groups,
    dequantize,
    grouped_product,
    pack_nibbles,
)
from mmjax.layers.gpu.nibbles import nibble_product
from tests.kit import each_once
from tests.layers.on_gpu import as_on_gpu


def draw(shape: tuple[int, int], layout: Layout) -> Grouped:
    """Return random codes, scales and zeros."""
    rng = np.random.default_rng(sum(shape))
    groups = (shape[0], layout.num_groups(shape[1]))
    return Grouped(
        layout=layout,
        codes=jnp.asarray(pack_nibbles(rng.integers(0, 16, shape, np.uint8))),
        scale=jnp.asarray(rng.uniform(0.5, 2.0, groups), layout.scale_dtype),
        zero=jnp.asarray(rng.integers(0, 16, groups, np.uint8)) if layout.has_zero else None,
    )


SHAPES = [
    ((64, 256), 32, False),
    ((200, 1000), 32, True),
    ((72, 640), 128, True),
    ((5, 70), 0, False),
]


@pytest.mark.parametrize(
    ("num_rows", "shape", "group_size", "has_zero"),
    [
        # By default every shape, and every number of rows.
        pytest.param(rows, *one, marks=() if one in SHAPES[place::3] else pytest.mark.slow)
        for place, rows in enumerate((1, 2, 16))
        for one in SHAPES
    ],
)
def test_it_is_the_product_with_dequantized_weights(
    num_rows: int, shape: tuple[int, int], group_size: int, has_zero: bool
):
    layout = Layout(code="uint4", group_size=group_size, has_zero=has_zero)
    weight = draw(shape, layout)
    x = jax.random.normal(jax.random.key(0), (num_rows, shape[1]), jnp.bfloat16)
    whole = dequantize(weight, shape[1], jnp.bfloat16).astype(jnp.float32)
    expected = x.astype(jnp.float32) @ whole.T
    arrays = (weight.codes, weight.scale, weight.zero)
    is_interpreted = jax.default_backend() == "cpu"
    got = nibble_product(x, *arrays, group_size=group_size, interpret=is_interpreted)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * float(jnp.abs(expected).max()))


def test_a_product_of_few_rows_is_lowered_to_it():
    weight = draw((1024, 1024), Layout(code="uint4", group_size=32))
    x = jnp.ones((2, 1024), jnp.bfloat16)
    with as_on_gpu():
        text = jax.jit(grouped_product).trace(x, weight).lower(lowering_platforms=("cuda",))
    assert "__gpu$xla.gpu.triton" in text.as_text()


@pytest.mark.parametrize(("group_size", "code"), each_once([128, 0], ["uint8", "float8"]))
def test_a_gpu_scales_the_sums_of_codes_of_8_bits(code: Any, group_size: int):
    """And not the weights, which XLA would write in 16 bits before each product of few rows."""
    layout = Layout(code=code, group_size=group_size)
    rng = np.random.default_rng(group_size)
    codes = jnp.asarray(rng.integers(0, 256, (1024, 512), np.uint8))
    if code == "float8":
        codes = jax.lax.bitcast_convert_type(codes & 0xBF, jnp.float8_e4m3fn)  # finite
    scale = jnp.asarray(rng.uniform(0.5, 2.0, (1024, layout.num_groups(512))), jnp.float32)
    weight = Grouped(layout=layout, codes=codes, scale=scale)
    x = jax.random.normal(jax.random.key(0), (2, 512), jnp.bfloat16)
    assert _can_sum_groups(x, weight)
    expected = x.astype(jnp.float32) @ dequantize(weight, 512, jnp.float32).T
    atol = 1e-5 * float(jnp.abs(expected).max())
    np.testing.assert_allclose(_by_group_sums(x, weight), expected, atol=atol)
    lowered = jax.jit(grouped_product).trace(x, weight).lower(lowering_platforms=("cuda",))
    [product] = re.findall(r"stablehlo.dot_general.*", lowered.as_text())
    groups = layout.num_groups(512)
    assert f"tensor<{groups}x2x1024xf32>" in product
