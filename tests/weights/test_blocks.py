"""Matrices in FP8 whose rows are no whole number of blocks."""

from pathlib import Path

import jax
import numpy as np
import pytest

from mmjax.layers.cpu.groups import Grouped, grouped_product
from mmjax.weights.files.method import Method
from mmjax.weights.files.packed import find_packed
from mmjax.weights.files.safetensors import open_safetensors
from tests.models.test_published_quantized import write_tensors
from tests.weights.packers import pack_float8

BLOCK = 128
EVERYTHING = (slice(None), slice(None))


@pytest.mark.parametrize("width", [192, 288, 2880])
def test_the_last_block_of_a_row_may_be_narrower(tmp_path: Path, width: int):
    # As transformers' `FP8Linear` and compressed-tensors have them: as many scales as blocks begin.
    weight = np.random.default_rng(0).normal(size=(640, width)).astype(np.float32)
    # Blocks whose scales differ.
    packed = pack_float8(weight * np.linspace(0.1, 10, width, dtype=np.float32), block=BLOCK)
    tensors = {f"layer.{name}": one for name, one in packed.tensors.items()}
    write_tensors(tmp_path / "model.safetensors", tensors)
    with open_safetensors(tmp_path) as stored:
        (found,) = find_packed(stored, Method(name="fp8", bits=8, block=(BLOCK, BLOCK)))[1]
        whole = found.as_whole().read(EVERYTHING)
        parts = found.as_parts(found.layout)
        codes, scale = (parts[name].read(EVERYTHING) for name in ("", "_scale"))
    np.testing.assert_allclose(whole, packed.numbers, rtol=1e-6)
    grouped = Grouped(layout=found.layout, codes=codes, scale=scale)
    x = np.random.default_rng(1).normal(size=(3, width)).astype(np.float32)
    out = jax.jit(grouped_product)(x, grouped)
    np.testing.assert_allclose(out, x @ packed.numbers.T, rtol=1e-3, atol=2e-2)
