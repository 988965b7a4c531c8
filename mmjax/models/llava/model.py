"""LLaVA-1.5 (Liu et al., arXiv 2310.03744): a tower, a two-layer projector, a decoder.

The tower is CLIP or SigLIP. Which decoder is `text_config`'s affair: Vicuna, Llama, Mistral, Qwen2
and Gemma are no code here. LLaVA-NeXT (Liu et al., 2024), which Granite Vision is too (arXiv
2502.09927), sees pictures also in tiles, and has an embedding that ends their rows. Of
LLaVA-OneVision (arXiv 2408.03326) embeddings of large pictures, and of videos, are mixed to fewer.
Granite 4 Vision (IBM, 2026) has Q-Formers over windows in place of the projector, which feed
several layers of the decoder.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.connectors.qformer import QFormerConfig, WindowQFormer
from mmjax.layers.recurrent.rounding import rounded
from mmjax.models.host_inputs import choose_features
from mmjax.models.interface import MultiModalModel
from mmjax.models.llava.granite4_config import MAX_CORNERS, read_window
from mmjax.models.llava.host_inputs import (
    Granite4VisionHostInputs,
    LlavaHostInputs,
    LlavaNextHostInputs,
    LlavaOnevisionHostInputs,
    count_extra_features,
)
from mmjax.models.text_model import build_text_model, is_head_tied
from mmjax.models.tower_model import (
    TOWER,
    FeatureLayersModel,
    TowerModel,
    drop_unread_blocks,
    number_states,
)
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


class Granite4VisionForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = Granite4VisionHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        fed_layers = self.host_inputs(hf_config).fed_layers
        self.feature_layers = _read_states(hf_config)
        self.strategy = hf_config.vision_feature_select_strategy
        num_means = len(hf_config.deepstack_layer_map or ())
        build = partial(_build_window_qformer, hf_config, dtype=dtype)
        with self._mark_tower_model(hf_config, "image"):
            self.vision_tower = LlavaForConditionalGeneration.build_tower(
                hf_config, max(self.feature_layers), dtype=dtype
            )
            self.layerwise_projectors = nnx.List(build(None) for _ in range(num_means))
            corners = range(len(hf_config.spatial_target_layers))
            self.spatial_projectors = nnx.List(build(corner) for corner in corners)
            self.image_newline = nnx.Param(jnp.zeros((hf_config.text_config.hidden_size,), dtype))
        is_tied = is_head_tied(hf_config)
        self.language_model = build_text_model(hf_config, dtype=dtype, is_tied=is_tied)
        self.language_model.fed_layers = fed_layers

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map HF's names, which are those of the published files."""
        unread = range(len(hf_config.spatial_target_layers), MAX_CORNERS)
        return (
            *drop_unread_blocks(hf_config, _read_states(hf_config)),
            Rule(TOWER + r"post_layernorm\.", None),
            *(Rule(rf"^model\.spatial_projectors\.{number}\.", None) for number in unread),
            Rule(r"^model\.(image_newline$|(?:layerwise|spatial)_projectors\.)", r"\1"),
            *TowerModel.rules(hf_config),
        )

    def embed_multimodal(
        self, pixel_values: Float[Array, "I C _y _x"]
    ) -> Float[Array, "I _queries _wide"]:
        """Return an embedding of 0 for each query of a tile, and its features behind it."""
        with jax.named_scope("vision_tower"):
            _, states = self.vision_tower(pixel_values, feature_layers=self.feature_layers)
            kept = choose_features(states[0].shape[1], self.strategy)
        projectors = [*self.layerwise_projectors, *self.spatial_projectors]
        with jax.named_scope("projectors"):
            features = [
                project(state[:, kept]) for project, state in zip(projectors, states, strict=True)
            ]
        return jnp.concatenate([jnp.zeros_like(features[0]), *features], axis=-1)

    def extra_embeds(self) -> Float[Array, "_extra _wide"]:
        """Return what ends rows: for each layer that is fed the same, which no adapter changes."""
        newline = self.image_newline[...]
        features = [newline] * len(self.language_model.fed_layers)
        return jnp.concatenate([jnp.zeros_like(newline), *features])[None]


def _read_states(hf_config: Any) -> tuple[int, ...]:
    """Return which of the tower's states each Q-Former reads."""
    pairs, corners = hf_config.deepstack_layer_map or (), hf_config.spatial_target_layers
    given = [state for state, _ in pairs]
    means = number_states(hf_config, "deepstack_layer_map", given) if given else ()
    whole = number_states(hf_config, "spatial_vision_layer", hf_config.spatial_vision_layer)
    return (*means, *whole * len(corners))


def _build_window_qformer(hf_config: Any, corner: int | None, *, dtype: Any) -> WindowQFormer:
    return WindowQFormer(
        QFormerConfig.from_hf(hf_config.qformer_config),
        hf_config.text_config.hidden_size,
        window=read_window(hf_config),
        corner=corner,
        dtype=dtype,
    )


class LlavaOnevisionForConditionalGeneration(LlavaNextForConditionalGeneration):
    """Served as HF's class of this name."""

    host_inputs = LlavaOnevisionHostInputs

    def embed_multimodal(
        self,
        pixel_values: Float[Array, "P _pixels"],
        taps: Int[Array, "P 4"],
        tap_weights: Float[Array, "P 4"],
        segment_ids: Int[Array, " P"],
    ) -> Float[Array, "P D"]:
        """Return the embedding of every row: of patches of its item, by their weights."""
        num_patches = self.vision_tower.embeddings.config.num_patches
        tile_rows = 1 << (num_patches - 1).bit_length()
        tiles = pixel_values.reshape(-1, tile_rows, pixel_values.shape[-1])[:, :num_patches]
        embeds = super().embed_multimodal(tiles)
        with jax.named_scope("resample"):
            padded = jnp.pad(embeds, ((0, 0), (0, tile_rows - num_patches), (0, 0)))
            return _mix(padded.reshape(len(pixel_values), -1), taps, tap_weights, segment_ids)


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
