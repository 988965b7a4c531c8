r"""Granite for Docling's prompt side: tiles of a page, row by row, and the whole behind them.

Before: `look <image>`. After, of a page of one row and two columns: `look
<fake_token_around_image> <row_1_col_1> <image>*N <fake_token_around_image> <row_1_col_2>
<image>*N \n \n <fake_token_around_image> <global-img> <image>*N <fake_token_around_image>`;
of one tile `look <fake_token_around_image> <row_1_col_1> <image>*N \n`. Only the N take embeddings:
four times as many by the fine route, which is for dense pages (`fine_route`).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from mmjax.errors import RequestValueError, check_settings
from mmjax.models.family import make_factories
from mmjax.models.granite_docling.host_inputs import GraniteDoclingHostInputs
from mmjax.models.tiles import TiledInfo, TileGridInfo
from mmjax.processing.chat_turns import GRANITE4_TURNS
from mmjax.processing.image_processors.image import check_bool, to_pixels
from mmjax.processing.image_processors.parts import ProcessorOfParts
from mmjax.processing.image_processors.tiling import HFCutter, find_largest_picture
from mmjax.processing.items.parse import ImageSize, ImagesOnlyDataParser
from mmjax.processing.prompt_updates.updates import as_ids

IMAGE, FAKE, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
_MOST_SIDE = 16
"""Tiles a side for which there are tokens, and HF's image processor makes no more."""
_GROWTH = 1.25
"""By which pages are made larger to find one that is seen in more tiles."""


class PageCutter(HFCutter):
    """HF's `GraniteDoclingImageProcessorPil`."""

    division = ("layouts", "image_layouts")
    has_fine_route = True
    """Whether the checkpoint has its weights."""

    @property
    def valid_kwargs(self) -> frozenset[str]:
        """All but the rule by which some pages have more tiles: a checkpoint is trained with it."""
        return frozenset(name for name in super().valid_kwargs if not name.startswith("dense_"))

    def call_hf(self, images: Sequence[Image.Image], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tiles of all images, and of each its rows, columns and route."""
        is_fine = self.takes_fine_route(kwargs)
        # Arrays: HF asks an image for more than its shape before it is resized.
        outputs = self.hf([to_pixels(image) for image in images], **kwargs)
        (rows,), (columns,) = outputs["rows"], outputs["cols"]
        return {
            "pixel_values": outputs["pixel_values"][0].astype(np.uint8),
            "layouts": [(*grid, is_fine) for grid in zip(rows, columns, strict=True)],
            "image_affine": outputs["image_affine"],
        }

    def takes_fine_route(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether tiles have four times as many embeddings."""
        given = kwargs.get("fine_route")
        is_fine = check_bool("fine_route", self.hf.fine_route if given is None else given)
        if is_fine and not self.has_fine_route:
            raise RequestValueError(
                "`fine_route` is true in mm_processor_kwargs, but the checkpoint has no such route "
                "(`use_fine_route` of config.json); leave it out",
                param="mm_processor_kwargs.fine_route",
            )
        return is_fine

    def count_tiles(self, size: ImageSize, kwargs: Mapping[str, Any]) -> int:
        given = {key: value for key, value in kwargs.items() if value is not None}
        return self.hf.get_number_of_image_patches(size.height, size.width, given)

    def find_largest(self, kwargs: Mapping[str, Any], max_pixels: int) -> tuple[ImageSize, int]:
        """Return the size of a page with the most tiles, and how many.

        Where a rule gives pages of some shapes more tiles (`dense_max_patches`), also pages that
        are larger than their tiles, which they may have to be for it.
        """
        found, hf = find_largest_picture(self, kwargs), self.hf
        if self.get_limits(kwargs) == (1, 1):
            return found
        sides = range(1, 1 + _MOST_SIDE)
        grids = [one for one in product(sides, sides) if math.prod(one) <= hf.dense_max_patches]
        for columns, rows in sorted(grids, key=math.prod, reverse=True):
            if columns * rows < found[1]:
                break
            # Of the shapes that the rule is for, the closest to the grid's.
            aspect = max(columns / rows, hf.dense_min_aspect * (1 + 1e-3))
            aspect = min(aspect, hf.dense_max_aspect or aspect)
            width = float(columns * self.tile_size)
            while width * width / aspect <= max_pixels:
                size = ImageSize(width=round(width), height=max(1, round(width / aspect)))
                found = max(found, (size, self.count_tiles(size, kwargs)), key=itemgetter(1))
                width *= _GROWTH
        return found


class GraniteDoclingProcessingInfo(TileGridInfo, TiledInfo):
    chat_template = GRANITE4_TURNS
    data_parser = ImagesOnlyDataParser
    host_inputs = GraniteDoclingHostInputs
    image_processors: ClassVar = {"GraniteDocling": "granite_docling"}
    cutter = PageCutter
    grid_name = "image_layouts"
    placeholders: ClassVar = {"image": IMAGE}
    embed_token = IMAGE
    # A page of one tile ends with a newline, which may merge with what is behind it.
    text_bounds: ClassVar = {"image": (FAKE, IMAGE)}
    tasks: ClassVar = {
        "Page to DocLang": "<doclang>",
        "Text of a page": "<doclang> [<ocr>]",
        "Layout of a page": "<doclang> [<layout>]",
        "Tables of a page": "<doclang> [<table>]",
        "Formulas of a page": "<doclang> [<formula>]",
        "Code of a page": "<doclang> [<code>]",
        "Charts of a page": "<doclang> [<chart>]",
        "Pictures of a page": "<doclang> [<picture>]",
    }

    def load_hf_processor(self) -> ProcessorOfParts:
        check_settings(self.processor_settings, {"image_seq_len": self.own_inputs.num_coarse})
        self.check_token(IMAGE)
        parts = super().load_hf_processor()
        cutter: PageCutter = parts.image_processor
        cutter.has_fine_route = self.get_hf_config().vision_config.use_fine_route
        if not cutter.has_fine_route:
            source = "by `use_fine_route` of config.json it must be"
            check_settings(
                cutter.hf, {"fine_route": False}, where="the image processor", source=source
            )
        return parts

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Give HF's model `[prompts, tiles, C, Y, X]`; of a prompt's pages it takes one route."""
        if "pixel_values" not in tensors:
            return tensors
        pixels, is_fine = tensors["pixel_values"], np.asarray(tensors["image_layouts"])[:, 2]
        mask = {"tile_fine_mask": np.ones(1, bool)} if is_fine.all() else {}
        all_tiles = np.ones((1, len(pixels)), bool)
        return {"pixel_values": pixels[None], "pixel_attention_mask": all_tiles, **mask}

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return those of tiles, and the fine route where there is one."""
        cutter: PageCutter = self.get_image_processor()
        return {**super().get_largest_mm_kwargs(), "fine_route": cutter.has_fine_route}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of a page with the most tiles, and how many embeddings it has."""
        cutter: PageCutter = self.get_image_processor()
        kwargs = self.scope_kwargs(self.get_planned_mm_kwargs())
        size, number = cutter.find_largest(kwargs, self.get_media_limits().max_image_pixels)
        return size, number * self.own_inputs.count_tile_tokens(cutter.takes_fine_route(kwargs))

    def write_item(self, modality: str, size: tuple[int, int, int]) -> list[int]:
        """Write a page of (rows, columns) of tiles, by the coarse route (0) or the fine one."""
        rows, columns, is_fine = size
        images = IMAGE * self.own_inputs.count_tile_tokens(bool(is_fine))
        lines = [
            "".join(f"{FAKE}<row_{row + 1}_col_{col + 1}>{images}" for col in range(columns))
            for row in range(rows)
        ]
        whole = f"\n{FAKE}{WHOLE}{images}{FAKE}" if rows * columns > 1 else ""
        return as_ids("\n".join([*lines, whole]), self.get_tokenizer())


FACTORIES = make_factories(GraniteDoclingProcessingInfo)
