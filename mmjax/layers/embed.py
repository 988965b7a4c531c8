"""Token embeddings, and the logits of a head tied to them."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.layers.cpu.product import product
from mmjax.layers.lora import EmbedLoRA


class Embed(nnx.Module):
    """`torch.nn.Embedding`: parameter `weight[V, D]`."""

    def __init__(self, num_embeddings: int, dim: int, *, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((num_embeddings, dim), dtype))
        self.lora: EmbedLoRA | None = None

    def __call__(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up ids; out-of-vocabulary ids (placeholders, replaced later) read row 0."""
        table = self.weight[...]
        is_known = (ids >= 0) & (ids < table.shape[0])
        known = jnp.where(is_known, ids, 0)
        rows = table.at[known].get(mode="promise_in_bounds")
        return rows if self.lora is None else rows + self.lora(known, rows.dtype)


def project_logits(
    hidden_states: Float[Array, "R D"], weight: Float[Array, "V D"]
) -> Float[Array, "R V"]:
    """Return `hidden_states @ weight.T`, accumulated and returned in float32."""
    return product(hidden_states, weight, jnp.dtype(jnp.float32))
