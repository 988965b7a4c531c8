"""Images -> square tiles, in the arrangement whose shape is closest, as InternVL cuts them.

An image of more than one tile comes with a thumbnail of the whole, as its last tile. Two parts
for each kind of media: those of the original code, and those of HF's port around its PIL class.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from mmjax.errors import RequestValueError, check_settings
from mmjax.processing.image_processors.affine import make_affine, read_affine
from mmjax.processing.image_processors.crops import MAX_TILES, list_tilings
from mmjax.processing.image_processors.frames import split_pairs
from mmjax.processing.image_processors.image import bad_kwarg, check_bool, check_count, to_pixels
from mmjax.processing.image_processors.parts import load_video_settings
from mmjax.processing.image_processors.pil_classes import load_class, make_image_processor
from mmjax.processing.items.items import ImageSize

_CLIP_ARITHMETIC: Mapping[str, Any] = {
    **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
_AFFINE = make_affine(rescale_factor=1 / 255, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""As the original normalises what it cuts."""


@runtime_checkable
class TileCutter(Protocol):
    """The image part of either layout."""

    tile_size: int

    def get_limits(self, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the fewest and the most tiles of an image, thumbnail aside."""
        ...

    def count_tiles(self, size: ImageSize, kwargs: Mapping[str, Any]) -> int:
        """Return how many tiles an image gives, thumbnail included."""
        ...


@lru_cache(maxsize=16)
def list_arrangements(fewest: int, most: int) -> list[tuple[int, int]]:
    """Return every (columns, rows) of `fewest` to `most` tiles, those of fewer tiles first.

    Arrangements of as many tiles stand as the original's set gives them: ties hang on it.
    """
    arrangements = {
        (columns, rows)
        for number in range(fewest, most + 1)
        for columns in range(1, number + 1)
        for rows in range(1, number + 1)
        if fewest <= columns * rows <= most
    }
    return sorted(arrangements, key=lambda one: one[0] * one[1])


def choose_arrangement(
    size: ImageSize, arrangements: Sequence[tuple[int, int]], tile_size: int
) -> tuple[int, int]:
    """Return the (columns, rows) closest to an image's shape.

    Of equally close ones, the larger wins while the image fills more than half of its tiles.
    """
    aspect_ratio = size.width / size.height
    best, best_difference = (1, 1), float("inf")
    for columns, rows in arrangements:
        difference = abs(aspect_ratio - columns / rows)
        fills_half = size.width * size.height > 0.5 * tile_size * tile_size * columns * rows
        if difference < best_difference or (difference == best_difference and fills_half):
            best, best_difference = (columns, rows), difference
    return best


def cut_tiles(
    image: Image.Image,
    canvas: tuple[int, int],
    side: int,
    *,
    has_thumbnail: bool = True,
    resample: Image.Resampling = Image.Resampling.BICUBIC,
) -> list[Image.Image]:
    """Scale an image to (columns, rows) of tiles, and cut it; the whole comes last of several."""
    columns, rows = canvas
    resized = image.resize((side * columns, side * rows), resample)
    tiles = [
        resized.crop((x * side, y * side, (x + 1) * side, (y + 1) * side))
        for y in range(rows)
        for x in range(columns)
    ]
    if has_thumbnail and len(tiles) > 1:
        tiles.append(image.resize((side, side), resample))
    return tiles


def find_largest_picture(cutter: TileCutter, kwargs: Mapping[str, Any]) -> tuple[ImageSize, int]:
    """Return the size of an image with the most tiles, and how many."""
    sizes = [
        ImageSize(width=columns * cutter.tile_size, height=rows * cutter.tile_size)
        for columns, rows in list_arrangements(*cutter.get_limits(kwargs))
    ]
    counts = [cutter.count_tiles(size, kwargs) for size in sizes]
    most = max(counts)
    return sizes[counts.index(most)], most


def check_limits(
    fewest: Any,
    most: Any,
    names: tuple[str, str],
    limit: int = MAX_TILES,
    noun: str = "tiles",
) -> tuple[int, int]:
    """Return two numbers of tiles, say; `RequestValueError` for others than 1 to `limit`."""
    for value, name in zip((fewest, most), names, strict=True):
        check_count(name, value, limit, noun)
    if fewest > most:
        raise bad_kwarg(names[0], fewest, f"at most `{names[1]}`, which is {most}")
    return fewest, most


def choose_resolution(size: ImageSize, candidates: Sequence[ImageSize]) -> ImageSize:
    """Return the candidate in which an image keeps most pixels; of equals, the one it fills best.

    The first of those that are equal in both.
    """

    def rate(candidate: ImageSize) -> tuple[int, int]:
        scale = min(candidate.width / size.width, candidate.height / size.height)
        scaled = int(size.width * scale) * int(size.height * scale)
        kept = min(scaled, size.width * size.height)
        return kept, kept - candidate.width * candidate.height

    return max(candidates, key=rate)


class PillowTileCutter(ABC):
    """Cuts tiles with Pillow alone; a subclass says in which arrangement."""

    defaults: Mapping[str, Any]
    """Of kwargs that a call leaves out: the fewest tiles, the most, and whether there are any."""
    tile_size: int
    affine: np.ndarray
    pixels_name: ClassVar[str] = "pixel_values"
    has_thumbnail = True
    resample = Image.Resampling.BICUBIC

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return frozenset(self.defaults)

    @abstractmethod
    def arrange(self, size: ImageSize, limits: tuple[int, int]) -> tuple[int, int]:
        """Return the columns and rows of an image's tiles, of those that `limits` allow."""

    def __call__(
        self, images: Sequence[Image.Image], *, return_tensors: str, **kwargs: Any
    ) -> dict[str, np.ndarray]:
        """Return the pixels, uint8[tiles, 3, S, S], and `image_num_patches` int64[images]."""
        limits = self.get_limits(kwargs)
        options = {"has_thumbnail": self.has_thumbnail, "resample": self.resample}
        tiles = [
            cut_tiles(
                image, self.arrange(ImageSize(*image.size), limits), self.tile_size, **options
            )
            for image in images
        ]
        return {
            self.pixels_name: np.stack([to_pixels(tile) for one in tiles for tile in one]),
            "image_num_patches": np.array([len(one) for one in tiles], dtype=np.int64),
            "image_affine": self.affine,
        }

    def get_limits(self, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """As `TileCutter`'s."""
        fewest, most, switch = self.defaults
        given = {key: value for key, value in kwargs.items() if value is not None}
        values = {**self.defaults, **given}
        limits = check_limits(values[fewest], values[most], (fewest, most))
        return limits if self.is_cut(values[switch]) else (1, 1)

    def is_cut(self, value: Any) -> bool:
        """Return whether images are cut, by the last of the kwargs."""
        return bool(value)

    def count_tiles(self, size: ImageSize, kwargs: Mapping[str, Any]) -> int:
        columns, rows = self.arrange(size, self.get_limits(kwargs))
        return columns * rows + int(self.has_thumbnail and columns * rows > 1)


class OriginalTileCutter(PillowTileCutter):
    """The original's `dynamic_preprocess`, by config.json's settings."""

    pixels_name = "pixel_values_flat"
    affine = _AFFINE

    def __init__(self, hf_config: Any, tile_size: int) -> None:
        self.tile_size = tile_size
        self.has_thumbnail = bool(getattr(hf_config, "use_thumbnail", False))
        own = {"min_dynamic_patch": 1, "max_dynamic_patch": 6, "dynamic_image_size": False}
        self.defaults = {name: getattr(hf_config, name, value) for name, value in own.items()}

    def arrange(self, size: ImageSize, limits: tuple[int, int]) -> tuple[int, int]:
        return choose_arrangement(size, list_arrangements(*limits), self.tile_size)

    def is_cut(self, value: Any) -> bool:
        return check_bool("dynamic_image_size", value)


def choose_canvas(size: ImageSize, most: int, tile_size: int) -> tuple[int, int]:
    """Return the (columns, rows) to which an image is scaled up least; else down least."""
    # In the order of Cohere's code: those of as many tiles by their columns, as tilings by rows.
    canvases = [(columns, rows) for columns, rows in list_tilings(most)]
    scales = [
        min(columns * tile_size / size.width, rows * tile_size / size.height)
        for columns, rows in canvases
    ]
    larger = [scale for scale in scales if scale >= 1]
    return canvases[scales.index(min(larger) if larger else max(scales))]


class CanvasCutter(PillowTileCutter):
    """HF's `Cohere2VisionImageProcessor`, which needs torchvision, by preprocessor_config.json."""

    def __init__(self, settings: Mapping[str, Any], tile_size: int) -> None:
        """`settings`: those of the file; what it leaves out is as in HF."""
        _check_size(settings.get("size", {"height": 512, "width": 512}), tile_size)
        self.tile_size = tile_size
        self.resample = Image.Resampling(settings.get("resample", Image.Resampling.BICUBIC))
        names = {"min_patches": 1, "max_patches": 12, "crop_to_patches": True}
        self.defaults = {name: settings.get(name, value) for name, value in names.items()}
        self.affine = read_affine({**_CLIP_ARITHMETIC, **settings})

    def get_limits(self, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return 1 and the most tiles: HF's class takes `min_patches`, and does nothing with it."""
        return 1, super().get_limits(kwargs)[1]

    def arrange(self, size: ImageSize, limits: tuple[int, int]) -> tuple[int, int]:
        return choose_canvas(size, limits[1], self.tile_size)


class OriginalFrameCutter:
    """Each frame as one tile."""

    valid_kwargs: frozenset[str] = frozenset()

    def __init__(self, tile_size: int) -> None:
        self.tile_size = tile_size

    def __call__(
        self, videos: Sequence[np.ndarray], *, return_tensors: str
    ) -> dict[str, np.ndarray]:
        """Return `pixel_values_flat_video`, `video_num_patches` int64[videos]."""
        size = (self.tile_size, self.tile_size)
        frames = [Image.fromarray(frame) for video in videos for frame in video]
        tiles = [frame.resize(size, Image.Resampling.BICUBIC) for frame in frames]
        return {
            "pixel_values_flat_video": np.stack([to_pixels(tile) for tile in tiles]),
            "video_num_patches": np.array([len(video) for video in videos], dtype=np.int64),
            "video_affine": _AFFINE,
        }


class HFCutter:
    """An image processor of HF's that cuts tiles."""

    division: ClassVar[tuple[str, str]]
    """What HF calls what says how tiles divide among images, and what it is called here."""

    def __init__(self, hf_processor: Any, tile_size: int) -> None:
        """`hf_processor`: the checkpoint's, which must fit the tower."""
        size = hf_processor.size
        _check_size({"height": size.height, "width": size.width}, tile_size)
        self.hf = hf_processor
        self.tile_size = tile_size

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return frozenset(self.hf.valid_kwargs.__annotations__)

    def __call__(self, images: Sequence[Image.Image], **kwargs: Any) -> dict[str, np.ndarray]:
        """Return `pixel_values` uint8[tiles, 3, S, S], and int64[images, ...]: how it divides."""
        self.get_limits(kwargs)
        outputs = self.call_hf(list(images), kwargs)
        _check_tiles(outputs["pixel_values"], self.tile_size)
        theirs, ours = self.division
        return {
            "pixel_values": outputs["pixel_values"],
            ours: np.asarray(outputs[theirs], dtype=np.int64),
            "image_affine": outputs["image_affine"],
        }

    def call_hf(
        self, images: Sequence[Image.Image], kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return what HF's class makes of images, and `image_affine`."""
        return self.hf(images, **kwargs)

    def get_limits(self, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """As `TileCutter`'s."""
        given = {key: value for key, value in kwargs.items() if value is not None}
        names = ("min_patches", "max_patches")
        fewest, most = (given.get(name, getattr(self.hf, name)) for name in names)
        limits = check_limits(fewest, most, names)
        return limits if given.get("crop_to_patches", self.hf.crop_to_patches) else (1, 1)


class HFTileCutter(HFCutter):
    """HF's `GotOcr2ImageProcessorPil`."""

    division = ("num_patches", "image_num_patches")

    def count_tiles(self, size: ImageSize, kwargs: Mapping[str, Any]) -> int:
        given = {key: value for key, value in kwargs.items() if value is not None}
        return self.hf.get_number_of_image_patches(size.height, size.width, given)


class HFFrameCutter:
    """Each frame as one tile, by HF's PIL class with the settings of the video processor."""

    def __init__(self, hf_processor: Any, tile_size: int) -> None:
        self.hf = hf_processor
        self.tile_size = tile_size

    @classmethod
    def from_pretrained(cls, path: Path, tile_size: int) -> "HFFrameCutter":
        """Take the checkpoint's settings for videos, but the size that the tower takes."""
        size = {"height": tile_size, "width": tile_size}
        settings = {**load_video_settings(path), "size": size}
        return cls(make_image_processor(load_class("GotOcr2", "got_ocr2"), settings), tile_size)

    @property
    def valid_kwargs(self) -> frozenset[str]:
        own = {"crop_to_patches", "min_patches", "max_patches"}
        return frozenset(self.hf.valid_kwargs.__annotations__) - own

    def __call__(self, videos: Sequence[np.ndarray], **kwargs: Any) -> dict[str, np.ndarray]:
        """Return `pixel_values_videos`, `video_num_patches` int64[videos]."""
        seen = [frames for frames, _ in split_pairs(videos)]
        images = [Image.fromarray(frame) for frames in seen for frame in frames]
        outputs = self.hf(images, **kwargs, crop_to_patches=False)
        _check_tiles(outputs["pixel_values"], self.tile_size)
        return {
            "pixel_values_videos": outputs["pixel_values"],
            "video_num_patches": np.array([len(frames) for frames in seen], dtype=np.int64),
            "video_affine": outputs["image_affine"],
        }


def _check_size(size: Mapping[str, Any], tile_size: int) -> None:
    expected = {"size": {"height": tile_size, "width": tile_size}}
    source = "the vision tower takes"
    check_settings({"size": size}, expected, where="the image processor", source=source)


def _check_tiles(pixel_values: Any, tile_size: int) -> None:
    found = np.shape(pixel_values)[-2:]
    if found != (tile_size, tile_size):
        raise RequestValueError(
            f"tiles became {found[0]}x{found[1]} pixels, but the vision tower takes "
            f"{tile_size}x{tile_size}; leave `size` and `do_resize` out of mm_processor_kwargs",
            param="mm_processor_kwargs",
        )
