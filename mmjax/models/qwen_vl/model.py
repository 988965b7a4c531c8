"""Qwen-VL (arXiv 2308.12966): OpenCLIP's ViT, a resampler of 256 queries, Qwen's first decoder."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.connectors.resampler import Resampler
from mmjax.layers.norm import LayerNorm
from mmjax.models.interface import MultiModalModel
from mmjax.models.qwen_vl.host_inputs import NUM_QUERIES, QwenVLHostInputs, visual_config
from mmjax.models.text_model import build_text_model
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, Split

_EPS = 1e-6
"""The epsilon of every norm of the vision part; no key of the config names it."""
_NUM_POSITIONS = 256
"""Rows of the table of positions, whatever the image's size: it is resized to the patches."""
_BLOCK = r"^transformer\.visual\.transformer\.resblocks\.(\d+)\."
_LAYER = r"^transformer\.h\.(\d+)\."


class QWenLMHeadModel(MultiModalModel):
    """Served as the class of the published code; a checkpoint without `visual` is refused."""

    host_inputs = QwenVLHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        visual, vision = visual_config(hf_config), read_vision_config(hf_config)
        width = visual["output_dim"]
        with self._mark_tower_model(hf_config, "image"):
            self.visual = ViT(vision, dtype=dtype)
            self.attn_pool = Resampler(NUM_QUERIES, width, vision.hidden_size, dtype=dtype)
            self.ln_post = LayerNorm(width, eps=_EPS, dtype=dtype)
            self.proj = nnx.Param(jnp.zeros((width, width), dtype))
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[Rule | Split]:
        """Map the published names; fused queries, keys and values are cut."""
        vision, decoder = read_vision_config(hf_config), r"language_model.layers.\1."
        block, queries = r"visual.encoder.layers.\1.", hf_config.visual["output_dim"]
        heads = hf_config.kv_channels * hf_config.num_attention_heads
        head_dim = vision.hidden_size // vision.num_attention_heads
        return (
            # In the file, the rows of a head's query, key and value stand together.
            Split.of_qkv(_BLOCK + r"attn\.in_proj\.", f"{block}self_attn.", (head_dim,) * 3),
            Rule(_BLOCK + r"attn\.", f"{block}self_attn."),
            Rule(_BLOCK + r"ln_(\d)\.", rf"{block}layer_norm\2."),
            Rule(_BLOCK + r"mlp\.c_fc\.", f"{block}mlp.fc1."),
            Rule(_BLOCK + r"mlp\.c_proj\.", f"{block}mlp.fc2."),
            Split.of_qkv(
                r"^transformer\.visual\.attn_pool\.attn\.in_proj_",
                "attn_pool.attn.",
                (queries,) * 3,
            ),
            Rule(r"^transformer\.visual\.(attn_pool\.|ln_post\.|proj$)", r"\1"),
            Rule(r"^transformer\.visual\.conv1\.", "visual.embeddings.patch_embedding."),
            Rule(
                r"^transformer\.visual\.positional_embedding$",
                "visual.embeddings.position_embedding.weight",
            ),
            Rule(r"^transformer\.visual\.ln_pre\.", "visual.pre_layrnorm."),
            Split.of_qkv(_LAYER + r"attn\.c_attn\.", f"{decoder}self_attn.", (heads,) * 3),
            Rule(_LAYER + r"attn\.c_proj\.", f"{decoder}self_attn.o_proj."),
            Rule(_LAYER + r"ln_1\.", f"{decoder}input_layernorm."),
            Rule(_LAYER + r"ln_2\.", f"{decoder}post_attention_layernorm."),
            # The second one is activated.
            Rule(_LAYER + r"mlp\.w1\.", f"{decoder}mlp.up_proj."),
            Rule(_LAYER + r"mlp\.w2\.", f"{decoder}mlp.gate_proj."),
            Rule(_LAYER + r"mlp\.c_proj\.", f"{decoder}mlp.down_proj."),
            Rule(r"^transformer\.wte\.", "language_model.embed_tokens."),
            Rule(r"^transformer\.ln_f\.", "language_model.norm."),
            Rule(r"^lm_head\.", "language_model.lm_head."),
        )

    def embed_multimodal(
        self, pixel_values: Float[Array, "I C _y _x"]
    ) -> Float[Array, "I _queries D"]:
        """Return what the queries have read of every image, normed and projected."""
        with jax.named_scope("visual"):
            features, _ = self.visual(pixel_values)
        with jax.named_scope("attn_pool"):
            return self.ln_post(self.attn_pool(features)) @ self.proj[...]


def read_vision_config(hf_config: Any) -> ViTConfig:
    """Return the keys of `visual` as those of a vision tower."""
    visual = visual_config(hf_config)
    return ViTConfig(
        hidden_size=visual["width"],
        intermediate_size=int(visual["width"] * visual["mlp_ratio"]),
        num_hidden_layers=visual["layers"],
        num_attention_heads=visual["heads"],
        num_channels=3,
        image_size=visual["image_size"],
        patch_size=visual["patch_size"],
        layer_norm_eps=_EPS,
        hidden_act="gelu",
        has_patch_bias=False,
        has_first_norm=True,
        has_final_norm=False,
        num_positions=_NUM_POSITIONS,
    )
