"""GLM-4.1V, 4.5V, 4.6V and GLM-OCR (arXiv 2507.01006): a tower over packed patches before GLM-4."""

from collections.abc import Sequence
from typing import Any

from mmjax.models.glm4v.host_inputs import Glm4vHostInputs, GlmOcrHostInputs
from mmjax.models.qwen2_vl.model import Qwen2VLForConditionalGeneration
from mmjax.models.text_model import text_rules
from mmjax.weights.rules import Rule, RuleTypes


class GlmOcrForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """Served as HF's class of this name."""

    host_inputs = GlmOcrHostInputs

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the hub's layout, which is also save_pretrained's, and the module's own names."""
        num_layers = hf_config.text_config.num_hidden_layers
        return (
            # The layer behind the last guesses several tokens at once.
            Rule(rf"^model\.language_model\.layers\.{num_layers}\.", None),
            *text_rules(hf_config),
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
