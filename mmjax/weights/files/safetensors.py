"""The tensors of a checkpoint directory's safetensors files, read lazily, by slices. No jax."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from mmjax.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SNAPSHOT_FILE = "mmjax_snapshot.json"
"""The metadata of a snapshot, which `snapshot` writes and reads."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
FLOATS: Mapping[str, Any] = {
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16},
    "BF16": ml_dtypes.bfloat16,
}
"""Dtypes of weights, by safetensors' notation; others (int8, float8) are quantised weights."""
_FLOAT8 = "F8_E4M3"
_SIZES = {"I64": 8, "I32": 4, **{name: np.dtype(one).itemsize for name, one in FLOATS.items()}}
"""Of dtypes of more than a byte, in bytes."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file; no data until `read`."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    """In safetensors' notation: F32, BF16, ..."""
    slices: Any

    @property
    def is_floating(self) -> bool:
        """Whether the dtype is supported."""
        return self.dtype in FLOATS

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * _SIZES.get(self.dtype, 1)

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return a slice in the file's dtype (bfloat16: of ml_dtypes); None: all of it."""
        index = (slice(None),) * len(self.shape) if index is None else index
        if 0 in self.shape:  # safetensors cuts none: a trainer's part of a weight on other devices
            return np.zeros(self.shape, FLOATS.get(self.dtype, np.uint8))[index]
        # NOTE: a tensor without axes is read with `...`, which returns a scalar.
        return np.asarray(self.slices[index if self.shape else ...])


def tag_of(dtype: Any) -> str:
    """Return a dtype in safetensors' notation; its own name, if it is none of `FLOATS`."""
    name = np.dtype(dtype).name
    return next((tag for tag, one in FLOATS.items() if np.dtype(one).name == name), name)


class View:
    """Reads slices as if a tensor of the file were another one."""

    def __init__(self, read: Callable[..., np.ndarray]) -> None:
        """`read` is given the slice of each axis."""
        self._read = read

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self._read(*index)


def is_snapshot(path: Path | str) -> bool:
    """Return whether a directory holds a finished snapshot."""
    return (Path(path) / SNAPSHOT_FILE).is_file()


def check_weight_files(path: Path) -> None:
    """Raise CheckpointError unless all of a checkpoint's files are there and whole, by headers.

    A snapshot's are checked by their digests as they are loaded.
    """
    if is_snapshot(path):
        return
    damage: list[str] = []
    for file in find_weight_files(path):
        try:
            with safe_open(str(path / file), framework="np"):
                pass
        except (SafetensorError, OSError, ValueError) as error:
            damage.append(_explain_damage(path / file, error))
    if damage:
        raise CheckpointError("; ".join(damage))


@contextmanager
def open_safetensors(path: Path) -> Iterator[dict[str, StoredTensor]]:
    """Open all weight files of the directory; yield `{name: tensor}`."""
    files = find_weight_files(path)
    with ExitStack() as stack:
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            for tensor in open_file(stack, path / file):
                if tensor.name in tensors:
                    raise CheckpointError(
                        f"tensor `{tensor.name}` is both in `{tensors[tensor.name].file}` and in "
                        f"`{tensor.file}`; remove the files that are not this checkpoint's"
                    )
                tensors[tensor.name] = tensor
        yield tensors


def find_weight_files(path: Path) -> list[str]:
    """Return the names of the directory's safetensors files: one, or the index's shards."""
    if (path / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    if not (path / INDEX_FILE).is_file():
        raise CheckpointError(_explain_absence(path))
    shards = sorted(set(_read_weight_map(path / INDEX_FILE).values()))
    strange = [shard for shard in shards if Path(shard).name != shard]
    if strange:
        raise CheckpointError(
            f"`{INDEX_FILE}` names {strange[0]!r}; expected names of files beside it"
        )
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"`{path}` lacks {len(missing)} of the {len(shards)} weight files that "
            f"`{INDEX_FILE}` names: {', '.join(missing)}; is the download complete?"
        )
    return shards


def _read_weight_map(file: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"`{file}` is not an index: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"`{file}`: `weight_map` must map tensors to file names")
    return weight_map


def open_file(stack: ExitStack, file: Path) -> list[StoredTensor]:
    """Open one file until the stack closes; return its tensors."""
    try:
        opened = stack.enter_context(safe_open(str(file), framework="np"))
        found = []
        for name in opened.keys():  # noqa: SIM118 (not a mapping: it cannot be iterated)
            view = opened.get_slice(name)
            shape, dtype = tuple(view.get_shape()), str(view.get_dtype())
            if dtype == _FLOAT8:  # numpy has no such dtype, and safe_open knows no other
                view = _map_float8(file, name, shape)
            found.append(StoredTensor(name, file.name, shape, dtype, view))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(_explain_damage(file, error)) from error
    return found


def _map_float8(file: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor of a file whose header was read already, without reading it."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        start, _ = json.loads(opened.read(size))[name]["data_offsets"]
    octets = np.memmap(file, np.uint8, mode="r", offset=8 + size + start, shape=shape)
    return octets.view(ml_dtypes.float8_e4m3fn)


def _explain_damage(file: Path, error: Exception) -> str:
    """Return why a file cannot be opened: by its size beside its header's, where that is why."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(8)
            header_size = int.from_bytes(start, "little")
            header = opened.read(header_size) if header_size < size else b""
    except OSError as reason:
        return f"`{file}` cannot be read ({reason.strerror})"
    if start == b"version ":
        return f"`{file}` is a Git LFS pointer of {size} bytes; fetch the file by `git lfs pull`"
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        tensors = {**json.loads(header or "{}"), "__metadata__": {"data_offsets": [0, 0]}}
        data_size = max(one["data_offsets"][1] for one in tensors.values())
        if size < 8 + header_size + data_size:
            least = "" if len(header) == header_size else "at least "
            return (
                f"`{file}` has {size} bytes, of {least}{8 + header_size + data_size} that its "
                "header declares: download it again"
            )
    return f"`{file}` is not a readable safetensors file ({error}); download it again"


def _explain_absence(path: Path) -> str:
    if not path.is_dir():
        return f"model directory `{path}` does not exist"
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if shards:
        return (
            f"`{path}` holds {', '.join(shards)} but neither `{SINGLE_FILE}` nor `{INDEX_FILE}`; "
            "is the download complete?"
        )
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        return (
            f"`{path}` holds its weights as pickles ({', '.join(pickles)}), which can run code "
            "when opened; mmjax reads safetensors only: take a revision that has them, or convert "
            "with `model.save_pretrained`"
        )
    return f"`{path}` holds no weights; expected `{SINGLE_FILE}` or `{INDEX_FILE}`"
