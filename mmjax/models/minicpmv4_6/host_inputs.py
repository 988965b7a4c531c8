"""MiniCPM-V 4.6's encoder inputs: packed patches of whole pictures, of slices and of frames.

MiniCPM-V 4.7 has places for all of a picture's tokens, too (M-RoPE).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import (
    HostInputs,
    PackedEncoderSpec,
    PromptItem,
    RotaryPositions,
    byte_pixels,
    find_places,
    find_square_offsets,
)

WINDOW = 4
"""Patches that the tower joins, and patches of which the projector makes an embedding."""
_MODES = ("16x", "4x")
_SQUARES = {"merge_kernel_size": (2, 2), "merger_times": 1}


def joins_windows(hf_config: Any) -> bool:
    """Return whether the tower joins windows of patches; CheckpointError for unknown shapes."""
    vision, mode = hf_config.vision_config, hf_config.downsample_mode
    found = {name: getattr(hf_config, name) for name in _SQUARES}
    found["merge_kernel_size"] = tuple(found["merge_kernel_size"])
    window = tuple(vision.window_kernel_size)
    if found != _SQUARES or window != (2, 2) or mode not in _MODES:
        raise CheckpointError(
            f"config.json has `merge_kernel_size` {list(found['merge_kernel_size'])}, "
            f"`merger_times` {found['merger_times']}, `window_kernel_size` {list(window)} and "
            f"`downsample_mode` {mode!r}; HF's processor writes the embeddings of [2, 2], 1, "
            f"[2, 2] and one of {', '.join(_MODES)}"
        )
    if mode == "16x" and not 0 <= hf_config.insert_layer_id < vision.num_hidden_layers:
        raise CheckpointError(
            f"`insert_layer_id` of config.json is {hf_config.insert_layer_id}; the tower has the "
            f"layers 0 to {vision.num_hidden_layers - 1}"
        )
    return mode == "16x"


class MiniCPMV46HostInputs(HostInputs):
    """Patches row by row; squares of 4 patches a side are embeddings, or of 2 (`4x`)."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        vision, self.joins_windows = hf_config.vision_config, joins_windows(hf_config)
        self.side = vision.image_size // vision.patch_size
        size = (vision.num_channels, vision.patch_size, vision.patch_size)
        offsets = ("square_offsets", *["window_offsets"] * self.joins_windows)
        self.encoder_spec = PackedEncoderSpec(
            inputs={
                **byte_pixels("pixel_values", size),
                **dict.fromkeys(("unit_ids", "position_ids", *offsets), ((), "int32")),
            },
            patches_per_token=WINDOW**2 if self.joins_windows else WINDOW,
            patches_per_key=WINDOW if self.joins_windows else 1,
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches of all units, and what each of them depends on."""
        suffix, _ = _find_names(item)
        shapes = [(int(rows), int(columns)) for rows, columns in item[f"target_sizes{suffix}"]]
        units = {
            "pixel_values": item[f"pixel_values{suffix}"],
            "unit_ids": np.repeat(np.arange(len(shapes)), [rows * cols for rows, cols in shapes]),
            "position_ids": np.concatenate([self._find_positions(*shape) for shape in shapes]),
        }
        windows = [find_square_offsets(*shape, 2) for shape in shapes]
        if not self.joins_windows:
            return {**units, "square_offsets": np.concatenate(windows)}
        # A row for each patch, of which the device takes one for each window.
        squares = [find_square_offsets(rows // 2, columns // 2, 2) for rows, columns in shapes]
        return {
            **units,
            "window_offsets": np.concatenate(windows),
            "square_offsets": np.repeat(np.concatenate(squares), WINDOW),
        }

    def _find_positions(self, rows: int, columns: int) -> np.ndarray:
        """Return int[rows * columns]: the learned position nearest to each patch.

        NOTE: HF compares float32, and has the one before where a patch meets a border that it
        rounds up; with the 70 of published towers there is none (up to 800 patches).
        """
        nearest = find_places(rows, columns, 1) * self.side // (rows, columns)
        return nearest @ (self.side, 1)


def _find_names(item: Mapping[str, np.ndarray]) -> tuple[str, str]:
    """Return the end of HF's names of an item's tensors, and its modality."""
    return ("_videos", "video") if "pixel_values_videos" in item else ("", "image")


# ---- MiniCPM-V 4.7 -------------------------------------------------------------------------------

MARKS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")
"""Keys of config.json: the tokens around wholes and slices, and between rows of slices."""


class _Piece(NamedTuple):
    """The tokens of a whole or of a slice."""

    first: int
    """Of those that take embeddings, in the prompt."""
    end: int
    size: np.ndarray
    """int[2]: rows and columns of embeddings."""


class MiniCPMV47HostInputs(MiniCPMV46HostInputs):
    """The same, whose tokens have places on a canvas: slices side by side, under the whole."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        found = {name: getattr(hf_config, name) for name in MARKS}
        if lacking := [name for name, token_id in found.items() if token_id is None]:
            raise CheckpointError(
                f"config.json has no {', '.join(f'`{name}`' for name in lacking)}; the tokens "
                "around pictures have places of their own: name their ids, as transformers' "
                "converter does"
            )
        self.mark_ids = np.array([*found.values()])

    def prompt_positions(
        self, token_ids: Sequence[int] | np.ndarray, items: Sequence[PromptItem]
    ) -> RotaryPositions | None:
        """Return a token's place on its picture's canvas, all at one time; text goes on behind it.

        As HF's `get_rope_index`. Marks that follow an item, such as a newline, are of its canvas,
        be they the prompt's own.
        """
        if not items:
            return None
        positions = np.zeros((3, len(token_ids)), np.int32)
        is_mark = np.append(np.isin(np.asarray(token_ids), self.mark_ids), False)
        index = place = 0
        for whole, slices, columns in self._find_frames(items):
            start, end = whole.first - 1, (slices or [whole])[-1].end
            end += int(np.argmin(is_mark[end:]))
            # Marks behind the item before may be this one's first.
            text = np.arange(max(start - index, 0)) + place
            positions[:, index : index + len(text)] = text
            place += len(text)
            positions[:, start:end] = place
            extent = _lay_out(positions[1:], (whole, slices, columns), place)
            place, index = place + extent + 1, end
        positions[:, index:] = np.arange(len(token_ids) - index) + place
        return RotaryPositions(positions, int(positions.max()) + 1 - len(token_ids))

    def _find_frames(
        self, items: Sequence[PromptItem]
    ) -> Iterator[tuple[_Piece, list[_Piece], int]]:
        """Yield the whole and the slices of each picture or frame, and the columns of slices."""
        side = WINDOW if self.joins_windows else WINDOW // 2
        for item in items:
            suffix, modality = _find_names(item.tensors)
            sizes = np.asarray(item.tensors[f"target_sizes{suffix}"]) // side
            rows, columns = (int(n) for n in item.tensors[f"{modality}_grids"])
            runs = item.position.extract_embeds_range()
            pieces = [
                _Piece(first, last + 1, size)
                for (first, last), size in zip(runs, sizes, strict=True)
            ]
            for number in range(0, len(pieces), rows * columns + 1):
                whole, *slices = pieces[number : number + rows * columns + 1]
                yield whole, slices, columns


def _lay_out(places: np.ndarray, frame: tuple[_Piece, list[_Piece], int], origin: int) -> int:
    """Write the rows and columns of a frame's tokens; return the longer side of its canvas.

    `places`: int[2, tokens of the prompt], which are `origin` for all of the frame's.
    """
    whole, slices, columns = frame
    size = slices[0].size if slices else whole.size
    grid = (len(slices) // columns, columns) if slices else (1, 1)
    canvas = size * grid
    places[:, whole.first - 1] = max(origin - 1, 0)
    places[:, whole.first : whole.end] += _spread(whole.size, canvas)
    places[:, whole.end] += canvas
    for number, piece in enumerate(slices):
        row, column = divmod(number, columns)
        corner = size * (row, column)
        places[:, piece.first - 1] += corner
        places[:, piece.first : piece.end] += _spread(piece.size, piece.size) + corner[:, None]
        places[:, piece.end] += corner + piece.size - 1
        if column == columns - 1 and number < len(slices) - 1:
            # What parts two rows stands to the right of the upper one.
            right = size * (row + 1, columns) - (1, 0)
            places[:, piece.end + 1 : slices[number + 1].first - 1] += right[:, None]
    return int(canvas.max())


def _spread(size: np.ndarray, canvas: np.ndarray) -> np.ndarray:
    """Return int[2, rows * columns]: places that are spread evenly over a canvas, row by row."""
    axes = [_space(int(count), int(length)) for count, length in zip(size, canvas, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij")).reshape(2, -1)


def _space(count: int, length: int) -> np.ndarray:
    """Return int[count]: the nearest of `length` places to each of so many; as torch, in float32.

    Torch's `linspace` counts the second half from the end, and halves are rounded to even places.
    """
    number = np.arange(count, dtype=np.float32)
    step = np.float32(length - 1) / np.float32(max(count - 1, 1))
    last = np.float32(length - 1) - step * (count - 1 - number)
    return np.rint(np.where(number < max(count // 2, 1), number * step, last)).astype(np.int64)
