"""What a config.json says that no model of a family can be is refused by its name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from transformers import T5Config

from mmjax.errors import CheckpointError
from mmjax.layers.module import build_abstract
from mmjax.models.model_source import load_model_config
from mmjax.models.molmo.model import MolmoForCausalLM
from tests.families import TINY_FAMILIES
from tests.families.directories import GOLDEN_MODELS

Values = Mapping[str, Any]
REFUSED: Mapping[str, list[tuple[Values, str]]] = {
    "aya_vision": [
        ({"downsample_factor": 3}, "`downsample_factor` is 3; it must divide the 4 patches"),
        ({"vision_feature_layer": [-1, -2]}, r"`vision_feature_layer` is \[-1, -2\]"),
        ({"vision_feature_select_strategy": "default"}, "`vision_feature_select_strategy` `defau"),
        ({"vision": {"model_type": "clip_vision_model"}}, "`vision_config.model_type` is `clip"),
        ({"text": {"model_type": "cohere", "use_qk_norm": True}}, "`use_qk_norm` is true"),
        ({"text": {"hidden_act": "mish"}}, "activation `mish` is unknown"),
    ],
    "blip2": [
        (
            {"text": {"word_embed_proj_dim": 16}},
            r"`text_config.word_embed_proj_dim` is 16, and `hidden_size` 32",
        ),
        (
            {"text": {"layer_norm_elementwise_affine": False}},
            "`layer_norm_elementwise_affine` is false",
        ),
        ({"vision": {"image_size": [32, 40]}}, r"`vision_config.image_size` is \[32, 40\]"),
        ({"qformer": {"hidden_act": "mish"}}, "activation `mish` is unknown"),
    ],
    "glm4v": [
        ({"vision": {"attention_bias": True}}, "`vision_config.attention_bias` is true"),
        ({"vision": {"image_size": [20, 20]}}, r"`vision_config.image_size` is \[20, 20\]; a"),
    ],
    "got_ocr2": [
        ({"vision": {"use_rel_pos": False}}, "`use_rel_pos` of SAM's config is false"),
        ({"vision": {"image_size": 34}}, "are 34 and 4; give one number each"),
    ],
    "granite_docling": [
        ({"vision": {"image_size": [16, 16]}}, r"`vision_config.image_size` is \[16, 16\]; a"),
        ({"vision": {"scale_factor": 3}}, "`vision_config.scale_factor` is 3; it must divide"),
        ({"vision": {"scale_factor": 1}}, "is 1; it must .*, and be even where there is a fine"),
        ({"vision": {"deepstack_visual_indexes": [1, 0]}}, r"is \[1, 0\]; .* each behind the one"),
        ({"vision": {"deepstack_visual_indexes": [2]}}, r"is \[2\]; give blocks .* from 0 to 1"),
        ({"text": {"num_hidden_layers": 1}}, "no more than the decoder's 1 layers"),
        ({"text": {"hidden_act": "mish"}}, "activation `mish` is unknown"),
    ],
    "granite4_vision": [
        ({"downsample_rate": "1:2"}, "`downsample_rate` of config.json is '1:2'; it must be the"),
        ({"downsample_rate": "2/3"}, "is '2/3'; windows of 3 patches must divide the 4 along"),
        ({"downsample_rate": "1/4"}, "is '1/4', but `spatial_target_layers` are fed corners"),
        ({"deepstack_layer_map": [[-1, 5]]}, r"`deepstack_layer_map` of config.json is \[\(-1, 5"),
        (
            {"deepstack_layer_map": [], "spatial_target_layers": []},
            r"`deepstack_layer_map` of config.json is \[\], .* give pairs",
        ),
        ({"deepstack_layer_map": [[-5, 3]]}, r"`deepstack_layer_map` is \[-5\], .* -4 to 3"),
        ({"spatial_target_layers": [3]}, r"`spatial_target_layers` \[3\]; .* no layer twice"),
        ({"spatial_target_layers": [0, 1, 2, 4, 4]}, "up to 4 layers, each from 0 to 4"),
        ({"spatial_vision_layer": 4}, "`spatial_vision_layer` is 4, and the tower has 3 layers"),
        ({"use_spatial_sampling": False}, "`use_spatial_sampling` of config.json is False"),
        ({"vision_feature_select_strategy": "default"}, "leaves 15 features of a tile"),
        ({"text": {"model_type": "granitemoehybrid"}}, "`granitemoehybrid`"),
    ],
    "lfm3_vl": [
        (
            {"text": {"layer_types": ["conv"] * 3 + ["chunked_attention"]}},
            r"\['chunked_attention'\]",
        ),
        ({"text": {"conv_L_cache": 1}}, "`conv_L_cache` is 1; a convolution reads 2 tokens or"),
        ({"text": {"sliding_window": None}}, "`sliding_window` is None, and `layer_types` holds"),
        (
            {"vision": {"layer_types": ["conv", "sliding_attention", "conv"]}},
            r"`vision_config.layer_types` holds \['sliding_attention'\]; known: conv, full_att",
        ),
        ({"vision": {"conv_kernel_size": 4}}, "`vision_config.conv_kernel_size` is 4; .* odd"),
        (
            {"vision": {"num_key_value_heads": 3}},
            "`vision_config.num_attention_heads` is 4; .* multiple of `num_key_value_heads`",
        ),
        ({"projector_hidden_act": "mish"}, "activation `mish` is unknown"),
    ],
    "llama4": [
        ({"vision": {"pixel_shuffle_ratio": 0.3}}, "`vision_config.pixel_shuffle_ratio` is 0.3"),
        ({"vision": {"vision_output_dim": 39}}, "`vision_output_dim` of `vision_config` is 39"),
        ({"text": {"attention_chunk_size": None}}, "`layer_types` holds .'chunked_attention'"),
    ],
    "llava_next": [
        ({"image_grid_pinpoints": [[28, 40]]}, r"has \[28, 40\]; each must be .* tiles of 28"),
        ({"image_grid_pinpoints": []}, "`image_grid_pinpoints` of config.json is empty"),
        ({"vision_feature_select_strategy": "default"}, "`default` leaves 3 features of a tile"),
    ],
    "llava_onevision": [
        ({"vision_aspect_ratio": "pad"}, "`vision_aspect_ratio` of config.json is 'pad'; it must"),
        ({"vision_aspect_ratio": "anyres_max_0"}, "is 'anyres_max_0'; it must be `anyres_max_`"),
    ],
    "mistral3": [
        ({"vision_feature_layer": [-1, -2]}, r"`vision_feature_layer` is \[-1, -2\]; the norm"),
        ({"spatial_merge_size": 0}, "`spatial_merge_size` of config.json is 0"),
        (
            {"decoder": "ministral3", "text": {"rope_parameters": {"rope_type": "default"}}},
            "`rope_parameters` lacks llama_4_scaling_beta, original_max",
        ),
    ],
    "mllama": [
        ({"vision": {"vision_output_dim": 73}}, "`vision_config.vision_output_dim` is 73; it must"),
        ({"vision": {"image_size": [8, 16]}}, r"are \[8, 16\] and 4; each must be one number"),
        ({"text": {"cross_attention_layers": []}}, r"`text_config.cross_attention_layers` is \[\]"),
        ({"text": {"cross_attention_layers": [3]}}, r"is \[3\]; they must be numbers of its 3"),
    ],
    "ovis2": [
        ({"vision": {"hidden_stride": 3}}, "`vision_config.hidden_stride` is 3; it must divide"),
        (
            {"vision": {"tokenize_function": "st_argmax"}},
            "tokenize_function` is 'st_argmax'; Ovis2",
        ),
        (
            {"vision": {"num_visual_indicator_tokens": 4}},
            "num_visual_indicator_tokens` is 4; Ovis2",
        ),
    ],
    "chameleon": [({"num_attention_heads": 5}, "`num_attention_heads` is 5; it must divide")],
    "florence2": [
        ({"vision": {"projection_dim": 16}}, "`vision_config.projection_dim` is 16"),
        ({"text": {"tie_word_embeddings": False}}, "`text_config.tie_word_embeddings` is false"),
        ({"text": {"max_position_embeddings": 10}}, "is 10 tokens, and the encoder takes 10"),
        ({"vision": {"max_position_embeddings": 2}}, "pictures of 24x24 pixels make 3 columns"),
        ({"vision": {"num_heads": [2]}}, "`num_heads` 1"),
        ({"vision": {"activation_function": "mish"}}, "activation `mish` is unknown"),
        ({"vision": {"image_feature_source": ["last_frame"]}}, "is \\['last_frame'\\]"),
        ({"vision": {"image_size": None}}, "the image processor's configuration in ``"),
        ({"text": {"model_type": "llama"}}, "`text_config.model_type` is `llama`"),
    ],
    "internvl": [
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy.*full"),
        ({"vision_feature_layer": [-1, -2]}, r"vision_feature_layer.*\[-1, -2\]"),
        ({"vision_feature_layer": 4}, "vision_feature_layer.*4"),
        ({"vision_feature_layer": -5}, "vision_feature_layer.*-5"),
        ({"downsample_ratio": 0.3}, "downsample_ratio.*0.3"),
        ({"downsample_ratio": 1 / 3}, "downsample_ratio.*0.33"),
        ({"downsample_ratio": 2.0}, "downsample_ratio.*2.0"),
        ({"projector_hidden_act": "mish"}, "mish"),
        ({"vision": {"norm_type": "batch_norm"}}, "norm_type.*batch_norm"),
        ({"vision": {"image_size": [32, 64]}}, r"image_size.*\[32, 64\]"),
        ({"vision": {"patch_size": [8, 4]}}, r"patch_size.*\[8, 4\]"),
        ({"text": {"model_type": "gpt2"}}, "gpt2"),
    ],
    "ultravox": [
        ({"stack_factor": 0}, "`stack_factor` of config.json is 0; expected 1"),
        ({"hidden_size": 41}, "`hidden_size` is 41, of which the `projector_act` swiglu takes"),
        ({"audio_latency_block_size": 100}, "`audio_latency_block_size` is 100; an Ultravox"),
        ({"num_projector_layers": 2}, "`num_projector_layers` is 2; an Ultravox is served whose"),
        ({"projector_act": "mish"}, "activation `mish` is unknown"),
    ],
}
"""Keywords of a family's `make_config`."""
REFUSED_VALUES: Mapping[str, list[tuple[Values, str]]] = {
    "got_ocr2": [({"model_type": "pp_chart2table"}, "`model_type` is `pp_chart2table`, whose")],
    "blip2": [
        (
            {
                "text_config": T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2),
                "use_decoder_only_language_model": False,
            },
            r"`text_config.model_type` is `t5`, which has an encoder of its own",
        )
    ],
    "fuyu": [({"text_config.model_type": "gpt_neox"}, r"`text_config\.model_type` is `gpt_neox`")],
    "llava": [
        ({"vision_feature_layer": -5}, r"`vision_feature_layer` is -5, .* 3 layers; .* -4 to 3"),
        ({"vision_feature_layer": [1, 4]}, r"`vision_feature_layer` is \[1, 4\]"),
        ({"vision_feature_layer": []}, r"`vision_feature_layer` is \[\]"),
        ({"vision_feature_select_strategy": "most"}, "'most'; it must be one of default, full"),
        ({"projector_hidden_act": "mish"}, "activation `mish` is unknown"),
        ({"vision_config.model_type": "dinov2"}, "`vision_config.model_type` is `dinov2`"),
        ({"text_config.model_type": "mamba"}, "`text_config.model_type` is `mamba`"),
        ({"text_config.is_causal": False}, "`text_config.is_causal` is false: an encoder"),
        ({"vision_config.image_size": [28, 14]}, r"`vision_config.image_size` is \[28, 14\]"),
    ],
    "molmo": [
        ({"clip_qkv": 8.0}, "clip_qkv.*8.0"),
        ({"layer_norm_type": "default"}, "layer_norm_type.*default"),
        ({"weight_tying": True}, "weight_tying.*True"),
        ({"moe_num_experts": 64}, "moe_num_experts.*64"),
        ({"num_attention_heads": 7}, "hidden_size.*7"),
        ({"test_vision_backbone": {"image_num_pos": 64}}, "image_num_pos.*64"),
        ({"test_vision_backbone": {"image_head_dim": 32}}, "image_head_dim.*32"),
        ({"test_vision_backbone": {"image_num_key_value_heads": 2}}, "image_num_key_value_heads"),
        ({"test_vision_backbone": {"image_default_input_size": [336, 224]}}, "336, 224"),
        ({"test_vision_backbone": {"vit_layers": [-1, -24]}}, r"vit_layers.*-24"),
        ({"test_vision_backbone": {"image_mlp_activations": "swish"}}, "swish"),
        ({"test_vision_backbone": {"image_size": 4}}, "image_size"),
        (
            {"test_vision_backbone": {"image_default_input_size": [126, 126], "image_num_pos": 82}},
            "come out even",
        ),
    ],
    "ultravox": [
        ({"audio_config.model_type": "wav2vec2"}, "`audio_config.model_type` of config.json is 'w"),
        ({"text_config.model_type": "gemma3"}, "`text_config.model_type` is `gemma3`"),
    ],
}
"""Values of a config that is made: HF's own checks would refuse some, in words of their own."""


def name_case(value: object) -> str | None:
    return ", ".join(value) if isinstance(value, Mapping) else None


def refuse(model_class: Any, config: Any, match: str) -> None:
    def build() -> None:
        build_abstract(model_class, config, dtype=np.dtype(np.float32))
        model_class.host_inputs(config)

    with pytest.raises(CheckpointError, match=match):
        build()


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [(name, *case) for name, cases in REFUSED.items() for case in cases],
    ids=name_case,
)
def test_a_config_that_no_model_can_have(name: str, settings: Values, match: str):
    family = TINY_FAMILIES[name]
    refuse(family.model_class, family.make_config(**settings), match)


@pytest.mark.parametrize(
    ("name", "values", "match"),
    [(name, *case) for name, cases in REFUSED_VALUES.items() for case in cases],
    ids=name_case,
)
def test_a_value_that_no_model_can_have(name: str, values: Values, match: str):
    if name == "molmo":
        model_class: Any = MolmoForCausalLM
        config = load_model_config(str(GOLDEN_MODELS / "molmo_7b_d")).hf_config
    else:
        model_class = TINY_FAMILIES[name].model_class
        config = TINY_FAMILIES[name].make_config()
    for path, value in values.items():
        *outer, last = path.split(".")
        object.__setattr__(getattr(config, outer[0]) if outer else config, last, value)
    refuse(model_class, config, match)
