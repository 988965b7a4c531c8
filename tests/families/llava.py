"""Tiny LLaVAs: CLIP's and SigLIP's towers before four kinds of decoders, and Pixtral's."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    CLIPVisionConfig,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    Phi3Config,
    PixtralVisionConfig,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers import LlavaForConditionalGeneration as HFModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from mmjax.models.llava.host_inputs import count_image_tokens
from mmjax.models.llava.model import LlavaForConditionalGeneration
from mmjax.rounding import round_up
from tests.families.directories import (
    HEADS,
    edit_golden,
    golden_path,
    made_once,
    make_tokenizer,
    save_weights,
    with_weights,
    write_directory,
)
from tests.families.family import Family, call_processor, hf_of
from tests.families.published import THREE_LAYOUTS, Published
from tests.families.sizes import DECODER, NO_KEYS, TOWER, Keys
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes

IMAGE_TOKEN, BREAK_TOKEN, END_TOKEN = 120, 121, 122
TEXT: dict[str, Any] = {
    **DECODER,
    "max_position_embeddings": 512,
}
VISION: dict[str, Any] = {
    **TOWER,
    "num_hidden_layers": 3,
    "image_size": 28,
    "patch_size": 7,
}
TEXT_CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "gemma3": Gemma3TextConfig,
    "phi3": Phi3Config,
}
VISION_CONFIGS = {
    "clip": CLIPVisionConfig,
    "siglip": SiglipVisionConfig,
    "pixtral": PixtralVisionConfig,
}
PIXTRAL_SETTINGS: dict[str, Any] = {
    "tower": "pixtral",
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
}
GRIDS = [(3, 4), (1, 1), (5, 2)]
"""Rows and columns of patches of Pixtral's images, by turns."""


def tiny_config(
    *,
    decoder: str = "llama",
    tower: str = "clip",
    text: Keys = NO_KEYS,
    vision: Keys = NO_KEYS,
    **settings: Any,
) -> LlavaConfig:
    """Return a LLaVA of two decoder blocks and three of the tower, with 16 patches an image."""
    return LlavaConfig(
        text_config=TEXT_CONFIGS[decoder](**{**TEXT, **text}),
        vision_config=VISION_CONFIGS[tower](**{**VISION, **vision}),
        image_token_index=IMAGE_TOKEN,
        **settings,
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    vision = config.vision_config
    if vision.model_type == "pixtral":
        rows, columns = GRIDS[media.seed % len(GRIDS)]
        ids = [*[IMAGE_TOKEN] * columns, BREAK_TOKEN] * rows
        ids[-1] = END_TOKEN
        shape = (3, rows * vision.patch_size, columns * vision.patch_size)
    else:
        ids = [IMAGE_TOKEN] * count_image_tokens(config)
        shape = (3, vision.image_size, vision.image_size)
    tensors = {"pixel_values": draw_bytes(media.seed, shape), "image_affine": AFFINE}
    return DrawnItem(tensors, ids, np.equal(ids, IMAGE_TOKEN))


ROW: dict[str, Any] = {
    "model_class": LlavaForConditionalGeneration,
    "reference_class": HFModel,
    "make_config": tiny_config,
    "draw_item": draw_item,
    "word_ids": range(5, IMAGE_TOKEN),
    "published_head_dim": 128,
}
TINY = TinyFamily(
    **ROW,
    name="llava",
    max_embeds={"image": 16},
    variants={
        "llama": Variant({}, 8),
        "mistral with a window, several states, no biases": Variant(
            {
                "decoder": "mistral",
                "text": {"sliding_window": 9},
                "vision_feature_layer": [-1, 1, -3],
                "multimodal_projector_bias": False,
                "projector_hidden_act": "gelu_pytorch_tanh",
            },
            9,
        ),
        "qwen2, tied, all of siglip": Variant(
            {
                "decoder": "qwen2",
                "tie_word_embeddings": True,
                "tower": "siglip",
                "vision_feature_select_strategy": "full",
                "vision_feature_layer": -1,
                "vision": {"vision_use_head": True},
            },
            9,
        ),
        "gemma 3, the class token too, patches that do not fill the image": Variant(
            {
                "decoder": "gemma3",
                "text": {"head_dim": 16},
                "tie_word_embeddings": True,
                "vision_feature_select_strategy": "full",
                "vision": {"image_size": 31},
            },
            8,
        ),
        "phi3, as long as trained at most": Variant(
            {
                "decoder": "phi3",
                "text": {
                    "original_max_position_embeddings": 200,
                    "rope_parameters": {
                        **{"rope_type": "longrope", "rope_theta": 1e4},
                        "short_factor": [1.0, 1.1, 1.2, 1.3],
                        "long_factor": [1.5, 2.0, 3.0, 4.5],
                    },
                },
            },
            8,
        ),
        "siglip's embedding without its first patch": Variant(
            {"tower": "siglip", "vision_feature_layer": [0]}, 6
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


path = partial(golden_path, "llava")
hf_processor = hf_of(
    LlavaProcessor,
    CLIPImageProcessorPil,
    path,
    patch_size=14,
    vision_feature_select_strategy="default",
    num_additional_image_tokens=1,
)


def write(folder: Path) -> Path:
    return save_weights(edit_golden("llava", folder, config={**HEADS, "text_config.head_dim": 16}))


LLAVA = Family(
    name="llava",
    architecture="LlavaForConditionalGeneration",
    tiny=TINY,
    path=path,
    write=write,
    needless_files=frozenset({"chat_template.jinja", "tokenizer_config.json"}),
    published=Published(layouts=THREE_LAYOUTS),
    rendered=("USER: <image>\nwhat is it ASSISTANT: a car</s>USER: which color ASSISTANT:"),
    with_system=("USER: <", "be short USER: <"),
    call_hf=partial(call_processor, hf_processor),
    placeholder="<image>",
    words=(*Family.words, *("<s>", "</s>", "<pad>")),
    contradictions=(
        (
            "processor_config",
            {"image_processor.crop_size": {"height": 30, "width": 30}},
            "makes 30x30 .* takes 56x56",
        ),
    ),
)


# ---- another tower and decoder, in a directory that tests write ----------------------------------


def write_siglip_files(path: Path) -> Path:
    """Write a LLaVA of SigLIP's tower before Qwen2: no class token, no BOS."""
    tokenizer = make_tokenizer(["<image>"], eos="<|im_end|>", named={"image_token": "<image>"})
    config = tiny_config(
        decoder="qwen2",
        tower="siglip",
        text={"vocab_size": round_up(len(tokenizer), 64), "max_position_embeddings": 1024},
        vision={"image_size": 56, "patch_size": 14},
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    config.image_token_index = tokenizer.image_token_id
    size = {"height": 56, "width": 56}
    settings = {"patch_size": 14, "vision_feature_select_strategy": "full"}
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={"image_processor_type": "SiglipImageProcessor", "size": size},
        processor_config={"processor_class": "LlavaProcessor", **settings},
    )


siglip_path = made_once(write_siglip_files)


hf_siglip = hf_of(
    LlavaProcessor,
    SiglipImageProcessorPil,
    siglip_path,
    patch_size=14,
    vision_feature_select_strategy="full",
)
LLAVA_SIGLIP = Family(
    name="llava siglip",
    architecture="LlavaForConditionalGeneration",
    tiny=None,
    is_written=True,
    path=siglip_path,
    write=with_weights(write_siglip_files),
    needless_files=frozenset({"processor_config.json", "tokenizer_config.json"}),
    rendered="USER: <image>\nwhat is it ASSISTANT: a car<|im_end|>USER: which color ASSISTANT:",
    with_system=("USER: <", "be short USER: <"),
    call_hf=partial(call_processor, hf_siglip),
    placeholder="<image>",
    words=(*Family.words, "<|im_end|>", "<pad>"),
)
