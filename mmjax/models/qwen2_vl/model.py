"""Qwen2-VL and Qwen2.5-VL: a transformer over packed patches before Qwen2 with M-RoPE."""

from collections.abc import Sequence
from typing import Any

from mmjax.models.grid_model import GridModel, grid_rules
from mmjax.models.qwen2_vl.host_inputs import Qwen25VLHostInputs
from mmjax.models.retrieval.vectors import RetrievalModel
from mmjax.weights.rules import RuleTypes


class Qwen2VLForConditionalGeneration(GridModel):
    """Served as HF's class of this name."""

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        return grid_rules(hf_config)


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """Served as HF's class of this name; its host gives patches window by window."""

    host_inputs = Qwen25VLHostInputs


class ColQwen2ForRetrieval(RetrievalModel, Qwen2VLForConditionalGeneration):
    """Served as HF's class of this name: a vector for each token."""
