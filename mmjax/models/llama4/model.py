"""Llama 4 (Meta, 2025): a tower with rotary places, squares of its patches, experts."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from mmjax.errors import check_settings
from mmjax.layers.activation import get_activation
from mmjax.layers.linear import Linear
from mmjax.layers.vision import join_squares
from mmjax.models.llama4.host_inputs import Llama4HostInputs, find_factor, normalize
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.models.tower_model import WRAPPER_RULES, TowerModel
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, RuleTypes, Turn


class Adapter(nnx.Module):
    """Two layers over squares of patches, each with its activation; parameters bear HF's names."""

    def __init__(self, vision: Any, *, dtype: Any) -> None:
        width = vision.projector_output_dim
        self.fc1 = Linear(vision.intermediate_size, width, use_bias=False, dtype=dtype)
        self.fc2 = Linear(width, width, use_bias=False, dtype=dtype)
        self.activation = get_activation("gelu")  # HF's, whatever `hidden_act` says

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P _width"]:
        """Transform every square by itself."""
        return self.activation(self.fc2(self.activation(self.fc1(x))))


class Llama4Projector(nnx.Module):
    """From squares of patches to the decoder's width."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision, width = hf_config.vision_config, hf_config.text_config.hidden_size
        self.adapter = Adapter(vision, dtype=dtype)
        self.linear_1 = Linear(vision.projector_output_dim, width, use_bias=False, dtype=dtype)

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P F"]:
        """Transform every square by itself."""
        return self.linear_1(self.adapter(x))


class Llama4ForConditionalGeneration(TowerModel):
    """Served as HF's class of this name."""

    host_inputs = Llama4HostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision = hf_config.vision_config
        self.factor = find_factor(vision)
        widths = {
            "intermediate_size": vision.hidden_size * self.factor**2,
            **dict.fromkeys(
                ("projector_input_dim", "vision_output_dim"), vision.projector_output_dim
            ),
        }
        source = "the adapter over squares of patches needs"
        check_settings(vision, widths, where="`vision_config`", source=source)
        with self._mark_tower_model(hf_config, "image"):
            self.vision_tower = ViT(read_vision(vision), dtype=dtype)
            self.multi_modal_projector = Llama4Projector(hf_config, dtype=dtype)
        # The decoder is a model of its own in HF, whose head goes by the decoder's own key.
        is_tied = hf_config.text_config.tie_word_embeddings
        self.language_model = build_text_model(hf_config, dtype=dtype, is_tied=is_tied)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the module's own names, which are those of published files."""
        return (
            *rename_tower(r"^(?:model\.)?vision_model\.", hf_config.vision_config),
            *text_rules(hf_config),
            *WRAPPER_RULES,
        )

    def encode_units(
        self, pixel_values: Float[Array, "I C _y _x"]
    ) -> Float[Array, "I _tokens _width"]:
        """Return the squares of patches of every tile; `pixel_values` are from 0 to 255."""
        round_off = partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
        states, _ = self.vision_tower(normalize(pixel_values, round_off))
        return join_squares(states[:, :-1], self.factor)  # without the class token


def read_vision(vision: Any) -> ViTConfig:
    """Read HF's `Llama4VisionConfig`."""
    return ViTConfig.from_hf(vision, rope_theta=float(vision.rope_parameters["rope_theta"]))


def rename_tower(prefix: str, vision: Any) -> list[Rule]:
    """Return rules from the names of HF's tower, behind a prefix, to the tree's."""
    shape = (-1, vision.num_channels, vision.patch_size, vision.patch_size)
    patches = Turn(partial(_cut, shape=shape))
    embeddings, layer = "vision_tower.embeddings.", r"vision_tower.encoder.layers.\1."
    block = r"model\.layers\.(\d+)\."
    names = {
        r"patch_embedding\.(?:linear\.)?": embeddings + "patch_embedding.",
        r"class_embedding$": embeddings + "class_embedding",
        r"positional_embedding_vlm$": embeddings + "position_embedding.weight",
        r"layernorm_pre\.": "vision_tower.pre_layrnorm.",
        r"layernorm_post\.": "vision_tower.post_layernorm.",
        block + r"self_attn\.o_proj\.": layer + "self_attn.out_proj.",
        block + r"input_layernorm\.": layer + "layer_norm1.",
        block + r"post_attention_layernorm\.": layer + "layer_norm2.",
        block: layer,
        r"vision_adapter\.(?:mlp\.)?": "multi_modal_projector.adapter.",
    }
    return [
        Rule(
            rf"{prefix}patch_embedding\.linear\.weight$",
            embeddings + "patch_embedding.weight",
            patches,
        ),
        *(Rule(prefix + pattern, name) for pattern, name in names.items()),
    ]


def _cut(weight: Any, *, shape: tuple[int, ...]) -> Any:
    """Return a matrix over a patch's pixels as a convolution's kernel."""
    return weight.reshape(shape)
