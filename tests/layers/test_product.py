"""The product of few rows: another program on the CPU, the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.layers.cpu import product as product_module
from mmjax.layers.cpu.product import (
    LONG_ROW,
    MAX_FEW_ROWS,
    MIN_WEIGHT_SIZE,
    SHORT_PROMPT_ROWS,
    integer_product,
    product,
)

pytestmark = pytest.mark.as_served

WIDE = (512, LONG_ROW)
TALL = (1280, 640)
SHAPES = [WIDE, TALL, (640, 640), (1281, 640), (262, 1030), (16, 24)]


def make(rows: int, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, shape[1]), np.float32)
    return x, rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, MAX_FEW_ROWS, MAX_FEW_ROWS + 1, SHORT_PROMPT_ROWS])
def test_equals_the_sum_in_float64(rows: int, shape: tuple[int, int]) -> None:
    x, weight = make(rows, shape)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    got = jax.jit(product)(jnp.asarray(x), jnp.asarray(weight))
    assert got.shape == (rows, shape[0])
    np.testing.assert_allclose(got, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("shape", [WIDE, TALL])
def test_a_row_does_not_depend_on_how_many_stand_beside_it(shape: tuple[int, int]) -> None:
    """Decoding 2 to 8 requests gives each the same bits."""
    x, weight = make(8, shape)
    assert weight.size >= MIN_WEIGHT_SIZE
    by_rows = {
        rows: np.asarray(jax.jit(product)(jnp.asarray(x[:rows]), jnp.asarray(weight)))
        for rows in (2, 3, 4, 8)
    }
    for rows, got in by_rows.items():
        np.testing.assert_array_equal(got, by_rows[8][:rows])


@pytest.mark.parametrize("shape", [(48, 32), (16, 24), (128, 64), (255, 512)])
def test_small_weights_give_a_row_its_bits_in_any_number(shape: tuple[int, int]) -> None:
    x, weight = make(64, shape)
    assert weight.size < MIN_WEIGHT_SIZE
    expected = np.asarray(jax.jit(product)(jnp.asarray(x), jnp.asarray(weight)))
    for rows in (1, 2, 3, 8, 17, 32):
        got = np.asarray(jax.jit(product)(jnp.asarray(x[:rows]), jnp.asarray(weight)))
        np.testing.assert_array_equal(got, expected[:rows])


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    """Two rows of weights are read as one, each beside zeros for the other."""
    x, weight = make(4, TALL)
    x[1] = np.inf
    got = np.asarray(jax.jit(product)(jnp.asarray(x), jnp.asarray(weight)))
    assert np.isfinite(got[[0, 2, 3]]).all()


def test_small_and_half_precision_weights_are_computed_alike() -> None:
    for shape, dtype in (((64, 64), jnp.float32), (WIDE, jnp.bfloat16)):
        x, weight = (jnp.asarray(part, dtype) for part in make(4, shape))
        assert "barrier" not in jax.jit(product).lower(x, weight).as_text()


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_platforms_get_the_plain_product(platform: str) -> None:
    x, weight = (jnp.asarray(part) for part in make(4, WIDE))
    text = jax.jit(product).trace(x, weight).lower(lowering_platforms=(platform,)).as_text()
    assert "dot_general" in text
    assert "barrier" not in text


def test_gradients_pass() -> None:
    x, weight = (jnp.asarray(part) for part in make(4, TALL))
    plain = jax.grad(lambda x, w: (x @ w.T).sum(), argnums=(0, 1))(x, weight)
    ours = jax.grad(lambda x, w: product(x, w).sum(), argnums=(0, 1))(x, weight)
    for one, other in zip(plain, ours, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)


def test_a_mesh_that_cuts_inputs_moves_no_weights() -> None:
    """As `o_proj` and `down_proj` are cut: each device adds its part, and then they add up."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    by_inputs = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    x, weight = (jax.device_put(part, by_inputs) for part in make(4, (896, 896)))
    text = jax.jit(product).lower(x, weight).compile().as_text() or ""
    assert "all-gather" not in text
    assert text.count("all-reduce(") == 1


@pytest.fixture(params=[True, False], ids=["with bfloat16", "without"])
def on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU multiply bfloat16 numbers itself, or not."""
    monkeypatch.setattr(product_module, "has_bfloat16", lambda: request.param)


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("dtype", [None, jnp.dtype(jnp.float32)])
@pytest.mark.parametrize("shape", SHAPES)
def test_half_precision_is_added_in_float32_and_rounded_once(
    shape: tuple[int, int], dtype: jnp.dtype | None
) -> None:
    x, weight = (jnp.asarray(part, jnp.bfloat16) for part in make(64, shape))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    for rows in (1, 8, 64):
        got = jax.jit(lambda x, weight: product(x, weight, dtype))(x[:rows], weight)
        assert got.dtype == (dtype or jnp.bfloat16)
        # Of a bfloat16, 8 bits are kept; of the sums, what float32 keeps.
        bound = np.abs(exact[:rows]) * (2**-8 if dtype is None else 0) + 2e-4
        assert (np.abs(np.asarray(got, np.float64) - exact[:rows]) <= bound).all()


@pytest.mark.usefixtures("on_a_cpu")
def test_small_weights_of_half_precision_give_a_row_its_bits_in_any_number() -> None:
    x, weight = (jnp.asarray(part, jnp.bfloat16) for part in make(64, (255, 512)))
    multiply = jax.jit(lambda x, weight: product(x, weight, jnp.dtype(jnp.float32)))
    expected = np.asarray(multiply(x, weight))
    for rows in (1, 2, 3, 8, 16, 17, 32):
        np.testing.assert_array_equal(np.asarray(multiply(x[:rows], weight)), expected[:rows])


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("counts", [(2, 3, 8, 16), (17, 24, 64, 96, 256)])
def test_large_weights_of_half_precision_give_decoding_and_prompts_an_order_each(
    counts: tuple[int, ...],
) -> None:
    x, weight = (jnp.asarray(part, jnp.bfloat16) for part in make(counts[-1], (1024, 640)))
    multiply = jax.jit(lambda x, weight: product(x, weight, jnp.dtype(jnp.float32)))
    expected = np.asarray(multiply(x, weight))
    for rows in counts:
        np.testing.assert_array_equal(np.asarray(multiply(x[:rows], weight)), expected[:rows])


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_platforms_get_the_plain_product_in_half_precision(platform: str) -> None:
    x, weight = (jnp.asarray(part, jnp.bfloat16) for part in make(1, WIDE))
    text = jax.jit(product).trace(x, weight).lower(lowering_platforms=(platform,)).as_text()
    assert "concatenate" not in text
    assert "f32" not in text


@pytest.mark.parametrize("rows", [1, 4, 65])
def test_a_gpu_multiplies_8_bits_as_bfloat16(rows: int) -> None:
    """XLA's own products of them are wrong there."""
    rng = np.random.default_rng(rows)
    x, weight = (
        jnp.asarray(rng.integers(-127, 128, shape), jnp.int8) for shape in ((rows, 640), (96, 640))
    )
    lowered = jax.jit(integer_product).trace(x, weight).lower(lowering_platforms=("cuda",))
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert products
    assert not any("i8" in line for line in products)
    exact = np.asarray(x, np.int64) @ np.asarray(weight, np.int64).T
    np.testing.assert_array_equal(product_module._by_bfloat16(x, weight), exact)
    np.testing.assert_array_equal(jax.jit(integer_product)(x, weight), exact)
