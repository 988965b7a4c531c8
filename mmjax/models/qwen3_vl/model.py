"""Qwen3-VL: a tower that feeds the first layers of its decoder, too; Qwen3 with M-RoPE behind it.

Qwen3.5's tower is the same and feeds none; most layers of its decoder are recurrent. The larger
ones of both have experts in the decoder.
"""

from collections.abc import Sequence
from typing import Any

from mmjax.models.grid_model import GridModel, grid_rules
from mmjax.models.qwen3_vl.host_inputs import Qwen3VLHostInputs
from mmjax.models.qwen3_vl.maxtext import list_rules
from mmjax.weights.rules import Rule, RuleTypes


def list_tower_rules(hf_config: Any) -> Sequence[RuleTypes]:
    """Map the hub's layout, which is also save_pretrained's, and the module's own names."""
    visual = r"^(?:model\.)?visual\."
    merger = visual + r"(merger|deepstack_merger_list\.\d+)\."
    return (
        Rule(merger + r"norm\.", r"visual.\1.ln_q."),
        Rule(merger + r"linear_(fc[12])\.", r"visual.\1.\2."),
        Rule(visual + r"blocks\.(\d+)\.mlp\.linear_(fc[12])\.", r"visual.blocks.\1.mlp.\2."),
        *grid_rules(hf_config),
    )


class Qwen3VLForConditionalGeneration(GridModel):
    """Served as HF's class of this name."""

    host_inputs = Qwen3VLHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        super().__init__(hf_config, dtype=dtype)
        self.language_model.num_fed_layers = self.host_inputs(hf_config).num_fed_layers

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        return list_tower_rules(hf_config)

    @classmethod
    def maxtext_rules(cls, hf_config: Any) -> Sequence[RuleTypes]:
        """Return how MaxText's names become names in this module's tree."""
        return list_rules(hf_config)


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """Served as HF's class of this name."""


class Qwen3_5ForConditionalGeneration(GridModel):
    """Served as HF's class of this name."""

    host_inputs = Qwen3VLHostInputs

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the same; what guesses tokens ahead of the model (`mtp`) is not read."""
        return (Rule(r"^mtp\.", None), *list_tower_rules(hf_config))


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration):
    """Served as HF's class of this name."""
