"""MaxText's checkpoints: Orbax's arrays, with layers side by side where a scan runs over them.

What its kernels and norms are in ours; a family says which names they have
(`MultiModalModel.maxtext_rules`). Read as `checkpoint_conversion/utils/param_mapping.py` of MaxText
writes them, with `param_scan_axis` 1, its default.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.errors import CheckpointError
from mmjax.layers.module import flatten_params
from mmjax.weights.files.safetensors import StoredTensor, View, tag_of
from mmjax.weights.rules import Rule, RuleTypes, Turn, Unstack

Function = Callable[[Any], Any]

_ITEMS, _METADATA = "items", "_METADATA"
_PARAMS = re.compile(r"^params\.(?:params\.)?")


# ---- what becomes of a tensor --------------------------------------------------------------------


def kernel(array: Any) -> Any:
    """`[in, ...]` is a matrix `[out, in]`; of attention, `...` are heads and their widths."""
    return array.reshape(array.shape[0], -1).T


def output_kernel(array: Any) -> Any:
    """`[..., out]` is a matrix `[out, in]`."""
    return array.reshape(-1, array.shape[-1]).T


def experts_kernel(array: Any) -> Any:
    """`[E, in, out]` is a stack of matrices `[E, out, in]`."""
    return array.swapaxes(1, 2)


def flat(array: Any) -> Any:
    """Return all of it as one vector."""
    return array.reshape(-1)


def first_of(array: Any) -> Any:
    """Return the first, of a batch of one."""
    return array[0]


def transposed(*axes: int) -> Function:
    """Return what puts axes in another order."""
    return lambda array: array.transpose(axes)


def gemma_scale(array: Any) -> Any:
    """Return a norm's weight, to which one is added where it is used."""
    return array.astype(np.float32) - 1


def table_of(num_rows: int, *, divisor: float = 1.0) -> Function:
    """Return what makes a table of `num_rows`; rows that a trainer lacks are zeros.

    `divisor`: of a table that is scaled already.
    """

    def make(array: Any) -> Any:
        table = array[:num_rows].astype(np.float32) / np.float32(divisor)
        missing = num_rows - len(table)
        pad = jnp.pad if isinstance(table, jax.Array) else np.pad
        return pad(table, ((0, missing), (0, 0)))

    return make


KERNELS: Mapping[str, Function] = {
    r"\bout\.kernel$": output_kernel,
    r"kernel$": kernel,
    r"bias$": flat,
}
"""By a pattern in a name of MaxText's; what matches none stays as it is."""


ATTENTION_AND_MLP: Mapping[str, str] = {
    "self_attention.query_norm.scale": "self_attn.q_norm.weight",
    "self_attention.key_norm.scale": "self_attn.k_norm.weight",
    "self_attention.query.kernel": "self_attn.q_proj.weight",
    "self_attention.key.kernel": "self_attn.k_proj.weight",
    "self_attention.value.kernel": "self_attn.v_proj.weight",
    "self_attention.out.kernel": "self_attn.o_proj.weight",
    "mlp.wi_0.kernel": "mlp.gate_proj.weight",
    "mlp.wi_1.kernel": "mlp.up_proj.weight",
    "mlp.wo.kernel": "mlp.down_proj.weight",
}
"""What every decoder's layers have, by MaxText's name; norms around them differ."""


# ---- names ---------------------------------------------------------------------------------------


def layer_rules(
    names: Mapping[str, str],
    functions: Mapping[str, Function],
    *,
    num_layers: int,
    num_per_scan: int = 1,
) -> list[RuleTypes]:
    """Return the rules of a decoder's layers, scanned or not.

    Args:
        names: In MaxText's layer -> in ours.
        functions: By a pattern in MaxText's name; the first that matches decides.
        num_layers: Of the decoder.
        num_per_scan: Layers of one step of the scan; those that are left over stand alone.
    """
    num_scanned = num_layers - num_layers % num_per_scan
    rules: list[RuleTypes] = []
    for theirs, ours in names.items():
        function = _find(functions, theirs)
        end = re.escape(theirs) + "$"
        name = "language_model.layers.{}." + ours
        for place in range(num_per_scan):
            block = "" if num_per_scan == 1 else rf"layers_{place}\."
            layers = [name.format(n) for n in range(place, num_scanned, num_per_scan)]
            rules.append(Unstack(rf"^decoder\.layers\.{block}{end}", layers, function))
        for place, number in enumerate(range(num_scanned, num_layers)):
            pattern = rf"^decoder\.layers_remainder\.layers_{place}\.{end}"
            rules.append(Rule(pattern, name.format(number), Turn(function)))
        rules.append(Rule(rf"^decoder\.layers_(\d+)\.{end}", name.format(r"\1"), Turn(function)))
    return rules


def name_rules(names: Mapping[str, str], functions: Mapping[str, Function]) -> list[RuleTypes]:
    """Return a rule for each `{pattern of a whole name: name in ours}`."""
    rules: list[RuleTypes] = []
    for old, new in names.items():
        function = _find(functions, old.replace("\\", ""))
        rules.append(Rule(f"^{old}$", new, Turn(function)))
    return rules


def _find(functions: Mapping[str, Function], name: str) -> Function:
    found = (make for pattern, make in functions.items() if re.search(pattern, name))
    return next(found, lambda array: array)


# ---- reading -------------------------------------------------------------------------------------


def is_maxtext(path: Path) -> bool:
    """Return whether a directory is a checkpoint of MaxText's: of a step, or its `items`."""
    return _find_items(path) is not None


@contextmanager
def open_maxtext(path: Path) -> Iterator[dict[str, StoredTensor]]:
    """Yield the parameters of a checkpoint by MaxText's names, each read whole, and once in a row.

    A trainer's other state, such as an optimiser's, is not read.
    """
    items = _find_items(path)
    assert items is not None, f"{path=}"
    from orbax.checkpoint import Checkpointer, PyTreeCheckpointHandler

    with Checkpointer(PyTreeCheckpointHandler()) as checkpointer:
        found = _read_metadata(checkpointer, items)
        reader = _Reader(checkpointer, items)
        tensors = {
            _PARAMS.sub("", name): StoredTensor(
                _PARAMS.sub("", name),
                items.name,
                tuple(leaf.shape),
                tag_of(leaf.dtype),
                View(reader.view(name)),
            )
            for name, leaf in found.items()
            if _PARAMS.match(name)
        }
        if not tensors:
            raise CheckpointError(f"`{items}` has no `params`; is it a checkpoint of MaxText's?")
        yield tensors


class _Reader:
    """Restores one array at a time, and keeps the last: its layers are read one after another."""

    def __init__(self, checkpointer: Any, items: Path) -> None:
        self._checkpointer, self._items = checkpointer, items
        self._last: tuple[str, np.ndarray] | None = None

    def view(self, name: str) -> Callable[..., np.ndarray]:
        """Return what reads slices of an array."""
        return lambda *index: self._read(name)[index]

    def _read(self, name: str) -> np.ndarray:
        if self._last is None or self._last[0] != name:
            self._last = None  # let go of it before the next is read
            self._last = name, self._restore(name.split("."))
        return self._last[1]

    def _restore(self, keys: Sequence[str]) -> np.ndarray:
        from orbax.checkpoint import RestoreArgs
        from orbax.checkpoint.args import PyTreeRestore

        wanted = PyTreeRestore(
            item=_nest(keys, 0),
            restore_args=_nest(keys, RestoreArgs(restore_type=np.ndarray)),
            partial_restore=True,
        )
        found = self._checkpointer.restore(self._items, args=wanted)
        for key in keys:
            found = found[key]
        return np.asarray(found)


def _nest(keys: Sequence[str], leaf: Any) -> Any:
    return {keys[0]: _nest(keys[1:], leaf)} if keys else leaf


def _find_items(path: Path) -> Path | None:
    for folder in (path, path / _ITEMS):
        if (folder / _METADATA).is_file():
            return folder.absolute()
    return None


def _read_metadata(checkpointer: Any, items: Path) -> dict[str, Any]:
    """Return shape and dtype of each array by its dotted name."""
    try:
        tree = checkpointer.metadata(items).item_metadata.tree
    except (ValueError, KeyError, OSError, AttributeError) as error:
        raise CheckpointError(f"`{items}` cannot be read as Orbax's: {error!r}") from error
    return {
        name: leaf
        for name, leaf in flatten_params({"params": tree.get("params", {})}).items()
        if hasattr(leaf, "shape")
    }
