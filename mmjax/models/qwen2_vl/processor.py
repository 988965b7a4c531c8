"""Qwen2-VL's and Qwen2.5-VL's prompt side: each `<|image_pad|>` or `<|video_pad|>` becomes many.

Before: `<|vision_start|> <|image_pad|> <|vision_end|>`. After: `<|vision_start|>
<|image_pad|>*N <|vision_end|>`, all N take embeddings; N is the item's grid over merge_size^2.
Qwen2.5-VL's videos come with the seconds of a step, of which the decoder's positions are made.
"""

import copy
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from mmjax.errors import CheckpointError, RequestValueError
from mmjax.models.family import FamilyInfo, item_fields, make_factories
from mmjax.models.qwen2_vl.host_inputs import Qwen2VLHostInputs, Qwen25VLHostInputs
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_video_settings
from mmjax.processing.image_processors.patches import (
    MIN_FPS,
    ImagePatcher,
    TimedVideoPatcher,
    VideoPatcher,
    find_sampled_fps,
    keep_bytes_of_patches,
)
from mmjax.processing.items.parse import (
    ImageSize,
    ModalityDataItems,
    MultiModalDataParser,
    VideoProcessorItems,
)
from mmjax.processing.media.encoded import PixelRange
from mmjax.processing.tensors.fields import MultiModalFieldConfig

_SECONDS = {"second_per_grid_ts": MultiModalFieldConfig.batched("video", keep_on_cpu=True)}
_MAX_FRAMES_PER_DUMMY = 14
"""Frames that memory is planned for; longer videos are admitted within the encoder budget."""

TURNS = r"""
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' -}}
    {%- for part in message.content -%}
        {%- if part.type == 'image' -%}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
        {%- elif part.type == 'video' -%}
            {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
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
"""Of a checkpoint without a chat template; Qwen2-VL's begin with a system message."""
SYSTEM = r"""
{%- if messages[0].role != 'system' -%}
    {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' -}}
{%- endif -%}
"""


class Qwen2VLDataParser(MultiModalDataParser):
    """Accepts embeddings as `{"image_embeds": ..., "image_grid_thw": ...}`, or of a video."""

    embedding_fields: ClassVar[
        Mapping[str, Mapping[str, Literal["values", "metadata", "optional"]]]
    ] = {
        "image": {"image_embeds": "values", "image_grid_thw": "metadata"},
        "video": {"video_embeds": "values", "video_grid_thw": "metadata"},
    }

    def __init__(self, *, merge_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.merge_size = merge_size

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
        return make_fields(modality, grids, self.merge_size)


class TimedDataParser(Qwen2VLDataParser):
    """Takes a video's metadata, `(frames, metadata)`, where they are given."""

    def _parse_video_data(self, data: Any) -> ModalityDataItems | None:
        items = super()._parse_video_data(data)
        if not isinstance(items, VideoProcessorItems):
            return items
        videos = list(items.data)
        for index, metadata in enumerate(items.metadata):
            if metadata is not None and videos[index] is not None:
                find_sampled_fps(metadata)  # refuses what says no speed
                videos[index] = (videos[index], metadata)
        return VideoProcessorItems(videos, items.metadata, has_pairs=True)


class Qwen25VLDataParser(TimedDataParser):
    """Takes the seconds of a step beside the embeddings of a video."""

    embedding_fields: ClassVar = {
        **Qwen2VLDataParser.embedding_fields,
        "video": {
            **Qwen2VLDataParser.embedding_fields["video"],
            "second_per_grid_ts": "optional",
        },
    }

    def _get_embedding_fields_config(
        self, modality: str, data: Mapping[str, Any]
    ) -> Mapping[str, MultiModalFieldConfig]:
        fields = super()._get_embedding_fields_config(modality, data)
        if modality == "image":
            return fields
        seconds = np.asarray(data.get("second_per_grid_ts", 1.0), np.float32)
        most = 1.0 / MIN_FPS
        if not ((seconds >= 0) & (seconds <= most)).all():
            raise ValueError(f"`second_per_grid_ts` is {seconds.tolist()}; expected 0 to {most:g}")
        return {**fields, **_SECONDS}


class Qwen2VLProcessingInfo(FamilyInfo):
    chat_template = SYSTEM + TURNS
    host_inputs = Qwen2VLHostInputs
    limits: ClassVar = {"image": None, "video": None}
    placeholders: ClassVar = {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    }
    parser: ClassVar[type[Qwen2VLDataParser]] = Qwen2VLDataParser
    video_patcher: ClassVar[type[VideoPatcher]] = VideoPatcher
    video_defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
    }
    """Of a checkpoint that says nothing (HF: `Qwen2VLVideoProcessor`)."""

    def get_counted_placeholder(self, modality: str) -> str | None:
        """Return the pad token, without the tokens around it, which the chat template adds."""
        return self.get_tokenizer().decode([self.get_embed_token_id(modality)])

    def get_embed_token_id(self, modality: str) -> int:
        """Return the placeholder token of a modality's items and embeddings."""
        return getattr(self.get_hf_config(), f"{modality}_token_id")

    @property
    def merge_size(self) -> int:
        return self.get_hf_config().vision_config.spatial_merge_size

    def get_data_parser(self) -> MultiModalDataParser:
        return self.parser(
            merge_size=self.merge_size,
            limits=self.get_media_limits(),
            expected_hidden_size=self.get_expected_hidden_size(),
        )

    def load_hf_processor(self) -> ProcessorOfParts:
        """Assemble the HF processor's parts: AutoProcessor needs torchvision for videos."""
        # Imported here: it imports torch if it is installed.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        path = self.ctx.model_config.path
        max_pixels_resized = self.ctx.model_config.mm.max_image_pixels
        # HF writes to them.
        settings = copy.deepcopy({**self.video_defaults, **load_video_settings(path)})
        processor_class = keep_bytes_of_patches(Qwen2VLImageProcessorPil)
        known = processor_class.valid_kwargs.__annotations__
        parts = ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=ImagePatcher(
                processor_class.from_pretrained(path),
                max_pixels_resized=max_pixels_resized,
            ),
            video_processor=self.video_patcher(
                processor_class(**{key: settings[key] for key in settings.keys() & known}),
                max_pixels_resized=max_pixels_resized,
                settings=settings,
            ),
        )
        vision = self.get_hf_config().vision_config
        sizes = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
        for name in ("image_processor", "video_processor"):
            check_patches(getattr(parts, name), sizes, name)
        return parts

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
            operators = self.scope_kwargs({}, f"{modality}s_kwargs")
            return max(patcher.get_pixel_limits(kwargs)[1] for kwargs in ({}, operators))

        return {f"{m}s_kwargs": {"max_pixels": find_most(m)} for m in self.limits}

    def get_largest_frame(self, modality: str) -> tuple[ImageSize, int]:
        """Return the size of the largest image or frame, and its number of embeddings."""
        patcher = getattr(self.get_hf_processor(), f"{modality}_processor")
        planned = self.scope_kwargs(self.get_planned_mm_kwargs(), f"{modality}s_kwargs")
        grid = patcher.find_largest_frame(planned)
        size = ImageSize(width=grid.width * patcher.unit, height=grid.height * patcher.unit)
        return size, grid.width * grid.height

    def get_largest_image(self) -> ImageSize:
        return self.get_largest_frame("image")[0]

    def get_largest_video(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> tuple[int, ImageSize]:
        return self.get_max_frames(seq_len, mm_counts), self.get_largest_frame("video")[0]

    def get_max_frames(self, seq_len: int | None, mm_counts: Mapping[str, int] | None) -> int:
        """Return the maximum number of frames of a video, if all videos share `seq_len` tokens."""
        if not seq_len:
            return _MAX_FRAMES_PER_DUMMY
        depth = self.get_hf_config().vision_config.temporal_patch_size
        _, num_tokens = self.get_largest_frame("video")
        num_frames = max(seq_len // num_tokens * depth, 1)
        num_videos = max((mm_counts or {}).get("video", 0), 1)
        return max(min(num_frames // num_videos, _MAX_FRAMES_PER_DUMMY), 1)

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        _, num_image_tokens = self.get_largest_frame("image")
        _, num_frame_tokens = self.get_largest_frame("video")
        patcher: VideoPatcher = self.get_hf_processor().video_processor
        num_steps = patcher.count_steps(self.get_max_frames(seq_len, mm_counts))
        return {"image": num_image_tokens, "video": num_steps * num_frame_tokens}

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        fields: dict[str, MultiModalFieldConfig] = {}
        for modality in self.limits:
            grids = outputs.get(f"{modality}_grid_thw", np.empty((0, 3), np.int64))
            fields |= make_fields(modality, np.asarray(grids), self.merge_size)
        return fields

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> Hashable:
        return self.count_cells(tensors[f"{modality}_grid_thw"])

    def count_cells(self, grid: np.ndarray) -> int:
        """Return how many embeddings an item of a grid has."""
        return int(np.prod(grid)) // self.merge_size**2


class Qwen25VLProcessingInfo(Qwen2VLProcessingInfo):
    tasks: ClassVar = {
        "Boxes": (
            "Outline the position of {each small cake} and output all the coordinates in JSON "
            "format."
        ),
        "Text with places": (
            "Spotting all the text in the image with line-level, and output in JSON format."
        ),
        "Page to HTML": "QwenVL HTML",
    }
    host_inputs = Qwen25VLHostInputs
    parser = Qwen25VLDataParser
    video_patcher = TimedVideoPatcher

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        return {**super().get_fields(outputs), **_SECONDS}


def check_patches(
    patcher: ImagePatcher, expected: tuple[int, int, int], name: str = "image_processor"
) -> None:
    """Refuse a checkpoint whose processor cuts other patches than its tower reads."""
    hf = patcher.hf
    found = (hf.patch_size, hf.merge_size, hf.temporal_patch_size)
    if found != expected:
        raise CheckpointError(
            f"the {name} of the checkpoint has (patch_size, merge_size, temporal_patch_size) "
            f"{found}, but config.json's vision_config {expected}; make them equal"
        )


def make_fields(
    modality: str, grid_thw: np.ndarray, merge_size: int
) -> dict[str, MultiModalFieldConfig]:
    """Return the fields of a modality by its grids, int[items, 3]: (time, rows, columns)."""
    num_patches = grid_thw.prod(-1)
    pixels = "pixel_values" if modality == "image" else "pixel_values_videos"
    fields = item_fields(
        modality, units=[pixels], counts=num_patches, on_host=[f"{modality}_grid_thw"]
    )
    cells = num_patches // merge_size**2
    return fields | item_fields(modality, units=[f"{modality}_embeds"], counts=cells)


FACTORIES = make_factories(Qwen2VLProcessingInfo)
QWEN2_5_FACTORIES = make_factories(Qwen25VLProcessingInfo)
