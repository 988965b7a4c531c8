"""Tiny LLaVA-NeXTs: pictures in tiles whose padding goes away, and Granite Vision's decoder."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import GraniteConfig, LlavaNextConfig, LlavaNextForConditionalGeneration
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from mmjax.models.llava import model as ours
from mmjax.models.llava.host_inputs import LlavaNextHostInputs
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from mmjax.processing.items.items import ImageSize
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import Family, HFInputs, call_processor, hf_of, written
from tests.families.llava import TEXT, TEXT_CONFIGS, VISION, VISION_CONFIGS
from tests.families.published import THREE_LAYOUTS, Published
from tests.families.sizes import NO_KEYS, Keys, fit_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes, joined

IMAGE_TOKEN = 120
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
}
"""Not `logits_scaling`, which HF's class leaves out where a tower is there (`DEPARTURES`)."""
SIZES = (
    ImageSize(width=56, height=30),
    ImageSize(width=90, height=40),
    ImageSize(width=7, height=300),
    ImageSize(width=120, height=70),
)
"""Of pictures, by turns: some lie on all of their canvas, others on a part."""


def tiny_config(
    *,
    decoder: str = "granite",
    tower: str = "siglip",
    text: Keys = NO_KEYS,
    vision: Keys = NO_KEYS,
    **settings: Any,
) -> LlavaNextConfig:
    """Return HF's config: tiles of 2 x 2 patches, and two states of the tower side by side."""
    own = GRANITE if decoder == "granite" else {}
    make_text = {**TEXT_CONFIGS, "granite": GraniteConfig}[decoder]
    settings = {
        "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        "vision_feature_layer": [-3, -1],
        "vision_feature_select_strategy": "full",
        **settings,
    }
    return LlavaNextConfig(
        text_config=make_text(**{**TEXT, **own, **text}),
        vision_config=VISION_CONFIGS[tower](**VISION | {"patch_size": 14, **vision}),
        image_token_index=IMAGE_TOKEN,
        **settings,
        architectures=["LlavaNextForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    return draw_tiles(LlavaNextHostInputs(config), media)


def draw_tiles(made: LlavaNextHostInputs, media: Media) -> DrawnItem:
    """Return the whole and the tiles of an image."""
    size = SIZES[media.seed % len(SIZES)]
    rows, columns = made.count_tiles(size)
    pixels = draw_bytes(media.seed, (1 + rows * columns, 3, made.tile, made.tile))
    sizes = np.array([size.height, size.width])
    tensors = {"pixel_values": pixels, "image_affine": AFFINE, "image_sizes": sizes}
    return DrawnItem(tensors, [IMAGE_TOKEN] * len(made.arrange(size)))


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's model takes it: the tiles of all images, one by one."""
    tensors: dict[str, Any] = dict(joined(sample))
    if sample.items:
        tensors["image_sizes"] = np.stack([item.tensors["image_sizes"] for item in sample.items])
    return make_reference_inputs(sample.token_ids, tensors)


TINY = TinyFamily(
    name="llava_next",
    model_class=ours.LlavaNextForConditionalGeneration,
    reference_class=LlavaNextForConditionalGeneration,
    make_config=tiny_config,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, IMAGE_TOKEN),
    published_head_dim=64,
    max_embeds={"image": 24},
    variants={
        "granite behind siglip": Variant({"tie_word_embeddings": True}, 9),
        "mistral behind clip, one state": Variant(
            {
                "decoder": "mistral",
                "tower": "clip",
                "vision_feature_layer": -2,
                "vision_feature_select_strategy": "default",
                "multimodal_projector_bias": False,
            },
            8,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


IMAGE = "<image>"
SIDE = 56
CANVASES = [[56, 112], [112, 56], [112, 112], [56, 168]]
IMAGE_SETTINGS: dict[str, Any] = {
    "image_processor_type": "LlavaNextImageProcessor",
    "image_grid_pinpoints": CANVASES,
    "crop_size": {"height": SIDE, "width": SIDE},
    "size": {"height": SIDE, "width": SIDE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_files(path: Path) -> Path:
    tokenizer = make_tokenizer(
        [IMAGE], bos="<s>", eos="<|end_of_text|>", named={"image_token": IMAGE}
    )
    config = tiny_config(
        text=fit_text(tokenizer, max_position_embeddings=1024),
        vision={"image_size": SIDE},
        image_grid_pinpoints=CANVASES,
    )
    config.image_token_index = tokenizer.convert_tokens_to_ids(IMAGE)
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config=IMAGE_SETTINGS,
        processor_config={
            "patch_size": 14,
            "processor_class": "LlavaNextProcessor",
            "vision_feature_select_strategy": "full",
        },
    )


path = made_once(write_files)


hf_processor = hf_of(
    LlavaNextProcessor,
    LlavaNextImageProcessorPil,
    path,
    patch_size=14,
    vision_feature_select_strategy="full",
)


def call_hf(
    load: Callable[[], Any], prompt: str, images: list[Any], kwargs: Mapping[str, Any]
) -> HFInputs:
    """Call HF's processor, and leave out the tiles of zeros that HF's model leaves out."""
    found = call_processor(load, prompt, images, kwargs)
    if not images:
        return found
    counts = [image_size_to_num_patches(s, CANVASES, SIDE) for s in found.tensors["image_sizes"]]
    pixels = zip(found.tensors["pixel_values"], counts, strict=True)
    kept = np.concatenate([tiles[:count] for tiles, count in pixels])
    return found._replace(tensors={**found.tensors, "pixel_values": kept})


SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
NEWLINE = {"model.image_newline": "image_newline"}
LLAVA_NEXT = Family(
    **written(TINY, write_files),
    needless_files=frozenset({"processor_config.json", "tokenizer_config.json"}),
    published=Published(
        layouts={name: one and {**one, **NEWLINE} for name, one in THREE_LAYOUTS.items()}
    ),
    rendered=(
        f"<|system|>\n{SYSTEM}\n<|user|>\n<image>\nwhat is it\n<|assistant|>\na car<|end_of_text|>"
        "<|user|>\nwhich color\n<|assistant|>\n"
    ),
    with_system=(SYSTEM, "be short"),
    probed=("vision_tower.encoder.layers.1", "multi_modal_projector"),
    call_hf=partial(call_hf, hf_processor),
    placeholder=IMAGE,
    tensors={"pixel_values": 1e-6, "image_sizes": 0},
    words=(*Family.words, *("<s>", "<|end_of_text|>", "<pad>")),
    contradictions=(
        ("processor_config", {"patch_size": 16}, "`patch_size` of .* is 16, .* has 14"),
        (
            "preprocessor_config",
            {"image_grid_pinpoints": [[56, 56]]},
            r"is \[\[56, 56\]\], but",
        ),
        ("preprocessor_config", {"size": {"shortest_edge": 28}}, r"`size` .* is \[28\], but"),
        ("preprocessor_config", {"crop_size": {"height": 28, "width": 56}}, "`crop_size` of"),
        ("config", {"image_token_index": 7}, "but `image_token_index` of config.json is 7"),
    ),
)
