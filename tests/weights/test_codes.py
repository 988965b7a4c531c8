"""How quantised matrices are stored, beside what compressed-tensors itself makes of a few numbers.

`tests/golden/quantized` has its `pack_to_int32` (0.20.0) of codes and zeros, and `dequantize`.
"""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from mmjax.errors import CheckpointError
from mmjax.weights.files.method import Method
from mmjax.weights.files.packed import find_packed, unpack
from mmjax.weights.files.safetensors import open_safetensors
from tests.models.test_published_quantized import write_tensors
from tests.weights.packers import FORMS, pack_gptq, pack_words, restore, round_groups

GOLDEN = load_file(
    Path(__file__).parents[1] / "golden" / "quantized" / "compressed_tensors.safetensors"
)


def read_whole(folder: Path, tensors: dict[str, np.ndarray], method: Method) -> np.ndarray:
    """Return the numbers of the one quantised matrix of a file."""
    write_tensors(folder / "model.safetensors", {f"layer.{n}": one for n, one in tensors.items()})
    with open_safetensors(folder) as stored:
        plain, packed = find_packed(stored, method)
        assert plain == []
        (tensor,) = packed
        assert tensor.name == "layer.weight"
        return tensor.as_whole().read((slice(None), slice(None)))


def test_words_are_those_of_the_library():
    for bits in (4, 8):
        codes = GOLDEN[f"codes{bits}"].astype(np.int32) + 2 ** (bits - 1)
        packed = GOLDEN[f"packed{bits}"]
        np.testing.assert_array_equal(pack_words(codes, bits, axis=1), packed)
        np.testing.assert_array_equal(unpack(packed, bits), codes)
    zero = GOLDEN["zero4"].astype(np.int32) + 8
    np.testing.assert_array_equal(pack_words(zero, 4, axis=0), GOLDEN["packed_zero4"])


def test_numbers_are_those_of_the_library(tmp_path: Path):
    tensors = {
        "weight_packed": GOLDEN["packed4"],
        "weight_scale": GOLDEN["scale"],
        "weight_zero_point": GOLDEN["packed_zero4"],
        "weight_shape": np.asarray(GOLDEN["codes4"].shape, np.int64),
    }
    found = read_whole(tmp_path, tensors, Method(name="compressed-tensors", bits=4))
    np.testing.assert_allclose(found, GOLDEN["numbers4"], rtol=1e-6)


def test_an_order_that_was_never_set_is_that_of_the_file(tmp_path: Path):
    # compressed-tensors begins with -1, which experts keep that no calibration sample reached.
    weight = np.random.default_rng(0).normal(size=(48, 96)).astype(np.float32)
    packed = FORMS["w4a16"].pack(weight)
    tensors = {**packed.tensors, "weight_g_idx": np.full(96, -1, np.int32)}
    found = read_whole(tmp_path, tensors, Method(name="compressed-tensors", bits=4))
    np.testing.assert_allclose(found, packed.numbers, rtol=1e-6)


def test_float8_is_read_from_its_place_in_the_file(tmp_path: Path):
    codes = GOLDEN["f8"].view(ml_dtypes.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": np.ones((8, 1), np.float32)}
    found = read_whole(tmp_path, tensors, Method(name="compressed-tensors", bits=8))
    np.testing.assert_array_equal(found, GOLDEN["f8_float"])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_of_0_in_the_first_format_borrows_of_the_next(tmp_path: Path, bits: int):
    # GPTQModel's `convert_gptq_v2_to_v1_format_module` takes one of each by a whole word's.
    weight = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    codes, scale, zero = round_groups(weight, bits, 32, has_zero=True)
    zero[0], zero[1], zero[7] = 0, 5, 0
    ones = np.uint32(0x11111111 if bits == 4 else 0x01010101)
    words = pack_words(zero.T, bits, axis=1).view(np.uint32) - ones
    tensors = {
        "qweight": pack_words(codes.T, bits, axis=0),
        "qzeros": words.view(np.int32),
        "scales": scale.T.astype(np.float16),
        "g_idx": (np.arange(64) // 32).astype(np.int32),
    }
    found = read_whole(tmp_path, tensors, Method(name="gptq", bits=bits, zero_offset=1))
    np.testing.assert_allclose(found, restore(codes, scale, zero, 32), rtol=1e-6)


def test_a_whole_matrix_may_have_one_zero(tmp_path: Path):
    codes = np.arange(-8, 8, dtype=np.int8).reshape(4, 4)
    tensors = {
        "weight": codes,
        "weight_scale": np.array([0.5], np.float32),
        "weight_zero_point": np.array([3], np.int8),
    }
    found = read_whole(tmp_path, tensors, Method(name="compressed-tensors", bits=8))
    np.testing.assert_array_equal(found, (codes.astype(np.float32) - 3) * 0.5)


@pytest.mark.parametrize("form", FORMS)
def test_each_format_is_the_numbers_that_it_stands_for(tmp_path: Path, form: str):
    weight = np.random.default_rng(0).normal(size=(48, 96)).astype(np.float32)
    packed, settings = FORMS[form].pack(weight), FORMS[form].settings
    method = Method(
        name=settings["quant_method"],
        bits=4,
        zero_offset=int(form.startswith("gptq") and form != "gptq-v2"),
        block=tuple(settings["weight_block_size"]) if form == "fp8-blocks" else None,
    )
    found = read_whole(tmp_path, packed.tensors, method)
    np.testing.assert_allclose(found, packed.numbers, rtol=1e-6, atol=1e-7)
    assert np.abs(found - weight).max() < 0.35


@pytest.mark.parametrize(
    ("form", "part", "shape"),
    [
        # Scales of blocks whose size config.json does not say, and those of three joined layers.
        ("fp8-channels", "weight_scale", (2, 3)),
        ("fp8-tensor", "weight_scale", (3,)),
        ("fp8-blocks", "weight_scale_inv", (3, 3)),
        ("int8", "weight_scale", (96, 1)),
        ("w4a16", "weight_packed", (24, 12)),
        ("w4a16", "weight_shape", (1,)),
        ("w4a16-zeros", "weight_zero_point", (6, 6)),
        ("awq", "qweight", (1, 96, 6)),
        ("gptq", "qweight", (12, 96)),
        ("gptq", "qzeros", (6, 6)),
    ],
)
def test_a_part_of_another_shape_is_named(
    tmp_path: Path, form: str, part: str, shape: tuple[int, ...]
):
    weight = np.random.default_rng(0).normal(size=(48, 96)).astype(np.float32)
    packed, settings = FORMS[form].pack(weight), FORMS[form].settings
    block = tuple(settings.get("weight_block_size", ())) or None
    method = Method(name=settings["quant_method"], bits=4, block=block)
    other = np.ones(shape, packed.tensors[part].dtype)
    named = part if part != "weight_shape" else "weight_packed"
    with pytest.raises(CheckpointError, match=rf"`layer\.{named}` "):
        read_whole(tmp_path, {**packed.tensors, part: other}, method)


def test_what_is_missing_is_named(tmp_path: Path):
    packed = pack_gptq(np.ones((8, 32), np.float32))
    del packed.tensors["scales"]
    with pytest.raises(CheckpointError, match=r"`layer` is quantised, and lacks its `scales`"):
        read_whole(tmp_path, packed.tensors, Method(name="gptq", bits=4))
