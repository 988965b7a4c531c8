"""Quantised matrices of a checkpoint's files, found by names, and read as the tree keeps them.

Matrices of quantised checkpoints as codes, scales and zeros, `[out, in]`, on the host. No jax.

compressed-tensors' `pack_quantized`, AutoAWQ's `gemm` and GPTQ's formats, as their libraries define
them; `tests/golden/quantized` has what these libraries make of a few numbers.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from mmjax.config.engine_config import Quantization
from mmjax.errors import CheckpointError
from mmjax.layers.cpu.groups import GROUP_STEP, ORDER, SCALE, ZERO, Layout, pack_nibbles
from mmjax.weights.files.method import Method
from mmjax.weights.files.safetensors import FLOATS, StoredTensor, View

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

    def find_group_size(self, num_groups: int) -> int:
        """Return how many inputs a group has; the last one may have fewer."""
        size = -(-self.shape[1] // num_groups)
        if num_groups == 1 or self.block is None:
            return size
        # Blocks are of the configured size, whatever is left for the last.
        return self.block[1] if -(-self.shape[1] // self.block[1]) == num_groups else size

    def check(self, num_groups: int) -> None:
        """Raise CheckpointError for a tensor whose shape or dtype is not the format's.

        Of a scale for each group, output or block; one is for the whole matrix.
        """
        rows, width = self.shape
        words = -(-rows * self.bits // 32)
        each: list[tuple[int, ...]] = [(rows, num_groups)]
        each += [(rows,)] if num_groups == 1 else []
        scales = list(each)
        if self.block is not None:
            scales.append((-(-rows // self.block[0]), -(-width // self.block[1])))
        in_words = (-(-width * self.bits // 32), rows)
        expected: dict[str, tuple[Sequence[tuple[int, ...]], Collection[str]]] = {
            "weight_packed": ([in_words[::-1]], ("I32",)),
            "weight_scale": (scales, FLOATS),
            "weight_scale_inv": (scales, FLOATS),
            "weight_g_idx": ([(width,)], ("I32", "I64")),
            "g_idx": ([(width,)], ("I32", "I64")),
            "qweight": ([(width, words) if self.kind == "awq" else in_words], ("I32",)),
            "qzeros": ([(num_groups, words)], ("I32",)),
            "scales": ([(num_groups, rows)], FLOATS),
        }
        zero = self.tensors.get("weight_zero_point")
        if zero is not None:
            is_packed = self.kind == "pack" and zero.dtype != "I8"
            expected["weight_zero_point"] = (
                ([(words, num_groups)], ("I32",)) if is_packed else (each, ("I8",))
            )
        for part, tensor in self.tensors.items():
            shapes, dtypes = expected.get(part, ([tensor.shape], (tensor.dtype,)))
            is_one = part in _OF_GROUPS and num_groups == 1 and math.prod(tensor.shape) == 1
            if tensor.dtype in dtypes and (tensor.shape in shapes or is_one):
                continue
            raise CheckpointError(
                f"`{tensor.name}` (in {tensor.file}) is {tensor.dtype} of shape {tensor.shape}; "
                f"beside a matrix of {rows} outputs and {width} inputs expected "
                f"{' or '.join(dtypes)} of shape {' or '.join(map(str, shapes))}: is "
                "`quantization_config` of config.json this checkpoint's?"
            )

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
        scale = tensor.read().astype(np.float32)
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
            words = _add_to_each(self._read("qzeros"), self.zero_offset, self.bits)
            zero = unpack(words, self.bits)
            zero = (_order_awq(zero) if self.kind == "awq" else zero).T.astype(np.int32)
            zero = zero[: self.shape[0]]
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
        zero = np.ascontiguousarray(zero, np.uint8)
        if zero.size == 1:
            return np.full((self.shape[0], 1), zero.reshape(-1)[0], np.uint8)
        return zero.reshape(self.shape[0], -1)

    def read_order(self, num_groups: int) -> np.ndarray | None:
        """Return the inputs in the order of their groups, int32 `[in]`; None: they are in it."""
        tensor = self.tensors.get("g_idx", self.tensors.get("weight_g_idx"))
        if tensor is None:
            return None
        groups = tensor.read().astype(np.int64)
        if (groups < 0).any():
            return None  # compressed-tensors' for what no sample reached: never set
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
        return self.find(name).read()


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of int32 words `[..., n]`, uint8 `[..., n * 32 / bits]`, lowest first."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    halves = np.empty((*octets.shape, 2), np.uint8)
    np.bitwise_and(octets, 15, out=halves[..., 0])
    np.right_shift(octets, 4, out=halves[..., 1])
    return halves.reshape(*octets.shape[:-1], -1)


def _add_to_each(words: np.ndarray, offset: int, bits: int) -> np.ndarray:
    """Return int32 words with `offset` added to each number in them, carried as GPTQModel does.

    It subtracts from whole words as it writes GPTQ's first format: a number that was 0 borrows of
    the next.
    """
    each = offset * (0x11111111 if bits == 4 else 0x01010101)
    return (np.ascontiguousarray(words, "<i4").view(np.uint32) + np.uint32(each)).view(np.int32)


def _order_awq(codes: np.ndarray) -> np.ndarray:
    blocks = codes.reshape(*codes.shape[:-1], -1, len(_AWQ_ORDER))
    return blocks[..., _AWQ_ORDER].reshape(codes.shape)


def dequantize_on_host(
    codes: np.ndarray, scale: np.ndarray, zero: Any, order: np.ndarray | None, size: int
) -> np.ndarray:
    """Return float32 `[out, in]`, inputs in the files' order; `codes` are by `order`.

    `size`: inputs of a group, but for the last, which may have fewer.
    """
    width = codes.shape[1]

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


_PARTS = frozenset(
    {
        *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        *("qweight", "qzeros", "scales", "g_idx"),
        *("weight", "weight_scale_inv"),
    }
)
"""Last parts of the names of a quantised matrix's tensors."""
_OF_GROUPS = ("weight_scale", "weight_scale_inv", "weight_zero_point")
"""Those that may be one number for a whole matrix."""
_UNREAD = frozenset(
    {
        *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
        *("k_scale", "v_scale", "q_scale", "activation_scale"),
    }
)
"""The same of activations and of a quantised KV cache, which are no matter of the weights."""
_MIDDLES = {4: 8, 8: 128}
STORED = {"U8": np.uint8, "I8": np.int8, "I32": np.int32, "F8_E4M3": jnp.float8_e4m3fn}
"""Dtypes of the tree's arrays that are no floats of 16 bits on, in safetensors' notation."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensor:
    """A quantised matrix of the files."""

    source: Source
    layout: Layout
    """How it is kept in groups."""
    by_rows: Quantization | None
    """How a matrix of a linear layer is kept instead; None: in groups, too."""

    @property
    def name(self) -> str:
        """The name that the matrix would have if it were not quantised."""
        return f"{self.source.name}.weight"

    @property
    def file(self) -> str:
        """The file of its codes."""
        return next(iter(self.source.tensors.values())).file

    def as_parts(self, layout: Layout | None) -> dict[str, StoredTensor]:
        """Return the arrays that the tree has of it, by suffix, as if the file had them.

        `layout` None: those of `Int8Linear`.
        """
        if layout is None:
            scale = self._view(SCALE, (self.source.shape[0],), "F32", is_vector=True)
            return {"": self.source.find("weight"), SCALE: scale}
        stored = {np.dtype(dtype): name for name, dtype in STORED.items()}
        return {
            suffix: self._view(suffix, shape, stored.get(np.dtype(dtype), "F32"))
            for suffix, (shape, dtype) in layout.describe(self.source.shape).items()
        }

    def as_whole(self) -> StoredTensor:
        """Return the matrix as if the file had it in float32."""
        return self._view(None, self.source.shape, "F32")

    def _view(
        self, suffix: str | None, shape: tuple[int, ...], dtype: str, *, is_vector: bool = False
    ) -> StoredTensor:
        def read(*index: slice) -> np.ndarray:
            array = read_part(self, suffix)
            return array.reshape(-1)[index] if is_vector else array[index]

        return StoredTensor(self.name, self.file, shape, dtype, View(read))


@lru_cache(maxsize=1)
def read_part(tensor: PackedTensor, suffix: str | None) -> np.ndarray:
    """Return one array of `as_parts`; None: the one of `as_whole`.

    The last one is kept, since the parts of a fused matrix, or of several devices, follow.
    """
    source, layout = tensor.source, tensor.layout
    if suffix == SCALE:
        return source.read_scale()
    order = source.read_order(layout.num_groups(source.shape[1]))
    if suffix == ORDER:
        return np.arange(source.shape[1], dtype=np.int32) if order is None else order
    zero = source.read_zero()
    if suffix == ZERO:
        shape, _ = layout.describe(source.shape)[SCALE]
        return np.full(shape, _MIDDLES[source.bits], np.uint8) if zero is None else zero
    codes = source.read_codes()
    codes = codes if order is None else codes[:, order]
    if suffix is not None:
        return pack_nibbles(codes) if layout.code == "uint4" else codes
    if zero is None:
        zero = np.uint8(0 if source.kind == "float8" else _MIDDLES[source.bits])
    size = layout.group_size or source.shape[1]
    return dequantize_on_host(codes, source.read_scale(), zero, order, size)


def find_packed(
    tensors: Mapping[str, StoredTensor], method: Method | None
) -> tuple[list[StoredTensor], list[PackedTensor]]:
    """Return the plain tensors of the files, and the quantised matrices.

    CheckpointError for matrices that are not as the method has them.
    """
    if method is None:
        return list(tensors.values()), []
    groups: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors.values():
        name, _, last = tensor.name.rpartition(".")
        if last in _PARTS:
            groups.setdefault(name, {})[last] = tensor
    packed = [_read_packed(name, parts, method) for name, parts in groups.items()]
    found = [one for one in packed if one is not None]
    used = {tensor.name for one in found for tensor in one.source.tensors.values()}
    plain = [
        tensor
        for name, tensor in tensors.items()
        if name not in used and name.rpartition(".")[2] not in _UNREAD
    ]
    return plain, found


def _read_packed(name: str, parts: dict[str, StoredTensor], method: Method) -> PackedTensor | None:
    """Return the matrix of a name; None: it is not quantised."""
    source = _find_source(name, parts, method)
    if source is None:
        return None
    scale = source.find("scales", "weight_scale", "weight_scale_inv")
    num_groups = source.count_groups(scale.shape)
    source.check(num_groups)
    width = source.shape[1]
    size = source.find_group_size(num_groups)
    if num_groups > 1 and (size % GROUP_STEP or -(-width // size) != num_groups):
        raise CheckpointError(
            f"`{scale.name}` (in {scale.file}) has {num_groups} groups of {width} inputs; mmjax "
            f"reads groups of a multiple of {GROUP_STEP} inputs, or one of all"
        )
    layout = Layout(
        code="float8" if source.kind == "float8" else "uint4" if source.bits == 4 else "uint8",
        group_size=size if num_groups > 1 else 0,
        has_zero=source.has_zero,
        has_order=source.read_order(num_groups) is not None,
    )
    by_rows = None
    if source.kind == "int8" and num_groups == 1 and not source.has_zero:
        by_rows = "int8" if method.rounds_inputs else "int8-weights"
    return PackedTensor(source, layout, by_rows)


def _find_source(name: str, parts: dict[str, StoredTensor], method: Method) -> Source | None:
    if "weight_packed" in parts:
        stored = parts.get("weight_shape")
        if stored is None or stored.shape != (2,) or len(parts["weight_packed"].shape) != 2:
            raise CheckpointError(
                f"`{name}.weight_packed` has no `weight_shape` of two sizes beside it, as "
                "compressed-tensors writes them; mmjax reads experts one by one"
            )
        rows, width = (int(size) for size in stored.read())
        columns = parts["weight_packed"].shape[1]
        bits = next((bits for bits in (4, 8) if columns == -(-width * bits // 32)), 0)
        return _check_bits(Source(name, parts, "pack", bits, (rows, width)))
    if "qweight" in parts:
        rows, columns = _sizes(_of(name, parts, "qweight"))
        _, features = _sizes(_of(name, parts, "scales"))
        if method.name == "awq":
            bits = 32 * columns // max(1, features)
            return _check_bits(Source(name, parts, "awq", bits, (features, rows)))
        bits = 32 * _sizes(_of(name, parts, "qzeros"))[1] // max(1, features)
        width = 32 * rows // max(1, bits)
        source = Source(name, parts, "gptq", bits, (features, width), method.zero_offset)
        return _check_bits(source)
    weight = parts.get("weight")
    is_scaled = "weight_scale" in parts or "weight_scale_inv" in parts
    if weight is None or not is_scaled or weight.dtype not in ("F8_E4M3", "I8"):
        return None
    kind = "float8" if weight.dtype == "F8_E4M3" else "int8"
    return Source(name, parts, kind, 8, _sizes(weight), block=method.block)


def _of(name: str, parts: Mapping[str, StoredTensor], part: str) -> StoredTensor:
    if part not in parts:
        raise CheckpointError(f"`{name}` is quantised, and lacks its `{part}`")
    return parts[part]


def _sizes(tensor: StoredTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise CheckpointError(
            f"`{tensor.name}` (in {tensor.file}) has shape {tensor.shape}; mmjax reads quantised "
            "matrices, and experts one by one"
        )
    return tensor.shape[0], tensor.shape[1]


def _check_bits(source: Source) -> Source:
    if source.bits not in (4, 8):
        raise CheckpointError(
            f"`{source.name}` has shapes that are neither of 4 nor of 8 bits: "
            + ", ".join(f"{part} {tensor.shape}" for part, tensor in source.tensors.items())
        )
    return source
