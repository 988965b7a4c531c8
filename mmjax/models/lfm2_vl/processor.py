"""LFM2-VL's prompt side: tiles of a picture by row and column, and the whole of it last.

Before: `look <image>`. After, of a picture of one row and two columns: `look <|image_start|>
<|img_row_1_col_1|> <image>*N <|img_row_1_col_2|> <image>*N <|img_thumbnail|> <image>*M
<|image_end|>`; of one that is not cut, `<|image_start|> <image>*M <|image_end|>`. Only the N and
the M take embeddings.

Pictures -> patches of tiles and of the whole, as HF's `Lfm2VlImageProcessor`, by Pillow.

HF's class needs torchvision. A picture is scaled so that its squares of patches fit the budget of
embeddings; one that is too large for that is cut into tiles, and the scaled one comes last.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from PIL import Image

from mmjax.errors import CheckpointError, RequestValueError, check_settings
from mmjax.models.family import FamilyInfo, item_fields, make_factories
from mmjax.models.lfm2_vl.host_inputs import Lfm2VLHostInputs
from mmjax.processing.chat_turns import write_chatml, write_parts
from mmjax.processing.image_processors.affine import read_affine
from mmjax.processing.image_processors.image import check_bool, fit_pixels, patchify, to_pixels
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_image_settings
from mmjax.processing.image_processors.tiling import (
    check_limits,
    choose_arrangement,
    cut_tiles,
    list_arrangements,
)
from mmjax.processing.items.items import ImageSize
from mmjax.processing.items.parse import ImagesOnlyDataParser
from mmjax.processing.media.decode import map_in_threads
from mmjax.processing.prompt_updates.updates import as_ids
from mmjax.processing.tensors.fields import MultiModalFieldConfig

MAX_TOKENS = 4096
"""Of a picture that is not cut: no model has seen as many."""
_NORMALIZATION: Mapping[str, Any] = {
    **{"do_rescale": True, "rescale_factor": 1 / 255},
    **{"do_normalize": True, "image_mean": 0.5, "image_std": 0.5},
}
"""Of a checkpoint that says nothing."""


class Plan(NamedTuple):
    """What becomes of a picture."""

    columns: int
    rows: int
    """Of its tiles; 1 and 1 where it is not cut."""
    whole: ImageSize | None
    """What it is scaled to as a whole; None: its tiles stand alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What decides how a picture is cut; defaults are HF's."""

    do_image_splitting: bool = True
    min_tiles: int = 2
    max_tiles: int = 10
    use_thumbnail: bool = True
    min_image_tokens: int = 64
    max_image_tokens: int = 256
    max_pixels_tolerance: float = 2.0
    tile_size: int = 512
    encoder_patch_size: int = 16
    downsample_factor: int = 2

    @staticmethod
    def of(given: Mapping[str, Any]) -> "Budget":
        """Return the budget of settings by name; `RequestValueError` for what none can be."""
        for name in ("do_image_splitting", "use_thumbnail"):
            check_bool(name, given[name])
        check_limits(given["min_tiles"], given["max_tiles"], ("min_tiles", "max_tiles"))
        names = ("min_image_tokens", "max_image_tokens")
        check_limits(given[names[0]], given[names[1]], names, MAX_TOKENS, "embeddings")
        return Budget(**given)

    @property
    def unit(self) -> int:
        """The side of the square of pixels that one embedding stands for."""
        return self.encoder_patch_size * self.downsample_factor

    @property
    def most_tokens(self) -> int:
        """Embeddings that a whole picture or a tile may have (HF: `max_num_patches`)."""
        of_tile = (self.tile_size // self.unit) ** 2 if self.do_image_splitting else 0
        return max(self.max_image_tokens, of_tile)

    def plan(self, given: ImageSize) -> Plan:
        """Return the tiles of a picture, and what it is scaled to as a whole."""
        whole = self._fit(given)
        if not self.do_image_splitting or not self._is_large(given):
            return Plan(1, 1, whole)
        arrangements = list_arrangements(self.min_tiles, self.max_tiles)
        columns, rows = choose_arrangement(given, arrangements, self.tile_size)
        is_cut = columns * rows > 1
        return Plan(columns, rows, whole if self.use_thumbnail or not is_cut else None)

    def count_tokens(self, given: ImageSize) -> int:
        """Return how many embeddings a picture has."""
        columns, rows, whole = self.plan(given)
        tiles = columns * rows if columns * rows > 1 else 0
        of_whole = 0 if whole is None else math.prod(whole) // self.unit**2
        return tiles * (self.tile_size // self.unit) ** 2 + of_whole

    def _is_large(self, given: ImageSize) -> bool:
        """Return whether a picture is too large to be scaled as a whole alone."""
        width, height = (
            max(self.encoder_patch_size, round(side / self.unit) * self.unit) for side in given
        )
        return width * height > self.max_image_tokens * self.unit**2 * self.max_pixels_tolerance

    def _fit(self, given: ImageSize) -> ImageSize:
        """Return whole units close to a picture's shape, within the budget (`smart_resize`)."""
        unit, limits = self.unit, (self.min_image_tokens, self.max_image_tokens)
        rounded = ImageSize(*(max(unit, round(side / unit) * unit) for side in given))
        size = fit_pixels(given, rounded, unit, *(limit * unit**2 for limit in limits))
        if (count := math.prod(size) // unit**2) > self.most_tokens:
            raise RequestValueError(
                f"image is {given.width}x{given.height} pixels; scaled, it would have {count} "
                f"embeddings, and may have {self.most_tokens}: crop it",
                param="multi_modal_data",
            )
        return size


@lru_cache(maxsize=64)
def find_largest(budget: Budget) -> tuple[ImageSize, int]:
    """Return the size of a picture with the most embeddings, and their number."""
    counts: dict[ImageSize, int] = {}
    for size in _list_candidates(budget):
        with suppress(RequestValueError):  # of a sliver
            counts[size] = budget.count_tokens(size)
    # An operator describes a smaller one, and neither side may be longer.
    largest = max(counts, key=lambda size: (counts[size], min(size)))
    return largest, counts[largest]


def _list_candidates(budget: Budget) -> Iterator[ImageSize]:
    """Yield a picture of every shape that has whole units within the budget, small and large."""
    area = 2 * budget.max_pixels_tolerance * budget.max_image_tokens * budget.unit**2
    area = max(area, budget.max_tiles * budget.tile_size**2)
    for rows in range(1, budget.most_tokens + 1):
        for columns in range(1, budget.most_tokens // rows + 1):
            yield ImageSize(width=columns * budget.unit, height=rows * budget.unit)
            scale = math.ceil(math.sqrt(area / (rows * columns)))
            yield ImageSize(width=columns * scale, height=rows * scale)


class Lfm2VLImageProcessor:
    """The image part, by the settings of preprocessor_config.json."""

    valid_kwargs = frozenset(
        {
            *("do_image_splitting", "min_tiles", "max_tiles", "use_thumbnail"),
            *("min_image_tokens", "max_image_tokens"),
        }
    )

    def __init__(self, settings: Mapping[str, Any], *, patch_size: int, factor: int) -> None:
        """`settings`: those of the file; what it leaves out is as in HF."""
        self.own = {one.name: settings.get(one.name, one.default) for one in fields(Budget)}
        wanted = {"encoder_patch_size": patch_size, "downsample_factor": factor}
        check_settings(self.own, wanted, where="preprocessor_config.json")
        tile = self.budget({}).tile_size
        if tile % (patch_size * factor):
            raise CheckpointError(
                f"`tile_size` of preprocessor_config.json is {tile}; it must be a multiple of "
                f"{patch_size * factor}, the pixels of an embedding's side"
            )
        self.resample = Image.Resampling(settings.get("resample", Image.Resampling.BILINEAR))
        self.affine = read_affine({**_NORMALIZATION, **settings})

    def budget(self, kwargs: Mapping[str, Any]) -> Budget:
        """Return what a call's kwargs ask for, over the checkpoint's settings."""
        given = {key: value for key, value in kwargs.items() if value is not None}
        return Budget.of({**self.own, **given})

    def __call__(
        self, images: Sequence[Image.Image], *, return_tensors: str = "np", **kwargs: Any
    ) -> dict[str, np.ndarray]:
        """Return the patches of all tiles and whole pictures, one behind the other.

        Returns:
            `pixel_values` uint8[patches, rows, columns, 3], row by row; `spatial_shapes`
            int64[units, 2], the rows and columns of patches of each tile and whole picture;
            `image_tiles` int64[images, 2], rows and columns of tiles; and of each image
            `image_num_units` and `image_num_patches` int64[images].
        """
        budget = self.budget(kwargs)
        plans = [budget.plan(ImageSize(*image.size)) for image in images]
        pairs = list(zip(images, plans, strict=True))
        cut = map_in_threads(lambda pair: self._cut(*pair, budget), pairs)
        size = budget.encoder_patch_size
        shapes = [np.array([unit.shape[1:] for unit in units]) // size for units in cut]
        patches = [patchify(unit, size, size) for units in cut for unit in units]
        return {
            "pixel_values": np.concatenate(patches).reshape(-1, size, size, 3),
            "spatial_shapes": np.concatenate(shapes),
            "image_tiles": np.array([(plan.rows, plan.columns) for plan in plans], np.int64),
            "image_num_units": np.array([len(own) for own in shapes], np.int64),
            "image_num_patches": np.array([own.prod(-1).sum() for own in shapes], np.int64),
            "image_affine": self.affine,
        }

    def _cut(self, image: Image.Image, plan: Plan, budget: Budget) -> list[np.ndarray]:
        """Return the tiles of a picture, then the whole, each uint8[3, height, width]."""
        image = image if image.mode == "RGB" else image.convert("RGB")
        units: list[Image.Image] = []
        if plan.columns * plan.rows > 1:
            canvas = (plan.columns, plan.rows)
            options = {"has_thumbnail": False, "resample": self.resample}
            units += cut_tiles(image, canvas, budget.tile_size, **options)
        if plan.whole is not None:
            units.append(image.resize(plan.whole, self.resample))
        return [to_pixels(unit) for unit in units]


IMAGE, START, END = "<image>", "<|image_start|>", "<|image_end|>"
THUMBNAIL = "<|img_thumbnail|>"
CHAT_TEMPLATE = write_chatml(write_parts(image=IMAGE), "{{- bos_token -}}")
"""LFM2's turns, without tools."""


class Lfm2VLProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = ImagesOnlyDataParser
    """Nothing says how many of the embeddings are a tile."""
    host_inputs = Lfm2VLHostInputs
    placeholders: ClassVar = {"image": IMAGE}
    adds_special_tokens = False

    def load_hf_processor(self) -> ProcessorOfParts:
        """Put together what AutoProcessor would, which wants torchvision."""
        config = self.get_hf_config()
        self.check_token(IMAGE)
        check_settings(
            self.processor_settings, {"use_image_special_tokens": True}, source="mmjax writes"
        )
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=Lfm2VLImageProcessor(
                load_image_settings(self.ctx.model_config.path),
                patch_size=config.vision_config.patch_size,
                factor=config.downsample_factor,
            ),
        )

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Give HF's model tiles and whole pictures one by one, which are padded to each other."""
        if "spatial_shapes" not in tensors:
            return tensors
        counts = np.asarray(tensors["spatial_shapes"]).prod(-1)
        patches = tensors["pixel_values"].reshape(counts.sum(), -1)
        return {
            "pixel_values": np.split(patches, np.cumsum(counts)[:-1]),
            "pixel_attention_mask": [np.ones(count, np.int32) for count in counts],
            "spatial_shapes": tensors["spatial_shapes"],
        }

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the settings of the checkpoint or the operator by which pictures are larger."""
        processor: Lfm2VLImageProcessor = self.get_image_processor()
        levels = [
            processor.budget({**kwargs, "do_image_splitting": True, "use_thumbnail": True})
            for kwargs in ({}, self.scope_kwargs({}))
        ]
        largest = max(levels, key=lambda budget: find_largest(budget)[1])
        return {name: getattr(largest, name) for name in sorted(processor.valid_kwargs)}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        kwargs = self.scope_kwargs(self.get_planned_mm_kwargs())
        return find_largest(self.get_image_processor().budget(kwargs))

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        names = ("image_num_patches", "image_num_units")
        patches, units = (outputs.get(name, ()) for name in names)
        return {
            **item_fields("image", units=["pixel_values"], counts=patches),
            **item_fields("image", units_on_host=["spatial_shapes"], counts=units),
            **item_fields("image", on_host=["image_tiles", *names]),
        }

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the rows and columns of tiles, and the embeddings of each and of the whole."""
        squares = np.asarray(tensors["spatial_shapes"]) // self.get_hf_config().downsample_factor
        return (*tensors["image_tiles"].tolist(), *squares.prod(-1).tolist())

    def write_item(self, modality: str, size: tuple[int, ...]) -> list[int]:
        """Write a picture of (rows, columns, embeddings...) of its tiles and of the whole."""
        rows, columns, *counts = size
        tiles = [(row, column) for row in range(rows) for column in range(columns)]
        names = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row, column in tiles]
        names = [*names, THUMBNAIL][: len(counts)] if len(tiles) > 1 else [""]
        pieces = (name + IMAGE * count for name, count in zip(names, counts, strict=True))
        return as_ids(START + "".join(pieces) + END, self.get_tokenizer())


FACTORIES = make_factories(Lfm2VLProcessingInfo)
