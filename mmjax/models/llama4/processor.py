"""Llama 4's prompt side: tiles of a picture row by row, and the whole of it last.

Before: `look <|image|> please`. After, of a picture of 1 x 2 tiles: `look <|image_start|>
<|patch|>*N <|tile_x_separator|> <|patch|>*N <|tile_y_separator|> <|image|> <|patch|>*N
<|image_end|> please`, without the blanks; of one tile `<|image_start|><|image|><|patch|>*N
<|image_end|>`. Only the N take embeddings.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from mmjax.errors import check_settings
from mmjax.models.family import Target, make_factories
from mmjax.models.llama4.host_inputs import Llama4HostInputs, normalize, to_bfloat16
from mmjax.models.tiles import TiledInfo, TileGridInfo
from mmjax.processing.chat_turns import write_parts, write_turns
from mmjax.processing.image_processors.affine import make_affine
from mmjax.processing.image_processors.crops import MAX_TILES
from mmjax.processing.image_processors.image import check_bool, check_count, to_pixels
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_image_settings
from mmjax.processing.image_processors.tiling import list_arrangements
from mmjax.processing.items.items import ImageSize
from mmjax.processing.items.parse import ImagesOnlyDataParser

IMAGE, PATCH, START, END = "<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>"
COLUMN, ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"

_KNOWN = {
    **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    **{"do_resize": True, "do_rescale": True, "do_normalize": True},
}
"""Of preprocessor_config.json: what `normalize` is written for, and every published file has."""


@lru_cache(maxsize=1024)
def choose_canvas(size: ImageSize, most: int, side: int, *, is_largest: bool) -> tuple[int, int]:
    """Return the (columns, rows) of tiles to which a picture is scaled up least; else down least.

    `is_largest`: up most. Of equal scales, in float32 as HF has them, that of the fewest tiles.
    """
    canvases = np.array(list_arrangements(1, most), np.int64)
    sides = (canvases * side).astype(np.float32)
    scales = (sides / np.array(size, np.float32)).min(axis=1)
    larger = scales[scales >= 1]
    takes_most = is_largest or not len(larger)
    candidates = larger if len(larger) else scales
    chosen = candidates.max() if takes_most else candidates.min()
    equal = canvases[scales == chosen]
    columns, rows = equal[np.argmin(equal.prod(axis=1))].tolist()
    return columns, rows


def fit(size: ImageSize, room: ImageSize) -> ImageSize:
    """Return the size of a picture, scaled to the room's width or height."""
    across, down = room.width / size.width, room.height / size.height
    if across < down:
        width, height = room.width, min(math.floor(size.height * across), room.height)
    else:
        width, height = min(math.floor(size.width * down), room.width), room.height
    return ImageSize(width=max(width, 1), height=max(height, 1))


class PaddedTileCutter:
    """HF's `Llama4ImageProcessor`, which needs torchvision, by preprocessor_config.json.

    A picture is scaled to fit a canvas of tiles, and padded to it with black, on the right and
    below; it grows up to a tile's side alone, or, by `resize_to_max_canvas`, to the canvas.
    """

    def __init__(self, settings: Mapping[str, Any], tile_size: int) -> None:
        """`settings`: those of the file; what it leaves out is as in HF."""
        facts = {**_KNOWN, "size": {"height": tile_size, "width": tile_size}}
        where, source = "preprocessor_config.json", "Llama 4 is served with"
        check_settings(settings, facts, where=where, source=source)
        rescale = {"rescale_factor": round(settings.get("rescale_factor") or 1 / 255, 12)}
        check_settings(rescale, {"rescale_factor": round(1 / 255, 12)}, where=where, source=source)
        self.tile_size = tile_size
        self.resample = Image.Resampling(settings.get("resample", Image.Resampling.BILINEAR))
        names = {"max_patches": 16, "resize_to_max_canvas": False}
        self.defaults = {name: settings.get(name, value) for name, value in names.items()}
        self.affine = make_affine()  # `normalize` is the model's

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return frozenset(self.defaults)

    def __call__(
        self, images: Sequence[Image.Image], *, return_tensors: str, **kwargs: Any
    ) -> dict[str, np.ndarray]:
        """Return `pixel_values` uint8[tiles, 3, S, S], and `aspect_ratios` int64[images, 2].

        The latter is how many tiles stand one above the other, and side by side.
        """
        canvases = [self.arrange(ImageSize(*image.size), kwargs) for image in images]
        tiles = [
            tile
            for image, canvas in zip(images, canvases, strict=True)
            for tile in self._cut(image.convert("RGB"), canvas, kwargs)
        ]
        return {
            "pixel_values": np.stack([to_pixels(tile) for tile in tiles]),
            "aspect_ratios": np.array([one[::-1] for one in canvases], np.int64),
            "image_affine": self.affine,
        }

    def _resolve(self, kwargs: Mapping[str, Any]) -> tuple[int, bool]:
        """Return the most tiles, and whether pictures grow to their canvas."""
        given = {key: value for key, value in kwargs.items() if value is not None}
        most, is_largest = ({**self.defaults, **given}[name] for name in self.defaults)
        check_bool("resize_to_max_canvas", is_largest)
        return check_count("max_patches", most, MAX_TILES, "tiles"), is_largest

    def get_limits(self, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """As `TileCutter`'s."""
        return 1, self._resolve(kwargs)[0]

    def arrange(self, size: ImageSize, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the columns and rows of a picture's tiles."""
        most, is_largest = self._resolve(kwargs)
        return choose_canvas(size, most, self.tile_size, is_largest=is_largest)

    def count_tiles(self, size: ImageSize, kwargs: Mapping[str, Any]) -> int:
        """As `TileCutter`'s."""
        columns, rows = self.arrange(size, kwargs)
        return columns * rows + int(columns * rows > 1)

    def _cut(
        self, image: Image.Image, canvas: tuple[int, int], kwargs: Mapping[str, Any]
    ) -> list[Image.Image]:
        side, (columns, rows) = self.tile_size, canvas
        size = room = ImageSize(width=side * columns, height=side * rows)
        if not self._resolve(kwargs)[1]:
            width, height = (max(own, side) for own in image.size)
            room = ImageSize(width=min(width, size.width), height=min(height, size.height))
        resized = image.resize(fit(ImageSize(*image.size), room), self.resample)
        padded = Image.new("RGB", size)
        padded.paste(resized, (0, 0))
        tiles = [
            padded.crop((x * side, y * side, (x + 1) * side, (y + 1) * side))
            for y in range(rows)
            for x in range(columns)
        ]
        whole = [image.resize((side, side), self.resample)] if len(tiles) > 1 else []
        return tiles + whole


class Llama4ProcessingInfo(TileGridInfo, TiledInfo):
    chat_template = write_turns(
        start=r"'<|header_start|>' + message.role + '<|header_end|>\n\n'",
        content=write_parts(image=IMAGE),
        end="'<|eot|>'",
        answer=r"'<|header_start|>assistant<|header_end|>\n\n'",
    )
    # The number of rows does not say how the tiles stand.
    data_parser = ImagesOnlyDataParser
    host_inputs = Llama4HostInputs
    placeholders: ClassVar = {"image": IMAGE}
    embed_token = PATCH
    reserves_embed_token = True
    grid_name = "aspect_ratios"
    tile_kwargs = ("resize_to_max_canvas", "max_patches")

    def load_hf_processor(self) -> ProcessorOfParts:
        self.check_token(PATCH)
        vision = self.get_hf_config().vision_config
        facts = {"patch_size": vision.patch_size, "pixel_shuffle_ratio": vision.pixel_shuffle_ratio}
        defaults = {"patch_size": 14, "pixel_shuffle_ratio": 0.5}  # HF's
        check_settings({**defaults, **self.processor_settings}, facts)
        settings = load_image_settings(self.ctx.model_config.path)
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=PaddedTileCutter(settings, vision.image_size),
        )

    def get_target(self, modality: str) -> Target:
        return [self.get_token_id(IMAGE)]

    def write_item(self, modality: str, size: tuple[int, int]) -> list[int]:
        """Write a picture of so many rows and columns of tiles."""
        rows, columns = size
        tile = [PATCH] * self.num_unit_tokens
        row = [*tile, *[COLUMN, *tile] * (columns - 1), ROW]
        cut = row * rows if rows * columns > 1 else []
        return [self.get_token_id(token) for token in (START, *cut, IMAGE, *tile, END)]

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the pixels as HF's image processor makes them."""
        if "pixel_values" not in tensors:
            return tensors
        return {**tensors, "pixel_values": normalize(tensors["pixel_values"], to_bfloat16)}


FACTORIES = make_factories(Llama4ProcessingInfo)
