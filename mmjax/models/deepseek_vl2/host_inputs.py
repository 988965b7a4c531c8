"""DeepSeek-VL2's encoder inputs: a view of the whole image and its tiles, each a unit.

The order of an image's embeddings (`tile_tag` 2D): the view's rows, each with a newline behind it;
a separator; then the tiles' rows, across all tiles that stand side by side, likewise.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import UnitHostInputs, end_lines, number_cells
from mmjax.rounding import cdiv

SEPARATOR = -2
"""As `embed_rows` counts the model's extra embeddings, behind `NEWLINE`."""

_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "vision_config": {
        "image_size": 384,
        "layers": 27,
        "mlp_ratio": 3.7362,
        "model_name": "siglip_so400m_patch14_384",
        "num_heads": 16,
        "patch_size": 14,
        "width": 1152,
    },
    "projector_config": {
        "depth": 2,
        "downsample_ratio": 2,
        "input_dim": 1152,
        "mlp_ratio": 1,
        "projector_type": "downsample_mlp_gelu",
        "token_pooling": False,
    },
    "": {"global_view_pos": "head", "tile_tag": "2D"},
}
"""What a key means where a part of the configuration leaves it out."""
_ONLY = {
    "vision_config": ("model_name",),
    "projector_config": ("depth", "mlp_ratio", "projector_type", "token_pooling"),
    "": ("global_view_pos", "tile_tag"),
}
"""Keys whose values above are all that is published, and served."""


def read_part(hf_config: Any, part: str) -> dict[str, Any]:
    """Return the keys of a part of the configuration ("": its own); `CheckpointError` if unknown.

    Unknown are values that no published model has: other towers, projectors and orders of tiles.
    """
    whole = getattr(hf_config, part) if part else hf_config
    values = {key: getattr(whole, key, value) for key, value in _LEFT_OUT[part].items()}
    for key in _ONLY[part]:
        if values[key] != _LEFT_OUT[part][key]:
            name = f"{part}.{key}" if part else key
            raise CheckpointError(
                f"`{name}` is {values[key]!r}; mmjax serves {_LEFT_OUT[part][key]!r} alone"
            )
    return values


def count_side_tokens(hf_config: Any) -> int:
    """Return how many rows, and columns, of embeddings a tile has."""
    vision = read_part(hf_config, "vision_config")
    ratio = read_part(hf_config, "projector_config")["downsample_ratio"]
    return cdiv(vision["image_size"] // vision["patch_size"], ratio)


def count_image_tokens(side: int, columns: int, rows: int) -> int:
    """Return the embeddings of an image of `columns` by `rows` tiles of `side` rows each."""
    return side * (side + 1) + 1 + rows * side * (columns * side + 1)


class DeepseekVLV2HostInputs(UnitHostInputs):
    """Tiles of one size, with as many embeddings each, and learned ones between them."""

    num_extra_rows = 2

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        side = read_part(hf_config, "vision_config")["image_size"]
        return (3, side, side), count_side_tokens(hf_config) ** 2

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows of the view, the separator, and the rows across the tiles."""
        side = count_side_tokens(self.hf_config)
        columns, rows = item["images_spatial_crop"].tolist()
        view, tiles = number_cells((1, 1), side), side**2 + number_cells((rows, columns), side)
        return np.concatenate([end_lines(view), [SEPARATOR], end_lines(tiles)]).astype(np.int32)
