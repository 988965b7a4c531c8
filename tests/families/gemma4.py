"""Tiny Gemma 4s: images and videos of any grid, clips, shared caches, parts of tokens."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Gemma4Config, Gemma4UnifiedConfig
from transformers import Gemma4ForConditionalGeneration as HFModel
from transformers import Gemma4UnifiedForConditionalGeneration as HFUnifiedModel
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import (
    Gemma4UnifiedAudioFeatureExtractor,
)
from transformers.models.gemma4_unified.processing_gemma4_unified import Gemma4UnifiedProcessor
from transformers.video_utils import default_sample_indices_fn

from mmjax.models.gemma4.model import (
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedForConditionalGeneration,
)
from mmjax.models.gemma4.processor import as_batch
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_pixels, make_reference_inputs
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import Family, HFInputs, call_processor, hf_of, written
from tests.families.hf_videos import HFVideos
from tests.families.sizes import NO_KEYS, TOWER, Keys, resize_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes
from tests.kit import fill_by_name

IMAGE_TOKEN, VIDEO_TOKEN, AUDIO_TOKEN, START, END = 95, 94, 93, 92, 91
SLIDING, GLOBAL = "sliding_attention", "full_attention"
TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, GLOBAL, SLIDING, SLIDING, GLOBAL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 12,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 1024,
}
"""The small ones': the last two layers read the caches of the two before them."""
LARGE: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
"""What the large ones have in place of it."""
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
"""What one of the large ones has beside its MLPs."""
ALL: dict[str, Any] = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "use_bidirectional_attention": "vision",
}
"""What makes the small ones have everything but experts."""
VISION: dict[str, Any] = {
    **TOWER,
    "hidden_size": 32,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 64,
}
UNIFIED_VISION: dict[str, Any] = {
    "patch_size": 4,
    "mm_embed_dim": 24,
    "output_proj_dims": 24,
    "mm_posemb_size": 64,
}
AUDIO: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "conv_kernel_size": 3,
    "output_proj_dims": 20,
}
"""Of 8 mel bins."""
UNIFIED_AUDIO: dict[str, Any] = {"audio_embed_dim": 8}
GRIDS = {"image": [(9, 3), (3, 6), (6, 6), (3, 3)], "video": [(6, 3), (3, 3), (3, 6), (9, 3)]}
"""Columns and rows of patches, by turns."""
NUM_PATCHES = 36
"""Of an image with its padding."""
NUM_FRAMES = (2, 1, 3)
NUM_CLIP_FRAMES = (23, 7, 1, 12, 18)
"""Of clips, by turns; four are an embedding."""


def tiny_config(
    kind: str = "gemma4",
    *,
    text: Keys = NO_KEYS,
    vision: Keys = NO_KEYS,
    audio: Keys = NO_KEYS,
    hears: bool = True,
    is_tied: bool = True,
) -> Any:
    """Return HF's config of either kind, of width 32."""
    is_unified = kind == "gemma4_unified"
    own_text = {name: value for name, value in TEXT.items() if "per_layer_input" not in name}
    text_config = {**(own_text if is_unified else TEXT), **text}
    config = (Gemma4UnifiedConfig if is_unified else Gemma4Config)(
        text_config={**text_config, "tie_word_embeddings": is_tied},
        vision_config={**(UNIFIED_VISION if is_unified else VISION), **vision},
        audio_config={**(UNIFIED_AUDIO if is_unified else AUDIO), **audio} if hears else None,
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        audio_token_id=AUDIO_TOKEN,
        boi_token_id=START,
        eoi_token_id=END,
        tie_word_embeddings=is_tied,
    )
    name = "Gemma4Unified" if is_unified else "Gemma4"
    config.architectures = [f"{name}ForConditionalGeneration"]
    return config


def fill(model: Any) -> None:
    """Fill with random values; norms near 1, a tied head does not say its own token."""
    fill_by_name(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                # Scores have no scale of their own.
                parameter += 0.5 if "q_norm" in name or "k_norm" in name else 1.0
            elif re.search(r"(patch_ln.|pos_norm)\.weight$", name):
                parameter += 1.0 - parameter.mean()
            elif name.endswith("embed_tokens.weight"):
                parameter *= 0.3
        for name, buffer in model.named_buffers():
            seed = sum(name.encode())
            if name.endswith("layer_scalar"):
                buffer.fill_(0.5 + seed % 7 / 10)
            elif name.endswith(("std_bias", "std_scale")):
                values = np.random.default_rng(seed).normal(0.5, 0.3, len(buffer))
                buffer.copy_(torch.tensor(values))
            elif name.endswith(("_min", "_max")):
                sign = -1 if name.endswith("_min") else 1
                buffer.fill_(sign * (0.4 + seed % 5 / 10))


_AnyModel: Any = HFUnifiedModel


class UnifiedReference(_AnyModel):
    """HF's, whose `forward` alone masks otherwise than its `generate`, and than Gemma 4's.

    In layers without a window no picture sees what follows: here in both.
    """

    @wraps(HFUnifiedModel.forward)
    def forward(self, input_ids: Any = None, attention_mask: Any = None, **inputs: Any) -> Any:
        kinds = inputs.get("mm_token_type_ids")
        if kinds is not None and not isinstance(attention_mask, dict):
            embeds = self.get_input_embeddings()(input_ids)
            attention_mask = self.create_masks_for_generate(
                self.config, embeds, attention_mask, None, None, mm_token_type_ids=kinds
            )
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **inputs)


def draw_places(columns: int, rows: int) -> np.ndarray:
    """Return int64[NUM_PATCHES, 2]: column and row of each patch, -1 behind them."""
    grid = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(-1, 2)
    return np.pad(grid, ((0, NUM_PATCHES - len(grid)), (0, 0)), constant_values=-1)


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image, video or clip, each with marks around what takes embeddings."""
    if media.modality == "audio":
        return draw_clip(config, media.seed)
    vision = config.vision_config
    columns, rows = GRIDS[media.modality][media.seed % 4]
    num_values, side = 3 * vision.patch_size**2, vision.pooling_kernel_size
    if config.model_type == "gemma4_unified":
        columns, rows, num_values, side = columns // side, rows // side, num_values * side**2, 1
    is_video = media.modality == "video"
    num_frames = NUM_FRAMES[media.seed % 3] if is_video else 1
    pixels = draw_bytes(media.seed, (num_frames, NUM_PATCHES, num_values))
    places = np.stack([draw_places(columns, rows)] * num_frames)
    pixels[places[:, :, 0] < 0] = 0
    num_embeds = columns * rows // side**2
    if not is_video:
        tensors = {
            "pixel_values": pixels[0],
            "image_position_ids": places[0],
            "image_affine": AFFINE,
        }
        return DrawnItem(tensors, [IMAGE_TOKEN] * num_embeds, before=[START], after=[END])
    tensors = {
        "pixel_values_videos": pixels,
        "video_position_ids": places,
        "num_frames_per_video": np.array(num_frames),
        "video_affine": AFFINE,
    }
    ids: list[int] = []
    for number in range(num_frames):
        ids += [5 + number, START, *[VIDEO_TOKEN] * num_embeds, END]
    return DrawnItem(tensors, ids, np.equal(ids, VIDEO_TOKEN))


def draw_clip(config: Any, seed: int) -> DrawnItem:
    """Return a clip's frames, and one more that HF's processor pads it with."""
    number = NUM_CLIP_FRAMES[seed % len(NUM_CLIP_FRAMES)]
    num_embeds, num_values = -(-number // 4), 8
    if config.model_type == "gemma4_unified":
        number, num_values = num_embeds, config.audio_config.audio_embed_dim
    frames = np.random.default_rng(seed).normal(size=(number, num_values)).astype(np.float32)
    tensors = {
        "input_features": np.pad(frames, ((0, 1), (0, 0))),
        "num_clip_frames": np.array([number + 1, number]),
    }
    return DrawnItem(tensors, [AUDIO_TOKEN] * num_embeds, before=[START], after=[END])


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it."""
    seen = [item.tensors for item in sample.items if "input_features" not in item.tensors]
    heard = [item.tensors for item in sample.items if "input_features" in item.tensors]
    items = [make_pixels(tensors, colours_last=True) for tensors in seen]
    data: dict[str, Any] = {}
    if heard:
        frames, counts = ([one[name] for one in heard] for name in heard[0])
        data = as_batch(np.concatenate(frames), np.stack(counts))
    for name in dict.fromkeys(name for item in items for name in item):
        rows = [item[name] for item in items if name in item]
        # HF stacks pictures, and joins the frames of all videos.
        data[name] = np.concatenate(rows) if rows[0].ndim == 3 else np.stack(rows)
    inputs = make_reference_inputs(sample.token_ids, data)
    ids = inputs["input_ids"]
    kinds = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    return inputs | {"mm_token_type_ids": kinds}


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    sizes = (width, head_dim, num_heads)
    return resize_text(*sizes, queries_per_key=2, global_head_dim=2 * head_dim)


CLIPPED = {"use_clipped_linears": True, "standardize": True}
TINY = TinyFamily(
    name="gemma4",
    model_class=Gemma4ForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    served={"text": ALL},
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    fill=fill,
    word_ids=range(10, 90),
    published_head_dim=256,
    max_embeds={"image": 4, "video": 9, "audio": 6},
    num_clip_states=1,
    variants={
        "small": Variant({}, 8),
        "large": Variant({"text": LARGE}, 8),
        "experts": Variant({"text": LARGE | EXPERTS}, 8),
        "bounds and a standard": Variant({"vision": CLIPPED, "is_tied": False}, 8),
        "deaf": Variant({"hears": False}, 8, prompts=("two images",)),
        "loud": Variant({"audio": {"use_clipped_linears": False, "gradient_clipping": 0.5}}, 8),
        "parts without shared caches": Variant(
            {"text": {"num_kv_shared_layers": 0, "use_bidirectional_attention": "vision"}}, 8
        ),
    },
)
UNIFIED = {"kind": "gemma4_unified"}
TINY_UNIFIED = replace(
    TINY,
    name="gemma4_unified",
    model_class=Gemma4UnifiedForConditionalGeneration,
    reference_class=UnifiedReference,
    resize=lambda *sizes: {**UNIFIED, **resize(*sizes)},
    served=UNIFIED,
    variants={
        "plain": Variant(UNIFIED, 7),
        "one key for values": Variant({**UNIFIED, "text": {"attention_k_eq_v": True}}, 7),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------

TURN, TURN_END = "<|turn>", "<turn|>"
MARKS = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}
BUDGET = 140
"""Of the directory's images; of frames it is 70."""
MEL: dict[str, Any] = {"feature_size": 8, "mel_floor": 0.01, "per_bin_mean": [0.5] * 8}
SAMPLES: dict[str, Any] = {"feature_size": 640, "audio_samples_per_token": 640}
MAX_CLIP_ROWS = 25
"""Of the directory's clips: a second."""


def write_files(path: Path, kind: str = "gemma4") -> Path:
    """Write config, tokenizer and processor files."""
    marks: Sequence[str] = [*MARKS.values(), "<|video|>", TURN, TURN_END]
    tokenizer = make_tokenizer(marks, bos="<bos>", eos="<eos>", named=MARKS)
    vocab_size = -(-len(tokenizer) // 8) * 8
    sizes = {
        "vocab_size": vocab_size,
        "pad_token_id": tokenizer.pad_token_id,
        "use_bidirectional_attention": None,
    }
    places: dict[str, Any] = {"mm_posemb_size": BUDGET}
    audio, features = {"audio_embed_dim": 640}, SAMPLES
    if kind == "gemma4":
        sizes["vocab_size_per_layer_input"] = vocab_size
        places = {"position_embedding_size": 3 * BUDGET}
        audio, features = AUDIO, MEL
    text = {**sizes, "num_key_value_heads": 4}
    config = tiny_config(kind, text=text, vision=places, audio=audio)
    for name in ("boi", "eoi", "image", "audio"):
        token_id = tokenizer.convert_tokens_to_ids(MARKS[f"{name}_token"])
        setattr(config, f"{name}_token_id", token_id)
    config.video_token_id = tokenizer.convert_tokens_to_ids("<|video|>")
    sides = {"patch_size": VISION["patch_size"], "pooling_kernel_size": 3}
    return write_directory(
        path,
        config,
        tokenizer,
        processor_config={
            "processor_class": "Gemma4Processor",
            "audio_seq_length": MAX_CLIP_ROWS,
            "feature_extractor": features,
            "image_processor": {**sides, "max_soft_tokens": BUDGET},
            "video_processor": {**sides, "max_soft_tokens": 70, "num_frames": 4},
        },
    )


directory = made_once(write_files)


hf_processor = hf_of(
    Gemma4Processor,
    Gemma4ImageProcessorPil,
    directory,
    has_videos=True,
    feature_extractor=Gemma4AudioFeatureExtractor(**MEL),
)


def call_with_clips(
    load: Callable[[], Any], prompt: str, clips: list[Any], kwargs: Mapping[str, Any]
) -> HFInputs:
    """Call HF's processor, which `load` returns, with clips."""
    outputs = load()(text=[prompt], audio=clips or None, return_tensors="np")
    return HFInputs([int(token_id) for token_id in outputs["input_ids"][0]], outputs)


def cut_frames(videos: HFVideos, seen: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return what HF's image processor makes of the frames, as its class for videos would."""
    outputs = [
        videos.images(
            [Image.fromarray(frame) for frame in frames], max_soft_tokens=70, return_tensors="np"
        )
        for frames in seen
    ]
    counts = [int((one["image_position_ids"][0, :, 0] >= 0).sum()) // 9 for one in outputs]
    return {
        "pixel_values_videos": np.concatenate([one["pixel_values"] for one in outputs]),
        "video_position_ids": np.concatenate([one["image_position_ids"] for one in outputs]),
        "num_soft_tokens_per_video": counts,
    }


def load_hf_videos() -> Any:
    """Return HF's processor with its rule for frames, of which four are seen."""
    sample = partial(default_sample_indices_fn, num_frames=4)
    images = Gemma4ImageProcessorPil.from_pretrained(directory())
    return hf_processor(HFVideos(images, sample, cut_frames))


GEMMA4 = Family(
    **written(TINY, write_files),
    needless_files=frozenset({"chat_template.jinja", "tokenizer_config.json"}),
    probed=("embed_vision",),
    rendered=(
        "<|turn>user\n"
        "<|image|>what is it<turn|>\n"
        "<|turn>model\n"
        "a car<turn|>\n"
        "<|turn>user\n"
        "which color<turn|>\n"
        "<|turn>model\n"
    ),
    with_system=("<|turn>user", "<|turn>system\nbe short<turn|>\n<|turn>user"),
    call_hf=partial(call_processor, hf_processor),
    placeholder="<|image|>",
    video="<|video|>",
    load_hf_videos=load_hf_videos,
    video_kwargs=({}, {"num_frames": 2}, {"do_sample_frames": False}),
    extra_kwargs=({}, {"max_soft_tokens": 70}),
    lowering_kwargs={"max_soft_tokens": 70},
    operator_kwargs=({"max_soft_tokens": 70}, {"images_kwargs": {"max_soft_tokens": 280}}),
    tensors={"pixel_values": 1e-6, "image_position_ids": 0.0},
    colours_last=True,
)

CLIP = "<|audio|>"
GEMMA4_CLIPS = replace(
    GEMMA4,
    name="gemma4 clips",
    tiny=None,
    probed=("embed_audio",),
    rendered=GEMMA4.rendered.replace(GEMMA4.placeholder, CLIP),
    call_hf=partial(call_with_clips, hf_processor),
    embed_token_ids=lambda processor: [processor.info.get_hf_config().audio_token_id],
    placeholder=CLIP,
    tensors={"input_features": 1e-6, "input_features_mask": 0},
    takes_length=lambda num_samples: 160 < num_samples <= 16_000,
)
"""The same checkpoints, asked about clips."""


# ---- the unified one -----------------------------------------------------------------------------


class SquaresPil(Gemma4ImageProcessorPil):
    """HF's class of squares, which needs torchvision: here of what the other gives."""

    def preprocess(self, images: Any, **kwargs: Any) -> Any:
        outputs = super().preprocess(images, **kwargs)
        side, size = self.pooling_kernel_size, self.patch_size
        pixels, places = [], []
        for patches, given in zip(
            outputs["pixel_values"], outputs["image_position_ids"], strict=True
        ):
            columns, rows = (given.max(0) + 1) // side
            real = patches[: columns * rows * side**2]
            cut = real.reshape(rows, side, columns, side, size, size, 3)
            squares = cut.transpose(0, 2, 1, 4, 3, 5, 6).reshape(rows * columns, -1)
            grid = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(-1, 2)
            padding = ((0, len(patches) // side**2 - len(squares)), (0, 0))
            pixels.append(np.pad(squares, padding))
            places.append(np.pad(grid, padding, constant_values=-1))
        outputs["pixel_values"] = np.stack(pixels)
        outputs["image_position_ids"] = np.stack(places)
        return outputs


write_unified = partial(write_files, kind="gemma4_unified")
hf_unified = hf_of(
    Gemma4UnifiedProcessor,
    SquaresPil,
    made_once(write_unified),
    has_videos=True,
    feature_extractor=Gemma4UnifiedAudioFeatureExtractor(**SAMPLES),
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    **written(TINY_UNIFIED, write_unified),
    needless_files=GEMMA4.needless_files | {"processor_config.json"},
    probed=(),
    call_hf=partial(call_processor, hf_unified),
    load_hf_videos=None,  # as the other one's, of squares
)
GEMMA4_UNIFIED_CLIPS = replace(
    GEMMA4_CLIPS,
    name="gemma4_unified clips",
    architecture=GEMMA4_UNIFIED.architecture,
    path=GEMMA4_UNIFIED.path,
    write=GEMMA4_UNIFIED.write,
    call_hf=partial(call_with_clips, hf_unified),
    takes_length=lambda num_samples: num_samples <= 16_000,
)
