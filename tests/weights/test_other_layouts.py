"""Matrices of files that are quantised in another way than those that an engine began with."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.errors import CheckpointError
from mmjax.layers.cpu.groups import Layout
from mmjax.weights.files.method import Method
from mmjax.weights.files.packed import find_packed
from mmjax.weights.files.safetensors import open_safetensors
from mmjax.weights.layouts import find_layouts
from mmjax.weights.load import load_params
from tests.models.test_published_quantized import write_tensors
from tests.weights.packers import Packed, pack_compressed, pack_gptq, pack_int8

WEIGHT = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
COMPRESSED = Method(name="compressed-tensors", bits=4)
GPTQ = Method(name="gptq", bits=4, zero_offset=1)


def write(folder: Path, packed: Packed) -> Path:
    folder.mkdir()
    tensors = {f"layer.{name}": one for name, one in packed.tensors.items()}
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def describe(folder: Path, method: Method) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the leaves of a tree that is made for a directory."""
    with open_safetensors(folder) as stored:
        packed = find_packed(stored, method)[1]
        layout = find_layouts(packed, ())["layer.weight"]
    if isinstance(layout, Layout):
        arrays = layout.describe(WEIGHT.shape)
    else:
        arrays = {"": (WEIGHT.shape, jnp.int8), "_scale": (WEIGHT.shape[:1], jnp.float32)}
    return {f"weight{name}": jax.ShapeDtypeStruct(*one) for name, one in arrays.items()}


def int8_with(**changed: np.ndarray) -> Packed:
    packed = pack_int8(WEIGHT)
    return packed._replace(tensors=packed.tensors | changed)


@pytest.mark.parametrize(
    ("first", "second", "method"),
    [
        (pack_compressed(WEIGHT), pack_compressed(WEIGHT, has_zero=True), COMPRESSED),
        (pack_gptq(WEIGHT), pack_gptq(WEIGHT, act=True), GPTQ),
        (pack_int8(WEIGHT), int8_with(weight_zero_point=np.full((16, 1), 3, np.int8)), COMPRESSED),
        (pack_int8(WEIGHT), int8_with(weight_scale=np.ones((16, 2), np.float32)), COMPRESSED),
    ],
    ids=["zeros", "order", "zeros of rows", "groups in rows"],
)
def test_what_the_tree_has_no_place_for_is_refused(
    first: Packed, second: Packed, method: Method, tmp_path: Path
):
    began, other = write(tmp_path / "first", first), write(tmp_path / "second", second)
    tree = {"layer": describe(began, method)}
    load_params(began, tree, (), method=method, use_tqdm=False)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_params(other, tree, (), method=method, use_tqdm=False)
