"""Tiny HunyuanOCRs: pictures of any grid whose rows have ends, positions of four axes."""

from functools import partial
from pathlib import Path
from typing import Any

from transformers import HunYuanVLConfig, HunYuanVLForConditionalGeneration
from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import (
    HunYuanVLImageProcessorPil,
)
from transformers.models.hunyuan_vl.processing_hunyuan_vl import HunYuanVLProcessor

from mmjax.models.hunyuan_vl import model as ours
from mmjax.models.hunyuan_vl.processor import IMAGE
from mmjax.parity.departures import pair_axes
from tests.families.directories import make_tokenizer, write_directory
from tests.families.family import Family, written
from tests.families.published import MODULE, Published
from tests.families.qwen2_vl import GRID_FIELDS, GRIDS, draw_tensors, torch_inputs
from tests.families.sizes import DECODER, NO_KEYS, TOWER, Keys, fit_text, resize_text
from tests.families.tiny import DrawnItem, Media, TinyFamily, Variant
from tests.oracle import fill_with_unit_norms

IMAGE_TOKEN = 95
START, TOKEN, END, STOP = (f"<｜hy_place▁holder▁no▁{number}｜>" for number in (100, 102, 101, 3))


def make_rope(head_dim: int) -> dict[str, Any]:
    """Return rotary parameters as published, of heads of a width."""
    scales = {"beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    sections = {"xdrope_section": [head_dim // 8] * 4}
    return {"type": "xdrope", "rope_theta": 1e4, "alpha": 1000.0, **scales, **sections}


def tiny_config(*, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, is_tied: bool = True) -> Any:
    """Return HF's config, with 25 learned positions."""
    tied: dict[str, Any] = {"tie_word_embeddings": is_tied}
    decoder = {**DECODER, "head_dim": 16, "rope_parameters": make_rope(16), **tied, **text}
    return HunYuanVLConfig(
        text_config=decoder,
        vision_config={**TOWER, "max_image_size": 20, "patch_size": 4, **vision},
        image_token_id=IMAGE_TOKEN,
        im_start_id=93,
        im_end_id=92,
        im_newline_id=91,
        **tied,
        architectures=["HunYuanVLForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    grid, _ = GRIDS["image"][media.seed % 3]
    size, channels = config.vision_config.patch_size, config.vision_config.num_channels
    tensors = draw_tensors("image", media.seed, grid, (channels * size**2,))
    rows, columns = (side // config.vision_config.spatial_merge_size for side in grid[1:])
    ids = [IMAGE_TOKEN] * (rows * (columns + 1) + 2)
    return DrawnItem(tensors, ids, before=[93], after=[92])


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    return resize_text(width, head_dim, num_heads, rope_parameters=make_rope(head_dim))


fill = partial(fill_with_unit_norms, sharpness=1.4)
TINY = TinyFamily(
    name="hunyuan_vl",
    model_class=ours.HunYuanVLForConditionalGeneration,
    reference_class=HunYuanVLForConditionalGeneration,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, 90),
    published_head_dim=128,
    max_embeds={"image": 20},
    fill=fill,
    mend=pair_axes,
    variants={
        "plain": Variant({}, 6),
        "all else": Variant(
            {
                "is_tied": False,
                "text": {
                    "attention_bias": True,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 1e6,
                        "mrope_section": [1, 4, 1, 2],
                    },
                },
                "vision": {
                    "hidden_act": "gelu_pytorch_tanh",
                    "max_image_size": 12,
                    "rms_norm_eps": 1e-3,
                },
            },
            6,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


def write_files(path: Path) -> Path:
    named = {"image_token": TOKEN, "image_start_token": START, "image_end_token": END}
    tokenizer = make_tokenizer(
        [
            *named.values(),
            "<｜hy_begin▁of▁sentence｜>",
            "<｜hy_User｜>",
            "<｜hy_Assistant｜>",
            STOP,
        ],
        named=named,
    )
    config = tiny_config(text=fit_text(tokenizer), vision={"max_image_size": 80, "patch_size": 16})
    config.image_token_id = tokenizer.convert_tokens_to_ids(TOKEN)
    config.im_start_id = tokenizer.convert_tokens_to_ids(START)
    config.im_end_id = tokenizer.convert_tokens_to_ids(END)
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "HunYuanVLImageProcessor",
            "min_pixels": 3136,
            "max_pixels": 160_000,
            "resample": 1,
        },
    )


HUNYUAN_VL = Family(
    **written(TINY, write_files, HunYuanVLProcessor, HunYuanVLImageProcessorPil),
    needless_files=frozenset({"tokenizer_config.json"}),
    published=Published(
        make_config=HunYuanVLConfig,
        layouts={
            "hub": {
                "model.vision_tower.patch_merger.proj_conv.": "vit.perceive.proj.0.",
                "model.vision_tower.patch_merger.proj_out.": "vit.perceive.proj.2.",
                "model.vision_tower.patch_merger.": "vit.perceive.",
                "model.vision_tower.": "vit.",
                "model.language_model.": "model.",
            },
            "module": MODULE,
        },
    ),
    rendered=(
        f"<｜hy_begin▁of▁sentence｜>{IMAGE}what is it<｜hy_User｜>a car<｜hy_Assistant｜>"
        "which color<｜hy_User｜>"
    ),
    with_system=(
        "<｜hy_begin▁of▁sentence｜>",
        "<｜hy_begin▁of▁sentence｜>be short<｜hy_place▁holder▁no▁3｜>",
    ),
    probed=("vision_tower.blocks.1",),
    placeholder=IMAGE,
    **GRID_FIELDS,
)
