"""Tiny Idefics3s and SmolVLMs: tiles of a picture and the whole of it, frames of a video."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm import processing_smolvlm

from mmjax.models.idefics3 import model as ours
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import Family, assemble, call_processor, hf_of, written
from tests.families.hf_videos import HFVideos, take_functions
from tests.families.sizes import DECODER, NO_KEYS, TOWER, Keys, fit_text, resize_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes, joined
from tests.oracle import fill_with_unit_norms

IMAGE_TOKEN, FAKE = 95, 94
TEXT: dict[str, Any] = {
    **DECODER,
    "model_type": "llama",
    "vocab_size": 96,
}
VISION: dict[str, Any] = {
    **TOWER,
    "image_size": 16,
    "patch_size": 4,
}
GRIDS = ((0, 0), (1, 2), (2, 2))
"""Rows and columns, by turns."""


def tiny_config(
    *,
    config_class: Any = Idefics3Config,
    text: Keys = NO_KEYS,
    vision: Keys = NO_KEYS,
    scale_factor: int = 2,
    is_tied: bool = False,
) -> Any:
    """Return HF's config, with four embeddings a tile."""
    config = config_class(
        text_config={**TEXT, **text},
        vision_config={**VISION, **vision},
        image_token_id=IMAGE_TOKEN,
        scale_factor=scale_factor,
        tie_word_embeddings=is_tied,
        pad_token_id=0,
    )
    kind = "Idefics3" if config_class is Idefics3Config else "SmolVLM"
    config.architectures = [f"{kind}ForConditionalGeneration"]
    return config


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image, or a video of as many frames."""
    rows, columns = GRIDS[media.seed % len(GRIDS)]
    units, side = rows * columns + 1, config.vision_config.image_size
    pixels = draw_bytes(media.seed, (units, 3, side, side))
    num_tokens = (side // config.vision_config.patch_size // config.scale_factor) ** 2
    ids = [FAKE, *[IMAGE_TOKEN] * num_tokens] * units
    is_embed = np.equal(ids, IMAGE_TOKEN)
    if media.modality == "image":
        return DrawnItem({"pixel_values": pixels, "image_affine": AFFINE}, ids, is_embed)
    return DrawnItem({"pixel_values_videos": pixels, "video_affine": AFFINE}, ids, is_embed)


def torch_inputs(reference: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it: `[prompts, units, C, Y, X]`."""
    units = [
        value
        for item in sample.items
        for name, value in joined(Sample(token_ids=sample.token_ids, items=[item])).items()
        if name.startswith("pixel_values")
    ]
    data = {"pixel_values": np.concatenate(units)[None]} if units else {}
    return make_reference_inputs(sample.token_ids, data)


fill = partial(fill_with_unit_norms, sharpness=1.4)
TINY = TinyFamily(
    name="idefics3",
    model_class=ours.Idefics3ForConditionalGeneration,
    reference_class=Idefics3ForConditionalGeneration,
    make_config=tiny_config,
    resize=partial(resize_text, queries_per_key=2),
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, 90),
    published_head_dim=64,
    max_embeds={"image": 20},
    fill=fill,
    variants={
        "plain": Variant({}, 9),
        "squares of three, a tied head": Variant(
            {"scale_factor": 3, "is_tied": True, "vision": {"image_size": 24}}, 9
        ),
    },
)
SMOLVLM_TINY = replace(
    TINY,
    name="smolvlm",
    model_class=ours.SmolVLMForConditionalGeneration,
    reference_class=SmolVLMForConditionalGeneration,
    make_config=partial(tiny_config, config_class=SmolVLMConfig),
    max_embeds={"image": 20, "video": 20},
    variants={"plain": Variant({}, 9)},
)


# ---- its prompts and directories ----------------------------------------------------------------


IMAGE = "<image>"
SIDE = 32
WHOLE: dict[str, Any] = {"do_image_splitting": False}
SMALLER: dict[str, Any] = {"size": {"longest_edge": 2 * SIDE}}


def write_files(path: Path, *, config_class: Any = Idefics3Config) -> Path:
    tokens = ["<fake_token_around_image>", IMAGE, "<end_of_utterance>", "<global-img>"]
    tokens += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = make_tokenizer(["<|im_start|>", *tokens], eos="<|im_end|>")
    config = tiny_config(
        config_class=config_class,
        text=fit_text(tokenizer, head_dim=16),
        vision={"image_size": SIDE, "patch_size": 8},
    )
    config.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)
    kind = "Idefics3" if config_class is Idefics3Config else "SmolVLM"
    videos: dict[str, Any] = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": SIDE}}
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": f"{kind}ImageProcessor",
            "do_image_splitting": True,
            "size": {"longest_edge": 3 * SIDE},
            "max_image_size": {"longest_edge": SIDE},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            **({} if kind == "Idefics3" else {"video_sampling": videos}),
        },
        processor_config={"image_seq_len": 4, "processor_class": f"{kind}Processor"},
    )


write_smolvlm = partial(write_files, config_class=SmolVLMConfig)
path, smolvlm_path = made_once(write_files), made_once(write_smolvlm)


hf_processor = hf_of(Idefics3Processor, Idefics3ImageProcessorPil, path, image_seq_len=4)
"""Of images, which SmolVLM's equals but for videos."""


def cut_frames(videos: HFVideos, seen: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return frames scaled as HF's processor of videos: by the longer side, then to a square."""
    functions = take_functions("smolvlm", "get_resize_output_image_size")
    # `size` of preprocessor_config.json comes before `video_size` there.
    sizes = [
        functions.get_resize_output_image_size(torch.from_numpy(one).movedim(-1, 1), 3 * SIDE)
        for one in seen
    ]
    frames = [
        videos.resize(one, size, (SIDE, SIDE), resample=Image.Resampling.LANCZOS)
        for one, size in zip(seen, sizes, strict=True)
    ]
    return {"pixel_values": torch.stack(frames).numpy()}


def load_hf_videos() -> Any:
    """Return HF's processor, for which a table stands in for `num2words`; it samples nothing."""
    words = {3: "three", 5: "five", 7: "seven"}
    setattr(processing_smolvlm, "num2words", words.__getitem__)  # noqa: B010 (not HF's to export)
    images = Idefics3ImageProcessorPil.from_pretrained(smolvlm_path())
    return assemble(
        processing_smolvlm.SmolVLMProcessor,
        Idefics3ImageProcessorPil,
        smolvlm_path(),
        video_processor=HFVideos(images, None, cut_frames),
        has_videos=True,
        image_seq_len=4,
    )


_SHARED: dict[str, Any] = {
    "needless_files": frozenset({"tokenizer_config.json", "processor_config.json"}),
    "takes_embeds": False,
    "rendered": (
        f"<|im_start|>User:{IMAGE}what is it<end_of_utterance>\n"
        "Assistant: a car<end_of_utterance>\nUser: which color<end_of_utterance>\nAssistant:"
    ),
    "with_system": (
        f"<|im_start|>User:{IMAGE}",
        f"<|im_start|>System: be short<end_of_utterance>\nUser:{IMAGE}",
    ),
    "probed": ("vision_tower.post_layernorm", "multi_modal_projector"),
    "call_hf": partial(call_processor, hf_processor),
    "placeholder": IMAGE,
    "extra_kwargs": ({}, WHOLE, SMALLER),
    "operator_kwargs": (SMALLER, WHOLE),
    "lowering_kwargs": WHOLE,
}
IDEFICS3 = Family(
    **written(TINY, write_files),
    contradictions=(("preprocessor_config", {"do_resize": False}, "`do_resize` of the image"),),
    **_SHARED,
)
SMOLVLM = Family(
    **written(SMOLVLM_TINY, write_smolvlm),
    video="<video>",
    video_pixels="pixel_values",
    load_hf_videos=load_hf_videos,
    **_SHARED,
)
