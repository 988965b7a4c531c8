"""Products of few rows, `x @ weight.T`: by a kernel in C++ on one CPU, by XLA elsewhere.

A primitive of JAX, since only lowering knows the platform and over how many devices a program
runs. XLA does not know how to divide a kernel among devices.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Shaped

from mmjax.layers.cpu.library import find_kernels, target

MAX_FEW_ROWS = 16
"""Rows of a decode step on the CPU up to which reading weights takes most of the time."""
_SUMS = {
    ("float32", "float32"): ("float32", jnp.float32),
    ("bfloat16", "bfloat16"): ("bfloat16", jnp.float32),
    ("float32", "int8"): ("float32_int8", jnp.float32),
    ("bfloat16", "int8"): ("bfloat16_int8", jnp.float32),
    ("int8", "int8"): ("int8", jnp.int32),
}
"""Of the dtypes of `x` and `weight`: the kernel, and the dtype of its sums."""

Form = Callable[..., Array]
"""One way to compute `x @ weight.T`, called with `x`, `weight` and the result's `dtype`: a function
of a module, since JAX keeps programs by it."""

_product_p = Primitive("few_rows_product")


def takes(x: Any, weight: Any) -> bool:
    """Return whether a kernel multiplies these, where the platform has one."""
    is_few = 0 < x.shape[0] <= MAX_FEW_ROWS
    return is_few and (x.dtype.name, weight.dtype.name) in _SUMS


@partial(jax.jit, static_argnames=("dtype", "on_cpu", "elsewhere"))
def multiply_few(
    x: Shaped[Array, "T D"],
    weight: Shaped[Array, "F D"],
    *,
    dtype: Any,
    on_cpu: Form,
    elsewhere: Form,
) -> Shaped[Array, "T F"]:
    """Return `x @ weight.T` by the kernel; by `on_cpu` on CPUs that have none, or several devices.

    A row has the same bits beside any others, and differs from XLA's in the order of its sums.
    """
    return _product_p.bind(x, weight, dtype=dtype, on_cpu=on_cpu, elsewhere=elsewhere)


def _by_kernel(x: Array, weight: Array, dtype: Any) -> Array:
    name, sums = _SUMS[x.dtype.name, weight.dtype.name]
    shape = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), sums)
    return jax.ffi.ffi_call(target(name), shape)(x, weight).astype(dtype)


def _abstract(x: Any, weight: Any, *, dtype: Any, **_: Any) -> Any:
    return ShapedArray((x.shape[0], weight.shape[0]), jnp.dtype(dtype))


def _lower(form: Form, ctx: Any, x: Any, weight: Any, dtype: Any) -> Any:
    return mlir.lower_fun(partial(form, dtype=dtype), multiple_results=False)(ctx, x, weight)


def _lower_elsewhere(
    ctx: Any, x: Any, weight: Any, *, dtype: Any, elsewhere: Form, **_: Any
) -> Any:
    return _lower(elsewhere, ctx, x, weight, dtype)


def _lower_for_cpu(ctx: Any, x: Any, weight: Any, *, dtype: Any, on_cpu: Form, **_: Any) -> Any:
    num_devices = getattr(ctx.module_context.axis_context, "num_devices", None)
    has_kernel = num_devices == 1 and find_kernels() is not None
    return _lower(_by_kernel if has_kernel else on_cpu, ctx, x, weight, dtype)


def _batch(arrays: Any, axes: Any, *, dtype: Any, elsewhere: Form, **_: Any) -> Any:
    return jax.vmap(partial(elsewhere, dtype=dtype), axes)(*arrays), 0


def _differentiate(primals: Any, tangents: Any, *, dtype: Any, elsewhere: Form, **_: Any) -> Any:
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(partial(elsewhere, dtype=dtype), primals, tangents)


_product_p.def_abstract_eval(_abstract)
batching.primitive_batchers[_product_p] = _batch
ad.primitive_jvps[_product_p] = _differentiate
mlir.register_lowering(_product_p, _lower_elsewhere)
mlir.register_lowering(_product_p, _lower_for_cpu, platform="cpu")
