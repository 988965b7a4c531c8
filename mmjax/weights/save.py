"""Write a tree's arrays back as the files of the checkpoint that they were read from.

Names, shapes and dtypes are the files': the rules that read them are followed the other way.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mmjax.errors import CheckpointError
from mmjax.layers.module import Params, flatten_params
from mmjax.weights.files.safetensors import (
    FLOATS,
    INDEX_FILE,
    StoredTensor,
    find_weight_files,
    open_file,
)
from mmjax.weights.load import find_shape
from mmjax.weights.rules import Change, Part, Place, RuleTypes, Turn, map_tensor


def save_params(params: Params, source: Path, out: Path, rules: Sequence[RuleTypes]) -> None:
    """Write weight files into `out` that are those of `source` with the values of `params`.

    What the tree does not have, such as a head that no answer needs, is the source's.

    Args:
        params: The whole tree, of float arrays.
        source: The directory of safetensors files that the tree was read from.
        out: A directory.
        rules: Those that it was read with.

    Raises:
        CheckpointError: If the files have integers (quantised weights), or a tensor of the tree is
            in none of them, of another shape there, or made by a function; nothing is written then.
    """
    leaves = flatten_params(params)
    files = find_weight_files(source)
    _check(leaves, source, files, rules)
    for file in files:
        with ExitStack() as stack:
            stored = open_file(stack, source / file)
            tensors = {one.name: _restore(one, leaves, rules) for one in stored}
        # transformers asks for it.
        save_file(tensors, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)  # safetensors writes for the owner alone
    if (source / INDEX_FILE).is_file():
        shutil.copyfile(source / INDEX_FILE, out / INDEX_FILE)


def _check(
    leaves: Mapping[str, Any], source: Path, files: Sequence[str], rules: Sequence[RuleTypes]
) -> None:
    codes = [name for name, leaf in leaves.items() if np.dtype(leaf.dtype).kind in "iu"]
    if codes:
        raise CheckpointError(
            f"{len(codes)} tensors of the tree, such as `{codes[0]}`, are quantised and cannot be "
            "written as floats; give those of an engine without `quantization`"
        )
    found: set[str] = set()
    for file in files:
        with ExitStack() as stack:
            for tensor in open_file(stack, source / file):
                if not tensor.is_floating:
                    raise CheckpointError(
                        f"`{tensor.name}` of `{source}` is {tensor.dtype}: weights that are "
                        "quantised cannot be written back; train a checkpoint of floats"
                    )
                changes = dict(map_tensor(tensor.name, rules))
                made = [one for name, one in changes.items() if _is_made(name, one, leaves)]
                if made:
                    raise CheckpointError(f"what {made[0]} makes of a tensor cannot be undone")
                for name, change in changes.items():
                    _check_shape(name, change, tensor, _find_leaf(name, leaves))
                found |= changes.keys()
    missing = sorted(leaves.keys() - found)
    if missing:
        raise CheckpointError(
            f"the files of `{source}` have no place for {len(missing)} tensors of the tree: "
            f"{', '.join(f'`{name}`' for name in missing[:5])}; give the directory that they were "
            "read from"
        )


def _check_shape(name: str, change: Change | Place | None, tensor: StoredTensor, leaf: Any) -> None:
    """Raise unless the tree's values are as many as were made of the file's tensor."""
    shape: Sequence[int] | None = tensor.shape
    if isinstance(change, Change):
        shape = find_shape(change, tensor.shape) if change.is_fit(tensor.shape) else None
    if leaf is None or tuple(leaf.shape[isinstance(change, Place) :]) == shape:
        return
    raise CheckpointError(
        f"`{name}` of the tree has shape {tuple(leaf.shape)}, which cannot be written back to "
        f"`{tensor.name}` of shape {tensor.shape} (in {tensor.file}); give the directory that it "
        "was read from"
    )


def _restore(
    tensor: StoredTensor, leaves: Mapping[str, Any], rules: Sequence[RuleTypes]
) -> np.ndarray:
    """Return a file's tensor with the tree's values where the tree has them."""
    array = np.array(tensor.read())
    for name, change in map_tensor(tensor.name, rules):
        leaf = _find_leaf(name, leaves)
        if leaf is not None:
            _write(array, np.asarray(leaf), change)
    return array.astype(FLOATS[tensor.dtype])


def _find_leaf(name: str, leaves: Mapping[str, Any]) -> Any:
    """Return the tree's values of a tensor, of a tied head the table's; None: it has none."""
    if name not in leaves and name.endswith("lm_head.weight"):
        name = next((one for one in leaves if one.endswith("embed_tokens.weight")), name)
    return leaves.get(name)


def _is_made(name: str, change: Change | Place | None, leaves: Mapping[str, Any]) -> bool:
    """Whether the tree's values of a tensor are what any function made of it."""
    turn = change.turn if isinstance(change, Place) else change
    return isinstance(turn, Turn) and _find_leaf(name, leaves) is not None


def _write(array: np.ndarray, leaf: np.ndarray, change: Change | Place | None) -> None:
    """Set what of a file's tensor is a tensor of the tree: the change that made it, undone."""
    match change:
        case None:
            array[...] = leaf
        case Part():
            groups = array.reshape(-1, change.group_size, *array.shape[1:])
            part = groups[:, change.start : change.stop]
            part[...] = leaf.reshape(part.shape)
        case Place():
            array[...] = leaf[change.index]
        case _:
            # Views of the file's own numbers.
            change.apply(array)[...] = leaf
