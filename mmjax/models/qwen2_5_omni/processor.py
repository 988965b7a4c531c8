"""Qwen2.5-Omni's prompt side: pictures, videos and clips, each token of which becomes many.

A video's sound is not heard: send it as a clip.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import CheckpointError, RequestValueError
from mmjax.models.family import item_fields, make_factories
from mmjax.models.grid_family import SECONDS_OF_STEPS, GridInfo, TimedDataParser
from mmjax.models.qwen2_5_omni.host_inputs import Qwen25OmniHostInputs
from mmjax.processing.image_processors.frames import split_pairs
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_feature_settings
from mmjax.processing.image_processors.patches import TimedVideoPatcher
from mmjax.processing.items.parse import MultiModalDataParser
from mmjax.processing.media.log_mel import LogMel
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.rounding import cdiv

CHAT_TEMPLATE = r"""
{%- if messages[0].role != 'system' -%}
    {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' -}}
    {%- for part in message.content -%}
        {%- if part.type == 'image' -%}
            {{- '<|vision_bos|><|IMAGE|><|vision_eos|>' -}}
        {%- elif part.type == 'video' -%}
            {{- '<|vision_bos|><|VIDEO|><|vision_eos|>' -}}
        {%- elif part.type == 'audio' -%}
            {{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}
        {%- else -%}
            {{- part.text -}}
        {%- endif -%}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""
"""Of a checkpoint without a chat template."""
FRAMES_PER_SECOND = 2.0
"""Of videos whose speed nobody says, as in HF."""
_PARAM = "multi_modal_data.audio"


class OmniVideoPatcher(TimedVideoPatcher):
    """The same; frames of which no speed is known are two a second."""

    def __call__(self, videos: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """Return what that of Qwen2.5-VL does."""
        timed = [
            (frames, {"fps": FRAMES_PER_SECOND} if metadata.get("fps") is None else metadata)
            for frames, metadata in split_pairs(videos)
        ]
        return super().__call__(timed, **kwargs)


@dataclass(frozen=True, kw_only=True)
class OmniFeatures:
    """Makes the spectrograms of clips; called as HF's feature extractors are."""

    log_mel: LogMel
    valid_kwargs: ClassVar[Sequence[str]] = ()

    def __call__(self, clips: Sequence[np.ndarray], *, return_tensors: str) -> dict[str, Any]:
        """Return the frames of all clips, float32[frames, bins], and their numbers."""
        found = [self._make_frames(clip) for clip in clips]
        return {
            "input_features": np.concatenate(found),
            "num_clip_frames": np.array([len(frames) for frames in found]),
        }

    def _make_frames(self, clip: np.ndarray) -> np.ndarray:
        made, seconds = self.log_mel, len(clip) / self.log_mel.sampling_rate
        if len(clip) > made.num_samples:
            raise RequestValueError(
                f"a clip lasts {seconds:.1f} s, and the model hears {made.chunk_length} s at once; "
                "cut it, and send its parts as several",
                param=_PARAM,
            )
        num_frames = cdiv(len(clip), made.hop_length)
        if Qwen25OmniHostInputs.count_rows(num_frames) < 1:
            raise RequestValueError(
                f"a clip has {len(clip)} samples, {seconds:.3f} s, of which no embedding is made; "
                f"send one of more than {2 * made.hop_length}",
                param=_PARAM,
            )
        # HF pads to the longest clip that there may be: of its silence, what a frame reaches.
        end = min(made.num_samples, (num_frames + 1) * made.hop_length + made.n_fft)
        padded = np.pad(clip, (0, max(end - len(clip), 0)))
        return made(padded)[:, :num_frames].T


class OmniDataParser(TimedDataParser):
    """Takes the embeddings of clips as they are."""

    embedding_fields: ClassVar = {
        **TimedDataParser.embedding_fields,
        "audio": {"audio_embeds": "values"},
    }

    def _holds_embeddings(self, modality: str, data: Any) -> bool:
        if modality == "audio":  # which need no grid
            return MultiModalDataParser.is_embeddings(data)
        return super()._holds_embeddings(modality, data)


class Qwen25OmniProcessingInfo(GridInfo):
    chat_template = CHAT_TEMPLATE
    host_inputs = Qwen25OmniHostInputs
    box_unit = "pixels"
    parser = OmniDataParser
    video_patcher = OmniVideoPatcher
    placeholders: ClassVar = {
        "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
        "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    }

    def choose_video_settings(self, own: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the default's number of pixels, whatever the files say, as HF's processor does."""
        kept = {k: v for k, v in own.items() if k not in ("size", "min_pixels", "max_pixels")}
        return {**kept, **self.video_defaults}

    @property
    def audio_rate(self) -> int:
        return self.log_mel.sampling_rate

    @cached_property
    def log_mel(self) -> LogMel:
        made = LogMel.from_settings(load_feature_settings(self.ctx.model_config.path))
        num_bins = self.get_hf_config().audio_config.num_mel_bins
        if made.feature_size != num_bins:
            raise CheckpointError(
                f"`feature_size` of the feature extractor is {made.feature_size}, but "
                f"`audio_config.num_mel_bins` of config.json is {num_bins}; make them equal"
            )
        return made

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {**self.limits, "audio": None}

    def get_data_parser(self) -> MultiModalDataParser:
        return self.parser(
            merge_size=self.merge_size,
            target_sr=self.audio_rate,
            target_channels=1,
            limits=self.get_media_limits(),
            expected_hidden_size=self.get_expected_hidden_size(),
        )

    def load_hf_processor(self) -> ProcessorOfParts:
        features = OmniFeatures(log_mel=self.log_mel)
        return replace(super().load_hf_processor(), feature_extractor=features)

    def get_longest_clip(self, seq_len: int, mm_counts: Mapping[str, int]) -> int:
        return self.get_max_clip_tokens() * 4 * self.log_mel.hop_length

    def get_max_clip_tokens(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> int:
        most = Qwen25OmniHostInputs.count_rows(self.log_mel.num_frames)
        return min(most, self.ctx.model_config.max_model_len)

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        most = super().get_mm_max_tokens_per_item(seq_len, mm_counts)
        return {**most, "audio": self.get_max_clip_tokens()}

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        return {
            **super().get_fields(outputs),
            **SECONDS_OF_STEPS,
            **item_fields(
                "audio",
                units=["input_features"],
                counts=outputs.get("num_clip_frames", ()),
                on_host=["num_clip_frames"],
            ),
        }

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        if modality == "audio":
            return Qwen25OmniHostInputs.count_rows(int(tensors["num_clip_frames"]))
        return self.count_cells(tensors[f"{modality}_grid_thw"])

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Say HF's names; pad clips to the longest that there may be, as its processor does."""
        kept = dict(tensors)
        if "second_per_grid_ts" in kept:
            kept["video_second_per_grid"] = kept.pop("second_per_grid_ts")
        if "num_clip_frames" in kept:
            counts = np.asarray(kept.pop("num_clip_frames"))
            mask = np.arange(self.log_mel.num_frames)[None, :] < counts[:, None]
            padded = np.zeros((*mask.shape, self.log_mel.feature_size), np.float32)
            padded[mask] = kept["input_features"]
            kept["input_features"] = padded.transpose(0, 2, 1)
            kept["feature_attention_mask"] = mask.astype(np.int64)
        return kept


FACTORIES = make_factories(Qwen25OmniProcessingInfo)
