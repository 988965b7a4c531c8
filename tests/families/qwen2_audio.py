"""Tiny Qwen2-Audios: Whisper's encoder, averaged in pairs, clips of any length before Qwen2."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    AutoTokenizer,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2Config,
    WhisperFeatureExtractor,
)
from transformers import Qwen2AudioForConditionalGeneration as HFModel
from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

from mmjax.models.qwen2_audio.host_inputs import Qwen2AudioHostInputs
from mmjax.models.qwen2_audio.model import Qwen2AudioForConditionalGeneration
from mmjax.models.qwen2_audio.processor import AUDIO, PLACEHOLDER
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import Family, HFInputs, written
from tests.families.published import LLM_FIRST, MODULE, Published
from tests.families.sizes import NO_KEYS, Keys, fit_text
from tests.families.tiny import DrawnItem, Media, TinyFamily, Variant

AUDIO_TOKEN, START, END = 95, 94, 93
HUB = {**LLM_FIRST, "model.audio_tower.": "audio_tower."}
NUM_FRAMES = (24, 13, 8, 19)
"""Of sound, by turns; HF takes a clip of one embedding for a prompt that is yet to be expanded."""
TEXT: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024},
}
TOWER: dict[str, Any] = {
    **{"num_mel_bins": 6, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2},
    **{"encoder_ffn_dim": 40, "max_source_positions": 12},
}


def tiny_config(
    *, text: Keys = NO_KEYS, audio: Keys = NO_KEYS, audio_token_id: int = AUDIO_TOKEN
) -> Any:
    """Return a config of width 32; a clip is 24 frames."""
    # `head_dim` is no key of Qwen2's.
    settings = {name: value for name, value in text.items() if name != "head_dim"}
    return Qwen2AudioConfig(
        text_config=Qwen2Config(**{**TEXT, **settings}),
        audio_config=Qwen2AudioEncoderConfig(**{**TOWER, **audio}),
        audio_token_index=audio_token_id,
        architectures=["Qwen2AudioForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a clip's spectrogram; the frames behind its end are not read."""
    audio = config.audio_config
    num_frames = NUM_FRAMES[media.seed % len(NUM_FRAMES)]
    shape = (audio.num_mel_bins, 2 * audio.max_source_positions)
    features = np.random.default_rng(media.seed).normal(size=shape).astype(np.float32)
    ids = [config.audio_token_id] * Qwen2AudioHostInputs.count_rows(num_frames)
    tensors = {"input_features": features, "num_frames": np.array(num_frames, np.int32)}
    return DrawnItem(tensors, ids, before=[START], after=[END])


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it."""
    features = [item.tensors["input_features"] for item in sample.items]
    if not features:
        return make_reference_inputs(sample.token_ids, {})
    most = features[0].shape[1]
    masks = [np.arange(most) < item.tensors["num_frames"] for item in sample.items]
    data = {"input_features": features, "feature_attention_mask": np.stack(masks).astype(np.int64)}
    return make_reference_inputs(sample.token_ids, data)


TINY = TinyFamily(
    name="qwen2_audio",
    model_class=Qwen2AudioForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(3, 90),
    published_head_dim=128,
    max_embeds={"audio": 6},
    variants={
        "plain": Variant({}, 8),
        "one key head, another activation, an odd number of states": Variant(
            {
                "text": {"num_key_value_heads": 1},
                "audio": {"activation_function": "relu", "max_source_positions": 13},
            },
            8,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------

EXTRACTOR = {
    **{"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "chunk_length": 1},
    **{"sampling_rate": 16_000, "hop_length": 160, "n_fft": 400, "return_attention_mask": True},
    **{"processor_class": "Qwen2AudioProcessor", "padding_value": 0.0},
}
"""Clips of a second at most: 25 embeddings."""


def write_files(path: Path) -> Path:
    """Write the files of a checkpoint without weights."""
    marks = ("<|im_start|>", AUDIO, "<|audio_bos|>", "<|audio_eos|>")
    tokenizer = make_tokenizer(marks, eos="<|im_end|>", pad="<|endoftext|>")
    config = tiny_config(
        text=fit_text(tokenizer),
        audio={"num_mel_bins": 8, "max_source_positions": 50},
        audio_token_id=tokenizer.convert_tokens_to_ids(AUDIO),
    )
    return write_directory(path, config, tokenizer, preprocessor_config=EXTRACTOR)


path = made_once(write_files)


@cache
def hf_processor() -> Any:
    """HF's own processor, built apart from ours."""
    extractor = WhisperFeatureExtractor.from_pretrained(path())
    return Qwen2AudioProcessor(extractor, AutoTokenizer.from_pretrained(path()))


def call_hf(prompt: str, clips: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Call HF's processor."""
    media = {"audio": clips, "sampling_rate": 16_000} if clips else {}
    outputs = hf_processor()(text=[prompt], **media, return_tensors="np")
    return HFInputs([int(token_id) for token_id in outputs["input_ids"][0]], outputs)


QWEN2_AUDIO = Family(
    **written(TINY, write_files),
    published=Published(layouts={"hub": HUB, "module": MODULE}, left_out=()),
    question="what is said",
    rendered=(
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\nAudio 1: {PLACEHOLDER}\nwhat is it<|im_end|>\n"
        "<|im_start|>assistant\na car<|im_end|>\n"
        "<|im_start|>user\nwhich color<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    with_system=("You are a helpful assistant.", "be short"),
    call_hf=call_hf,
    embed_token_ids=lambda processor: [processor.info.get_hf_config().audio_token_id],
    placeholder=PLACEHOLDER,
    tensors={"input_features": 2e-5, "feature_attention_mask": 0},
    takes_length=lambda num_samples: 320 < num_samples <= 16_000,
    probed=("audio_tower.layers.1", "multi_modal_projector"),
)
