"""Token embeddings, and the logits of a head tied to them."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.layers.cpu.product import product
from mmjax.layers.lora import EmbedLoRA
from mmjax.layers.tpu.rows import read_rows


class Embed(nnx.Module):
    """`torch.nn.Embedding`: parameter `weight[V, D]`. Also a head, tied to one or its own."""

    def __init__(self, num_embeddings: int, dim: int, *, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((num_embeddings, dim), dtype))
        self.dtype = jnp.dtype(dtype)
        """Of what is looked up."""
        self.lora: EmbedLoRA | None = None

    def __call__(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up ids; out-of-vocabulary ids (placeholders, replaced later) read row 0."""
        is_known = (ids >= 0) & (ids < self.weight.shape[0])
        known = jnp.where(is_known, ids, 0)
        rows = self.read_rows(known)
        return rows if self.lora is None else rows + self.lora(known, rows.dtype)

    def read_rows(self, known: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Return what stands for ids that the table has."""
        return read_rows(self.weight[...], known)

    def project(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Return `hidden_states @ weight.T`, accumulated and returned in float32."""
        return product(hidden_states, self.weight[...], jnp.dtype(jnp.float32))
