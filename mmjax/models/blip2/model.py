"""BLIP-2 (arXiv 2301.12597): EVA's ViT, a Q-Former, a projection, OPT or another decoder."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.connectors.qformer import QFormerConfig, QFormerModel
from mmjax.errors import CheckpointError
from mmjax.layers.linear import Linear
from mmjax.models.blip2.host_inputs import Blip2HostInputs, check_language_model
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, RuleTypes, Split, Squeeze


class Blip2ForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = Blip2HostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        check_language_model(hf_config)
        vision, qformer, text = (
            hf_config.vision_config,
            hf_config.qformer_config,
            hf_config.text_config,
        )
        embed_width = getattr(text, "word_embed_proj_dim", text.hidden_size)
        if embed_width != text.hidden_size:
            raise CheckpointError(
                f"`text_config.word_embed_proj_dim` is {embed_width}, and `hidden_size` "
                f"{text.hidden_size}: BLIP-2 projects queries to the latter, so that they do not "
                "fit among embeddings of another width"
            )
        with self._mark_tower_model(hf_config, "image"):
            self.vision_model = ViT(ViTConfig.from_hf(vision), dtype=dtype)
            self.query_tokens = nnx.Param(
                jnp.zeros((1, hf_config.num_query_tokens, qformer.hidden_size), dtype)
            )
            self.qformer = QFormerModel(QFormerConfig.from_hf(qformer), dtype=dtype)
            self.language_projection = Linear(
                qformer.hidden_size, text.hidden_size, use_bias=True, dtype=dtype
            )
        # NOTE: HF ties in the inner model, by its own config.
        self.language_model = build_text_model(
            hf_config, dtype=dtype, is_tied=text.tie_word_embeddings
        )

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map HF's names, which the hub's are too, and drop the Q-Former's text branch."""
        width, table = hf_config.vision_config.hidden_size, r"^vision_model\.embeddings\."
        attention = r"^vision_model\.(.*)\.self_attn\."
        return (
            Rule(table + "class_embedding$", "vision_model.embeddings.class_embedding", Squeeze(2)),
            Rule(
                table + "position_embedding$",
                "vision_model.embeddings.position_embedding.weight",
                Squeeze(),
            ),
            Split(
                attention + r"qkv\.",
                [rf"vision_model.\1.self_attn.{part}_proj." for part in "qkv"],
                [width] * 3,
            ),
            Rule(attention + r"projection\.", r"vision_model.\1.self_attn.out_proj."),
            Rule(r"^(qformer\.)?embeddings\.", None),
            Rule(r"^qformer\.encoder\.layer\.\d+\.(intermediate|output)\.", None),
            Rule(r"^language_model\.model\.decoder\.final_layer_norm\.", "language_model.norm."),
            Rule(r"^language_model\.model\.(decoder\.)?", "language_model."),
        )

    def embed_multimodal(
        self, pixel_values: Float[Array, "I C _y _x"]
    ) -> Float[Array, "I _queries D"]:
        """Return what the queries have read of every picture, projected."""
        queries = self.query_tokens[...]
        with jax.named_scope("vision_model"):
            images, _ = self.vision_model(pixel_values)
        with jax.named_scope("qformer"):
            shape = (images.shape[0], *queries.shape[1:])
            hidden = self.qformer(jnp.broadcast_to(queries, shape), images)
        with jax.named_scope("language_projection"):
            return self.language_projection(hidden)
