"""Quantised matrices of a checkpoint's files, found by names, and read as the tree keeps them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import jax.numpy as jnp
import numpy as np

from mmjax.config.engine_config import Quantization
from mmjax.errors import CheckpointError
from mmjax.layers.cpu.groups import GROUP_STEP, ORDER, SCALE, ZERO, Layout, pack_nibbles
from mmjax.weights.files.codes import Source, dequantize_on_host, read_whole
from mmjax.weights.files.method import Method
from mmjax.weights.files.safetensors import StoredTensor, View

_PARTS = frozenset(
    {
        *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        *("qweight", "qzeros", "scales", "g_idx"),
        *("weight", "weight_scale_inv"),
    }
)
"""Last parts of the names of a quantised matrix's tensors."""
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
    return dequantize_on_host(codes, source.read_scale(), zero, order)


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
    width = source.shape[1]
    size = -(-width // num_groups)
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
        shape = read_whole(parts["weight_shape"]) if "weight_shape" in parts else None
        if shape is None or len(parts["weight_packed"].shape) != 2:
            raise CheckpointError(
                f"`{name}.weight_packed` has no `weight_shape` of two sizes beside it, as "
                "compressed-tensors writes them; mmjax reads experts one by one"
            )
        rows, width = (int(size) for size in shape)
        columns = parts["weight_packed"].shape[1]
        bits = next((bits for bits in (4, 8) if columns == -(-width * bits // 32)), 0)
        return _check_bits(Source(name, parts, "pack", bits, (rows, width)))
    if "qweight" in parts:
        rows, columns = parts["qweight"].shape
        features = _of(name, parts, "scales").shape[-1]
        if method.name == "awq":
            bits = 32 * columns // features
            return _check_bits(Source(name, parts, "awq", bits, (features, rows)))
        bits = 32 * _of(name, parts, "qzeros").shape[-1] // features
        width = 32 * rows // max(1, bits)
        source = Source(name, parts, "gptq", bits, (features, width), method.zero_offset)
        return _check_bits(source)
    weight = parts.get("weight")
    is_scaled = "weight_scale" in parts or "weight_scale_inv" in parts
    if weight is None or not is_scaled or weight.dtype not in ("F8_E4M3", "I8"):
        return None
    kind = "float8" if weight.dtype == "F8_E4M3" else "int8"
    if len(weight.shape) != 2:
        raise CheckpointError(
            f"`{weight.name}` (in {weight.file}) has shape {weight.shape}; mmjax reads quantised "
            "matrices, and experts one by one"
        )
    rows, width = weight.shape
    return Source(name, parts, kind, 8, (rows, width), block=method.block)


def _of(name: str, parts: Mapping[str, StoredTensor], part: str) -> StoredTensor:
    if part not in parts:
        raise CheckpointError(f"`{name}` is quantised, and lacks its `{part}`")
    return parts[part]


def _check_bits(source: Source) -> Source:
    if source.bits not in (4, 8):
        raise CheckpointError(
            f"`{source.name}` has shapes that are neither of 4 nor of 8 bits: "
            + ", ".join(f"{part} {tensor.shape}" for part, tensor in source.tensors.items())
        )
    return source
