"""Pixtral (arXiv 2410.07073): a tower over packed patches before LLaVA's projector, and Mistral."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flax import nnx

from mmjax.models.pixtral.host_inputs import PixtralHostInputs, check_whole_pictures
from mmjax.models.tower_model import (
    TOWER,
    WRAPPER_RULES,
    FeatureLayersModel,
    drop_unread_blocks,
)
from mmjax.towers.packed_vit import PackedViT, PackedViTConfig
from mmjax.weights.rules import Rule, RuleTypes

_BLOCK = TOWER + r"transformer\.layers\.(\d+)\."
_NAMES = {
    TOWER + r"patch_conv\.": "patch_embed.",
    TOWER + r"ln_pre\.": "first_norm.",
    _BLOCK + r"attention_norm\.": r"blocks.\3.norm1.",
    _BLOCK + r"ffn_norm\.": r"blocks.\3.norm2.",
    _BLOCK + r"attention\.o_proj\.": r"blocks.\3.attn.proj.",
    _BLOCK + r"attention\.": r"blocks.\3.attn.",
    _BLOCK + r"feed_forward\.": r"blocks.\3.mlp.",
    _BLOCK: r"blocks.\3.",
}
"""Names of the file -> those of the tower; the first that matches decides."""


class PixtralForConditionalGeneration(FeatureLayersModel):
    """Served as HF's `LlavaForConditionalGeneration` with a `pixtral` tower."""

    host_inputs = PixtralHostInputs

    @staticmethod
    def build_tower(hf_config: Any, num_layers: int, *, dtype: Any) -> nnx.Module:
        check_whole_pictures(hf_config)
        config = PackedViTConfig.from_hf(hf_config.vision_config)
        return PackedViT(replace(config, num_blocks=num_layers), dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the three layouts, and the tower's own names."""
        return (
            *drop_unread_blocks(hf_config),
            *(Rule(pattern, f"vision_tower.{name}") for pattern, name in _NAMES.items()),
            *WRAPPER_RULES,
        )
