"""How a checkpoint has its matrices quantised, by their names in the tree."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.layers.cpu.groups import Layout
from mmjax.layers.quantization import Layouts
from mmjax.weights.files.method import read_method
from mmjax.weights.files.packed import PackedTensor, find_packed
from mmjax.weights.files.safetensors import is_snapshot, open_safetensors
from mmjax.weights.rules import Part, Place, RuleTypes, map_tensor
from mmjax.weights.snapshot import read_snapshot_layouts


def read_layouts(path: Path, hf_config: Any, rules: Sequence[RuleTypes]) -> Layouts | None:
    """Return the quantised matrices of a directory, from its files' headers; None: it has none.

    CheckpointError for what is not served.
    """
    method = read_method(hf_config)
    if method is None:
        return None
    if is_snapshot(path):
        return read_snapshot_layouts(path)
    with open_safetensors(path) as tensors:
        return find_layouts(find_packed(tensors, method)[1], rules)


def find_layouts(packed: Sequence[PackedTensor], rules: Sequence[RuleTypes]) -> Layouts:
    """Return how the tree may keep quantised matrices.

    Those that the tree has transposed, say, are not among them: they are dequantised.
    """
    layouts: dict[str, Any] = {}
    for tensor in packed:
        for name, change in map_tensor(tensor.name, rules):
            if isinstance(change, Place):
                layouts[name] = _join(name, layouts.get(name), tensor.layout)
            elif change is None or isinstance(change, Part):
                layouts[name] = tensor.by_rows or tensor.layout
    return layouts


def _join(name: str, one: Layout | None, other: Layout) -> Layout:
    """Return the layout of a stack that has matrices of both."""
    if one is None or one == other:
        return other
    joined = [
        replace(
            layout,
            has_zero=one.has_zero or other.has_zero,
            has_order=one.has_order or other.has_order,
        )
        for layout in (one, other)
    ]
    if joined[0] != joined[1]:
        raise CheckpointError(
            f"the experts of `{name}` are quantised in several ways ({one}; {other}); mmjax reads "
            "those that are alike"
        )
    return joined[0]
