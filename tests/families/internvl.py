"""Tiny InternVLs: images of one to three tiles, videos of frames."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoTokenizer, InternVLConfig
from transformers import InternVLForConditionalGeneration as HFModel
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from mmjax.config.engine_config import MultiModalConfig
from mmjax.models.internvl.model import InternVLForConditionalGeneration
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_pixels, make_reference_inputs
from tests.families.directories import (
    GOLDEN,
    edit_golden,
    golden_path,
    golden_processor,
    made_once,
    make_random,
    save_weights,
    with_weights,
)
from tests.families.family import CHATML, Family, HFInputs, call_processor, hf_of
from tests.families.hf_videos import HFVideos
from tests.families.published import MODULE, Published
from tests.families.sizes import DECODER, NO_KEYS, TOWER, Keys, resize_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes
from tests.models.original_internvl import original_config, to_original
from tests.oracle import fill_with_unit_norms

SIDE, CONTEXT, START, END = 32, 125, 126, 127
VISION: dict[str, Any] = {
    **TOWER,
    "image_size": SIDE,
    "patch_size": 8,
}
TEXT: dict[str, Any] = {
    **DECODER,
    "max_position_embeddings": 512,
}
QWEN3_MOE: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": True},
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
}
GPT_OSS_KIND: dict[str, Any] = {
    **{"model_type": "gpt_oss", "sliding_window": 9, "hidden_act": "silu"},
    **{"num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 1.5},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False},
        "original_max_position_embeddings": 64,
    },
}
GPT_OSS = {**GPT_OSS_KIND, "head_dim": 16}
PHI3: dict[str, Any] = {
    # The decoder's own key decides, of which the angles get a copy.
    **{"model_type": "phi3", "sliding_window": 25, "original_max_position_embeddings": 30},
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 1e4},
        **{"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.5]},
    },
}
"""Prompts of more than 30 tokens have other rotary frequencies."""
NUM_TILES = {"image": (3, 1, 2), "video": (5, 4, 2)}
"""By turns; an image of several has a thumbnail."""
NAMES = {"image": "pixel_values", "video": "pixel_values_videos"}


def tiny_config(*, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, **settings: Any) -> Any:
    """Return HF's config: tiles of 4 x 4 patches, 4 embeddings each, before Qwen2's decoder."""
    settings = {"image_seq_length": 4, "tie_word_embeddings": False, **settings}
    return InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT, **text},
        vision_config={**VISION, **vision},
        image_token_id=CONTEXT,
        **settings,
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image or video."""
    side = config.vision_config.image_size[0]
    num_patches = side // config.vision_config.patch_size[0]
    per_tile = int((num_patches * config.downsample_ratio) ** 2)
    tiles = NUM_TILES[media.modality][media.seed % 3]
    pixels = draw_bytes([media.seed, tiles], (tiles, 3, side, side))
    return DrawnItem(
        {NAMES[media.modality]: pixels, f"{media.modality}_affine": AFFINE},
        [CONTEXT] * tiles * per_tile,
        before=[START],
        after=[END],
    )


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it: videos are images there."""
    pixels = [value for item in sample.items for value in make_pixels(item.tensors).values()]
    data = {"pixel_values": np.concatenate(pixels)} if pixels else {}
    return make_reference_inputs(sample.token_ids, data)


TINY = TinyFamily(
    name="internvl",
    model_class=InternVLForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=partial(resize_text, model_type="qwen3"),
    served={"text": {"model_type": "qwen3", "head_dim": 16}},
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(1, CONTEXT),
    published_head_dim=128,
    max_embeds={"image": 12, "video": 20},
    fill=partial(fill_with_unit_norms, sharpness=1.4),
    variants={
        "qwen2": Variant({}, 8),
        "qwen2, tied, squares of four": Variant(
            {
                "vision": {"attention_bias": True, "use_mean_pooling": False},
                "tie_word_embeddings": True,
                "downsample_ratio": 0.25,
                "projector_hidden_act": "relu",
            },
            9,
        ),
        "llama, 6b": Variant(
            {
                "text": {"model_type": "llama", "rms_norm_eps": 1e-5},
                "vision": {"norm_type": "rms_norm", "use_qk_norm": True},
            },
            8,
        ),
        "qwen3, state before the last": Variant(
            {
                "text": {"model_type": "qwen3", "head_dim": 12},
                "vision_feature_layer": -2,
                "vision": {"use_mean_pooling": False, "use_mask_token": True},
            },
            7,
        ),
        "qwen3 with experts, one layer without": Variant(
            {"text": {**QWEN3_MOE, "mlp_only_layers": [0]}}, 8
        ),
        "qwen3 with experts, weights of all": Variant(
            {"text": {**QWEN3_MOE, "norm_topk_prob": False}}, 8
        ),
        "phi3": Variant({"text": PHI3}, 8),
        "internlm3": Variant(
            {
                "text": {
                    **{"model_type": "internlm3", "head_dim": 12, "qkv_bias": True, "bias": True},
                    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0},
                }
            },
            8,
        ),
        "first state, no squares": Variant({"downsample_ratio": 1.0, "vision_feature_layer": 1}, 7),
    },
)


TINY_GPT_OSS = replace(
    TINY,
    name="internvl gpt_oss",
    resize=partial(resize_text, **GPT_OSS_KIND),
    served={"text": GPT_OSS},
    published_head_dim=64,
    variants={
        "plain": Variant({"text": GPT_OSS}, 8),
        "no biases of projections, hardly clamped": Variant(
            {
                "text": {
                    **{**GPT_OSS, "attention_bias": False, "swiglu_alpha": 1.2},
                    **{"swiglu_limit": 7.0, "num_experts_per_tok": 3, "tie_word_embeddings": True},
                },
                "tie_word_embeddings": True,
            },
            8,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


PATH = GOLDEN / "internvl"
IMAGE, VIDEO = "<IMG_CONTEXT>", "<video>"
make_processor = partial(golden_processor, "internvl")


path = partial(golden_path, "internvl")
hf_processor = hf_of(
    InternVLProcessor, GotOcr2ImageProcessorPil, path, has_videos=True, image_seq_length=4
)


def load_hf_videos() -> Any:
    """Return HF's processor, whose frames are squares; it samples nothing."""

    def cut(videos: HFVideos, seen: Any) -> dict[str, Any]:
        frames = [videos.resize(one, (56, 56)) for one in seen]
        return {"pixel_values_videos": torch.stack(frames)}

    images = GotOcr2ImageProcessorPil.from_pretrained(PATH)
    videos = HFVideos(images, None, cut, normalized=(OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    hf = hf_processor(videos)
    # It takes no arrays of numpy from a processor of videos.
    return lambda **inputs: hf(**{**inputs, "return_tensors": "pt"})


def write(folder: Path) -> Path:
    heads = {"text_config.num_attention_heads": 4}
    return save_weights(edit_golden("internvl", folder, config=heads))


FEWER = {"images_kwargs": {"max_patches": 3, "min_patches": 2}}
INTERNVL = Family(
    name="internvl",
    architecture="InternVLForConditionalGeneration",
    tiny=TINY,
    path=path,
    write=write,
    needless_files=frozenset({"chat_template.jinja", "tokenizer_config.json"}),
    probed=("vision_tower.encoder.layers.1", "multi_modal_projector"),
    published=Published(
        left_out=(),
        # The hub's files and save_pretrained's are named alike.
        layouts={
            "files": {
                "model.language_model.": "language_model.model.",
                "model.": "",
                "lm_": "language_model.lm_",
            },
            "module": MODULE,
        },
    ),
    rendered=CHATML.format(image="<IMG_CONTEXT>\n"),
    with_system=("", "<|im_start|>system\nbe short<|im_end|>\n"),
    call_hf=partial(call_processor, hf_processor),
    placeholder=IMAGE,
    video=VIDEO,
    video_pixels="pixel_values",
    load_hf_videos=load_hf_videos,
    lowering_kwargs={"images_kwargs": {"max_patches": 2}},
    extra_kwargs=({}, FEWER, {"crop_to_patches": False}),
    operator_kwargs=({"max_patches": 11}, {"crop_to_patches": False}),
)


def write_gpt_oss(folder: Path) -> Path:
    """Write config, tokenizer and the processor's files of one with gpt-oss' decoder."""
    sizes = {"vocab_size": 1024, "max_position_embeddings": 4096, "eos_token_id": 995}
    return edit_golden("internvl", folder, config={"text_config": {**TEXT, **GPT_OSS, **sizes}})


gpt_oss_path = made_once(write_gpt_oss)
INTERNVL_GPT_OSS = replace(
    INTERNVL,
    name="internvl gpt_oss",
    tiny=TINY_GPT_OSS,
    is_written=True,
    path=gpt_oss_path,
    write=with_weights(write_gpt_oss, TINY.fill),
)


# ---- the original layout, which has no HF processor --------------------------------------------

CONFIG = {
    "architectures": ["InternVLChatModel"],
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 56,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 6,
    "use_thumbnail": True,
    "vision_config": {"model_type": "intern_vit_6b", "image_size": 56, "patch_size": 14},
    "llm_config": {
        "model_type": "qwen2",
        "hidden_size": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
    },
}


@cache
def original(**overrides: Any) -> Path:
    """Write a tiny checkpoint in the original layout; its `<image>` is several tokens."""
    return made_once(partial(write_original_files, overrides))()


def write_original_files(overrides: Mapping[str, Any], path: Path) -> Path:
    tokenizer: Any = AutoTokenizer.from_pretrained(PATH)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>"]})
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({**CONFIG, **overrides}))
    return path


def make_original(cache: Any = None, mm: Any = None, **overrides: Any) -> Any:
    config = load_model_config(str(original(**overrides)), mm=mm or MultiModalConfig())
    return create_processor(config, cache=cache)


def cut_as_original(image: Image.Image, fewest: int, most: int) -> list[Image.Image]:
    """`dynamic_preprocess` as the model's README has it."""
    ratios = sorted(
        {
            (i, j)
            for n in range(fewest, most + 1)
            for i in range(1, n + 1)
            for j in range(1, n + 1)
            if fewest <= i * j <= most
        },
        key=lambda ratio: ratio[0] * ratio[1],
    )
    best, best_difference = (1, 1), float("inf")
    for ratio in ratios:
        difference = abs(image.width / image.height - ratio[0] / ratio[1])
        if difference < best_difference:
            best, best_difference = ratio, difference
        elif difference == best_difference and (
            image.width * image.height > 0.5 * 56 * 56 * ratio[0] * ratio[1]
        ):
            best = ratio
    resized = image.resize((56 * best[0], 56 * best[1]))
    tiles = []
    for i in range(best[0] * best[1]):
        x, y = i % best[0] * 56, i // best[0] * 56
        tiles.append(resized.crop((x, y, x + 56, y + 56)))
    return [*tiles, image.resize((56, 56))] if len(tiles) > 1 else tiles


def normalize_as_original(tiles: Sequence[Image.Image]) -> np.ndarray:
    """ToTensor and Normalize, in torch."""
    mean = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
    std = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)
    pixels = [torch.from_numpy(np.asarray(tile).copy()).permute(2, 0, 1) for tile in tiles]
    return torch.stack([(one.float().div(255) - mean) / std for one in pixels]).numpy()


def ids_as_original(processor: Any, prompt: str, counts: Sequence[int]) -> list[int]:
    for count in counts:
        prompt = prompt.replace("<image>", f"<img>{'<IMG_CONTEXT>' * 4 * count}</img>", 1)
    return processor.info.get_tokenizer()(prompt)["input_ids"]


def call_original(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    bounds = (kwargs.get("min_dynamic_patch", 1), kwargs.get("max_dynamic_patch", 6))
    if not kwargs.get("dynamic_image_size", True):
        bounds = (1, 1)
    tiles = [cut_as_original(image, *bounds) for image in images]
    ids = ids_as_original(make_original(), prompt, [len(one) for one in tiles])
    flat = [tile for one in tiles for tile in one]
    return HFInputs(ids, {"pixel_values_flat": normalize_as_original(flat)} if flat else {})


def write_original(folder: Path) -> Path:
    """The weights of `write` in the original layout, without a chat template."""
    source = write(folder / "source")
    path = folder / "original"
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>"]})
    tokenizer.chat_template = None
    tokenizer.save_pretrained(path)
    reference = make_random(source)
    tiles = {"dynamic_image_size": True, "max_dynamic_patch": 6, "use_thumbnail": True}
    original_config(reference.config, path, **tiles)
    tensors = to_original(reference.config, reference.state_dict(), is_internlm2=False)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, path / "model.safetensors")
    return path


INTERNVL_ORIGINAL = Family(
    name="internvl original",
    architecture="InternVLChatModel",
    has_reference=False,
    path=original,
    needless_files=frozenset({"chat_template.jinja", "tokenizer_config.json"}),
    write=write_original,
    rendered=CHATML.format(image="<image>\n"),
    with_system=("", "<|im_start|>system\nbe short<|im_end|>\n"),
    call_hf=call_original,
    embed_token_ids=lambda processor: [998],
    placeholder="<image>",
    video=VIDEO,
    lowering_kwargs={"max_dynamic_patch": 2},
    extra_kwargs=(
        {},
        {"min_dynamic_patch": 2, "max_dynamic_patch": 3},
        {"dynamic_image_size": False},
    ),
    operator_kwargs=({"max_dynamic_patch": 11},),
    tensors={"pixel_values_flat": 1e-6},
)
