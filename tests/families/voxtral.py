"""Tiny Voxtrals: Whisper's encoder, three or five states an embedding, clips of units, Llama."""

import base64
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    VoxtralConfig,
    VoxtralEncoderConfig,
    WhisperFeatureExtractor,
)
from transformers import VoxtralForConditionalGeneration as HFModel
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

from mmjax.models.voxtral.host_inputs import VoxtralHostInputs
from mmjax.models.voxtral.model import VoxtralForConditionalGeneration
from mmjax.models.voxtral.processor import PLACEHOLDER
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from mmjax.rounding import cdiv, round_up
from tests.families.directories import made_once
from tests.families.family import Family, HFInputs, written
from tests.families.published import LLM_FIRST, MODULE, Published
from tests.families.sizes import NO_KEYS, Keys
from tests.families.tiny import DrawnItem, Media, TinyFamily, Variant
from tests.kit import WORDS

BOS, EOS, START, AUDIO_TOKEN = 1, 2, 25, 24
HUB = {**LLM_FIRST, "model.audio_tower.": "audio_tower."}
NUM_UNITS = (1, 3, 2)
"""Of clips, by turns."""
TEXT: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"max_position_embeddings": 1024, "rope_theta": 1e8, "rms_norm_eps": 1e-5},
}
TOWER: dict[str, Any] = {
    **{"num_mel_bins": 6, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 72, "max_source_positions": 12},
}


def tiny_config(*, text: Keys = NO_KEYS, audio: Keys = NO_KEYS, **keys: Any) -> Any:
    """Return a config of width 32; a unit is 24 frames, and 4 embeddings."""
    return VoxtralConfig(
        text_config=LlamaConfig(**{**TEXT, **text}),
        audio_config=VoxtralEncoderConfig(**{**TOWER, **audio}),
        audio_token_id=AUDIO_TOKEN,
        **keys,
        architectures=["VoxtralForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a clip's spectrograms."""
    spec: Any = VoxtralHostInputs(config).encoder_spec
    num_units = NUM_UNITS[media.seed % len(NUM_UNITS)]
    shape, _ = spec.inputs["input_features"]
    features = np.random.default_rng(media.seed).normal(size=(num_units, *shape))
    ids = [config.audio_token_id] * (num_units * spec.tokens_per_unit)
    return DrawnItem({"input_features": features.astype(np.float32)}, ids, before=[START])


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it."""
    features = [item.tensors["input_features"] for item in sample.items]
    data = {"input_features": np.concatenate(features)} if features else {}
    return make_reference_inputs(sample.token_ids, data)


TINY = TinyFamily(
    name="voxtral",
    model_class=VoxtralForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(30, 90),
    published_head_dim=128,
    max_embeds={"audio": 12},
    variants={
        "plain": Variant({}, 8),
        "one key head, other activations, two states an embedding": Variant(
            {
                "text": {"num_key_value_heads": 1},
                "audio": {"activation_function": "relu", "intermediate_size": 48},
                "projector_hidden_act": "relu",
            },
            8,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------

EXTRACTOR = {
    **{"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "chunk_length": 1},
    **{"sampling_rate": 16_000, "hop_length": 160, "n_fft": 400, "return_attention_mask": False},
    **{"processor_class": "VoxtralProcessor", "padding_value": 0.0},
}
"""A unit is a second: 10 embeddings."""
UNIT_SAMPLES, UNIT_TOKENS = 16_000, 10
SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", *(f"<SPECIAL_{rank}>" for rank in range(20, 24)), "[AUDIO]"),
    *("[BEGIN_AUDIO]", *(f"<SPECIAL_{rank}>" for rank in range(26, 34)), "[TRANSCRIBE]"),
)
"""By their ids."""
NUM_SPECIAL_TOKENS = 40
"""The others are fillers."""
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of the published files."""


def make_tekken() -> dict[str, Any]:
    """Return a tekken.json of bytes and of the words of `tests.kit`."""
    starts = [start + word for word in WORDS for start in ("", " ")]
    parts = [word[:end].encode() for word in starts for end in range(2, len(word) + 1)]
    tokens = dict.fromkeys([*(bytes([byte]) for byte in range(256)), *parts])
    return {
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True}
            for rank, token in enumerate(SPECIAL_TOKENS)
        ],
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + NUM_SPECIAL_TOKENS,
            "default_num_special_tokens": NUM_SPECIAL_TOKENS,
            "version": "v7",
        },
        "audio": {
            "sampling_rate": EXTRACTOR["sampling_rate"],
            "frame_rate": UNIT_TOKENS,
            "audio_encoding_config": {"num_mel_bins": 8, "hop_length": 160, "window_size": 400},
            "chunk_length_s": 1.0,
        },
        "version": 1,
        "type": "Tekken",
    }


def write_files(path: Path) -> Path:
    """Write the files of a checkpoint without weights, the tokenizer's as Mistral's alone."""
    tekken = make_tekken()
    vocab_size = round_up(tekken["config"]["default_vocab_size"], 64)
    config = tiny_config(
        text={
            **{"vocab_size": vocab_size, "num_key_value_heads": 4},
            **{"bos_token_id": BOS, "eos_token_id": EOS},
        },
        audio={"num_mel_bins": 8, "max_source_positions": 50, "intermediate_size": 5 * 24},
    )
    config.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
    (path / "tekken.json").write_text(json.dumps(tekken))
    return path


path = made_once(write_files)


@cache
def hf_processor() -> Any:
    """HF's own processor, whose tokenizer is not Mistral's package: it is not installed."""
    extractor = WhisperFeatureExtractor.from_pretrained(path())
    return VoxtralProcessor(extractor, AutoTokenizer.from_pretrained(path()))


def call_hf(prompt: str, clips: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Do what HF's processor does of a conversation that the template wrote."""
    processor = hf_processor()
    numbers = [cdiv(len(clip), UNIT_SAMPLES) * UNIT_TOKENS for clip in clips]
    ids = [BOS]
    for token_id in processor.tokenizer.encode(prompt, add_special_tokens=False):
        ids += [token_id] * (numbers.pop(0) if token_id == AUDIO_TOKEN else 1)
    if not clips:
        return HFInputs(ids, {})
    settings = {**processor.audio_kwargs, "pad_to_multiple_of": UNIT_SAMPLES}
    del settings["max_source_positions"]
    features = processor._retrieve_input_features(clips, UNIT_SAMPLES // 160, **settings)
    return HFInputs(ids, {"input_features": features})


VOXTRAL = Family(
    **written(TINY, write_files),
    published=Published(layouts={"hub": HUB, "module": MODULE}, left_out=()),
    question="what is said",
    rendered=(f"[INST]{PLACEHOLDER}what is it[/INST]a car</s>[INST]which color[/INST]"),
    with_system=None,
    call_hf=call_hf,
    embed_token_ids=lambda processor: [processor.info.get_hf_config().audio_token_id],
    placeholder=PLACEHOLDER,
    tensors={"input_features": 2e-5},
    clip_lengths=(16_000, 20_001, 641, 33_345, 9_600),
    probed=("audio_tower.layers.1", "multi_modal_projector"),
    contradictions=(
        ("tekken", {"special_tokens": None}, "with its `special_tokens`"),
        ("tekken", {"config": {}}, "with its `special_tokens`"),
        ("config", {"audio_token_id": 23}, r"`\[AUDIO\]` is token 24, but `audio_token_id`"),
        ("config", {"audio_config.intermediate_size": 7 * 24}, "50 states of 24"),
        ("preprocessor_config", {"chunk_length": 30}, r"the encoder takes \[8, 100\]"),
    ),
)
