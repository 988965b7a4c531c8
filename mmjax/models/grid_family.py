"""Rows of families whose items are grids of patches: images and videos of any size.

Before: `<|vision_start|> <|image_pad|> <|vision_end|>`. After: `<|vision_start|>
<|image_pad|>*N <|vision_end|>`, all N take embeddings; N is the item's grid over merge_size^2.
A video is like that, or each of its steps, with its second as text (`StampedGridInfo`).
"""

import copy
from collections.abc import Callable, Hashable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np

from mmjax.errors import RequestValueError, check_settings
from mmjax.models.family import FamilyInfo, item_fields
from mmjax.models.grid_inputs import GridHostInputs
from mmjax.processing.chat_turns import write_chatml, write_parts
from mmjax.processing.image_processors.frames import DEFAULT_FPS, MIN_FPS, Timing, check_fps
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_video_settings
from mmjax.processing.image_processors.patches import BytePatches, ImagePatcher, VideoPatcher
from mmjax.processing.image_processors.pil_classes import load_image_processor, make_image_processor
from mmjax.processing.image_processors.sampled_videos import SampledVideoPatcher
from mmjax.processing.items.items import MultiModalDataItems, VideoProcessorItems
from mmjax.processing.items.parse import ImageSize, MultiModalDataParser
from mmjax.processing.media.encoded import PixelRange
from mmjax.processing.tensors.fields import MultiModalFieldConfig

VISION_PARTS = write_parts(
    image="<|vision_start|><|image_pad|><|vision_end|>",
    video="<|vision_start|><|video_pad|><|vision_end|>",
)
"""A message's content, of a checkpoint without a chat template."""
CHATML_TURNS = write_chatml(VISION_PARTS)
"""Of a Qwen checkpoint without one."""
SECONDS_OF_STEPS: Mapping[str, MultiModalFieldConfig] = MappingProxyType(
    {"second_per_grid_ts": MultiModalFieldConfig.batched("video", keep_on_cpu=True)}
)
"""What `TimedVideoPatcher` returns beside patches and grids."""


class GridDataParser(MultiModalDataParser):
    """Accepts embeddings as `{"image_embeds": ..., "image_grid_thw": ...}`, or of a video."""

    embedding_fields: ClassVar[
        Mapping[str, Mapping[str, Literal["values", "metadata", "optional"]]]
    ] = {
        "image": {"image_embeds": "values", "image_grid_thw": "metadata"},
        "video": {"video_embeds": "values", "video_grid_thw": "metadata"},
    }

    def __init__(
        self,
        *,
        merge_size: int,
        count_embeds: Callable[[str, np.ndarray], np.ndarray],
        **kwargs: Any,
    ) -> None:
        """`count_embeds`: as of `GridInfo`."""
        super().__init__(**kwargs)
        self.merge_size = merge_size
        self.count_embeds = count_embeds

    @staticmethod
    def is_embeddings(data: object) -> bool:
        """Refuse embeddings without a grid, which their positions depend on."""
        if MultiModalDataParser.is_embeddings(data):
            raise RequestValueError(
                "embeddings must come with their grids, as {image_embeds, image_grid_thw} or "
                "{video_embeds, video_grid_thw}",
                param="multi_modal_data",
            )
        return False

    def _get_embedding_fields_config(
        self, modality: str, data: Mapping[str, Any]
    ) -> Mapping[str, MultiModalFieldConfig]:
        grids = np.asarray(data[f"{modality}_grid_thw"])
        if grids.ndim != 2 or grids.shape[1] != 3:
            raise ValueError(f"grids have shape {grids.shape}; expected (items, 3)")
        if (grids < 1).any() or (grids[:, 1:] % self.merge_size).any():
            raise ValueError(
                f"grids are {grids.tolist()}; expected (time, rows, columns) from 1 on, rows and "
                f"columns multiples of {self.merge_size}"
            )
        fields = make_fields(modality, grids, self.count_embeds(modality, grids))
        return fields if modality == "image" else {**fields, **self.read_seconds(data)}

    def read_seconds(self, data: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        """Return the fields of when the steps of videos are shown; ValueError for no seconds."""
        return {}


class GridInfo(FamilyInfo):
    """Images, and videos where `limits` has them, whose sizes are numbers of pixels."""

    host_inputs = GridHostInputs
    image_processors: ClassVar = {"Qwen2VL": "qwen2_vl"}
    patch_class: ClassVar[type[BytePatches]] = BytePatches
    """How HF's class cuts patches here."""
    image_patcher: ClassVar[type[ImagePatcher]] = ImagePatcher
    limits: ClassVar = {"image": None, "video": None}
    placeholders: ClassVar = {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    }
    data_parser = GridDataParser
    video_patcher: ClassVar[type[VideoPatcher]] = VideoPatcher
    video_defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
    }
    """Of a checkpoint that says nothing (HF: `Qwen2VLVideoProcessor`)."""

    def get_counted_placeholder(self, modality: str) -> str | None:
        """Return the pad token, without the tokens around it, which the chat template adds."""
        return self.get_tokenizer().decode(self.get_target(modality))

    @property
    def patch_depth(self) -> int:
        """How many frames a patch of the tower has."""
        return self.get_hf_config().vision_config.temporal_patch_size

    @property
    def merge_size(self) -> int:
        return self.get_hf_config().vision_config.spatial_merge_size

    def get_parser_options(self) -> Mapping[str, Any]:
        return {"merge_size": self.merge_size, "count_embeds": self.count_embeds}

    def load_hf_processor(self) -> ProcessorOfParts:
        """Assemble the HF processor's parts: AutoProcessor needs torchvision for videos."""
        path = self.ctx.model_config.path
        own = load_image_processor(path, self.image_processors, self.patch_class)
        options = {"max_pixels_resized": self.ctx.model_config.mm.max_image_pixels}
        parts = ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=self.image_patcher(own, **options),
            video_processor=self._load_video_patcher(type(own), options),
        )
        self._check_patches("image_processor", parts.image_processor)
        if parts.video_processor is not None:
            self._check_patches("video_processor", parts.video_processor)
        return parts

    def _load_video_patcher(self, hf_class: Any, options: Mapping[str, Any]) -> VideoPatcher | None:
        if "video" not in self.limits:
            return None
        # HF writes to them.
        own = load_video_settings(self.ctx.model_config.path)
        settings = copy.deepcopy(self.choose_video_settings(own))
        return self.choose_video_patcher(settings)(
            make_image_processor(hf_class, settings), settings=settings, **options
        )

    def choose_video_settings(self, own: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what holds of videos, of what the checkpoint's files say (`own`)."""
        return {**self.video_defaults, **own}

    def choose_video_patcher(self, settings: Mapping[str, Any]) -> type[VideoPatcher]:
        """Return what samples and cuts videos, by the settings that the checkpoint has of them."""
        return self.video_patcher

    def _check_patches(self, name: str, patcher: ImagePatcher) -> None:
        """Refuse a checkpoint whose processor cuts other patches than its tower reads."""
        vision = self.get_hf_config().vision_config
        expected = {
            "patch_size": vision.patch_size,
            "merge_size": vision.spatial_merge_size,
            "temporal_patch_size": self.patch_depth,
        }
        source = "config.json's vision_config has"
        check_settings(patcher.hf, expected, where=f"the {name}", source=source)

    def get_detail_range(self, detail: Literal["low", "high"]) -> PixelRange:
        """Return at most 512 x 512 pixels for `low`, at least 1024 x 1024 for `high`.

        The checkpoint's own limits hold as well.
        """
        return PixelRange(most=512 * 512) if detail == "low" else PixelRange(least=1024 * 1024)

    def check_sizes(self, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]) -> None:
        """Do nothing: sizes are numbers of pixels here, which the image processors limit."""

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger of the checkpoint's `max_pixels` and the operator's."""
        parts = self.get_hf_processor()

        def find_most(modality: str) -> int:
            patcher: ImagePatcher = getattr(parts, f"{modality}_processor")
            return self.find_larger(
                lambda kwargs: patcher.get_pixel_limits(kwargs)[1], f"{modality}s_kwargs"
            )

        return {f"{m}s_kwargs": {"max_pixels": find_most(m)} for m in self.limits}

    def choose_items(
        self, mm_items: MultiModalDataItems, mm_kwargs: Mapping[str, object]
    ) -> MultiModalDataItems:
        """Note how fast videos are where `fps` has a number for each, as qwen-vl-utils gives it."""
        videos = mm_items.get("video")
        if not isinstance(videos, VideoProcessorItems):
            return mm_items
        speeds = self.scope_kwargs(mm_kwargs, "videos_kwargs").get("fps")
        if not isinstance(speeds, list | tuple):
            return mm_items
        if len(speeds) not in (1, len(videos)):
            raise RequestValueError(
                f"`fps` has {len(speeds)} numbers in mm_processor_kwargs, for {len(videos)} "
                "videos; give one for each, or one",
                param="mm_processor_kwargs",
            )
        checked = [check_fps(fps) for fps in speeds]
        each = checked * len(videos) if len(checked) == 1 else checked
        timed = MultiModalDataItems({**mm_items, "video": videos.with_speeds(each)})
        return timed.with_cancellation(mm_items.cancellation)

    def find_seen_size(self, size: ImageSize, mm_kwargs: Mapping[str, object]) -> ImageSize:
        patcher: ImagePatcher = self.get_image_processor()
        return patcher.find_resized(size, self.scope_kwargs(mm_kwargs))

    def find_largest_image(self) -> tuple[ImageSize, int]:
        patcher: ImagePatcher = self.get_image_processor()
        cells = patcher.find_largest_frame(self.scope_kwargs(self.get_planned_mm_kwargs()))
        grid = np.array([[1, cells.height * self.merge_size, cells.width * self.merge_size]])
        size = ImageSize(width=cells.width * patcher.unit, height=cells.height * patcher.unit)
        return size, int(self.count_embeds("image", grid)[0])

    def find_largest_video(
        self, seq_len: int | None, mm_counts: Mapping[str, int] | None
    ) -> tuple[int, ImageSize]:
        """Return the frames of the largest video, and their size in embeddings.

        Of those that `seq_len` tokens hold, if all videos share them.
        """
        patcher: VideoPatcher = self.get_hf_processor().video_processor
        planned = self.scope_kwargs(self.get_planned_mm_kwargs(), "videos_kwargs")
        num_videos = max((mm_counts or {}).get("video", 0), 1)
        share = max(seq_len // num_videos, 1) if seq_len else None
        return patcher.find_largest_video(planned, share)

    def get_largest_video(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> tuple[int, ImageSize]:
        num_frames, cells = self.find_largest_video(seq_len, mm_counts)
        unit = self.get_hf_processor().video_processor.unit
        return num_frames, ImageSize(width=cells.width * unit, height=cells.height * unit)

    def get_max_video_tokens(self, seq_len: int | None, mm_counts: Mapping[str, int] | None) -> int:
        num_frames, cells = self.find_largest_video(seq_len, mm_counts)
        return self.get_hf_processor().video_processor.count_steps(num_frames) * prod(cells)

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        fields: dict[str, MultiModalFieldConfig] = {}
        for modality in self.limits:
            grids = np.asarray(outputs.get(f"{modality}_grid_thw", np.empty((0, 3), np.int64)))
            fields |= make_fields(modality, grids, self.count_embeds(modality, grids))
        return fields

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> Hashable:
        return int(self.count_embeds(modality, tensors[f"{modality}_grid_thw"][None])[0])

    def count_embeds(self, modality: str, grids: np.ndarray) -> np.ndarray:
        """Return how many embeddings items of a modality have: int[items] of int[items, 3]."""
        return grids.prod(-1) // self.merge_size**2


class TimedDataParser(GridDataParser):
    """Takes the seconds of a step beside the embeddings of a video, where they are given."""

    keeps_metadata = True
    embedding_fields: ClassVar = {
        **GridDataParser.embedding_fields,
        "video": {**GridDataParser.embedding_fields["video"], "second_per_grid_ts": "optional"},
    }

    def read_seconds(self, data: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        seconds = np.asarray(data.get("second_per_grid_ts", 1.0), np.float32)
        most = 1.0 / MIN_FPS
        if not ((seconds >= 0) & (seconds <= most)).all():
            raise ValueError(f"`second_per_grid_ts` is {seconds.tolist()}; expected 0 to {most:g}")
        return SECONDS_OF_STEPS


class StampedDataParser(GridDataParser):
    """Takes the seconds of all steps beside the embeddings of videos, where they are given."""

    keeps_metadata = True
    embedding_fields: ClassVar = {
        **GridDataParser.embedding_fields,
        "video": {**GridDataParser.embedding_fields["video"], "timestamps": "optional"},
    }

    def read_seconds(self, data: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        seconds = np.asarray(data.get("timestamps", 0.0), np.float64)
        if not ((seconds >= 0) & (seconds < 1e9)).all():
            raise ValueError(f"`timestamps` are {seconds.tolist()}; expected seconds from 0 on")
        return _make_times(np.asarray(data["video_grid_thw"]))


class StampedGridInfo(GridInfo):
    """Each step of a video is a picture of its own to the positions, with its second as text."""

    data_parser = StampedDataParser
    video_patcher = SampledVideoPatcher
    video_defaults: ClassVar = {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "patch_size": 16,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    """HF: `Qwen3VLVideoProcessor`."""
    marks: ClassVar[tuple[str, str]] = ("vision_start_token_id", "vision_end_token_id")
    """Keys of config.json: the tokens around the embeddings of a step."""
    has_time_behind: ClassVar[bool] = False
    """Whether the second stands behind its step; else before it."""

    def write_time(self, second: float) -> str:
        """Return what is written of the second of a step."""
        return f"<{second:.1f} seconds>"

    def find_largest_video(
        self, seq_len: int | None, mm_counts: Mapping[str, int] | None
    ) -> tuple[int, ImageSize]:
        """Return the same, of videos in a whole prompt, whatever of it `seq_len` is.

        A video's pixels bound it as well: so few of its frames never stand for all.
        """
        return super().find_largest_video(self.ctx.model_config.max_model_len, mm_counts)

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        grids = np.asarray(outputs.get("video_grid_thw", np.empty((0, 3), np.int64)))
        return {**super().get_fields(outputs), **_make_times(grids)}

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> Hashable:
        """Return the same, of a video what is written of each step, and the embeddings of one."""
        grid = tensors[f"{modality}_grid_thw"]
        if modality == "image":
            return super().measure_item(modality, tensors)
        seconds = tensors.get("timestamps")
        if seconds is None:  # embeddings alone: as of frames that nobody says the speed of
            patcher: SampledVideoPatcher = self.get_hf_processor().video_processor
            num_frames = int(grid[0]) * patcher.hf.temporal_patch_size
            timing = Timing(fps=DEFAULT_FPS, total=num_frames, places=np.arange(num_frames))
            seconds = patcher.find_seconds(timing)
        num_embeds = int(self.count_embeds(modality, grid[1:]))
        return tuple(self.write_time(second) for second in seconds), num_embeds

    measure_embeds = measure_item

    def write_item(self, modality: str, size: Any) -> list[int]:
        if modality == "image":
            return super().write_item(modality, size)
        times, num_embeds = size
        tokenizer, config = self.get_tokenizer(), self.get_hf_config()
        start, end = (getattr(config, name) for name in self.marks)
        step = [start, *[self.get_embed_token_id(modality)] * num_embeds, end]
        tokens: list[int] = []
        for time in times:
            text = tokenizer.encode(time, add_special_tokens=False)
            tokens += [*step, *text] if self.has_time_behind else [*text, *step]
        return tokens


def _make_times(grids: np.ndarray) -> dict[str, MultiModalFieldConfig]:
    """Return the field of the seconds of every step, by the grids of videos."""
    steps = grids[:, 0] if grids.ndim == 2 else grids
    times = MultiModalFieldConfig.flat_from_sizes("video", steps, keep_on_cpu=True)
    return {"timestamps": times}


def make_fields(
    modality: str, grid_thw: np.ndarray, num_embeds: np.ndarray
) -> dict[str, MultiModalFieldConfig]:
    """Return the fields of a modality by its grids, int[items, 3]: (time, rows, columns).

    `num_embeds`: int[items], how many embeddings each has.
    """
    num_patches = grid_thw.prod(-1)
    pixels = "pixel_values" if modality == "image" else "pixel_values_videos"
    fields = item_fields(
        modality, units=[pixels], counts=num_patches, on_host=[f"{modality}_grid_thw"]
    )
    return fields | item_fields(modality, units=[f"{modality}_embeds"], counts=num_embeds)
