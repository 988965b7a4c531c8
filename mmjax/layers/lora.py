"""Low-rank adapters beside layers (LoRA, arXiv 2106.09685), several in one batch.

An adapter has a slot. Which slot each row has is data, so that no adapter needs a compilation.
"""

from typing import Any

import jax
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

    def by_head(self, x: Float[Array, "T N D"]) -> Float[Array, "T N F"]:
        """Return what is added where each head has its own inputs, and its part of the outputs."""
        a, b = self.a[...], self._heads(x.shape[1])
        flat = x.reshape(-1, x.shape[-1]).astype(a.dtype)
        shrunk = product(flat, a.reshape(-1, a.shape[-1])).reshape(*x.shape[:2], *a.shape[:2])
        is_own = find_own(self.slots[...], len(x), a.shape[0])
        bias = product(is_own.astype(a.dtype), self.bias[...]).reshape(*x.shape[:2], -1)
        return (product_by_head(_keep_own(shrunk, is_own), b) + bias).astype(x.dtype)

    def absorb(self, x: Float[Array, "T N F"]) -> Float[Array, "T N D"]:
        """Return what is added where the transposed weights multiply what meets a head's outputs.

        That is queries, to which keys' bias adds the same for all keys: no score's share changes.
        """
        a, b = self.a[...], self._heads(x.shape[1])
        shrunk = product_by_head(x.astype(a.dtype), b.transpose(0, 2, 1))
        is_own = find_own(self.slots[...], len(x), a.shape[0])
        own = _keep_own(shrunk.reshape(*x.shape[:2], *a.shape[:2]), is_own)
        out = product(own.reshape(-1, own.shape[-1]), a.reshape(-1, a.shape[-1]).T)
        return out.astype(x.dtype).reshape(*x.shape[:2], -1)

    def _heads(self, num_heads: int) -> Float[Array, "N F _slots_and_ranks"]:
        b = self.b[...]
        return b.reshape(num_heads, len(b) // num_heads, -1)


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


def _keep_own(
    shrunk: Float[Array, "T N S R"], is_own: Bool[Array, "T S"]
) -> Float[Array, "T N _slots_and_ranks"]:
    own = jnp.where(is_own[:, None, :, None], shrunk, 0)
    return own.reshape(*own.shape[:2], -1)


def product_by_head(
    x: Float[Array, "T N _in"], weight: Float[Array, "N _out _in"]
) -> Float[Array, "T N _out"]:
    """Return `x[:, n] @ weight[n].T` for every head."""
    return jax.vmap(product, in_axes=(1, 0), out_axes=1)(x, weight)
