"""DeepSeek-OCR 2 (arXiv 2601.20552): SAM, queries in the order of reading, DeepSeek's experts."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.errors import CheckpointError
from mmjax.layers.linear import Linear
from mmjax.layers.vision import PositionTable
from mmjax.models.deepseek_ocr2.host_inputs import (
    MAX_TILES,
    TILE_TOKENS,
    VIEW_TOKENS,
    DeepseekOcr2HostInputs,
)
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model
from mmjax.towers.query_encoder import QueryEncoder, QueryEncoderConfig
from mmjax.towers.sam import SamConfig, SamEncoder
from mmjax.weights.rules import Rule, RuleTypes, Split, Stack


class DeepseekOcr2Tower(nnx.Module):
    """SAM's states of a view or a tile, read by the queries of that size."""

    def __init__(self, vision_config: Any, *, dtype: Any) -> None:
        sam = SamConfig.from_hf(vision_config.sam_config)
        encoder = QueryEncoderConfig.from_hf(vision_config.encoder_config)
        channels = sam.downsample_channels or ()
        if channels[-1:] != (encoder.hidden_size,):
            raise CheckpointError(
                f"`sam_config.downsample_channels` is {list(channels)}, and "
                f"`encoder_config.hidden_size` {encoder.hidden_size}; the last channels must be as "
                "wide"
            )
        width = encoder.hidden_size
        self.sam_encoder = SamEncoder(sam, dtype=dtype)
        self.vision_encoder = QueryEncoder(encoder, dtype=dtype)
        self.query_768_resolution = PositionTable(TILE_TOKENS, width, dtype=dtype)
        self.query_1024_resolution = PositionTable(VIEW_TOKENS, width, dtype=dtype)

    def __call__(self, pixel_values: Float[Array, "I C S S"]) -> Float[Array, "I P D"]:
        """Return the queries' states, as many as SAM gives."""
        states = self.sam_encoder(pixel_values.astype(self.sam_encoder.pos_embed.dtype))
        tables = (self.query_768_resolution, self.query_1024_resolution)
        queries = next(t.weight[...] for t in tables if len(t.weight) == states.shape[1])
        return self.vision_encoder(states, queries)


class DeepseekOcr2ForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = DeepseekOcr2HostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision, width = hf_config.vision_config, hf_config.get_text_config().hidden_size
        with self._mark_tower_model(hf_config, "image"):
            self.vision_tower = DeepseekOcr2Tower(vision, dtype=dtype)
            self.multi_modal_projector = Linear(
                vision.encoder_config.hidden_size, width, use_bias=True, dtype=dtype
            )
            self.view_separator = nnx.Param(jnp.zeros((width,), dtype))
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map HF's layout, and the one of DeepSeek's own checkpoints."""
        sam, moe = hf_config.vision_config.sam_config, hf_config.get_text_config()
        tower, experts = (
            "vision_tower.sam_encoder.",
            r"^model\.(?:language_model\.)?(.+\.experts)\.",
        )
        block = r"^model\.(?:sam_model\.blocks|vision_tower\.sam_encoder\.layers)\.(\d+)\."
        layer, widths = rf"{tower}layers.\1.", [sam.hidden_size] * 3
        parts = [rf"language_model.\1.{name}_proj" for name in ("gate", "up", "down")]
        halves = [moe.moe_intermediate_size] * 2
        renamed = {
            block + r"attn\.proj\.": f"{layer}attn.out_proj.",
            block + r"(?:layer_)?norm([12])\.": rf"{layer}layer_norm\2.",
            block + r"mlp\.lin([12])\.": rf"{layer}mlp.fc\2.",
            block: layer,
            r"^model\.sam_model\.patch_embed\.proj\.": f"{tower}patch_embed.projection.",
            r"^model\.sam_model\.neck\.0\.": f"{tower}neck.conv1.",
            r"^model\.sam_model\.neck\.1\.": f"{tower}neck.layer_norm1.",
            r"^model\.sam_model\.neck\.2\.": f"{tower}neck.conv2.",
            r"^model\.sam_model\.neck\.3\.": f"{tower}neck.layer_norm2.",
            r"^model\.sam_model\.net_2\.": f"{tower}proj.conv1.",
            r"^model\.sam_model\.net_3\.": f"{tower}proj.conv2.",
            r"^model\.sam_model\.": tower,
            r"^model\.qwen2_model\.model\.model\.": "vision_tower.vision_encoder.",
            r"^model\.qwen2_model\.query_(\d+)\.": r"vision_tower.query_\1_resolution.",
            r"^model\.projector\.layers\.": "multi_modal_projector.",
            r"^model\.view_seperator$": "view_separator",  # as published
            r"^model\.(layers|norm|embed_tokens)\.": r"language_model.\1.",
            r"^lm_head\.": "language_model.lm_head.",
            r"^model\.": "",
        }
        return (
            Split.of_qkv(block + r"attn\.qkv\.", f"{layer}attn.", widths),
            Split(experts + "gate_up_proj$", parts[:2], halves, of_stack=True),
            Split(experts + "down_proj$", parts[2:], [moe.hidden_size], of_stack=True),
            Stack(
                experts + r"(?P<index>\d+)\.(\w+_proj)\.weight$",
                r"language_model.\1.\3",
            ),
            *(Rule(pattern, name) for pattern, name in renamed.items()),
        )

    def embed_multimodal(
        self,
        pixel_values: Float[Array, "I C S S"],
        pixel_values_local: Float[Array, "I C _tiles Z Z"],
        num_tiles: Int[Array, " I"],
    ) -> Float[Array, "I P D"]:
        """Return the embeddings of all tiles, of the view, and the separator.

        Those of tiles that an image lacks are zeros, or of black squares.
        """
        view = self._encode(pixel_values)
        images, width = len(view), view.shape[-1]

        def encode_tile(number: Int[Array, ""]) -> Float[Array, "I P D"]:
            pixels = jax.lax.dynamic_index_in_dim(pixel_values_local, number, 2, keepdims=False)
            return self._encode(pixels)

        def encode_if_any(number: Int[Array, ""]) -> Float[Array, "I P D"]:
            none = jnp.zeros((images, TILE_TOKENS, width), view.dtype)
            # A loop to the largest number would have no gradient.
            return jax.lax.cond(number < num_tiles.max(), encode_tile, lambda _: none, number)

        tiles = jax.lax.map(encode_if_any, jnp.arange(MAX_TILES, dtype=jnp.int32))
        tiles = tiles.swapaxes(0, 1)  # I tiles P D
        separator = jnp.broadcast_to(self.view_separator[...][None, None], (images, 1, width))
        return jnp.concatenate([tiles.reshape(images, -1, width), view, separator], axis=1)

    def _encode(self, pixel_values: Float[Array, "I C S S"]) -> Float[Array, "I P D"]:
        with jax.named_scope("vision_tower"):
            states = self.vision_tower(pixel_values)
        with jax.named_scope("multi_modal_projector"):
            return self.multi_modal_projector(states)
