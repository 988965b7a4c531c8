"""SigLIP's vision encoder (Zhai et al., arXiv 2303.15343)."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.norm import LayerNorm
from mmjax.layers.vision import PatchEmbedding, PositionTable, VisionConfig, build_vision_encoder


class SiglipEmbeddings(nnx.Module):
    """Patch embeddings plus learned position embeddings."""

    def __init__(self, config: VisionConfig, *, dtype: Any) -> None:
        self.patch_embedding = PatchEmbedding(
            config.num_channels, config.hidden_size, config.patch_size, use_bias=True, dtype=dtype
        )
        self.position_embedding = PositionTable(config.num_patches, config.hidden_size, dtype=dtype)

    def __call__(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        """Embed images of the config's `image_size`."""
        patches = self.patch_embedding(pixel_values)
        return patches + self.position_embedding.weight[...][None, :, :]


class SiglipVisionTower(nnx.Module):
    """Images to patch features, with HF's parameter names."""

    def __init__(self, config: VisionConfig, *, dtype: Any, has_final_norm: bool = True) -> None:
        """`has_final_norm`: False where only states before it are read, so that it is not loaded.

        `config.num_hidden_layers` may likewise be what is read, and not what there is.
        """
        self.embeddings = SiglipEmbeddings(config, dtype=dtype)
        self.encoder = build_vision_encoder(config, dtype=dtype)
        self.post_layernorm = (
            LayerNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype)
            if has_final_norm
            else None
        )

    def __call__(
        self, pixel_values: Float[Array, "I C _y _x"], *, feature_layers: Sequence[int] = ()
    ) -> tuple[Float[Array, "I P D"], list[Float[Array, "I P D"]]]:
        """Return the last hidden state, normed if there is a norm, and the states asked for.

        `feature_layers` counts as HF's `hidden_states`: 0 is the embedding, n the output of
        block n - 1.
        """
        last, states = self.encoder(self.embeddings(pixel_values), feature_layers)
        return (last if self.post_layernorm is None else self.post_layernorm(last)), states


class SiglipTimmTower(nnx.Module):
    """SigLIP as timm's `siglip_so400m_patch14_384` computes it; parameters bear timm's names.

    Its blocks are HF's (`encoder.layers`): a checkpoint's `blocks` are renamed, and `qkv` is cut.
    """

    def __init__(self, config: VisionConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        self.patch_embed = PatchEmbedding(
            config.num_channels, width, config.patch_size, use_bias=True, dtype=dtype
        )
        self.pos_embed = nnx.Param(jnp.zeros((1, config.num_patches, width), dtype))
        self.encoder = build_vision_encoder(config, dtype=dtype)
        self.norm = LayerNorm(width, eps=config.layer_norm_eps, dtype=dtype)

    def __call__(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        """Return the normed states of every patch; incomplete ones at the edges are dropped."""
        return self.norm(self.encoder(self.patch_embed(pixel_values) + self.pos_embed[...])[0])
