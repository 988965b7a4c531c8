"""Tiny LLaVA-OneVisions: pictures whose tiles are mixed to fewer, several pictures, videos."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from mmjax.models.llava import model as ours
from mmjax.models.llava.host_inputs import LlavaOnevisionHostInputs
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_pixels, make_reference_inputs
from mmjax.processing.items.items import ImageSize
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import CHATML, Family, HFInputs, call_processor, hf_of, written
from tests.families.hf_videos import HFVideos
from tests.families.llava import TEXT, TEXT_CONFIGS, VISION, VISION_CONFIGS
from tests.families.llava_next import NEWLINE
from tests.families.published import THREE_LAYOUTS, Published
from tests.families.sizes import NO_KEYS, Keys, fit_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes

IMAGE_TOKEN, VIDEO_TOKEN = 120, 121
SIZES = (
    ImageSize(width=56, height=30),
    ImageSize(width=56, height=56),  # mixed to fewer
    ImageSize(width=7, height=300),
    ImageSize(width=120, height=70),
)
"""Of pictures, by turns."""


def tiny_config(
    *,
    decoder: str = "qwen2",
    tower: str = "siglip",
    text: Keys = NO_KEYS,
    vision: Keys = NO_KEYS,
    **settings: Any,
) -> LlavaOnevisionConfig:
    """Return HF's config: tiles of 3 x 3 patches; more than 2 tiles of them are mixed."""
    settings = {
        "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        "vision_aspect_ratio": "anyres_max_2",
        **settings,
    }
    return LlavaOnevisionConfig(
        text_config=TEXT_CONFIGS[decoder](**{**TEXT, **text}),
        vision_config=VISION_CONFIGS[tower](**VISION | {"patch_size": 9, **vision}),
        image_token_index=IMAGE_TOKEN,
        video_token_index=VIDEO_TOKEN,
        **settings,
        architectures=["LlavaOnevisionForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image, or a video of two or three frames."""
    made = LlavaOnevisionHostInputs(config)
    if media.modality == "video":
        pixels = draw_bytes(media.seed, (2 + media.seed % 2, 3, made.tile, made.tile))
        tensors = {"pixel_values_videos": pixels, "video_affine": AFFINE}
        return DrawnItem(tensors, [VIDEO_TOKEN] * len(made.embed_rows(tensors)))
    size = SIZES[media.seed % len(SIZES)]
    rows, columns = made.count_tiles(size)
    pixels = draw_bytes(media.seed, (1 + rows * columns, 3, made.tile, made.tile))
    sizes = np.array([size.height, size.width])
    tensors = {"pixel_values": pixels, "image_affine": AFFINE, "image_sizes": sizes}
    return DrawnItem(tensors, [IMAGE_TOKEN] * len(made.embed_rows(tensors)))


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's model takes it, tiles padded to each other."""
    items = [make_pixels(item.tensors) for item in sample.items]
    tensors: dict[str, Any] = {}
    for name in ("pixel_values", "pixel_values_videos"):
        if found := [item[name] for item in items if name in item]:
            most = max(map(len, found))
            behind = [((0, most - len(one)), *[(0, 0)] * 3) for one in found]
            pairs = zip(found, behind, strict=True)
            tensors[name] = np.stack([np.pad(one, pad) for one, pad in pairs])
    if sizes := [item["image_sizes"] for item in items if "image_sizes" in item]:
        tensors["image_sizes"] = np.stack(sizes)
    return make_reference_inputs(sample.token_ids, tensors)


TINY = TinyFamily(
    name="llava_onevision",
    model_class=ours.LlavaOnevisionForConditionalGeneration,
    reference_class=LlavaOnevisionForConditionalGeneration,
    make_config=tiny_config,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, IMAGE_TOKEN),
    published_head_dim=64,
    max_embeds={"image": 33, "video": 13},
    max_model_len=128,
    variants={
        "qwen2": Variant({}, 9),
        "several states, a tied head, even sides": Variant(
            {
                "vision": {"patch_size": 7},
                "vision_feature_layer": [-2, -1],
                "tie_word_embeddings": True,
                "text": {"tie_word_embeddings": True},
            },
            9,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


IMAGE, VIDEO = "<image>", "<video>"
SIDE = 56
CANVASES = [[56, 112], [112, 56], [112, 112], [56, 168]]
SETTINGS: dict[str, Any] = {
    "num_image_tokens": 16,
    "vision_feature_select_strategy": "full",
    "vision_aspect_ratio": "anyres_max_2",
}


def write_files(path: Path) -> Path:
    tokenizer = make_tokenizer(
        ["<|im_start|>", IMAGE, VIDEO],
        eos="<|im_end|>",
        pad="<|endoftext|>",
        named={"image_token": IMAGE, "video_token": VIDEO},
    )
    config = tiny_config(
        text=fit_text(tokenizer, max_position_embeddings=1024),
        vision={"image_size": SIDE, "patch_size": 14},
        image_grid_pinpoints=CANVASES,
    )
    config.image_token_index = tokenizer.convert_tokens_to_ids(IMAGE)
    config.video_token_index = tokenizer.convert_tokens_to_ids(VIDEO)
    settings = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3}
    settings["image_std"] = [0.5] * 3
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            **settings,
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": CANVASES,
        },
        video_preprocessor_config={
            **settings,
            "video_processor_type": "LlavaOnevisionVideoProcessor",
        },
        processor_config={"processor_class": "LlavaOnevisionProcessor", **SETTINGS},
    )


path = made_once(write_files)


hf_processor = hf_of(
    LlavaOnevisionProcessor, LlavaOnevisionImageProcessorPil, path, has_videos=True, **SETTINGS
)


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Call HF's processor with the pictures of one prompt."""
    return call_processor(hf_processor, prompt, [images] if images else [], kwargs)


def load_hf_videos() -> Any:
    """Return HF's processor, whose frames Pillow scales."""

    def cut(videos: HFVideos, seen: Any) -> dict[str, Any]:
        frames = [videos.resize(one, (SIDE, SIDE)) for one in seen]
        return {"pixel_values_videos": frames}

    images = LlavaOnevisionImageProcessorPil.from_pretrained(path())
    hf = hf_processor(HFVideos(images, None, cut))
    # Pictures of one prompt are a list of their own.
    return lambda images, **inputs: hf(images=images and [images], **inputs)


LLAVA_ONEVISION = Family(
    **written(TINY, write_files),
    needless_files=frozenset(
        {"processor_config.json", "tokenizer_config.json", "video_preprocessor_config.json"}
    ),
    published=Published(
        layouts={name: one and {**one, **NEWLINE} for name, one in THREE_LAYOUTS.items()}
    ),
    rendered="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    + CHATML.format(image=f"{IMAGE}\n"),
    with_system=("You are a helpful assistant.", "be short"),
    probed=("vision_tower.encoder.layers.1", "multi_modal_projector"),
    call_hf=call_hf,
    placeholder=IMAGE,
    video=VIDEO,
    load_hf_videos=load_hf_videos,
    takes_embeds=False,
    tensors={"pixel_values": 1e-6, "image_sizes": 0},
    lowering_kwargs={"cropping": False},
    operator_kwargs=({"cropping": False},),
    contradictions=(
        ("processor_config", {"num_image_tokens": 9}, "`num_image_tokens` .* is 9, .* 16"),
        ("processor_config", {"vision_aspect_ratio": "anyres_max_9"}, "'anyres_max_9', but"),
        ("preprocessor_config", {"size": {"height": 28, "width": 28}}, r"is \[28\], but"),
        ("config", {"video_token_index": 7}, "but `video_token_index` of config.json is 7"),
    ),
)
