"""Host inputs of Qwen's that see and hear: grids, and sound in chunks of some seconds.

A video with its sound is one item: cells and sound by turns, in pieces of two seconds (Qwen2.5),
or by their times (Qwen3).
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.grid_inputs import TimedGridHostInputs, WindowGridHostInputs, read_grid
from mmjax.models.host_inputs import EncoderSpec, PromptItem, RotaryPositions
from mmjax.processing.media.clip_windows import ClipWindows, cut_frames


class Piece(NamedTuple):
    """Embeddings of a video, or of its sound, which stand together."""

    is_sound: bool
    start: int
    end: int


class OmniHostInputs(TimedGridHostInputs):
    """A clip's spectrogram chunk by chunk, and a video's beside its patches."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.tokens_per_second = hf_config.position_id_per_seconds

    @abstractmethod
    def count_rows(self, num_frames: int) -> int:
        """Return how many embeddings a clip has; none where it is too short."""

    @abstractmethod
    def find_pieces(self, item: Mapping[str, np.ndarray]) -> list[Piece]:
        """Return the pieces of a video with its sound, in their order, as HF's processor does."""

    def count_sound(self, item: Mapping[str, np.ndarray]) -> int:
        """Return how many embeddings the sound of a video has."""
        return self.count_rows(int(item.get("num_sound_frames", 0)))

    def find_merged(self, item: Mapping[str, np.ndarray]) -> tuple[int, int, int]:
        """Return the grid of an item's embeddings."""
        time, rows, columns = read_grid(item)
        return time, rows // self.merge_size, columns // self.merge_size

    # ---- the encoders' inputs --------------------------------------------------------------------

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a clip's chunks, or a grid's patches, beside them those of a video's sound."""
        if "input_features" in item:
            return self.cut(item["input_features"])
        units = super().units(item)
        return {**units, **self.cut(item["sound_features"])} if self.count_sound(item) else units

    @abstractmethod
    def cut(self, features: np.ndarray) -> dict[str, np.ndarray]:
        """Return the units of a spectrogram, float32[frames, bins]."""

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows of a clip's sound, or those of a grid's cells and of its sound."""
        if "input_features" in item:
            return np.arange(self.count_rows(len(item["input_features"])), dtype=np.int32)
        cells, number = super().embed_rows(item), self.count_sound(item)
        if cells is None:
            cells = np.arange(prod(self.find_merged(item)), dtype=np.int32)
        if not number:
            return cells
        sound = np.arange(len(cells), len(cells) + number, dtype=np.int32)
        return np.concatenate(self._interleave(item, cells, sound))

    def _interleave(
        self, item: Mapping[str, np.ndarray], cells: np.ndarray, sound: np.ndarray
    ) -> list[np.ndarray]:
        """Return the pieces of what cells have, and sound, along the last axis, in their order."""
        parts = {False: cells, True: sound}
        return [parts[one.is_sound][..., one.start : one.end] for one in self.find_pieces(item)]

    # ---- positions -------------------------------------------------------------------------------

    def rotary_positions(
        self, num_tokens: int, items: Sequence[PromptItem]
    ) -> RotaryPositions | None:
        """Return positions as HF's `get_rope_index`: a clip's are those of text."""
        seen = [item for item in items if any("grid" in name for name in item.tensors)]
        found = super().rotary_positions(num_tokens, seen)
        if found is None:
            return None
        # A short text behind a video with its sound may not reach the video's last position.
        return replace(found, offset=int(found.prompt.max()) + 1 - num_tokens)

    def find_extent(self, cells: np.ndarray) -> int:
        """Return the same, behind a video's time as well."""
        return int(cells.max()) + 1

    def find_runs(self, item: PromptItem) -> Iterator[tuple[int, np.ndarray, int]]:
        """Yield the run of a grid; of a video with its sound, whose marks are as text."""
        number = self.count_sound(item.tensors)
        if not number:
            yield from super().find_runs(item)
            return
        cells = self.find_cells(item.tensors, self.find_merged(item.tensors))
        pieces = self._interleave(item.tensors, cells, np.tile(np.arange(number), (3, 1)))
        extent = self.find_extent(pieces[-1])
        yield item.position.offset + 1, np.concatenate(pieces, axis=1), extent


class Qwen25OmniHostInputs(OmniHostInputs, WindowGridHostInputs):
    """Patches window by window, and a clip's spectrogram chunk by chunk."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.times_per_piece = int(self.tokens_per_second * hf_config.seconds_per_chunk)
        if self.times_per_piece < 1:
            raise CheckpointError(
                f"`seconds_per_chunk` is {hf_config.seconds_per_chunk}, in which no position is: "
                f"there are {self.tokens_per_second} a second (`position_id_per_seconds`)"
            )
        audio = hf_config.audio_config
        if audio.n_window % 2:
            raise CheckpointError(
                f"`audio_config.n_window` is {audio.n_window}; expected an even number: of a "
                "chunk's states, two are an embedding"
            )
        self.chunk_size: int = 2 * audio.n_window
        """Frames of a chunk."""
        self.clip_spec = EncoderSpec(
            inputs={
                "input_features": ((audio.num_mel_bins, self.chunk_size), "float32"),
                "num_frames": ((), "int32"),
            },
            tokens_per_unit=audio.n_window // 2,
        )

    def cut(self, features: np.ndarray) -> dict[str, np.ndarray]:
        """Return a spectrogram's chunks, the last one with zeros behind it."""
        chunks, num_frames = cut_frames(np.asarray(features), self.chunk_size)
        return {"input_features": chunks.transpose(0, 2, 1), "num_frames": num_frames}

    def count_rows(self, num_frames: int) -> int:
        """Return how many embeddings a clip has; none where it is too short."""
        return ((num_frames - 1) // 2 + 1) // 2

    def find_pieces(self, item: Mapping[str, np.ndarray]) -> list[Piece]:
        """Return the pieces of a video with its sound, in their order, as HF's processor does."""
        times, *_ = self.find_cells(item, self.find_merged(item))
        number = self.count_sound(item)
        seen, heard = self._split(times), self._split(np.arange(number))
        pieces: list[Piece] = []
        for place in range(max(len(seen), len(heard))):
            pieces += [Piece(False, *run) for run in seen[place : place + 1]]
            pieces += [Piece(True, *run) for run in heard[place : place + 1]]
        return pieces

    def _split(self, times: np.ndarray) -> list[tuple[int, int]]:
        """Return where embeddings of these times are parted (HF: `get_chunked_index`).

        Behind a leap over several pieces, each of the next ones has one embedding.
        """
        starts = [0]
        for place, time in enumerate(times.tolist()):
            if time >= len(starts) * self.times_per_piece:
                starts.append(place)
        return list(zip(starts, [*starts[1:], len(times)], strict=True))

    def find_runs(self, item: PromptItem) -> Iterator[tuple[int, np.ndarray, int]]:
        """Yield the same, of a video with its sound with the marks around it.

        Its first mark has the position of the token before it, its last one that of the token
        behind it.
        """
        for first, cells, extent in super().find_runs(item):
            if self.count_sound(item.tensors):
                first -= 1
                cells = np.pad(cells, ((0, 0), (1, 1)), constant_values=(-1, extent))
            yield first, cells, extent


class Qwen3OmniHostInputs(OmniHostInputs):
    """Qwen3-VL's grids; windows of spectrograms, whose chunks of a second are convolved alone."""

    position_kernel = "bilinear"
    aligns_corners = True

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        fed = hf_config.vision_config.deepstack_visual_indexes
        self.fed_layers = tuple(range(1, 1 + len(fed)))
        self.windows = ClipWindows(hf_config.audio_config, pads_short=False)
        self.clip_spec = EncoderSpec(
            inputs=self.windows.inputs, tokens_per_unit=self.windows.num_rows
        )

    def count_rows(self, num_frames: int) -> int:
        return self.windows.count_rows(num_frames)

    def cut(self, features: np.ndarray) -> dict[str, np.ndarray]:
        return self.windows.cut(np.asarray(features))

    def find_pieces(self, item: Mapping[str, np.ndarray]) -> list[Piece]:
        """Return the runs of cells and of sound, ordered by their times; cells come first."""
        time, rows, columns = self.find_merged(item)
        seconds = float(item.get("second_per_grid_ts", 1.0))
        times = np.repeat(np.arange(time) * seconds * self.tokens_per_second, rows * columns)
        number = self.count_sound(item)
        order = np.argsort(np.concatenate([times, np.arange(number)]), kind="stable")
        is_sound = order >= len(times)
        starts = [0, *(np.flatnonzero(np.diff(is_sound)) + 1).tolist(), len(order)]
        places = np.where(is_sound, order - len(times), order).tolist()
        return [
            Piece(bool(is_sound[start]), places[start], places[end - 1] + 1)
            for start, end in pairwise(starts)
        ]
