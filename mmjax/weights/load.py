"""Load a checkpoint directory into sharded arrays, one slice of one tensor at a time.

Validates before reading: one error lists all missing, unexpected and misshapen tensors.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mmjax.errors import CheckpointError
from mmjax.layers.cpu.groups import ORDER, SCALE, ZERO
from mmjax.layers.module import Params, flatten_params, is_left_out, unflatten_params
from mmjax.layers.quantization import INT4, find_quantized, quantize
from mmjax.system.allocator import return_pages_of_files
from mmjax.system.logger import get_logger
from mmjax.system.progress import progress
from mmjax.weights.files.method import Method
from mmjax.weights.files.packed import STORED, PackedTensor, find_packed, read_part
from mmjax.weights.files.safetensors import StoredTensor, View
from mmjax.weights.maxtext import is_maxtext, open_maxtext
from mmjax.weights.parts import open_with_parts
from mmjax.weights.rules import Change, Part, Place, RuleTypes, map_tensor
from mmjax.weights.sharding import Device, param_sharding

logger = get_logger(__name__)

TIED_HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
_ROWS_COMPARED_AT_ONCE = 4096
_MAX_LISTED = 20
"""Tensors of a kind that an error lists; a wrong revision may lack thousands."""
_UNLOADED_BYTES = 2**26
"""Of files, between two calls that unload them."""


@dataclass(slots=True)
class TensorProblems:
    """Why a checkpoint does not match a tree; each entry is a line of the error."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    """Tensors with the wrong shape or dtype, or that map to the same parameter as another."""

    def raise_if_any(self, source: str, remedy: str = "is the revision right?") -> None:
        """Raise one CheckpointError with all problems."""
        kinds = (
            (self.missing, "missing"),
            (self.unexpected, "unexpected"),
            (self.misfits, "misshapen"),
        )
        found = [(sorted(lines), kind) for lines, kind in kinds if lines]
        if not found:
            return
        counts = ", ".join(f"{len(lines)} {kind}" for lines, kind in found)
        report = [f"`{source}` does not fit the model: {counts}; {remedy}"]
        for lines, kind in found:
            report.append(f"{kind}:")
            report += [f"  {line}" for line in lines[:_MAX_LISTED]]
            if len(lines) > _MAX_LISTED:
                report.append(f"  ... and {len(lines) - _MAX_LISTED} more")
        raise CheckpointError("\n".join(report))


def load_params(
    path: Path | str, abstract_params: Params, rules: Sequence[RuleTypes], **options: Any
) -> dict[Any, Any]:
    """Fill `abstract_params` from the safetensors files of a HF directory, or from MaxText's.

    Takes what `iter_params` takes, and raises what it raises.
    """
    return unflatten_params(dict(iter_params(path, abstract_params, rules, **options)))


def iter_params(
    path: Path | str,
    abstract_params: Params,
    rules: Sequence[RuleTypes],
    *,
    mesh: Mesh | Device | None = None,
    left_out: Collection[str] = (),
    method: Method | None = None,
    parts: Mapping[str, Path] | None = None,
    use_tqdm: bool = True,
) -> Iterator[tuple[str, jax.Array]]:
    """Yield every parameter of `abstract_params` by its dotted name, from a HF directory.

    All that is wrong with the files' headers is raised before the first is read.

    Args:
        path: The directory.
        abstract_params: The tree, with `ShapeDtypeStruct`s for leaves: each array gets its dtype.
            Weights in 8 or 4 bits are quantised here, one whole matrix at a time, unless the
            files have them so.
        rules: From names in the files to dotted names in the tree.
        mesh: Where to shard over, axes "data" and "model"; or the device that holds all, None: the
            first.
        left_out: Attributes, or parameters, of the model that are not computed: their tensors are
            not read.
        method: How the files have matrices quantised (`read_method`); None: they have none.
        parts: Where tensors are that the directory lacks, as `open_with_parts` takes it.
        use_tqdm: Whether progress is shown, in bytes.

    Raises:
        CheckpointError: With all missing, unexpected and misshapen tensors.
    """
    path = Path(path)
    expected = flatten_params(abstract_params)
    quantized = find_quantized(expected)
    is_hfs = not is_maxtext(path)
    opened = open_with_parts(path, parts or {}, rules) if is_hfs else open_maxtext(path)
    with opened as tensors:
        plain, packed = find_packed(tensors, method)
        # Scales of floats are made here.
        scales = {} if packed else {one: expected.pop(one) for one in quantized.values()}
        sources = match_tensors(
            [*plain, *packed], expected, rules, source=str(path), left_out=left_out
        )
        total = sum(tensor.num_bytes for tensor in sources.values())
        with progress(logger, "loading weights", total, unit="B", is_shown=use_tqdm) as update:
            for name, tensor in _unloading(sources, path):
                if name in quantized and not packed:
                    arrays = quantize(tensor.read(), expected[name].dtype)
                    _check_scales(tensor, arrays[1], scales[quantized[name]])
                    yield name, _place_array(name, arrays[0], mesh)
                    yield quantized[name], _place_array(quantized[name], arrays[1], mesh)
                else:
                    yield name, _place(name, tensor, expected[name].dtype, mesh)
                update(tensor.num_bytes)
        read_part.cache_clear()


def _unloading(
    sources: Mapping[str, StoredTensor], path: Path
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors, and unload now and then what was read of their files.

    Else the files were in memory a second time, beside the arrays that are made of them.
    """
    folders = {(path / tensor.file).resolve().parent for tensor in sources.values()}
    num_bytes = 0
    for name, tensor in sources.items():
        yield name, tensor
        num_bytes += tensor.num_bytes
        if num_bytes >= _UNLOADED_BYTES:
            num_bytes = 0
            for folder in folders:
                return_pages_of_files(folder)


def _check_scales(tensor: StoredTensor, scales: np.ndarray, leaf: Any) -> None:
    """Raise if codes of 4 bits fit, which come in blocks, and the width of the matrix does not."""
    if scales.shape != leaf.shape:
        raise CheckpointError(
            f"`{tensor.name}` (in {tensor.file}) has rows of {tensor.shape[1]} numbers, which make "
            f"scales {scales.shape}; the model has {leaf.shape}"
        )


def match_tensors(
    tensors: Iterable[StoredTensor | PackedTensor],
    expected: Mapping[str, Any],
    rules: Sequence[RuleTypes],
    *,
    source: str,
    left_out: Collection[str] = (),
) -> dict[str, StoredTensor]:
    """Return `{name in the tree: tensor}`, in the files' order; CheckpointError if they differ.

    Tensors that are stacked are one here, behind the others. A `lm_head` that the tree lacks is
    tied: it must equal the embedding, and is not loaded. Nor is a bias of zeros that the tree lacks
    beside a quantised matrix: GPTQ's libraries write one for every layer.
    """
    tensors = list(tensors)
    biases = {f"{one.source.name}.bias" for one in tensors if isinstance(one, PackedTensor)}
    problems = TensorProblems()
    sources: dict[str, StoredTensor] = {}
    stacks: dict[str, dict[int, StoredTensor]] = {}
    joined: dict[str, int] = {}
    heads: list[StoredTensor] = []
    for name, tensor, place in _map_tensors(_as_kept(tensors, expected, rules)):
        if is_left_out(name, left_out):
            continue
        if place is not None and name in expected:
            stacks.setdefault(name, {})[place.index] = tensor
            joined[name] = place.joined
        elif name not in expected and name.endswith(TIED_HEAD):
            heads.append(tensor)
        elif name not in expected and tensor.name in biases and not tensor.read().any():
            continue
        elif name not in expected:
            problems.unexpected.append(f"`{tensor.name}` (in {tensor.file})")
        elif name in sources:
            problems.misfits.append(
                f"`{tensor.name}` (in {tensor.file}) and `{sources[name].name}` are both `{name}`"
            )
        else:
            sources[name] = tensor
            problems.misfits += _find_misfit(tensor, expected[name].shape, expected[name].dtype)
    for name, placed in stacks.items():
        count, (rows, *rest) = joined[name], expected[name].shape
        shape = (count, rows // count, *rest) if count else (rows, *rest)
        _find_stack_problems(name, placed, shape, expected[name].dtype, problems)
        stack = _stack([placed[index] for index in sorted(placed)])
        sources[name] = _flatten(stack) if count else stack
    problems.missing += [f"`{name}`" for name in expected.keys() - sources.keys()]
    problems.raise_if_any(source)
    for head in heads:
        _check_tied(head, sources)
    return sources


def _as_kept(
    tensors: Iterable[StoredTensor | PackedTensor],
    expected: Mapping[str, Any],
    rules: Sequence[RuleTypes],
) -> Iterator[tuple[str, StoredTensor, Change | Place | None]]:
    """Yield under each name in the tree the file's tensor, and what becomes of it.

    Of a quantised matrix these are its codes and what belongs to them, each changed as the matrix
    would be, or where the tree has floats, the matrix in float32.
    """
    for tensor in tensors:
        for name, change in map_tensor(tensor.name, rules):
            if isinstance(tensor, StoredTensor):
                yield name, tensor, change
            elif name + SCALE not in expected:
                yield name, tensor.as_whole(), change
            else:
                are_rows = expected[name].dtype == np.int8 and tensor.by_rows is not None
                layout = None if are_rows else tensor.layout
                if layout is not None:
                    # What the files have, and the tree has not, is reported, and not left out.
                    layout = replace(
                        layout,
                        has_zero=layout.has_zero or name + ZERO in expected,
                        has_order=layout.has_order or name + ORDER in expected,
                    )
                for suffix, part in tensor.as_parts(layout).items():
                    is_row = suffix == ORDER and isinstance(change, Part)
                    yield name + suffix, part, None if is_row else change


def _map_tensors(
    found: Iterable[tuple[str, StoredTensor, Change | Place | None]],
) -> Iterator[tuple[str, StoredTensor, Place | None]]:
    """Yield each tensor, as it is changed, under its name in the tree."""
    for name, tensor, given in found:
        place = given if isinstance(given, Place) else None
        change = given.turn if isinstance(given, Place) else given
        # What cannot be changed stays whole: its shape is reported as a misfit.
        if change is not None and change.is_fit(tensor.shape):
            tensor = _change(tensor, change)
        yield name, tensor, place


def _change(tensor: StoredTensor, change: Change) -> StoredTensor:
    """Return what the tree has of a tensor as if the file had it."""

    def read(*index: slice) -> np.ndarray:
        return change.read(tensor.shape, tensor.read, index)

    return replace(tensor, shape=find_shape(change, tensor.shape), slices=View(read))


def find_shape(change: Change, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that the tree has, of the file's."""
    return jax.eval_shape(change.apply, jax.ShapeDtypeStruct(tuple(shape), np.float32)).shape


def _stack(tensors: Sequence[StoredTensor]) -> StoredTensor:
    """Return tensors of one shape as if they were one, along a new first axis."""

    def read(which: slice, *rest: slice) -> np.ndarray:
        return np.stack([tensor.read(rest) for tensor in tensors[which]])

    first = tensors[0]
    return replace(first, shape=(len(tensors), *first.shape), slices=View(read))


def _flatten(stack: StoredTensor) -> StoredTensor:
    """Return a stack as if its tensors followed each other on their own first axis."""
    count, rows, *rest = stack.shape

    def read(chosen: slice, *others: slice) -> np.ndarray:
        whole = stack.read((slice(None), slice(None), *others))
        return whole.reshape(-1, *whole.shape[2:])[chosen]

    return replace(stack, shape=(count * rows, *rest), slices=View(read))


def _find_stack_problems(
    name: str,
    placed: Mapping[int, StoredTensor],
    shape: Sequence[int],
    dtype: Any,
    problems: TensorProblems,
) -> None:
    """Note what of a leaf is missing, unexpected or misshapen among the tensors of a stack."""
    count, *rest = shape
    problems.missing += [f"`{name}[{index}]`" for index in range(count) if index not in placed]
    for index, tensor in placed.items():
        if index >= count:
            problems.unexpected.append(f"`{tensor.name}` (in {tensor.file})")
        problems.misfits += _find_misfit(tensor, tuple(rest), dtype)


def _find_misfit(tensor: StoredTensor, shape: tuple[int, ...], dtype: Any) -> list[str]:
    where = f"`{tensor.name}` (in {tensor.file})"
    is_made_here = tensor.is_floating and dtype == np.uint8
    if is_made_here and len(tensor.shape) == 2:
        kept, _ = INT4.describe(tensor.shape)[""]
    else:
        kept = tensor.shape
    if kept != tuple(shape):
        return [f"{where} must have shape {tuple(shape)}; got {kept}"]
    # Ids of tokens, which need no 64 bits.
    are_ids = tensor.dtype == "I64" and dtype == np.int32
    if not tensor.is_floating and STORED.get(tensor.dtype) != dtype and not are_ids:
        return [
            f"{where} must be float32, float16 or bfloat16; got {tensor.dtype}: "
            "is it a quantised checkpoint whose config.json has lost its `quantization_config`?"
        ]
    return []


def _check_tied(head: StoredTensor, sources: Mapping[str, StoredTensor]) -> None:
    """Raise unless the head equals the embedding: dropping another one would change outputs."""
    embedding = next((t for name, t in sources.items() if name.endswith(EMBEDDING)), None)
    if embedding is not None and embedding.shape == head.shape:
        rows = head.shape[0]
        bounds = [*range(0, rows, _ROWS_COMPARED_AT_ONCE), rows]
        parts = [(slice(*pair), slice(None)) for pair in itertools.pairwise(bounds)]
        if all(np.array_equal(head.read(part), embedding.read(part)) for part in parts):
            return
    raise CheckpointError(
        f"`{head.name}` (in {head.file}) differs from the token embedding, but config.json says "
        "that they are tied; set `tie_word_embeddings` to false there"
    )


def _place(name: str, tensor: StoredTensor, dtype: Any, mesh: Mesh | Device | None) -> jax.Array:
    sharding = param_sharding(name, tensor.shape, mesh)
    parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        # Called once per device, also for replicas of the same slice.
        if index is None:
            raise RuntimeError(
                f"`{name}` was asked for a part without bounds under {sharding}; weights are read "
                "in parts that this process's devices hold"
            )
        bounds = [part.indices(size)[:2] for part, size in zip(index, tensor.shape, strict=True)]
        key = tuple(bounds)
        if key not in parts:
            parts[key] = tensor.read(tuple(slice(*bound) for bound in bounds)).astype(
                dtype, copy=False
            )
        return parts[key]

    array = jax.make_array_from_callback(tensor.shape, sharding, read)
    # Else reading would run ahead of the transfer, and slices would accumulate in host memory.
    return jax.block_until_ready(array)


def _place_array(name: str, array: np.ndarray, mesh: Mesh | Device | None) -> jax.Array:
    sharding = param_sharding(name, array.shape, mesh)
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
