"""Qwen3-VL's prompt side: Qwen2-VL's, but that each frame of a video has its second before it.

Before: `<|video_pad|>`. After, for each step of the video: `<0.3 seconds> <|vision_start|>
<|video_pad|>*N <|vision_end|>`, of which the pads take embeddings. What the chat template has
around the first stays, as in transformers from 5.10 on.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from mmjax.models.family import make_factories
from mmjax.models.qwen2_vl.processor import TURNS, Qwen2VLProcessingInfo, TimedDataParser
from mmjax.models.qwen3_vl.host_inputs import Qwen3VLHostInputs
from mmjax.processing.image_processors.patches import DEFAULT_FPS
from mmjax.processing.image_processors.sampled_videos import PLANNED_FRAMES, SampledVideoPatcher
from mmjax.processing.tensors.fields import MultiModalFieldConfig

Frames = tuple[tuple[str, ...], int]
"""What stands before each step of a video, and how many embeddings each has."""


class Qwen3VLDataParser(TimedDataParser):
    """Takes the seconds of all steps beside the embeddings of videos, where they are given."""

    embedding_fields: ClassVar = {
        **TimedDataParser.embedding_fields,
        "video": {**TimedDataParser.embedding_fields["video"], "timestamps": "optional"},
    }

    def _get_embedding_fields_config(
        self, modality: str, data: Mapping[str, Any]
    ) -> Mapping[str, MultiModalFieldConfig]:
        fields = super()._get_embedding_fields_config(modality, data)
        if modality == "image":
            return fields
        seconds = np.asarray(data.get("timestamps", 0.0), np.float64)
        if not ((seconds >= 0) & (seconds < 1e9)).all():
            raise ValueError(f"`timestamps` are {seconds.tolist()}; expected seconds from 0 on")
        return {**fields, **_make_times(np.asarray(data["video_grid_thw"]))}


class Qwen3VLProcessingInfo(Qwen2VLProcessingInfo):
    chat_template = TURNS
    tasks: ClassVar = {
        "Boxes": (
            'Locate every instance that belongs to the following categories: "{head, hand}". '
            "Report bbox coordinates in JSON format."
        ),
        "Text with places": (
            "Spotting all the text in the image with line-level, and output in JSON format."
        ),
        "Page to HTML": "qwenvl html",
        "Page to Markdown": "qwenvl markdown",
    }
    host_inputs = Qwen3VLHostInputs
    parser = Qwen3VLDataParser
    video_patcher = SampledVideoPatcher
    video_defaults: ClassVar = {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "patch_size": 16,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }

    def get_max_frames(self, seq_len: int | None, mm_counts: Mapping[str, int] | None) -> int:
        return PLANNED_FRAMES

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        grids = np.asarray(outputs.get("video_grid_thw", np.empty((0, 3), np.int64)))
        return {**super().get_fields(outputs), **_make_times(grids)}

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int | Frames:
        grid = tensors[f"{modality}_grid_thw"]
        if modality == "image":
            return self.count_cells(grid)
        steps = int(grid[0])
        seconds = tensors.get("timestamps")
        if seconds is None:  # embeddings alone: as of frames that nobody says the speed of
            depth = self.get_hf_config().vision_config.temporal_patch_size
            seconds = (np.arange(steps) * depth + (depth - 1) / 2) / DEFAULT_FPS
        return tuple(f"<{second:.1f} seconds>" for second in seconds), self.count_cells(grid[1:])

    measure_embeds = measure_item

    def write_item(self, modality: str, size: Any) -> list[int]:
        if modality == "image":
            return super().write_item(modality, size)
        texts, num_embeds = size
        tokenizer, config = self.get_tokenizer(), self.get_hf_config()
        pads = [config.video_token_id] * num_embeds
        tokens: list[int] = []
        for text in texts:
            tokens += tokenizer.encode(text, add_special_tokens=False)
            tokens += [config.vision_start_token_id, *pads, config.vision_end_token_id]
        return tokens


def _make_times(grids: np.ndarray) -> dict[str, MultiModalFieldConfig]:
    """Return the field of the seconds of every step, by the grids of videos."""
    steps = grids[:, 0] if grids.ndim == 2 else grids
    times = MultiModalFieldConfig.flat_from_sizes("video", steps, keep_on_cpu=True)
    return {"timestamps": times}


FACTORIES = make_factories(Qwen3VLProcessingInfo)
