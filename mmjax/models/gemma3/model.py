"""Gemma 3, multimodal: SigLIP, an average-pooling projector, Gemma's decoder."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.norm import GemmaRMSNorm
from mmjax.models.gemma3.host_inputs import Gemma3HostInputs
from mmjax.models.gemma3.maxtext import list_rules
from mmjax.models.text_model import build_text_model
from mmjax.models.tower_model import TowerModel
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import RuleTypes


class Gemma3MultiModalProjector(nnx.Module):
    """Average-pool the patches to `mm_tokens_per_image`, norm, project to the decoder's width."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision, text = hf_config.vision_config, hf_config.text_config
        self.mm_input_projection_weight = nnx.Param(
            jnp.zeros((vision.hidden_size, text.hidden_size), dtype)
        )
        self.mm_soft_emb_norm = GemmaRMSNorm(
            vision.hidden_size, eps=vision.layer_norm_eps, dtype=dtype
        )
        self.patches_per_side = vision.image_size // vision.patch_size
        self.kernel_size = self.patches_per_side // math.isqrt(hf_config.mm_tokens_per_image)

    def __call__(self, patches: Float[Array, "I P D"]) -> Float[Array, "I _tokens F"]:
        """Return the soft tokens of every image."""
        images, _, width = patches.shape
        size = self.kernel_size
        side = self.patches_per_side // size
        # AvgPool2d drops incomplete windows.
        grid = patches.reshape(images, self.patches_per_side, self.patches_per_side, width)
        grid = grid[:, : side * size, : side * size]
        windows = grid.reshape(images, side, size, side, size, width)
        pooled = windows.mean((2, 4)).reshape(images, side * side, width)
        normed = self.mm_soft_emb_norm(pooled).reshape(-1, width)
        projected = normed @ self.mm_input_projection_weight[...]
        return projected.reshape(images, side * side, -1)


class Gemma3ForConditionalGeneration(TowerModel):
    """Served as HF's class of this name.

    The soft token lies outside of the table of embeddings, and reads row 0.
    """

    host_inputs = Gemma3HostInputs
    sees = "items"

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision = ViTConfig.from_hf(hf_config.vision_config)
        with self._mark_tower_model(hf_config, "image"):
            self.vision_tower = ViT(vision, dtype=dtype)
            self.multi_modal_projector = Gemma3MultiModalProjector(hf_config, dtype=dtype)
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @classmethod
    def maxtext_rules(cls, hf_config: Any) -> Sequence[RuleTypes]:
        """Return how MaxText's names become names in this module's tree."""
        return list_rules(hf_config)

    def encode_units(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        return self.vision_tower(pixel_values)[0]
