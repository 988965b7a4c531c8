"""EXAONE 4.5 (arXiv 2604.08644): a tower over packed patches before EXAONE 4."""

from collections.abc import Sequence
from typing import Any

from mmjax.models.exaone4_5.host_inputs import Exaone45HostInputs
from mmjax.models.grid_model import GridModel, grid_rules
from mmjax.weights.rules import Rule, RuleTypes


class Exaone4_5_ForConditionalGeneration(GridModel):
    """Served as HF's class of this name."""

    host_inputs = Exaone45HostInputs

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the hub's layout; what guesses tokens ahead of the model (`mtp`) is not read."""
        return (Rule(r"^mtp\.", None), *grid_rules(hf_config))
