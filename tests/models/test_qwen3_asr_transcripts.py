"""A Qwen3-ASR's transcript is what HF's model says to HF's request of a transcript."""

from typing import Any

import numpy as np
import pytest
import torch

from mmjax import LLM
from mmjax.errors import RequestError
from mmjax.params.sampling_params import SamplingParams
from mmjax.parity.reference import generate_reference, load_reference
from mmjax.processing.transcripts import TranscriptFallback, TranscriptOptions
from tests.families.qwen3_asr import QWEN3_ASR, hf_processor
from tests.models.test_clip_laws import draw_clip

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
CLIP = draw_clip(0, 33_345)


def start(**options: Any) -> Any:
    info: Any = QWEN3_ASR.make_processor().info
    options = {"sampling_params": GREEDY, **options}
    return info.transcriber.start(CLIP, TranscriptOptions(**options))


def ask_hf(language: str | None, prompt: str | None) -> str:
    """Return the prompt of HF's request, by the template that a checkpoint without one has."""
    info: Any = QWEN3_ASR.make_processor().info
    own = {"chat_template": info.chat_template, "tokenize": False}
    (text,) = hf_processor().apply_transcription_request([CLIP], language, prompt, **own)
    return text


@pytest.mark.parametrize("language", [None, "en", "English", "yue", "Filipino"])
@pytest.mark.parametrize("prompt", ["", "the car"])
def test_prompts_are_hfs(language: str | None, prompt: str):
    tokenizer = hf_processor().tokenizer
    given = tokenizer.encode(prompt) if prompt else ()
    transcription = start(language=language, prompt_token_ids=given)
    asked = transcription.next_request()
    assert tokenizer.decode(asked.prompt["prompt_token_ids"]) == ask_hf(language, prompt or None)
    assert asked.sampling_params.prompt_logprobs is None, "means are of the transcript's tokens"
    assert transcription.next_request() is None
    codes = {"English": "en", "Filipino": "fil"}
    assert transcription.language == codes.get(str(language), language)


@pytest.mark.parametrize(
    ("said", "language", "text"),
    [
        ("language English<asr_text>the car", "en", "the car"),
        ("language Cantonese<asr_text>the<asr_text>car", "yue", "the<asr_text>car"),
        ("language None<asr_text>", None, ""),
        ("language Klingon<asr_text>the car", None, "the car"),
        ("the car", None, "the car"),
    ],
)
def test_an_answer_is_its_language_and_its_text(said: str, language: str | None, text: str):
    tokenizer = hf_processor().tokenizer
    transcription = start()
    assert not transcription.next_request().is_text
    (segment,) = transcription.take(tokenizer.encode(said), None)
    assert tokenizer.decode(segment.token_ids) == text
    assert transcription.language == language
    hfs = hf_processor().parse_output(said)
    assert hfs["transcription"] == text


def test_a_clip_of_several_windows():
    """In a language that is asked for, behind a text."""
    tokenizer = hf_processor().tokenizer
    reference = load_reference(QWEN3_ASR.checkpoint, QWEN3_ASR.architecture)
    hf = QWEN3_ASR.call_hf(ask_hf("en", "be short"), [CLIP], {})
    ids = torch.tensor(hf.input_ids)[None]
    tensors = {name: torch.as_tensor(np.asarray(hf.tensors[name])) for name in QWEN3_ASR.tensors}
    inputs = {**tensors, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = generate_reference(reference, inputs, NUM_TOKENS)
    own = {**QWEN3_ASR.llm_settings, "max_model_len": ids.shape[1] + NUM_TOKENS}
    with LLM(QWEN3_ASR.checkpoint, use_tqdm_on_load=False, **own) as llm:
        transcript = llm.transcribe(CLIP, language="en", prompt="be short", sampling_params=GREEDY)
        for several in ([CLIP, CLIP], np.stack([CLIP, CLIP])):
            with pytest.raises(RequestError, match="`audio` holds 2 clips; give one"):
                llm.transcribe(several)
    (segment,) = transcript.segments
    assert list(segment.token_ids) == list(expected)
    assert (segment.start, segment.end) == (0.0, pytest.approx(len(CLIP) / 16_000))
    assert transcript.language == "en"
    special = tokenizer.added_tokens_decoder
    assert (
        transcript.text == tokenizer.decode([one for one in expected if one not in special]).strip()
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"task": "translate"}, "transcripts are in the clip's language"),
        ({"has_word_times": True}, "no times of words"),
        ({"fallback": TranscriptFallback(logprob_threshold=-1.0)}, "all of a clip at once"),
        ({"language": "klingon"}, "the language `klingon` is none of the model's; it knows ar, "),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], match: str):
    with pytest.raises(RequestError, match=match):
        start(**options)
