"""CLIP's vision encoder (Radford et al., arXiv 2103.00020). Knows nothing of what it feeds."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.norm import LayerNorm
from mmjax.layers.vision import PatchEmbedding, PositionTable, VisionConfig, build_vision_encoder


class ClipEmbeddings(nnx.Module):
    """A class token before the patches, plus learned positions."""

    def __init__(self, config: VisionConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        self.class_embedding = nnx.Param(jnp.zeros((width,), dtype))
        self.patch_embedding = PatchEmbedding(
            config.num_channels, width, config.patch_size, use_bias=False, dtype=dtype
        )
        self.position_embedding = PositionTable(config.num_patches + 1, width, dtype=dtype)

    def __call__(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        """Embed pictures of the config's `image_size`; row 0 is the class token."""
        patches = self.patch_embedding(pixel_values)
        first = jnp.broadcast_to(
            self.class_embedding[...][None, None, :], (len(patches), 1, patches.shape[-1])
        )
        rows = jnp.concatenate([first, patches], axis=1)
        return rows + self.position_embedding.weight[...][None, :, :]


class ClipVisionTower(nnx.Module):
    """Pictures to a class feature and patch features; parameters bear HF's names.

    Its final norm serves the pooled feature alone, which is not computed here.
    """

    def __init__(self, config: VisionConfig, *, dtype: Any) -> None:
        """`config.num_hidden_layers` may be what is read, and not what there is."""
        self.embeddings = ClipEmbeddings(config, dtype=dtype)
        # HF's name is misspelt, and so are the checkpoints' tensors.
        self.pre_layrnorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype)
        self.encoder = build_vision_encoder(config, dtype=dtype)

    def __call__(
        self, pixel_values: Float[Array, "I C _y _x"], *, feature_layers: Sequence[int] = ()
    ) -> tuple[Float[Array, "I P D"], list[Float[Array, "I P D"]]]:
        """Return the last hidden state, which is not normed, and the states asked for.

        `feature_layers` counts as HF's `hidden_states`: 0 is the normed embedding, n the output of
        block n - 1.
        """
        return self.encoder(self.pre_layrnorm(self.embeddings(pixel_values)), feature_layers)
