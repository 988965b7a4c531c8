"""Tiny Llama 4s: tiles of a picture, and the whole, before layers that see chunks alone."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Llama4Config, Llama4ForConditionalGeneration
from transformers.models.llama4.processing_llama4 import Llama4Processor

from mmjax.models.llama4 import model as ours
from mmjax.models.llama4.host_inputs import normalize, to_bfloat16
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from mmjax.processing.image_processors.affine import make_affine
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import Family, HFInputs, written
from tests.families.sizes import DECODER, NO_KEYS, TOWER, Keys, fit_text
from tests.families.tiny import DrawnItem, Media, TinyFamily, Variant, draw_bytes, joined
from tests.families.without_torchvision import take_image_processor
from tests.oracle import fill_with_unit_norms

MARKS = ("<|image_start|>", "<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
MARKS = (*MARKS, "<|image_end|>", "<|patch|>")
START_ID, IMAGE_ID, COLUMN_ID, ROW_ID, END_ID, PATCH_ID = range(122, 128)
TEXT: dict[str, Any] = {
    **DECODER,
    "model_type": "llama4_text",
    "num_hidden_layers": 3,
    "head_dim": 8,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "moe_layers": [0, 2],
    "no_rope_layers": [1, 0, 1],
    # The shortest prompt has three chunks, in the last of which it ends.
    "attention_chunk_size": 9,
    "floor_scale": 8,
    "attn_scale": 0.3,
    "rope_parameters": {
        **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    },
}
VISION: dict[str, Any] = {
    **TOWER,
    "intermediate_size": 4 * TOWER["hidden_size"],
    "image_size": 32,
    "patch_size": 8,
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 40),
}
GRIDS = ((1, 2), (1, 1), (2, 1))
"""Rows and columns of tiles, by turns."""


def tiny_config(*, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, **settings: Any) -> Llama4Config:
    """Return HF's config: tiles of 4 x 4 patches, 4 embeddings each."""
    settings = {"image_token_index": PATCH_ID, **settings}
    return Llama4Config(
        text_config={**TEXT, **text},
        vision_config={**VISION, **vision},
        **settings,
        architectures=["Llama4ForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    vision, (rows, columns) = config.vision_config, GRIDS[media.seed % len(GRIDS)]
    side = vision.image_size // vision.patch_size
    tile = [PATCH_ID] * int((side * vision.pixel_shuffle_ratio) ** 2)
    row = [*tile, *[COLUMN_ID, *tile] * (columns - 1), ROW_ID]
    cut = row * rows if rows * columns > 1 else []
    ids = [START_ID, *cut, IMAGE_ID, *tile, END_ID]
    num_tiles = ids.count(PATCH_ID) // len(tile)
    pixels = draw_bytes(media.seed, (num_tiles, 3, vision.image_size, vision.image_size))
    tensors = {"pixel_values": pixels, "image_affine": make_affine()}
    tensors["aspect_ratios"] = np.array((rows, columns))
    return DrawnItem(tensors, ids, np.equal(ids, PATCH_ID))


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it: the tiles of all images, one by one."""
    tensors = joined(sample)
    tensors.pop("aspect_ratios", None)
    if "pixel_values" in tensors:
        tensors["pixel_values"] = normalize(tensors["pixel_values"], to_bfloat16)
    return make_reference_inputs(sample.token_ids, tensors)


def fill(model: Any) -> None:
    """Fill a model whose experts are as loud as its other layers."""
    fill_with_unit_norms(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                parameter *= 6.0


TINY = TinyFamily(
    name="llama4",
    model_class=ours.Llama4ForConditionalGeneration,
    reference_class=Llama4ForConditionalGeneration,
    make_config=tiny_config,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(1, START_ID),
    published_head_dim=128,
    max_embeds={"image": 12},
    fill=fill,
    variants={
        "experts beside others": Variant({}, 9),
        "two experts in every layer, no norms, single patches": Variant(
            {
                "text": {
                    **{"moe_layers": None, "num_experts_per_tok": 2, "use_qk_norm": False},
                    **{"attn_temperature_tuning": False, "attention_bias": True},
                },
                "vision": {"pixel_shuffle_ratio": 1.0, "intermediate_size": 24},
            },
            9,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


IMAGE, PATCH = "<|image|>", "<|patch|>"
SIDE = 56


def write_files(path: Path) -> Path:
    turns = ["<|header_start|>", "<|header_end|>"]
    tokenizer = make_tokenizer(
        [*turns, *MARKS],
        bos="<|begin_of_text|>",
        eos="<|eot|>",
        pad="<|finetune_right_pad|>",
    )
    config = tiny_config(
        text=fit_text(tokenizer, hidden_size=64),
        vision={"image_size": SIDE, "patch_size": 14},
    )
    config.image_token_index = tokenizer.convert_tokens_to_ids(PATCH)
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "Llama4ImageProcessorFast",
            "max_patches": 4,
            "size": {"height": SIDE, "width": SIDE},
        },
        processor_config={"patch_size": 14, "processor_class": "Llama4Processor"},
    )


path = made_once(write_files)


@cache
def hf_processor() -> Any:
    """Return HF's processor, over its image processor's own code."""
    image_processor = take_image_processor("llama4", "Llama4ImageProcessor").from_pretrained(path())
    tokenizer = AutoTokenizer.from_pretrained(path())

    class WithoutTorchvision(Llama4Processor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            """Do nothing: HF knows no other image processor than torchvision's."""

    return WithoutTorchvision(image_processor=image_processor, tokenizer=tokenizer)


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Call HF's processor, whose pixels are bfloat16, which numpy has not."""
    settings = kwargs if images else {}
    outputs = hf_processor()(text=[prompt], images=images or None, return_tensors="pt", **settings)
    tensors = {name: value.float().numpy() for name, value in outputs.items()}
    return HFInputs(outputs["input_ids"][0].tolist(), tensors)


def say(role: str, text: str) -> str:
    return f"<|header_start|>{role}<|header_end|>\n\n{text}"


LLAMA4 = Family(
    **written(TINY, write_files),
    needless_files=frozenset({"tokenizer_config.json", "processor_config.json"}),
    rendered=(
        say("user", f"{IMAGE}what is it<|eot|>")
        + say("assistant", "a car<|eot|>")
        + say("user", "which color<|eot|>")
        + say("assistant", "")
    ),
    with_system=("", say("system", "be short<|eot|>")),
    probed=("vision_tower.encoder.layers.1", "vision_tower.post_layernorm"),
    call_hf=call_hf,
    placeholder=IMAGE,
    takes_embeds=False,
    lowering_kwargs={"max_patches": 2},
    extra_kwargs=({}, {"max_patches": 3}, {"resize_to_max_canvas": True}),
    operator_kwargs=({"max_patches": 11}, {"resize_to_max_canvas": True}),
    contradictions=(
        ("processor_config", {"patch_size": 28}, "`patch_size` .* is 28, but .* has 14"),
        ("processor_config", {"pixel_shuffle_ratio": 0.25}, "`pixel_shuffle_ratio` .* 0.25"),
        ("preprocessor_config", {"size": {"height": 28, "width": 28}}, "`size` .*28.*, but"),
        ("preprocessor_config", {"image_mean": [0.4, 0.5, 0.6]}, "`image_mean` .* 0.6"),
        ("preprocessor_config", {"rescale_factor": 0.5}, "`rescale_factor` .* 0.5, but"),
        ("config", {"image_token_index": 7}, "but `image_token_id` of config.json is 7"),
    ),
)
