"""LLaVA-1.5 (Liu et al., arXiv 2310.03744): a tower, a two-layer projector, a decoder.

The tower is CLIP or SigLIP. Which decoder is `text_config`'s affair: Vicuna, Llama, Mistral, Qwen2
and Gemma are no code here.
"""

from dataclasses import replace
from typing import Any

from flax import nnx

from mmjax.layers.vision import VisionConfig
from mmjax.models.llava.host_inputs import LlavaHostInputs, count_extra_features
from mmjax.models.tower_model import FeatureLayersModel
from mmjax.towers.clip import ClipVisionTower
from mmjax.towers.siglip import SiglipVisionTower


class LlavaForConditionalGeneration(FeatureLayersModel):
    """Served as HF's class of this name."""

    host_inputs = LlavaHostInputs

    @staticmethod
    def build_tower(hf_config: Any, num_layers: int, *, dtype: Any) -> nnx.Module:
        vision = hf_config.vision_config
        count_extra_features(hf_config)  # refuses other towers
        config = replace(VisionConfig.from_hf(vision), num_hidden_layers=num_layers)
        if vision.model_type == "clip_vision_model":
            return ClipVisionTower(config, dtype=dtype)
        return SiglipVisionTower(config, dtype=dtype, has_final_norm=False)
