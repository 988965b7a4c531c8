"""What MaxText calls Qwen3-VL's parameters, and how it keeps them."""

from typing import Any

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
from mmjax.weights.rules import Join, RuleTypes

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
