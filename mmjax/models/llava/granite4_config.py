"""What Granite 4 Vision's config.json says of the Q-Formers between its tower and its decoder.

Each reads one state of the tower, in windows, and feeds one layer of the decoder.
"""

import re
from typing import Any

from mmjax.errors import CheckpointError, check_settings

MAX_CORNERS = 4
"""Q-Formers whose queries begin with a corner of each square of 2 x 2 patches."""
_REQUIRED = {"use_spatial_sampling": True, "use_image_newline_parameter": True}
"""Keys that HF's class does not read, and whose other values it does not compute."""


def read_window(hf_config: Any) -> tuple[int, int]:
    """Return how many queries lie along a window's side, and how many patches."""
    given, vision = hf_config.downsample_rate, hf_config.vision_config
    side = vision.image_size // vision.patch_size
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", str(given))
    if found is None:
        raise CheckpointError(
            f"`downsample_rate` of config.json is {given!r}; it must be the queries and the "
            "patches along a window's side, as in `4/8`"
        )
    query_side, window_side = int(found[1]), int(found[2])
    if side % window_side:
        raise CheckpointError(
            f"`downsample_rate` of config.json is {given!r}; windows of {window_side} patches must "
            f"divide the {side} along a tile's side (`image_size` and `patch_size`)"
        )
    if hf_config.spatial_target_layers and 2 * query_side != window_side:
        raise CheckpointError(
            f"`downsample_rate` of config.json is {given!r}, but `spatial_target_layers` are fed "
            "corners of squares of 2 x 2 patches, half of them along a side; give them none, or "
            "another rate"
        )
    return query_side, window_side


def read_fed_layers(hf_config: Any) -> tuple[int, ...]:
    """Return which layer of the decoder each Q-Former feeds; first those of several states."""
    check_settings(hf_config, _REQUIRED, where="config.json", source="Granite 4 Vision has")
    pairs, corners = hf_config.deepstack_layer_map, hf_config.spatial_target_layers
    layers = (*(layer for _, layer in pairs or ()), *corners)
    num_layers = hf_config.get_text_config().num_hidden_layers
    is_known = all(0 <= layer < num_layers for layer in layers)
    if not layers or not is_known or len({*layers}) < len(layers) or len(corners) > MAX_CORNERS:
        raise CheckpointError(
            f"`deepstack_layer_map` of config.json is {pairs}, and `spatial_target_layers` "
            f"{corners}; give pairs of a state of the tower and a layer of the decoder, and up to "
            f"{MAX_CORNERS} layers, each from 0 to {num_layers - 1} and no layer twice"
        )
    return layers
