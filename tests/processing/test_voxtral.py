"""Voxtral's conversations and requests of transcripts: the ids are those of Mistral's package.

They are recorded (`record_voxtral.py`), since HF's processor has it write the prompts.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from mmjax.errors import CheckpointError, RequestError, RequestValueError
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.transcripts import TranscriptFallback, TranscriptOptions
from tests.families.directories import edit_json, golden_processor
from tests.families.voxtral import UNIT_TOKENS, VOXTRAL
from tests.models.test_clip_laws import audio_part, draw_clip
from tests.processing.record_voxtral import CONVERSATIONS

CASES: list[dict[str, Any]] = json.loads(CONVERSATIONS.read_text())
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def processor() -> Iterator[InputProcessor]:
    made = InputProcessor(load_model_config(str(VOXTRAL.path())))
    yield made
    made.close()


def with_clips(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message["content"], list):
        return message
    parts = [
        audio_part(draw_clip(0, part["samples"])) if part["type"] == "audio" else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


@pytest.mark.parametrize("case", [case for case in CASES if "messages" in case])
def test_a_conversation_has_the_ids_of_mistral_common(
    processor: InputProcessor, case: dict[str, Any]
):
    messages = [with_clips(message) for message in case["messages"]]
    prompt = ChatParser.for_model(processor).parse(messages, tools=case.get("tools"))
    assert processor.explain(prompt).prompt_token_ids == case["ids"]


@pytest.mark.parametrize("case", [case for case in CASES if "transcription" in case])
def test_a_transcription_has_the_ids_of_mistral_common(
    processor: InputProcessor, case: dict[str, Any]
):
    options = TranscriptOptions(language=case["language"], sampling_params=GREEDY)
    samples = draw_clip(0, case["transcription"])
    transcription = processor.get_transcriber().start(samples, options)
    request = transcription.next_request()
    assert request is not None
    assert request.is_text
    assert transcription.next_request() is None
    prompt: Any = request.prompt
    assert processor.explain(prompt).prompt_token_ids == case["ids"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"task": "translate"}, "model"),
        ({"prompt_token_ids": [5]}, "prompt"),
        ({"fallback": TranscriptFallback()}, "logprob_threshold"),
        ({"language": "klingon"}, "language"),
        ({"language": "[TRANSCRIBE]"}, "language"),
        ({"language": "yue"}, "language"),
    ],
)
def test_what_transcripts_have_not_is_refused(
    processor: InputProcessor, options: dict[str, Any], param: str
):
    asked = TranscriptOptions(**options, sampling_params=GREEDY)
    with pytest.raises(RequestError) as caught:
        processor.get_transcriber().start(draw_clip(0), asked)
    assert caught.value.param == param


def test_a_language_may_have_its_name(processor: InputProcessor):
    options = TranscriptOptions(language="French", sampling_params=GREEDY)
    assert processor.get_transcriber().start(draw_clip(0), options).language == "fr"


def test_embeddings_are_whole_units():
    processor = VOXTRAL.make_processor(enable_mm_embeds=True)
    width = processor.info.get_hf_config().text_config.hidden_size
    rows = np.ones((2 * UNIT_TOKENS, width), np.float32)
    inputs = processor.apply(VOXTRAL.placeholder, {"audio": {"audio_embeds": [rows]}})
    assert inputs.mm_placeholders["audio"][0].get_num_embeds() == len(rows)
    with pytest.raises(RequestValueError, match="19 rows; a clip has 10 for each 1 s"):
        processor.apply(VOXTRAL.placeholder, {"audio": {"audio_embeds": [rows[1:]]}})


def test_the_longest_clip_is_what_limits_and_prompts_leave():
    """Of a prompt of 4,096 tokens, whatever a step takes."""
    info = VOXTRAL.make_processor().info
    assert info.get_mm_max_tokens_per_item(64) == {"audio": 4090}
    assert info.get_mm_max_tokens_per_item(64, {"audio": 3}) == {"audio": 1360}
    assert info.get_mm_max_tokens_per_item(64, {"audio": 999}) == {"audio": UNIT_TOKENS}
    settings: tuple[dict[str, Any], ...] = ({"max_audio_seconds": 3}, {"max_audio_samples": 40_000})
    for limits in settings:
        short = VOXTRAL.make_processor(**limits).info
        assert short.get_mm_max_tokens_per_item() == {"audio": 3 * UNIT_TOKENS}


def edit(folder: Path, name: str, values: dict[str, Any]) -> Any:
    path = Path(copytree(VOXTRAL.path(), folder / "checkpoint"))
    edit_json(path / f"{name}.json", values)
    return golden_processor("voxtral", path=path)


def test_a_directory_without_a_tokenizer(tmp_path: Path):
    path = Path(copytree(VOXTRAL.path(), tmp_path / "checkpoint"))
    (path / "tekken.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither tekken\.json nor tokenizer\.json"):
        golden_processor("voxtral", path=path)
