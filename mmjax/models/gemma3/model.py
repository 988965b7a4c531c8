"""Gemma 3, multimodal: SigLIP, an average-pooling projector, Gemma's decoder.

What MaxText calls Gemma 3's parameters, and how it keeps them.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.norm import GemmaRMSNorm
from mmjax.models.gemma3.host_inputs import Gemma3HostInputs
from mmjax.models.tower_model import ViTModel
from mmjax.weights.maxtext import (
    ATTENTION_AND_MLP,
    KERNELS,
    first_of,
    gemma_scale,
    layer_rules,
    name_rules,
    table_of,
    transposed,
)
from mmjax.weights.rules import RuleTypes

_LAYERS_PER_SCAN = 6
"""Five that slide and one that does not."""
_LAYER = {
    "pre_self_attention_norm.scale": "input_layernorm.weight",
    "post_self_attention_norm.scale": "post_attention_layernorm.weight",
    "pre_ffw_norm.scale": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.scale": "post_feedforward_layernorm.weight",
    **ATTENTION_AND_MLP,
}
_ENCODER = r"vision_encoder\.Gemma3VisionEncoderLayer_0\."
_BLOCK = _ENCODER + r"Transformer\.encoderblock_(\d+)\."
_ATTENTION = _BLOCK + r"MultiHeadDotProductAttention_0\."
_EMBEDDER = r"vision_encoder\.VisionEmbedder_0\."
_EMBEDDINGS = "vision_tower.embeddings."
_OURS = r"vision_tower.encoder.layers.\1."
_TOWER = {
    _ENCODER + r"embedding\.kernel": _EMBEDDINGS + "patch_embedding.weight",
    _ENCODER + r"embedding\.bias": _EMBEDDINGS + "patch_embedding.bias",
    _ENCODER + "pos_embedding": _EMBEDDINGS + "position_embedding.weight",
    _ENCODER + r"Transformer\.encoder_norm\.scale": "vision_tower.post_layernorm.weight",
    _ENCODER + r"Transformer\.encoder_norm\.bias": "vision_tower.post_layernorm.bias",
    _BLOCK + r"LayerNorm_0\.scale": _OURS + "layer_norm1.weight",
    _BLOCK + r"LayerNorm_0\.bias": _OURS + "layer_norm1.bias",
    _BLOCK + r"LayerNorm_1\.scale": _OURS + "layer_norm2.weight",
    _BLOCK + r"LayerNorm_1\.bias": _OURS + "layer_norm2.bias",
    _ATTENTION + r"query\.kernel": _OURS + "self_attn.q_proj.weight",
    _ATTENTION + r"query\.bias": _OURS + "self_attn.q_proj.bias",
    _ATTENTION + r"key\.kernel": _OURS + "self_attn.k_proj.weight",
    _ATTENTION + r"key\.bias": _OURS + "self_attn.k_proj.bias",
    _ATTENTION + r"value\.kernel": _OURS + "self_attn.v_proj.weight",
    _ATTENTION + r"value\.bias": _OURS + "self_attn.v_proj.bias",
    _ATTENTION + r"out\.kernel": _OURS + "self_attn.out_proj.weight",
    _ATTENTION + r"out\.bias": _OURS + "self_attn.out_proj.bias",
    _BLOCK + r"MlpBlockViT_0\.Dense_0\.kernel": _OURS + "mlp.fc1.weight",
    _BLOCK + r"MlpBlockViT_0\.Dense_0\.bias": _OURS + "mlp.fc1.bias",
    _BLOCK + r"MlpBlockViT_0\.Dense_1\.kernel": _OURS + "mlp.fc2.weight",
    _BLOCK + r"MlpBlockViT_0\.Dense_1\.bias": _OURS + "mlp.fc2.bias",
}
_OTHERS = {
    r"decoder\.decoder_norm\.scale": "language_model.norm.weight",
    r"token_embedder\.embedding": "language_model.embed_tokens.weight",
    _EMBEDDER + r"mm_soft_embedding_norm\.scale": "multi_modal_projector.mm_soft_emb_norm.weight",
    _EMBEDDER + r"mm_input_projection\.w": "multi_modal_projector.mm_input_projection_weight",
}


def list_rules(hf_config: Any) -> list[RuleTypes]:
    """Return the rules of a whole checkpoint."""
    text = hf_config.get_text_config()
    # Its table is scaled already, by what is rounded so.
    table = table_of(text.vocab_size, divisor=float(ml_dtypes.bfloat16(text.hidden_size**0.5)))
    norms = {r"scale$": gemma_scale}
    pictures = {rf"^{_ENCODER}embedding\.kernel$": transposed(3, 2, 0, 1), "pos_emb": first_of}
    return [
        *layer_rules(
            _LAYER,
            {**KERNELS, **norms},
            num_layers=text.num_hidden_layers,
            num_per_scan=_LAYERS_PER_SCAN,
        ),
        *name_rules(_TOWER, {**pictures, **KERNELS}),
        *name_rules(_OTHERS, {**norms, "embedding$": table}),
    ]


class Gemma3MultiModalProjector(nnx.Module):
    """Average-pool the patches to `mm_tokens_per_image`, norm, project to the decoder's width."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision, text = hf_config.vision_config, hf_config.text_config
        self.mm_input_projection_weight = nnx.Param(
            jnp.zeros((vision.hidden_size, text.hidden_size), dtype)
        )
        self.mm_soft_emb_norm = GemmaRMSNorm(
            vision.hidden_size, eps=vision.layer_norm_eps, dtype=dtype
        )
        self.patches_per_side = vision.image_size // vision.patch_size
        self.kernel_size = self.patches_per_side // math.isqrt(hf_config.mm_tokens_per_image)

    def __call__(self, patches: Float[Array, "I P D"]) -> Float[Array, "I _tokens F"]:
        """Return the soft tokens of every image."""
        images, _, width = patches.shape
        size = self.kernel_size
        side = self.patches_per_side // size
        # AvgPool2d drops incomplete windows.
        grid = patches.reshape(images, self.patches_per_side, self.patches_per_side, width)
        grid = grid[:, : side * size, : side * size]
        windows = grid.reshape(images, side, size, side, size, width)
        pooled = windows.mean((2, 4)).reshape(images, side * side, width)
        normed = self.mm_soft_emb_norm(pooled).reshape(-1, width)
        projected = normed @ self.mm_input_projection_weight[...]
        return projected.reshape(images, side * side, -1)


class Gemma3ForConditionalGeneration(ViTModel):
    """Served as HF's class of this name.

    The soft token lies outside of the table of embeddings, and reads row 0.
    """

    host_inputs = Gemma3HostInputs
    sees = "items"
    build_projector = Gemma3MultiModalProjector

    @classmethod
    def maxtext_rules(cls, hf_config: Any) -> Sequence[RuleTypes]:
        """Return how MaxText's names become names in this module's tree."""
        return list_rules(hf_config)
