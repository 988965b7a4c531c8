"""MiniCPM-V 4.6 (arXiv 2509.18154): SigLIP that joins windows of patches midway, and Qwen3.5.

MiniCPM-V 4.7 differs by the places of its tokens, and MiniCPM-OCR by its pictures.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.connectors.mlp import MLPProjector
from mmjax.layers.attention.segments import refine_segments
from mmjax.layers.module import call_block
from mmjax.models.minicpmv4_6.host_inputs import (
    WINDOW,
    MiniCPMV46HostInputs,
    MiniCPMV47HostInputs,
    joins_windows,
)
from mmjax.models.text_model import build_text_model
from mmjax.models.tower_model import PACKED_SIGLIP_RULES, TOWER, TowerModel
from mmjax.towers.packed_vit.config import PackedViTConfig
from mmjax.towers.packed_vit.tower import PackedAttention, PackedViT
from mmjax.weights.rules import Rule, RuleTypes

_MERGER = r"^(?:model\.)?merger\."
_NAMES: dict[str, str | None] = {
    TOWER + r"vit_merger\.self_attn\.out_proj\.": "vision_tower.vit_merger.attn.proj.",
    TOWER + r"vit_merger\.self_attn\.": "vision_tower.vit_merger.attn.",
    TOWER + r"vit_merger\.layer_norm1\.": "vision_tower.vit_merger.norm1.",
    TOWER + r"vit_merger\.pre_norm\.": "vision_tower.vit_merger.mlp.layer_norm.",
    TOWER + r"vit_merger\.linear_": "vision_tower.vit_merger.mlp.linear_",
    _MERGER + r"mlp\.0\.pre_norm\.": "multi_modal_projector.layer_norm.",
    _MERGER + r"mlp\.0\.": "multi_modal_projector.",
    _MERGER: None,  # HF's module, which has a list for an output
}
"""Names of the hub's file and of the module -> ours; the first decides."""


class WindowMerger(nnx.Module):
    """Windows of 2 x 2 patches see themselves, and become one patch each."""

    def __init__(self, config: PackedViTConfig, *, dtype: Any) -> None:
        self.norm1 = config.make_norm(dtype=dtype)
        self.attn = PackedAttention(config, dtype=dtype)
        self.mlp = MLPProjector(
            WINDOW * config.hidden_size,
            config.hidden_size,
            "gelu_pytorch_tanh",
            norm_eps=config.norm_eps,
            inner=WINDOW * config.intermediate_size,
            dtype=dtype,
        )

    def __call__(
        self, x: Float[Array, "P D"], offsets: Int[Array, " P"]
    ) -> Float[Array, "_windows D"]:
        """Return windows row by row; `offsets` bring patches into them (`find_square_offsets`)."""
        x = x[jnp.arange(len(x)) + offsets]
        x = x + self.attn(self.norm1(x), None, jnp.arange(len(x)) // WINDOW)
        windows = x.reshape(-1, WINDOW, x.shape[-1])
        return self.mlp(windows.reshape(len(windows), -1)) + windows.mean(1)


class MiniCPMV46Tower(PackedViT):
    """SigLIP, which joins windows of patches behind one of its blocks."""

    def __init__(
        self, config: PackedViTConfig, *, joined_block: int | None = None, dtype: Any
    ) -> None:
        """`joined_block`: None: no patches are joined; the merger of the file is not read."""
        super().__init__(config, dtype=dtype)
        self.vit_merger = None if joined_block is None else WindowMerger(config, dtype=dtype)
        self.joined_block = joined_block

    def encode(
        self,
        pixel_values: Float[Array, "P _pixels"],
        position_ids: Int[Array, " P"],
        segment_ids: Int[Array, " P"],
        window_offsets: Int[Array, " P"] | None,
    ) -> Float[Array, "_windows D"]:
        """Return the normed states of windows, or of patches, row by row.

        `position_ids`: rows of the table of learned positions.
        """
        weights = jnp.ones((len(position_ids), 1), jnp.float32)
        x = self.embed_patches(pixel_values, (position_ids[:, None], weights))
        for number, block in enumerate(self.blocks):
            x = call_block(block, x, None, segment_ids)
            if self.vit_merger is not None and number == self.joined_block:
                x = call_block(self.vit_merger, x, window_offsets)
                segment_ids = segment_ids[::WINDOW]
        assert self.post_layernorm is not None
        return self.post_layernorm(x)


class MiniCPMV4_6ForConditionalGeneration(TowerModel):
    """Served as HF's class of this name."""

    host_inputs = MiniCPMV46HostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision = hf_config.vision_config
        self.has_windows = joins_windows(hf_config)
        width = WINDOW * vision.hidden_size
        with self._mark_tower_model(hf_config, {"image", "video"}):
            self.vision_tower = MiniCPMV46Tower(
                PackedViTConfig.from_hf(vision),
                joined_block=hf_config.insert_layer_id if self.has_windows else None,
                dtype=dtype,
            )
            self.multi_modal_projector = MLPProjector(
                width,
                hf_config.text_config.hidden_size,
                "gelu",
                norm_eps=1e-6,  # no key of the config
                inner=width,
                dtype=dtype,
            )
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map both layouts; what guesses tokens ahead of the model (`mtp`) is not read."""
        unread = [] if joins_windows(hf_config) else [Rule(TOWER + r"vit_merger\.", None)]
        names = [Rule(pattern, name) for pattern, name in _NAMES.items()]
        return (
            Rule(r"^mtp\.", None),
            *unread,
            *names,
            *PACKED_SIGLIP_RULES,
            *TowerModel.rules(hf_config),
        )

    def encode_units(
        self,
        pixel_values: Float[Array, "P C _y _x"],
        unit_ids: Int[Array, " P"],
        position_ids: Int[Array, " P"],
        square_offsets: Int[Array, " P"],
        segment_ids: Int[Array, " P"],
        window_offsets: Int[Array, " P"] | None = None,
    ) -> Float[Array, "_squares _features"]:
        """Return the states of each square beside each other.

        `unit_ids`: numbers within an item, of wholes, slices and frames. `square_offsets`: of
        `find_square_offsets`, for the patches, or for every window's.
        """
        per_square = WINDOW**2 if self.has_windows else WINDOW
        num_units = len(segment_ids) // per_square  # each has one embedding at least
        units = refine_segments(segment_ids, unit_ids, num_parts=num_units)
        pixels = pixel_values.reshape(len(pixel_values), -1)
        states = self.vision_tower.encode(pixels, position_ids, units, window_offsets)
        offsets = square_offsets[:: per_square // WINDOW]
        squares = states[jnp.arange(len(states)) + offsets]
        return squares.reshape(-1, WINDOW * states.shape[-1])


class MiniCPMV4_7ForConditionalGeneration(MiniCPMV4_6ForConditionalGeneration):
    """Served as HF's class of this name."""

    host_inputs = MiniCPMV47HostInputs


class MiniCPMOcrForConditionalGeneration(MiniCPMV4_6ForConditionalGeneration):
    """Served as HF's class of this name: 4.6's mathematics."""
