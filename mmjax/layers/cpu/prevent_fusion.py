"""Values that are computed once, where XLA's CPU compiler would compute them wherever used."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool


def prevent_fusion(compute: Callable[[Array], Any], x: Array, always: Bool[Array, ""]) -> Any:
    """Return `compute(x)`: on the CPU of a branch that is taken `always`, which XLA cannot know.

    Else it is fused into each of its uses, which costs time where there are many. A barrier does
    not hinder XLA there.
    """

    def never(x: Array) -> Any:
        return jax.tree.map(jnp.zeros_like, jax.eval_shape(compute, x))

    def on_cpu(x: Array, always: Array) -> Any:
        return jax.lax.cond(always, compute, never, x)

    return jax.lax.platform_dependent(x, always, cpu=on_cpu, default=lambda x, _: compute(x))
