"""Tiny LFM3-VLs: blocks that convolve frames or attend in them, a decoder of three kinds of layers.

Times stand among a video's frames.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Lfm3VlConfig, Lfm3VlForConditionalGeneration
from transformers.models.lfm3_vl.processing_lfm3_vl import Lfm3VlProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmjax.layers.recurrent.chunks import CHUNK
from mmjax.models.lfm3_vl import model as ours
from mmjax.parity.arrays import Sample
from tests.families import published_names, qwen2_vl, qwen3_vl
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import CHATML, Family, call_processor, hf_of, written
from tests.families.hf_videos import make_grid_videos
from tests.families.published import Published
from tests.families.qwen3_vl import SETTINGS, SMALLER, VIDEO_SETTINGS, draw_item
from tests.families.sizes import DECODER, NO_KEYS, Keys, fit_text, resize_text
from tests.families.tiny import TinyFamily, Variant
from tests.oracle import fill_with_unit_norms

TEXT: dict[str, Any] = {
    **DECODER,
    "vocab_size": qwen2_vl.VOCAB_SIZE,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    "sliding_window": 9,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv"],
    "patch_size": 4,
}


def tiny_config(
    *, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, is_tied: bool = True, **settings: Any
) -> Lfm3VlConfig:
    """Return HF's config."""
    settings = {"projector_hidden_size": 40, **settings}
    return Lfm3VlConfig(
        text_config={"model_type": "lfm3", **TEXT, **text},
        vision_config={**VISION, **vision},
        image_token_id=qwen2_vl.IMAGE_TOKEN,
        video_token_id=qwen2_vl.VIDEO_TOKEN,
        vision_start_token_id=qwen2_vl.VISION_START,
        vision_end_token_id=qwen2_vl.VISION_END,
        tie_word_embeddings=is_tied,
        **settings,
        architectures=["Lfm3VlForConditionalGeneration"],
    )


def torch_inputs(reference: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it, without kinds of tokens."""
    inputs = qwen2_vl.torch_inputs(reference, sample)
    return {name: one for name, one in inputs.items() if name != "mm_token_type_ids"}


fill = partial(fill_with_unit_norms, sharpness=1.4)
TINY = TinyFamily(
    name="lfm3_vl",
    model_class=ours.Lfm3VlForConditionalGeneration,
    reference_class=Lfm3VlForConditionalGeneration,
    make_config=tiny_config,
    resize=resize_text,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, 90),
    published_head_dim=128,
    max_embeds={"image": 15, "video": 18},
    longest_run=CHUNK,
    fill=fill,
    variants={
        "plain": Variant({}, 10),
        "biases, no gates, fewer norms, wider convolutions": Variant(
            {
                "is_tied": False,
                "projector_bias": False,
                "projector_hidden_act": "gelu_pytorch_tanh",
                "text": {
                    **{"use_sandwich_norm": False, "use_attention_gate": False},
                    **{"attention_bias": True, "conv_bias": True, "conv_L_cache": 3},
                    "layer_types": ["full_attention", "conv", "conv", "sliding_attention"],
                    "rope_parameters": {
                        "sliding_attention": {
                            "rope_type": "linear",
                            "rope_theta": 50.0,
                            "factor": 2.0,
                        },
                        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
                    },
                },
                "vision": {
                    **{"conv_kernel_size": 5, "temporal_patch_size": 1, "in_channels": 6},
                    **{"num_key_value_heads": 4, "norm_eps": 1e-2},
                    "layer_types": ["full_attention", "conv", "full_attention"],
                    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
                },
            },
            10,
        ),
        "no window, convolutions of lone patches, one key head": Variant(
            {
                "text": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
                "vision": {"conv_kernel_size": 1, "num_key_value_heads": 1},
            },
            10,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}


def write_files(path: Path) -> Path:
    """Write a directory; its tokenizer begins each text with BOS."""
    bos = "<|startoftext|>"
    tokenizer = make_tokenizer(["<|im_start|>", *MARKS.values()], bos=bos, eos="<|im_end|>")
    config = tiny_config(
        text=fit_text(tokenizer), vision={"patch_size": 16, "num_key_value_heads": 4}
    )
    for name, token in MARKS.items():
        setattr(config, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config=SETTINGS,
        video_preprocessor_config=VIDEO_SETTINGS,
    )


path = made_once(write_files)
load_hf = hf_of(Lfm3VlProcessor, Qwen2VLImageProcessorPil, path, has_videos=True)


def load_hf_videos() -> Any:
    """Return HF's processor with its rules for videos, and its settings of them."""
    images = Qwen2VLImageProcessorPil.from_pretrained(path())
    sampling = {"fps": 2, "num_frames": None, "min_frames": 4, "max_frames": 768}
    return load_hf(make_grid_videos("qwen3_vl", images, VIDEO_SETTINGS["size"], **sampling))


LFM3_VL = Family(
    **written(TINY, write_files),
    needless_files=frozenset({"tokenizer_config.json", "video_preprocessor_config.json"}),
    published=Published(list_shapes=published_names.list_lfm3_vl),
    rendered="<|startoftext|>" + CHATML.format(image=qwen2_vl.IMAGE),
    with_system=(
        "<|startoftext|>",
        "<|startoftext|><|im_start|>system\nbe short<|im_end|>\n",
    ),
    probed=("vision_tower.blocks.1", "vision_tower.blocks.2", "multi_modal_projector"),
    call_hf=partial(call_processor, load_hf),
    sizes=((190, 150), (75, 280)),  # so that prompts have chunks, of which states are kept
    placeholder=qwen2_vl.IMAGE,
    video=qwen2_vl.VIDEO,
    load_hf_videos=load_hf_videos,
    video_kwargs=qwen2_vl.QWEN2_VL.video_kwargs,
    **qwen2_vl.GRID_FIELDS
    | {
        "extra_kwargs": ({}, {"images_kwargs": SMALLER}),
        "operator_kwargs": qwen3_vl.QWEN3_VL.operator_kwargs,
    },
)
