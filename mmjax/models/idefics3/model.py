"""Idefics3 (arXiv 2408.12637) and SmolVLM (arXiv 2504.05299): SigLIP, a pixel shuffle, Llama."""

from collections.abc import Sequence
from typing import Any, ClassVar

from jaxtyping import Array, Float

from mmjax.layers.linear import Linear
from mmjax.layers.vision import join_squares
from mmjax.models.idefics3.host_inputs import Idefics3HostInputs
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.models.tower_model import TowerModel
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, RuleTypes


class Idefics3ForConditionalGeneration(TowerModel):
    """Served as HF's class of this name."""

    host_inputs = Idefics3HostInputs
    modality_names: ClassVar[tuple[str, ...]] = ("image",)

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision, width = hf_config.vision_config, hf_config.text_config.hidden_size
        self.factor = hf_config.scale_factor
        with self._mark_tower_model(hf_config, {*self.modality_names}):
            self.vision_tower = ViT(ViTConfig.from_hf(vision), dtype=dtype)
            self.multi_modal_projector = Linear(
                vision.hidden_size * self.factor**2, width, use_bias=False, dtype=dtype
            )
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        connector = r"^model\.connector\.(modality_projection\.proj\.)?"
        return (
            *text_rules(hf_config),
            Rule(r"^model\.text_model\.", "language_model."),
            Rule(r"^lm_head\.", "language_model.lm_head."),
            Rule(r"^model\.vision_model\.", "vision_tower."),
            Rule(connector, "multi_modal_projector."),
        )

    def encode_units(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        """Return the squares of `scale_factor` x `scale_factor` patches, which are embeddings."""
        states, _ = self.vision_tower(pixel_values)
        return join_squares(states, self.factor)


class SmolVLMForConditionalGeneration(Idefics3ForConditionalGeneration):
    """SmolVLM2, which also takes videos."""

    modality_names = ("image", "video")
