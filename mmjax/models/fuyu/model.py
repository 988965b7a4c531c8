"""Fuyu (Adept, 2023): patches of a picture, projected, straight into Persimmon's decoder."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from mmjax.layers.linear import Linear
from mmjax.models.fuyu.host_inputs import FuyuHostInputs
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.models.tower_model import WRAPPER_RULES
from mmjax.weights.rules import RuleTypes


class FuyuForCausalLM(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = FuyuHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        text_config = hf_config.get_text_config()
        num_pixels = hf_config.patch_size**2 * hf_config.num_channels
        with self._mark_tower_model(hf_config, "image"):
            self.vision_embed_tokens = Linear(
                num_pixels, text_config.hidden_size, use_bias=True, dtype=dtype
            )
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the hub's layout, save_pretrained's, and the module's own names."""
        return (*text_rules(hf_config), *WRAPPER_RULES)

    def embed_multimodal(
        self, image_patches: Float[Array, "P _pixels"], segment_ids: Int[Array, " P"]
    ) -> Float[Array, "P D"]:
        """Project every patch by itself, whichever picture it is of."""
        with jax.named_scope("vision_embed_tokens"):
            weight = self.vision_embed_tokens.weight
            return self.vision_embed_tokens(image_patches.astype(weight.dtype))
