"""DeepSeek's OCR models: SAM, what reads its states, DeepSeek's experts.

DeepSeek-OCR (arXiv 2510.18234), where a CLIP reads them, and is joined with them; Unlimited-OCR
(arXiv 2606.23050), the same with another decoder's windows; and DeepSeek-OCR 2 (arXiv 2601.20552),
where queries read them in the order of reading.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.errors import CheckpointError
from mmjax.layers.linear import Linear
from mmjax.layers.vision import PositionTable
from mmjax.models.deepseek_ocr2.host_inputs import (
    TILE_TOKENS,
    VIEW_TOKENS,
    DeepseekOcr2HostInputs,
    DeepseekOcrHostInputs,
    UnlimitedOcrHostInputs,
)
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model
from mmjax.towers.query_encoder import QueryEncoder, QueryEncoderConfig
from mmjax.towers.sam import SamConfig, SamEncoder
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, RuleTypes, Split, Stack


class DeepseekOcr2Tower(nnx.Module):
    """SAM's states of a view or a tile, read by the queries of that size."""

    def __init__(self, vision_config: Any, *, dtype: Any) -> None:
        sam = SamConfig.from_hf(vision_config.sam_config)
        encoder = QueryEncoderConfig.from_hf(vision_config.encoder_config)
        width = _check_width(sam, encoder.hidden_size)
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
        return list_rules(
            hf_config,
            {
                r"^model\.qwen2_model\.model\.model\.": "vision_tower.vision_encoder.",
                r"^model\.qwen2_model\.query_(\d+)\.": r"vision_tower.query_\1_resolution.",
            },
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
        rows = encode_squares(self._encode, pixel_values, pixel_values_local, num_tiles)
        separator = jnp.broadcast_to(
            self.view_separator[...][None, None], (len(rows), 1, rows.shape[-1])
        )
        return jnp.concatenate([rows, separator], axis=1)

    def _encode(self, pixel_values: Float[Array, "I C S S"]) -> Float[Array, "I P D"]:
        with jax.named_scope("vision_tower"):
            states = self.vision_tower(pixel_values)
        with jax.named_scope("multi_modal_projector"):
            return self.multi_modal_projector(states)


class UnlimitedOcrTower(nnx.Module):
    """SAM's states of a view or a tile, joined behind those of a CLIP that reads them."""

    def __init__(self, vision_config: Any, *, dtype: Any) -> None:
        sam = SamConfig.from_hf(vision_config.sam_config)
        encoder = ViTConfig.from_hf(vision_config.encoder_config)
        _check_width(sam, encoder.hidden_size)
        self.sam_encoder = SamEncoder(sam, dtype=dtype)
        self.vision_encoder = ViT(encoder, dtype=dtype)

    def __call__(self, pixel_values: Float[Array, "I C S S"]) -> Float[Array, "I P _wide"]:
        """Return both states of each 4 x 4 patches, row by row."""
        states = self.sam_encoder(pixel_values.astype(self.sam_encoder.pos_embed.dtype))
        read, _ = self.vision_encoder(states)
        return jnp.concatenate([read[:, 1:], states], axis=-1)


class UnlimitedOcrForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = UnlimitedOcrHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision, text = hf_config.vision_config, hf_config.get_text_config()
        states = vision.sam_config.downsample_channels[-1] + vision.encoder_config.hidden_size
        with self._mark_tower_model(hf_config, "image"):
            self.vision_tower = UnlimitedOcrTower(vision, dtype=dtype)
            self.multi_modal_projector = Linear(
                states, text.hidden_size, use_bias=True, dtype=dtype
            )
            self.image_newline, self.view_separator = (
                nnx.Param(jnp.zeros((text.hidden_size,), dtype)) for _ in range(2)
            )
        self.language_model = build_text_model(hf_config, dtype=dtype)
        if "reference_sliding_attention" in text.layer_types:
            self.sees = "reference"

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map HF's layout, and the one of DeepSeek's and Baidu's own checkpoints."""
        encoder, clip = "vision_tower.vision_encoder.", r"^model\.vision_model\."
        layer = r"transformer\.layers\.(\d+)\."
        widths = [hf_config.vision_config.encoder_config.hidden_size] * 3
        into = rf"{encoder}encoder.layers.\1."
        return (
            Split.of_qkv(rf"{clip}{layer}self_attn\.qkv_proj\.", f"{into}self_attn.", widths),
            # Of patches, in place of which come SAM's states; and the numbers of positions.
            Rule(rf"{clip}embeddings\.(?:patch_embedding\.|position_ids$)", None),
            *list_rules(hf_config, {clip + layer: into, clip: encoder}),
        )

    def embed_multimodal(
        self,
        pixel_values: Float[Array, "I C S S"],
        pixel_values_local: Float[Array, "I C _tiles Z Z"],
        num_tiles: Int[Array, " I"],
    ) -> Float[Array, "I P D"]:
        """Return the embeddings of all tiles, and of the view.

        Those of tiles that an image lacks are zeros, or of black squares.
        """
        return encode_squares(self._encode, pixel_values, pixel_values_local, num_tiles)

    def extra_embeds(self) -> Float[Array, "_extra D"]:
        """Return the embeddings of a newline and of a separator."""
        return jnp.stack([self.image_newline[...], self.view_separator[...]])

    def _encode(self, pixel_values: Float[Array, "I C S S"]) -> Float[Array, "I P D"]:
        with jax.named_scope("vision_tower"):
            states = self.vision_tower(pixel_values)
        with jax.named_scope("multi_modal_projector"):
            return self.multi_modal_projector(states)


class DeepseekOCRForCausalLM(UnlimitedOcrForConditionalGeneration):
    """The first of them, whose images have fewer tiles, and whose decoder has no windows."""

    host_inputs = DeepseekOcrHostInputs


def _check_width(sam: SamConfig, width: int) -> int:
    """Return the width of what reads SAM's states, which must have it."""
    channels = sam.downsample_channels or ()
    if channels[-1:] != (width,):
        raise CheckpointError(
            f"`sam_config.downsample_channels` is {list(channels)}, and "
            f"`encoder_config.hidden_size` {width}; the last channels must be as wide"
        )
    return width


def encode_squares(
    encode: Callable[[Float[Array, "I C S S"]], Float[Array, "I P D"]],
    pixel_values: Float[Array, "I C S S"],
    pixel_values_local: Float[Array, "I C _tiles Z Z"],
    num_tiles: Int[Array, " I"],
) -> Float[Array, "I _rows D"]:
    """Return the embeddings of all tiles, and of the view behind them.

    Those of tiles that an image lacks are zeros, or of black squares.
    """
    view = encode(pixel_values)
    images, _, max_tiles = pixel_values_local.shape[:3]
    shape = jax.eval_shape(encode, pixel_values_local[:, :, 0]).shape

    def encode_tile(number: Int[Array, ""]) -> Float[Array, "I P D"]:
        pixels = jax.lax.dynamic_index_in_dim(pixel_values_local, number, 2, keepdims=False)
        return encode(pixels)

    def encode_if_any(number: Int[Array, ""]) -> Float[Array, "I P D"]:
        none = jnp.zeros(shape, view.dtype)
        # A loop to the largest number would have no gradient.
        return jax.lax.cond(number < num_tiles.max(), encode_tile, lambda _: none, number)

    tiles = jax.lax.map(encode_if_any, jnp.arange(max_tiles, dtype=jnp.int32))
    tiles = tiles.swapaxes(0, 1)  # I tiles P D
    return jnp.concatenate([tiles.reshape(images, -1, view.shape[-1]), view], axis=1)


def list_rules(hf_config: Any, own: Mapping[str, str]) -> tuple[RuleTypes, ...]:
    """Return how names of SAM, of the projector and of the decoder become the tree's.

    `own`: those of what reads SAM's states.
    """
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
        **own,
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
