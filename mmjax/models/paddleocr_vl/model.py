"""PaddleOCR-VL (arXiv 2510.14528): SigLIP over packed patches before Ernie 4.5 with M-RoPE."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmjax.models.grid_model import GridModel
from mmjax.models.paddleocr_vl.host_inputs import PaddleOCRVLHostInputs
from mmjax.towers.packed_vit.config import PackedViTConfig
from mmjax.weights.rules import Rule

_TOWER = r"^(?:model\.)?visual\.(?:vision_model\.)?"
_PROJECTOR = r"^(?:mlp_AR|(?:model\.)?projector)\."
_BLOCK = _TOWER + r"encoder\.layers\.(\d+)\."
_NAMES: dict[str, str | None] = {
    _TOWER + r"(?:embeddings\.packing_position_embedding|head)\.": None,  # nothing reads them
    _TOWER + r"embeddings\.patch_embedding\.": "visual.patch_embed.",
    _TOWER + r"embeddings\.position_embedding\.": "visual.pos_embed.",
    _TOWER + r"embeddings\.$": None,  # HF's module of both has no output here
    _BLOCK + r"layer_norm([12])\.": r"visual.blocks.\1.norm\2.",
    _BLOCK + r"self_attn\.out_proj\.": r"visual.blocks.\1.attn.proj.",
    _BLOCK + r"self_attn\.": r"visual.blocks.\1.attn.",
    _BLOCK: r"visual.blocks.\1.",
    _PROJECTOR + r"pre_norm\.": "visual.merger.ln_q.",
    _PROJECTOR + r"linear_([12])\.": r"visual.merger.fc\1.",
    _PROJECTOR: "visual.merger.",
    _TOWER: "visual.",
    r"^lm_head\.": "language_model.lm_head.",
    r"^model\.(language_model\.)?": "language_model.",
}
"""Names of the hub's file, of save_pretrained's and of the module -> ours; the first decides."""


class PaddleOCRVLForConditionalGeneration(GridModel):
    """Served as HF's class of this name."""

    host_inputs = PaddleOCRVLHostInputs
    modality_names = ("image",)

    @staticmethod
    def read_tower(hf_config: Any) -> PackedViTConfig:
        tower = GridModel.read_tower(hf_config)
        return replace(tower, merged_width=hf_config.text_config.hidden_size)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[Rule]:
        """Map the hub's layout, save_pretrained's, and the module's own names."""
        return [Rule(pattern, name) for pattern, name in _NAMES.items()]
