"""GLM-4.1V, 4.5V, 4.6V and GLM-OCR (arXiv 2507.01006): a tower over packed patches before GLM-4."""

from collections.abc import Sequence
from typing import Any

from mmjax.language.llama.config import LlamaConfig
from mmjax.language.llama.decoder import MtpTextModel
from mmjax.models.glm4v.host_inputs import Glm4vHostInputs
from mmjax.models.grid_inputs import GridHostInputs
from mmjax.models.grid_model import GridModel
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import text_rules
from mmjax.weights.rules import Rule, RuleTypes


class GlmOcrMtp(MultiModalModel):
    """The layer behind GLM-OCR's last, which guesses tokens ahead."""

    shared_names = ("language_model.embed_tokens.", "language_model.lm_head.")
    host_inputs = GridHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        config = LlamaConfig.from_hf(hf_config.text_config)
        self.language_model = MtpTextModel(
            config, is_tied=hf_config.tie_word_embeddings, dtype=dtype
        )

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the layer's names; all others, its copies of table and head too, are not read."""
        own = rf"^model\.language_model\.layers\.{hf_config.text_config.num_hidden_layers}\."
        return (
            Rule(rf"^(?!{own[1:]})", None),
            Rule(rf"{own}(embed_tokens|shared_head\.head)\.", None),
            Rule(rf"{own}shared_head\.norm\.", "language_model.norm."),
            Rule(rf"{own}(enorm|hnorm|eh_proj)\.", r"language_model.\1."),
            *text_rules(hf_config),
            Rule(r"^model\.language_model\.", "language_model."),
        )


class GlmOcrForConditionalGeneration(GridModel):
    """Served as HF's class of this name."""

    mtp_class = GlmOcrMtp

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the hub's layout, which is also save_pretrained's, and the module's own names."""
        num_layers = hf_config.text_config.num_hidden_layers
        return (
            # `GlmOcrMtp`'s.
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

    mtp_class = None  # no published checkpoint has its layer
    host_inputs = Glm4vHostInputs


class Glm46VForConditionalGeneration(Glm4vForConditionalGeneration):
    """Served as HF's class of this name."""


class Glm4vMoeForConditionalGeneration(Glm4vForConditionalGeneration):
    """Served as HF's class of this name."""
