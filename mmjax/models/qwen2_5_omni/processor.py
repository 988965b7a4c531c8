"""Qwen2.5-Omni's and Qwen3-Omni's prompt side: pictures, videos, clips, which become many tokens.

Where videos are heard, `<|VIDEO|>` becomes `<|audio_bos|> <|VIDEO|>*N <|AUDIO|>*M <|VIDEO|>*N ...
<|audio_eos|>`: pieces of two seconds of what is seen and what is heard, by turns. Of Qwen3-Omni,
whose tokens have other names, they come by their times.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import RequestTypeError, check_settings
from mmjax.models.family import WindowedClipsInfo, item_fields, make_factories
from mmjax.models.grid_family import SECONDS_OF_STEPS, GridInfo, TimedDataParser
from mmjax.models.qwen2_5_omni.host_inputs import Qwen3OmniHostInputs, Qwen25OmniHostInputs
from mmjax.processing.answers import JSON_IN_PIXELS, JSON_IN_THOUSANDTHS
from mmjax.processing.chat_turns import QWEN_SYSTEM, write_chatml, write_parts
from mmjax.processing.image_processors.frames import read_speed, split_pairs
from mmjax.processing.image_processors.parts import ProcessorOfParts
from mmjax.processing.image_processors.patches import TimedVideoPatcher
from mmjax.processing.items.items import (
    ModalityDataItems,
    MultiModalDataItems,
    VideoProcessorItems,
)
from mmjax.processing.items.parse import MultiModalDataParser
from mmjax.processing.media.audio import AudioSpec, long_clip_error, parse_audio, unheard_clip_error
from mmjax.processing.media.encoded import EncodedAudio
from mmjax.processing.media.log_mel import LogMel
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.rounding import cdiv

PLACEHOLDERS = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
QWEN3_PLACEHOLDERS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
}
USE_AUDIO = "use_audio_in_video"
"""The name in `mm_processor_kwargs` of whether videos are heard, as in vLLM."""
SOUND = "sound"
"""What metadata of a video call its samples."""


@dataclass(frozen=True, kw_only=True)
class OmniFeatures:
    """Makes the spectrograms of clips; called as HF's feature extractors are."""

    log_mel: LogMel
    count: Callable[[int], int]
    """How many embeddings are made of so many frames."""
    valid_kwargs: ClassVar[Sequence[str]] = ()

    def __call__(self, clips: Sequence[np.ndarray], *, return_tensors: str) -> dict[str, Any]:
        """Return the frames of all clips, float32[frames, bins], and their numbers."""
        for clip in clips:
            if not self.count_rows(clip):
                rate = self.log_mel.sampling_rate
                raise unheard_clip_error(len(clip), rate, self.most_unheard)
        found = [self.make_frames(clip, "a clip", "audio") for clip in clips]
        return {
            "input_features": np.concatenate(found),
            "num_clip_frames": np.array([len(frames) for frames in found]),
        }

    @property
    def most_unheard(self) -> int:
        """The most samples of which no embedding is made."""
        return 2 * self.log_mel.hop_length

    def count_rows(self, samples: np.ndarray) -> int:
        """Return how many embeddings are made of samples."""
        return self.count(cdiv(len(samples), self.log_mel.hop_length))

    def make_frames(self, samples: np.ndarray, what: str, modality: str) -> np.ndarray:
        """Return float32[frames, bins] of samples at the model's rate; errors name `what`."""
        made = self.log_mel
        if len(samples) > made.num_samples:
            seconds = len(samples) / made.sampling_rate
            raise long_clip_error(seconds, made.chunk_length, what=what, modality=modality)
        num_frames = cdiv(len(samples), made.hop_length)
        # HF pads to the longest clip that there may be: of its silence, what a frame reaches.
        end = min(made.num_samples, (num_frames + 1) * made.hop_length + made.n_fft)
        padded = np.pad(samples, (0, max(end - len(samples), 0)))
        return made(padded)[:, :num_frames].T


class Qwen3OmniFeatures(OmniFeatures):
    """The same of clips of any length, without silence behind them: as HF's, given one alone."""

    @property
    def most_unheard(self) -> int:
        # HF's mirrors so many at either end.
        return max(self.log_mel.n_fft // 2, self.log_mel.hop_length - 1)

    def count_rows(self, samples: np.ndarray) -> int:
        if len(samples) <= self.most_unheard:
            return 0
        return self.count(len(samples) // self.log_mel.hop_length)

    def make_frames(self, samples: np.ndarray, what: str, modality: str) -> np.ndarray:
        return self.log_mel(samples).T


class OmniVideoPatcher(TimedVideoPatcher):
    """The same, with the sound that metadata have."""

    features: OmniFeatures
    """Of sounds."""
    usual_fps: ClassVar[float] = 2.0
    """Of videos whose speed nobody says, as in HF."""

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return super().valid_kwargs | {USE_AUDIO}

    def __call__(
        self, videos: Sequence[Any], *, use_audio_in_video: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Return what that of Qwen2.5-VL does; beside it the frames of all sounds, if it is asked.

        `sound_features` float32[frames, bins], and `num_sound_frames` int64[videos], of which a
        silent video has none.
        """
        fps = read_speed(kwargs) or self.usual_fps
        timed = [
            (frames, {"fps": fps} if metadata.get("fps") is None else metadata)
            for frames, metadata in split_pairs(videos)
        ]
        outputs = super().__call__(timed, **kwargs)
        if not use_audio_in_video:
            return outputs
        found = [self._make_frames(metadata) for _, metadata in split_pairs(videos)]
        return outputs | {
            "sound_features": np.concatenate(found),
            "num_sound_frames": np.array([len(frames) for frames in found]),
        }

    def _make_frames(self, metadata: Mapping[str, Any]) -> np.ndarray:
        sound = metadata.get(SOUND)
        if sound is None or not self.features.count_rows(sound):
            return np.empty((0, self.features.log_mel.feature_size), np.float32)
        return self.features.make_frames(sound, "a video's sound", "video")


class Qwen3OmniVideoPatcher(OmniVideoPatcher):
    usual_fps = 1.0


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

    def _parse_video_data(self, data: Any) -> ModalityDataItems | None:
        """Take the sound that metadata have, in samples as a clip's."""
        items = super()._parse_video_data(data)
        if not isinstance(items, VideoProcessorItems):
            return items
        spec = AudioSpec(self.target_sr, self.target_channels)
        for index, metadata in enumerate(items.metadata):
            if metadata is None or metadata.get(SOUND) is None:
                continue
            param = f"multi_modal_data.video[{index}].{SOUND}"
            sound = parse_audio(metadata[SOUND], spec, self.limits, param=param)
            if isinstance(sound, EncodedAudio):
                raise RequestTypeError(
                    f"{param} is a file; give its samples: (samples, sampling rate)", param=param
                )
            items.metadata[index] = {**metadata, SOUND: sound}
            items.data[index] = (items.data[index][0], items.metadata[index])
        return items


class Qwen25OmniProcessingInfo(GridInfo):
    chat_template = write_chatml(write_parts(**PLACEHOLDERS), QWEN_SYSTEM)
    host_inputs = Qwen25OmniHostInputs
    answer_form = JSON_IN_PIXELS
    data_parser = OmniDataParser
    video_patcher = OmniVideoPatcher
    placeholders: ClassVar = PLACEHOLDERS
    sound_limits: ClassVar = {"audio": None}
    features: ClassVar[type[OmniFeatures]] = OmniFeatures

    def choose_video_settings(self, own: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the default's number of pixels, whatever the files say, as HF's processor does."""
        kept = {k: v for k, v in own.items() if k not in ("size", "min_pixels", "max_pixels")}
        return {**kept, **self.video_defaults}

    @cached_property
    def log_mel(self) -> LogMel:
        made = LogMel.from_settings(self.load_feature_settings())
        expected = {"feature_size": self.get_hf_config().audio_config.num_mel_bins}
        source = "`audio_config.num_mel_bins` of config.json is"
        check_settings(made, expected, where="the feature extractor", source=source)
        return made

    def load_hf_processor(self) -> ProcessorOfParts:
        features = self.features(log_mel=self.log_mel, count=self.own_inputs.count_rows)
        parts = super().load_hf_processor()
        parts.video_processor.features = features
        return replace(parts, feature_extractor=features)

    def hears_videos(self, mm_kwargs: Mapping[str, object]) -> bool:
        """Return whether videos are heard; `RequestTypeError` for what says neither."""
        asked = self.scope_kwargs(mm_kwargs, "videos_kwargs").get(USE_AUDIO, False)
        if not isinstance(asked, bool):
            raise RequestTypeError(
                f"`{USE_AUDIO}` is {str(asked)[:64]!r} in mm_processor_kwargs; it must be true or "
                "false",
                param="mm_processor_kwargs",
            )
        return asked

    def choose_items(
        self, mm_items: MultiModalDataItems, mm_kwargs: Mapping[str, object]
    ) -> MultiModalDataItems:
        """Have the files of videos heard as well, if it is asked."""
        mm_items = super().choose_items(mm_items, mm_kwargs)
        videos = mm_items.get("video")
        if not self.hears_videos(mm_kwargs) or not isinstance(videos, VideoProcessorItems):
            return mm_items
        heard = {**mm_items, "video": videos.with_sound(self.log_mel.sampling_rate)}
        return MultiModalDataItems(heard).with_cancellation(mm_items.cancellation)

    def find_longest_clip(self, mm_counts: Mapping[str, int]) -> tuple[int, int]:
        most = self.own_inputs.count_rows(self.log_mel.num_frames)
        number = min(most, self.ctx.model_config.max_model_len)
        return number * 4 * self.log_mel.hop_length, number

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        return {
            **item_fields(
                "video",
                units=["sound_features"],
                counts=outputs.get("num_sound_frames", ()),
                on_host=["num_sound_frames"],
            ),
            **super().get_fields(outputs),
            **SECONDS_OF_STEPS,
            **item_fields(
                "audio",
                units=["input_features"],
                counts=outputs.get("num_clip_frames", ()),
                on_host=["num_clip_frames"],
            ),
        }

    def get_embed_token_ids(self, modality: str) -> Sequence[int]:
        heard = [self.get_embed_token_id("audio")] * (modality == "video")
        return [self.get_embed_token_id(modality), *heard]

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> Hashable:
        host_inputs = self.own_inputs
        if modality == "audio":
            return host_inputs.count_rows(int(tensors["num_clip_frames"]))
        if host_inputs.count_sound(tensors):
            return tuple(host_inputs.find_pieces(tensors))
        return super().measure_item(modality, tensors)

    def write_item(self, modality: str, size: Any) -> list[int]:
        if isinstance(size, int):
            return super().write_item(modality, size)
        config = self.get_hf_config()
        cell, sound = config.video_token_id, config.audio_token_id
        tokens = [config.audio_start_token_id]
        for piece in size:
            tokens += [sound if piece.is_sound else cell] * (piece.end - piece.start)
        return [*tokens, self.get_sound_end()]

    def get_sound_end(self) -> int:
        """Return the token behind what is heard."""
        return self.get_hf_config().audio_end_token_id

    def count_padded_frames(self, num_frames: np.ndarray) -> int:
        """Return to how many frames HF's processor pads clips of so many."""
        return self.log_mel.num_frames

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Say HF's names; pad clips as its processor does."""
        kept = dict(tensors)
        if "second_per_grid_ts" in kept:
            kept["video_second_per_grid"] = kept.pop("second_per_grid_ts")
        is_heard = "num_sound_frames" in kept
        sounds = self._split_frames(kept, "sound_features", "num_sound_frames")
        clips = self._split_frames(kept, "input_features", "num_clip_frames")
        if not sounds and not clips:
            return kept
        # In the order of the prompt, in which a video's sound begins right behind its own mark.
        config, ids = self.get_hf_config(), [-1, *token_ids]
        starts = [at for at, one in enumerate(ids) if one == config.audio_start_token_id]
        behind = config.vision_start_token_id
        found = [(sounds if ids[at - 1] == behind else clips).pop(0) for at in starts]
        counts = np.array([len(frames) for frames in found])
        mask = np.arange(self.count_padded_frames(counts))[None, :] < counts[:, None]
        padded = np.zeros((*mask.shape, self.log_mel.feature_size), np.float32)
        padded[mask] = np.concatenate(found)
        kept["input_features"] = padded.transpose(0, 2, 1)
        kept["feature_attention_mask"] = mask.astype(np.int64)
        return {**kept, USE_AUDIO: np.array(True)} if is_heard else kept

    @staticmethod
    def _split_frames(tensors: dict[str, Any], name: str, counts: str) -> list[np.ndarray]:
        """Take the frames of clips, or of sounds, out of a prompt's tensors."""
        if counts not in tensors:
            return []
        ends = np.cumsum(np.reshape(tensors.pop(counts), -1))
        found = np.split(np.asarray(tensors.pop(name)), ends[:-1])
        return [frames for frames in found if len(frames)]


class Qwen3OmniProcessingInfo(WindowedClipsInfo, Qwen25OmniProcessingInfo):
    chat_template = write_chatml(write_parts(**QWEN3_PLACEHOLDERS))
    host_inputs = Qwen3OmniHostInputs
    answer_form = JSON_IN_THOUSANDTHS
    video_patcher = Qwen3OmniVideoPatcher
    placeholders: ClassVar = QWEN3_PLACEHOLDERS
    features = Qwen3OmniFeatures
    video_defaults: ClassVar = {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
    }

    def get_sound_end(self) -> int:
        return self.get_token_id(self.find_token("audio_eos_token", "<|audio_end|>"))

    def count_padded_frames(self, num_frames: np.ndarray) -> int:
        return int(num_frames.max())


FACTORIES = make_factories(Qwen25OmniProcessingInfo)
QWEN3_FACTORIES = make_factories(Qwen3OmniProcessingInfo)
