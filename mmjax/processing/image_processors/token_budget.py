"""Images and videos -> patches of as many pixels as a budget of embeddings allows: Gemma 4's.

An image is scaled, up or down, to the most squares of `pooling_kernel_size` patches a side that its
shape and the budget allow; each square is one embedding. Equal to HF's `Gemma4ImageProcessorPil`,
and for frames to its use on each.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from mmjax.errors import CheckpointError, check_settings
from mmjax.processing.image_processors.affine import read_affine
from mmjax.processing.image_processors.frames import EvenSampling, split_pairs
from mmjax.processing.image_processors.image import bad_kwarg, patchify, to_pixels
from mmjax.processing.items.items import ImageSize
from mmjax.processing.media.decode import map_in_threads

BUDGETS = (70, 140, 280, 560, 1120)
"""The values of `max_soft_tokens` that the models are trained with."""

_DEFAULTS: Mapping[str, Any] = {
    "max_soft_tokens": 280,
    "resample": Image.Resampling.BICUBIC,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": False,
    "image_mean": (0.0, 0.0, 0.0),
    "image_std": (1.0, 1.0, 1.0),
}
"""Of a checkpoint that says nothing (HF: `Gemma4ImageProcessor`)."""
_VIDEO_DEFAULTS: Mapping[str, Any] = {
    **_DEFAULTS,
    "max_soft_tokens": 70,
    "do_normalize": True,
}


class TokenBudgetPatcher:
    """Cuts images into patches, which are padded to the budget's number, with their places."""

    defaults = _DEFAULTS

    def __init__(
        self, settings: Mapping[str, Any], *, patch_size: int, pooling_size: int, has_squares: bool
    ) -> None:
        """`settings`: the checkpoint's. `has_squares`: whether a whole square is one patch."""
        given = {name: settings.get(name) for name in self.defaults}
        self.settings = {
            name: self.defaults[name] if value is None else value for name, value in given.items()
        }
        sizes = {"patch_size": patch_size, "pooling_kernel_size": pooling_size}
        check_settings(settings, sizes, where="the image processor")
        if settings.get("do_resize") is False:
            raise CheckpointError(
                "`do_resize` of the image processor is false; images must be resized to squares "
                f"of {patch_size * pooling_size} pixels"
            )
        self.square = patch_size * pooling_size
        """Pixels of the side of what is one embedding."""
        self.cell = self.square if has_squares else patch_size
        """Pixels of the side of a patch."""

    @property
    def valid_kwargs(self) -> frozenset[str]:
        """The names that a request may give."""
        return frozenset(self.defaults)

    def __call__(self, images: Sequence[Image.Image], **kwargs: Any) -> dict[str, Any]:
        """Return patches and places of each image, padded, and how many embeddings it has."""
        settings = self.resolve(kwargs)
        cut = map_in_threads(lambda image: self._cut(image, settings), list(images))
        pixels, places, counts = (np.stack(parts) for parts in zip(*cut, strict=True))
        return {
            "pixel_values": pixels,
            "image_position_ids": places,
            "num_soft_tokens_per_image": counts,
            "image_affine": read_affine(settings),
        }

    def resolve(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a request; `RequestValueError` for another budget."""
        given = {k: v for k, v in kwargs.items() if k in self.defaults and v is not None}
        settings = {**self.settings, **given}
        if settings["max_soft_tokens"] not in BUDGETS:
            known = ", ".join(map(str, BUDGETS))
            raise bad_kwarg("max_soft_tokens", settings["max_soft_tokens"], f"one of {known}")
        return settings

    def find_largest(self, budget: int) -> ImageSize:
        """Return the size of an image with as many embeddings as the budget allows."""
        short = next(side for side in range(math.isqrt(budget), 0, -1) if budget % side == 0)
        return ImageSize(width=budget // short * self.square, height=short * self.square)

    def find_size(self, given: ImageSize, budget: int) -> ImageSize:
        """Return what an image is resized to (HF: `get_aspect_ratio_preserving_size`)."""
        side, (width, height) = self.square, given
        factor = math.sqrt(budget * side**2 / (height * width))
        columns, rows = (math.floor(factor * length / side) for length in (width, height))
        # HF's rule for slivers; their other side is that of so many whole pictures.
        if rows == 0:
            rows, columns = 1, min(math.floor(width / height), budget)
        elif columns == 0:
            columns, rows = 1, min(math.floor(height / width), budget)
        return ImageSize(width=columns * side, height=rows * side)

    def _cut(
        self, image: Image.Image, settings: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Return uint8[most, values], int64[most, 2] (column, row; -1: padding), the embeddings."""
        size = self.find_size(ImageSize(*image.size), settings["max_soft_tokens"])
        image = image if image.mode == "RGB" else image.convert("RGB")
        if size != image.size:
            image = image.resize(size, settings["resample"])
        patches = patchify(to_pixels(image), self.cell, self.cell)
        rows, columns = np.indices((size.height // self.cell, size.width // self.cell))
        places = np.stack([columns.ravel(), rows.ravel()], axis=1)
        most = settings["max_soft_tokens"] * (self.square // self.cell) ** 2
        padding = ((0, most - len(patches)), (0, 0))
        return (
            np.pad(patches, padding),
            np.pad(places, padding, constant_values=-1),
            size.width * size.height // self.square**2,
        )


class TokenBudgetVideoPatcher(TokenBudgetPatcher):
    """Samples frames, and cuts each as an image is."""

    defaults = _VIDEO_DEFAULTS

    def __init__(self, settings: Mapping[str, Any], **sizes: Any) -> None:
        super().__init__(settings, **sizes)
        self.sampling = EvenSampling(num_frames=32).of_checkpoint(settings)

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return super().valid_kwargs | self.sampling.requested

    def __call__(self, videos: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """Return the patches of all frames, the numbers of frames, and the second of each.

        A video is its frames, uint8[frames, height, width, 3], or a pair of them and its metadata.
        """
        sampling = self.sampling.asked(kwargs)
        seen = [sampling.select(*pair) for pair in split_pairs(videos)]
        images = [Image.fromarray(frame) for frames, _ in seen for frame in frames]
        cut = super().__call__(images, **kwargs)
        num_frames = np.array([len(frames) for frames, _ in seen])
        firsts = np.cumsum(num_frames) - num_frames
        return {
            "pixel_values_videos": cut["pixel_values"],
            "video_position_ids": cut["image_position_ids"],
            "num_frames_per_video": num_frames,
            "num_soft_tokens_per_video": cut["num_soft_tokens_per_image"][firsts],
            "timestamps": np.concatenate([timing.seconds for _, timing in seen]),
            "video_affine": cut["image_affine"],
        }
