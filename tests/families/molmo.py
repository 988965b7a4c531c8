"""The tiny Molmo checkpoint; the oracle follows the published processor's description, by loops.

transformers has no class of it, and the published one is remote code: it is written again here, of
whole-image arrays and in other steps than ours.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedConfig

from tests.families.directories import edit_golden, golden_path
from tests.families.family import Family, HFInputs
from tests.families.published import Published
from tests.families.published_names import list_molmo

PATH = golden_path("molmo")
SIDE, PATCH, MARGIN, MAX_CROPS = 112, 14, 2, 6
"""Of preprocessor_config.json; either margin."""
WINDOW = SIDE - 2 * MARGIN * PATCH
TOKENS = SIDE // PATCH // 2


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(PATH, trust_remote_code=False)


def weigh(size: int, new_size: int) -> np.ndarray:
    """Return float64[new, old]: a triangle over each new pixel, as wide as what it shrinks."""
    scale = size / new_size
    support = max(scale, 1.0)
    centers = (np.arange(new_size) + 0.5) * scale
    distances = np.abs(np.arange(size) + 0.5 - centers[:, None]) / support
    weights = np.maximum(1 - distances, 0)
    return weights / weights.sum(1, keepdims=True)


def fit(image: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return [height, width, 3], normalised after its padding, and the mask of the image in it."""
    f32 = np.float32
    scale = min(f32(height) / f32(image.shape[0]), f32(width) / f32(image.shape[1]))
    new_height, new_width = (int(f32(side) * scale) for side in image.shape[:2])
    rows, columns = weigh(image.shape[0], new_height), weigh(image.shape[1], new_width)
    resized = np.einsum("hy,yxc,wx->hwc", rows, image / 255, columns, optimize=True)
    top, left = (height - new_height) // 2, (width - new_width) // 2
    below, right = height - new_height - top, width - new_width - left
    mask = np.pad(np.ones((new_height, new_width)), ((top, below), (left, right)))
    padded = np.pad(resized, ((top, below), (left, right), (0, 0)))
    settings = json.loads((PATH / "preprocessor_config.json").read_text())
    return (padded - settings["image_mean"]) / settings["image_std"], mask


def tile(height: int, width: int, max_crops: int) -> tuple[int, int]:
    margin, numbers = 2 * MARGIN * PATCH, range(1, max_crops + 1)
    tilings = [(i, j) for i in numbers for j in numbers if i * j <= max_crops]
    tilings.sort(key=lambda one: (one[0] * one[1], one[0]))
    sides = np.array([height - margin, width - margin], np.float32)
    with np.errstate(divide="ignore"):
        scales = [(np.array(one, np.float32) * np.float32(WINDOW) / sides).min() for one in tilings]
    enough = [scale for scale in scales if scale >= 1]
    return tilings[scales.index(min(enough) if enough else max(scales))]


def to_patches(crop: np.ndarray) -> np.ndarray:
    starts = range(0, SIDE, PATCH)
    return np.stack(
        [crop[y : y + PATCH, x : x + PATCH].reshape(-1) for y in starts for x in starts]
    )


def write_grid(rows: int, columns: int) -> list[str]:
    return ["<im_start>", *[*["<im_patch>"] * columns, "<im_col>"] * rows, "<im_end>"]


def is_read(place: int, number: int, count: int) -> bool:
    """Whether a row of tokens is read in tile `number` of `count`; neighbours share two rows."""
    return (number == 0 or place >= 1) and (number == count - 1 or place < TOKENS - 1)


def number_tokens(tile_place: tuple[int, int], tiling: tuple[int, int]) -> list[int]:
    """Return each token's number in the whole image, row by row; -1 where it is not read."""
    (row, column), (rows, columns), step = tile_place, tiling, WINDOW // PATCH // 2
    grid_columns = columns * step + MARGIN
    return [
        (row * step + y) * grid_columns + column * step + x
        if is_read(y, row, rows) and is_read(x, column, columns)
        else -1
        for y in range(TOKENS)
        for x in range(TOKENS)
    ]


def cut(image: Any, max_crops: int) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return an image's tokens and tensors."""
    pixels = np.asarray(image.convert("RGB")).astype(np.float64)
    tiling = tile(image.height, image.width, max_crops)
    sides = [number * WINDOW + 2 * MARGIN * PATCH for number in tiling]
    whole, _ = fit(pixels, SIDE, SIDE)
    tiled, mask = fit(pixels, *sides)
    crops, masks, numbers = [to_patches(whole)], [], [np.arange(TOKENS**2)]
    for row, column in np.ndindex(*tiling):
        inside = np.s_[row * WINDOW :, column * WINDOW :]
        crops.append(to_patches(tiled[inside][:SIDE, :SIDE]))
        masks.append(to_patches(mask[inside][:SIDE, :SIDE]).mean(1))
        found = np.array(number_tokens((row, column), tiling))
        numbers.append(np.where(found < 0, -1, found + TOKENS**2))
    masks.append(np.full(len(masks[0]), -1.0))
    grid_rows, grid_columns = (side // PATCH // 2 for side in sides)
    tokens = write_grid(TOKENS, TOKENS) + write_grid(grid_rows, grid_columns)
    places = 1 + np.flatnonzero(np.array(tokens) == "<im_patch>")  # behind BOS
    indices = np.stack(numbers)
    tensors = {
        "images": np.stack(crops),
        "image_masks": np.stack(masks),
        "image_input_idx": np.where(indices < 0, -100, places[indices]),
    }
    return tokens, tensors


def call_published(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Return ids and tensors; a prompt that is a turn already stays as it is."""
    text, tensors, tokens = prompt.removeprefix("<|endoftext|>"), {}, []
    if not text.startswith(("User:", " User:")):
        text = f"User: {text} Assistant:"
    text = text if text.startswith(" User:") else f" {text}"
    if images:
        tokens, tensors = cut(images[0], kwargs.get("max_crops", MAX_CROPS))
    start = [tokenizer().eos_token_id, *tokenizer().convert_tokens_to_ids(tokens)]
    return HFInputs([*start, *tokenizer().encode(text, add_special_tokens=False)], tensors)


def takes_size(width: int, height: int) -> bool:
    """The short side must have a pixel left where the long one has a crop's."""
    return min(width, height) * SIDE >= max(width, height)


def write(folder: Path) -> Path:
    """The published numbers' weights, cut into other heads."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    return edit_golden("molmo", folder, config=heads)


MOLMO = Family(
    name="molmo",
    architecture="MolmoForCausalLM",
    has_reference=False,
    path=lambda: PATH,
    write=write,
    needless_files=frozenset({"processor_config.json"}),
    published=Published(make_config=PreTrainedConfig, list_shapes=list_molmo),
    rendered="User: what is it Assistant: a car User: which color Assistant:",
    with_system=("User: what", "User: be short\n\nwhat"),
    takes_embeds=False,
    call_hf=call_published,
    embed_token_ids=lambda processor: [processor.info.get_token_id("<im_patch>")],
    max_images=1,
    extra_kwargs=({}, {"max_crops": 3}),
    lowering_kwargs={"max_crops": 2},
    pixels_dtype="float32",
    tensors={"images": 1e-4, "image_masks": 1e-6, "image_input_idx": 0.0},
    takes_size=takes_size,
    words=(*Family.words, "User:", " User: it", "Assistant:", "<|endoftext|>", "<im_start>"),
)
