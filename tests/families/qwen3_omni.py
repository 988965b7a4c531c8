"""Tiny thinkers of Qwen3-Omni: a tower that feeds the decoder, windows of sound, experts."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import Qwen3OmniMoeThinkerConfig, WhisperFeatureExtractor
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as HFModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

from mmjax.models.qwen2_5_omni.host_inputs import Qwen3OmniHostInputs
from mmjax.models.qwen2_5_omni.model import Qwen3OmniMoeThinkerForConditionalGeneration
from mmjax.models.qwen2_5_omni.processor import QWEN3_PLACEHOLDERS
from mmjax.parity.departures import round_times
from tests.families import qwen2_5_omni, qwen3_vl
from tests.families.directories import made_once, make_tokenizer, with_weights, write_directory
from tests.families.family import CHATML, HFInputs, call_processor, hf_of
from tests.families.hf_videos import make_grid_videos
from tests.families.published import MODULE, Published
from tests.families.qwen2_5_omni import (
    AUDIO_END,
    AUDIO_START,
    AUDIO_TOKEN,
    IMAGE_TOKEN,
    QWEN2_5_OMNI,
    QWEN2_5_OMNI_CLIPS,
    VIDEO_TOKEN,
    VISION_START,
)
from tests.families.qwen2_vl import GRIDS, draw_grid
from tests.families.sizes import NO_KEYS, Keys
from tests.families.tiny import DrawnItem, Media, Variant

AUDIO: dict[str, Any] = {
    **{"num_mel_bins": 6, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2},
    **{"encoder_ffn_dim": 40, "output_dim": 32, "downsample_hidden_size": 4},
    "n_window_infer": 200,
}
"""Windows of two chunks, 26 embeddings."""
HUB = {
    "model.audio_tower.": "thinker.audio_tower.",
    "model.visual.": "thinker.visual.",
    "model.language_model.": "thinker.model.",
    "lm_head.": "thinker.lm_head.",
}
NUM_FRAMES = (123, 100, 204, 131)
"""Of clips, by turns. HF pads one of less than a chunk as others beside it have it."""


def tiny_config(
    *,
    text: Keys = NO_KEYS,
    vision: Keys = NO_KEYS,
    audio: Keys = NO_KEYS,
    are_heard: bool = False,
    **ids: Any,
) -> Any:
    """Return HF's config of a thinker of width 32; `are_heard`: whether drawn videos are."""
    ids = {
        **{"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN},
        **{"audio_token_id": AUDIO_TOKEN, "audio_start_token_id": AUDIO_START},
        **{"vision_start_token_id": VISION_START, "position_id_per_seconds": 4},
        **ids,
    }
    config = Qwen3OmniMoeThinkerConfig(
        text_config={**qwen3_vl.TEXT, **qwen3_vl.EXPERTS, **text},
        vision_config={**qwen3_vl.VISION, **vision},
        audio_config={**AUDIO, **audio},
        **ids,
    )
    config.architectures = ["Qwen3OmniMoeThinkerForConditionalGeneration"]
    config.are_videos_heard = are_heard
    return config


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image, video or clip; a step of a video is a whole number of positions."""
    if media.modality != "audio":
        grid, seconds = GRIDS[media.modality][media.seed % 3]
        seconds = round(4 * seconds) / 4
        drawn = draw_grid(config, media.modality, media.seed, grid, seconds)
        is_heard = media.modality == "video" and config.are_videos_heard
        return add_sound(config, media.seed, drawn) if is_heard else drawn
    frames = draw_frames(config, media.seed)
    tensors = {"input_features": frames, "num_clip_frames": np.array(len(frames))}
    ids = [AUDIO_TOKEN] * Qwen3OmniHostInputs(config).count_rows(len(frames))
    return DrawnItem(tensors, ids, before=[AUDIO_START], after=[AUDIO_END])


def draw_frames(config: Any, seed: int) -> np.ndarray:
    """Return a spectrogram."""
    shape = (NUM_FRAMES[seed % len(NUM_FRAMES)], config.audio_config.num_mel_bins)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def add_sound(config: Any, seed: int, video: DrawnItem) -> DrawnItem:
    """Return a video that is heard."""
    frames = draw_frames(config, seed + 1)
    sound = {"sound_features": frames, "num_sound_frames": np.array(len(frames))}
    tensors = {**video.tensors, **sound}
    ids: list[int] = []
    for piece in Qwen3OmniHostInputs(config).find_pieces(tensors):
        ids += [AUDIO_TOKEN if piece.is_sound else VIDEO_TOKEN] * (piece.end - piece.start)
    ids = [AUDIO_START, *ids, AUDIO_END]
    is_embed = np.isin(ids, (VIDEO_TOKEN, AUDIO_TOKEN))
    return DrawnItem(tensors, ids, is_embed, before=video.before, after=video.after)


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    found = qwen3_vl.resize("qwen3_vl_moe", width, head_dim, num_heads)
    return {**{k: v for k, v in found.items() if k != "kind"}, "audio": {"output_dim": width}}


TINY = replace(
    qwen2_5_omni.TINY,
    name="qwen3_omni",
    model_class=Qwen3OmniMoeThinkerForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    max_embeds={"image": 15, "video": 45, "audio": 27},
    max_model_len=128,
    mend=round_times,
    variants={
        "plain": Variant({}, 10, prompts=("clips",)),
        "a dense layer, weights as they are, other activations": Variant(
            {
                "text": {"mlp_only_layers": [0], "norm_topk_prob": False, "attention_bias": True},
                "vision": {"deepstack_visual_indexes": [2]},
                "audio": {"activation_function": "relu", "n_window": 49, "n_window_infer": 98},
                "position_id_per_seconds": 8,
            },
            9,
        ),
        "videos with their sound": Variant({"are_heard": True}, 10, prompts=("video", "both")),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------

MARKS = {
    **{"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    **{"audio_token": "<|audio_pad|>", "vision_bos_token": "<|vision_start|>"},
    **{"vision_eos_token": "<|vision_end|>", "audio_bos_token": "<|audio_start|>"},
    "audio_eos_token": "<|audio_end|>",
}
IMAGE, VIDEO, CLIP = (QWEN3_PLACEHOLDERS[one] for one in ("image", "video", "audio"))
EXTRACTOR = qwen2_5_omni.EXTRACTOR
PATCHES: dict[str, Any] = {
    **{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2},
    **{"temporal_patch_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 65_536}},
    **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
}
VIDEO_SIZE = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
"""That HF's processor gives all videos, whatever the checkpoint's files say."""
POSITIONS_PER_SECOND = 13


def write_files(path: Path) -> Path:
    """Write the files of a checkpoint without weights."""
    marks = [*MARKS.values(), "<|im_start|>"]
    tokenizer = make_tokenizer(marks, eos="<|im_end|>", pad="<|endoftext|>", named=MARKS)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in MARKS.items()}
    config = tiny_config(
        text={"vocab_size": -(-len(tokenizer) // 8) * 8, "max_position_embeddings": 8192},
        vision={"patch_size": 16},
        audio={"num_mel_bins": 8},
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        audio_token_id=ids["audio_token"],
        audio_start_token_id=ids["audio_bos_token"],
        vision_start_token_id=ids["vision_bos_token"],
        position_id_per_seconds=POSITIONS_PER_SECOND,
    )
    return write_directory(path, config, tokenizer, preprocessor_config={**PATCHES, **EXTRACTOR})


directory = made_once(write_files)


hf_processor = hf_of(
    Qwen3OmniMoeProcessor,
    Qwen2VLImageProcessorPil,
    directory,
    has_videos=True,
    feature_extractor=WhisperFeatureExtractor(**EXTRACTOR),
)


def load_hf_videos() -> Any:
    """Return HF's processor with its rules for videos, which sample nothing."""
    images = Qwen2VLImageProcessorPil.from_pretrained(directory())
    return hf_processor(make_grid_videos("qwen2_vl", images, VIDEO_SIZE, samples=False))


def call_with_clips(prompt: str, clips: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Call HF's processor with each clip alone: beside a longer one it has silence behind it."""
    processor, token = hf_processor(), MARKS["audio_token"]
    found = [processor(text=[token], audio=[clip], return_tensors="np") for clip in clips]
    first, *others = prompt.split(token)
    texts = [processor.tokenizer.decode(one["input_ids"][0]) for one in found]
    for text, other in zip(texts, others, strict=True):
        first += text + other
    tensors: dict[str, Any] = {}
    if clips:
        features = [one["input_features"][0].T for one in found]
        counts = np.array([len(one) for one in features])
        mask = np.arange(counts.max())[None, :] < counts[:, None]
        padded = np.zeros((*mask.shape, features[0].shape[1]), np.float32)
        padded[mask] = np.concatenate(features)
        tensors["input_features"] = padded.transpose(0, 2, 1)
        tensors["feature_attention_mask"] = mask.astype(np.int64)
    return HFInputs(processor.tokenizer.encode(first), tensors)


QWEN3_OMNI = replace(
    QWEN2_5_OMNI,
    name="qwen3_omni",
    architecture="Qwen3OmniMoeThinkerForConditionalGeneration",
    tiny=TINY,
    path=directory,
    write=with_weights(write_files, TINY.fill),
    published=Published(
        layouts={"hub": HUB, "module": MODULE},
        unread=("talker.model.codec_embedding.weight", "code2wav.code_embedding.weight"),
    ),
    probed=("visual.merger", "visual.deepstack_merger_list.0"),
    rendered=CHATML.format(image=IMAGE),
    with_system=(
        "<|im_start|>user\n",
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\n",
    ),
    call_hf=partial(call_processor, hf_processor),
    placeholder=IMAGE,
    video=VIDEO,
    load_hf_videos=load_hf_videos,
)
QWEN3_OMNI_CLIPS = replace(
    QWEN2_5_OMNI_CLIPS,
    name="qwen3_omni clips",
    architecture=QWEN3_OMNI.architecture,
    path=directory,
    write=QWEN3_OMNI.write,
    published=QWEN3_OMNI.published,
    rendered=QWEN3_OMNI.rendered.replace(IMAGE, CLIP),
    with_system=QWEN3_OMNI.with_system,
    call_hf=call_with_clips,
    placeholder=CLIP,
    takes_length=lambda num_samples: num_samples > 200,
    clip_lengths=(16_000, 20_001, 17_641, 33_345, 16_100),
)
