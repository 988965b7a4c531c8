"""The largest legal input of a model, made up: for memory planning, warm-up and dummy text."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
from PIL import Image

from mmjax.processing.context import InfoT
from mmjax.processing.items.parse import ImageSize, MultiModalDataDict
from mmjax.system.logger import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseDummyOptions:
    """What an operator may say of a modality's largest input."""

    count: int = 999


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDummyOptions(BaseDummyOptions):
    width: int | None = None
    height: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoDummyOptions(BaseDummyOptions):
    num_frames: int | None = None
    width: int | None = None
    height: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioDummyOptions(BaseDummyOptions):
    length: int | None = None
    """In samples."""


_OPTIONS: Mapping[str, Callable[..., BaseDummyOptions]] = {
    "image": ImageDummyOptions,
    "video": VideoDummyOptions,
    "audio": AudioDummyOptions,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorInputs:
    """What `BaseMultiModalProcessor.apply` takes."""

    prompt: str | list[int]
    mm_data: MultiModalDataDict
    hf_processor_mm_kwargs: Mapping[str, object] = field(default_factory=dict)


class BaseDummyInputsBuilder(ABC, Generic[InfoT]):
    """Makes the inputs that give the most embeddings per item."""

    def __init__(self, info: InfoT) -> None:
        self.info = info

    @abstractmethod
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """Return the shortest text that the HF processor takes with these items."""

    @abstractmethod
    def get_dummy_mm_data(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: Mapping[str, BaseDummyOptions] | None = None,
    ) -> MultiModalDataDict:
        """Return the largest items."""

    def get_dummy_mm_kwargs(self) -> Mapping[str, object]:
        """Return the processor kwargs under which the items are largest."""
        return self.info.get_planned_mm_kwargs()

    def get_mm_options(self, modality: str) -> BaseDummyOptions:
        """Return what the operator's `limit_mm_per_prompt` says of the largest item."""
        mm = self.info.ctx.get_mm_config()
        make = _OPTIONS.get(modality, BaseDummyOptions)
        return make(count=mm.limit(modality), **mm.media_options(modality))

    def get_dummy_processor_inputs(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: Mapping[str, BaseDummyOptions] | None = None,
    ) -> ProcessorInputs:
        """Return prompt, items and kwargs for `BaseMultiModalProcessor.apply`.

        `mm_options` stand for those of `limit_mm_per_prompt`.
        """
        if mm_options is None:
            mm_options = {modality: self.get_mm_options(modality) for modality in mm_counts}
        return ProcessorInputs(
            prompt=self.get_dummy_text(mm_counts),
            mm_data=self.get_dummy_mm_data(seq_len, mm_counts, mm_options),
            hf_processor_mm_kwargs=self.get_dummy_mm_kwargs(),
        )

    def _get_dummy_images(
        self,
        *,
        width: int,
        height: int,
        num_images: int,
        overrides: BaseDummyOptions | None = None,
    ) -> Sequence[Image.Image]:
        """Return one white image, `num_images` times; overrides can only shrink it."""
        if num_images == 0:
            return []
        width = _shrink("width", width, overrides)
        height = _shrink("height", height, overrides)
        return [Image.new("RGB", (width, height), color=(255, 255, 255))] * num_images

    def _get_dummy_videos(
        self,
        *,
        size: ImageSize,
        num_frames: int,
        num_videos: int,
        overrides: BaseDummyOptions | None = None,
    ) -> Sequence[np.ndarray]:
        """Return one white video, `num_videos` times; overrides can only shrink it."""
        if num_videos == 0:
            return []
        width = _shrink("width", size.width, overrides)
        height = _shrink("height", size.height, overrides)
        num_frames = _shrink("num_frames", num_frames, overrides)
        return [np.full((num_frames, height, width, 3), 255, dtype=np.uint8)] * num_videos

    def _get_dummy_audios(
        self, *, length: int, num_audios: int, overrides: BaseDummyOptions | None = None
    ) -> Sequence[np.ndarray]:
        """Return one silence, `num_audios` times; overrides can only shrink it."""
        if num_audios == 0:
            return []
        return [np.zeros(_shrink("length", length, overrides), dtype=np.float32)] * num_audios


def _shrink(name: str, value: int, overrides: BaseDummyOptions | None) -> int:
    wanted: Any = getattr(overrides, name, None)
    if wanted is None:
        return value
    if wanted > value:
        logger.warning("dummy %s %d is above the model's %d and ignored", name, wanted, value)
    return min(wanted, value)
