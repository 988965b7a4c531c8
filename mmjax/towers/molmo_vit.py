"""Molmo's image encoder: CLIP's blocks (Radford et al., arXiv 2103.00020), read at several depths.

It takes patches that are cut already, their pixels by row, column and channel.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.linear import Linear
from mmjax.layers.norm import LayerNorm
from mmjax.layers.vision import PositionTable, VisionConfig, build_vision_encoder


class MolmoViT(nnx.Module):
    """Crops to features of every patch; nothing norms what the blocks give."""

    def __init__(self, config: VisionConfig, *, feature_layers: Sequence[int], dtype: Any) -> None:
        """`feature_layers`: blocks that are read, counted from 0; `config` has no more of them."""
        width = config.hidden_size
        self.class_embedding = nnx.Param(jnp.zeros((width,), dtype))
        self.patch_embedding = Linear(
            config.num_channels * config.patch_size**2, width, use_bias=False, dtype=dtype
        )
        self.position_embedding = PositionTable(config.num_patches + 1, width, dtype=dtype)
        self.pre_ln = LayerNorm(width, eps=config.layer_norm_eps, dtype=dtype)
        self.encoder = build_vision_encoder(config, dtype=dtype)
        self.feature_layers = tuple(feature_layers)

    def __call__(self, patches: Float[Array, "U P _pixels"]) -> Float[Array, "U P _width"]:
        """Return the outputs of the blocks that are read, side by side; without the class token."""
        rows = self.patch_embedding(patches)
        first = jnp.broadcast_to(
            self.class_embedding[...][None, None, :], (len(rows), 1, rows.shape[-1])
        )
        rows = jnp.concatenate([first, rows], axis=1)
        rows = rows + self.position_embedding.weight[...][None, :, :]
        _, states = self.encoder(self.pre_ln(rows), [layer + 1 for layer in self.feature_layers])
        return jnp.concatenate([state[:, 1:] for state in states], axis=-1)
