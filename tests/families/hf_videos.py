"""HF's video processors without torchvision: their own rules, in which Pillow resizes the frames.

Their modules cannot be imported. What decides frames, sizes and patches needs numpy and torch
alone: it is taken out of their source.
"""

import ast
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.utils import logging
from transformers.video_processing_utils import VideoProcessorMixin
from transformers.video_utils import VideoMetadata


def take_functions(folder: str, *names: str, **imported: Any) -> Any:
    """Return functions (and methods) of the video processor in a folder of HF's models.

    `imported`: what else they find in their module.
    """
    spec = importlib.util.find_spec(f"transformers.models.{folder}")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name(f"video_processing_{folder}.py").read_text()
    functions: list[ast.stmt] = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert len(functions) == len(names)
    known = {"np": np, "math": math, "torch": torch, "VideoMetadata": VideoMetadata, **imported}
    known |= {"logger": logging.get_logger("transformers"), "MAX_IMAGE_SIZE": 4096}
    exec(compile(ast.Module(functions, []), folder, "exec"), known)
    return SimpleNamespace(**{name: known[name] for name in names})


def read_metadata(video: np.ndarray, known: Mapping[str, Any] | None) -> VideoMetadata:
    """Return what HF knows of a video."""
    fields: dict[str, Any] = {"total_num_frames": len(video), **(known or {})}
    return VideoMetadata(**fields)


class HFVideos(VideoProcessorMixin):
    """Stands for torchvision's video processors: frames and what is known of them, alike in all."""

    model_input_names: Any = ("pixel_values_videos",)

    def __init__(
        self,
        images: Any,
        sample: Callable[[VideoMetadata], np.ndarray] | None,
        cut: Callable[..., Mapping[str, Any]],
        normalized: Sequence[Sequence[float]] = (),
        **settings: Any,
    ) -> None:
        """Make one.

        Args:
            images: HF's image processor of the same files, with PIL.
            sample: Chooses frames of a whole video; None: all of them are seen.
            cut: (this, the frames that are seen of each video) -> tensors.
            normalized: Mean and deviation, where those of videos differ.
            settings: HF's, as attributes.
        """
        self.images, self.sample, self.cut, self.normalized = images, sample, cut, normalized
        for name, value in settings.items():
            setattr(self, name, value)

    def __call__(self, videos: Any, video_metadata: Any = None, **kwargs: Any) -> Any:
        seen, metadatas = [], []
        for index, video in enumerate(videos):
            metadata = read_metadata(video, video_metadata[index] if video_metadata else None)
            if self.sample is not None and metadata.total_num_frames == len(video):
                places = self.sample(metadata)
                metadata.frames_indices, video = places.tolist(), video[places]
            elif metadata.frames_indices is None:
                metadata.frames_indices = list(range(len(video)))
            seen.append(video)
            metadatas.append(metadata)
        return {**self.cut(self, seen), "video_metadata": metadatas}

    def resize(
        self, video: np.ndarray, *sizes: tuple[int, int], resample: int = Image.Resampling.BICUBIC
    ) -> torch.Tensor:
        """Return normalised frames, scaled to each (height, width) in turn."""
        frames = [Image.fromarray(frame) for frame in video]
        for height, width in sizes:
            frames = [frame.resize((width, height), resample) for frame in frames]
        pixels = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames]))
        own = self.normalized or (self.images.image_mean, self.images.image_std)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in own)
        return (pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std


def make_grid_videos(
    folder: str, images: Any, size: Mapping[str, int], *, samples: bool = True, **settings: Any
) -> HFVideos:
    """Return HF's video processor of grids in a folder of its models.

    `size`: the checkpoint's, of videos. `settings`: what `sample_frames` reads.
    """
    functions = take_functions(folder, "smart_resize", "patchify", *["sample_frames"] * samples)
    has_volume = "num_frames" in functions.smart_resize.__annotations__
    own = SimpleNamespace(**settings, temporal_patch_size=images.temporal_patch_size)
    sizes = (images.patch_size, images.merge_size, images.temporal_patch_size)

    def cut(videos: HFVideos, seen: Sequence[np.ndarray]) -> dict[str, Any]:
        patches, grids = [], []
        for video in seen:
            named: dict[str, int] = {
                "height": video.shape[1],
                "width": video.shape[2],
                "factor": sizes[0] * sizes[1],
                "min_pixels": size["shortest_edge"],
                "max_pixels": size["longest_edge"],
            }
            if has_volume:
                named |= {"num_frames": len(video), "temporal_factor": sizes[2]}
            frames = videos.resize(video, functions.smart_resize(**named))
            found, *grid = functions.patchify(None, frames[None], *sizes)
            patches.append(found[0])
            grids.append(grid)
        return {
            "pixel_values_videos": torch.cat(patches).numpy(),
            "video_grid_thw": np.array(grids),
        }

    return HFVideos(
        images,
        (lambda metadata: functions.sample_frames(own, metadata)) if samples else None,
        cut,
        merge_size=sizes[1],
        temporal_patch_size=sizes[2],
        patch_size=sizes[0],
    )
