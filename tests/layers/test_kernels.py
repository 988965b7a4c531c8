"""The kernels in C++: what they compute, on every instruction set that this machine has."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.layers import moe
from mmjax.layers.cpu import build, dispatch
from mmjax.layers.cpu.groups import (
    ORDER,
    SCALE,
    ZERO,
    Grouped,
    Layout,
    dequantize,
    grouped_product,
    order_rows,
    split_inputs,
)
from mmjax.layers.cpu.library import SOURCES, find_kernels, library_path
from mmjax.layers.cpu.product import (
    MAX_FEW_ROWS,
    MIN_WEIGHT_SIZE,
    integer_product,
    product,
    widened_logits,
    widened_product,
)
from mmjax.layers.moe import Experts
from mmjax.layers.norm import GemmaRMSNorm, LayerNorm, RMSNorm
from mmjax.layers.rope import (
    apply_interleaved_rotary,
    apply_rotary,
    inverse_frequencies,
    rotary_angles,
)
from mmjax.layers.tpu.groups import tpu_group_product
from tests.kit import each_once

SHAPES = [(512, 1024), (1280, 640), (1281, 640), (262, 1031), (300, 1000)]
ODD = (262, 1031)
"""Neither of which is a multiple of a tile's or of a vector's."""


def name_of(value: Any) -> str:
    """Return a row's part of its name."""
    return f"{value.code}-{value.group_size}" if isinstance(value, Layout) else str(value)


def has_compiler() -> bool:
    try:
        build.find_compiler()
    except build.BuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="this machine has no C++ compiler")


@pytest.fixture
def kernels() -> str:
    name = find_kernels()
    if name is None:
        pytest.skip("the kernels were not compiled: no compiler, or a CPU without AVX2")
    return name


def draw(
    rows: int, shape: tuple[int, int], dtypes: tuple[str, str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return NumPy's arrays: rows of JAX's own would be a program for each place."""
    rng = np.random.default_rng(rows)
    arrays = rng.standard_normal((rows, shape[1])), rng.standard_normal(shape)
    scaled = (40 * a if d == "int8" else a for a, d in zip(arrays, dtypes, strict=True))
    x, weight = (a.astype(jnp.dtype(d)) for a, d in zip(scaled, dtypes, strict=True))
    return x, weight


FORMS = {
    ("float32", "float32"): product,
    ("bfloat16", "bfloat16"): lambda x, w: product(x, w, jnp.dtype(jnp.float32)),
    ("float32", "int8"): widened_product,
    ("bfloat16", "int8"): widened_product,
    ("int8", "int8"): integer_product,
}


PRODUCTS = [
    # By default each form with odd sizes, and each shape with one of the forms.
    pytest.param(shape, dtypes, marks=() if shape == ODD or place == number else pytest.mark.slow)
    for place, shape in enumerate(SHAPES)
    for number, dtypes in enumerate(FORMS)
]


def many_rows(kernels: str, dtype: str) -> tuple[int, ...]:
    """Return numbers of rows beyond the few that tiles take, around multiples of theirs."""
    takes_many = kernels == "amx" and dtype != "float32"
    return (MAX_FEW_ROWS + 1, 48, 63, 64, 65, 1100) if takes_many else ()


def as_kernels_read(x: np.ndarray, bits: int | None) -> np.ndarray:
    """Return what kernels that add integers make of bfloat16 inputs of integer weights.

    Multiples of 2**-bits of the largest power of two that a number of each 32 has.
    """
    if bits is None or x.dtype != jnp.bfloat16:
        return x
    rows, width = x.shape
    blocks = np.pad(np.asarray(x, np.float64), ((0, 0), (0, -width % 32))).reshape(rows, -1, 32)
    unit = 2.0 ** (np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))) - bits)
    whole = (np.rint(blocks / unit) * unit).reshape(rows, -1)[:, :width]
    half = 2.0 ** -(bits + 1)
    assert np.abs(whole - np.asarray(x, np.float64)).max() <= half * np.abs(blocks).max()
    return whole.astype(jnp.bfloat16)  # which has all of them


def lower(dtypes: tuple[str, str], x: np.ndarray, weight: np.ndarray):
    return jax.jit(lambda x, weight: FORMS[dtypes](x, weight)).lower(x, weight)


@pytest.mark.as_served
@pytest.mark.parametrize(("shape", "dtypes"), PRODUCTS, ids=name_of)
def test_a_kernel_equals_xla_up_to_the_order_of_sums(
    kernels: str, shape: tuple[int, int], dtypes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in (1, 2, 3, 7, MAX_FEW_ROWS, *many_rows(kernels, dtypes[0])):
        x, weight = draw(rows, shape, dtypes)
        lowered = lower(dtypes, x, weight)
        assert "mmjax_product" in lowered.as_text()
        got = np.asarray(lowered.compile()(x, weight))
        if dtypes == ("bfloat16", "int8"):
            x = as_kernels_read(x, 14 if kernels == "avx2" else None)
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "find_kernels", lambda: None)
            plain = lower(dtypes, x, weight)
            assert "mmjax_product" not in plain.as_text()
            expected = np.asarray(plain.compile()(x, weight))
        assert got.dtype == expected.dtype
        if dtypes == ("int8", "int8"):
            np.testing.assert_array_equal(got, expected)
        else:
            scale = 40 if "int8" in dtypes else 1
            np.testing.assert_allclose(got, expected, atol=4e-4 * scale, rtol=0)


@pytest.mark.as_served
@pytest.mark.parametrize(("shape", "dtypes"), PRODUCTS, ids=name_of)
def test_a_row_has_the_same_bits_beside_any_others(
    kernels: str, shape: tuple[int, int], dtypes: tuple[str, str]
) -> None:
    """A lone row, too: decoding alone equals decoding in a batch."""
    assert shape[0] * shape[1] >= MIN_WEIGHT_SIZE
    x, weight = draw(MAX_FEW_ROWS, shape, dtypes)
    whole = np.asarray(jax.jit(FORMS[dtypes])(x, weight))
    for rows in (1, 2, 3, 4, 5, 8, 13):
        for first in (0, len(x) - rows):
            got = jax.jit(FORMS[dtypes])(x[first : first + rows], weight)
            np.testing.assert_array_equal(got, whole[first : first + rows])


@pytest.mark.as_served
@pytest.mark.parametrize(
    ("shape", "dtypes"), [*PRODUCTS, *(((300, 2100), dtypes) for dtypes in FORMS)], ids=name_of
)
def test_a_row_has_the_same_bits_in_any_prompt_and_in_decoding(
    kernels: str, shape: tuple[int, int], dtypes: tuple[str, str]
) -> None:
    counts = many_rows(kernels, dtypes[0])
    if not counts:
        pytest.skip("XLA multiplies so many rows here: a CPU without AMX, or float32")
    x, weight = draw(max(counts), shape, dtypes)
    whole = np.asarray(jax.jit(FORMS[dtypes])(x, weight))
    # Few of them are added as integers, prompts as floats.
    is_one_kind = dtypes != ("bfloat16", "int8")
    few = (1, 2, 4, 5, MAX_FEW_ROWS) if is_one_kind else ()
    for rows in (*few, *counts):
        for first in (0, len(x) - rows):
            got = jax.jit(FORMS[dtypes])(x[first : first + rows], weight)
            np.testing.assert_array_equal(got, whole[first : first + rows])


GROUPS = [
    Layout(code="uint4", group_size=32, scale_dtype="bfloat16"),
    Layout(code="uint4", group_size=128, has_zero=True),
    Layout(code="uint8", group_size=96),
    Layout(code="uint8", group_size=0, has_zero=True),
    Layout(code="float8", group_size=128, has_order=True),
]


def draw_groups(layout: Layout, *shape: int) -> Grouped:
    rng = np.random.default_rng(1)
    arrays = {
        suffix: rng.integers(0, 16, own) if dtype == jnp.uint8 else rng.standard_normal(own) / 20
        for suffix, (own, dtype) in layout.describe(shape).items()
    }
    if layout.has_order:
        order = rng.permutation(shape[-1])
        arrays[ORDER] = np.broadcast_to(order, layout.describe(shape)[ORDER][0])
    codes, scale, zero, order = (
        jnp.asarray(arrays[suffix]).astype(layout.describe(shape)[suffix][1])
        if suffix in arrays
        else None
        for suffix in ("", SCALE, ZERO, ORDER)
    )
    assert codes is not None
    assert scale is not None
    return Grouped(layout=layout, codes=codes, scale=scale, zero=zero, order=order)


@pytest.mark.as_served
@pytest.mark.parametrize(
    ("shape", "layout", "dtype"),
    each_once([(515, 640), (300, 1000), (400, 352)], GROUPS, ["bfloat16", "float32"]),
    ids=name_of,
)
def test_groups_are_multiplied_as_the_numbers_that_they_stand_for(
    kernels: str, shape: tuple[int, int], layout: Layout, dtype: str
) -> None:
    """And a row has the same bits beside any others, and beside none."""
    weight = draw_groups(layout, *shape)
    drawn = np.random.default_rng(2).standard_normal((MAX_FEW_ROWS, shape[1]))
    x = drawn.astype(jnp.dtype(dtype))
    assert "mmjax_product" in jax.jit(grouped_product).lower(x, weight).as_text()
    whole = np.asarray(jax.jit(grouped_product)(x, weight))
    bits = {"avx2": 14, "avx512_vnni": 13, "avx512_bf16": 13, "amx": 13}.get(kernels)
    read = x if layout.code == "float8" else as_kernels_read(x, bits)
    read = read if weight.order is None else read[:, np.asarray(weight.order)]
    numbers = np.asarray(dequantize(weight, shape[1], jnp.float32), np.float64)
    expected = np.asarray(read, np.float64) @ numbers.T
    np.testing.assert_allclose(whole, expected, atol=2e-6 * np.abs(expected).max(), rtol=0)
    for rows in (1, 2, 3, 5, 9):
        for first in (0, len(x) - rows):
            got = jax.jit(grouped_product)(x[first : first + rows], weight)
            np.testing.assert_array_equal(got, whole[first : first + rows])


@pytest.mark.parametrize(
    ("shape", "layout"),
    each_once([(515, 640), (300, 1000), (400, 352), (131, 2112)], GROUPS),
    ids=name_of,
)
def test_prompts_of_groups_are_multiplied_as_xla_does(
    kernels: str, shape: tuple[int, int], layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = many_rows(kernels, "bfloat16")
    if not counts:
        pytest.skip("XLA multiplies so many rows here: a CPU without AMX")
    weight = draw_groups(layout, *shape)
    for rows in counts:
        drawn = np.random.default_rng(rows).standard_normal((rows, shape[1]))
        x = drawn.astype(jnp.bfloat16)
        assert "mmjax_product" in jax.jit(grouped_product).lower(x, weight).as_text()
        got = jax.jit(grouped_product)(x, weight)
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "find_kernels", lambda: None)
            expected = jax.jit(lambda x, weight: grouped_product(x, weight))(x, weight)
        np.testing.assert_allclose(got, expected, atol=2e-6 * np.abs(expected).max(), rtol=0)


@pytest.mark.as_served
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_row(kernels: str, number: float) -> None:
    """Where inputs become integers, of which each is a number."""
    x = jnp.ones((3, 640), jnp.bfloat16).at[1, 77].set(number)
    many = jnp.ones((515, 640), jnp.int8)
    for got in (
        jax.jit(widened_product)(x, many),
        *(jax.jit(grouped_product)(x, draw_groups(layout, 515, 640)) for layout in GROUPS[:3]),
    ):
        is_number = np.isfinite(np.asarray(got)).all(1)
        np.testing.assert_array_equal(is_number, [True, False, True])


@pytest.mark.parametrize("exponent", [-100, -50, 100])
def test_numbers_of_any_size_are_multiplied(kernels: str, exponent: int) -> None:
    x, weight = draw(2, (515, 640), ("bfloat16", "int8"))
    got = jax.jit(widened_product)(x * jnp.bfloat16(2.0**exponent), weight)
    expected = np.asarray(jax.jit(widened_product)(x, weight), np.float64) * 2.0**exponent
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3 * np.abs(expected).max())


@pytest.mark.as_served
@pytest.mark.parametrize("layout", GROUPS[:3], ids=str)
@pytest.mark.parametrize("rows", [2, 7, 12])
def test_groups_of_numbers_of_any_size_are_multiplied(
    kernels: str, rows: int, layout: Layout
) -> None:
    """A power of two changes no digit of a product."""
    weight = draw_groups(layout, 515, 640)
    x = np.random.default_rng(rows).standard_normal((rows, 640)).astype(jnp.bfloat16)
    compute = jax.jit(grouped_product)
    expected = np.asarray(compute(x, weight), np.float64)
    for exponent in (-80, -50, 90):
        got = compute(x * jnp.bfloat16(2.0**exponent), weight)
        np.testing.assert_array_equal(got, expected * 2.0**exponent)


def draw_experts(layout: Layout, dtype: Any) -> tuple[Experts, Experts]:
    """Return experts, and the same in groups."""
    whole, packed = (Experts(4, 512, 640, activation="silu", dtype=dtype) for _ in range(2))
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = getattr(whole, name).shape
        weight = draw_groups(layout, *shape)
        numbers = np.asarray(dequantize(weight, shape[-1], dtype))
        if weight.order is not None:
            numbers = numbers[..., np.argsort(np.asarray(weight.order)[0])]
        setattr(whole, name, nnx.Param(jnp.asarray(numbers)))
        packed.pack(name, layout)
        for suffix, one in zip(
            ("", SCALE, ZERO, ORDER),
            (weight.codes, weight.scale, weight.zero, weight.order),
            strict=True,
        ):
            if one is not None:
                setattr(packed, name + suffix, nnx.Param(one))
    return whole, packed


@pytest.mark.as_served
@pytest.mark.parametrize("layout", [None, *GROUPS], ids=str)
def test_prompts_of_experts_are_multiplied_by_tiles(
    kernels: str, layout: Layout | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As XLA does in its tiles; a row has the same bits beside any others, and among any number."""
    if kernels != "amx":
        pytest.skip("XLA multiplies so many rows here: a CPU without AMX")
    whole, packed = draw_experts(layout or GROUPS[0], jnp.bfloat16)
    experts = whole if layout is None else packed
    drawn = np.random.default_rng(0).standard_normal((300, 512))
    x = jnp.asarray(drawn, jnp.bfloat16)
    sizes = jnp.asarray([100, 0, 17, 180], jnp.int32)
    compute = jax.jit(lambda x, sizes: experts(x, sizes))
    assert "mmjax_groups_bfloat16" in compute.lower(x, sizes).as_text()
    got = np.asarray(compute(x, sizes))
    some, fewer = x[50:217], jnp.asarray([50, 0, 17, 100], jnp.int32)
    np.testing.assert_array_equal(compute(some, fewer), got[50:217])
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "find_kernels", lambda: None)
        expected = np.asarray(jax.jit(lambda x, sizes: experts(x, sizes))(x, sizes), np.float32)
    # What is gated is rounded, in both by itself. Rows behind the last expert's are of none.
    atol = 2**-7 * np.abs(expected).max()
    np.testing.assert_allclose(got[:297], expected[:297], atol=atol, rtol=0)


@pytest.mark.parametrize("layout", GROUPS, ids=name_of)
def test_experts_in_groups_are_the_numbers_that_they_stand_for(
    kernels: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel, by XLA's loop over tiles, and by its ragged product."""
    whole, packed = draw_experts(layout, jnp.float32)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((12, 512)), jnp.float32)
    sizes = jnp.asarray([0, 7, 1, 4], jnp.int32)
    expected = np.asarray(whole(x, sizes))
    lowered = jax.jit(lambda x, sizes: packed(x, sizes)).lower(x, sizes)
    assert f"mmjax_groups_float32_{layout.code}" in lowered.as_text()
    close = {"atol": 1e-5 * np.abs(expected).max(), "rtol": 0}
    np.testing.assert_allclose(lowered.compile()(x, sizes), expected, **close)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "find_kernels", lambda: None)
        np.testing.assert_allclose(
            jax.jit(lambda x, sizes: packed(x, sizes))(x, sizes), expected, **close
        )
    # Gradients are of the form for other platforms.
    ragged, _ = jax.jvp(lambda x: packed(x, sizes), (x,), (x,))
    np.testing.assert_allclose(ragged, expected, **close)


@pytest.mark.as_served
@pytest.mark.parametrize(("layout", "width"), each_once(GROUPS, [640, 1000]), ids=name_of)
def test_on_tpus_inputs_move_and_numbers_stay_the_same(layout: Layout, width: int) -> None:
    weight = draw_groups(replace(layout, has_order=False), 48, width)

    @jax.jit
    def multiply(x: jax.Array, weight: Grouped) -> jax.Array:
        parts = split_inputs(x, weight)
        return jnp.stack([part @ numbers.T for part, numbers in parts]).sum(0)

    expected = dequantize(weight, width, jnp.float32).T
    np.testing.assert_array_equal(multiply(jnp.eye(width), weight), expected)


def test_no_product_on_tpus_moves_weights_in_groups() -> None:
    """Which copied the matrix several times, in float32, by what libtpu compiles."""
    weight = draw_groups(GROUPS[1], 512, 1024)
    for rows in (2, 64):
        x = jnp.ones((rows, 1024), jnp.bfloat16)
        text = jax.jit(grouped_product).trace(x, weight).lower(lowering_platforms=("tpu",))
        shapes = re.findall(r"tensor<([\dx]+)xf32>", text.as_text())
        assert f"512x{1024 // 2}" in shapes, "numbers of half a matrix"
        assert not [one for one in shapes if one.startswith("512x") and one.count("x") > 1]


@pytest.mark.parametrize(("layout", "num_devices"), each_once(GROUPS, [1, 4]), ids=name_of)
def test_on_tpus_the_experts_that_have_rows_are_made_wide(
    layout: Layout, num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows have few of them; of devices, each has its part of all."""
    monkeypatch.setattr(moe, "tpu_group_product", partial(tpu_group_product, interpret=True))
    weight = draw_groups(layout, 8, 256, 512)
    sizes = jnp.asarray([0, 3, 0, 0, 1, 2, 0, 0], jnp.int32)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 512)), jnp.float32)
    expected = moe._ragged_product(order_rows(x, weight, sizes), weight, sizes)
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("model",))
    of_outputs = NamedSharding(mesh, PartitionSpec(None, "model"))
    if num_devices > 1:
        order = weight.order
        weight = jax.device_put(replace(weight, order=None), of_outputs)
        weight = replace(weight, order=order)
        x, sizes = jax.device_put((x, sizes), NamedSharding(mesh, PartitionSpec()))

    @jax.jit
    def compute(x: jax.Array, weight: Grouped, sizes: jax.Array) -> jax.Array:
        rows = order_rows(x, weight, sizes)
        return moe._tpu_product(rows, weight, sizes, cuts_inputs=False)

    out = compute(x, weight, sizes)
    np.testing.assert_allclose(out, expected, atol=1e-5 * float(jnp.abs(expected).max()))
    text = compute.lower(x, weight, sizes).as_text()
    assert "tensor<8x256x512xf32>" not in text
    # Devices would send each other the scales of halves.
    has_halves = layout.code == "uint4" and num_devices == 1
    assert f"tensor<6x256x{256 if has_halves else 512}xf32>" in text


def test_without_kernels_a_head_is_multiplied_in_two_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 bits each: its weights are never made wide."""
    monkeypatch.setattr(dispatch, "find_kernels", lambda: None)
    x, weight = draw(8, (1024, 512), ("float32", "int8"))
    lowered = jax.jit(widened_logits).lower(x, weight)
    assert "tensor<1024x512xf32>" not in lowered.as_text()
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    limit = 2**-16 * np.abs(x).max() * np.abs(np.asarray(weight, np.int32)).sum(1).max()
    np.testing.assert_allclose(lowered.compile()(x, weight), expected, atol=limit)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_with_large_weights_are_multiplied_where_they_lie(
    kernels: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In decoding; XLA's loop over tiles copies an expert's weights before it multiplies."""
    rng = np.random.default_rng(0)
    experts = Experts(4, 512, 640, activation="silu", dtype=jnp.dtype(dtype))
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = getattr(experts, name).shape
        values = jnp.asarray(rng.standard_normal(shape) / 20, dtype)
        setattr(experts, name, nnx.Param(values))
    x = jnp.asarray(rng.standard_normal((12, 512)), dtype)
    sizes = jnp.asarray([0, 7, 1, 4], jnp.int32)
    lowered = jax.jit(lambda x, sizes: experts(x, sizes)).lower(x, sizes)
    assert "mmjax_groups" in lowered.as_text()
    got = np.asarray(lowered.compile()(x, sizes), np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "find_kernels", lambda: None)
        expected = np.asarray(jax.jit(lambda x, sizes: experts(x, sizes))(x, sizes), np.float32)
    np.testing.assert_allclose(got, expected, atol=1e-5 if dtype == "float32" else 0.03, rtol=0.02)


ROWS = {
    "llama's norm": lambda x: RMSNorm(x.shape[-1], eps=1e-5, dtype=x.dtype)(x),
    "gemma's norm": lambda x: GemmaRMSNorm(x.shape[-1], eps=1e-6, dtype=x.dtype)(x),
    "layer norm": lambda x: draw_layer_norm(x, has_bias=True)(x),
    "layer norm without a bias": lambda x: draw_layer_norm(x, has_bias=False)(x),
    "rotation": lambda x: apply_rotary(x, *angles_of(x, x.shape[-1] // 2)),
    "interleaved rotation of a part": lambda x: apply_interleaved_rotary(
        x, *angles_of(x, x.shape[-1] // 4)
    ),
}


def draw_layer_norm(x: jax.Array, *, has_bias: bool) -> LayerNorm:
    norm = LayerNorm(x.shape[-1], eps=1e-5, has_bias=has_bias, dtype=x.dtype)
    norm.weight[...] = jnp.linspace(0.5, 2, x.shape[-1]).astype(x.dtype)
    if norm.bias is not None:
        norm.bias[...] = jnp.linspace(-1, 1, x.shape[-1]).astype(x.dtype)
    return norm


def angles_of(x: jax.Array, num_pairs: int) -> tuple[jax.Array, jax.Array]:
    frequencies = inverse_frequencies({"rope_theta": 1e4}, 2 * num_pairs)
    positions = jnp.abs(x[:, 0, 0].astype(jnp.float32) * 100).astype(jnp.int32)
    return rotary_angles(positions, frequencies)


@pytest.mark.as_served
@pytest.mark.parametrize(("name", "dtype"), each_once(ROWS, ["float32", "bfloat16"]))
def test_rows_are_normed_and_rotated_as_by_xla(
    kernels: str, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By threads where there are many; and a row has the same bits beside any others."""
    unit = 2e-6 if dtype == "float32" else 2**-7
    for shape in ((1, 1, 640), (33, 3, 72), (700, 2, 40)):
        x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
        lowered = jax.jit(lambda x: ROWS[name](x)).lower(x)
        assert "mmjax_norm" in lowered.as_text() or "mmjax_rotation" in lowered.as_text()
        got = lowered.compile()(x)
        np.testing.assert_array_equal(jax.jit(lambda x: ROWS[name](x))(x[-1:]), got[-1:])
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "find_kernels", lambda: None)
            plain = jax.jit(lambda x: ROWS[name](x)).lower(x)
            assert "mmjax_" not in plain.as_text()
            expected = np.asarray(plain.compile()(x), np.float32)
        np.testing.assert_allclose(
            np.asarray(got, np.float32), expected, atol=unit * np.abs(expected).max(), rtol=unit
        )


@pytest.mark.as_served
def test_products_of_bfloat16_are_rounded_once(kernels: str) -> None:
    x, weight = draw(5, (1281, 640), ("bfloat16", "bfloat16"))
    sums = jax.jit(lambda x, w: product(x, w, jnp.dtype(jnp.float32)))(x, weight)
    np.testing.assert_array_equal(jax.jit(product)(x, weight), sums.astype(jnp.bfloat16))


@pytest.mark.as_served
def test_concurrent_calls_do_not_disturb_each_other(kernels: str) -> None:
    """Calls that are in flight together share the pool of threads."""
    x, weight = draw(4, (2048, 640), ("float32", "float32"))
    call = jax.jit(product)
    expected = np.asarray(call(x, weight))
    for got in [call(x, weight) for _ in range(200)]:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow  # a minute for what changes with the kernels alone
@needs_compiler
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """All instruction sets of this machine, at widths and rows around those of their loops."""
    program = tmp_path / "kernels_main"
    kernels = [source for source in SOURCES.glob("*.cc") if "handlers" not in source.name]
    checks = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    sources = [*kernels, Path(__file__).with_name("kernels_main.cc")]
    build.compile_sources(sources, program, checks, checks)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_compiler_the_build_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "CXX": ""}
    command = [sys.executable, "-m", "mmjax.layers.cpu.build"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "no C++ compiler was found" in done.stderr


def test_a_library_of_other_sources_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "products.h").write_text("// changed\n", "utf-8")
    monkeypatch.setattr("mmjax.layers.cpu.library.SOURCES", tmp_path)
    assert library_path().parent == tmp_path
    assert not library_path().exists()
    assert find_kernels.__wrapped__() is None
