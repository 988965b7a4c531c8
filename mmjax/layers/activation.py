"""Activation functions by the names that config.json uses."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from mmjax.errors import CheckpointError

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
}


@cache
def get_activation(name: str) -> Callable[[Array], Array]:
    """Return HF's activation `name`; `CheckpointError` where mmjax does not have it.

    The same object each time: blocks that are alike must be equal to be traced once.
    """
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"activation `{name}` is unknown; known: {', '.join(_ACTIVATIONS)}")
    return partial(_in_float32, _ACTIVATIONS[name])


def _in_float32(activate: Callable[[Array], Array], x: Array) -> Array:
    """Round once, at the end: each operation in bfloat16 would round, and on CPUs take longer."""
    return activate(x.astype(jnp.float32)).astype(x.dtype)
