"""LLaVA-1.5 (Liu et al., arXiv 2310.03744): a tower, a two-layer projector, a decoder.

The tower is CLIP or SigLIP. Which decoder is `text_config`'s affair: Vicuna, Llama, Mistral, Qwen2
and Gemma are no code here. LLaVA-NeXT (Liu et al., 2024), which Granite Vision is too (arXiv
2502.09927), sees pictures also in tiles, and has an embedding that ends their rows. Of
LLaVA-OneVision (arXiv 2408.03326) embeddings of large pictures, and of videos, are mixed to fewer.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.layers.recurrent.rounding import rounded
from mmjax.models.llava.host_inputs import (
    LlavaHostInputs,
    LlavaNextHostInputs,
    LlavaOnevisionHostInputs,
    count_extra_features,
)
from mmjax.models.text_model import is_head_tied
from mmjax.models.tower_model import FeatureLayersModel
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, RuleTypes


class LlavaForConditionalGeneration(FeatureLayersModel):
    """Served as HF's class of this name."""

    host_inputs = LlavaHostInputs

    @staticmethod
    def build_tower(hf_config: Any, num_layers: int, *, dtype: Any) -> nnx.Module:
        count_extra_features(hf_config)  # refuses other towers
        changes = {"num_hidden_layers": num_layers, "has_final_norm": False}
        return ViT(ViTConfig.from_hf(hf_config.vision_config, **changes), dtype=dtype)


class LlavaNextForConditionalGeneration(LlavaForConditionalGeneration):
    """Served as HF's class of this name."""

    host_inputs = LlavaNextHostInputs
    is_tied = staticmethod(is_head_tied)

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        super().__init__(hf_config, dtype=dtype)
        with self._mark_tower_model(hf_config, "image"):
            self.image_newline = nnx.Param(jnp.zeros((hf_config.text_config.hidden_size,), dtype))

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map LLaVA's names, and that of the embedding that ends rows."""
        newline = Rule(r"^model\.image_newline$", "image_newline")
        return (newline, *LlavaForConditionalGeneration.rules(hf_config))

    def extra_embeds(self) -> Float[Array, "_extra D"]:
        """Return the embedding that ends rows, which no adapter changes."""
        return self.image_newline[...][None]


class LlavaOnevisionForConditionalGeneration(LlavaNextForConditionalGeneration):
    """Served as HF's class of this name."""

    host_inputs = LlavaOnevisionHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        super().__init__(hf_config, dtype=dtype)
        self.patch_size = hf_config.vision_config.patch_size
        self.side = hf_config.vision_config.image_size // self.patch_size

    def embed_multimodal(
        self,
        pixel_values: Float[Array, "P _pixels"],
        taps: Int[Array, "P 4"],
        tap_weights: Float[Array, "P 4"],
        segment_ids: Int[Array, " P"],
    ) -> Float[Array, "P D"]:
        """Return the embedding of every row: of patches of its item, by their weights."""
        num_patches = self.side**2
        tile_rows = 1 << (num_patches - 1).bit_length()
        tiles = pixel_values.reshape(-1, tile_rows, pixel_values.shape[-1])[:, :num_patches]
        embeds = super().embed_multimodal(self._join_patches(tiles))
        with jax.named_scope("resample"):
            padded = jnp.pad(embeds, ((0, 0), (0, tile_rows - num_patches), (0, 0)))
            return _mix(padded.reshape(len(pixel_values), -1), taps, tap_weights, segment_ids)

    def _join_patches(self, tiles: Float[Array, "I _patches _pixels"]) -> Float[Array, "I C _y _x"]:
        """Return pictures of whole patches."""
        side, size = self.side, self.patch_size
        parts = tiles.reshape(len(tiles), side, side, -1, size, size)
        return parts.transpose(0, 3, 1, 4, 2, 5).reshape(len(tiles), -1, side * size, side * size)


def _mix(
    rows: Float[Array, "P D"],
    taps: Int[Array, "P 4"],
    weights: Float[Array, "P 4"],
    segment_ids: Int[Array, " P"],
) -> Float[Array, "P D"]:
    """Return sums of rows in float32; `taps` count from the first of their row's item."""
    places = jnp.arange(len(rows), dtype=jnp.int32)
    first = jax.lax.cummax(jnp.where(segment_ids != jnp.roll(segment_ids, 1), places, 0))
    parts = [
        rounded(rows[taps[:, n] + first].astype(jnp.float32) * weights[:, n, None])
        for n in range(taps.shape[1])
    ]
    return sum(parts[1:], parts[0]).astype(rows.dtype)
