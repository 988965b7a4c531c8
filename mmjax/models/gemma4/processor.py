"""Gemma 4's prompt side: an image's tokens stand between marks, a video's frame by frame.

Before: `look <|image|>`. After: `look <|image> <|image|>*N <image|>`, of which the N take
embeddings. A video's `<|video|>` becomes `00:00 <|image> <|video|>*N <image|> 00:01 ...`: minutes
and seconds before each frame. A clip's `<|audio|>` becomes `<|audio> <|audio|>*N <audio|>`, one of
the N for 40 ms; models without `audio_config` hear none.

Gemma 4's clips -> what its encoder of sounds takes: spectrograms, or samples as they are.

HF cuts a clip of more than 30 s without a word; here it is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import CheckpointError, RequestValueError, check_settings
from mmjax.models.family import FamilyInfo, FamilyProcessor, item_fields, make_factories
from mmjax.models.gemma4.host_inputs import (
    FRAMES_PER_ROW,
    Gemma4HostInputs,
    Gemma4UnifiedHostInputs,
)
from mmjax.processing.chat_turns import write_parts, write_turns
from mmjax.processing.image_processors.parts import (
    ProcessorOfParts,
    load_image_settings,
    load_video_settings,
)
from mmjax.processing.image_processors.token_budget import (
    TokenBudgetPatcher,
    TokenBudgetVideoPatcher,
)
from mmjax.processing.items.parse import (
    ImageSize,
    MultiModalDataItems,
    MultiModalDataParser,
)
from mmjax.processing.media.audio import long_clip_error, unheard_clip_error
from mmjax.processing.prompt_updates.updates import as_ids
from mmjax.processing.tensors.fields import MultiModalFieldConfig

SAMPLING_RATE = 16_000


@dataclass(frozen=True, kw_only=True)
class SampleFrames:
    """Takes samples of clips as they are; called as HF's feature extractors are."""

    samples_per_row: int
    """Of which an embedding is made."""
    max_rows: int
    """Embeddings that a clip may have."""
    valid_kwargs: ClassVar[Sequence[str]] = ()

    @property
    def num_samples(self) -> int:
        """Of a clip, at most."""
        return self.max_rows * self.samples_per_row

    def __call__(self, clips: Sequence[np.ndarray], *, return_tensors: str) -> dict[str, Any]:
        """Return the frames of all clips, float32[frames, values], and their numbers.

        `num_clip_frames` int64[clips, 2]: of a clip's frames, and of those that are all sound.
        """
        found = []
        for clip in clips:
            if len(clip) > self.num_samples:
                raise long_clip_error(len(clip) / SAMPLING_RATE, self.num_samples / SAMPLING_RATE)
            found.append(self.make_frames(clip))
        return {
            "input_features": np.concatenate([frames for frames, _ in found]),
            "num_clip_frames": np.array([(len(frames), number) for frames, number in found]),
        }

    def make_frames(self, clip: np.ndarray) -> tuple[np.ndarray, int]:
        """Return a clip's frames, and how many are all sound."""
        size = self.samples_per_row
        frames = np.pad(clip, (0, -len(clip) % size)).reshape(-1, size).astype(np.float32)
        return frames, len(frames)


@dataclass(frozen=True, kw_only=True)
class SpectrogramFrames(SampleFrames):
    """Makes spectrograms of clips."""

    extractor: Any
    """HF's."""

    def make_frames(self, clip: np.ndarray) -> tuple[np.ndarray, int]:
        # One at a time: how HF pads a clip depends on those beside it, what is sound does not.
        outputs = self.extractor([clip], truncation=False, return_tensors="np")
        number = int(outputs["input_features_mask"][0].sum())
        if not number:
            raise unheard_clip_error(len(clip), SAMPLING_RATE, self.extractor.hop_length)
        return outputs["input_features"][0], number


def as_batch(features: np.ndarray, num_clip_frames: np.ndarray) -> dict[str, np.ndarray]:
    """Return the frames of clips as HF's processor does: a row a clip, padded, and a mask."""
    counts, numbers = num_clip_frames.T
    mask = np.arange(counts.max())[None, :] < numbers[:, None]
    padded = np.zeros((*mask.shape, features.shape[1]), np.float32)
    padded[np.arange(counts.max())[None, :] < counts[:, None]] = features
    return {"input_features": padded, "input_features_mask": mask}


CHAT_TEMPLATE = write_turns(
    start=r"'<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n'",
    content=write_parts("part.text | trim if part.type == 'text' else '<|' + part.type + '|>'"),
    end=r"'<turn|>\n'",
    answer=r"'<|turn>model\n'",
)
"""Of a checkpoint without a chat template: Gemma 4's turns, without thinking and tools."""
Frames = tuple[tuple[str, ...], int]
"""What stands before each frame of a video, and how many embeddings each has."""


class Gemma4DataParser(MultiModalDataParser):
    embedding_fields: ClassVar = {
        "image": {"image_embeds": "values"},
        "audio": {"audio_embeds": "values"},
    }
    keeps_metadata = True


class Gemma4ProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = Gemma4DataParser
    host_inputs = Gemma4HostInputs
    limits: ClassVar = {"image": None, "video": None}
    sound_limits: ClassVar = {"audio": None}
    placeholders: ClassVar = {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"}
    has_squares: ClassVar[bool] = False
    """Whether a square of patches is cut out as one."""

    @property
    def hears(self) -> bool:
        """Whether the model takes clips."""
        return self.get_hf_config().audio_config is not None

    @property
    def audio_rate(self) -> int | None:
        return SAMPLING_RATE if self.hears else None

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return super().get_supported_mm_limits() if self.hears else self.limits

    def load_hf_processor(self) -> ProcessorOfParts:
        """Put together what AutoProcessor would, which wants torchvision."""
        path, config = self.ctx.model_config.path, self.get_hf_config()
        vision = config.vision_config
        if vision is None:
            raise CheckpointError(
                "`vision_config` of config.json is missing: a model of text; mmjax serves Gemma 4 "
                "with its tower"
            )
        for modality in self.supported_mm_limits:
            self.check_token(self.placeholders[modality], f"{modality}_token_id")
        sizes = {
            "patch_size": vision.patch_size,
            "pooling_size": vision.pooling_kernel_size,
            "has_squares": self.has_squares,
        }
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=TokenBudgetPatcher(
                load_image_settings(path, are_needed=False), **sizes
            ),
            video_processor=TokenBudgetVideoPatcher(load_video_settings(path), **sizes),
            feature_extractor=self.load_features() if self.hears else None,
        )

    def load_features(self) -> SampleFrames:
        """Return what makes the encoder's inputs of clips; `CheckpointError` for others."""
        settings = self.load_feature_settings()
        if settings.get("dither"):
            raise CheckpointError(
                f"`dither` of the feature extractor is {settings['dither']}: noise, by which equal "
                "clips would differ; expected 0.0"
            )
        # On use only, as HF's image processors.
        module = import_module("transformers.models.gemma4.feature_extraction_gemma4")
        num_mel_bins = self.get_hf_config().audio_config.subsampling_conv_channels[0]
        found, expected = {"feature_size": 128, **settings}, {"feature_size": num_mel_bins}
        source = "`subsampling_conv_channels` takes"
        check_settings(found, expected, where="the feature extractor", source=source)
        own = module.Gemma4AudioFeatureExtractor(**settings)
        size = FRAMES_PER_ROW * own.hop_length
        return SpectrogramFrames(samples_per_row=size, max_rows=self.max_clip_rows, extractor=own)

    def load_feature_settings(self) -> Mapping[str, Any]:
        settings, expected = super().load_feature_settings(), {"sampling_rate": SAMPLING_RATE}
        check_settings(settings, expected, where="the feature extractor", source="mmjax takes")
        return settings

    @property
    def max_clip_rows(self) -> int:
        """How many embeddings a clip may have."""
        return self.processor_settings.get("audio_seq_length", 750)

    # ---- sizes -----------------------------------------------------------------------------------

    def get_budget(self, modality: str, *, is_planned: bool = True) -> int:
        """Return how many embeddings a picture or a frame may have: the operator's, or planned."""
        part: TokenBudgetPatcher = getattr(self.get_hf_processor(), f"{modality}_processor")
        kwargs = self.get_planned_mm_kwargs() if is_planned else {}
        return part.resolve(self.scope_kwargs(kwargs, f"{modality}s_kwargs"))["max_soft_tokens"]

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger of the checkpoint's budget and the operator's."""
        parts = self.get_hf_processor()

        def find_most(modality: str) -> int:
            own = getattr(parts, f"{modality}_processor").settings["max_soft_tokens"]
            return max(own, self.get_budget(modality, is_planned=False))

        return {f"{m}s_kwargs": {"max_soft_tokens": find_most(m)} for m in self.limits}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        budget = self.get_budget("image")
        return self.get_image_processor().find_largest(budget), budget

    def find_largest_frame(self) -> tuple[ImageSize, int]:
        budget = self.get_budget("video")
        return self.get_hf_processor().video_processor.find_largest(budget), budget

    def get_max_frames(self, seq_len: int | None, mm_counts: Mapping[str, int] | None) -> int:
        """Return those of a whole prompt, not of a step.

        Every video of 32 seconds and more has all that are sampled.
        """
        return super().get_max_frames(None, mm_counts)

    def find_longest_clip(self, mm_counts: Mapping[str, int]) -> tuple[int, int]:
        return self.get_hf_processor().feature_extractor.num_samples, self.max_clip_rows

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        if modality == "audio":
            super().check_num_embeds(modality, num_embeds)
            most, what = self.max_clip_rows, "a clip"
            hint = f"{most} at most"
        else:
            most, what = self.get_budget("image"), "an image"
            hint = f"1 to {most}"
        self.check_rows(modality, num_embeds, range(1, most + 1), hint, what=what)

    # ---- tokens ----------------------------------------------------------------------------------

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        return {
            **item_fields(
                "image",
                rows=["pixel_values", "image_position_ids"],
                on_host=["num_soft_tokens_per_image"],
            ),
            **item_fields(
                "video",
                units=["pixel_values_videos", "video_position_ids"],
                counts=outputs.get("num_frames_per_video", ()),
                on_host=["num_frames_per_video", "num_soft_tokens_per_video"],
                units_on_host=["timestamps"],
            ),
            **item_fields(
                "audio",
                units=["input_features"],
                counts=np.reshape(outputs.get("num_clip_frames", ()), (-1, 2))[:, 0],
                on_host=["num_clip_frames"],
            ),
        }

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int | Frames:
        if modality == "audio":
            _, number = tensors["num_clip_frames"]
            return self.own_inputs.count_rows(int(number))
        num_embeds = int(tensors[f"num_soft_tokens_per_{modality}"])
        if modality == "image":
            return num_embeds
        whole = [int(second) for second in tensors["timestamps"]]
        return tuple(f"{second // 60:02d}:{second % 60:02d}" for second in whole), num_embeds

    def write_item(self, modality: str, size: Any) -> list[int]:
        if modality == "audio":
            start, end = (
                self.get_token_id(self.find_token(name, default))
                for name, default in (("boa_token", "<|audio>"), ("eoa_token", "<audio|>"))
            )
            return [start, *[self.get_embed_token_id(modality)] * size, end]
        config, tokenizer = self.get_hf_config(), self.get_tokenizer()
        times, num_embeds = (("",), size) if modality == "image" else size
        embeds = [self.get_embed_token_id(modality)] * num_embeds
        tokens: list[int] = []
        for number, time in enumerate(times):
            before = f"{' ' * (number > 0)}{time} " if time else ""
            tokens += as_ids(before, tokenizer) if before else []
            tokens += [config.boi_token_id, *embeds, config.eoi_token_id]
        return tokens

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Pad clips to the longest, as HF's processor does."""
        if "num_clip_frames" not in tensors:
            return tensors
        kept = dict(tensors)
        numbers = np.reshape(kept.pop("num_clip_frames"), (-1, 2))
        return {**kept, **as_batch(np.asarray(kept["input_features"]), numbers)}


class Gemma4MultiModalProcessor(FamilyProcessor[Gemma4ProcessingInfo]):
    def _create_prompts(
        self,
        prompt: str | list[int],
        mm_items: MultiModalDataItems,
        decoder_prompt: str | list[int] | None,
    ) -> tuple[str | list[int], str | list[int] | None]:
        """Refuse the mark of a clip where HF's model, which has no tower, would expect one."""
        token_id = self.info.get_hf_config().audio_token_id
        if token_id is not None and not self.info.hears:
            mark = self.info.get_tokenizer().decode([token_id])
            if (mark if isinstance(prompt, str) else token_id) in prompt:
                raise RequestValueError(
                    f"prompt has `{mark}`, the mark of a clip, and this model hears none (no "
                    "`audio_config` in config.json): leave it out",
                    param="prompt",
                )
        return super()._create_prompts(prompt, mm_items, decoder_prompt)


FACTORIES = make_factories(Gemma4ProcessingInfo, Gemma4MultiModalProcessor)


class Gemma4UnifiedProcessingInfo(Gemma4ProcessingInfo):
    host_inputs = Gemma4UnifiedHostInputs
    has_squares = True

    def load_features(self) -> SampleFrames:
        size = self.get_hf_config().audio_config.audio_embed_dim
        expected, source = {"audio_samples_per_token": size}, "`audio_embed_dim` takes"
        settings, where = self.load_feature_settings(), "the feature extractor"
        check_settings(settings, expected, where=where, source=source)
        return SampleFrames(samples_per_row=size, max_rows=self.max_clip_rows)


UNIFIED_FACTORIES = make_factories(Gemma4UnifiedProcessingInfo, Gemma4MultiModalProcessor)
