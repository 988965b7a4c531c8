"""Tiny Mistral 3s and LightOnOCRs: squares of patches that merge, pictures of any grid."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    LightOnOcrConfig,
    LightOnOcrForConditionalGeneration,
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Mistral4Config,
    MistralConfig,
    PixtralVisionConfig,
    Qwen3Config,
)
from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from mmjax.models.pixtral import model as ours
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from mmjax.rounding import round_up
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import CHATML, Family, written
from tests.families.llava import BREAK_TOKEN, END_TOKEN, IMAGE_TOKEN, TEXT, VISION
from tests.families.pixtral import call_pixtral
from tests.families.published import LLM_FIRST, MODULE, Published
from tests.families.sizes import NO_KEYS, Keys, resize_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes, listed

MERGE = 2
GRIDS = [(3, 4), (1, 1), (5, 2)]
"""Rows and columns of squares, by turns."""
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"original_max_position_embeddings": 16, "max_position_embeddings": 256},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
"""Of Ministral 3: queries grow at every 16th position."""
LATENT: dict[str, Any] = {
    **{"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"v_head_dim": 12, "moe_intermediate_size": 24, "n_routed_experts": 6},
    **{"num_experts_per_tok": 2, "num_key_value_heads": TEXT["num_attention_heads"]},
}
"""Of Mistral Small 4: queries, keys and values of latents, and experts in every layer."""


def make_mistral4(**text: Any) -> Mistral4Config:
    """Return the text config of a Mistral 4, whose heads have a width by its own keys."""
    own = {name: value for name, value in text.items() if name != "head_dim"}
    text = {"rope_parameters": {**YARN}, **own, **LATENT}
    return Mistral4Config(**text)


def make_ministral3(**text: Any) -> Ministral3Config:
    """Return the text config of a Ministral 3, whose positions are scaled."""
    text = {"rope_parameters": {**YARN}, **text}
    return Ministral3Config(**text)


DECODERS: dict[str, Any] = {
    "mistral": MistralConfig,
    "mistral4": make_mistral4,
    "ministral3": make_ministral3,
    "qwen3": Qwen3Config,
}


def tiny_config(
    *, decoder: str = "mistral", text: Keys = NO_KEYS, vision: Keys = NO_KEYS, **settings: Any
) -> Any:
    """Return a Mistral 3 of two decoder blocks and three of the tower; LightOnOCR with Qwen3."""
    options: dict[str, Any] = {
        "text_config": DECODERS[decoder](**{"head_dim": 8, **TEXT, **text}),
        "vision_config": PixtralVisionConfig(**{**VISION, **vision}),
        "spatial_merge_size": MERGE,
        "tie_word_embeddings": False,
        **settings,
    }
    if decoder == "qwen3":
        return LightOnOcrConfig(image_token_id=IMAGE_TOKEN, **options)
    return Mistral3Config(image_token_index=IMAGE_TOKEN, **options)


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    unit = config.vision_config.patch_size * config.spatial_merge_size
    rows, columns = GRIDS[media.seed % len(GRIDS)]
    if config.model_type == "lighton_ocr":
        ids = [IMAGE_TOKEN] * (rows * columns)
    else:
        ids = [*[IMAGE_TOKEN] * columns, BREAK_TOKEN] * rows
        ids[-1] = END_TOKEN
    pixels = draw_bytes(media.seed, (3, rows * unit, columns * unit))
    tensors = {"pixel_values": pixels, "image_affine": AFFINE}
    return DrawnItem(tensors, ids, np.equal(ids, IMAGE_TOKEN))


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it."""
    return make_reference_inputs(sample.token_ids, listed(sample), has_sizes=True)


TINY = TinyFamily(
    name="mistral3",
    model_class=ours.Mistral3ForConditionalGeneration,
    reference_class=Mistral3ForConditionalGeneration,
    make_config=tiny_config,
    resize=lambda *sizes: {"decoder": "ministral3", **resize_text(*sizes)},
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, IMAGE_TOKEN),
    published_head_dim=128,
    served={"decoder": "ministral3"},
    max_embeds={"image": 12},
    variants={
        "mistral": Variant({}, 10),
        "ministral 3, another state, biases, squares of 3": Variant(
            {
                "decoder": "ministral3",
                "vision_feature_layer": [-2],
                "multimodal_projector_bias": True,
                "projector_hidden_act": "gelu_pytorch_tanh",
                "spatial_merge_size": 3,
            },
            9,
        ),
        "tied": Variant({"tie_word_embeddings": True}, 10),
        "mistral 4": Variant({"decoder": "mistral4"}, 10),
    },
)
TINY_LIGHTON = replace(
    TINY,
    name="lighton_ocr",
    model_class=ours.LightOnOcrForConditionalGeneration,
    reference_class=LightOnOcrForConditionalGeneration,
    resize=lambda *sizes: {"decoder": "qwen3", **resize_text(*sizes)},
    served={"decoder": "qwen3"},
    variants={
        "plain": Variant({"decoder": "qwen3"}, 10),
        "tied": Variant({"decoder": "qwen3", "tie_word_embeddings": True}, 10),
    },
)


# ---- their prompts and directories ---------------------------------------------------------------


PATCH, EDGE = 14, 112
UNIT = PATCH * MERGE
MARKS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
PADS = {
    "image_token": "<|image_pad|>",
    "image_break_token": "<|vision_pad|>",
    "image_end_token": "<|vision_end|>",
}


def write_files(decoder: str, path: Path) -> Path:
    """Write a directory as published, of pictures of up to 112 x 112."""
    if decoder == "qwen3":
        tokenizer = make_tokenizer([*PADS.values(), "<|im_start|>"], eos="<|im_end|>", named=PADS)
        token, processor, patch = "<|image_pad|>", "LightOnOcrProcessor", UNIT
    else:
        tokenizer = make_tokenizer([*MARKS, "[INST]", "[/INST]"], bos="<s>")
        token, processor, patch = "[IMG]", "PixtralProcessor", PATCH
    config = tiny_config(
        decoder=decoder,
        text={"vocab_size": round_up(len(tokenizer), 64), "max_position_embeddings": 1024},
        vision={"patch_size": PATCH, "image_size": EDGE},
    )
    name = "LightOnOcr" if decoder == "qwen3" else "Mistral3"
    config.architectures = [f"{name}ForConditionalGeneration"]
    config.image_token_id = tokenizer.convert_tokens_to_ids(token)
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": patch, "width": patch},
            "size": {"longest_edge": EDGE},
        },
        processor_config={
            "processor_class": processor,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
        },
    )


write_mistral3, write_lighton = (
    partial(write_files, decoder) for decoder in ("ministral3", "qwen3")
)
mistral3_path = made_once(write_mistral3)
MISTRAL3 = Family(
    **written(TINY, write_mistral3),
    needless_files=frozenset({"processor_config.json", "tokenizer_config.json"}),
    published=Published(layouts={"hub": LLM_FIRST, "module": MODULE}),
    rendered="[INST][IMG]what is it[/INST]a car</s>[INST]which color[/INST]",
    with_system=("[INST]which", "[INST]be short\n\nwhich"),
    probed=("vision_tower.blocks.2", "multi_modal_projector.norm", "multi_modal_projector"),
    call_hf=partial(call_pixtral, mistral3_path, UNIT),
    placeholder="[IMG]",
    takes_embeds=False,
    lowering_kwargs={"size": {"longest_edge": 60}},
    extra_kwargs=({}, {"size": {"longest_edge": 84}}),
    operator_kwargs=({"size": {"longest_edge": 160}},),
    contradictions=(("preprocessor_config", {"do_resize": False}, "`do_resize` of the image"),),
    tensors={"pixel_values": 1e-6},
    takes_size=lambda width, height: max(width, height) < 60 * min(width, height),
    words=(*Family.words, *("<s>", "</s>", "<pad>")),
)
LIGHTON_OCR = replace(
    MISTRAL3,
    **written(TINY_LIGHTON, write_lighton, LightOnOcrProcessor, PixtralImageProcessorPil),
    published=Published(),
    rendered=CHATML.format(image="<|image_pad|>"),
    with_system=("<|im_start|>user", "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user"),
    placeholder="<|image_pad|>",
    words=(*Family.words, *("<|im_end|>", "<pad>")),
)
