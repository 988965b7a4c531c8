"""Molmo (Deitke et al., arXiv 2409.17146): CLIP, pooling by attention, a gated MLP, a decoder.

The image's features are added to the embedding of the token at whose place they stand.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.connectors.pooling import AttentionPooling
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.vision import join_squares
from mmjax.models.molmo.host_inputs import (
    NUM_NEW_TOKENS,
    POOLING_SIDE,
    MolmoHostInputs,
    MolmoVisionSizes,
    count_embedding_rows,
    new_token_id,
)
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.models.tower_model import AddedTokensModel, molmo_rules
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, RuleTypes

_BACKBONE = r"^model\.vision_backbone\."


class MolmoVisionBackbone(nnx.Module):
    """Crops to the features of their pooled patches, of the decoder's width."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        sizes = MolmoVisionSizes.from_hf(hf_config)
        layers = _read_layers(sizes)
        width = len(layers) * sizes.image_emb_dim
        self.image_vit = ViT(_vision_config(sizes), dtype=dtype)
        self.feature_layers = tuple(layer + 1 for layer in layers)
        self.pad_embed = nnx.Param(jnp.zeros((2, width), dtype))
        self.image_pooling_2d = AttentionPooling(
            width, sizes.image_emb_dim, num_heads=sizes.image_num_heads, dtype=dtype
        )
        self.image_projector = GatedMLP(
            sizes.image_emb_dim,
            hf_config.intermediate_size // 2,
            out_features=hf_config.hidden_size,
            activation="silu",
            dtype=dtype,
        )

    def __call__(
        self, images: Float[Array, "U P _pixels"], image_masks: Float[Array, "U P"]
    ) -> Float[Array, "U _tokens D"]:
        """Return the features; `image_masks` are the shares of the patches that are no padding."""
        pixels = images.astype(self.pad_embed.dtype)
        _, states = self.image_vit(pixels, feature_layers=self.feature_layers)
        features = jnp.concatenate([state[:, 1:] for state in states], axis=-1)
        features = features + self._pad(image_masks).astype(features.dtype)
        squares = join_squares(features, POOLING_SIDE)
        units, num_tokens, _ = squares.shape
        with jax.named_scope("image_pooling_2d"):
            windows = squares.reshape(units * num_tokens, POOLING_SIDE**2, -1)
            pooled = self.image_pooling_2d(windows)
        with jax.named_scope("image_projector"):
            return self.image_projector(pooled).reshape(units, num_tokens, -1)

    def _pad(self, image_masks: Float[Array, "U P"]) -> Float[Array, "U P _width"]:
        """Return what is added to each patch: one row if it is all padding, another if in part."""
        whole, part = (row[None, None, :] for row in self.pad_embed[...])
        masks = image_masks[:, :, None]
        return jnp.where(masks == 0, whole, jnp.where(masks < 1, part, jnp.zeros_like(part)))


class MolmoForCausalLM(AddedTokensModel):
    """Served as the published class of this name."""

    host_inputs = MolmoHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        self.patch_token_id = new_token_id(hf_config, "<im_patch>")
        with self._mark_tower_model(hf_config, "image"):
            self.vision_backbone = MolmoVisionBackbone(hf_config, dtype=dtype)
        self.language_model = build_text_model(hf_config, dtype=dtype)
        vocab_size = count_embedding_rows(hf_config)
        self.add_tokens(vocab_size, NUM_NEW_TOKENS, hf_config.hidden_size, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Cut what is fused, map the published names, and drop the blocks that nobody reads."""
        sizes = MolmoVisionSizes.from_hf(hf_config)
        unread = range(max(_read_layers(sizes)) + 1, sizes.image_num_layers)
        tower = Rule(_BACKBONE + r"image_vit\.", "vision_backbone.image_vit.")
        connectors = Rule(_BACKBONE, "vision_backbone.")
        return (*molmo_rules(tower, connectors, unread), *text_rules(hf_config))

    def embed_multimodal(
        self, images: Float[Array, "U P _pixels"], image_masks: Float[Array, "U P"]
    ) -> Float[Array, "U _tokens D"]:
        """Return the embeddings of every crop: its features, and the patch token's own under them.

        The engine writes them over the tokens', to which the published model adds the features.
        """
        with jax.named_scope("vision_backbone"):
            features = self.vision_backbone(images, image_masks)
        token = self.embed_input_ids(jnp.full(1, self.patch_token_id, jnp.int32))
        return features + token[None]


def _read_layers(sizes: MolmoVisionSizes) -> list[int]:
    """Return the blocks that are read, counted from 0."""
    return [sizes.image_num_layers + layer for layer in sizes.vit_layers]


def _vision_config(sizes: MolmoVisionSizes) -> ViTConfig:
    return ViTConfig(
        hidden_size=sizes.image_emb_dim,
        intermediate_size=sizes.image_mlp_dim,
        num_hidden_layers=max(_read_layers(sizes)) + 1,
        num_attention_heads=sizes.image_num_heads,
        num_channels=3,
        image_size=sizes.crop_side,
        patch_size=sizes.image_patch_size,
        layer_norm_eps=sizes.image_norm_eps,
        hidden_act=sizes.image_mlp_activations,
        has_class_token=True,
        has_patch_bias=False,
        has_first_norm=True,
        has_final_norm=False,
        takes_patches=True,
    )
