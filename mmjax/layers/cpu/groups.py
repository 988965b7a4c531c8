"""Weights in groups of inputs, in 4 or 8 bits: what they stand for, and products with them.

A number is `(code - zero) * scale`, with a scale, and maybe a zero, of each output and group.
"""

from dataclasses import dataclass
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from mmjax.layers.cpu.dispatch import by_platform
from mmjax.layers.cpu.product import MAX_FEW_ROWS, MIN_WEIGHT_SIZE, product, takes_rows
from mmjax.layers.gpu.capability import widens_float8
from mmjax.layers.gpu.nibbles import MIDDLE, PACK, nibble_product, takes
from mmjax.rounding import cdiv

Code = Literal["uint4", "uint8", "float8"]

GROUP_STEP = 32
"""Groups are of a multiple of it, unless a row is one group: what kernels read at a time."""
_MIDDLES = MappingProxyType({"uint4": MIDDLE, "uint8": 128})
"""The zero of codes without zeros of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one matrix's numbers are kept."""

    code: Code
    """uint4 and uint8: integers; float8: `float8_e4m3fn`, as they are."""
    group_size: int
    """Inputs of a group; 0: a row is one."""
    scale_dtype: Literal["float32", "bfloat16"] = "float32"
    has_zero: bool = False
    """Whether groups have zeros of their own; else the middle code is zero."""
    has_order: bool = False
    """Whether inputs are permuted before they are multiplied (GPTQ's activation order)."""

    def num_groups(self, width: int) -> int:
        """Return how many groups a row of `width` inputs has."""
        return cdiv(width, self.group_size or width)

    def describe(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return `{suffix of a parameter's name: its shape and dtype}` of weights `[..., F, D]`."""
        *lead, width = shape
        row = cdiv(width, PACK) * PACK // 2 if self.code == "uint4" else width
        groups = self.num_groups(width)
        code_dtype = jnp.float8_e4m3fn if self.code == "float8" else jnp.uint8
        arrays: dict[str, tuple[tuple[int, ...], Any]] = {
            "": ((*lead, row), code_dtype),
            SCALE: ((*lead, groups), jnp.dtype(self.scale_dtype)),
        }
        if self.has_zero:
            arrays[ZERO] = ((*lead, groups), jnp.uint8)
        if self.has_order:
            arrays[ORDER] = ((*lead[:-1], width), jnp.int32)
        return arrays


SCALE, ZERO, ORDER = "_scale", "_zero", "_order"
"""What the names of further arrays have behind the name of the codes'."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scale", "zero", "order"),
    meta_fields=("layout",),
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """One matrix, or one for each expert: the arrays of `Layout.describe`.

    JAX makes it of what stands for arrays, too, so that fields have no types of arrays.
    """

    layout: Layout
    codes: Any
    """[..., F, bytes of a row]"""
    scale: Any
    """[..., F, G]"""
    zero: Any = None
    """uint8[..., F, G]; None: the middle code."""
    order: Any = None
    """int32[..., D]; None: inputs are in the order of their groups."""


def set_grouped(module: nnx.Module, name: str, layout: Layout, shape: tuple[int, ...]) -> None:
    """Set the parameters of weights `[..., F, D]` in groups, named by `name` and a suffix."""
    for suffix, (own_shape, dtype) in layout.describe(shape).items():
        setattr(module, name + suffix, nnx.Param(jnp.zeros(own_shape, dtype)))


def find_grouped(module: nnx.Module, name: str, layout: Layout) -> Grouped:
    """Return the arrays of the parameters that `set_grouped` set."""

    def find(suffix: str) -> Array:
        return getattr(module, name + suffix)[...]

    return Grouped(
        layout=layout,
        codes=find(""),
        scale=find(SCALE),
        zero=find(ZERO) if layout.has_zero else None,
        order=find(ORDER) if layout.has_order else None,
    )


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Return codes of 4 bits, uint8 `[..., D]`, as `Grouped.codes` has them."""
    padding = -codes.shape[-1] % PACK
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, padding)])
    blocks = padded.reshape(*codes.shape[:-1], -1, 2, PACK // 2)
    packed = blocks[..., 0, :] | (blocks[..., 1, :] << 4)
    return packed.reshape(*codes.shape[:-1], -1)


def dequantize(weight: Grouped, width: int, dtype: Any) -> Float[Array, "*lead F D"]:
    """Return the numbers that `weight` stands for; inputs stay as its order has them."""
    layout, codes = weight.layout, weight.codes
    if layout.code == "uint4":
        blocks = codes.reshape(*codes.shape[:-1], -1, PACK // 2)
        halves = jnp.stack([blocks & 15, blocks >> 4], axis=-2)
        codes = halves.reshape(*codes.shape[:-1], -1)[..., :width]
    numbers = codes.astype(jnp.float32)

    def spread(array: Array) -> Array:
        size = layout.group_size
        return jnp.repeat(array, size, axis=-1)[..., :width] if array.shape[-1] > 1 else array

    if weight.zero is not None:
        numbers = numbers - spread(weight.zero.astype(jnp.float32))
    elif layout.code in _MIDDLES:
        numbers = numbers - _MIDDLES[layout.code]
    return (numbers * spread(weight.scale.astype(jnp.float32))).astype(dtype)


def grouped_product(x: Float[Array, "T D"], weight: Grouped) -> Float[Array, "T F"]:
    """Return `x @ weight.T` in float32, without making the whole matrix where rows are few."""
    if weight.order is not None:
        x = x[:, weight.order]
    forms: dict[str, Any] = {"cpu": _by_xla, "default": _by_xla, "tpu": _on_tpu}
    kernel = _by_xla
    is_large = weight.codes.shape[0] * x.shape[1] >= MIN_WEIGHT_SIZE
    if is_large and takes_rows(x) and has_expert_kernel(x):
        kernel = _by_kernel
    if kernel is _by_kernel and x.shape[0] <= MAX_FEW_ROWS:
        if takes(x, weight.layout.code):
            forms["gpu"] = _by_triton
        elif _can_sum_groups(x, weight):
            forms["gpu"] = _by_group_sums
    return by_platform(x, weight, kernel=kernel, **forms)


def has_expert_kernel(x: Any) -> bool:
    """Return whether `expert_product` takes such inputs, where the platform has kernels."""
    return x.dtype in (jnp.float32, jnp.bfloat16)


def expert_product(
    x: Float[Array, "R D"], weight: Grouped, sizes: Int32[Array, " E"]
) -> Float[Array, "R F"]:
    """Return `x @ weight[e].T` in float32, by a kernel: rows stand by e, `sizes` rows of each."""
    rows = order_rows(x, weight, sizes)
    return _call("groups", rows, weight, sizes, few_rows=np.int64(MAX_FEW_ROWS))


def order_rows(
    x: Float[Array, "R D"], weight: Grouped, sizes: Int32[Array, " E"]
) -> Float[Array, "R D"]:
    """Return rows that stand by expert as each one's expert reads them."""
    if weight.order is None:
        return x
    orders = jnp.repeat(weight.order, sizes, axis=0, total_repeat_length=len(x))
    return jnp.take_along_axis(x, orders, axis=1)


def _by_xla(x: Array, weight: Grouped) -> Array:
    whole = dequantize(weight, x.shape[1], x.dtype)
    return product(x, whole, jnp.dtype(jnp.float32))


def _on_tpu(x: Array, weight: Grouped) -> Array:
    float32 = jnp.dtype(jnp.float32)
    return reduce(jnp.add, [product(*part, float32) for part in split_inputs(x, weight)])


def split_inputs(
    x: Float[Array, "R D"], weight: Grouped
) -> list[tuple[Float[Array, "R _part"], Float[Array, "*lead F _part"]]]:
    """Return parts of the inputs with their weights' numbers, whose products are to be added.

    For one TPU, where a number that changes its place in a row copies the matrix, in float32:
    inputs move in place of codes, and scales spread over their groups as products, which XLA
    computes as it reads codes.
    """
    layout, codes = weight.layout, weight.codes
    if not jax.typeof(codes).sharding.mesh.empty:
        # Devices that share the inputs would send each other their groups' scales.
        return [(x, dequantize(weight, x.shape[1], x.dtype))]
    size = layout.group_size or x.shape[1]
    places = jnp.arange(codes.shape[-1], dtype=jnp.int32)
    if layout.code == "uint4":
        half = PACK // 2
        padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % PACK)))
        halves = padded.reshape(len(x), -1, 2, half)
        first = places // half * PACK + places % half
        inputs = [halves[:, :, number].reshape(len(x), -1) for number in (0, 1)]
        parts = zip(inputs, (codes & 15, codes >> 4), (first, first + half), strict=True)
    else:
        parts = zip((x,), (codes,), (places,), strict=True)
    split = []
    for part, part_codes, part_places in parts:
        groups = part_places // size
        numbers = part_codes.astype(jnp.float32)
        if weight.zero is not None:
            numbers = numbers - _spread(weight.zero, groups).astype(jnp.float32)
        elif layout.code in _MIDDLES:
            numbers = numbers - _MIDDLES[layout.code]
        split.append(
            (part, (numbers * _spread(weight.scale, groups).astype(jnp.float32)).astype(x.dtype))
        )
    return split


def _spread(array: Array, groups: Int32[Array, " _part"]) -> Float[Array, "*lead F _parts"]:
    """Return each input's number of `array`, exactly, by a product with ones and zeros."""
    if array.shape[-1] == 1:
        return array.astype(jnp.float32)
    terms = [array.astype(jnp.bfloat16)]
    if array.dtype == jnp.float32:
        # Three times 8 bits of 24, cut off and not rounded: sums of terms of one sign are exact in
        # whatever order a device adds them.
        terms, rest = [], array
        for _ in range(3):
            bits = jax.lax.bitcast_convert_type(rest, jnp.uint32) & np.uint32(0xFFFF0000)
            term = jax.lax.bitcast_convert_type(bits, jnp.float32)
            terms.append(term.astype(jnp.bfloat16))
            rest = rest - term
    is_of_group = jnp.arange(array.shape[-1], dtype=jnp.int32)[:, None] == groups[None, :]
    ones = jnp.concatenate([is_of_group.astype(jnp.bfloat16)] * len(terms))
    numbers, contracted = jnp.concatenate(terms, axis=-1), (((array.ndim - 1,), (0,)), ((), ()))
    dtype = jnp.float32 if len(terms) > 1 else jnp.bfloat16
    return jax.lax.dot_general(numbers, ones, contracted, preferred_element_type=dtype)


def _by_triton(x: Array, weight: Grouped) -> Array:
    arrays = (weight.codes, weight.scale, weight.zero)
    return nibble_product(x, *arrays, group_size=weight.layout.group_size)


def _can_sum_groups(x: Array, weight: Grouped) -> bool:
    """Return whether `_by_group_sums` takes these, and reads codes of 8 bits as they are."""
    layout, width = weight.layout, x.shape[1]
    is_even = width % (layout.group_size or width) == 0
    is_read = layout.code == "uint8" or (layout.code == "float8" and widens_float8())
    return is_read and is_even and weight.zero is None


def _by_group_sums(x: Array, weight: Grouped) -> Array:
    """Scale each group's sums, and not its weights: XLA for GPUs widens codes within the product.

    Scaled weights it writes in 16 bits first: five bytes written and read of each code.
    """
    codes, scale = weight.codes, weight.scale.astype(jnp.float32)
    if weight.layout.code == "uint8":
        # It widens signed numbers alone. The difference wraps around: 128 stands for 0.
        codes = jax.lax.bitcast_convert_type(codes, jnp.int8) - jnp.int8(-128)
    groups = scale.shape[1]
    rows, weights = (one.reshape(len(one), groups, -1) for one in (x, codes.astype(x.dtype)))
    dimensions = (((2,), (2,)), ((1,), (1,)))
    sums = jax.lax.dot_general(rows, weights, dimensions, preferred_element_type=jnp.float32)
    return (sums * scale.T[:, None]).sum(0)


def _by_kernel(x: Array, weight: Grouped) -> Array:
    """Multiply in C++: a row has the same bits beside any others, and beside none."""
    return _call("product", x, weight, few_rows=np.int64(MAX_FEW_ROWS))


def _call(kind: str, x: Array, weight: Grouped, *sizes: Array, **options: np.int64) -> Array:
    layout, shape = weight.layout, (x.shape[0], weight.codes.shape[-2])
    call = jax.ffi.ffi_call(
        f"mmjax_{kind}_{x.dtype.name}_{layout.code}", jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    zero = jnp.zeros(0, jnp.uint8) if weight.zero is None else weight.zero
    size = np.int64(layout.group_size or x.shape[1])
    return call(x, weight.codes, weight.scale, zero, *sizes, group_size=size, **options)
