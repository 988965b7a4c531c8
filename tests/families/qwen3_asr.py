"""Tiny Qwen3-ASRs: windows of two seconds before Qwen3."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, Qwen3ASRConfig, Qwen3ASREncoderConfig, Qwen3Config
from transformers import Qwen3ASRForConditionalGeneration as HFModel
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

from mmjax.models.qwen3_asr.host_inputs import Qwen3ASRHostInputs
from mmjax.models.qwen3_asr.model import Qwen3ASRForConditionalGeneration
from mmjax.models.qwen3_asr.processor import AUDIO, PLACEHOLDER
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import CHATML, Family, HFInputs, written
from tests.families.sizes import NO_KEYS, Keys, fit_text
from tests.families.tiny import DrawnItem, Media, TinyFamily, Variant

AUDIO_TOKEN, START, END = 95, 94, 93
NUM_FRAMES = (123, 50, 204, 131)
"""Of clips, by turns."""
TEXT: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"max_position_embeddings": 1024},
}
TOWER: dict[str, Any] = {
    **{"num_mel_bins": 6, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2},
    **{"encoder_ffn_dim": 40, "output_dim": 32, "downsample_hidden_size": 4},
    "n_window_infer": 200,
}


def tiny_config(
    *,
    text: Keys = NO_KEYS,
    audio: Keys = NO_KEYS,
    is_tied: bool = True,
    audio_token_id: int = AUDIO_TOKEN,
) -> Any:
    """Return a config of width 32; a window is 200 frames, and 26 embeddings."""
    text = {**TEXT, "tie_word_embeddings": is_tied, **text}
    return Qwen3ASRConfig(
        text_config=Qwen3Config(**text),
        audio_config=Qwen3ASREncoderConfig(**{**TOWER, **audio}),
        audio_token_id=audio_token_id,
        tie_word_embeddings=is_tied,
        architectures=["Qwen3ASRForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a clip's spectrogram."""
    shape = (NUM_FRAMES[media.seed % len(NUM_FRAMES)], config.audio_config.num_mel_bins)
    features = np.random.default_rng(media.seed).normal(size=shape).astype(np.float32)
    ids = [config.audio_token_id] * Qwen3ASRHostInputs(config).windows.count_rows(len(features))
    return DrawnItem({"input_features": features}, ids, before=[START], after=[END])


def pad_clips(clips: list[np.ndarray], chunk: int) -> dict[str, np.ndarray]:
    """Return spectrograms, `[frames, bins]`, as HF's model takes them: of whole chunks."""
    counts = np.array([len(clip) for clip in clips])
    mask = np.arange(int(counts.max() + -counts.max() % chunk))[None, :] < counts[:, None]
    padded = np.zeros((*mask.shape, clips[0].shape[1]), np.float32)
    padded[mask] = np.concatenate(clips)
    return {
        "input_features": padded.transpose(0, 2, 1),
        "input_features_mask": mask.astype(np.int64),
    }


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it."""
    clips = [item.tensors["input_features"] for item in sample.items]
    chunk = 2 * reference.config.audio_config.n_window
    return make_reference_inputs(sample.token_ids, pad_clips(clips, chunk) if clips else {})


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    text = {
        **{"hidden_size": width, "head_dim": head_dim, "num_attention_heads": num_heads},
        "num_key_value_heads": max(1, num_heads // 4),
    }
    return {"text": text, "audio": {"output_dim": width}}


TINY = TinyFamily(
    name="qwen3_asr",
    model_class=Qwen3ASRForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(3, 90),
    published_head_dim=128,
    max_embeds={"audio": 27},
    max_model_len=128,
    variants={
        "plain": Variant({}, 4),
        "a head of its own, another activation, windows of a chunk": Variant(
            {
                "is_tied": False,
                "text": {"num_key_value_heads": 1},
                "audio": {"activation_function": "relu", "n_window": 49, "n_window_infer": 150},
            },
            4,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------

EXTRACTOR = {
    **{"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": 8},
    **{"sampling_rate": 16_000, "hop_length": 160, "n_fft": 400, "chunk_length": 30},
    **{"return_attention_mask": True, "padding_value": 0.0, "n_window": 50, "min_length": 8000},
}
NAMED = {
    **{"audio_token": AUDIO, "audio_bos_token": "<|audio_start|>"},
    "audio_eos_token": "<|audio_end|>",
}


def write_files(path: Path) -> Path:
    """Write the files of a checkpoint without weights."""
    marks = (*NAMED.values(), "<|im_start|>", "<asr_text>")
    tokenizer = make_tokenizer(marks, eos="<|im_end|>", pad="<|endoftext|>", named=NAMED)
    config = tiny_config(
        text=fit_text(tokenizer),
        audio={"num_mel_bins": 8},
        audio_token_id=tokenizer.convert_tokens_to_ids(AUDIO),
    )
    return write_directory(path, config, tokenizer, preprocessor_config=EXTRACTOR)


path = made_once(write_files)


@cache
def hf_processor() -> Any:
    """HF's own processor, built apart from ours."""
    extractor = Qwen3ASRFeatureExtractor(**EXTRACTOR)
    return Qwen3ASRProcessor(extractor, AutoTokenizer.from_pretrained(path()))


def call_hf(prompt: str, clips: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Call HF's processor with each clip alone, as it asks for: of a prompt it takes one."""
    processor = hf_processor()
    found = [processor(text=AUDIO, audio=[clip], sampling_rate=16_000) for clip in clips]
    text, *others = prompt.split(AUDIO)
    for one, other in zip(found, others, strict=True):
        text += AUDIO * one["input_ids"].shape[1] + other
    features = [
        one["input_features"][0].numpy().T[: int(one["input_features_mask"].sum())] for one in found
    ]
    ids = processor.tokenizer.encode(text)
    return HFInputs(ids, pad_clips(features, 100) if clips else {})


QWEN3_ASR = Family(
    **written(TINY, write_files),
    question="what is said",
    rendered="<|im_start|>system\n<|im_end|>\n" + CHATML.format(image=PLACEHOLDER),
    with_system=("system\n", "system\nbe short"),
    call_hf=call_hf,
    embed_token_ids=lambda processor: [processor.info.get_hf_config().audio_token_id],
    placeholder=PLACEHOLDER,
    tensors={"input_features": 2e-5, "input_features_mask": 0},
    clip_lengths=(16_000, 20_001, 641, 33_345, 9_600),
)
