"""Kernels over rows of hidden states: each is one call, where XLA has a loop for each reduction."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mmjax.layers.cpu.dispatch import Form, by_platform

_DTYPES = (jnp.float32, jnp.bfloat16)


def norm_rows(
    x: Float[Array, "... D"],
    weight: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    default: Form,
    *,
    eps: float,
    offset: float = 0.0,
    centres: bool = False,
    rounds_first: bool = False,
) -> Float[Array, "... D"]:
    """Return `x / rms(x) * (offset + weight) + bias` of the last axis, as `default` does.

    `centres`: the mean is taken off first. `rounds_first`: to the dtype of `x`, before the product
    with the weight as well as behind it.
    """
    parts = [weight] if bias is None else [weight, bias]
    if x.dtype not in _DTYPES or any(part.dtype != x.dtype for part in parts):
        return default(x, *parts)
    options = {"epsilon": np.float32(eps), "offset": np.float32(offset)}
    kernel = partial(_norm, centres=centres, rounds_first=rounds_first, **options)
    return by_platform(x, *parts, kernel=kernel, cpu=default, default=default)


def _norm(
    x: Array, weight: Array, bias: Array | None = None, **options: np.generic | bool
) -> Array:
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    bias = jnp.zeros(0, x.dtype) if bias is None else bias
    return jax.ffi.ffi_call(f"mmjax_norm_{x.dtype.name}", out)(x, weight, bias, **options)


def rotate_rows(
    x: Float[Array, "T N H"],
    cos: Float[Array, "T P"],
    sin: Float[Array, "T P"],
    default: Form,
) -> Float[Array, "T N H"]:
    """Return `apply_rotary(x, cos, sin)`, by `default` where is no kernel."""
    if x.dtype not in _DTYPES or cos.dtype != jnp.float32:
        return default(x, cos, sin)
    return by_platform(x, cos, sin, kernel=_rotate, cpu=default, default=default)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call(f"mmjax_rotation_{x.dtype.name}", out)(x, cos, sin)
