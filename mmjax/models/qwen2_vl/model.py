"""Qwen2-VL and Qwen2.5-VL: a transformer over packed patches before Qwen2 with M-RoPE."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from mmjax.layers.attention.segments import refine_segments
from mmjax.models.interface import MultiModalModel
from mmjax.models.qwen2_vl.host_inputs import Qwen2VLHostInputs, Qwen25VLHostInputs
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.towers.packed_vit import PackedViT, PackedViTConfig
from mmjax.weights.rules import Rule, RuleTypes


class Qwen2VLForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = Qwen2VLHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision = PackedViTConfig.from_hf(hf_config.vision_config)
        with self._mark_tower_model(hf_config, {"image", "video"}):
            self.visual = PackedViT(vision, dtype=dtype)
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the hub's layout, which is also save_pretrained's, and the module's own names."""
        return (
            Rule(r"^(model\.)?visual\.patch_embed\.proj\.", "visual.patch_embed."),
            Rule(r"^(model\.)?visual\.merger\.mlp\.0\.", "visual.merger.fc1."),
            Rule(r"^(model\.)?visual\.merger\.mlp\.2\.", "visual.merger.fc2."),
            Rule(r"^(model\.)?visual\.", "visual."),
            *text_rules(hf_config),
            Rule(r"^lm_head\.", "language_model.lm_head."),
            Rule(r"^model\.(language_model\.)?", "language_model."),
        )

    def embed_multimodal(
        self,
        pixel_values: Float[Array, "P _pixels"],
        places: Int[Array, "P 2"],
        segment_ids: Int[Array, " P"],
        frame_ids: Int[Array, " P"],
        *,
        window_ids: Int[Array, " P"] | None = None,
        position_ids: Int[Array, "P _taps"] | None = None,
        position_weights: Float[Array, "P _taps"] | None = None,
    ) -> Float[Array, "_rows _out"]:
        """Return the embeddings of packed pictures and videos, in the order of their patches.

        `frame_ids`, and `window_ids` where the tower has windows: numbers within an item.
        `position_ids` and `position_weights`: where it has learned positions, those around a patch.
        """
        parts = [frame_ids] if window_ids is None else [frame_ids, window_ids]
        # A frame or a window has one embedding at least.
        num_parts = len(segment_ids) // self.visual.config.merge_size**2
        segments = [refine_segments(segment_ids, part, num_parts=num_parts) for part in parts]
        positions = None
        if position_ids is not None and position_weights is not None:
            positions = position_ids, position_weights
        with jax.named_scope("visual"):
            embeds, _ = self.visual(
                pixel_values,
                places=places,
                segment_ids=segments[0],
                window_ids=segments[-1],
                positions=positions,
            )
            return embeds


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """Served as HF's class of this name; its host gives patches window by window."""

    host_inputs = Qwen25VLHostInputs
