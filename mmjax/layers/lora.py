"""Low-rank adapters beside layers (LoRA, arXiv 2106.09685), several in one batch.

An adapter has a slot. Which slot each row has is data, so that no adapter needs a compilation.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmjax.layers.cpu.product import product


class LoRA(nnx.Module):
    """What the adapters of all slots add to a linear layer: `x @ a.T @ b.T + bias`, by each row.

    `b` is `[out, slots, rank]`, so that both products are of one matrix `[out, in]`, as it lies.
    """

    def __init__(
        self, in_features: int, out_features: int, *, num_slots: int, rank: int, dtype: Any
    ) -> None:
        self.a = nnx.Param(jnp.zeros((num_slots, rank, in_features), dtype))
        self.b = nnx.Param(jnp.zeros((out_features, num_slots, rank), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features, num_slots), dtype))
        self.slots = nnx.Param(jnp.zeros((), jnp.int32))
        """int32[rows]: bound anew by each call."""

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
        """Return what is added to the layer's output, in the dtype of `x`.

        Every row is multiplied with all slots' matrices, and keeps its own slot's: so few numbers
        are cheaper to compute than to sort.
        """
        a, b = self.a[...], self.b[...]
        flat = x.reshape(-1, x.shape[-1]).astype(a.dtype)
        is_own = find_own(self.slots[...], len(flat), a.shape[0])
        shrunk = product(flat, a.reshape(-1, a.shape[-1])).reshape(len(flat), *a.shape[:2])
        out = _expand(shrunk, b, is_own) + product(is_own.astype(a.dtype), self.bias[...])
        return out.astype(x.dtype).reshape(*x.shape[:-1], len(b))


class EmbedLoRA(nnx.Module):
    """What the adapters of all slots add to a table of embeddings: `a[slot, id] @ b.T`."""

    def __init__(
        self, num_embeddings: int, dim: int, *, num_slots: int, rank: int, dtype: Any
    ) -> None:
        self.a = nnx.Param(jnp.zeros((num_slots, num_embeddings, rank), dtype))
        self.b = nnx.Param(jnp.zeros((dim, num_slots, rank), dtype))
        self.slots = nnx.Param(jnp.zeros((), jnp.int32))
        """int32[rows]: bound anew by each call."""

    def __call__(self, ids: Int[Array, " T"], dtype: Any) -> Float[Array, "T D"]:
        """Return what is added to the rows of ids, all of which are in the table."""
        slots, a, b = self.slots[...], self.a[...], self.b[...]
        rows = a.at[jnp.maximum(slots, 0), ids].get(mode="promise_in_bounds")
        shrunk = jnp.broadcast_to(rows[:, None], (len(ids), a.shape[0], a.shape[2]))
        return _expand(shrunk, b, find_own(slots, len(ids), a.shape[0])).astype(dtype)


def find_own(slots: Int[Array, " N"], num_rows: int, num_slots: int) -> Bool[Array, "T S"]:
    """Return whether a slot is a row's own: none is for -1.

    Where a layer has several rows for each of `slots`, as a tower for a unit, they follow each
    other; where it has fewer, as behind patches that were joined, one stands for several. Where
    neither divides the other, as of crops whose padding is left out, each stands at its share.
    """
    if max(num_rows, len(slots)) % min(num_rows, len(slots)):
        each = slots[np.arange(num_rows) * len(slots) // num_rows]
    elif num_rows >= len(slots):
        each = jnp.repeat(slots, num_rows // len(slots), total_repeat_length=num_rows)
    else:
        each = slots[:: len(slots) // num_rows]
    return each[:, None] == jnp.arange(num_slots, dtype=jnp.int32)[None, :]


def _expand(
    shrunk: Float[Array, "T S R"], b: Float[Array, "F S R"], is_own: Bool[Array, "T S"]
) -> Float[Array, "T F"]:
    own = jnp.where(is_own[:, :, None], shrunk, 0)
    return product(own.reshape(len(own), -1), b.reshape(len(b), -1))
