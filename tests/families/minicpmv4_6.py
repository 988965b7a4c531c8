"""Tiny MiniCPM-Vs 4.6: wholes and slices of any size, windows joined midway, Qwen3.5's decoder."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import (
    BatchFeature,
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    video_utils,
)
from transformers.image_transforms import divide_to_patches
from transformers.image_utils import SizeDict
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.utils.generic import TensorType

from mmjax.layers.recurrent.chunks import CHUNK
from mmjax.models.minicpmv4_6 import model as ours
from mmjax.models.minicpmv4_6.processor import join_patches
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_pixels, make_reference_inputs
from mmjax.rounding import round_up
from tests.families.directories import made_once, make_tokenizer, with_weights, write_directory
from tests.families.family import CHATML, Family, assemble, call_processor
from tests.families.hf_videos import HFVideos, take_functions
from tests.families.published import Published
from tests.families.qwen2_vl import turn
from tests.families.qwen3_vl import RECURRENT, fill_recurrent
from tests.families.sizes import NO_KEYS, TOWER, Keys, resize_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes
from tests.families.without_torchvision import PillowBackend

IMAGE_TOKEN, VIDEO_TOKEN, START, END = 95, 94, 93, 92
VISION: dict[str, Any] = {
    **TOWER,
    "model_type": "minicpmv4_6_vision",
    "num_hidden_layers": 3,
    "image_size": 40,
    "patch_size": 4,
}
SHAPES = {
    "image": (((4, 8),), ((4, 4), (8, 4), (8, 4)), ((12, 4),)),
    "video": (((4, 4), (4, 8), (4, 8)) * 2, ((4, 4),), ((8, 4),) * 3),
}
"""Rows and columns of patches of each whole, slice and frame, by turns."""


def tiny_config(
    *, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, is_tied: bool = False, **settings: Any
) -> MiniCPMV4_6Config:
    """Return HF's config."""
    # As in Qwen3.5's, and more: patches' rounding errors stand behind these norms, too.
    own = {"tie_word_embeddings": is_tied, "rms_norm_eps": 1e-1}
    config = MiniCPMV4_6Config(
        text_config={"model_type": "qwen3_5_text", **RECURRENT, **own, **text},
        vision_config={**VISION, **vision},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        **{"insert_layer_id": 1, "tie_word_embeddings": is_tied, **settings},
    )
    config.architectures = ["MiniCPMV4_6ForConditionalGeneration"]
    return config


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image or video, each unit between its marks."""
    is_video = media.modality == "video"
    shapes = np.array(SHAPES[media.modality][media.seed % 3])
    size, counts = config.vision_config.patch_size, shapes.prod(-1)
    token, suffix = (VIDEO_TOKEN, "_videos") if is_video else (IMAGE_TOKEN, "")
    ids: list[int] = []
    for count in counts:
        pads = [token] * int(count // (4 if config.downsample_mode == "4x" else 16))
        ids += [START, *pads, END]
    tensors = {
        f"pixel_values{suffix}": draw_bytes(media.seed, (int(counts.sum()), 3, size, size)),
        f"target_sizes{suffix}": shapes,
        f"{media.modality}_affine": AFFINE,
    }
    return DrawnItem(tensors, ids, np.equal(ids, token))


def torch_inputs(reference: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it: patches beside each other."""
    items = [make_pixels(item.tensors) for item in sample.items]
    names = dict.fromkeys(name for item in items for name in item)
    data = {name: np.concatenate([one[name] for one in items if name in one]) for name in names}
    joined = {k: join_patches(v) if "pixel" in k else v for k, v in data.items()}
    return make_reference_inputs(sample.token_ids, joined)


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    rope = turn(RECURRENT["rope_parameters"], head_dim // 2)
    return resize_text(width, head_dim, num_heads, rope_parameters=rope)


TINY = TinyFamily(
    name="minicpmv4_6",
    model_class=ours.MiniCPMV4_6ForConditionalGeneration,
    reference_class=MiniCPMV4_6ForConditionalGeneration,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, 90),
    published_head_dim=256,
    max_embeds={"image": 5, "video": 10},
    longest_run=CHUNK,
    fill=fill_recurrent,
    variants={
        "plain": Variant({}, 15),
        "joined behind the last, fewer positions, a tied head": Variant(
            {
                "insert_layer_id": 2,
                "is_tied": True,
                "vision": {"image_size": 12, "hidden_act": "gelu", "layer_norm_eps": 1e-2},
            },
            15,
        ),
        "not joined": Variant({"downsample_mode": "4x"}, 14, ("image", "video")),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
SETTINGS: dict[str, Any] = {
    "image_processor_type": "MiniCPMV4_6ImageProcessor",
    "max_slice_nums": 4,
    "scale_resolution": 64,
    "patch_size": 8,
    "slice_mode": True,
    "downsample_mode": "16x",
    "use_image_id": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""HF's defaults, but for the sizes."""
VIDEO_SETTINGS: dict[str, Any] = {
    **{name: value for name, value in SETTINGS.items() if "type" not in name},
    "video_processor_type": "MiniCPMV4_6VideoProcessor",
    "max_slice_nums": 2,
    "max_num_frames": 6,
    "stack_frames": 1,
}
WHOLE: dict[str, Any] = {"slice_mode": False}
FEWER: dict[str, Any] = {"images_kwargs": {"max_slice_nums": 2}}


def write_files(path: Path) -> Path:
    """Write a checkpoint's files."""
    named = {"image_token": IMAGE, "video_token": VIDEO}
    for name in ("image", "slice", "image_id"):
        named |= {f"{name}_start_token": f"<{name}>", f"{name}_end_token": f"</{name}>"}
    tokenizer = make_tokenizer(["<|im_start|>", *named.values()], eos="<|im_end|>", named=named)
    config = tiny_config(
        text={
            "vocab_size": round_up(len(tokenizer), 64),
            "num_key_value_heads": 4,
            # HF's own float32 is 1e-4 from float64 behind three recurrent layers.
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "max_position_embeddings": 8192,
        },
        vision={"patch_size": 8, "image_size": 80},
    )
    config.image_token_id, config.video_token_id = (
        tokenizer.convert_tokens_to_ids(token) for token in (IMAGE, VIDEO)
    )
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config=SETTINGS,
        video_preprocessor_config=VIDEO_SETTINGS,
        processor_config={"processor_class": "MiniCPMV4_6Processor"},
    )


path = made_once(write_files)


def make_hf_videos() -> HFVideos:
    """Return HF's video processor of the directory, with Pillow's resizing."""
    names = ("find_best_resize", "get_refine_size", "get_sliced_grid", "resize_and_split_patches")
    taken = take_functions(
        "minicpmv4_6",
        *(*names, "reshape_by_patch", "_preprocess", "sample_frames", "ensure_divide"),
        **{"SizeDict": SizeDict, "BatchFeature": BatchFeature, "TensorType": TensorType},
        divide_to_patches=divide_to_patches,
        group_videos_by_shape=video_utils.group_videos_by_shape,
        reorder_videos=video_utils.reorder_videos,
    )
    backend = {n: getattr(PillowBackend, n) for n in ("resize", "rescale_and_normalize")}
    own: Any = type("Videos", (), {**vars(taken), **backend})()
    settings = {name: VIDEO_SETTINGS[name] for name in VIDEO_SETTINGS if "type" not in name}

    def sample(metadata: Any) -> np.ndarray:
        if metadata.duration is None:  # HF's decoders say it
            metadata.duration = metadata.total_num_frames / metadata.fps
        return np.array(own.sample_frames(metadata, settings["max_num_frames"], 1))

    def cut(videos: HFVideos, seen: Sequence[np.ndarray]) -> Mapping[str, Any]:
        kwargs = {"do_resize": True, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255}
        outputs = own._preprocess(
            [torch.tensor(one).permute(0, 3, 1, 2) for one in seen],
            **{**kwargs, "do_normalize": True, "return_tensors": None, **settings},
            video_metadata=[SimpleNamespace()] * len(seen),
        )
        return {n: v.numpy() if hasattr(v, "numpy") else v for n, v in outputs.items()}

    images = MiniCPMV4_6ImageProcessorPil.from_pretrained(path())
    return HFVideos(images, sample, cut, slice_mode=True, downsample_mode="16x")


@cache
def hf_processor() -> Any:
    """HF's own processor, built apart from ours."""
    return assemble(
        MiniCPMV4_6Processor,
        MiniCPMV4_6ImageProcessorPil,
        path(),
        video_processor=make_hf_videos(),
        has_videos=True,
    )


MINICPMV4_6 = Family(
    name="minicpmv4_6",
    architecture="MiniCPMV4_6ForConditionalGeneration",
    tiny=TINY,
    is_written=True,
    path=path,
    write=with_weights(write_files, fill_recurrent),
    needless_files=frozenset(
        {"tokenizer_config.json", "processor_config.json", "video_preprocessor_config.json"}
    ),
    published=Published(unread=("mtp.fc.weight",)),
    rendered=CHATML.format(image=IMAGE),
    with_system=(
        "<|im_start|>user\n",
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\n",
    ),
    probed=("vision_tower.vit_merger", "multi_modal_projector"),
    call_hf=partial(call_processor, hf_processor),
    placeholder=IMAGE,
    video=VIDEO,
    load_hf_videos=hf_processor,
    video_kwargs=({}, {"max_slice_nums": 1}, {"max_num_frames": 2}),
    takes_embeds=False,
    extra_kwargs=({}, WHOLE, FEWER),
    operator_kwargs=(FEWER, WHOLE),
    lowering_kwargs=WHOLE,
    tensors={"pixel_values": 1e-6, "target_sizes": 0.0},
    takes_size=lambda width, height: max(width, height) <= 16 * min(width, height),
)
