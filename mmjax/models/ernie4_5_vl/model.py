"""ERNIE 4.5 VL (Baidu, 2025): a tower over packed patches, a resampler, experts by kind."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.errors import CheckpointError
from mmjax.layers.activation import get_activation
from mmjax.layers.linear import Linear
from mmjax.layers.norm import LayerNorm, RMSNorm
from mmjax.models.ernie4_5_vl.host_inputs import Ernie45VLHostInputs
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.towers.packed_vit.config import PackedViTConfig
from mmjax.towers.packed_vit.tower import PackedViT
from mmjax.weights.rules import Rule, RuleTypes

_TOWER = r"^(?:model\.)?vision_(?:tower|model)\."
_LINEAR = r"^model\.resampler_model\.(spatial|temporal)_linear\."
_NAMES = {
    _TOWER + r"patch_embed\.proj\.": "vision_tower.patch_embed.",
    _TOWER + r"ln\.": "vision_tower.post_layernorm.",
    _TOWER: "vision_tower.",
    _LINEAR + r"(?:0|fc1)\.": r"merger.\1_linear.fc1.",
    _LINEAR + r"(?:2|fc2)\.": r"merger.\1_linear.fc2.",
    _LINEAR + r"(?:3|ln)\.": r"merger.\1_linear.ln.",
    r"^model\.resampler_model\.": "merger.",
}
"""Names of the hub's files, of save_pretrained's and of the module -> ours; the first decides."""


class NormedMLP(nnx.Module):
    """Two linear layers, and a norm."""

    def __init__(self, in_features: int, width: int, *, eps: float, dtype: Any) -> None:
        self.fc1 = Linear(in_features, width, use_bias=True, dtype=dtype)
        self.fc2 = Linear(width, width, use_bias=True, dtype=dtype)
        self.ln = LayerNorm(width, eps=eps, dtype=dtype)
        self.activation = get_activation("gelu")

    def __call__(self, x: Float[Array, "S D"]) -> Float[Array, "S F"]:
        """Transform every square by itself."""
        return self.ln(self.fc2(self.activation(self.fc1(x))))


class Resampler(nnx.Module):
    """Squares of patches become embeddings, as if each frame came twice: of a picture."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision, text = hf_config.vision_config, hf_config.text_config
        if vision.temporal_merge_size != 2:
            raise CheckpointError(
                f"`vision_config.temporal_merge_size` is {vision.temporal_merge_size}; it must be 2"
            )
        self.width = vision.hidden_size * vision.spatial_merge_size**2
        options = {"eps": vision.rms_norm_eps, "dtype": dtype}
        self.spatial_linear = NormedMLP(self.width, self.width, **options)
        self.temporal_linear = NormedMLP(2 * self.width, self.width, **options)
        self.mlp = Linear(self.width, text.hidden_size, use_bias=True, dtype=dtype)
        self.after_norm = RMSNorm(text.hidden_size, eps=text.rms_norm_eps, dtype=dtype)

    def __call__(self, x: Float[Array, "P D"]) -> Float[Array, "_rows _out"]:
        """Merge squares; the patches of one stand behind each other."""
        squares = self.spatial_linear(x.reshape(-1, self.width))
        twice = jnp.concatenate([squares, squares], axis=-1)
        return self.after_norm(self.mlp(self.temporal_linear(twice)))


class Ernie4_5_VLMoeForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = Ernie45VLHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        with self._mark_tower_model(hf_config, "image"):
            tower = PackedViTConfig.from_hf(hf_config.vision_config)
            self.vision_tower = PackedViT(tower, dtype=dtype)
            self.merger = Resampler(hf_config, dtype=dtype)
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the hub's layout, save_pretrained's, and the module's own names."""
        return (
            *(Rule(pattern, name) for pattern, name in _NAMES.items()),
            *text_rules(hf_config),
            Rule(r"^lm_head\.", "language_model.lm_head."),
            Rule(r"^model\.(language_model\.)?", "language_model."),
        )

    def embed_multimodal(
        self,
        pixel_values: Float[Array, "P _pixels"],
        places: Int[Array, "P 2"],
        segment_ids: Int[Array, " P"],
        *,
        frame_ids: Int[Array, " P"],
    ) -> Float[Array, "_rows _out"]:
        """Return the embeddings of packed pictures, in the order of their squares."""
        with jax.named_scope("vision_tower"):
            states, _ = self.vision_tower(pixel_values, places=places, segment_ids=segment_ids)
        with jax.named_scope("merger"):
            return self.merger(states)
