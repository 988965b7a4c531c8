"""Keep XLA's CPU compiler from fusing a computation into each of its uses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool


def prevent_fusion(compute: Callable[[Array], Any], x: Array, always: Bool[Array, ""]) -> Any:
    """Return `compute(x)`, computed once: on the CPU in a branch that is `always` taken.

    XLA cannot know that it is. Fused into each of its uses, `compute` would take more time.
    `optimization_barrier` does not prevent that on the CPU.
    """

    def never(x: Array) -> Any:
        return jax.tree.map(jnp.zeros_like, jax.eval_shape(compute, x))

    def on_cpu(x: Array, always: Array) -> Any:
        return jax.lax.cond(always, compute, never, x)

    return jax.lax.platform_dependent(x, always, cpu=on_cpu, default=lambda x, _: compute(x))
