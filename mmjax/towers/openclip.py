"""OpenCLIP's bigG vision encoder without its class token, as Qwen-VL has it (arXiv 2308.12966)."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.norm import LayerNorm
from mmjax.layers.vision import PatchEmbedding, VisionConfig, build_vision_encoder, resize_square

NUM_POSITIONS = 256
"""Rows of the table of positions, whatever the image's size: it is resized to the patches."""


class OpenClipVisionTower(nnx.Module):
    """Images to patch features; the table of positions is resized to their grid."""

    def __init__(self, config: VisionConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        self.conv1 = PatchEmbedding(
            config.num_channels, width, config.patch_size, use_bias=False, dtype=dtype
        )
        self.positional_embedding = nnx.Param(jnp.zeros((NUM_POSITIONS, width), dtype))
        self.ln_pre = LayerNorm(width, eps=config.layer_norm_eps, dtype=dtype)
        self.encoder = build_vision_encoder(config, dtype=dtype)
        self.side = config.image_size // config.patch_size

    def __call__(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        """Return the last block's output, which is not normed."""
        positions = resize_square(self.positional_embedding[...], self.side)
        hidden = self.ln_pre(self.conv1(pixel_values) + positions[None, :, :])
        return self.encoder(hidden)[0]
