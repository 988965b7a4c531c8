"""BLIP-2 (arXiv 2301.12597): EVA's ViT, a Q-Former, a projection, OPT or another decoder."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from mmjax.connectors.qformer import QFormerConfig, QFormerModel
from mmjax.errors import CheckpointError
from mmjax.language.encoder_decoder.t5 import T5Config, T5Encoder
from mmjax.layers.linear import Linear
from mmjax.models.blip2.host_inputs import (
    Blip2HostInputs,
    Blip2T5HostInputs,
    check_language_model,
)
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, RuleTypes, Split, Squeeze


class Blip2ForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = Blip2HostInputs
    has_encoder = False
    """Whether the language model reads the prompt with an encoder of its own."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        check_language_model(hf_config, has_encoder=self.has_encoder)
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
        return (
            *_vision_rules(hf_config),
            *text_rules(hf_config),
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


class Blip2T5ForConditionalGeneration(Blip2ForConditionalGeneration):
    """BLIP-2 with T5: the queries stand before the text in its encoder's prompt."""

    host_inputs = Blip2T5HostInputs
    has_encoder = True

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        super().__init__(hf_config, dtype=dtype)
        self.max_encoder_len = Blip2T5HostInputs(hf_config).max_encoder_len
        self.encoder = T5Encoder(T5Config.from_hf(hf_config.text_config), dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map HF's names, which the hub's are too: T5 numbers what stands in a block."""
        coder = r"^language_model\.(?:en|de)coder"
        is_gated = hf_config.text_config.is_gated_act
        return (
            *_vision_rules(hf_config),
            # Copies of the one table of tokens, and what old files have beside all that is read.
            Rule(coder + r"\.embed_tokens\.", None),
            Rule(coder + r"\.block\.0\.layer\.1\.EncDecAttention\.relative_", None),
            Rule(r"^language_model\.shared\.", "language_model.embed_tokens."),
            *_t5_rules("encoder", "encoder", 1, is_gated=is_gated),
            *_t5_rules("decoder", "language_model", 2, is_gated=is_gated),
        )

    def encode_prompts(
        self, inputs_embeds: Float[Array, "B S D"], is_token: Bool[Array, "B S"]
    ) -> Float[Array, "B S D"]:
        """Return the hidden states of T5's encoder over queries and text."""
        with jax.named_scope("encoder"):
            return self.encoder(inputs_embeds, is_token)


def _t5_rules(name: str, tree: str, last: int, *, is_gated: bool) -> Sequence[Rule]:
    """Return the rules of T5's encoder or decoder, whose MLP has the number `last` in a block."""
    stack = rf"^language_model\.{name}"
    block, layer = stack + r"\.block\.(\d+)\.", rf"{tree}.layers.\1."
    part, mlp = block + r"layer\.", block + rf"layer\.{last}\."
    up, down = ("gate_proj", "down_proj") if is_gated else ("fc1", "fc2")
    renamed = (
        (part + r"0\.SelfAttention\.relative_attention_bias\.", f"{tree}.relative_attention_bias."),
        (stack + r"\.final_layer_norm\.", f"{tree}.norm."),
        (mlp + r"layer_norm\.", f"{layer}final_layer_norm."),
        (mlp + r"DenseReluDense\.wi(_0)?\.", f"{layer}mlp.{up}."),
        (mlp + r"DenseReluDense\.wi_1\.", f"{layer}mlp.up_proj."),
        (mlp + r"DenseReluDense\.wo\.", f"{layer}mlp.{down}."),
        (part + r"0\.layer_norm\.", f"{layer}self_attn_layer_norm."),
        (part + r"0\.SelfAttention\.([qkv])\.", rf"{layer}self_attn.\2_proj."),
        (part + r"0\.SelfAttention\.o\.", f"{layer}self_attn.out_proj."),
        (part + r"1\.layer_norm\.", f"{layer}encoder_attn_layer_norm."),
        (part + r"1\.EncDecAttention\.([qkv])\.", rf"{layer}encoder_attn.\2_proj."),
        (part + r"1\.EncDecAttention\.o\.", f"{layer}encoder_attn.out_proj."),
    )
    return [
        *(Rule(pattern, replacement) for pattern, replacement in renamed),
        Rule(part + r"\d+\.$", None),  # a part of a block, as HF's modules are named
        Rule(block, layer),
    ]


def _vision_rules(hf_config: Any) -> Sequence[RuleTypes]:
    """Return the rules of the tower and the Q-Former, without its text branch."""
    width, table = hf_config.vision_config.hidden_size, r"^vision_model\.embeddings\."
    attention = r"^vision_model\.(.*)\.self_attn\."
    return (
        Rule(table + "class_embedding$", "vision_model.embeddings.class_embedding", Squeeze(2)),
        Rule(
            table + "position_embedding$",
            "vision_model.embeddings.position_embedding.weight",
            Squeeze(),
        ),
        Split.of_qkv(attention + r"qkv\.", r"vision_model.\1.self_attn.", [width] * 3),
        Rule(attention + r"projection\.", r"vision_model.\1.self_attn.out_proj."),
        Rule(r"^(qformer\.)?embeddings\.", None),
        Rule(r"^qformer\.encoder\.layer\.\d+\.(intermediate|output)\.", None),
    )
