"""HunyuanOCR (arXiv 2511.19575): a tower over packed patches, their squares, HunYuan's decoder."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.layers.activation import get_activation
from mmjax.layers.linear import Linear
from mmjax.layers.norm import RMSNorm
from mmjax.models.hunyuan_vl.host_inputs import HunYuanVLHostInputs
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.towers.packed_vit.config import PackedViTConfig
from mmjax.towers.packed_vit.tower import PackedViT, PatchEmbed
from mmjax.weights.rules import Rule, RuleTypes

_TOWER = r"^(?:model\.)?(?:vit|vision_tower)\."
_BLOCK = _TOWER + r"layers\.(\d+)\."
_MERGER = _TOWER + r"(?:perceive|patch_merger)\."
_NAMES: dict[str, str | None] = {
    _TOWER + r"embeddings\.patch_embedding\.": "vision_tower.patch_embed.",
    _TOWER + r"embeddings\.position_embedding\.": "vision_tower.pos_embed.",
    _TOWER + r"embeddings\.$": None,  # HF's module of both has no output here
    _BLOCK + r"(?:input_layernorm|layer_norm1)\.": r"vision_tower.blocks.\1.norm1.",
    _BLOCK + r"(?:post_attention_layernorm|layer_norm2)\.": r"vision_tower.blocks.\1.norm2.",
    _BLOCK + r"self_attn\.o_proj\.": r"vision_tower.blocks.\1.attn.proj.",
    _BLOCK + r"self_attn\.": r"vision_tower.blocks.\1.attn.",
    _BLOCK + r"mlp\.(?:fc1|dense_h_to_4h)\.": r"vision_tower.blocks.\1.mlp.fc1.",
    _BLOCK + r"mlp\.(?:fc2|dense_4h_to_h)\.": r"vision_tower.blocks.\1.mlp.fc2.",
    _BLOCK: r"vision_tower.blocks.\1.",
    _MERGER + r"image_sep$": None,  # nothing reads it
    _MERGER + r"$": None,  # HF's module gives a picture's marks with its cells
    _MERGER + r"(?:proj\.0|proj_conv)\.": "patch_merger.proj_conv.",
    _MERGER + r"(?:proj\.2|proj_out)\.": "patch_merger.proj_out.",
    _MERGER + r"(?=mlp\.|after_rms\.|image_)": "patch_marks.",
    _MERGER: "patch_merger.",
    r"^lm_head\.": "language_model.lm_head.",
    r"^model\.(language_model\.)?": "language_model.",
}
"""Names of the hub's file, of save_pretrained's and of the module -> ours; the first decides."""


class SquareMerger(nnx.Module):
    """Squares of normed patches are joined."""

    def __init__(self, vision: Any, *, dtype: Any) -> None:
        inner, side = vision.hidden_size, vision.spatial_merge_size
        options = {"use_bias": True, "dtype": dtype}
        self.before_rms = RMSNorm(inner, eps=vision.rms_norm_eps, dtype=dtype)
        self.proj_conv = PatchEmbed(2 * inner, (inner, side, side), **options)
        self.activation = get_activation(vision.hidden_act)
        self.proj_out = PatchEmbed(4 * inner, (2 * inner, 1, 1), **options)
        self.per_square = side**2

    def __call__(self, x: Float[Array, "P D"]) -> Float[Array, "_squares _wide"]:
        """Merge squares; the patches of one stand behind each other."""
        squares = self.before_rms(x).reshape(-1, self.per_square, x.shape[-1]).swapaxes(1, 2)
        return self.proj_out(self.activation(self.proj_conv(squares.reshape(len(squares), -1))))


class SquareMarks(nnx.Module):
    """Squares become embeddings, and so do the learned ends of rows that stand beside them."""

    def __init__(self, vision: Any, width: int, *, dtype: Any) -> None:
        wide = 4 * vision.hidden_size
        self.mlp = Linear(wide, width, use_bias=True, dtype=dtype)
        self.image_newline = nnx.Param(jnp.zeros((wide,), dtype))
        self.image_begin = nnx.Param(jnp.zeros((width,), dtype))
        self.image_end = nnx.Param(jnp.zeros((width,), dtype))
        self.after_rms = RMSNorm(width, eps=vision.rms_norm_eps, dtype=dtype)

    def __call__(self, x: Float[Array, "_squares _wide"]) -> Float[Array, "_squares _out"]:
        """Project squares to the language model's width."""
        return self.after_rms(self.mlp(x))

    def write(self) -> Float[Array, "3 _out"]:
        """Return the embeddings of a row's end, a picture's beginning and its end."""
        newline = self.mlp(self.image_newline[...][None])
        bounds = jnp.stack([self.image_begin[...], self.image_end[...]])
        return self.after_rms(jnp.concatenate([newline, bounds]))


class HunYuanVLForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = HunYuanVLHostInputs
    unadapted = read_by_extra = ("patch_marks",)

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision, width = hf_config.vision_config, hf_config.text_config.hidden_size
        with self._mark_tower_model(hf_config, "image"):
            self.vision_tower = PackedViT(PackedViTConfig.from_hf(vision), dtype=dtype)
            self.patch_merger = SquareMerger(vision, dtype=dtype)
            self.patch_marks = SquareMarks(vision, width, dtype=dtype)
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the hub's layout, save_pretrained's, and the module's own names."""
        tower = tuple(Rule(pattern, name) for pattern, name in _NAMES.items())
        return (*tower[:-2], *text_rules(hf_config), *tower[-2:])

    def embed_multimodal(
        self,
        pixel_values: Float[Array, "P _pixels"],
        segment_ids: Int[Array, " P"],
        *,
        position_ids: Int[Array, "P _taps"],
        position_weights: Float[Array, "P _taps"],
        square_offsets: Int[Array, " P"],
    ) -> Float[Array, "_rows _out"]:
        """Return the embeddings of packed pictures' squares, in their order."""
        with jax.named_scope("vision_tower"):
            states, _ = self.vision_tower(
                pixel_values,
                segment_ids=segment_ids,
                positions=(position_ids, position_weights),
                square_offsets=square_offsets,
            )
        with jax.named_scope("patch_merger"):
            return self.patch_marks(self.patch_merger(states))

    def extra_embeds(self) -> Float[Array, "_extra D"]:
        """Return the embeddings of a row's end and of a picture's bounds."""
        return self.patch_marks.write()
