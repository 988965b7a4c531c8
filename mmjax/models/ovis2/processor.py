"""Ovis2's prompt side: the whole of a picture, and its tiles row by row.

Before: `look <image> please`. After, of a picture of 1 x 2 tiles: `look <IMG_START><IMG_ATOM>*N
<IMG_GRID><IMG_ATOM>*N<IMG_COL><IMG_ATOM>*N<IMG_END> please`, without the blanks; of one that is not
cut: `<IMG_START><IMG_ATOM>*N<IMG_GRID><IMG_END>`. All of them take embeddings.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from mmjax.errors import check_settings
from mmjax.models.family import make_factories
from mmjax.models.ovis2.host_inputs import MARKS, Ovis2HostInputs, arrange
from mmjax.models.tiles import TiledInfo, TileGridInfo
from mmjax.processing.chat_turns import QWEN_SYSTEM, write_chatml, write_parts
from mmjax.processing.image_processors.parts import ProcessorOfParts
from mmjax.processing.image_processors.tiling import HFCutter
from mmjax.processing.items.items import ImageSize
from mmjax.processing.items.parse import ImagesOnlyDataParser

ATOM = "<IMG_ATOM>"


class GridCutter(HFCutter):
    """HF's `Ovis2ImageProcessorPil`."""

    division = ("grids", "image_grids")


class Ovis2ProcessingInfo(TileGridInfo, TiledInfo):
    chat_template = write_chatml(write_parts(image=r"<image>\n"), first=QWEN_SYSTEM)
    data_parser = ImagesOnlyDataParser
    host_inputs = Ovis2HostInputs
    image_processors: ClassVar = {"Ovis2": "ovis2"}
    cutter = GridCutter
    grid_name = "image_grids"
    placeholders: ClassVar = {"image": "<image>"}
    embed_token = ATOM
    item_bounds = (MARKS[0], MARKS[-1])

    def load_hf_processor(self) -> ProcessorOfParts:
        self.check_token(ATOM)
        marks = "visual_indicator_token_ids"
        known = {marks: [self.get_token_id(mark) for mark in MARKS]}
        check_settings({marks: self._mark_ids}, known, where="config.json", source="tokens are")
        settings = {"image_seq_length": 256, **self.processor_settings}
        check_settings(settings, {"image_seq_length": self.num_unit_tokens})
        return super().load_hf_processor()

    @property
    def _mark_ids(self) -> list[int]:
        return list(self.get_hf_config().visual_indicator_token_ids)

    def get_embed_token_ids(self, modality: str) -> Sequence[int]:
        return [self.get_embed_token_id(modality), *self._mark_ids]

    def get_reserved_tokens(self) -> Mapping[str, int]:
        return dict(zip((ATOM, *MARKS), self.get_embed_token_ids("image"), strict=True))

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of a picture in a row of tiles, as many as can be."""
        cutter: GridCutter = self.get_image_processor()
        _, most = cutter.get_limits(self.scope_kwargs(self.get_planned_mm_kwargs()))
        # No other grid covers 0.9 of it, of which HF's takes the one with the fewest tiles.
        side = cutter.tile_size + cutter.tile_size // 8
        num_embeds = len(arrange(1, most, self.num_unit_tokens))
        return ImageSize(width=most * side, height=side), num_embeds

    def write_item(self, modality: str, size: tuple[int, int]) -> list[int]:
        rows = arrange(*size, self.num_unit_tokens)
        marks = np.array(self._mark_ids)[-1 - np.minimum(rows, -1)]
        return np.where(rows < 0, marks, self.get_embed_token_id(modality)).tolist()


FACTORIES = make_factories(Ovis2ProcessingInfo)
