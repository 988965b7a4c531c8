"""The weights of a running engine: replaced whole or in part, dropped, and read again."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3
from jaxtyping import Array

from mmjax.engine.device.programs import Programs
from mmjax.engine.device.runner import ModelRunner
from mmjax.errors import CheckpointError
from mmjax.layers.module import Params, flatten_params, unflatten_params
from mmjax.weights.files.safetensors import is_snapshot
from mmjax.weights.rules import RuleTypes
from mmjax.weights.update import Replacement, match_update, place_update

ReadParams = Callable[[Path], Iterator[tuple[str, Array]]]
"""Yields every parameter of a checkpoint's directory; what does not fit is raised before the
first."""


class WeightsSource(NamedTuple):
    """What is needed to make parameters of other arrays, or of other files."""

    rules: Sequence[RuleTypes]
    left_out: Sequence[str]
    """Attributes of the model that this engine does not compute."""
    read: ReadParams
    path: Path
    """The checkpoint that the engine was started with."""
    encoded_apart: Collection[str] | None = None
    """The parameters that workers encode with, which stay as they are; None: none do."""


class EngineWeights:
    """The parameters that an engine computes with, on its devices.

    Each is put in place as it comes, and the one before is dropped: two whole copies are never
    held, unless a caller holds one.
    """

    def __init__(self, programs: Programs, runner: ModelRunner, source: WeightsSource) -> None:
        self._expected = flatten_params(programs.own_params)
        self._programs, self._runner, self._source = programs, runner, source
        self._path: Path | None = source.path
        """Of the directory that was read last, to its end; None: it is lost."""
        self.mark = ""
        """Tells the files of an update, which were read last, from others of their directory."""
        self._missing: set[str] = set()

    @property
    def params(self) -> Params:
        """The parameters, nested by the tree's names; a copy of the nest, not of the arrays."""
        return unflatten_params(flatten_params(self._runner.params))

    @property
    def num_missing(self) -> int:
        """Parameters that must be given before anything is computed."""
        return len(self._missing)

    @cached_property
    def _encoder_params(self) -> frozenset[str]:
        return self._programs.find_encoder_params()

    def match(self, params: Mapping[Any, Any], *, prefix: str = "") -> list[Replacement]:
        """Return what takes the place of which parameters; CheckpointError if it cannot."""
        ignored: list[str] = []
        found = match_update(
            params,
            self._expected,
            self._source.rules,
            prefix=prefix,
            left_out=self._source.left_out,
            current=flatten_params(self._runner.params),
            ignore=ignored.append,
        )
        if self._source.encoded_apart is not None:
            names = [
                *ignored,
                *(one.name for one in found if one.name in self._source.encoded_apart),
            ]
            if names:
                raise CheckpointError(
                    f"{len(names)} of the given weights are those that `encoder_workers` encode "
                    f"with, such as `{names[0]}`; give the others alone, or start workers and "
                    "engine again with the new ones"
                )
        return found

    def replace(self, replacements: Sequence[Replacement], *, donate: bool) -> bool:
        """Put arrays that were matched into their places; return whether encoders changed."""
        names = [name for one in replacements for name in (one.name, one.scales) if name]
        placed = place_update(
            replacements, self._expected, flatten_params(self._runner.params), donate=donate
        )
        return self._put(placed, names)

    def open(self, path: Path | None = None) -> Iterator[tuple[str, Array]]:
        """Return what `load` takes, of a directory; None: of the one that was read last.

        CheckpointError for files that do not fit.
        """
        path = path or self._path
        if path is None:
            raise CheckpointError(
                "the weights that were given last cannot be read again; give others first"
            )
        if self._source.encoded_apart is not None and path != self._source.path:
            raise CheckpointError(
                f"`{path}` has weights of encoders, too, and `encoder_workers` encode with those "
                f"of `{self._source.path}`; start workers and engine again with the new ones"
            )
        if is_snapshot(path):
            raise CheckpointError(
                f"`{path}` is a snapshot, which is loaded at the start alone; give a directory of "
                "safetensors files"
            )
        mark = mark_files(path)
        leaves = self._source.read(path)
        # The first is read when all names and shapes are found to fit.
        first = next(leaves)
        return self._note_read(path, mark, chain([first], leaves))

    def _note_read(
        self, path: Path, mark: str, leaves: Iterator[tuple[str, Array]]
    ) -> Iterator[tuple[str, Array]]:
        """Yield all of a directory, which may be read again once it was read to its end."""
        yield from leaves
        self._path, self.mark = path, mark

    def load(self, leaves: Iterator[tuple[str, Array]]) -> bool:
        """Put all parameters of a directory in place; return whether encoders changed."""
        return self._put(leaves, list(self._expected))

    def release(self) -> None:
        """Drop all parameters."""
        self._missing = set(self._expected)
        self._runner.release_params()

    def lose(self) -> None:
        """Drop all parameters, which no directory has any more."""
        self.release()
        self._path = None

    def _put(self, leaves: Iterable[tuple[str, Array]], names: Sequence[str]) -> bool:
        # If one cannot be placed, those behind it are still missing.
        self._missing |= set(names)
        for name, leaf in leaves:
            self._runner.replace_param(name, leaf)
            self._missing.discard(name)
        return not self._encoder_params.isdisjoint(names)


def mark_files(path: Path) -> str:
    """Return what tells a directory's files of weights from others that are written there later."""
    files = sorted(path.glob("*.safetensors*"))
    stats = [(file.name, file.stat()) for file in files]
    written = [(name, one.st_size, one.st_mtime_ns) for name, one in stats]
    return blake3(repr(written).encode()).hexdigest()
