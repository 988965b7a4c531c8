"""DeepSeek's OCR models: SAM, what reads its states, DeepSeek's experts.

DeepSeek-OCR (arXiv 2510.18234), where a CLIP reads them, and is joined with them; Unlimited-OCR
(arXiv 2606.23050), the same with another decoder's windows; and DeepSeek-OCR 2 (arXiv 2601.20552),
where queries read them in the order of reading.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

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
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.models.tower_model import TowerModel
from mmjax.towers.query_encoder import QueryEncoder, QueryEncoderConfig
from mmjax.towers.sam import SamConfig, SamEncoder
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, RuleTypes, Split

_TOWER, _READER = "vision_tower.sam_encoder.", "vision_tower.vision_encoder."
_SAM, _CLIP = r"^model\.sam_model\.", r"^model\.vision_model\."
_BLOCK = r"^model\.(?:sam_model\.blocks|vision_tower\.sam_encoder\.layers)\.(\d+)\."
_LAYER = rf"{_TOWER}layers.\1."
_CLIP_BLOCK, _CLIP_LAYER = rf"{_CLIP}transformer\.layers\.(\d+)\.", rf"{_READER}encoder.layers.\1."
_NAMES = {
    _BLOCK + r"attn\.proj\.": f"{_LAYER}attn.out_proj.",
    _BLOCK + r"(?:layer_)?norm([12])\.": rf"{_LAYER}layer_norm\2.",
    _BLOCK + r"mlp\.lin([12])\.": rf"{_LAYER}mlp.fc\2.",
    _BLOCK: _LAYER,
    _SAM + r"patch_embed\.proj\.": f"{_TOWER}patch_embed.projection.",
    _SAM + r"neck\.0\.": f"{_TOWER}neck.conv1.",
    _SAM + r"neck\.1\.": f"{_TOWER}neck.layer_norm1.",
    _SAM + r"neck\.2\.": f"{_TOWER}neck.conv2.",
    _SAM + r"neck\.3\.": f"{_TOWER}neck.layer_norm2.",
    _SAM + r"net_2\.": f"{_TOWER}proj.conv1.",
    _SAM + r"net_3\.": f"{_TOWER}proj.conv2.",
    _SAM: _TOWER,
    # Of patches, in place of which come SAM's states; and the numbers of positions.
    _CLIP + r"embeddings\.(?:patch_embedding\.|position_ids$)": None,
    _CLIP_BLOCK: _CLIP_LAYER,
    _CLIP: _READER,
    r"^model\.qwen2_model\.model\.model\.": _READER,
    r"^model\.qwen2_model\.query_(\d+)\.": r"vision_tower.query_\1_resolution.",
    r"^model\.projector\.layers\.": "multi_modal_projector.",
    r"^model\.view_seperator$": "view_separator",  # as published
    r"^model\.(layers|norm|embed_tokens)\.": r"language_model.\1.",
    r"^lm_head\.": "language_model.lm_head.",
    r"^model\.": "",
}
"""Names of DeepSeek's and Baidu's own files, and of HF's -> names in the tree; the first decides.

What reads SAM's states is a `vision_model` or a `qwen2_model` there.
"""


class SamTower(nnx.Module):
    """SAM's states of a view or a tile, and what reads them, which is as wide."""

    def __init__(self, vision_config: Any, *, dtype: Any) -> None:
        sam = SamConfig.from_hf(vision_config.sam_config)
        channels, width = sam.downsample_channels or (), vision_config.encoder_config.hidden_size
        if channels[-1:] != (width,):
            raise CheckpointError(
                f"`sam_config.downsample_channels` is {list(channels)}, and "
                f"`encoder_config.hidden_size` {width}; the last channels must be as wide"
            )
        self.width: int = width
        """Of what the tower gives."""
        self.sam_encoder = SamEncoder(sam, dtype=dtype)


class DeepseekOcr2Tower(SamTower):
    """States that are read by the queries of that size."""

    def __init__(self, vision_config: Any, *, dtype: Any) -> None:
        super().__init__(vision_config, dtype=dtype)
        encoder = QueryEncoderConfig.from_hf(vision_config.encoder_config)
        self.vision_encoder = QueryEncoder(encoder, dtype=dtype)
        self.query_768_resolution = PositionTable(TILE_TOKENS, self.width, dtype=dtype)
        self.query_1024_resolution = PositionTable(VIEW_TOKENS, self.width, dtype=dtype)

    def __call__(self, pixel_values: Float[Array, "I C S S"]) -> Float[Array, "I P D"]:
        """Return the queries' states, as many as SAM gives."""
        states = self.sam_encoder(pixel_values)
        tables = (self.query_768_resolution, self.query_1024_resolution)
        queries = next(t.weight[...] for t in tables if len(t.weight) == states.shape[1])
        return self.vision_encoder(states, queries)


class DeepseekOcrTower(SamTower):
    """States that are joined behind those of a CLIP that reads them."""

    def __init__(self, vision_config: Any, *, dtype: Any) -> None:
        super().__init__(vision_config, dtype=dtype)
        self.vision_encoder = ViT(ViTConfig.from_hf(vision_config.encoder_config), dtype=dtype)
        self.width *= 2

    def __call__(self, pixel_values: Float[Array, "I C S S"]) -> Float[Array, "I P _wide"]:
        """Return both states of each 4 x 4 patches, row by row."""
        states = self.sam_encoder(pixel_values)
        read, _ = self.vision_encoder(states)
        return jnp.concatenate([read[:, 1:], states], axis=-1)


class DeepseekOcr2ForConditionalGeneration(TowerModel):
    """Served as HF's class of this name."""

    host_inputs = DeepseekOcr2HostInputs
    tower_class: ClassVar[type[SamTower]] = DeepseekOcr2Tower

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        width = hf_config.get_text_config().hidden_size
        with self._mark_tower_model(hf_config, "image"):
            self.vision_tower = tower = self.tower_class(hf_config.vision_config, dtype=dtype)
            self.multi_modal_projector = Linear(tower.width, width, use_bias=True, dtype=dtype)
            self.view_separator = nnx.Param(jnp.zeros((width,), dtype))
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map HF's layout, and the one of DeepSeek's and Baidu's own checkpoints."""
        vision = hf_config.vision_config
        sam, clip = ([one.hidden_size] * 3 for one in (vision.sam_config, vision.encoder_config))
        return (
            Split.of_qkv(_BLOCK + r"attn\.qkv\.", f"{_LAYER}attn.", sam),
            Split.of_qkv(_CLIP_BLOCK + r"self_attn\.qkv_proj\.", f"{_CLIP_LAYER}self_attn.", clip),
            *text_rules(hf_config),
            *(Rule(pattern, name) for pattern, name in _NAMES.items()),
        )

    def embed_multimodal(
        self,
        pixel_values: Float[Array, "I C S S"],
        pixel_values_local: Float[Array, "I C _tiles Z Z"],
        num_tiles: Int[Array, " I"],
    ) -> Float[Array, "I _rows D"]:
        """Return the embeddings of all tiles, and of the view behind them.

        Those of tiles that an image lacks are zeros, or of black squares.
        """
        encode = super().embed_multimodal
        # First: `mmjax.parity` records what modules give at once, and not inside of the loop.
        view = encode(pixel_values)
        images, _, max_tiles = pixel_values_local.shape[:3]
        one_tile = jax.eval_shape(encode, pixel_values_local[:, :, 0])

        def encode_tile(number: Int[Array, ""]) -> Float[Array, "I P D"]:
            pixels = jax.lax.dynamic_index_in_dim(pixel_values_local, number, 2, keepdims=False)
            return encode(pixels)

        def encode_if_any(number: Int[Array, ""]) -> Float[Array, "I P D"]:
            none = jnp.zeros_like(one_tile)
            # A loop to the largest number would have no gradient.
            return jax.lax.cond(number < num_tiles.max(), encode_tile, lambda _: none, number)

        tiles = jax.lax.map(encode_if_any, jnp.arange(max_tiles, dtype=jnp.int32))
        tiles = tiles.swapaxes(0, 1)  # I tiles P D
        return jnp.concatenate([tiles.reshape(images, -1, view.shape[-1]), view], axis=1)

    def extra_embeds(self) -> Float[Array, "_extra D"]:
        """Return the embedding of a separator, which stands behind an image."""
        return self.view_separator[...][None]


class DeepseekOCRForCausalLM(DeepseekOcr2ForConditionalGeneration):
    """The first of them; Unlimited-OCR has windows."""

    host_inputs = DeepseekOcrHostInputs
    tower_class = DeepseekOcrTower

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        super().__init__(hf_config, dtype=dtype)
        text = hf_config.get_text_config()
        with self._mark_tower_model(hf_config, "image"):
            self.image_newline = nnx.Param(jnp.zeros((text.hidden_size,), dtype))
        if "reference_sliding_attention" in text.layer_types:
            self.sees = "reference"

    def extra_embeds(self) -> Float[Array, "_extra D"]:
        """Return the embeddings of a newline and of a separator."""
        return jnp.stack([self.image_newline[...], self.view_separator[...]])


class UnlimitedOcrForConditionalGeneration(DeepseekOCRForCausalLM):
    """Served as HF's class of this name; its images have more tiles."""

    host_inputs = UnlimitedOcrHostInputs
