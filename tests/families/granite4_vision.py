"""Tiny Granite 4 Visions: Q-Formers over windows of tiles, which feed layers of a Granite."""

from functools import partial
from pathlib import Path
from typing import Any

from transformers import (
    Granite4VisionConfig,
    Granite4VisionForConditionalGeneration,
    Granite4VisionTextConfig,
)
from transformers.models.granite4_vision.processing_granite4_vision import Granite4VisionProcessor

from mmjax.models.llava import model as ours
from mmjax.models.llava.host_inputs import Granite4VisionHostInputs
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import Family, hf_of, written
from tests.families.llava import TEXT, VISION, VISION_CONFIGS
from tests.families.llava_next import (
    CANVASES,
    GRANITE,
    IMAGE,
    IMAGE_SETTINGS,
    IMAGE_TOKEN,
    SIDE,
    LlavaNextImageProcessorPil,
    call_hf,
    draw_tiles,
    torch_inputs,
)
from tests.families.published import MODULE, Published
from tests.families.sizes import NO_KEYS, Keys, fit_text
from tests.families.tiny import DrawnItem, Media, TinyFamily, Variant

RATE = "2/4"
QFORMER: dict[str, Any] = {
    "model_type": "blip_2_qformer",
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "cross_attention_frequency": 1,
}
"""HF sets its widths by the tower's, and a head for each 64 of them."""


def tiny_config(
    *,
    tower: str = "siglip",
    text: Keys = NO_KEYS,
    vision: Keys = NO_KEYS,
    qformer: Keys = NO_KEYS,
    **settings: Any,
) -> Granite4VisionConfig:
    """Return HF's config: tiles are a window of 4 x 4 patches, and all layers are fed."""
    own = GRANITE | {"logits_scaling": 3.0, "num_hidden_layers": 5}
    wide = VISION | {"hidden_size": 128, "patch_size": 7}
    settings = {
        "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        "vision_feature_select_strategy": "full",
        "downsample_rate": RATE,
        "deepstack_layer_map": [[-2, 3]],
        "spatial_vision_layer": -1,
        "spatial_target_layers": [2, 0, 1, 4],
        **settings,
    }
    return Granite4VisionConfig(
        text_config=Granite4VisionTextConfig(**{**TEXT, **own, **text}),
        vision_config=VISION_CONFIGS[tower](**{**wide, **vision}),
        qformer_config={**QFORMER, **qformer},
        image_token_index=IMAGE_TOKEN,
        **settings,
        architectures=["Granite4VisionForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    return draw_tiles(Granite4VisionHostInputs(config), media)


TINY = TinyFamily(
    name="granite4_vision",
    model_class=ours.Granite4VisionForConditionalGeneration,
    reference_class=Granite4VisionForConditionalGeneration,
    make_config=tiny_config,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, IMAGE_TOKEN),
    published_head_dim=64,
    max_embeds={"image": 24},
    variants={
        "corners of squares, all layers fed": Variant({"tie_word_embeddings": True}, 26),
        "clip, means of runs that overlap, two layers fed": Variant(
            {
                "tower": "clip",
                "qformer": {"num_hidden_layers": 3, "cross_attention_frequency": 2},
                "text": {"num_hidden_layers": 3, "attention_bias": True, "mlp_bias": True},
                "vision_feature_select_strategy": "default",
                "downsample_rate": "3/4",
                "deepstack_layer_map": [[-1, 2], [1, 1]],
                "spatial_target_layers": [],
            },
            19,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


MARKS = ["<|start_of_role|>", "<|end_of_role|>"]


def write_files(path: Path) -> Path:
    """Write a directory whose tiles have 2 x 2 windows of 2 x 2 queries."""
    tokenizer = make_tokenizer([*MARKS, IMAGE], eos="<|end_of_text|>", named={"image_token": IMAGE})
    config = tiny_config(
        text=fit_text(tokenizer, max_position_embeddings=1024),
        vision={"image_size": SIDE},
        image_grid_pinpoints=CANVASES,
        downsample_rate=RATE,
    )
    config.image_token_index = tokenizer.convert_tokens_to_ids(IMAGE)
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config=IMAGE_SETTINGS,
        processor_config={
            "downsample_rate": RATE,
            "patch_size": 7,
            "processor_class": "Granite4VisionProcessor",
            "vision_feature_select_strategy": "full",
        },
    )


path = made_once(write_files)


hf_processor = hf_of(
    Granite4VisionProcessor,
    LlavaNextImageProcessorPil,
    path,
    patch_size=7,
    vision_feature_select_strategy="full",
    downsample_rate=RATE,
)


USER, END = "<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"
ANSWER = "<|start_of_role|>assistant<|end_of_role|>"
GRANITE4_VISION = Family(
    **written(TINY, write_files),
    needless_files=frozenset({"processor_config.json", "tokenizer_config.json"}),
    published=Published(
        layouts={
            "hub": {"model.vision_tower.": "model.vision_tower.{inner}"},
            "module": MODULE,
        }
    ),
    rendered=f"{USER}<image>what is it{END}{ANSWER}a car{END}{USER}which color{END}{ANSWER}",
    with_system=(USER, f"<|start_of_role|>system<|end_of_role|>be short{END}{USER}"),
    probed=("vision_tower.encoder.layers.1", "layerwise_projectors.0", "spatial_projectors.3"),
    call_hf=partial(call_hf, hf_processor),
    placeholder=IMAGE,
    tensors={"pixel_values": 1e-6, "image_sizes": 0},
    words=(*Family.words, *MARKS, "<|end_of_text|>", "<pad>"),
    contradictions=(
        ("processor_config", {"patch_size": 16}, "`patch_size` of .* is 16, .* has 7"),
        ("processor_config", {"downsample_rate": "1/2"}, "`downsample_rate` of .* '1/2', .* '2/4'"),
        ("config", {"image_token_index": 7}, "but `image_token_index` of config.json is 7"),
    ),
)
