"""LLaVA-1.5 (Liu et al., arXiv 2310.03744): a tower, a two-layer projector, a decoder.

The tower is CLIP, SigLIP, or Pixtral's, which HF wraps so too. Which decoder is `text_config`'s
affair: Vicuna, Llama, Mistral, Qwen2 and Gemma are no code here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.errors import CheckpointError
from mmjax.layers.activation import get_activation
from mmjax.layers.linear import Linear
from mmjax.layers.vision import VisionConfig
from mmjax.models.interface import MultiModalModel
from mmjax.models.llava.host_inputs import (
    LlavaHostInputs,
    check_whole_pictures,
    choose_features,
    count_extra_features,
    has_pixtral_tower,
)
from mmjax.models.text_model import build_text_model
from mmjax.towers.clip import ClipVisionTower
from mmjax.towers.pixtral import PixtralConfig, PixtralVisionTower
from mmjax.towers.siglip import SiglipVisionTower
from mmjax.weights.rules import Rule


class LlavaMultiModalProjector(nnx.Module):
    """Two linear layers and an activation, from the chosen features to the decoder's width."""

    def __init__(self, hf_config: Any, *, num_states: int, dtype: Any) -> None:
        width, bias = hf_config.text_config.hidden_size, hf_config.multimodal_projector_bias
        features = hf_config.vision_config.hidden_size * num_states
        self.linear_1 = Linear(features, width, use_bias=bias, dtype=dtype)
        self.linear_2 = Linear(width, width, use_bias=bias, dtype=dtype)
        self.activation = get_activation(hf_config.projector_hidden_act)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
        """Transform every feature by itself."""
        return self.linear_2(self.activation(self.linear_1(x)))


class LlavaForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = LlavaHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        self.feature_layers = read_feature_layers(hf_config)
        self.strategy = hf_config.vision_feature_select_strategy
        with self._mark_tower_model(hf_config, "image"):
            self.vision_tower = _build_tower(hf_config, max(self.feature_layers), dtype=dtype)
            self.multi_modal_projector = LlavaMultiModalProjector(
                hf_config, num_states=len(self.feature_layers), dtype=dtype
            )
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[Rule]:
        """Map the hub's layout, save_pretrained's, and the module's own names."""
        tower = r"^(model\.)?vision_tower\.(vision_model\.)?"
        read = max(read_feature_layers(hf_config))
        unread = "|".join(map(str, range(read, hf_config.vision_config.num_hidden_layers)))
        drops = (
            [Rule(rf"{tower}(encoder|transformer)\.layers\.({unread})\.", None)] if unread else []
        )
        return (
            *drops,
            Rule(rf"{tower}(head|post_layernorm)\.", None),
            Rule(tower, "vision_tower."),
            Rule(r"^(language_model\.)?lm_head\.", "language_model.lm_head."),
            Rule(r"^(language_model\.model|model\.language_model)\.", "language_model."),
            Rule(r"^model\.multi_modal_projector\.", "multi_modal_projector."),
        )

    def embed_multimodal(
        self, pixel_values: Float[Array, "..."], **packed: Int[Array, "..."]
    ) -> Float[Array, "I _tokens D"] | Float[Array, "P D"]:
        """Return the embeddings of every picture, or of every patch of a pack.

        `packed`: what Pixtral's tower takes beside the pixels.
        """
        weight = self.multi_modal_projector.linear_1.weight
        with jax.named_scope("vision_tower"):
            _, states = self.vision_tower(
                pixel_values.astype(weight.dtype), feature_layers=self.feature_layers, **packed
            )
        kept = choose_features(states[0].shape[-2], self.strategy)
        features = jnp.concatenate([state[..., kept, :] for state in states], axis=-1)
        with jax.named_scope("multi_modal_projector"):
            return self.multi_modal_projector(features)


def read_feature_layers(hf_config: Any) -> tuple[int, ...]:
    """Return which of the tower's states are read: 0 is the embedding, n block n - 1's output.

    `vision_feature_layer` is one or a list, and may count from the end.
    """
    given, num_layers = hf_config.vision_feature_layer, hf_config.vision_config.num_hidden_layers
    layers = [given] if isinstance(given, int) else list(given)
    if not layers or any(not -num_layers - 1 <= layer <= num_layers for layer in layers):
        raise CheckpointError(
            f"`vision_feature_layer` is {given}, and the tower has {num_layers} layers; give one "
            f"or several of {-num_layers - 1} to {num_layers}"
        )
    return tuple(layer % (num_layers + 1) for layer in layers)


def _build_tower(hf_config: Any, num_layers: int, *, dtype: Any) -> nnx.Module:
    """Return the tower up to the last layer that is read."""
    vision = hf_config.vision_config
    if has_pixtral_tower(hf_config):
        check_whole_pictures(hf_config)
        read = replace(PixtralConfig.from_hf(vision), num_hidden_layers=num_layers)
        return PixtralVisionTower(read, dtype=dtype)
    count_extra_features(hf_config)  # refuses other towers
    config = replace(VisionConfig.from_hf(vision), num_hidden_layers=num_layers)
    if vision.model_type == "clip_vision_model":
        return ClipVisionTower(config, dtype=dtype)
    return SiglipVisionTower(config, dtype=dtype, has_final_norm=False)
