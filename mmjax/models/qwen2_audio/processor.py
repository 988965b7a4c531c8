"""Qwen2-Audio's prompt side: each `<|AUDIO|>` becomes one for 40 ms of its clip.

A clip lasts 30 s at most: HF cuts longer ones without a word, here they are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mmjax.models.family import FamilyInfo, item_fields, make_factories
from mmjax.models.qwen2_audio.host_inputs import Qwen2AudioHostInputs
from mmjax.processing.image_processors.parts import ProcessorOfParts
from mmjax.processing.items.parse import AudioEmbedsDataParser
from mmjax.processing.media.audio import long_clip_error, unheard_clip_error
from mmjax.processing.media.log_mel import LogMel
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.rounding import cdiv

AUDIO = "<|AUDIO|>"
PLACEHOLDER = f"<|audio_bos|>{AUDIO}<|audio_eos|>"
CHAT_TEMPLATE = r"""
{%- set audio = namespace(count=0) -%}
{%- for message in messages -%}
    {%- if loop.first and message.role != 'system' -%}
        {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' -}}
    {%- endif -%}
    {{- '<|im_start|>' + message.role + '\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'audio' -%}
                {%- set audio.count = audio.count + 1 -%}
                {{- 'Audio ' ~ audio.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\n' -}}
            {%- else -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""
"""HF's `default_chat_template`."""


@dataclass(frozen=True, kw_only=True)
class Qwen2AudioFeatures:
    """Makes the spectrograms of clips; called as HF's feature extractors are."""

    log_mel: LogMel
    valid_kwargs: ClassVar[Sequence[str]] = ()

    def __call__(self, clips: Sequence[np.ndarray], *, return_tensors: str) -> dict[str, Any]:
        """Return `input_features` float32[clips, C, frames], and int32[clips] frames of sound."""
        num_frames = [self._count_frames(clip) for clip in clips]
        features = np.stack([self.log_mel(self.log_mel.pad(clip)) for clip in clips])
        return {"input_features": features, "num_frames": np.array(num_frames, np.int32)}

    def _count_frames(self, clip: np.ndarray) -> int:
        made, rate = self.log_mel, self.log_mel.sampling_rate
        if len(clip) > made.num_samples:
            raise long_clip_error(len(clip) / rate, made.chunk_length)
        num_frames = cdiv(len(clip), made.hop_length)
        if Qwen2AudioHostInputs.count_rows(num_frames) < 1:
            raise unheard_clip_error(len(clip), rate, 2 * made.hop_length)
        return num_frames


class Qwen2AudioProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = AudioEmbedsDataParser
    host_inputs = Qwen2AudioHostInputs
    limits: ClassVar = {"audio": None}
    placeholders: ClassVar = {"audio": PLACEHOLDER}
    embed_token = AUDIO

    def load_hf_processor(self) -> ProcessorOfParts:
        self.check_token(AUDIO, "audio_token_id")
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            feature_extractor=Qwen2AudioFeatures(log_mel=self.log_mel),
        )

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        return item_fields("audio", rows=["input_features"], on_host=["num_frames"])

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        return Qwen2AudioHostInputs.count_rows(int(tensors["num_frames"]))

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        super().check_num_embeds(modality, num_embeds)
        most, what = self.num_unit_tokens, f"a clip of {self.log_mel.chunk_length} s"
        self.check_rows(modality, num_embeds, range(1, most + 1), f"{most}", what=what)

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Say of each frame whether it is sound, as HF's processor does."""
        if "num_frames" not in tensors:
            return tensors
        most = np.shape(tensors["input_features"])[-1]
        is_sound = np.arange(most) < np.asarray(tensors["num_frames"])[:, None]
        kept = {name: value for name, value in tensors.items() if name != "num_frames"}
        return {**kept, "feature_attention_mask": is_sound.astype(np.int64)}


FACTORIES = make_factories(Qwen2AudioProcessingInfo)
