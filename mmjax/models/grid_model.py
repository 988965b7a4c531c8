"""Models of grids: a transformer over packed patches before a decoder with M-RoPE."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Float, Int

from mmjax.layers.attention.segments import refine_segments
from mmjax.models.grid_inputs import GridHostInputs
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.towers.packed_vit.config import PackedViTConfig
from mmjax.towers.packed_vit.tower import PackedViT
from mmjax.weights.rules import Rule, RuleTypes


def grid_rules(hf_config: Any) -> Sequence[RuleTypes]:
    """Map the hub's layout since Qwen2-VL, also save_pretrained's, and the module's own names."""
    return (
        Rule(r"^(model\.)?visual\.patch_embed\.proj\.", "visual.patch_embed."),
        Rule(r"^(model\.)?visual\.merger\.mlp\.0\.", "visual.merger.fc1."),
        Rule(r"^(model\.)?visual\.merger\.mlp\.2\.", "visual.merger.fc2."),
        Rule(r"^(model\.)?visual\.", "visual."),
        *text_rules(hf_config),
        Rule(r"^lm_head\.", "language_model.lm_head."),
        Rule(r"^model\.(language_model\.)?", "language_model."),
    )


class GridModel(MultiModalModel):
    """A tower `visual`, which merges squares of patches, and a `language_model`."""

    host_inputs = GridHostInputs
    modality_names: ClassVar[tuple[str, ...]] = ("image", "video")

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        with self._mark_tower_model(hf_config, {*self.modality_names}):
            self.visual = PackedViT(self.read_tower(hf_config), dtype=dtype)
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def read_tower(hf_config: Any) -> PackedViTConfig:
        """Return the tower's configuration."""
        return PackedViTConfig.from_hf(hf_config.vision_config)

    def embed_multimodal(
        self,
        pixel_values: Float[Array, "P ..."],
        places: Int[Array, "P 2"],
        segment_ids: Int[Array, " P"],
        *,
        frame_ids: Int[Array, " P"] | None = None,
        window_ids: Int[Array, " P"] | None = None,
        position_ids: Int[Array, "P _taps"] | None = None,
        position_weights: Float[Array, "P _taps"] | None = None,
        square_offsets: Int[Array, " P"] | None = None,
    ) -> Float[Array, "_rows _out"]:
        """Return the embeddings of packed pictures and videos, in the order of their squares.

        `frame_ids`, and `window_ids` where the tower has windows: numbers within an item.
        `position_ids` and `position_weights`: where it has learned positions, those around a patch.
        `square_offsets`: of `find_square_offsets`, where patches come row by row.
        """
        # A frame or a window has one embedding at least.
        num_parts = len(segment_ids) // self.visual.config.merge_size**2
        segments = [
            refine_segments(segment_ids, part, num_parts=num_parts)
            for part in (frame_ids, window_ids)
            if part is not None
        ] or [segment_ids]
        positions = None
        if position_ids is not None and position_weights is not None:
            positions = position_ids, position_weights
        with jax.named_scope("visual"):
            embeds, _ = self.visual(
                pixel_values.reshape(len(pixel_values), -1),
                places=places,
                segment_ids=segments[0],
                window_ids=segments[-1],
                positions=positions,
                square_offsets=square_offsets,
            )
            return embeds
