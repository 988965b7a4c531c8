"""Florence-2 (arXiv 2311.06242): DaViT, a projector, BART's encoder over image and task, BART."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from mmjax.errors import CheckpointError
from mmjax.language.encoder_decoder.bart import BartConfig, BartEncoder
from mmjax.layers.linear import Linear
from mmjax.layers.norm import LayerNorm
from mmjax.layers.vision import PositionTable
from mmjax.models.florence2.host_inputs import Florence2HostInputs
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.models.tower_model import TowerModel
from mmjax.towers.davit import DavitConfig, DavitVisionTower
from mmjax.weights.rules import Rule, RuleTypes, Transposition

_EPS = 1e-5
"""The epsilon of the projector's norm; no key of the config names it."""
_FEATURES = ["spatial_avg_pool", "temporal_avg_pool"]
"""The average patch, and the patches, in the words of Microsoft's own config."""


class Florence2PositionEmbedding(nnx.Module):
    """Learned embeddings of a patch's column and row, side by side."""

    def __init__(self, vision: Any, *, dtype: Any) -> None:
        count, dim = vision.max_position_embeddings, vision.embed_dim[-1]
        self.row_embeddings = PositionTable(count, dim // 2, dtype=dtype)
        self.column_embeddings = PositionTable(count, dim - dim // 2, dtype=dtype)

    def __call__(self, height: int, width: int) -> Float[Array, "Y X D"]:
        """Return the embeddings of a grid."""
        columns = self.column_embeddings.weight[...][None, :width]
        rows = self.row_embeddings.weight[...][:height, None]
        shape = (height, width)
        return jnp.concatenate(
            [
                jnp.broadcast_to(columns, (*shape, columns.shape[-1])),
                jnp.broadcast_to(rows, (*shape, rows.shape[-1])),
            ],
            axis=-1,
        )


class Florence2TemporalEmbedding(nnx.Module):
    """The embeddings of frames, which checkpoints hold; a picture is the first frame."""

    def __init__(self, vision: Any, *, dtype: Any) -> None:
        shape = (vision.max_temporal_embeddings, vision.embed_dim[-1])
        self.pos_idx_to_embed = nnx.Param(jnp.zeros(shape, dtype))


class Florence2MultiModalProjector(nnx.Module):
    """Add positions; put the average patch before the patches; project to the encoder's width."""

    def __init__(self, vision: Any, *, dtype: Any) -> None:
        width, projected = vision.embed_dim[-1], vision.projection_dim
        self.image_projection = Linear(width, projected, use_bias=False, dtype=dtype)
        self.image_proj_norm = LayerNorm(projected, eps=_EPS, dtype=dtype)
        self.image_position_embed = Florence2PositionEmbedding(vision, dtype=dtype)
        self.visual_temporal_embed = Florence2TemporalEmbedding(vision, dtype=dtype)

    def __call__(self, grid: Float[Array, "I Y X D"]) -> Float[Array, "I P F"]:
        """Return a picture's `Y * X + 1` rows."""
        images, height, width, dim = grid.shape
        frame = self.visual_temporal_embed.pos_idx_to_embed[...][0]
        places = self.image_position_embed(height, width) + frame[None, None, :]
        patches = (grid + places[None, :, :, :]).reshape(images, height * width, dim)
        average = patches.astype(jnp.float32).mean(1, keepdims=True).astype(patches.dtype)
        rows = jnp.concatenate([average, patches], axis=1)
        return self.image_proj_norm(self.image_projection(rows))


class Florence2ForConditionalGeneration(TowerModel):
    """Served as HF's class of this name."""

    host_inputs = Florence2HostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision, text = hf_config.vision_config, hf_config.get_text_config()
        _check(hf_config)
        self.max_encoder_len = Florence2HostInputs(hf_config).max_encoder_len
        with self._mark_tower_model(hf_config, "image"):
            self.vision_tower = DavitVisionTower(DavitConfig.from_hf(vision), dtype=dtype)
            self.multi_modal_projector = Florence2MultiModalProjector(vision, dtype=dtype)
        self.encoder = BartEncoder(BartConfig.from_hf(text), dtype=dtype)
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map HF's layout, and the one of Microsoft's own checkpoints."""
        # BART's encoder and decoder are one `language_model`.
        bart = r"^(model\.)?language_model\.(model\.)?"
        return (
            *_original_rules(),
            *text_rules(hf_config),
            # Copies of the one table of tokens, as HF ties them.
            Rule(bart + r"(encoder|decoder)\.embed_tokens\.", None),
            Rule(bart + r"shared\.", "language_model.embed_tokens."),
            Rule(bart + r"encoder\.", "encoder."),
            Rule(bart + r"decoder\.", "language_model."),
            Rule(r"^(language_model\.)?lm_head\.", "language_model.lm_head."),
            Rule(r"^model\.", ""),
        )

    def encode_units(self, pixel_values: Float[Array, "U C _y _x"]) -> Float[Array, "U Y X D"]:
        """Return the grids of images; a prompt's text changes nothing in them."""
        dtype = self.encoder.layernorm_embedding.weight.dtype
        return self.vision_tower(pixel_values.astype(dtype))

    def encode_prompts(
        self, inputs_embeds: Float[Array, "B S D"], is_token: Bool[Array, "B S"]
    ) -> Float[Array, "B S D"]:
        """Return the hidden states of BART's encoder over image and task."""
        with jax.named_scope("encoder"):
            return self.encoder(inputs_embeds, is_token)


def _original_rules() -> Sequence[Rule]:
    """Return the rules of names that only Microsoft's own layout has."""
    block, projector = r"^(vision_tower\.blocks\..+)\.", "multi_modal_projector."
    return (
        Rule(r"^vision_tower\.convs\.(\d+)\.proj\.", r"vision_tower.convs.\1.conv."),
        Rule(block + r"(conv[12])\.fn\.dw\.", r"\1.\2."),
        Rule(block + r"(?:window|channel)_attn\.norm\.", r"\1.norm1."),
        Rule(block + r"((?:window|channel)_attn)\.fn\.", r"\1.\2."),
        Rule(block + r"ffn\.norm\.", r"\1.norm2."),
        Rule(block + r"ffn\.fn\.net\.", r"\1.ffn."),
        # A parameter [in, out], and not a layer's weight.
        Rule(r"^image_projection$", f"{projector}image_projection.weight", Transposition()),
        Rule(r"^image_pos_embed\.", f"{projector}image_position_embed."),
        Rule(r"^(image_proj_norm|visual_temporal_embed)\.", rf"{projector}\1."),
        # Added to the logits, and zeros, as nothing trains them.
        Rule(r"^language_model\.final_logits_bias$", None),
    )


def _check(hf_config: Any) -> None:
    vision, text = hf_config.vision_config, hf_config.get_text_config()
    if text.model_type != "bart":
        raise CheckpointError(
            f"`text_config.model_type` is `{text.model_type}`; Florence-2's must be `bart`, an "
            "encoder-decoder"
        )
    source = getattr(vision, "image_feature_source", None)
    if source not in (None, _FEATURES):
        raise CheckpointError(
            f"`vision_config.image_feature_source` is {source}; an image's rows are {_FEATURES}"
        )
    if vision.projection_dim != text.d_model:
        raise CheckpointError(
            f"`vision_config.projection_dim` is {vision.projection_dim}, and `text_config.d_model` "
            f"{text.d_model}; rows of a picture stand among those of text: both must be equal"
        )
    if not text.tie_word_embeddings:
        raise CheckpointError(
            "`text_config.tie_word_embeddings` is false; encoder and decoder must share one table"
        )
