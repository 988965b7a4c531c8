"""Matrices as quantised checkpoints have them, written from the formats' definitions.

Each packer returns the tensors of a matrix by the last part of their names, and the float32 numbers
that they stand for.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output has bits 4 * i of a word."""
FLOAT8_MAX = 448


class Packed(NamedTuple):
    """A matrix, `[out, in]`."""

    tensors: dict[str, np.ndarray]
    numbers: np.ndarray


def pack_words(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Return unsigned codes in int32 words along an axis, the first in the lowest bits."""
    codes = np.moveaxis(codes.astype(np.uint32), axis, -1)
    per_word = 32 // bits
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per_word)])
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // per_word), np.uint32)
    for place in range(per_word):
        words |= codes[..., place::per_word] << np.uint32(bits * place)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def round_groups(
    weight: np.ndarray, bits: int, size: int, *, has_zero: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return unsigned codes `[out, in]`, and scales and zeros `[out, groups]`."""
    groups = weight.reshape(len(weight), -1, size).astype(np.float32)
    top = 2**bits - 1
    if has_zero:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = np.maximum((high - low) / top, 1e-4).astype(np.float16).astype(np.float32)
        zero = np.clip(np.rint(-low / scale), 1, top)
    else:
        scale = np.maximum(np.abs(groups).max(-1) / (top // 2), 1e-4)
        scale = scale.astype(np.float16).astype(np.float32)
        zero = np.full_like(scale, 2 ** (bits - 1))
    codes = np.clip(np.rint(groups / scale[..., None]) + zero[..., None], 0, top)
    return codes.reshape(weight.shape).astype(np.uint8), scale, zero.astype(np.uint8)


def restore(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, size: int) -> np.ndarray:
    wide = [np.repeat(one.astype(np.float32), size, axis=1) for one in (scale, zero)]
    return (codes.astype(np.float32) - wide[1]) * wide[0]


def group_of(width: int, size: int) -> int:
    """Return `size`, or all of a row that has no whole groups of it."""
    return size if width % size == 0 else width


def shuffled_groups(width: int, size: int) -> np.ndarray:
    """Return the group of each input, as a quantiser that goes by activations leaves them."""
    return np.random.default_rng(width).permutation(np.arange(width) // size)


def pack_compressed(
    weight: np.ndarray, *, bits: int = 4, size: int = 32, has_zero: bool = False, act: bool = False
) -> Packed:
    """`pack-quantized` of compressed-tensors."""
    size = group_of(weight.shape[1], size)
    g_idx = shuffled_groups(weight.shape[1], size) if act else None
    order = slice(None) if g_idx is None else np.argsort(g_idx, kind="stable")
    codes, scale, zero = round_groups(weight[:, order], bits, size, has_zero=has_zero)
    numbers, placed = np.empty_like(weight, np.float32), np.empty_like(codes)
    numbers[:, order], placed[:, order] = restore(codes, scale, zero, size), codes
    tensors = {
        "weight_packed": pack_words(placed, bits, axis=1),
        "weight_scale": scale.astype(ml_dtypes.bfloat16),
        "weight_shape": np.asarray(weight.shape, np.int64),
    }
    # Scales in the file are bfloat16.
    rounded = tensors["weight_scale"].astype(np.float32)
    numbers[:, order] = restore(codes, rounded, zero, size)
    if has_zero:
        tensors["weight_zero_point"] = pack_words(zero, bits, axis=0)
    if g_idx is not None:
        tensors["weight_g_idx"] = g_idx.astype(np.int32)
    return Packed(tensors, numbers)


def pack_awq(weight: np.ndarray, *, size: int = 32) -> Packed:
    """AutoAWQ's `gemm`."""
    size = group_of(weight.shape[1], size)
    codes, scale, zero = round_groups(weight, 4, size, has_zero=True)

    def pack(array: np.ndarray) -> np.ndarray:
        blocks = array.T.reshape(array.shape[1], -1, 8)[..., AWQ_ORDER]
        return pack_words(blocks.reshape(array.shape[::-1]), 4, axis=1)

    tensors = {"qweight": pack(codes), "qzeros": pack(zero), "scales": scale.T.astype(np.float16)}
    return Packed(tensors, restore(codes, scale, zero, size))


def pack_gptq(
    weight: np.ndarray, *, bits: int = 4, size: int = 32, act: bool = False, v2: bool = False
) -> Packed:
    """GPTQ's two formats; the first has zeros less one."""
    size = group_of(weight.shape[1], size)
    width = weight.shape[1]
    g_idx = shuffled_groups(width, size) if act else np.arange(width) // size
    order = np.argsort(g_idx, kind="stable")
    codes, scale, zero = round_groups(weight[:, order], bits, size, has_zero=True)
    placed, numbers = np.empty_like(codes), np.empty_like(weight, np.float32)
    placed[:, order], numbers[:, order] = codes, restore(codes, scale, zero, size)
    tensors = {
        "qweight": pack_words(placed.T, bits, axis=0),
        "qzeros": pack_words((zero if v2 else zero - 1).T, bits, axis=1),
        "scales": scale.T.astype(np.float16),
        "g_idx": g_idx.astype(np.int32),
    }
    return Packed(tensors, numbers)


def pack_float8(weight: np.ndarray, *, block: int | None = None, per: str = "channel") -> Packed:
    """FP8 with a scale of each block, output (`channel`) or matrix (`tensor`)."""
    rows, width = weight.shape
    tall, wide = (block, block) if block else (1 if per == "channel" else rows, width)
    padded = np.pad(weight, ((0, -rows % tall), (0, -width % wide)))
    blocks = padded.reshape(len(padded) // tall, tall, -1, wide)
    scale = np.maximum(np.abs(blocks).max((1, 3)) / FLOAT8_MAX, 1e-8).astype(np.float32)
    spread = np.repeat(np.repeat(scale, tall, axis=0), wide, axis=1)[:rows, :width]
    codes = (weight / spread).astype(ml_dtypes.float8_e4m3fn)
    name = "weight_scale_inv" if block else "weight_scale"
    tensors = {"weight": codes, name: scale.reshape(1) if per == "tensor" else scale}
    return Packed(tensors, codes.astype(np.float32) * spread)


def pack_int8(weight: np.ndarray) -> Packed:
    """`int-quantized` of compressed-tensors: a scale for each output."""
    scale = np.maximum(np.abs(weight).max(1, keepdims=True) / 127, 1e-8).astype(np.float32)
    codes = np.rint(weight / scale).astype(np.int8)
    return Packed({"weight": codes, "weight_scale": scale}, codes * scale)


def compressed_config(kind: str, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    """Return `quantization_config` as compressed-tensors writes it."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, **group}}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": groups,
        "ignore": ["lm_head", "re:.*vision.*"],
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
BLOCK = 32


class Form(NamedTuple):
    """One way in which a checkpoint is published."""

    pack: Callable[[np.ndarray], Packed]
    settings: dict[str, Any]
    """`quantization_config`."""

    def can_pack(self, shape: tuple[int, ...]) -> bool:
        """Return whether it has matrices of a shape: words of 32 bits hold up to eight numbers."""
        is_word = self.settings["quant_method"] in ("awq", "gptq")
        return not is_word or all(size % 8 == 0 for size in shape)


FORMS: dict[str, Form] = {
    "w4a16": Form(pack_compressed, compressed_config("pack-quantized", INT4)),
    "w4a16-zeros": Form(
        lambda weight: pack_compressed(weight, has_zero=True),
        compressed_config("pack-quantized", {**INT4, "symmetric": False}),
    ),
    "w4a16-actorder": Form(
        lambda weight: pack_compressed(weight, act=True),
        compressed_config("pack-quantized", {**INT4, "actorder": "group"}),
    ),
    "w8a16": Form(
        lambda weight: pack_compressed(weight, bits=8, size=10**6),
        compressed_config("pack-quantized", INT8),
    ),
    "awq": Form(pack_awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "gptq": Form(pack_gptq, GPTQ),
    "gptq-actorder": Form(lambda weight: pack_gptq(weight, act=True), {**GPTQ, "desc_act": True}),
    "gptq-v2": Form(
        lambda weight: pack_gptq(weight, v2=True), {**GPTQ, "checkpoint_format": "gptq_v2"}
    ),
    "gptq-8": Form(lambda weight: pack_gptq(weight, bits=8), {**GPTQ, "bits": 8}),
    "fp8-channels": Form(pack_float8, compressed_config("float-quantized", FLOAT8)),
    "fp8-tensor": Form(
        lambda weight: pack_float8(weight, per="tensor"),
        compressed_config("float-quantized", {**FLOAT8, "strategy": "tensor"}),
    ),
    "fp8-blocks": Form(
        lambda weight: pack_float8(weight, block=BLOCK),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    ),
    "int8": Form(pack_int8, compressed_config("int-quantized", INT8)),
}
"""Those whose inputs stay floats."""
W8A8 = Form(pack_int8, compressed_config("int-quantized", INT8, input_activations=DYNAMIC))
