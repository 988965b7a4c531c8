"""LLaVA-1.5 (Liu et al., arXiv 2310.03744): a tower, a two-layer projector, a decoder.

The tower is CLIP or SigLIP. Which decoder is `text_config`'s affair: Vicuna, Llama, Mistral, Qwen2
and Gemma are no code here.
"""

from typing import Any

from flax import nnx

from mmjax.models.llava.host_inputs import LlavaHostInputs, count_extra_features
from mmjax.models.tower_model import FeatureLayersModel
from mmjax.towers.vit import ViT, ViTConfig


class LlavaForConditionalGeneration(FeatureLayersModel):
    """Served as HF's class of this name."""

    host_inputs = LlavaHostInputs

    @staticmethod
    def build_tower(hf_config: Any, num_layers: int, *, dtype: Any) -> nnx.Module:
        count_extra_features(hf_config)  # refuses other towers
        changes = {"num_hidden_layers": num_layers, "has_final_norm": False}
        return ViT(ViTConfig.from_hf(hf_config.vision_config, **changes), dtype=dtype)
