"""Tiny Granites for Docling: tiles of a page by two routes, features for layers of a Granite."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GraniteDoclingConfig, GraniteDoclingForConditionalGeneration
from transformers.models.granite_docling.image_processing_pil_granite_docling import (
    GraniteDoclingImageProcessorPil,
)
from transformers.models.granite_docling.processing_granite_docling import GraniteDoclingProcessor

from mmjax.models.granite_docling import model as ours
from mmjax.models.granite_docling.host_inputs import GraniteDoclingHostInputs
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from tests.families.directories import make_tokenizer, write_directory
from tests.families.family import Family, written
from tests.families.llava_next import GRANITE
from tests.families.published import Published
from tests.families.sizes import DECODER, NO_KEYS, TOWER, Keys, fit_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes, joined

IMAGE_TOKEN, FAKE_TOKEN = 127, 126
TEXT: dict[str, Any] = {
    **DECODER,
    **GRANITE,
    "logits_scaling": 3.0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
VISION: dict[str, Any] = {
    **TOWER,
    "image_size": 16,
    "patch_size": 4,
    "scale_factor": 2,
    "deepstack_visual_indexes": [0, 1],
}
GRIDS = ((1, 1), (1, 2), (2, 2))
"""Rows and columns, by turns."""


def tiny_config(
    *,
    text: Keys = NO_KEYS,
    vision: Keys = NO_KEYS,
    router: int | None = None,
    is_tied: bool = False,
    image_id: int = IMAGE_TOKEN,
) -> GraniteDoclingConfig:
    """Return HF's config: four embeddings a tile, and features for all layers of the decoder.

    `router`: the width of what chooses a route in HF's module, where there is one.
    """
    texts = {**TEXT, **text}
    return GraniteDoclingConfig(
        text_config=texts,
        vision_config={**VISION, "out_hidden_size": texts["hidden_size"], **vision},
        density_router_hidden_size=router,
        image_token_id=image_id,
        pad_token_id=0,
        tie_word_embeddings=is_tied,
        architectures=["GraniteDoclingForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media, *, is_fine: bool | None = None) -> DrawnItem:
    """Return a processed page; where the module may choose a route, it is the fine one."""
    if is_fine is None:
        is_fine = config.density_router_hidden_size is not None
    rows, columns = GRIDS[media.seed % len(GRIDS)]
    tiles, side = rows * columns + (rows * columns > 1), config.vision_config.image_size
    tensors = {
        "pixel_values": draw_bytes(media.seed, (tiles, 3, side, side)),
        "image_affine": AFFINE,
        "image_layouts": np.array([rows, columns, is_fine]),
    }
    number = GraniteDoclingHostInputs(config).count_tile_tokens(is_fine)
    ids = [FAKE_TOKEN, *[IMAGE_TOKEN] * number] * tiles
    return DrawnItem(tensors, ids, np.equal(ids, IMAGE_TOKEN))


def torch_inputs(reference: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it: `[prompts, tiles, C, Y, X]`."""
    if not sample.items:
        return make_reference_inputs(sample.token_ids, {})
    tensors = joined(sample)
    pixels, is_fine = tensors["pixel_values"], tensors["image_layouts"][2::3]
    data = {
        "pixel_values": pixels[None],
        "pixel_attention_mask": np.ones((1, len(pixels)), bool),
        **({"tile_fine_mask": np.ones(1, bool)} if is_fine.all() else {}),
    }
    return make_reference_inputs(sample.token_ids, data)


TINY = TinyFamily(
    name="granite_docling",
    model_class=ours.GraniteDoclingForConditionalGeneration,
    reference_class=GraniteDoclingForConditionalGeneration,
    make_config=tiny_config,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, FAKE_TOKEN),
    published_head_dim=64,
    max_embeds={"image": 20},
    variants={
        "coarse, a tied head": Variant({"is_tied": True}, 11),
        "fine, and what chooses it": Variant({"router": 8}, 11, ("image", "two images")),
        "one route, one block read, biases": Variant(
            {
                "vision": {
                    "use_fine_route": False,
                    "scale_factor": 1,
                    "deepstack_visual_indexes": [1],
                    "image_size": 8,
                },
                "text": {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3},
            },
            11,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


SIDE, IMAGE, FAKE = 56, "<image>", "<fake_token_around_image>"
FINE: dict[str, Any] = {"fine_route": True}
WHOLE: dict[str, Any] = {"crop_to_patches": False}
MARKS = ["<|start_of_role|>", "<|end_of_role|>"]


def write_files(path: Path) -> Path:
    """Write a directory whose tokenizer has a newline and what is behind it as one token."""
    places = [f"<row_{row}_col_{column}>" for row in range(1, 17) for column in range(1, 17)]
    tokens = [*MARKS, FAKE, IMAGE, "<global-img>", *places]
    tokenizer = make_tokenizer(tokens, eos="<|end_of_text|>")
    tokenizer.add_tokens(["\n\n", "\nwhat"])
    config = tiny_config(
        text=fit_text(tokenizer),
        vision={"image_size": SIDE, "patch_size": 7, "scale_factor": 4},
        image_id=tokenizer.convert_tokens_to_ids(IMAGE),
    )
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "GraniteDoclingImageProcessor",
            "max_patches": 9,
            "size": {"height": SIDE, "width": SIDE},
        },
        processor_config={"image_seq_len": 4, "processor_class": "GraniteDoclingProcessor"},
    )


USER, END = "<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"
ANSWER = "<|start_of_role|>assistant<|end_of_role|>"
HF_CLASSES = (GraniteDoclingProcessor, GraniteDoclingImageProcessorPil)
GRANITE_DOCLING = Family(
    **written(TINY, write_files, *HF_CLASSES, image_seq_len=4),
    needless_files=frozenset({"processor_config.json", "tokenizer_config.json"}),
    takes_embeds=False,
    published=Published(unread=("mtp.blocks.0.proj.weight", "model.density_router.att.weight")),
    rendered=f"{USER}{IMAGE}what is it{END}{ANSWER}a car{END}{USER}which color{END}{ANSWER}",
    with_system=(USER, f"<|start_of_role|>system<|end_of_role|>be short{END}{USER}"),
    question="<doclang>",
    probed=(
        "vision_tower.post_layernorm",
        "multi_modal_projector.coarse_projector",
        "multi_modal_projector.coarse_projector.deepstack_merger_list.1",
    ),
    placeholder=IMAGE,
    tensors={"pixel_values": 1e-6, "pixel_attention_mask": 0},
    extra_kwargs=({}, FINE, {"max_patches": 3, "min_patches": 2}, WHOLE),
    operator_kwargs=({"max_patches": 11}, FINE, WHOLE),
    lowering_kwargs={"max_patches": 2},
    words=(*Family.words, *MARKS, "<|end_of_text|>", "<pad>"),
    contradictions=(
        ("processor_config", {"image_seq_len": 64}, "`image_seq_len` of .* is 64, .* has 4"),
        ("preprocessor_config", {"size": {"height": 28, "width": 28}}, "`size` .*28.*, but"),
        ("config", {"image_token_id": 7}, "but `image_token_id` of config.json is 7"),
    ),
)
