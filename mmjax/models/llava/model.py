"""LLaVA-1.5 (Liu et al., arXiv 2310.03744): a tower, a two-layer projector, a decoder.

The tower is CLIP or SigLIP. Which decoder is `text_config`'s affair: Vicuna, Llama, Mistral, Qwen2
and Gemma are no code here. LLaVA-NeXT (Liu et al., 2024), which Granite Vision is too (arXiv
2502.09927), sees pictures also in tiles, and has an embedding that ends their rows.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.models.llava.host_inputs import (
    LlavaHostInputs,
    LlavaNextHostInputs,
    count_extra_features,
)
from mmjax.models.text_model import is_head_tied
from mmjax.models.tower_model import FeatureLayersModel
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, RuleTypes


class LlavaForConditionalGeneration(FeatureLayersModel):
    """Served as HF's class of this name."""

    host_inputs = LlavaHostInputs

    @staticmethod
    def build_tower(hf_config: Any, num_layers: int, *, dtype: Any) -> nnx.Module:
        count_extra_features(hf_config)  # refuses other towers
        changes = {"num_hidden_layers": num_layers, "has_final_norm": False}
        return ViT(ViTConfig.from_hf(hf_config.vision_config, **changes), dtype=dtype)


class LlavaNextForConditionalGeneration(LlavaForConditionalGeneration):
    """Served as HF's class of this name."""

    host_inputs = LlavaNextHostInputs
    is_tied = staticmethod(is_head_tied)

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        super().__init__(hf_config, dtype=dtype)
        with self._mark_tower_model(hf_config, "image"):
            self.image_newline = nnx.Param(jnp.zeros((hf_config.text_config.hidden_size,), dtype))

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map LLaVA's names, and that of the embedding that ends rows."""
        newline = Rule(r"^model\.image_newline$", "image_newline")
        return (newline, *LlavaForConditionalGeneration.rules(hf_config))

    def extra_embeds(self) -> Float[Array, "_extra D"]:
        """Return the embedding that ends rows, which no adapter changes."""
        return self.image_newline[...][None]
