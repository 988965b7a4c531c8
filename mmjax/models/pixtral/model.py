"""Pixtral (arXiv 2410.07073): a tower over packed patches before LLaVA's projector, and Mistral.

Mistral 3's (Mistral Small 3.1 and 3.2, Ministral 3) and LightOnOCR's projector merges squares of
patches first (arXiv 2601.14251).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.connectors.mlp import MLPProjector
from mmjax.errors import CheckpointError
from mmjax.layers.linear import Linear
from mmjax.layers.norm import RMSNorm
from mmjax.models.pixtral.host_inputs import (
    PixtralHostInputs,
    check_whole_pictures,
    read_merge_size,
)
from mmjax.models.text_model import text_rules
from mmjax.models.tower_model import (
    TOWER,
    WRAPPER_RULES,
    FeatureLayersModel,
    drop_unread_blocks,
    read_feature_layers,
)
from mmjax.towers.packed_vit.config import PackedViTConfig
from mmjax.towers.packed_vit.tower import PackedViT
from mmjax.weights.rules import Rule, RuleTypes

_BLOCK = TOWER + r"transformer\.layers\.(\d+)\."
_NAMES = {
    TOWER + r"patch_conv\.": "patch_embed.",
    TOWER + r"ln_pre\.": "first_norm.",
    _BLOCK + r"attention_norm\.": r"blocks.\3.norm1.",
    _BLOCK + r"ffn_norm\.": r"blocks.\3.norm2.",
    _BLOCK + r"attention\.o_proj\.": r"blocks.\3.attn.proj.",
    _BLOCK + r"attention\.": r"blocks.\3.attn.",
    _BLOCK + r"feed_forward\.": r"blocks.\3.mlp.",
    _BLOCK: r"blocks.\3.",
}
"""Names of the file -> those of the tower; the first that matches decides."""


class PixtralForConditionalGeneration(FeatureLayersModel):
    """Served as HF's `LlavaForConditionalGeneration` with a `pixtral` tower."""

    host_inputs = PixtralHostInputs

    @staticmethod
    def build_tower(hf_config: Any, num_layers: int, *, dtype: Any) -> nnx.Module:
        check_whole_pictures(hf_config)
        config = PackedViTConfig.from_hf(hf_config.vision_config)
        return PackedViT(replace(config, num_blocks=num_layers), dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the three layouts, and the tower's own names."""
        return (
            *drop_unread_blocks(hf_config, read_feature_layers(hf_config)),
            *(Rule(pattern, f"vision_tower.{name}") for pattern, name in _NAMES.items()),
            *text_rules(hf_config),
            *WRAPPER_RULES,
        )


class PatchMerger(nnx.Module):
    """A linear layer over the patches of a square, whose features come channel by channel."""

    def __init__(self, width: int, merge_size: int, *, dtype: Any) -> None:
        self.per_square = merge_size**2
        self.merging_layer = Linear(width * self.per_square, width, use_bias=False, dtype=dtype)

    def __call__(self, x: Float[Array, "P D"]) -> Float[Array, "_squares D"]:
        """Merge squares; the patches of one stand behind each other."""
        squares = x.reshape(-1, self.per_square, x.shape[-1])
        # As HF's `unfold`: all patches of the first channel come first.
        return self.merging_layer(squares.transpose(0, 2, 1).reshape(len(squares), -1))


class MergingProjector(MLPProjector):
    """Normed patches, merged, then LLaVA's projector; parameters bear HF's names."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        if len(read_feature_layers(hf_config)) > 1:
            raise CheckpointError(
                f"`vision_feature_layer` is {hf_config.vision_feature_layer}; the norm before the "
                "patch merger has the width of one state: give one number"
            )
        width, text = hf_config.vision_config.hidden_size, hf_config.text_config
        super().__init__(
            width,
            text.hidden_size,
            getattr(hf_config, "projector_hidden_act", "gelu"),
            use_bias=getattr(hf_config, "multimodal_projector_bias", False),
            dtype=dtype,
        )
        self.norm = RMSNorm(width, eps=text.rms_norm_eps, dtype=dtype)
        self.patch_merger = PatchMerger(width, read_merge_size(hf_config), dtype=dtype)

    def __call__(
        self, x: Float[Array, "P D"], square_offsets: Int[Array, " P"] | None = None
    ) -> Float[Array, "_squares F"]:
        """Return an embedding for each square of patches, which come row by row."""
        normed = self.norm(x)
        if square_offsets is not None:
            normed = normed[jnp.arange(len(x)) + square_offsets]
        return super().__call__(self.patch_merger(normed))


class Mistral3ForConditionalGeneration(PixtralForConditionalGeneration):
    """Served as HF's class of this name."""

    build_projector = MergingProjector

    def embed_multimodal(
        self, *args: Any, square_offsets: Int[Array, " P"] | None = None, **inputs: Any
    ) -> Float[Array, "_rows D"]:
        """Return the embeddings of packed pictures; `square_offsets`: of `find_square_offsets`."""
        with jax.named_scope("vision_tower"):
            states = self.encode_units(*args, **inputs)
        with jax.named_scope("multi_modal_projector"):
            return self.multi_modal_projector(states, square_offsets)


class LightOnOcrForConditionalGeneration(Mistral3ForConditionalGeneration):
    """Served as HF's class of this name, whose tower is `vision_encoder`; it names no states."""
