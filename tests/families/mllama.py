"""Tiny Llama 3.2 Visions: rows of pictures of up to four tiles, which tokens attend to."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MllamaConfig, MllamaForConditionalGeneration
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import MllamaProcessor

from mmjax.models.mllama import model as ours
from mmjax.models.mllama.processor import IMAGE, MllamaProcessingInfo
from mmjax.parity.arrays import Sample
from mmjax.parity.departures import mask_pictures
from mmjax.parity.reference import make_reference_inputs
from tests.families.directories import make_tokenizer, write_directory
from tests.families.family import Family, written
from tests.families.published import MODULE, Published
from tests.families.sizes import DECODER, NO_KEYS, Keys, fit_text, resize_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes, joined
from tests.oracle import fill_with_unit_norms

IMAGE_TOKEN = 128
"""Behind the vocabulary, as published."""
ROPE: dict[str, Any] = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
VISION: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 40, "attention_heads": 2, "num_hidden_layers": 3},
    **{"num_global_layers": 1, "image_size": 8, "patch_size": 4, "vision_output_dim": 72},
    "intermediate_layers_indices": [0, 1],
}
ARRANGEMENTS = [[1, 1], [2, 1], [1, 3], [2, 2]]


def tiny_config(*, text: Keys = NO_KEYS, vision: Keys = NO_KEYS) -> Any:
    """Return a config of a tower of 3 and 1 blocks; the decoder's second layer sees pictures."""
    decoder = {**DECODER, "num_hidden_layers": 3, "cross_attention_layers": [1]}
    return MllamaConfig(
        text_config={**decoder, "rope_parameters": ROPE, **text},
        vision_config={**VISION, **vision},
        image_token_index=IMAGE_TOKEN,
        architectures=["MllamaForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed picture."""
    vision = config.vision_config
    rows, columns = ARRANGEMENTS[media.seed % len(ARRANGEMENTS)]
    side, number = vision.image_size, rows * columns
    place = vision.supported_aspect_ratios.index([rows, columns])
    tensors = {
        "pixel_values": draw_bytes(media.seed, (number, 3, side, side)),
        "image_affine": AFFINE,
        "num_tiles": np.array(number, np.int64),
        "aspect_ratio_ids": np.array(place + 1, np.int64),
    }
    return DrawnItem(tensors, [config.image_token_index])


class _Info(MllamaProcessingInfo):
    """The row, of a config alone."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def get_hf_config(self) -> Any:
        return self.config


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it."""
    if not sample.items:
        return make_reference_inputs(sample.token_ids, {})
    data = joined(
        Sample(
            token_ids=sample.token_ids,
            items=[
                item._replace(
                    tensors={
                        name: value[None] if value.ndim == 0 else value
                        for name, value in item.tensors.items()
                    }
                )
                for item in sample.items
            ],
        )
    )
    given = _Info(reference.config).reference_inputs(sample.token_ids.tolist(), data)
    return make_reference_inputs(sample.token_ids, given)


def fill(model: Any) -> None:
    """Open the gates, and make pictures loud: attention to many rows would be faint."""
    fill_with_unit_norms(model, sharpness=2.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name.rpartition(".")[2] and parameter.numel() == 1:
                parameter.fill_(0.6 + 0.1 * (len(name) % 5))
            if name.endswith(("cross_attn.o_proj.weight", "cross_attn.v_proj.weight")):
                parameter *= 2.0


def mend(model: Any) -> None:
    """Let HF's model show no picture to tokens before the first."""
    mask_pictures(model)


TINY = TinyFamily(
    name="mllama",
    model_class=ours.MllamaForConditionalGeneration,
    reference_class=MllamaForConditionalGeneration,
    make_config=tiny_config,
    resize=resize_text,
    # Tiles of two rows: in room for four pictures, requests with one or two preempt each other.
    served={"vision": {"patch_size": 8}},
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(1, 120),
    published_head_dim=128,
    max_embeds={"image": 20},
    fill=fill,
    mend=mend,
    variants={
        "plain": Variant({}, 10),
        "two such layers, more blocks, other parts of a row, no scaled angles": Variant(
            {
                "text": {
                    "num_hidden_layers": 5,
                    "cross_attention_layers": [1, 3],
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                    "rms_norm_eps": 1e-3,
                },
                "vision": {
                    **{"num_hidden_layers": 2, "num_global_layers": 2, "norm_eps": 1e-3},
                    **{"intermediate_layers_indices": [1], "vision_output_dim": 48},
                    **{"hidden_act": "gelu_pytorch_tanh", "image_size": 12},
                },
            },
            12,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------

SIDE = 28
BOS, EOT = "<|begin_of_text|>", "<|eot_id|>"


def write_files(path: Path) -> Path:
    # Written by HF's processor, and not by the tokenizer: see `tests/models/test_mllama.py`.
    marks = ["<|start_header_id|>", "<|end_header_id|>", BOS]
    tokenizer = make_tokenizer(marks, eos=EOT, pad="<|finetune_right_pad_id|>")
    vocab_size = fit_text(tokenizer)["vocab_size"]
    tokenizer.add_tokens([f"<|reserved {n}|>" for n in range(vocab_size - len(tokenizer))])
    tokenizer.add_special_tokens(
        {"bos_token": BOS, "additional_special_tokens": [IMAGE, "<|python_tag|>"]}
    )
    config = tiny_config(
        text=fit_text(tokenizer, vocab_size=vocab_size, hidden_size=64),
        vision={"image_size": SIDE, "patch_size": 7},
    )
    config.image_token_index = tokenizer.convert_tokens_to_ids(IMAGE)
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "MllamaImageProcessor",
            "max_image_tiles": 4,
            "size": {"height": SIDE, "width": SIDE},
        },
    )


def write_turn(role: str, content: str) -> str:
    """Return a message in the default template's format."""
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}{EOT}"


MLLAMA = Family(
    **written(TINY, write_files, MllamaProcessor, MllamaImageProcessorPil),
    needless_files=frozenset({"tokenizer_config.json"}),
    published=Published(
        left_out=(),
        layouts={
            "hub": {
                "model.language_model.": "language_model.model.",
                "model.vision_model.": "vision_model.",
                "model.multi_modal_projector.": "multi_modal_projector.",
                "lm_head.": "language_model.lm_head.",
            },
            "module": MODULE,
        },
    ),
    rendered=write_turn("user", f"{IMAGE}what is it")
    + write_turn("assistant", "a car")
    + write_turn("user", "which color")
    + "<|start_header_id|>assistant<|end_header_id|>\n\n",
    with_system=("", write_turn("system", "be short")),
    probed=("vision_tower.transformer.layers.1", "multi_modal_projector"),
    placeholder=IMAGE,
    max_images=4,
    takes_embeds=False,
    tensors={
        "pixel_values": 1e-6,
        "aspect_ratio_ids": 0.0,
        "aspect_ratio_mask": 0.0,
        "cross_attention_mask": 0.0,
    },
    contradictions=(
        ("preprocessor_config", {"max_image_tiles": 3}, "`max_image_tiles` .* 3, but .* 4"),
        ("preprocessor_config", {"size": {"height": 14, "width": 14}}, "`size` .*14.*, but"),
        ("config", {"image_token_index": 7}, "but `image_token_id` of config.json is 7"),
    ),
)
