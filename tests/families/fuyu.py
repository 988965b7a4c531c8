"""Tiny Fuyus: no tower; a newline behind each row of patches."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import FuyuConfig
from transformers import FuyuForCausalLM as HFModel
from transformers.models.fuyu.image_processing_pil_fuyu import FuyuImageProcessorPil
from transformers.models.fuyu.processing_fuyu import FuyuProcessor

from mmjax.models.fuyu.model import FuyuForCausalLM
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from tests.families.directories import edit_golden, golden_path, save_weights
from tests.families.family import Family, HFInputs, hf_of
from tests.families.published import MODULE, Published
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes, joined

IMAGE, NEWLINE, START = 126, 127, 1
GRIDS = [(3, 5), (1, 1), (4, 1), (2, 7)]
"""Rows and columns of patches, by turns."""


def tiny_config(**changes: Any) -> Any:
    """Return a config of width 32, two layers of four heads; patches of 5x5 pixels."""
    text = {
        "model_type": "persimmon",
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 25000.0,
            "partial_rotary_factor": 0.5,
        },
    }
    own: dict[str, Any] = {"patch_size": 5}
    own |= {name: changes.pop(name) for name in ("num_channels", "patch_size") if name in changes}
    is_tied = changes.pop("tie_word_embeddings", False)
    return FuyuConfig(
        text_config=text | changes | {"tie_word_embeddings": is_tied},
        image_token_id=IMAGE,
        tie_word_embeddings=is_tied,
        **own,
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return an image as Fuyu writes it."""
    rows, columns = grid = GRIDS[media.seed % len(GRIDS)]
    tokens = [*[*[IMAGE] * columns, NEWLINE] * rows, START]
    width = config.patch_size**2 * config.num_channels
    tensors = {
        "image_patches": draw_bytes(media.seed, (rows * columns, width)),
        "image_affine": AFFINE,
        "image_grid_hw": np.array(grid),
    }
    return DrawnItem(tensors, tokens, np.equal(tokens, IMAGE))


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it."""
    data = {}
    if sample.items:
        data = {"pixel_values": joined(sample, colours_last=True)["image_patches"][None]}
    return make_reference_inputs(sample.token_ids, data)


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    if num_heads * head_dim != width:
        raise ValueError(f"{num_heads} heads of {head_dim} are not {width}, as Persimmon's must be")
    return {"hidden_size": width, "num_attention_heads": num_heads}


TINY = TinyFamily(
    name="fuyu",
    model_class=FuyuForCausalLM,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(2, 120),
    published_head_dim=64,
    max_embeds={"image": 15},
    variants={
        "plain": Variant({}, 4),
        "no norms of queries and keys": Variant({"qk_layernorm": False}, 4),
        "tied": Variant({"tie_word_embeddings": True}, 4),
        "one head": Variant({"num_attention_heads": 1}, 4),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


class TorchPatches(FuyuImageProcessorPil):
    """HF's `FuyuProcessor` hands its PIL image processor torch pixels, and wants a torch batch."""

    def patchify_image(self, image: Any, patch_size: Any = None) -> Any:
        return torch.from_numpy(super().patchify_image(np.asarray(image), patch_size))[None]


path = partial(golden_path, "fuyu")
hf_processor = hf_of(FuyuProcessor, TorchPatches, path)


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    outputs = hf_processor()(text=prompt, images=images or None, return_tensors="np", **kwargs)
    tensors = {key: np.asarray(value) for key, value in outputs.items()}
    return HFInputs(tensors["input_ids"].reshape(-1).tolist(), tensors)


def takes_size(width: int, height: int) -> bool:
    """A side must have a pixel left when the picture is scaled to fit 90x60."""
    scale = min(1, 90 / width, 60 / height)
    return int(width * scale) > 0 and int(height * scale) > 0


def write(folder: Path) -> Path:
    heads = {"num_attention_heads": 4, "text_config.num_attention_heads": 4}
    return save_weights(edit_golden("fuyu", folder, config=heads))


FUYU = Family(
    name="fuyu",
    architecture="FuyuForCausalLM",
    tiny=TINY,
    path=path,
    write=write,
    needless_files=frozenset({"tokenizer_config.json"}),
    published=Published(
        # `save_pretrained` writes the hub's.
        layouts={
            "hub": {
                "model.language_model.": "language_model.model.",
                "model.vision_embed_tokens.": "vision_embed_tokens.",
                "lm_head.": "language_model.lm_head.",
            },
            "module": MODULE,
        },
    ),
    rendered=("what is it\na car\nwhich color\n"),
    with_system=("what", "be short\nwhat"),
    takes_embeds=False,
    call_hf=call_hf,
    max_images=1,
    tensors={"image_patches": 1e-6},
    colours_last=True,
    takes_size=takes_size,
    lowering_kwargs={"size": {"height": 30, "width": 40}},
    words=(*Family.words, *("<s>", "</s>", "|ENDOFTEXT|", "|NEWLINE|", "<box>1, 2, 3, 4</box>")),
)
