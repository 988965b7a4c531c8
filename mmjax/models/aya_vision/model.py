"""Aya Vision (arXiv 2505.08751): SigLIP, a pixel shuffle, a gated projector, Cohere's decoder."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.errors import CheckpointError
from mmjax.layers.activation import get_activation
from mmjax.layers.linear import Linear
from mmjax.layers.norm import LayerNorm
from mmjax.layers.vision import join_squares
from mmjax.models.aya_vision.host_inputs import AyaVisionHostInputs
from mmjax.models.tower_model import FeatureLayersModel, ViTModel
from mmjax.towers.vit import ViT, ViTConfig


def _read_vision(hf_config: Any, **changes: Any) -> ViTConfig:
    kind = hf_config.vision_config.model_type
    if kind != "siglip_vision_model":
        raise CheckpointError(
            f"`vision_config.model_type` is `{kind}`; {hf_config.model_type} is served with "
            "`siglip_vision_model`"
        )
    return ViTConfig.from_hf(hf_config.vision_config, **changes)


class AyaVisionProjector(nnx.Module):
    """From squares of patches to the decoder's width; parameters bear HF's names."""

    def __init__(self, hf_config: Any, *, norm_eps: float | None, dtype: Any) -> None:
        """`norm_eps`: of a norm before the first layer; None: there is none."""
        features = hf_config.vision_config.hidden_size * hf_config.downsample_factor**2
        width = hf_config.text_config.hidden_size
        inner = getattr(hf_config, "alignment_intermediate_size", width)
        self.layernorm = (
            None if norm_eps is None else LayerNorm(features, eps=norm_eps, dtype=dtype)
        )
        self.linear_1 = Linear(features, inner, use_bias=True, dtype=dtype)
        self.linear_2 = Linear(inner // 2, width, use_bias=True, dtype=dtype)
        self.activation = get_activation("silu")

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P F"]:
        """Transform every square by itself; the second half of `linear_1` is the gate."""
        normed = x if self.layernorm is None else self.layernorm(x)
        value, gate = jnp.split(self.linear_1(normed), 2, axis=-1)
        return self.linear_2(self.activation(gate) * value)


class AyaVisionForConditionalGeneration(FeatureLayersModel):
    """Served as HF's class of this name."""

    host_inputs = AyaVisionHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        super().__init__(hf_config, dtype=dtype)
        self.factor = hf_config.downsample_factor
        if len(self.feature_layers) != 1 or self.strategy != "full":
            raise CheckpointError(
                f"`vision_feature_layer` is {hf_config.vision_feature_layer} and "
                f"`vision_feature_select_strategy` `{self.strategy}`; Aya Vision's projector reads "
                "all patches (`full`) of one state of the tower"
            )

    @staticmethod
    def build_tower(hf_config: Any, num_layers: int, *, dtype: Any) -> nnx.Module:
        changes = {"num_hidden_layers": num_layers, "has_final_norm": False}
        return ViT(_read_vision(hf_config, **changes), dtype=dtype)

    @staticmethod
    def build_projector(hf_config: Any, *, dtype: Any) -> nnx.Module:
        return AyaVisionProjector(hf_config, norm_eps=hf_config.adapter_layer_norm_eps, dtype=dtype)

    def encode_units(
        self, pixel_values: Float[Array, "I C _y _x"], **packed: Array
    ) -> Float[Array, "I _tokens _width"]:
        """Return the squares of patches of every tile."""
        return join_squares(super().encode_units(pixel_values, **packed), self.factor)


class Cohere2VisionForConditionalGeneration(ViTModel):
    """Command A Vision, served as HF's class of this name: all of the tower, no norm behind it."""

    host_inputs = AyaVisionHostInputs
    factor_key = "downsample_factor"
    read_tower = staticmethod(_read_vision)

    @staticmethod
    def build_projector(hf_config: Any, *, dtype: Any) -> nnx.Module:
        return AyaVisionProjector(hf_config, norm_eps=None, dtype=dtype)
