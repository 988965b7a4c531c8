"""How arrays of bfloat16 that are written in parts are kept on the CPU: as integers.

XLA's CPU backend writes parts of integers in place, and of bfloat16 not: it converts the whole
array to float32 and back, which for a KV cache takes most of a step.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

_BITS = jnp.dtype(jnp.uint16)


def storage_dtype(dtype: Any, platform: str) -> Any:
    """Return the dtype of an array that keeps numbers of `dtype`."""
    return _BITS if platform == "cpu" and dtype == jnp.bfloat16 else dtype


def to_storage(x: Float[Array, "*shape"], dtype: Any) -> Shaped[Array, "*shape"]:
    """Return `x` as an array of `storage_dtype` keeps it."""
    if dtype != _BITS:
        return x.astype(dtype)
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), _BITS)


def from_storage(stored: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Undo `to_storage`, of what was read: a bitcast of a whole array is a copy."""
    if stored.dtype != _BITS:
        return stored
    return jax.lax.bitcast_convert_type(stored, jnp.bfloat16)
