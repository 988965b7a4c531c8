"""Qwen3-VL: a tower that feeds the first layers of its decoder, too; Qwen3 with M-RoPE behind it.

Qwen3.5's tower is the same and feeds none; most layers of its decoder are recurrent. The larger
ones of both have experts in the decoder.

What MaxText calls Qwen3-VL's parameters, and how it keeps them.
"""

from collections.abc import Sequence
from typing import Any

from mmjax.language.qwen3_5 import Qwen35Config, Qwen35MtpTextModel
from mmjax.models.grid_model import GridModel, grid_rules
from mmjax.models.interface import MultiModalModel
from mmjax.models.qwen3_vl.host_inputs import Qwen3VLHostInputs
from mmjax.models.text_model import text_rules
from mmjax.weights.maxtext import (
    ATTENTION_AND_MLP,
    KERNELS,
    Function,
    experts_kernel,
    flat,
    kernel,
    layer_rules,
    name_rules,
    table_of,
    transposed,
)
from mmjax.weights.rules import Join, Rule, RuleTypes

_LAYER = {
    "pre_self_attention_layer_norm.scale": "input_layernorm.weight",
    "post_self_attention_layer_norm.scale": "post_attention_layernorm.weight",
    **ATTENTION_AND_MLP,
    "moe_block.gate.kernel": "mlp.gate.weight",
    "moe_block.wi_0": "mlp.experts.gate_proj",
    "moe_block.wi_1": "mlp.experts.up_proj",
    "moe_block.wo": "mlp.experts.down_proj",
}
_ENCODER = r"vision_encoder\.Qwen3VLVisionEncoder_0\."
_BLOCK = _ENCODER + r"blocks_(\d+)\."
_MERGER = _ENCODER + r"merger_(\d+)\."
_LAST_MERGER = r"vision_encoder\.Qwen3VLVisionProjector_0\.merger\."
_OURS, _OUR_MERGER = r"visual.blocks.\1.", r"visual.deepstack_merger_list.\1."
_TOWER = {
    _ENCODER + r"patch_embed\.proj\.kernel": "visual.patch_embed.weight",
    _ENCODER + r"patch_embed\.proj\.bias": "visual.patch_embed.bias",
    _ENCODER + r"pos_embed_interpolate\.pos_embed": "visual.pos_embed.weight",
    _BLOCK + r"ln([12])\.scale": _OURS + r"norm\2.weight",
    _BLOCK + r"ln([12])\.bias": _OURS + r"norm\2.bias",
    _BLOCK + r"attn\.attn\.out\.kernel": _OURS + "attn.proj.weight",
    _BLOCK + r"attn\.attn\.out\.bias": _OURS + "attn.proj.bias",
    _BLOCK + r"mlp\.kernel": _OURS + "mlp.fc1.weight",
    _BLOCK + r"mlp\.bias": _OURS + "mlp.fc1.bias",
    _BLOCK + r"mlp_out\.kernel": _OURS + "mlp.fc2.weight",
    _BLOCK + r"mlp_out\.bias": _OURS + "mlp.fc2.bias",
    **{
        theirs + part: ours + our_part
        for theirs, ours in ((_MERGER, _OUR_MERGER), (_LAST_MERGER, "visual.merger."))
        for part, our_part in {
            r"ln_q\.scale": "ln_q.weight",
            r"ln_q\.bias": "ln_q.bias",
            r"mlp_0\.kernel": "fc1.weight",
            r"mlp_0\.bias": "fc1.bias",
            r"mlp_2\.kernel": "fc2.weight",
            r"mlp_2\.bias": "fc2.bias",
        }.items()
    },
}
_OTHERS = {
    r"decoder\.decoder_norm\.scale": "language_model.norm.weight",
    r"decoder\.logits_dense\.kernel": "language_model.lm_head.weight",
    r"token_embedder\.embedding": "language_model.embed_tokens.weight",
}


def _join_qkv(part: str, name: str, function: Function) -> Join:
    patterns = [rf"^{_BLOCK}attn\.attn\.{one}\.{part}$" for one in ("query", "key", "value")]
    return Join(patterns, f"{_OURS}attn.qkv.{name}", function)


def list_rules(hf_config: Any) -> list[RuleTypes]:
    """Return the rules of a whole checkpoint."""
    text = hf_config.get_text_config()
    experts = {r"^moe_block\.w": experts_kernel}
    patches = {r"patch_embed\.proj\.kernel$": transposed(4, 3, 0, 1, 2)}
    return [
        *layer_rules(_LAYER, {**experts, **KERNELS}, num_layers=text.num_hidden_layers),
        _join_qkv("kernel", "weight", kernel),
        _join_qkv("bias", "bias", flat),
        *name_rules(_TOWER, {**patches, **KERNELS}),
        *name_rules(_OTHERS, {**KERNELS, "embedding$": table_of(text.vocab_size)}),
    ]


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
        self.language_model.fed_layers = self.host_inputs(hf_config).fed_layers

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        return list_tower_rules(hf_config)

    @classmethod
    def maxtext_rules(cls, hf_config: Any) -> Sequence[RuleTypes]:
        """Return how MaxText's names become names in this module's tree."""
        return list_rules(hf_config)


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """Served as HF's class of this name."""


class Qwen3_5Mtp(MultiModalModel):
    """The layer beside Qwen3.5's decoder that guesses tokens ahead."""

    shared_names = ("language_model.embed_tokens.", "language_model.lm_head.")
    host_inputs = Qwen3VLHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        config = Qwen35Config.from_hf(hf_config.text_config)
        self.language_model = Qwen35MtpTextModel(
            config, is_tied=hf_config.tie_word_embeddings, dtype=dtype
        )

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the layer's names; no others are read."""
        return (
            Rule(r"^(?!mtp\.)", None),
            *text_rules(hf_config),
            Rule(r"^mtp\.", "language_model."),
        )


class Qwen3_5ForConditionalGeneration(GridModel):
    """Served as HF's class of this name."""

    host_inputs = Qwen3VLHostInputs
    mtp_class = Qwen3_5Mtp
    mtp_layers_key = "mtp_num_hidden_layers"

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the same; `mtp` is `Qwen3_5Mtp`'s."""
        return (Rule(r"^mtp\.", None), *list_tower_rules(hf_config))


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration):
    """Served as HF's class of this name."""
