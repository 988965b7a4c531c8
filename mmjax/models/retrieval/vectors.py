"""What models that give a vector for each token have around the model that they were made of."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Array, Float

from mmjax.layers.linear import Linear
from mmjax.models.interface import MultiModalModel
from mmjax.weights.rules import Rule, RuleTypes, Split


class RetrievalModel(MultiModalModel):
    """A projection of the states of the model that is the other base; HF: `ColPaliForRetrieval`."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        super().__init__(hf_config, dtype=dtype)
        width = hf_config.get_text_config().hidden_size
        self.embedding_proj_layer = Linear(
            width, hf_config.embedding_dim, use_bias=True, dtype=dtype
        )

    @classmethod
    def rules(cls, hf_config: Any) -> Sequence[RuleTypes]:
        """Return the other base's rules for files in which `vlm.` stands before its names.

        A head is left out: older files have one, and nothing is generated.
        """
        return (
            Rule(r"^vlm\.(.*\.)?lm_head\.", None),
            *(_behind(one) for one in super().rules(hf_config)),
            # HF's module since transformers 5 has the decoder here.
            Rule(r"^vlm\.(language_model\.)?", "language_model."),
        )

    def project_states(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R _width"]:
        return self.embedding_proj_layer(hidden_states)


def _behind(rule: RuleTypes) -> RuleTypes:
    assert isinstance(rule, Rule | Split), f"{rule} has no pattern of one name"
    return replace(rule, pattern=rf"^vlm\.{rule.pattern.removeprefix('^')}")
