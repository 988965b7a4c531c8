"""Random parameters of the right shapes, for an engine whose weights come later."""

import zlib
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from jaxtyping import Array

from mmjax.layers.cpu.groups import ORDER, SCALE, ZERO
from mmjax.layers.module import Params, flatten_params, is_left_out, unflatten_params
from mmjax.weights.sharding import Device, param_sharding

_LARGEST = 1e-3
"""As vLLM's: small enough that nothing overflows in any dtype."""


def make_dummy_params(
    abstract_params: Params, *, mesh: Mesh | Device | None = None, left_out: Collection[str] = ()
) -> dict[Any, Any]:
    """Return random arrays of the tree's shapes and dtypes, sharded as `load_params` has them.

    They are drawn on the devices, by each parameter's name: always the same.
    """
    leaves = {}
    for name, leaf in flatten_params(abstract_params).items():
        if is_left_out(name, left_out):
            continue
        sharding = param_sharding(name, leaf.shape, mesh)
        draw = _make(_kind_of(name, leaf.dtype), tuple(leaf.shape), jnp.dtype(leaf.dtype), sharding)
        leaves[name] = draw(np.uint32(zlib.crc32(name.encode())))
    return unflatten_params(leaves)


def _kind_of(name: str, dtype: Any) -> str:
    for suffix in (SCALE, ZERO, ORDER):
        if name.endswith(suffix):
            return suffix
    return "float" if jnp.issubdtype(dtype, jnp.floating) else "code"


@cache
def _make(
    kind: str, shape: tuple[int, ...], dtype: Any, sharding: Sharding
) -> Callable[[np.uint32], Array]:
    """Return a jitted function of a seed that draws one parameter."""

    def draw(seed: Array) -> Array:
        key = jax.random.key(seed)
        if kind == ORDER:
            return jnp.broadcast_to(jnp.arange(shape[-1], dtype=dtype), shape)
        if kind == SCALE:
            return jnp.full(shape, _LARGEST / 128, dtype)
        if kind in (ZERO, "code"):
            return jax.random.bits(key, shape, jnp.uint8).astype(dtype)
        wide = jax.random.uniform(key, shape, jnp.float32, -_LARGEST, _LARGEST)
        return wide.astype(dtype)

    return jax.jit(draw, out_shardings=sharding)
