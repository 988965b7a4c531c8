"""Arrays that replace matrices of a checkpoint that was published quantised."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from mmjax.errors import CheckpointError
from mmjax.layers.cpu.groups import Layout
from mmjax.weights.rules import Stack
from mmjax.weights.update import match_update, place_update

SHAPE = (16, 64)


def describe(layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
    sharding = SingleDeviceSharding(jax.devices()[0])
    return {
        f"layer.weight{suffix}": jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for suffix, (shape, dtype) in layout.describe(SHAPE).items()
    }


@pytest.mark.parametrize(("has_zero", "has_order"), [(True, False), (False, True)])
def test_floats_do_not_replace_codes_alone_whose_zeros_or_order_would_stay(
    has_zero: bool, has_order: bool
):
    given = {"layer.weight": np.ones(SHAPE, np.float32)}
    plain = Layout(code="uint4", group_size=32)
    (found,) = match_update(given, describe(plain), ())
    assert found.scales == "layer.weight_scale"
    layout = Layout(code="uint4", group_size=32, has_zero=has_zero, has_order=has_order)
    expected = describe(layout)
    with pytest.raises(CheckpointError, match=r"is not quantised, and the model has `layer.weight"):
        match_update(given, expected, ())


def test_codes_of_fp8_take_their_own_place():
    expected = describe(Layout(code="float8", group_size=32))
    rng = np.random.default_rng(0)
    given = {
        "layer.weight": rng.normal(size=SHAPE).astype(ml_dtypes.float8_e4m3fn),
        "layer.weight_scale": rng.uniform(size=(16, 2)).astype(np.float32),
    }
    found = match_update(given, expected, ())
    placed = dict(place_update(found, expected, current={}, donate=False))
    assert placed.keys() == given.keys()
    for name, array in given.items():
        np.testing.assert_array_equal(np.asarray(placed[name]), array)


def test_floats_do_not_become_the_codes_of_experts():
    expected = {
        "experts.up_proj": jax.ShapeDtypeStruct((2, *SHAPE), ml_dtypes.float8_e4m3fn),
        "experts.up_proj_scale": jax.ShapeDtypeStruct((2, SHAPE[0], 1), np.float32),
    }
    rules = [
        Stack(r"^(experts)\.(?P<index>\d+)\.up_proj\.weight(_scale)?$", r"\1.up_proj\3"),
    ]
    codes = {f"experts.{n}.up_proj.weight": np.ones(SHAPE, np.float32) for n in range(2)}
    with pytest.raises(CheckpointError, match=r"0.up_proj.weight` must be of dtype float8_e4m3fn"):
        match_update(codes, expected, rules)
    own = {name: one.astype(ml_dtypes.float8_e4m3fn) for name, one in codes.items()}
    scales = {f"{name}_scale": np.ones((SHAPE[0], 1), np.float32) for name in codes}
    assert len(match_update(own | scales, expected, rules)) == 2
