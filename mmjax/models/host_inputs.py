"""What the host computes for a model's arrays, in numpy: encoder inputs, embedding rows, positions.

A family subclasses `HostInputs` beside its processor, and its model class names the subclass. No
jax: all of it depends on the items of a request, and is done before anything reaches the device.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.processing.image_processors.affine import AFFINE_KEYS
from mmjax.processing.tensors.inputs import PlaceholderRange

AFFINE = "affine"
"""The input of `encode` that makes float32 pixels of bytes; no input of `embed_multimodal`."""
Sees = Literal["past", "reference", "items", "all_items", "prompt"]
"""What tokens see. Those before them; the same in a prompt, and of an answer the prompt and a
window (R-SWA, arXiv 2606.23050). And what a prompt's tokens see beside those before them: all of
their own run of an item's embeddings; all embeddings of all items; all of the prompt."""
AHEAD: frozenset[Sees] = frozenset({"items", "all_items", "prompt"})
"""Where tokens see what comes behind them, which then is computed in one step with them."""
NEWLINE = -1
"""The first of a model's extra embeddings, as `embed_rows` counts them, where it ends lines."""
_NUM_COLOURS = 3
_NOWHERE = 2**30
"""How far away from a patch one stands that there is not: with any row's number an int32."""


def byte_pixels(
    name: str, shape: tuple[int, ...], *, colours_last: bool = False
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the inputs of an encoder that takes pixels, which stay bytes until `encode`.

    `embed_multimodal` is given them rescaled and normalised, float32. The processor gives uint8
    and what `make_affine` returns. `shape`: of a unit's or a patch's; colours come first in it,
    or last. CheckpointError where the config's images have other colours than red, green, blue.
    """
    if shape[-1 if colours_last else 0] % _NUM_COLOURS:
        raise CheckpointError(
            f"the config's images give `{name}` of {list(shape)}, whose colours are not "
            f"{_NUM_COLOURS}; images are red, green and blue: set `num_channels` to 3"
        )
    colours = (1, _NUM_COLOURS) if colours_last else (_NUM_COLOURS, 1)
    return {name: (shape, "uint8"), AFFINE: ((3, *colours), "float32")}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """How items become calls of `encode`: units of one fixed shape (a tile, a crop), in buckets.

    An item is one or more units; a call holds one bucket's units, of any number of items.
    """

    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    """Per input of `embed_multimodal`: shape of one unit, dtype."""
    tokens_per_unit: int
    """Rows that one unit gives; an item's rows are its units', in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedEncoderSpec:
    """How items of any size become calls of `encode`: rows of patches, packed into buckets of `P`.

    `embed_multimodal` is given `segment_ids`, int32[P], beside the inputs: the number of a row's
    item in the call, -1 for padding (rows of zeros). An item's rows stand together and in order.
    What depends on its grid (places, rotary rows, windows) are inputs too, a row for each patch.
    """

    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    """Per input of `embed_multimodal`: shape of one patch's row, dtype."""
    patches_per_token: int
    """So many rows, one behind the other, become one embedding; divides each item's number."""
    patches_per_kept: int = 0
    """The most rows of an item for each embedding of its placeholder, where `embed_rows` leaves
    some out; 0: none is left out."""
    patches_per_crop: int = 1
    """So many rows are one crop: an item starts where a crop does, and buckets hold whole ones."""
    starts_anywhere: bool = False
    """Whether an item may start at any row, and its embeddings at the row's number over
    `patches_per_token`, rounded up; else it starts at a multiple. `False` wastes room where that is
    no power of two: keys lie in blocks of such numbers."""

    patches_per_key: int = 1
    """So many rows are joined to one midway, which is then a key to others: a power of two."""

    @property
    def patches_per_start(self) -> int:
        """What the rows at which items start, and the buckets' sizes, are multiples of."""
        if self.starts_anywhere:
            return 1
        return math.lcm(self.patches_per_token, self.patches_per_crop)


class PromptItem(NamedTuple):
    """One item of a prompt, as its positions depend on it."""

    position: PlaceholderRange
    tensors: Mapping[str, np.ndarray]
    """What the processor made of it, by name."""


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Positions of a request's tokens that are not their indices (M-RoPE, arXiv 2409.12191)."""

    prompt: np.ndarray
    """int32[3, T]: time, row and column of every token of the prompt."""
    offset: int
    """A token at index i behind the prompt is at i + offset, on all three axes."""
    is_constant: tuple[bool, bool, bool] = (False, False, False)
    """The axes on which tokens behind the prompt stay where its last token is."""
    cache_key: str = ""
    """What of the whole prompt its first tokens' positions depend on: prompts share blocks of the
    prefix cache only where it is equal."""

    @classmethod
    def of_level(cls, num_tokens: int, level: int, name: str) -> "RotaryPositions":
        """Return the indices, and on the third axis which rotary frequencies the prompt has.

        They are `level` for all its tokens, and for the answer. `name`: of what has levels.
        """
        indices = np.arange(num_tokens, dtype=np.int32)
        positions = np.stack([indices, indices, np.full(num_tokens, level, np.int32)])
        cache_key = f"{name} {level}" * bool(level)
        return cls(positions, 0, is_constant=(False, False, True), cache_key=cache_key)

    def between(self, start: int, end: int) -> np.ndarray:
        """Return int32[3, end - start]: the positions of the tokens [start, end)."""
        inside = self.prompt[:, start:end]
        behind = np.arange(max(start, self.prompt.shape[1]), end, dtype=np.int32) + self.offset
        constant = np.array(self.is_constant)[:, None]
        behind = np.where(constant, self.prompt[:, -1:], behind).astype(np.int32)
        return np.concatenate([inside, behind], axis=1)


class HostInputs(ABC):
    """One model's host inputs, made from its configuration; pure functions of items."""

    encoder_spec: EncoderSpec | PackedEncoderSpec
    clip_spec: EncoderSpec | PackedEncoderSpec | None = None
    """What encodes clips, of a model with `encoder_spec` for what it sees; a packed one's row is an
    embedding. `embed_multimodal` is given the inputs of either."""
    cut_modalities: frozenset[str] = frozenset()
    """Those whose items have text among their embeddings: no run is as long as the item."""
    attends_to_items: bool = False
    """Whether no embedding of an item is one of the prompt: layers of cross-attention attend to
    them, and a token to those of the item before it, and of those that it follows at once
    (`find_seen_rows`). The model has a `max_encoder_len`, and each item a token for its place."""
    num_extra_rows: int = 0
    """Learned embeddings that stand among an item's: the model's `extra_embeds()` has as many."""
    fed_layers: Sequence[int] = ()
    """Layers of the decoder to whose inputs features of an item are added (DeepStack, arXiv
    2406.04334); their number is the last one's output. They stand behind each embedding, in this
    order, so that the encoder's rows, and embeddings in place of an item, are `1 + len(fed_layers)`
    times as wide as the decoder."""

    def __init__(self, hf_config: Any) -> None:
        self.hf_config = hf_config

    @abstractmethod
    def units(self, item: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return an item's tensors as `[units, ...]` arrays, named as in `encoder_spec`.

        A packed encoder's are `[patches, ...]`: its places and windows are computed here.
        """

    def encoder_inputs(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return an item's units as `encode` takes them: of the spec's dtypes, with its affine map.

        KeyError, TypeError, ValueError where they are none.
        """
        units = dict(self.units(item))
        inputs = {k: one for spec in self.find_specs(units) for k, one in spec.inputs.items()}
        if AFFINE in inputs:
            shape, _ = inputs[AFFINE]
            num_units = len(next(iter(units.values())))
            units[AFFINE] = np.broadcast_to(_find_affine(item).reshape(shape), (num_units, *shape))
        return {name: _as_dtype(units[name], dtype) for name, (_, dtype) in inputs.items()}

    def find_specs(self, units: Collection[str]) -> list[EncoderSpec | PackedEncoderSpec]:
        """Return the specs of what encodes an item, by the names of its units' arrays.

        Both of a video with its sound; its rows are those of `encoder_spec`, and then the others.
        """
        heard, seen, names = self.clip_spec, self.encoder_spec, {*units}
        if heard is None or not heard.inputs.keys() <= names:
            return [seen]
        return [seen, heard] if seen.inputs.keys() - {AFFINE} <= names else [heard]

    def is_causal(self, item: Mapping[str, np.ndarray]) -> bool:
        """Return whether an item's embeddings see nothing behind them, whatever the model `sees`.

        `item`: its tensors, or its embeddings, by name.
        """
        return False

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Return int32[num_embeds]: which of the encoder's rows an item's embeddings are, in order.

        -1 - n: the n-th of the model's extra embeddings. None: all of the encoder's rows.
        """
        return None

    def prompt_positions(
        self, token_ids: Sequence[int] | np.ndarray, items: Sequence[PromptItem]
    ) -> RotaryPositions | None:
        """Return `rotary_positions`; a family whose positions depend on a prompt's tokens has more.

        `token_ids`: of the whole prompt, in which the items stand.
        """
        return self.rotary_positions(len(token_ids), items)

    def rotary_positions(
        self, num_tokens: int, items: Sequence[PromptItem]
    ) -> RotaryPositions | None:
        """Return the positions in a prompt of `num_tokens`; None: they are the indices.

        `items` are in the order of the prompt. A decoder with `longrope` has frequencies of their
        own for prompts that are longer than the trained length; HF's changes them within an answer
        that grows beyond it, too.
        """
        rope = getattr(self.hf_config.get_text_config(), "rope_parameters", None) or {}
        if rope.get("rope_type") != "longrope":
            return None
        is_longer = num_tokens > rope["original_max_position_embeddings"]
        return RotaryPositions.of_level(num_tokens, int(is_longer), "longrope")


def find_seen_rows(offsets: Sequence[int], counts: Sequence[int], num_tokens: int) -> np.ndarray:
    """Return int32[2, num_tokens]: which rows of a prompt's items each of its tokens attends to.

    The first of them, and the one behind the last. Of two items that follow each other at once, the
    places behind both see both; else an item is seen up to the next one's place (HF:
    processing_mllama.py, get_cross_attention_token_mask). Before all items both numbers are 0.

    Args:
        offsets: Places of the items, in order.
        counts: How many rows each of them has.
        num_tokens: Of the prompt.
    """
    ends = np.cumsum([0, *counts])
    firsts = [0]
    for number, offset in enumerate(offsets):
        follows = number > 0 and offset == offsets[number - 1] + 1
        firsts.append(firsts[-1] if follows else int(ends[number]))
    last = np.searchsorted(np.asarray(offsets, np.int64), np.arange(num_tokens), side="right")
    return np.stack([np.array(firsts)[last], ends[last]]).astype(np.int32)


class UnitHostInputs(HostInputs):
    """Images, tiles or crops of one size: `pixel_values` uint8[C, Y, X], or [units, C, Y, X]."""

    pixel_keys: Sequence[str] = ("pixel_values",)
    """What an item's pixels are called, by layout and modality."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        shape, num_tokens = self.read_unit(hf_config)
        self.encoder_spec = EncoderSpec(
            inputs=byte_pixels("pixel_values", shape), tokens_per_unit=num_tokens
        )

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        """Return the shape of a unit's pixels, [C, Y, X], and how many embeddings it has.

        Here a square of `vision_config.image_size`, and an embedding for each patch;
        `CheckpointError` where a unit or a patch is none.
        """
        vision = hf_config.vision_config
        side, patch_size = vision.image_size, vision.patch_size
        if not isinstance(side, int) or not isinstance(patch_size, int):
            raise CheckpointError(
                f"`vision_config` has `image_size` {side} and `patch_size` {patch_size}; tiles and "
                "patches are squares: give one number each"
            )
        return (vision.num_channels, side, side), (side // patch_size) ** 2

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the item's units as `[units, C, Y, X]`."""
        name = next((name for name in self.pixel_keys if name in item), self.pixel_keys[0])
        pixels = item[name]
        return {"pixel_values": pixels if pixels.ndim == 4 else pixels[None]}


def choose_features(num_features: int, strategy: str) -> slice:
    """Return which of a tower's features `vision_feature_select_strategy` leaves."""
    # "default" drops the first feature of any tower, also where that is a patch.
    kept: Mapping[str, slice] = {
        "default": slice(1, None),
        "full": slice(None),
        "class": slice(0, 1),
    }
    if strategy not in kept:
        raise CheckpointError(
            f"`vision_feature_select_strategy` of config.json is {strategy!r}; "
            f"it must be one of {', '.join(kept)}"
        )
    return slice(*kept[strategy].indices(num_features))


def number_cells(tiles: tuple[int, int], side: int) -> np.ndarray:
    """Return int[rows, columns] of patches: the number of each among those of the tiles.

    `tiles`: rows and columns of them; `side`: patches along a tile's.
    """
    rows, columns = tiles
    cells = np.arange(rows * columns * side**2).reshape(rows, columns, side, side)
    return cells.swapaxes(1, 2).reshape(rows * side, columns * side)


def end_lines(cells: np.ndarray) -> np.ndarray:
    """Return int[rows * (columns + 1)] of int[rows, columns]: `NEWLINE` stands behind each row."""
    return np.pad(cells, ((0, 0), (0, 1)), constant_values=NEWLINE).reshape(-1)


def find_places(rows: int, columns: int, merge_size: int) -> np.ndarray:
    """Return int[rows * columns, 2]: row and column of each patch of a frame, square by square."""
    places = np.indices((rows, columns)).transpose(1, 2, 0)
    squares = places.reshape(rows // merge_size, merge_size, columns // merge_size, merge_size, 2)
    return squares.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def find_square_offsets(rows: int, columns: int, merge_size: int) -> np.ndarray:
    """Return int[rows * columns]: what brings patches that come row by row into squares.

    Patch i + offsets[i], row by row, is patch i square by square: no place in a pack is in it.
    """
    order = find_places(rows, columns, merge_size) @ (columns, 1)
    return order - np.arange(rows * columns)


def find_neighbours(rows: int, columns: int, merge_size: int, size: int) -> np.ndarray:
    """Return int32[rows * columns, size ** 2]: how far from each patch those around it stand.

    Patches are those of a frame, square by square, as of `find_places`: no place in a pack is in
    it. Those around are `size` rows and columns, row by row; one beyond the frame's edge is so far
    away that no pack has it.
    """
    places = find_places(rows, columns, merge_size)
    numbers = np.full((rows + 2 * (size // 2), columns + 2 * (size // 2)), _NOWHERE)
    first, second = places.T + size // 2
    numbers[first, second] = np.arange(len(places))
    steps = np.indices((size, size)).reshape(2, -1) - size // 2
    around = numbers[first[:, None] + steps[0], second[:, None] + steps[1]]
    is_seen = around != _NOWHERE
    return np.where(is_seen, around - np.arange(len(places))[:, None], _NOWHERE).astype(np.int32)


def find_position_taps(
    places: np.ndarray,
    grid: tuple[int, int],
    side: int,
    *,
    kernel: Literal["bilinear", "bicubic"],
    aligns_corners: bool = False,
) -> dict[str, np.ndarray]:
    """Resample a square table of `side` x `side` learned positions to a picture's grid.

    As torch's `interpolate`, whose edges are repeated. A bicubic kernel's parameter is -0.75.

    Args:
        places: int[P, 2]: row and column of each patch, in any order.
        grid: How many rows and columns there are.
        side: Of the table.
        kernel: Of two or four taps an axis: n = 4 or 16 of them.
        aligns_corners: Whether the first and last patch have the first and last position.

    Returns:
        `position_ids` int32[P, n]: rows of the table; `position_weights` float32[P, n].
    """
    offsets = np.arange(0, 2) if kernel == "bilinear" else np.arange(-1, 3)
    ids, weights = [], []
    for axis, size in enumerate(grid):
        place = places[:, axis].astype(np.float32)
        if aligns_corners:
            source = place * np.float32(side - 1) / np.float32(max(size - 1, 1))
        else:
            source = (place + np.float32(0.5)) * np.float32(side) / np.float32(size)
            source -= np.float32(0.5)
        taps = np.floor(source).astype(int)[:, None] + offsets
        distance = np.abs(source[:, None] - taps).astype(np.float32)
        ids.append(np.clip(taps, 0, side - 1))
        weights.append(_tap_weights(distance) if kernel == "bicubic" else 1 - distance)
    rows, columns = (each[..., None] for each in (ids[0], weights[0]))
    return {
        "position_ids": (rows * side + ids[1][:, None]).reshape(len(places), -1),
        "position_weights": (columns * weights[1][:, None]).reshape(len(places), -1),
    }


def find_axis_weights(size: int, side: int) -> np.ndarray:
    """Return float32[size, side]: how `side` learned positions are resampled to `size` of them.

    As torch's linear `interpolate` with `antialias`: the kernel is as much wider as positions
    become fewer, and its weights sum to 1 at the edges too.
    """
    scale = side / size
    centers = (np.arange(size) + 0.5) * scale
    distance = np.abs(np.arange(side)[None, :] + 0.5 - centers[:, None]) / max(scale, 1.0)
    weights = np.maximum(1 - distance, 0)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def _tap_weights(distance: np.ndarray) -> np.ndarray:
    near = (1.25 * distance - 2.25) * distance**2 + 1
    far = ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
    return np.where(distance <= 1, near, far).astype(np.float32)


def _find_affine(item: Mapping[str, np.ndarray]) -> np.ndarray:
    for key in AFFINE_KEYS.values():
        if key in item:
            return item[key]
    raise KeyError(f"none of {', '.join(AFFINE_KEYS.values())} comes beside the pixels")


def _as_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "uint8" and np.asarray(array).dtype != np.uint8:
        raise TypeError(f"pixels are {np.asarray(array).dtype}; the model takes them as uint8")
    return np.asarray(array, dtype)
