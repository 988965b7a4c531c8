"""GLM-4.1V, 4.5V, 4.6V and GLM-OCR (arXiv 2507.01006): a tower over packed patches before GLM-4."""

from collections.abc import Sequence
from typing import Any

from mmjax.models.glm4v.host_inputs import Glm4vHostInputs
from mmjax.models.grid_model import GridModel
from mmjax.weights.rules import Rule, RuleTypes, Split, Stack


class GlmOcrForConditionalGeneration(GridModel):
    """Served as HF's class of this name."""

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the hub's layout, which is also save_pretrained's, and the module's own names."""
        text = hf_config.text_config
        mlp = r"^model\.language_model\.(layers\.\d+\.mlp)\."
        halves = [rf"language_model.\1.{name}_proj." for name in ("gate", "up")]
        return (
            # The layer behind the last guesses several tokens at once.
            Rule(rf"^model\.language_model\.layers\.{text.num_hidden_layers}\.", None),
            Split(mlp + r"gate_up_proj\.", halves, [text.intermediate_size] * 2),
            Rule(r"^model\.visual\.embeddings\.$", None),  # HF's has no output here
            Rule(r"^model\.visual\.embeddings\.position_embedding\.", "visual.pos_embed."),
            Rule(r"^model\.visual\.patch_embed\.proj\.", "visual.patch_embed."),
            Rule(r"^model\.visual\.post_conv_layernorm\.", "visual.first_norm."),
            Rule(r"^model\.visual\.downsample\.", "visual.merger.downsample."),
            Rule(r"^model\.(visual|language_model)\.", r"\1."),
            Rule(r"^lm_head\.", "language_model.lm_head."),
        )


class Glm4vForConditionalGeneration(GlmOcrForConditionalGeneration):
    """Served as HF's class of this name; its patches have learned positions."""

    host_inputs = Glm4vHostInputs


class Glm46VForConditionalGeneration(Glm4vForConditionalGeneration):
    """Served as HF's class of this name."""


class Glm4vMoeForConditionalGeneration(Glm4vForConditionalGeneration):
    """Served as HF's class of this name."""

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the hub's layout, in which experts lie apart, and the module's own, of stacks."""
        experts = r"^model\.language_model\.(layers\.\d+\.mlp\.experts)\."
        inner = hf_config.text_config.moe_intermediate_size
        halves = [rf"language_model.\1.{name}_proj" for name in ("gate", "up")]
        # Those of the layer behind the last are dropped before they are stacked.
        dropped, *others = Glm4vForConditionalGeneration.rules(hf_config)
        return (
            dropped,
            Stack(experts + r"(?P<index>\d+)\.(\w+_proj)\.weight$", r"language_model.\1.\3"),
            Split(experts + "gate_up_proj$", halves, (inner, inner), of_stack=True),
            *others,
        )
