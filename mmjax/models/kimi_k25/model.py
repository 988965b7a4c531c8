"""Kimi K2.5 and K2.6 (arXiv 2602.02276): MoonViT over pictures and clips, before DeepSeek-V3."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax.errors import check_settings
from mmjax.layers.attention.segments import refine_segments
from mmjax.models.interface import MultiModalModel
from mmjax.models.kimi_k25.host_inputs import KimiK25HostInputs
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.towers.packed_vit.config import PackedViTConfig
from mmjax.towers.packed_vit.tower import PackedViT
from mmjax.weights.rules import Rule, RuleTypes, Split, Turn

_VISUAL = r"^(?:model\.)?vision_tower\."
_PUBLISHED = _VISUAL + r"encoder\.blocks\.(\d+)\."
_MODULE = _VISUAL + r"layers\.(\d+)\."
_PROJECTOR = r"^(?:model\.)?mm_projector\."
_NAMES: dict[str, str | None] = {
    _VISUAL + r"patch_embed\.proj\.": "visual.patch_embed.",
    _VISUAL + r"patch_embed\.(?:pos_emb\.)?$": None,  # HF's modules have other outputs here
    _VISUAL + r"patch_embed\.pos_emb\.time_weight$": None,  # sinusoids
    _PUBLISHED + r"norm0\.": r"visual.blocks.\1.norm1.",
    _PUBLISHED + r"norm1\.": r"visual.blocks.\1.norm2.",
    _PUBLISHED + r"mlp\.fc0\.": r"visual.blocks.\1.mlp.fc1.",
    _PUBLISHED + r"mlp\.fc1\.": r"visual.blocks.\1.mlp.fc2.",
    _PUBLISHED + r"wo\.": r"visual.blocks.\1.attn.proj.",
    _MODULE: r"visual.blocks.\1.",
    _VISUAL + r"(?:encoder\.)?final_layernorm\.": "visual.post_layernorm.",
    _VISUAL + "$": None,
    _PROJECTOR + r"pre_norm\.": "visual.merger.ln_q.",
    _PROJECTOR + r"(?:proj\.0|in_proj)\.": "visual.merger.fc1.",
    _PROJECTOR + r"(?:proj\.2|out_proj)\.": "visual.merger.fc2.",
    _PROJECTOR: "visual.merger.",
}
"""Names of the hub's files and of HF's module -> ours; the first decides."""
_KINDS = {
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "video_attn_type": "spatial_temporal",
}
"""Keys of published configurations that HF's class does not read, and what it computes."""


def read_tower(hf_config: Any) -> PackedViTConfig:
    """Return the tower's configuration, with the projector as what merges squares.

    `CheckpointError` where the published keys contradict those that HF's class reads.
    """
    vision, text = hf_config.vision_config, hf_config.get_text_config()
    eps = hf_config.projection_layer_norm_eps
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    wanted = {
        **{f"vt_{name}": getattr(vision, name) for name in same},
        **{f"init_{n}": getattr(vision, n) for n in vars(vision) if n.startswith("pos_emb_")},
        **_KINDS,
        "mm_hidden_size": vision.hidden_size,
        "projector_ln_eps": eps,
        "text_hidden_size": text.hidden_size,
    }
    source = "mmjax, as HF's class, computes"
    check_settings(vars(vision), wanted, where="`vision_config`", source=source)
    width = {"projection_hidden_size": vision.hidden_size}
    check_settings(vars(hf_config), width, where="config.json", source="the tower has")
    tower = PackedViTConfig.from_hf(vision)
    return replace(tower, merged_width=text.hidden_size, merger_norm_eps=eps)


class Kimi_K25ForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = KimiK25HostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        with self._mark_tower_model(hf_config, {"image", "video"}):
            self.visual = PackedViT(read_tower(hf_config), dtype=dtype)
        self.language_model = build_text_model(hf_config, dtype=dtype)
        self.mark_ids = (hf_config.image_token_id, hf_config.video_token_id)

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up the text embeddings; an item's mark is token 0, also in an answer, as in HF."""
        is_mark = jnp.isin(token_ids, jnp.array(self.mark_ids, jnp.int32))
        return super().embed_input_ids(jnp.where(is_mark, 0, token_ids))

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the published layout, and the module's own names: it turns a head by its halves."""
        vision = hf_config.vision_config
        widths, attention = [vision.hidden_size] * 3, r"visual.blocks.\1.attn."
        pair = partial(_pair_neighbours, num_heads=vision.num_attention_heads)
        return (
            Split.of_qkv(_PUBLISHED + r"wqkv\.", attention, widths),
            Rule(_MODULE + r"attn\.([qk]_proj)\.", attention + r"\2.", Turn(pair, of_rows=True)),
            Rule(
                _VISUAL + r"patch_embed\.pos_emb\.(?:weight|position_embeddings)$",
                "visual.pos_embed.weight",
                Turn(_flatten_grid),
            ),
            *(Rule(pattern, name) for pattern, name in _NAMES.items()),
            *text_rules(hf_config),
            Rule(r"^(?:language_model\.)?lm_head\.", "language_model.lm_head."),
            Rule(r"^(?:model\.)?language_model\.(?:model\.)?", "language_model."),
        )

    def embed_multimodal(
        self,
        pixel_values: Float[Array, "P C _y _x"],
        places: Int[Array, "P 2"],
        position_ids: Int[Array, "P _taps"],
        position_weights: Float[Array, "P _taps"],
        clip_ids: Int[Array, " P"],
        *,
        frame_numbers: Int[Array, " P"],
        frame_offsets: Int[Array, "P _frames"],
        frame_weights: Float[Array, "P _frames"],
        segment_ids: Int[Array, " P"],
    ) -> Float[Array, "_rows _out"]:
        """Return the embeddings of packed pictures and clips, of which the first frame's count.

        `clip_ids`: numbers within an item, whose clips do not see each other.
        """
        # A clip has one embedding at least.
        num_clips = len(segment_ids) // self.visual.config.merge_size**2
        clips = refine_segments(segment_ids, clip_ids, num_parts=num_clips)
        with jax.named_scope("visual"):
            embeds, _ = self.visual(
                pixel_values.reshape(len(pixel_values), -1),
                places=places,
                segment_ids=clips,
                positions=(position_ids, position_weights),
                frame_numbers=frame_numbers,
                frame_taps=(frame_offsets, frame_weights),
            )
            return embeds


def _flatten_grid(table: Any) -> Any:
    """Return [positions, D] of [rows, columns, D]."""
    return table.reshape(-1, table.shape[-1])


def _pair_neighbours(tensor: Any, *, num_heads: int) -> Any:
    """Return rows whose neighbours are rotated together, of HF's, whose halves of a head are."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
