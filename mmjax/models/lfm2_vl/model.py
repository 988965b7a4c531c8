"""LFM2-VL (arXiv 2511.23404): SigLIP 2 over tiles of any size, squares of patches, LFM2."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float, Int

from mmjax.connectors.mlp import MLPProjector
from mmjax.layers.attention.segments import refine_segments
from mmjax.models.lfm2_vl.host_inputs import Lfm2VLHostInputs
from mmjax.models.text_model import build_text_model
from mmjax.models.tower_model import PACKED_SIGLIP_RULES, TowerModel
from mmjax.towers.packed_vit.config import PackedViTConfig
from mmjax.towers.packed_vit.tower import PackedViT
from mmjax.weights.rules import RuleTypes


class Lfm2VlForConditionalGeneration(TowerModel):
    """Served as HF's class of this name."""

    host_inputs = Lfm2VLHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        self.per_square = hf_config.downsample_factor**2
        with self._mark_tower_model(hf_config, "image"):
            config = PackedViTConfig.from_hf(hf_config.vision_config)
            self.vision_tower = PackedViT(config, dtype=dtype)
            self.multi_modal_projector = MLPProjector(
                hf_config.vision_config.hidden_size * self.per_square,
                hf_config.text_config.hidden_size,
                hf_config.projector_hidden_act,
                use_bias=hf_config.projector_bias,
                norm_eps=1e-5 if hf_config.projector_use_layernorm else None,
                inner=hf_config.projector_hidden_size,
                dtype=dtype,
            )
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        return (*PACKED_SIGLIP_RULES, *TowerModel.rules(hf_config))

    def encode_units(
        self,
        pixel_values: Float[Array, "P _y _x C"],
        tile_ids: Int[Array, " P"],
        square_offsets: Int[Array, " P"],
        row_weights: Float[Array, "P _side"],
        column_weights: Float[Array, "P _side"],
        segment_ids: Int[Array, " P"],
    ) -> Float[Array, "_squares _features"]:
        """Return the patches of each square beside each other.

        `tile_ids`: numbers within a picture. `square_offsets`: of `find_square_offsets`.
        `row_weights` and `column_weights`: of `find_axis_weights`, for each patch.
        """
        # A tile has one embedding at least.
        num_tiles = len(segment_ids) // self.per_square
        tiles = refine_segments(segment_ids, tile_ids, num_parts=num_tiles)
        states, _ = self.vision_tower(
            pixel_values.reshape(len(pixel_values), -1),
            segment_ids=tiles,
            axis_weights=(row_weights, column_weights),
            square_offsets=square_offsets,
        )
        return states.reshape(-1, self.per_square * states.shape[-1])
