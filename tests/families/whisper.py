"""Tiny Whispers: a clip in the encoder, the beginning of a transcript in the decoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
from transformers import GenerationConfig, GenerationMixin, WhisperConfig
from transformers import WhisperForConditionalGeneration as HFModel

from mmjax.models.host_inputs import PromptItem
from mmjax.models.whisper.model import WhisperForConditionalGeneration
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from mmjax.processing.tensors.inputs import PlaceholderRange
from tests.families.directories import make_tokenizer, with_weights, write_directory
from tests.families.family import Family, written
from tests.families.florence2 import fill
from tests.families.published import Published
from tests.families.tiny import (
    DrawnItem,
    Media,
    Part,
    TinyFamily,
    Variant,
    Words,
    draw_words,
    listed,
)

START = 2
TINY_KEYS: dict[str, Any] = {
    "vocab_size": 96,
    "num_mel_bins": 6,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_source_positions": 10,
    "max_target_positions": 64,
    **{"decoder_start_token_id": START, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1},
    "begin_suppress_tokens": None,
}


def tiny_config(**keys: Any) -> Any:
    """Return a config of two blocks each way; a clip is 20 frames."""
    return WhisperConfig(**{**TINY_KEYS, **keys})


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return one of three clips' spectrograms."""
    shape = (config.num_mel_bins, 2 * config.max_source_positions)
    features = np.random.default_rng(media.seed % 3).normal(size=shape).astype(np.float32)
    return DrawnItem({"input_features": features}, [START] * config.max_source_positions)


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it, with the decoder's prompt."""
    inputs = make_reference_inputs(sample.token_ids, listed(sample))
    return {
        "input_features": inputs["input_features"],
        "decoder_input_ids": inputs["input_ids"],
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class WhisperFamily(TinyFamily):
    """An encoder-decoder whose encoder reads a clip alone, and whose decoder all texts."""

    def make_reference(self, *, config: Any = None, is_loud: bool = False, **settings: Any) -> Any:
        """Return HF's model, random, whose `generate` never ends a text."""
        model = self.reference_class(config or self.make_config(**settings)).eval()
        fill(model, is_loud=is_loud)
        model.generation_config = GenerationConfig(pad_token_id=1, decoder_start_token_id=START)
        # Its own `generate` writes the decoder's prompt itself.
        generate: Any = vars(GenerationMixin)["generate"]
        model.generate = MethodType(generate, model)
        return model

    def draw_sample(self, config: Any, parts: Sequence[Part]) -> Sample:
        """Return the last text behind START, about the clip; without one, a text chooses it."""
        texts = [part for part in parts if isinstance(part, Words)]
        clips = [part for part in parts if isinstance(part, Media)]
        answer = draw_words(texts.pop(), self.word_ids) if len(texts) + len(clips) > 1 else []
        drawn = self.draw_item(config, clips[0] if clips else Media(texts[0].seed))
        place = PlaceholderRange(0, len(drawn.token_ids))
        return Sample(
            token_ids=np.array([START, *answer], np.int32),
            items=[PromptItem(place, drawn.tensors)],
            encoder_token_ids=np.array(drawn.token_ids, np.int32),
        )


def resize(width: int, head_dim: int, num_heads: int) -> Mapping[str, Any]:
    """Return keywords of `tiny_config` for another width."""
    if num_heads * head_dim != width:
        raise ValueError(f"{num_heads} heads of {head_dim} are not {width}, as Whisper's must be")
    return {
        "d_model": width,
        "encoder_attention_heads": num_heads,
        "decoder_attention_heads": num_heads,
    }


LOUD = {"is_loud": True, "encoder_layers": 1, "decoder_layers": 1}
TINY = WhisperFamily(
    name="whisper",
    model_class=WhisperForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    served=LOUD,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(4, 90),
    published_head_dim=64,
    max_embeds={"audio": 64},  # room for several clips and their prompts at once
    max_items=1,
    max_model_len=56,
    variants={
        "plain": Variant({}, 6),
        "loud, one layer": Variant(LOUD, 4),
        "scaled embeddings that are not, a head of its own, other depths and heads, relu": Variant(
            {
                "scale_embedding": True,
                "tie_word_embeddings": False,
                "encoder_layers": 1,
                "decoder_layers": 3,
                "encoder_attention_heads": 2,
                "activation_function": "relu",
            },
            6,
        ),
    },
)


# ---- its directory ------------------------------------------------------------------------------

EOS = "<|endoftext|>"
LANGUAGES = ("<|en|>", "<|de|>", "<|fr|>")
MARKS = (
    "<|startoftranscript|>",
    *LANGUAGES,
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"),
    "<|notimestamps|>",
)
NUM_POSITIONS = 50
"""Of the encoder: a window is one second."""
RATE = 16_000
TIMES = tuple(f"<|{place / 50:.2f}|>" for place in range(NUM_POSITIONS + 1))
FEATURES: Mapping[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 8,
    "chunk_length": 1,
    "sampling_rate": RATE,
    "hop_length": 160,
    "n_fft": 400,
    "padding_value": 0.0,
    "return_attention_mask": False,
}


def write_files(
    path: Path,
    *,
    is_multilingual: bool = True,
    decoder_layers: int = 1,
    alignment_heads: Sequence[Sequence[int]] | None = ((0, 1), (0, 3)),
) -> Path:
    """Write a directory of windows of one second, without weights."""
    tokenizer = make_tokenizer((*MARKS, *TIMES), eos=EOS, pad=EOS)
    ids: dict[str, int] = {one: tokenizer.convert_tokens_to_ids(one) for one in (EOS, *MARKS)}
    start = {
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        **{f"{name}_token_id": ids[EOS] for name in ("pad", "bos", "eos")},
    }
    config = tiny_config(
        **start,
        architectures=["WhisperForConditionalGeneration"],
        vocab_size=len(tokenizer),
        num_mel_bins=FEATURES["feature_size"],
        max_source_positions=NUM_POSITIONS,
        encoder_layers=1,
        decoder_layers=decoder_layers,
    )
    tasks = ("translate", "transcribe")
    languages = {
        "lang_to_id": {one: ids[one] for one in LANGUAGES},
        "task_to_id": {one: ids[f"<|{one}|>"] for one in tasks},
    }
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config=FEATURES,
        generation_config={
            **start,
            **(languages if is_multilingual else {}),
            **({} if alignment_heads is None else {"alignment_heads": alignment_heads}),
            "is_multilingual": is_multilingual,
            "max_length": config.max_target_positions,
            "no_timestamps_token_id": ids["<|notimestamps|>"],
            "prev_sot_token_id": ids["<|startofprev|>"],
            "max_initial_timestamp_index": 20,
            "suppress_tokens": [5, 6, 7, *(ids[one] for one in MARKS[:-1])],
            "begin_suppress_tokens": [8, ids[EOS]],
        },
    )


def fill_loud(model: Any) -> None:
    """Fill with values under which answers change with every input."""
    fill(model, is_loud=True)


WHISPER = Family(
    **written(TINY, write_files) | {"write": with_weights(write_files, fill_loud)},
    llm_settings={"max_num_seqs": 2, "max_num_batched_tokens": 64},
    published=Published(left_out=("proj_out.weight",)),
    rendered="",
    call_hf=lambda prompt, images, kwargs: _refuse_images(),
    updates_encoder_prompt=True,
)


def _refuse_images() -> Any:
    raise ValueError("Whisper takes clips alone")
