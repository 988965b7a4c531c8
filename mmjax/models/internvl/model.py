"""InternVL (Chen et al., arXiv 2404.16821): InternViT, pixel shuffle, an MLP, a text decoder.

Two layouts of the same model: HF's (`InternVLForConditionalGeneration`), and the original one
(`InternVLChatModel`). Qianfan-OCR (arXiv 2603.13398) has HF's config.json and the original's files.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxtyping import Array, Float

from mmjax.connectors.mlp import MLPProjector
from mmjax.errors import CheckpointError
from mmjax.layers.vision import join_squares
from mmjax.models.internvl.host_inputs import InternVLHostInputs, only_side, shuffle_factor
from mmjax.models.text_model import build_text_model, is_head_tied, text_rules
from mmjax.models.tower_model import WRAPPER_RULES, TowerModel
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, RuleTypes, Split, Squeeze

_PROJECTOR_EPS = 1e-5
"""Of the projector's norm, which no configuration names: torch's own."""
_QK_NORM_EPS = 1e-6
"""Of the norms of queries and keys, which HF's configuration does not name."""

_ORIGINAL_VISION: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 3200,
        "intermediate_size": 12800,
        "num_attention_heads": 25,
        "num_hidden_layers": 48,
        "num_channels": 3,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu",
        "norm_type": "rms_norm",
        "qkv_bias": False,
        "qk_normalization": True,
    }
)
"""What a key of an `intern_vit_6b` configuration means where it is left out."""
_EMBEDDINGS: Mapping[str, tuple[str, Squeeze]] = MappingProxyType(
    {
        "(class_embedding|cls_token)": ("vision_tower.embeddings.class_embedding", Squeeze(2)),
        "position_embeddings?": ("vision_tower.embeddings.position_embedding.weight", Squeeze()),
    }
)
"""Tables of either layout -> names in the tree."""
_ORIGINAL_NAMES: Mapping[str, str] = MappingProxyType(
    {
        r"^vision_model\.(.*)\.attn\.proj\.": r"vision_tower.\1.self_attn.out_proj.",
        r"^vision_model\.(.*)\.attn\.": r"vision_tower.\1.self_attn.",
        r"^vision_model\.(.*)\.norm([12])\.": r"vision_tower.\1.layer_norm\2.",
        r"^vision_model\.(.*)\.ls([12])$": r"vision_tower.\1.lambda_\2",
        r"^vision_model\.": "vision_tower.",
        r"^mlp1\.0\.": "multi_modal_projector.layer_norm.",
        r"^mlp1\.1\.": "multi_modal_projector.linear_1.",
        r"^mlp1\.3\.": "multi_modal_projector.linear_2.",
        # InternLM2's, arXiv 2403.17297
        r"^language_model\.output\.": "language_model.lm_head.",
        r"^language_model\.model\.tok_embeddings\.": "language_model.embed_tokens.",
        r"^language_model\.model\.(.*)\.attention\.wo\.": r"language_model.\1.self_attn.o_proj.",
        r"^language_model\.model\.(.*)\.feed_forward\.w1\.": r"language_model.\1.mlp.gate_proj.",
        r"^language_model\.model\.(.*)\.feed_forward\.w3\.": r"language_model.\1.mlp.up_proj.",
        r"^language_model\.model\.(.*)\.feed_forward\.w2\.": r"language_model.\1.mlp.down_proj.",
        r"^language_model\.model\.(.*)\.attention_norm\.": r"language_model.\1.input_layernorm.",
        r"^language_model\.model\.(.*)\.ffn_norm\.": (
            r"language_model.\1.post_attention_layernorm."
        ),
        r"^language_model\.model\.": "language_model.",
    }
)
"""Names in the original layout -> names in the tree; the first that matches decides."""


def rename_tower(prefix: str, blocks: str = "encoder.layer") -> list[Rule]:
    """Return rules from the names of HF's tower, behind a prefix, to the tree's.

    `blocks`: what HF's module calls the list of them.
    """
    block = re.escape(blocks) + r"\.(\d+)\."
    names = {
        r"embeddings\.patch_embeddings\.projection\.": "embeddings.patch_embedding.",
        rf"{block}attention\.projection_layer\.": r"encoder.layers.\1.self_attn.out_proj.",
        rf"{block}attention\.": r"encoder.layers.\1.self_attn.",
        rf"{block}layernorm_before\.": r"encoder.layers.\1.layer_norm1.",
        rf"{block}layernorm_after\.": r"encoder.layers.\1.layer_norm2.",
        block: r"encoder.layers.\1.",
        r"layernorm\.": "post_layernorm.",
    }
    return [
        *(Rule(rf"{prefix}embeddings\.{one}$", *target) for one, target in _EMBEDDINGS.items()),
        *(Rule(prefix + pattern, f"vision_tower.{name}") for pattern, name in names.items()),
    ]


def count_blocks(feature_layer: Any, num_hidden_layers: int, *, name: str) -> int:
    """Return how many blocks lie below the state that is read; `CheckpointError` for no such state.

    `feature_layer` is the value of the key `name`. It counts as HF's `hidden_states`: 0 is the
    embedding, n the output of block n - 1, and -1 that of the last.
    """
    num_states = num_hidden_layers + 1
    if not isinstance(feature_layer, int) or not -num_states <= feature_layer < num_states:
        raise CheckpointError(
            f"`{name}` is {feature_layer!r}; it must be the number of one state of the vision "
            f"tower, from {-num_states} to {num_hidden_layers}"
        )
    return feature_layer % num_states


class InternVLModel(TowerModel):
    """What both layouts build, of configurations that are spelled differently."""

    host_inputs = InternVLHostInputs

    def __init__(
        self,
        hf_config: Any,
        vision: ViTConfig,
        *,
        projector_act: str,
        is_tied: bool,
        dtype: Any,
        is_transposed: bool = False,
    ) -> None:
        self.factor, self.is_transposed = shuffle_factor(hf_config), is_transposed
        with self._mark_tower_model(hf_config, {"image", "video"}):
            self.vision_tower = ViT(vision, dtype=dtype)
            self.multi_modal_projector = MLPProjector(
                self.factor**2 * vision.hidden_size,
                hf_config.get_text_config().hidden_size,
                projector_act,
                norm_eps=_PROJECTOR_EPS,
                dtype=dtype,
            )
        self.language_model = build_text_model(hf_config, dtype=dtype, is_tied=is_tied)

    def encode_units(
        self, pixel_values: Float[Array, "I C _y _x"]
    ) -> Float[Array, "I _tokens _width"]:
        """Return the squares of patches of every tile or frame.

        They stand column by column with `ps_version` v1, as models before 2024 saw them.
        """
        states, _ = self.vision_tower(pixel_values)
        return join_squares(states[:, 1:], self.factor, is_transposed=self.is_transposed)


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
            read_vision(hf_config),
            projector_act=hf_config.projector_hidden_act,
            is_tied=is_head_tied(hf_config),
            dtype=dtype,
        )

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the hub's layout, save_pretrained's, and the module's own names."""
        vision = read_vision(hf_config)
        tower = r"^(?:model\.)?vision_tower\."
        unread = range(vision.num_hidden_layers, hf_config.vision_config.num_hidden_layers)
        dropped = [rf"{tower}encoder\.layer\.{layer}\." for layer in unread]
        dropped.append(rf"{tower}embeddings\.mask_token$")  # of its pre-training
        if not vision.has_final_norm:
            dropped.append(rf"{tower}layernorm\.")
        return (
            *(Rule(pattern, None) for pattern in dropped),
            *rename_tower(tower),
            *text_rules(hf_config),
            *WRAPPER_RULES,
        )


class QianfanOCRForConditionalGeneration(InternVLForConditionalGeneration):
    """Served as HF's class of this name."""

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the published files, which are in InternVL's original layout, and HF's module."""
        vision = read_vision(hf_config)
        tower = r"^(?:model\.)?vision_tower\."
        unread = range(vision.num_hidden_layers, hf_config.vision_config.num_hidden_layers)
        dropped = [rf"{tower}layers\.{layer}\." for layer in unread]
        dropped += [rf"^vision_model\.encoder\.layers\.{layer}\." for layer in unread]
        dropped.append(rf"{tower}embeddings\.mask_token$")  # of its pre-training
        if not vision.has_final_norm:
            dropped.append(rf"{tower}layernorm\.")
        return (
            *(Rule(pattern, None) for pattern in dropped),
            *rename_tower(tower, "layers"),
            *_list_original_tower(vision),
            # NOTE: what `save_pretrained` of transformers 5.23 makes of the decoder's layers.
            Rule(r"^language_model\.model\.encoder\.layers\.", "language_model.layers."),
            *(Rule(pattern, name) for pattern, name in _ORIGINAL_NAMES.items()),
            *WRAPPER_RULES,
        )


class InternVLChatModel(InternVLModel):
    """Served as the original's class of this name."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        text_config = hf_config.get_text_config()
        version = getattr(hf_config, "ps_version", "v1")
        if version not in ("v1", "v2"):
            raise CheckpointError(f"`ps_version` is `{version}`; it must be `v1` or `v2`")
        _check_original(hf_config)
        super().__init__(
            hf_config,
            _read_original_vision(hf_config),
            projector_act="gelu",
            is_tied=getattr(text_config, "tie_word_embeddings", False),
            dtype=dtype,
            is_transposed=version == "v1",
        )

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Cut what is fused (InternLM2's by groups of a key head), and map the published names."""
        vision, text = _read_original_vision(hf_config), hf_config.get_text_config()
        unread = range(vision.num_hidden_layers, _read_original(hf_config)["num_hidden_layers"])
        head_dim = text.hidden_size // text.num_attention_heads
        queries = text.num_attention_heads // text.num_key_value_heads * head_dim
        return (
            *(Rule(rf"^vision_model\.encoder\.layers\.{layer}\.", None) for layer in unread),
            Split.of_qkv(
                r"^language_model\.model\.(.*)\.attention\.wqkv\.",
                r"language_model.\1.self_attn.",
                [queries, head_dim, head_dim],
            ),
            *_list_original_tower(vision),
            *text_rules(hf_config),
            *(Rule(pattern, name) for pattern, name in _ORIGINAL_NAMES.items()),
        )


def _list_original_tower(vision: ViTConfig) -> list[RuleTypes]:
    """Return the rules of what the original's tower joins, or shapes otherwise."""
    qkv = r"^vision_model\.(.*)\.attn\.qkv\."
    return [
        Split.of_qkv(qkv, r"vision_tower.\1.self_attn.", [vision.hidden_size] * 3),
        *(
            Rule(rf"^vision_model\.embeddings\.{name}$", *target)
            for name, target in _EMBEDDINGS.items()
        ),
    ]


def _check_original(hf_config: Any) -> None:
    """Refuse what `InternVLChatModel` would compute otherwise than we do."""
    vision, text = hf_config.vision_config, hf_config.get_text_config()
    positions = getattr(text, "rope_pos_id_version", "default")
    if positions != "default":
        raise CheckpointError(
            f"`rope_pos_id_version` of `llm_config` is `{positions}`; mmjax knows `default` alone"
        )
    (kind, *_) = getattr(text, "architectures", None) or ("",)
    if kind == "InternLM2VEForCausalLM":
        raise CheckpointError(
            f"`architectures` of `llm_config` is `{kind}`, a decoder that mmjax does not have"
        )
    forced = getattr(hf_config, "force_image_size", None)
    if forced not in (None, only_side(vision.image_size, "image_size")):
        raise CheckpointError(
            f"`force_image_size` is {forced}, and the vision tower's `image_size` is "
            f"{vision.image_size}; they must be equal: positions are not interpolated"
        )


def _read_original(hf_config: Any) -> dict[str, Any]:
    """Return the keys of an `intern_vit_6b` configuration; its code knows what is left out."""
    vision = hf_config.vision_config
    return {key: getattr(vision, key, value) for key, value in _ORIGINAL_VISION.items()}


def _read_original_vision(hf_config: Any) -> ViTConfig:
    """Read the original's vision tower, and which of its states the projector reads."""
    vision, values = hf_config.vision_config, _read_original(hf_config)
    layer = getattr(hf_config, "select_layer", -1)
    num_layers = values.pop("num_hidden_layers")
    return ViTConfig(
        qk_norm_eps=values["layer_norm_eps"] if values.pop("qk_normalization") else None,
        **values,
        num_hidden_layers=count_blocks(layer, num_layers, name="select_layer"),
        image_size=only_side(vision.image_size, "image_size"),
        patch_size=only_side(vision.patch_size, "patch_size"),
        has_class_token=True,
        has_final_norm=False,
        has_scales=True,
    )


def read_vision(hf_config: Any) -> ViTConfig:
    """Read HF's `InternVLVisionConfig`, and which of its states the projector reads."""
    vision = hf_config.vision_config
    layer, name = hf_config.vision_feature_layer, "vision_feature_layer"
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_channels")
    same = (*same, "layer_norm_eps", "hidden_act", "norm_type")
    return ViTConfig(
        **{key: getattr(vision, key) for key in same},
        num_hidden_layers=count_blocks(layer, vision.num_hidden_layers, name=name),
        image_size=only_side(vision.image_size, "image_size"),
        patch_size=only_side(vision.patch_size, "patch_size"),
        qkv_bias=vision.attention_bias,
        qk_norm_eps=_QK_NORM_EPS if vision.use_qk_norm else None,
        has_class_token=True,
        has_positions=vision.use_absolute_position_embeddings,
        has_scales=True,
        has_final_norm=layer == -1 and not vision.use_mean_pooling,
    )
