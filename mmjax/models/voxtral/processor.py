"""Voxtral's prompt side: each `[AUDIO]` becomes one for 80 ms of its clip, in whole half minutes.

Before: `[INST][BEGIN_AUDIO][AUDIO]what is said[/INST]`. After, of a clip of 40 s: 750 `[AUDIO]`.

Transcripts, as `apply_transcription_request` of HF's processor asks for them: one request.

The model hears all of a clip at once, and tells no times: its transcript is one segment.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import CheckpointError, RequestValueError
from mmjax.models.family import FamilyInfo, item_fields, make_factories
from mmjax.models.voxtral.host_inputs import VoxtralHostInputs
from mmjax.processing.image_processors.parts import ProcessorOfParts
from mmjax.processing.items.parse import AudioEmbedsDataParser
from mmjax.processing.media.log_mel import LogMel
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.processing.tokenizer_file import TEKKEN_FILE, TOKENIZER_FILE, read_tekken
from mmjax.processing.transcripts import (
    TranscriptOptions,
    WholeTranscriber,
    WholeTranscription,
    find_language_code,
    refuse_options,
)


class VoxtralTranscriber(WholeTranscriber):
    """Begins transcriptions of one checkpoint."""

    def start(self, samples: np.ndarray, options: TranscriptOptions) -> WholeTranscription:
        """Write the prompt; `RequestError` names a wrong option."""
        refuse_options(options)
        if options.prompt_token_ids:
            raise RequestValueError(
                "this model takes no text before a transcript; leave it out, or ask in a chat "
                "about the clip",
                param="prompt",
            )
        language = None
        if options.language is not None:
            language = find_language_code(options.language)
            if not re.fullmatch("[a-z]{2}", language):
                raise RequestValueError(
                    f"the language `{options.language[:64]}` is none that is known; give its code "
                    "of two letters, such as `en`",
                    param="language",
                )
        return WholeTranscription(
            self._write_prompt(language),
            samples=samples,
            sampling_rate=self.sampling_rate,
            options=options,
            language=language,
        )

    def _write_prompt(self, language: str | None) -> list[int]:
        named = "" if language is None else f"lang:{language}"
        text = f"[INST][BEGIN_AUDIO][AUDIO][/INST]{named}[TRANSCRIBE]"
        return list(self._tokenizer.encode(text))


AUDIO = "[AUDIO]"
PLACEHOLDER = f"[BEGIN_AUDIO]{AUDIO}"
CHAT_TEMPLATE = r"""
{%- set found = namespace(last=0, has_system=false) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- set found.last = loop.index -%}
    {%- elif message.role == 'system' -%}
        {%- set found.has_system = true -%}
    {%- endif -%}
{%- endfor -%}
{%- macro write(content) -%}
    {%- for part in content -%}
        {%- if part.type == 'audio' -%}
            {%- if found.has_system -%}
                {{- raise_exception('the model was not trained for a system message beside a clip; leave it out') -}}
            {%- endif -%}
            {{- '[BEGIN_AUDIO][AUDIO]' -}}
        {%- else -%}
            {{- '\n\n' if not loop.first and loop.previtem.type == 'text' -}}
            {{- part.text -}}
        {%- endif -%}
    {%- endfor -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {{- '[SYSTEM_PROMPT]' + write(message.content) + '[/SYSTEM_PROMPT]' -}}
    {%- elif message.role == 'user' -%}
        {%- if tools and loop.index == found.last -%}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {{- '[INST]' + write(message.content) + '[/INST]' -}}
    {%- elif message.role == 'assistant' -%}
        {{- write(message.content or []).rstrip(' ') -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '[TOOL_CALLS][' if loop.first else ', ' -}}
            {{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson -}}
            {{- ']' if loop.last -}}
        {%- endfor -%}
        {{- eos_token -}}
    {%- elif message.role == 'tool' -%}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' -}}
        {{- message.content if message.content is string else write(message.content) -}}
        {{- '[/TOOL_RESULTS]' -}}
    {%- endif -%}
{%- endfor -%}
"""  # noqa: E501
"""The turns of `mistral-common`'s version 7, which the published tokenizers name."""


@dataclass(frozen=True, kw_only=True)
class VoxtralFeatures:
    """Makes the spectrograms of clips; called as HF's feature extractors are."""

    log_mel: LogMel
    valid_kwargs: ClassVar[Sequence[str]] = ()

    def __call__(self, clips: Sequence[np.ndarray], *, return_tensors: str) -> dict[str, Any]:
        """Return `input_features` float32[units, C, frames], and int32[clips] units of each."""
        units = [self._cut(clip) for clip in clips]
        num_units = np.array([len(one) for one in units], np.int32)
        return {"input_features": np.concatenate(units), "num_units": num_units}

    def _cut(self, clip: np.ndarray) -> np.ndarray:
        """Return the spectrogram of all of a clip, in units."""
        made = self.log_mel
        whole = made(made.pad(clip))
        return whole.reshape(made.feature_size, -1, made.num_frames).swapaxes(0, 1)


class VoxtralProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = AudioEmbedsDataParser
    cuts_clips = True
    host_inputs = VoxtralHostInputs
    limits: ClassVar = {"audio": None}
    placeholders: ClassVar = {"audio": PLACEHOLDER}
    embed_token = AUDIO

    @property
    def transcriber(self) -> VoxtralTranscriber:
        return VoxtralTranscriber(self.get_tokenizer(), self.log_mel.sampling_rate)

    def load_hf_processor(self) -> ProcessorOfParts:
        self.check_token(AUDIO, "audio_token_id")
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(), feature_extractor=VoxtralFeatures(log_mel=self.log_mel)
        )

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        counts = outputs.get("num_units", ())
        return item_fields("audio", units=["input_features"], counts=counts, on_host=["num_units"])

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        return int(tensors["num_units"]) * self.num_unit_tokens

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        super().check_num_embeds(modality, num_embeds)
        each = self.num_unit_tokens
        hint = f"{each} for each {self.log_mel.chunk_length} s that it begins"
        known = range(each, num_embeds + 1, each)
        self.check_rows(modality, num_embeds, known, hint, what="a clip")

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Leave out what HF's model is not told."""
        return {name: value for name, value in tensors.items() if name != "num_units"}


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a checkpoint's directory: of tekken.json, or tokenizer.json.

    `CheckpointError` where it has neither.
    """
    # On use only: it brings an installed torch along.
    from transformers import AutoTokenizer

    if (path / TEKKEN_FILE).is_file():
        return read_tekken(path)
    if not (path / TOKENIZER_FILE).is_file():
        raise CheckpointError(f"`{path}` has neither {TEKKEN_FILE} nor {TOKENIZER_FILE}")
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


FACTORIES = make_factories(VoxtralProcessingInfo, load_tokenizer=load_tokenizer)
