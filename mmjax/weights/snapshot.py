"""Orbax snapshots of a loaded tree, under the tree's own names.

A snapshot can be restored onto another mesh than it was saved from, or none, and in another dtype.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
from blake3 import blake3
from jax.sharding import Mesh

from mmjax.errors import CheckpointError, SnapshotDamagedError
from mmjax.layers.cpu.groups import Layout
from mmjax.layers.module import Params, flatten_params, is_left_out, unflatten_params
from mmjax.layers.quantization import Layouts, find_quantized
from mmjax.weights.files.safetensors import SNAPSHOT_FILE
from mmjax.weights.load import TensorProblems
from mmjax.weights.sharding import Device, param_sharding

SCHEMA_VERSION = 1
"""Incremented when parameter names or layouts change; older snapshots are then refused."""

_ARRAYS = "params"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metadata:
    """What `SNAPSHOT_FILE` holds."""

    source: str
    """The checkpoint: a directory or a hub id."""
    revision: str | None
    architecture: str
    dtype: str
    schema_version: int = SCHEMA_VERSION
    shapes: Mapping[str, tuple[int, ...]]
    layouts: Layouts = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of each file of the arrays, by its name below the directory; one of an earlier mmjax has
    neither these nor layouts."""


def save_snapshot(
    path: Path | str,
    params: Params,
    *,
    source: str,
    architecture: str,
    revision: str | None = None,
    layouts: Layouts | None = None,
) -> None:
    """Write `params` and their metadata into the directory `path`.

    `layouts`: of a checkpoint that was quantised already.
    """
    path = Path(path).absolute()
    leaves = flatten_params(params)
    if (path / SNAPSHOT_FILE).exists() or (path / _ARRAYS).exists():
        raise CheckpointError(f"`{path}` holds a snapshot already; remove it, or name another")
    path.mkdir(parents=True, exist_ok=True)
    with _checkpointer() as checkpointer:
        checkpointer.save(path / _ARRAYS, args=_save_args(leaves))
    metadata = _Metadata(
        source=source,
        revision=revision,
        architecture=architecture,
        dtype="+".join(sorted({str(leaf.dtype) for leaf in leaves.values()})),
        shapes={name: tuple(leaf.shape) for name, leaf in leaves.items()},
        layouts=dict(layouts or {}),
        digests=_digests(path),
    )
    # Written last: without it the snapshot is unfinished.
    (path / SNAPSHOT_FILE).write_text(json.dumps(asdict(metadata), indent=1))


def load_snapshot(
    path: Path | str,
    abstract_params: Params,
    *,
    mesh: Mesh | Device | None = None,
    left_out: Collection[str] = (),
    agree: Callable[[bool], bool] = bool,
) -> dict[Any, Any]:
    """Restore a snapshot into a tree, sharded over `mesh`, in the tree's dtypes.

    Args:
        path: The directory.
        abstract_params: The tree of `ShapeDtypeStruct`s.
        mesh: As for `load_params`.
        left_out: Attributes of the model that the tree lacks, whose arrays are not read.
        agree: Returns whether all processes that restore it say true, which wait for each other.

    Raises:
        SnapshotDamagedError: If files of it are not as they were written, here or where another
            process reads them.
        CheckpointError: If it is no snapshot, or has other tensors than the tree; lists them all.
    """
    path = Path(path).absolute()
    metadata = _read(path)
    _check_files(path, metadata, agree)
    shapes = {n: shape for n, shape in metadata.shapes.items() if not is_left_out(n, left_out)}
    expected = flatten_params(abstract_params)
    _check_quantization(path, shapes, expected)
    _check(path, metadata, shapes, expected)
    targets = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=param_sharding(name, leaf.shape, mesh)
        )
        for name, leaf in expected.items()
    }
    with _checkpointer() as checkpointer:
        restored = checkpointer.restore(path / _ARRAYS, args=_restore_args(targets))
    return unflatten_params(restored)


def read_snapshot_layouts(path: Path) -> Layouts | None:
    """Return the `layouts` that `save_snapshot` was given; CheckpointError for damaged metadata."""
    return _read(path).layouts or None


def _checkpointer() -> Any:
    from orbax.checkpoint import Checkpointer, PyTreeCheckpointHandler

    # Weights hardly compress, and decompression would slow down loading.
    return Checkpointer(PyTreeCheckpointHandler(use_compression=False))


def _save_args(leaves: dict[str, Any]) -> Any:
    from orbax.checkpoint.args import PyTreeSave

    return PyTreeSave(leaves)


def _restore_args(targets: dict[str, Any]) -> Any:
    from orbax.checkpoint.args import PyTreeRestore
    from orbax.checkpoint.checkpoint_utils import construct_restore_args

    # The snapshot may hold more: the arrays of `left_out`.
    return PyTreeRestore(
        item=targets, restore_args=construct_restore_args(targets), partial_restore=True
    )


def _read(path: Path) -> _Metadata:
    file = path / SNAPSHOT_FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        raw["shapes"] = {name: tuple(shape) for name, shape in raw["shapes"].items()}
        raw["layouts"] = {
            name: Layout(**layout) if isinstance(layout, dict) else layout
            for name, layout in (raw.get("layouts") or {}).items()
        }
        raw["digests"] = dict(raw.get("digests") or {})
        return _Metadata(**raw)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"`{path}` is no finished snapshot: it lacks `{SNAPSHOT_FILE}`; make it again"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"`{file}` is not a snapshot's metadata: {error!r}") from error


def _digests(path: Path) -> dict[str, str]:
    """Return the digest of each file of the arrays, by its name below `path`."""
    files = sorted(file for file in (path / _ARRAYS).rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): _digest(file) for file in files}


def _digest(file: Path) -> str:
    # By all cores, out of the page cache, from which the arrays are then read.
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()


def _check_files(path: Path, metadata: _Metadata, agree: Callable[[bool], bool]) -> None:
    """Raise SnapshotDamagedError if a file is missing, cut or changed: Orbax may not notice it."""
    damaged: list[str] = []
    for name, digest in metadata.digests.items():
        try:
            if _digest(path / name) != digest:
                damaged.append(f"`{name}` has other bytes than were written")
        except OSError as error:
            damaged.append(f"`{name}` cannot be read ({error.strerror})")
    if not agree(not damaged):
        elsewhere = "not here, but where another process reads it, whose log names the files"
        damage = "; ".join(damaged) or elsewhere
        raise SnapshotDamagedError(
            f"snapshot `{path}` is damaged: {damage}; remove it, and make it again by "
            f"`python -m mmjax.convert {metadata.source} {path}`",
            source=metadata.source,
            revision=metadata.revision,
        )


def _check_quantization(
    path: Path, shapes: dict[str, tuple[int, ...]], expected: dict[str, Any]
) -> None:
    is_stored, is_wanted = bool(find_quantized(shapes)), bool(find_quantized(expected))
    if is_stored and not is_wanted:
        raise CheckpointError(
            f"snapshot `{path}` holds weights in 8 bits or 4; give `--quantization` as it was made "
            "with: int8, int8-weights or int4"
        )
    if is_wanted and not is_stored:
        raise CheckpointError(
            f"snapshot `{path}` holds weights that are not quantized, and `quantization` is set: "
            "make it again by `python -m mmjax.convert --quantization int8`, or leave the flag out"
        )


def _check(
    path: Path,
    metadata: _Metadata,
    shapes: dict[str, tuple[int, ...]],
    expected: dict[str, Any],
) -> None:
    if metadata.schema_version != SCHEMA_VERSION:
        raise CheckpointError(
            f"snapshot `{path}` has schema {metadata.schema_version}; this mmjax reads "
            f"{SCHEMA_VERSION}: make it again from `{metadata.source}`"
        )
    problems = TensorProblems(
        missing=[f"`{name}`" for name in expected.keys() - shapes.keys()],
        unexpected=[f"`{name}`" for name in shapes.keys() - expected.keys()],
        misfits=[
            f"`{name}` must have shape {tuple(leaf.shape)}; got {shapes[name]}"
            for name, leaf in expected.items()
            if name in shapes and shapes[name] != tuple(leaf.shape)
        ],
    )
    problems.raise_if_any(str(path))
