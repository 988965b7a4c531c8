"""Tiny thinkers of Qwen2.5-Omni: pictures, videos and clips, positions of three axes."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import Qwen2_5OmniThinkerConfig, WhisperFeatureExtractor
from transformers import Qwen2_5OmniThinkerForConditionalGeneration as HFModel
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmjax.models.qwen2_5_omni.host_inputs import Qwen25OmniHostInputs
from mmjax.models.qwen2_5_omni.model import Qwen2_5OmniThinkerForConditionalGeneration
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_pixels, make_reference_inputs
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import CHATML, Family, HFInputs, call_processor, hf_of, written
from tests.families.hf_videos import make_grid_videos
from tests.families.published import MODULE, Published
from tests.families.qwen2_vl import GRIDS, TEXT, VISION, draw_grid, turn
from tests.families.sizes import NO_KEYS, Keys
from tests.families.tiny import DrawnItem, Media, TinyFamily, Variant
from tests.oracle import fill_with_unit_norms

IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 95, 94, 93, 92
AUDIO_TOKEN, AUDIO_START, AUDIO_END = 91, 90, 89
AUDIO: dict[str, Any] = {
    **{"num_mel_bins": 6, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2},
    **{"encoder_ffn_dim": 40, "max_source_positions": 64, "n_window": 4, "output_dim": 32},
}
"""Chunks of eight frames, two embeddings each."""
HUB = {
    "model.audio_tower.": "thinker.audio_tower.",
    "model.visual.": "thinker.visual.",
    "model.language_model.": "thinker.model.",
    "lm_head.": "thinker.lm_head.",
}
NUM_FRAMES = (23, 7, 3, 16)
"""Of clips, by turns."""


def tiny_config(
    *,
    text: Keys = NO_KEYS,
    vision: Keys = NO_KEYS,
    audio: Keys = NO_KEYS,
    are_heard: bool = False,
    **ids: Any,
) -> Any:
    """Return HF's config of a thinker of width 32; `are_heard`: whether drawn videos are."""
    own = {k: v for k, v in VISION["qwen2_5_vl"].items() if k != "tokens_per_second"}
    settings = {name: value for name, value in text.items() if name != "head_dim"}
    ids = {
        **{"image_token_index": IMAGE_TOKEN, "video_token_index": VIDEO_TOKEN},
        **{"audio_token_index": AUDIO_TOKEN, "audio_start_token_id": AUDIO_START},
        "audio_end_token_id": AUDIO_END,
        **{"vision_start_token_id": VISION_START, "position_id_per_seconds": 3},
        **ids,
    }
    config = Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, **settings},
        vision_config={**own, **vision},
        audio_config={**AUDIO, **audio},
        **ids,
    )
    config.architectures = ["Qwen2_5OmniThinkerForConditionalGeneration"]
    config.are_videos_heard = are_heard
    return config


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image, video or clip."""
    if media.modality != "audio":
        grid, seconds = GRIDS[media.modality][media.seed % 3]
        drawn = draw_grid(config, media.modality, media.seed, grid, seconds)
        is_heard = media.modality == "video" and config.are_videos_heard
        return add_sound(config, media.seed, drawn) if is_heard else drawn
    frames = draw_frames(config, media.seed)
    tensors = {"input_features": frames, "num_clip_frames": np.array(len(frames))}
    ids = [AUDIO_TOKEN] * Qwen25OmniHostInputs(config).count_rows(len(frames))
    return DrawnItem(tensors, ids, before=[AUDIO_START], after=[AUDIO_END])


def draw_frames(config: Any, seed: int, more: int = 0) -> np.ndarray:
    """Return a spectrogram, of so many frames more than a clip has."""
    shape = (NUM_FRAMES[seed % len(NUM_FRAMES)] + more, config.audio_config.num_mel_bins)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def add_sound(config: Any, seed: int, video: DrawnItem) -> DrawnItem:
    """Return a video that is heard, in one piece or two."""
    frames = draw_frames(config, seed + 1, 12)
    sound = {"sound_features": frames, "num_sound_frames": np.array(len(frames))}
    tensors = {**video.tensors, **sound}
    ids: list[int] = []
    for piece in Qwen25OmniHostInputs(config).find_pieces(tensors):
        ids += [AUDIO_TOKEN if piece.is_sound else VIDEO_TOKEN] * (piece.end - piece.start)
    ids = [AUDIO_START, *ids, AUDIO_END]
    is_embed = np.isin(ids, (VIDEO_TOKEN, AUDIO_TOKEN))
    return DrawnItem(tensors, ids, is_embed, before=video.before, after=video.after)


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it."""
    items = [make_pixels(item.tensors) for item in sample.items]
    data: dict[str, Any] = {}
    clips = []
    for item in items:
        for name, number in (
            ("input_features", "num_clip_frames"),
            ("sound_features", "num_sound_frames"),
        ):
            if name in item:
                clips.append(item.pop(name).T)
                item.pop(number)
    for name in dict.fromkeys(name for item in items for name in item):
        rows = [item[name] for item in items if name in item]
        data[name] = np.concatenate(rows) if name.startswith("pixel_values") else np.array(rows)
    if clips:
        counts = np.array([clip.shape[1] for clip in clips])
        mask = np.arange(counts.max())[None, :] < counts[:, None]
        data |= {"input_features": clips, "feature_attention_mask": mask.astype(np.int64)}
    if any("num_sound_frames" in item.tensors for item in sample.items):
        data["use_audio_in_video"] = np.array(True)
    if "second_per_grid_ts" in data:
        data["video_second_per_grid"] = data.pop("second_per_grid_ts")
    return make_reference_inputs(sample.token_ids, data)


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    text = {
        "hidden_size": width,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 4),
        "rope_parameters": turn(TEXT["rope_parameters"], head_dim),
    }
    return {"text": text, "vision": {"out_hidden_size": width}, "audio": {"output_dim": width}}


TINY = TinyFamily(
    name="qwen2_5_omni",
    model_class=Qwen2_5OmniThinkerForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    served={"are_heard": True},
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, 88),
    published_head_dim=128,
    max_embeds={"image": 15, "video": 27, "audio": 6},
    fill=partial(fill_with_unit_norms, sharpness=1.4),
    variants={
        "plain": Variant({}, 8),
        "other chunks, another rate": Variant(
            {"audio": {"n_window": 6}, "position_id_per_seconds": 7}, 8
        ),
        "videos with their sound": Variant({"are_heard": True}, 8, prompts=("video", "both")),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------

MARKS = {
    **{"image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", "audio_token": "<|AUDIO|>"},
    **{"vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>"},
    **{"audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
}
IMAGE, VIDEO, CLIP = (
    f"<|vision_bos|>{MARKS['image_token']}<|vision_eos|>",
    f"<|vision_bos|>{MARKS['video_token']}<|vision_eos|>",
    f"<|audio_bos|>{MARKS['audio_token']}<|audio_eos|>",
)
EXTRACTOR: dict[str, Any] = {
    **{"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "chunk_length": 1},
    **{"sampling_rate": 16_000, "hop_length": 160, "n_fft": 400, "return_attention_mask": True},
    **{"padding_value": 0.0},
}
VIDEO_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
"""That HF's processor gives all videos, whatever the checkpoint's files say."""
POSITIONS_PER_SECOND = 5
"""Of the directory's videos: ten embeddings of sound are a piece."""
PATCHES: dict[str, Any] = {
    **{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 28, "merge_size": 2},
    **{"temporal_patch_size": 2, "size": {"shortest_edge": 3136, "longest_edge": 50_176}},
}


def write_files(path: Path) -> Path:
    """Write the files of a checkpoint without weights."""
    marks = [*MARKS.values(), "<|im_start|>"]
    tokenizer = make_tokenizer(marks, eos="<|im_end|>", pad="<|endoftext|>", named=MARKS)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in MARKS.items()}
    config = tiny_config(
        text={"vocab_size": -(-len(tokenizer) // 8) * 8, "num_key_value_heads": 4},
        vision={"patch_size": 28, "window_size": 112},
        audio={"num_mel_bins": 8, "n_window": 8},
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        audio_token_index=ids["audio_token"],
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        vision_start_token_id=ids["vision_bos_token"],
        position_id_per_seconds=POSITIONS_PER_SECOND,
    )
    return write_directory(path, config, tokenizer, preprocessor_config={**PATCHES, **EXTRACTOR})


directory = made_once(write_files)


hf_processor = hf_of(
    Qwen2_5OmniProcessor,
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
    """Call HF's processor with clips."""
    outputs = hf_processor()(text=[prompt], audio=clips or None, return_tensors="np")
    if clips:  # what HF's model reads of the spectrograms
        outputs["input_features"] = (
            outputs["input_features"] * outputs["feature_attention_mask"][:, None]
        )
    return HFInputs([int(token_id) for token_id in outputs["input_ids"][0]], outputs)


QWEN2_5_OMNI = Family(
    **written(TINY, write_files),
    needless_files=frozenset({"chat_template.jinja", "tokenizer_config.json"}),
    published=Published(
        layouts={"hub": HUB, "module": MODULE},
        unread=("talker.model.embed_tokens.weight", "token2wav.code2wav_dit_model.proj_out.bias"),
    ),
    probed=("visual.blocks.1",),
    rendered="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    + CHATML.format(image=IMAGE),
    with_system=("You are a helpful assistant.", "be short"),
    call_hf=partial(call_processor, hf_processor),
    placeholder=IMAGE,
    video=VIDEO,
    load_hf_videos=load_hf_videos,
    takes_embeds=False,
    has_pixel_counts=True,
    tensors={"pixel_values": 1e-6, "image_grid_thw": 0.0},
    takes_size=lambda width, height: max(width, height) <= 200 * min(width, height),
)
QWEN2_5_OMNI_CLIPS = replace(
    QWEN2_5_OMNI,
    name="qwen2_5_omni clips",
    tiny=None,
    probed=(),
    rendered=QWEN2_5_OMNI.rendered.replace(IMAGE, CLIP),
    call_hf=call_with_clips,
    embed_token_ids=lambda processor: [processor.info.get_hf_config().audio_token_id],
    placeholder=CLIP,
    tensors={"input_features": 2e-5, "feature_attention_mask": 0},
    takes_length=lambda num_samples: 320 < num_samples <= 16_000,
)
