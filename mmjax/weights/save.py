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
from mmjax.weights.rules import (
    Change,
    Part,
    Place,
    RuleTypes,
    Squeeze,
    StackPart,
    Transposition,
    map_tensor,
)


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
            in none of them; nothing is written then.
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
                found |= {name for name, _ in map_tensor(tensor.name, rules)}
    missing = sorted(leaves.keys() - found)
    if missing:
        raise CheckpointError(
            f"the files of `{source}` have no place for {len(missing)} tensors of the tree: "
            f"{', '.join(f'`{name}`' for name in missing[:5])}; give the directory that they were "
            "read from"
        )


def _restore(
    tensor: StoredTensor, leaves: Mapping[str, Any], rules: Sequence[RuleTypes]
) -> np.ndarray:
    """Return a file's tensor with the tree's values where the tree has them."""
    array = np.array(tensor.read())
    for name, change in map_tensor(tensor.name, rules):
        if name in leaves:
            _write(array, np.asarray(leaves[name]), change)
        elif name.endswith("lm_head.weight"):  # tied
            table = next((n for n in leaves if n.endswith("embed_tokens.weight")), None)
            if table is not None:
                _write(array, np.asarray(leaves[table]), change)
    return array.astype(FLOATS[tensor.dtype])


def _write(array: np.ndarray, leaf: np.ndarray, change: Change | Place | None) -> None:
    """Set what of a file's tensor is a tensor of the tree: the change that made it, undone."""
    match change:
        case None:
            array[...] = leaf
        case Part():
            groups = array.reshape(-1, change.group_size, *array.shape[1:])
            part = groups[:, change.start : change.stop]
            part[...] = leaf.reshape(part.shape)
        case Place(turn=None):
            array[...] = leaf[change.index]
        case Squeeze() | Transposition() | StackPart():
            # Views of the file's own numbers.
            change.apply(array)[...] = leaf
        case _:
            raise CheckpointError(f"what {change} makes of a tensor cannot be undone")
