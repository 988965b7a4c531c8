"""InternVL (Chen et al., arXiv 2404.16821): InternViT, pixel shuffle, an MLP, a text decoder.

Two layouts of the same model: HF's (`InternVLForConditionalGeneration`), and the original one
(`InternVLChatModel`).
"""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from mmjax.errors import CheckpointError
from mmjax.layers.activation import get_activation
from mmjax.layers.linear import Linear
from mmjax.layers.norm import LayerNorm
from mmjax.models.interface import MultiModalModel
from mmjax.models.internvl.host_inputs import (
    InternVLHostInputs,
    only_side,
    shuffle_factor,
)
from mmjax.models.text_model import build_text_model
from mmjax.towers.internvit import InternViT, InternViTConfig, count_blocks
from mmjax.weights.rules import Rule, Split

_PROJECTOR_EPS = 1e-5
"""Of the projector's norm, which no configuration names: torch's own."""
_QK_NORM_EPS = 1e-6
"""Of the norms of queries and keys, which HF's configuration does not name."""


def pixel_shuffle(
    states: Float[Array, "I P D"], factor: int, *, is_transposed: bool = False
) -> Float[Array, "I _tokens _width"]:
    """Join each square of `factor` by `factor` patches into one state, row by row.

    `is_transposed`: the squares stand column by column (`ps_version` v1, as models before 2024 saw
    them).
    """
    images, num_patches, width = states.shape
    side = round(num_patches**0.5) // factor
    squares = states.reshape(images, side, factor, side, factor, width)
    order = (0, 3, 1, 2, 4, 5) if is_transposed else (0, 1, 3, 2, 4, 5)
    return squares.transpose(order).reshape(images, side * side, factor**2 * width)


class InternVLMultiModalProjector(nnx.Module):
    """Norm, then two linear layers to the decoder's width."""

    def __init__(self, in_features: int, width: int, activation: str, *, dtype: Any) -> None:
        self.layer_norm = LayerNorm(in_features, eps=_PROJECTOR_EPS, dtype=dtype)
        self.linear_1 = Linear(in_features, width, use_bias=True, dtype=dtype)
        self.linear_2 = Linear(width, width, use_bias=True, dtype=dtype)
        self.activation = get_activation(activation)

    def __call__(self, states: Float[Array, "I P D"]) -> Float[Array, "I P F"]:
        """Return the embeddings of every tile."""
        return self.linear_2(self.activation(self.linear_1(self.layer_norm(states))))


class InternVLModel(MultiModalModel):
    """What both layouts build, of configurations that are spelled differently."""

    host_inputs = InternVLHostInputs
    modalities = ("image", "video")
    tower_names = ("vision_tower", "multi_modal_projector")

    def __init__(
        self,
        hf_config: Any,
        vision: InternViTConfig,
        *,
        projector_act: str,
        is_tied: bool,
        dtype: Any,
        is_transposed: bool = False,
    ) -> None:
        self.factor, self.is_transposed = shuffle_factor(hf_config), is_transposed
        self.vision_tower = InternViT(vision, dtype=dtype)
        self.multi_modal_projector = InternVLMultiModalProjector(
            self.factor**2 * vision.hidden_size,
            hf_config.get_text_config().hidden_size,
            projector_act,
            dtype=dtype,
        )
        self.language_model = build_text_model(hf_config, dtype=dtype, is_tied=is_tied)

    def embed_multimodal(
        self, pixel_values: Float[Array, "I C _y _x"]
    ) -> Float[Array, "I _tokens D"]:
        """Return the embeddings of every tile or frame."""
        weight = self.multi_modal_projector.linear_1.weight
        with jax.named_scope("vision_tower"):
            states = self.vision_tower(pixel_values.astype(weight.dtype))
        with jax.named_scope("multi_modal_projector"):
            squares = pixel_shuffle(states[:, 1:], self.factor, is_transposed=self.is_transposed)
            return self.multi_modal_projector(squares)


class InternVLForConditionalGeneration(InternVLModel):
    """Served as HF's class of this name."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        strategy = hf_config.vision_feature_select_strategy
        if strategy != "default":
            raise CheckpointError(
                f"`vision_feature_select_strategy` is `{strategy}`; InternVL's must be `default`: "
                "a tile's class token has no place among its patches"
            )
        super().__init__(
            hf_config,
            _read_vision(hf_config),
            projector_act=hf_config.projector_hidden_act,
            is_tied=_is_tied(hf_config),
            dtype=dtype,
        )

    @staticmethod
    def rules(hf_config: Any) -> Sequence[Rule | Split]:
        """Map the hub's layout, save_pretrained's, and the module's own names."""
        vision = _read_vision(hf_config)
        tower = r"^(?:model\.)?vision_tower\."
        unread = range(vision.num_blocks, hf_config.vision_config.num_hidden_layers)
        dropped = [rf"{tower}encoder\.layer\.{layer}\." for layer in unread]
        dropped.append(rf"{tower}embeddings\.mask_token$")  # of its pre-training
        if not vision.has_final_norm:
            dropped.append(rf"{tower}layernorm\.")
        return (
            *(Rule(pattern, None) for pattern in dropped),
            Rule(rf"{tower}encoder\.layer\.", "vision_tower.encoder.layers."),
            Rule(
                rf"{tower}embeddings\.patch_embeddings\.projection\.",
                "vision_tower.embeddings.patch_embeddings.",
            ),
            Rule(r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
            Rule(r"^(language_model\.)?lm_head\.", "language_model.lm_head."),
            Rule(r"^(language_model\.model|model\.language_model)\.", "language_model."),
        )


def _read_vision(hf_config: Any) -> InternViTConfig:
    """Read HF's `InternVLVisionConfig`, and which of its states the projector reads."""
    vision = hf_config.vision_config
    layer, name = hf_config.vision_feature_layer, "vision_feature_layer"
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_channels")
    same = (*same, "layer_norm_eps", "hidden_act", "norm_type")
    return InternViTConfig(
        **{key: getattr(vision, key) for key in same},
        num_blocks=count_blocks(layer, vision.num_hidden_layers, name=name),
        image_size=only_side(vision.image_size, "image_size"),
        patch_size=only_side(vision.patch_size, "patch_size"),
        has_qkv_bias=vision.attention_bias,
        has_qk_norm=vision.use_qk_norm,
        qk_norm_eps=_QK_NORM_EPS,
        has_position_table=vision.use_absolute_position_embeddings,
        has_final_norm=layer == -1 and not vision.use_mean_pooling,
    )


def _is_tied(hf_config: Any) -> bool:
    """Return whether the head is the table of tokens, as the transformers that wrote it meant it.

    Before 5.0 the text model's own key said so, and the key here was not written.
    """
    written_by = getattr(hf_config, "transformers_version", None) or ""
    if written_by.startswith("4."):
        return hf_config.get_text_config().tie_word_embeddings
    return hf_config.tie_word_embeddings
