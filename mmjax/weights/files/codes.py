"""Matrices of quantised checkpoints as codes, scales and zeros, `[out, in]`, on the host. No jax.

compressed-tensors' `pack_quantized`, AutoAWQ's `gemm` and GPTQ's formats, as their libraries define
them; `tests/golden/quantized` has what these libraries make of a few numbers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.weights.files.safetensors import StoredTensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of the eight numbers of an int32 each output is."""


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors of one matrix in the files, and what the configuration says of them."""

    name: str
    """Without the last part, such as `model.layers.0.mlp.up_proj`."""
    tensors: dict[str, StoredTensor]
    """By the last part of their names."""
    kind: str
    """`pack`, `awq`, `gptq`, `int8` or `float8`."""
    bits: int
    shape: tuple[int, int]
    zero_offset: int = 0
    block: tuple[int, int] | None = None

    @property
    def has_zero(self) -> bool:
        """Whether groups have zeros of their own."""
        return "qzeros" in self.tensors or "weight_zero_point" in self.tensors

    def count_groups(self, scale_shape: tuple[int, ...]) -> int:
        """Return how many groups a row has, of the shape of the tensor of scales."""
        if self.kind in ("awq", "gptq"):
            return scale_shape[0]
        return scale_shape[1] if len(scale_shape) == 2 else 1

    def read_codes(self) -> np.ndarray:
        """Return the codes, uint8 `[out, in]` (of `float8`: that dtype), in the files' order."""
        if self.kind == "float8":
            return self._read("weight")
        if self.kind == "int8":
            return (self._read("weight").view(np.uint8)) ^ np.uint8(128)
        if self.kind == "pack":
            return unpack(self._read("weight_packed"), self.bits)[:, : self.shape[1]]
        packed = self._read("qweight")
        if self.kind == "awq":
            return np.ascontiguousarray(_order_awq(unpack(packed, self.bits)).T)
        return unpack(np.ascontiguousarray(packed.T), self.bits)

    def read_scale(self) -> np.ndarray:
        """Return the scale of each output and group, float32 `[out, groups]`."""
        tensor = self.find("scales", "weight_scale", "weight_scale_inv")
        scale = read_whole(tensor).astype(np.float32)
        features, width = self.shape
        if self.kind in ("awq", "gptq"):
            return np.ascontiguousarray(scale.T)
        if scale.size == 1:
            return np.full((features, 1), scale.reshape(-1)[0], np.float32)
        if self.block is not None and scale.ndim == 2:
            rows, columns = self.block
            if scale.shape == (-(-features // rows), -(-width // columns)):
                return np.repeat(scale, rows, axis=0)[:features]
        return scale.reshape(features, -1)

    def read_zero(self) -> np.ndarray | None:
        """Return the code that stands for zero, uint8 `[out, groups]`; None: the middle one."""
        if self.kind in ("awq", "gptq"):
            zero = unpack(self._read("qzeros"), self.bits)
            zero = (_order_awq(zero) if self.kind == "awq" else zero).T.astype(np.int32)
            zero = zero[: self.shape[0]] + self.zero_offset
        elif "weight_zero_point" not in self.tensors:
            return None
        elif self.kind == "pack":
            packed = self._read("weight_zero_point")
            if packed.dtype == np.int8:
                zero = packed.astype(np.int32) + 2 ** (self.bits - 1)
            else:
                zero = unpack(np.ascontiguousarray(packed.T), self.bits).T[: self.shape[0]]
        else:
            zero = self._read("weight_zero_point").astype(np.int32) + 128
        if zero.size and not 0 <= zero.min() <= zero.max() <= 255:
            raise CheckpointError(f"a zero of `{self.name}` is {zero.max()}, beyond 8 bits")
        return np.ascontiguousarray(zero, np.uint8).reshape(self.shape[0], -1)

    def read_order(self, num_groups: int) -> np.ndarray | None:
        """Return the inputs in the order of their groups, int32 `[in]`; None: they are in it."""
        tensor = self.tensors.get("g_idx", self.tensors.get("weight_g_idx"))
        if tensor is None:
            return None
        groups = read_whole(tensor).astype(np.int64)
        width = self.shape[1]
        expected = np.arange(width) // max(1, -(-width // num_groups))
        if np.array_equal(groups, expected):
            return None
        order = np.argsort(groups, kind="stable")
        if not np.array_equal(groups[order], expected):
            raise CheckpointError(
                f"`{tensor.name}` (in {tensor.file}) has groups of several sizes; expected "
                f"{num_groups} of one"
            )
        return order.astype(np.int32)

    def find(self, *names: str) -> StoredTensor:
        """Return the tensor of the first of the names that there is."""
        for name in names:
            if name in self.tensors:
                return self.tensors[name]
        raise CheckpointError(
            f"`{self.name}` is quantised, and lacks its `{names[0]}`: is the download complete?"
        )

    def _read(self, name: str) -> np.ndarray:
        return read_whole(self.find(name))


def read_whole(tensor: StoredTensor) -> np.ndarray:
    """Return all of a tensor."""
    return tensor.read((slice(None),) * len(tensor.shape))


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of int32 words `[..., n]`, uint8 `[..., n * 32 / bits]`, lowest first."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    halves = np.empty((*octets.shape, 2), np.uint8)
    np.bitwise_and(octets, 15, out=halves[..., 0])
    np.right_shift(octets, 4, out=halves[..., 1])
    return halves.reshape(*octets.shape[:-1], -1)


def _order_awq(codes: np.ndarray) -> np.ndarray:
    blocks = codes.reshape(*codes.shape[:-1], -1, len(_AWQ_ORDER))
    return blocks[..., _AWQ_ORDER].reshape(codes.shape)


def dequantize_on_host(
    codes: np.ndarray, scale: np.ndarray, zero: Any, order: np.ndarray | None
) -> np.ndarray:
    """Return float32 `[out, in]`, inputs in the files' order; `codes` are by `order`."""
    width, groups = codes.shape[1], scale.shape[1]
    size = -(-width // groups)

    def spread(array: np.ndarray) -> np.ndarray:
        return np.repeat(array.astype(np.float32), size, axis=1)[:, :width]

    numbers = codes.astype(np.float32)
    numbers -= spread(zero) if isinstance(zero, np.ndarray) else np.float32(zero)
    numbers *= spread(scale)
    if order is None:
        return numbers
    placed = np.empty_like(numbers)
    placed[:, order] = numbers
    return placed
