"""LFM3-VL (Liquid AI, 2026): a tower that convolves frames and attends within them, before LFM3."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float, Int

from mmjax.connectors.mlp import MLPProjector
from mmjax.layers.attention.segments import refine_segments
from mmjax.models.lfm3_vl.host_inputs import Lfm3VLHostInputs
from mmjax.models.text_model import build_text_model
from mmjax.models.tower_model import TOWER, TowerModel
from mmjax.towers.packed_vit.config import PackedViTConfig
from mmjax.towers.packed_vit.tower import PackedViT
from mmjax.weights.rules import Rule, RuleTypes

_LAYER, _BLOCK = TOWER + r"layers\.(\d+)\.", r"vision_tower.blocks.\3."
_NAMES = {
    TOWER + r"patchifier\.": "vision_tower.patch_embed.",
    TOWER + r"embedding_norm\.": "vision_tower.first_norm.",
    _LAYER + r"operator_norm\.": _BLOCK + "norm1.",
    _LAYER + r"ffn_norm\.": _BLOCK + "norm2.",
    _LAYER + r"feed_forward\.w1\.": _BLOCK + "mlp.gate_proj.",
    _LAYER + r"feed_forward\.w2\.": _BLOCK + "mlp.down_proj.",
    _LAYER + r"feed_forward\.w3\.": _BLOCK + "mlp.up_proj.",
    _LAYER + r"self_attn\.out_proj\.": _BLOCK + "attn.proj.",
    _LAYER + r"self_attn\.([qk])_(?:layer)?norm\.": _BLOCK + r"attn.\4_norm.",
    _LAYER + r"self_attn\.": _BLOCK + "attn.",
    _LAYER: _BLOCK,
}
"""Names of a tower in files, and in HF's module where they differ -> ours; the first decides."""


class Lfm3VlForConditionalGeneration(TowerModel):
    """Served as HF's class of this name."""

    host_inputs = Lfm3VLHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision = hf_config.vision_config
        self.per_square = vision.spatial_merge_size**2
        with self._mark_tower_model(hf_config, {"image", "video"}):
            self.vision_tower = PackedViT(PackedViTConfig.from_hf(vision), dtype=dtype)
            self.multi_modal_projector = MLPProjector(
                vision.hidden_size * self.per_square,
                hf_config.text_config.hidden_size,
                hf_config.projector_hidden_act,
                use_bias=hf_config.projector_bias,
                norm_eps=1e-6,  # no key of the config
                inner=hf_config.projector_hidden_size,
                num_joined=self.per_square,
                dtype=dtype,
            )
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        names = (Rule(pattern, name) for pattern, name in _NAMES.items())
        return (*names, *TowerModel.rules(hf_config))

    def encode_units(
        self,
        pixel_values: Float[Array, "P _pixels"],
        places: Int[Array, "P 2"],
        frame_ids: Int[Array, " P"],
        neighbours: Int[Array, "P _taps"],
        segment_ids: Int[Array, " P"],
    ) -> Float[Array, "P _features"]:
        """Return the states of patches, square by square.

        `frame_ids`: numbers within an item. `neighbours`: of `find_neighbours`.
        """
        # A frame has one embedding at least.
        num_frames = len(segment_ids) // self.per_square
        states, _ = self.vision_tower(
            pixel_values,
            places=places,
            segment_ids=refine_segments(segment_ids, frame_ids, num_parts=num_frames),
            neighbours=neighbours,
        )
        return states
