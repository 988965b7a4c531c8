"""Tiny MiniCPM-Vs 4.6 and 4.7: wholes and slices of any size, windows joined midway, and Qwen3.5.

MiniCPM-V 4.7's tokens have places of three axes. MiniCPM-OCR joins no windows, and has pictures
that are scaled by the letters that they show.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy import ndimage
from transformers import (
    BatchFeature,
    MiniCPMOcrConfig,
    MiniCPMOcrForConditionalGeneration,
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_7Config,
    MiniCPMV4_7ForConditionalGeneration,
    video_utils,
)
from transformers.image_transforms import divide_to_patches
from transformers.image_utils import SizeDict
from transformers.models.minicpm_ocr.processing_minicpm_ocr import MiniCPMOcrProcessor
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.minicpmv4_7.processing_minicpmv4_7 import MiniCPMV4_7Processor
from transformers.utils.generic import TensorType

from mmjax.layers.recurrent.chunks import CHUNK
from mmjax.models.minicpmv4_6 import model as ours
from mmjax.models.minicpmv4_6.glyphs import find_threshold
from mmjax.models.minicpmv4_6.host_inputs import MARKS
from mmjax.models.minicpmv4_6.slices import join_patches
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_pixels, make_reference_inputs
from mmjax.rounding import round_up
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import CHATML, Family, assemble, call_processor, written
from tests.families.hf_videos import HFVideos, take_functions
from tests.families.published import Published
from tests.families.qwen2_vl import turn
from tests.families.qwen3_vl import EXPERTS, RECURRENT, fill_recurrent
from tests.families.sizes import NO_KEYS, TOWER, Keys, resize_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes
from tests.families.without_torchvision import PillowBackend, take_image_processor

IMAGE_TOKEN, VIDEO_TOKEN, START, END, SLICE_START, SLICE_END, NEWLINE = range(95, 88, -1)
VISION: dict[str, Any] = {
    **TOWER,
    "num_hidden_layers": 3,
    "image_size": 40,
    "patch_size": 4,
}
SHAPES = {
    "image": (((4, 8),), ((4, 4), (8, 4), (8, 4)), ((12, 4),)),
    "video": (((4, 4), (4, 8), (4, 8)) * 2, ((4, 4),), ((8, 4),) * 3),
}
"""Rows and columns of patches of each whole, slice and frame, by turns."""
CUT: dict[str, Sequence[tuple[tuple[int, int], ...]]] = {
    "image": (((4, 8), (0, 0)), ((8, 4), (2, 1), (4, 8)), ((4, 12), (1, 2), (8, 4))),
    "video": (((4, 8), (1, 2), (4, 4)), ((4, 4), (0, 0)), ((8, 4), (2, 1), (4, 4))),
}
"""Rows and columns of the patches of a whole, of its slices, and of a slice's patches, by turns."""
CONFIGS: Mapping[str, Any] = {
    "minicpmv4_6": MiniCPMV4_6Config,
    "minicpmv4_7": MiniCPMV4_7Config,
    "minicpm_ocr": MiniCPMOcrConfig,
}


def tiny_config(
    kind: str = "minicpmv4_6",
    *,
    text: Keys = NO_KEYS,
    vision: Keys = NO_KEYS,
    is_tied: bool = False,
    **settings: Any,
) -> Any:
    """Return HF's config of a kind."""
    # As in Qwen3.5's, and more: patches' rounding errors stand behind these norms, too.
    own = {"tie_word_embeddings": is_tied, "rms_norm_eps": 1e-1}
    marks = (START, END, SLICE_START, SLICE_END, NEWLINE) if kind == "minicpmv4_7" else ()
    config = CONFIGS[kind](
        text_config={"model_type": "qwen3_5_text", **RECURRENT, **own, **text},
        vision_config={"model_type": f"{kind}_vision", **VISION, **vision},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        **dict(zip(MARKS, marks, strict=False)),
        **{"insert_layer_id": 1, "tie_word_embeddings": is_tied, **settings},
    )
    config.architectures = [type(config).__name__.replace("Config", "ForConditionalGeneration")]
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


def draw_cut(config: Any, media: Media) -> DrawnItem:
    """Return the same of MiniCPM-V 4.7: wholes, each with its slices; of a video two frames."""
    is_video = media.modality == "video"
    whole, grid, *size = CUT[media.modality][media.seed % 3]
    token, suffix = (VIDEO_TOKEN, "_videos") if is_video else (IMAGE_TOKEN, "")
    sizes = [whole, *size * int(np.prod(grid))]
    ids: list[int] = []
    for number, count in enumerate(np.prod(sizes, -1).tolist()):
        start, end = (SLICE_START, SLICE_END) if number else (START, END)
        ids += [NEWLINE] * (number > 1 and (number - 1) % grid[1] == 0)
        pads = [token] * (count // (4 if config.downsample_mode == "4x" else 16))
        ids += [start, *pads, end]
    ids, sizes = ids * (1 + is_video), np.array(sizes * (1 + is_video))
    side = config.vision_config.patch_size
    tensors = {
        f"pixel_values{suffix}": draw_bytes(media.seed, (int(sizes.prod(-1).sum()), 3, side, side)),
        f"target_sizes{suffix}": sizes,
        f"{media.modality}_grids": np.array(grid),
        f"{media.modality}_affine": AFFINE,
    }
    # A newline right behind an item is on its canvas.
    return DrawnItem(tensors, ids, np.equal(ids, token), after=[NEWLINE] * (media.seed % 2))


def torch_inputs(reference: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it: patches beside each other."""
    items = [make_pixels(item.tensors) for item in sample.items]
    items = [{k: v for k, v in item.items() if "grids" not in k} for item in items]
    names = dict.fromkeys(name for item in items for name in item)
    data = {name: np.concatenate([one[name] for one in items if name in one]) for name in names}
    joined = {k: join_patches(v) if "pixel" in k else v for k, v in data.items()}
    inputs = make_reference_inputs(sample.token_ids, joined)
    if reference.config.model_type == "minicpmv4_7":
        ids = inputs["input_ids"]
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    return inputs


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


def make_kind(
    kind: str,
    model_class: Any,
    reference_class: Any,
    variants: Mapping[str, Variant],
    **fields: Any,
) -> TinyFamily:
    """Return the row of another kind."""
    return replace(
        TINY,
        name=kind,
        model_class=model_class,
        reference_class=reference_class,
        resize=lambda *sizes: {"kind": kind, **resize(*sizes)},
        served={"kind": kind},
        variants={
            name: variant._replace(settings={"kind": kind, **variant.settings})
            for name, variant in variants.items()
        },
        **fields,
    )


TINY_4_7 = make_kind(
    "minicpmv4_7",
    ours.MiniCPMV4_7ForConditionalGeneration,
    MiniCPMV4_7ForConditionalGeneration,
    {
        **TINY.variants,
        "experts": Variant(
            {
                "text": {
                    "model_type": "qwen3_5_moe_text",
                    **EXPERTS,
                    "shared_expert_intermediate_size": 24,
                }
            },
            15,
        ),
    },
    draw_item=draw_cut,
    max_embeds={"image": 7, "video": 8},
)
TINY_OCR = make_kind(
    "minicpm_ocr",
    ours.MiniCPMOcrForConditionalGeneration,
    MiniCPMOcrForConditionalGeneration,
    {
        "plain": Variant({"is_tied": True}, 14, ("text", "image", "video")),
        "joined": Variant({"downsample_mode": "16x"}, 15),
    },
    max_embeds={"image": 20, "video": 40},
    max_model_len=256,
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
OWN_SETTINGS: Mapping[str, dict[str, Any]] = {
    "minicpm_ocr": {
        "downsample_mode": "4x",
        # Letters are not looked for in a picture that is smaller than tiny ones become.
        "scale_resolution": 96,
        "small_image_upsize": "adaptive",
        "image_processor_type": "MiniCPMOcrImageProcessor",
    }
}
"""Those of a kind that differ."""
WHOLE: dict[str, Any] = {"slice_mode": False}
NATIVE: dict[str, Any] = {"images_kwargs": {"small_image_upsize": "never"}}
FEWER: dict[str, Any] = {"images_kwargs": {"max_slice_nums": 2}}


class ScipyCV:
    """What HF's image processor asks of OpenCV, which tests have not."""

    THRESH_BINARY = THRESH_OTSU = 0

    @staticmethod
    def threshold(gray: np.ndarray, *_: Any) -> tuple[int, np.ndarray]:
        """Part into dark and light by Otsu's threshold."""
        level = find_threshold(gray)
        return level, np.where(gray > level, 255, 0)

    @staticmethod
    def connectedComponentsWithStats(mask: np.ndarray, connectivity: int) -> tuple[Any, ...]:
        """Return left, top, width, height and pixels of each component, the rest of all first."""
        assert connectivity == 8
        found: Any = ndimage.label(mask, np.ones((3, 3)))
        labels, count = found
        stats: list[Any] = [(0, 0, 0, 0, 0)]
        for label in range(1, count + 1):
            rows, columns = np.nonzero(labels == label)
            corner = (columns.min(), rows.min())
            stats.append((*corner, np.ptp(columns) + 1, np.ptp(rows) + 1, len(rows)))
        return count + 1, labels, stats, None


def take_ocr_processor() -> Any:
    """Return HF's image processor of MiniCPM-OCR, with Pillow and scipy."""
    taken = take_image_processor("minicpm_ocr", "MiniCPMOcrImageProcessor")
    known = taken._preprocess.__globals__
    known |= {"cv2": ScipyCV, "requires_backends": lambda *args: None}
    return taken


PROCESSORS: Mapping[str, tuple[Any, Any]] = {
    "minicpmv4_6": (MiniCPMV4_6Processor, MiniCPMV4_6ImageProcessorPil),
    "minicpmv4_7": (MiniCPMV4_7Processor, MiniCPMV4_6ImageProcessorPil),
    "minicpm_ocr": (MiniCPMOcrProcessor, take_ocr_processor()),
}
"""HF's, and of images."""


def write_files(path: Path, kind: str = "minicpmv4_6") -> Path:
    """Write a checkpoint's files."""
    named = {"image_token": IMAGE, "video_token": VIDEO}
    for name in ("image", "slice", "image_id"):
        named |= {f"{name}_start_token": f"<{name}>", f"{name}_end_token": f"</{name}>"}
    tokenizer = make_tokenizer(["<|im_start|>", *named.values()], eos="<|im_end|>", named=named)
    config = tiny_config(
        kind,
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
    if kind == "minicpmv4_7":
        marks = [f"<{end}{name}>" for name in ("image", "slice") for end in ("", "/")]
        for key, mark in zip(MARKS, [*marks, "\n"], strict=True):
            (token_id,) = tokenizer.encode(mark, add_special_tokens=False)
            setattr(config, key, token_id)
    own = OWN_SETTINGS.get(kind, {})
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config=SETTINGS | own,
        video_preprocessor_config={**VIDEO_SETTINGS, **own, "image_processor_type": None},
        processor_config={"processor_class": PROCESSORS[kind][0].__name__},
    )


WRITERS = {kind: partial(write_files, kind=kind) for kind in PROCESSORS}


def make_hf_videos(kind: str) -> HFVideos:
    """Return HF's video processor of a kind's directory, with Pillow's resizing."""
    names = ("find_best_resize", "get_refine_size", "get_sliced_grid", "resize_and_split_patches")
    taken = take_functions(
        "minicpm_ocr" if kind == "minicpm_ocr" else "minicpmv4_6",
        *(*names, "reshape_by_patch", "_preprocess", "sample_frames", "ensure_divide"),
        **{"SizeDict": SizeDict, "BatchFeature": BatchFeature, "TensorType": TensorType},
        divide_to_patches=divide_to_patches,
        group_videos_by_shape=video_utils.group_videos_by_shape,
        reorder_videos=video_utils.reorder_videos,
    )
    backend = {n: getattr(PillowBackend, n) for n in ("resize", "rescale_and_normalize")}
    own: Any = type("Videos", (), {**vars(taken), **backend})()
    given = VIDEO_SETTINGS | OWN_SETTINGS.get(kind, {})
    settings = {name: value for name, value in given.items() if name in VIDEO_SETTINGS}
    del settings["video_processor_type"]

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

    images = PROCESSORS[kind][1].from_pretrained(made_once(WRITERS[kind])())
    mode = settings["downsample_mode"]
    return HFVideos(images, sample, cut, slice_mode=True, downsample_mode=mode)


@cache
def hf_processor(kind: str) -> Any:
    """HF's own processor of a kind, built apart from ours."""
    videos = make_hf_videos(kind)
    path = made_once(WRITERS[kind])()
    return assemble(*PROCESSORS[kind], path, video_processor=videos, has_videos=True)


def name_parts(tiny: TinyFamily) -> dict[str, Any]:
    """Return the fields of a kind's row that depend on it."""
    load = partial(hf_processor, tiny.name)
    return {
        **written(tiny, WRITERS[tiny.name]),
        "call_hf": partial(call_processor, load),
        "load_hf_videos": load,
    }


MINICPMV4_6 = Family(
    **name_parts(TINY),
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
    placeholder=IMAGE,
    video=VIDEO,
    video_kwargs=({}, {"max_slice_nums": 1}, {"max_num_frames": 2}),
    takes_embeds=False,
    extra_kwargs=({}, WHOLE, FEWER),
    operator_kwargs=(FEWER, WHOLE),
    lowering_kwargs=WHOLE,
    tensors={"pixel_values": 1e-6, "target_sizes": 0.0},
    takes_size=lambda width, height: max(width, height) <= 16 * min(width, height),
    contradictions=(
        ("preprocessor_config", {"patch_size": 16}, "`patch_size` .* is 16, but .* takes 8"),
        (
            "preprocessor_config",
            {"downsample_mode": "4x"},
            "`downsample_mode` .* is '4x', but .*'16x'",
        ),
        ("video_preprocessor_config", {"do_resize": False}, "`do_resize` .* is False, but .* True"),
        ("video_preprocessor_config", {"stack_frames": 3}, "`stack_frames` .* is 3; .* set it to"),
    ),
)
MINICPMV4_7 = replace(MINICPMV4_6, **name_parts(TINY_4_7), contradictions=())
MINICPM_OCR = replace(
    MINICPMV4_6,
    **name_parts(TINY_OCR),
    contradictions=(),
    probed=("vision_tower.blocks.1", "multi_modal_projector"),
    extra_kwargs=({}, WHOLE, FEWER, NATIVE),
)
