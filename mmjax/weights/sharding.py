"""Shardings of parameters over a mesh, by name and shape.

Tensor parallelism as in Megatron (arXiv 1909.08053, section 3) and HF's `tp_plan`: a block's first
product is column-parallel, its second row-parallel, with one all-reduce after each.
"""

import re
from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

Device = Any
"""A `jax.Device`, which type checkers do not take for a type."""

DATA_AXIS = "data"
MODEL_AXIS = "model"
GROUP_AXIS = "group"
"""Names of a mesh's axes. Parameters are replicated over "data" and sharded over "model" and
"group"; the devices of a "group" have the same key-value heads, if these are fewer than devices."""

_ALL = (MODEL_AXIS, GROUP_AXIS)
_HEADS = (MODEL_AXIS,)

_Axes = tuple[str, ...] | None

_SPECS: Sequence[tuple[str, tuple[_Axes, ...]]] = (
    (r"\.(k_proj|v_proj)\.weight(_scale|_zero)?$", (_HEADS, None)),
    (r"\.(k_proj|v_proj)\.(bias|weight_scale)$", (_HEADS,)),
    (r"\.(q_proj|q_b_proj|g_proj|gate_proj|up_proj|fc1)\.weight(_scale|_zero)?$", (_ALL, None)),
    (r"\.(q_proj|q_b_proj|g_proj|gate_proj|up_proj|fc1)\.(bias|weight_scale)$", (_ALL,)),
    (r"\.(o_proj|down_proj|out_proj|fc2)\.weight(_scale|_zero)?$", (None, _ALL)),
    (r"(^|\.)(embed_tokens|lm_head)\.weight$", (_ALL, None)),
    (r"(^|\.)(embed_tokens|lm_head)\.weight_scale$", (_ALL,)),
    # A token's embeddings for each layer, which lie side by side
    (r"\.embed_tokens_per_layer\.weight$", (None, _ALL)),
    (r"\.per_layer_input_gate\.weight(_scale|_zero)?$", (_ALL, None)),
    (r"\.per_layer_input_gate\.weight_scale$", (_ALL,)),
    (r"\.per_layer_projection\.weight(_scale|_zero)?$", (None, _ALL)),
    # A recurrent layer's: all that it reads of a token, side by side
    (r"\.in_proj(_qkv|_z|_a|_b)?\.weight(_scale|_zero)?$", (_ALL, None)),
    (r"\.in_proj(_qkv|_z|_a|_b)?\.(bias|weight_scale)$", (_ALL,)),
    (r"\.q_norm\.(weight|bias)$", (_ALL, None)),
    (r"\.k_norm\.(weight|bias)$", (_HEADS, None)),
    # The halves of `kv_b_proj`, by query heads (language/deepseek.py)
    (r"\.(k_b_proj|v_b_proj)\.weight$", (_ALL, None)),
    # Each device has a part of every expert: any choice of experts gives all as much to do.
    (r"\.experts\.(gate_proj|up_proj)(_scale|_zero)?$", (None, _ALL, None)),
    (r"\.experts\.(gate_proj|up_proj)_bias$", (None, _ALL)),
    (r"\.experts\.down_proj(_scale|_zero)?$", (None, None, _ALL)),
)
_ADAPTER = re.compile(r"^(?P<layer>.+)\.lora\.(?P<part>a|b|bias)$")
_LANGUAGE_MODEL = re.compile(r"(^|\.)(language_model|lm_head)\.")
"""Parameters that are sharded. Towers and connectors are replicated, and every device encodes other
images: this needs no all-reduce, and a tower is small compared with its language model."""


def partition_spec(name: str, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Return the parameter's PartitionSpec; an axis that does not divide evenly is replicated."""
    if not _LANGUAGE_MODEL.search(name):
        return PartitionSpec()
    adapter = _ADAPTER.match(name)
    spec = _find_spec(name, len(shape)) if adapter is None else _adapter_spec(**adapter.groupdict())
    return PartitionSpec(*(_cut(size, axes, mesh) for size, axes in zip(shape, spec, strict=False)))


def _find_spec(name: str, num_axes: int) -> tuple[_Axes, ...]:
    found = (spec for pattern, spec in _SPECS if re.search(pattern, name) and len(spec) == num_axes)
    return next(found, ())


def _adapter_spec(layer: str, part: str) -> tuple[_Axes, ...]:
    """Return how an adapter's array is cut: along the axis that it has of its layer's weight."""
    if layer.endswith("embed_tokens"):
        return ()
    # The decoder's own is that of its head.
    weight = f"{layer}.lm_head.weight" if layer.endswith("language_model") else f"{layer}.weight"
    spec = _find_spec(weight, 2)
    if not spec:
        return ()
    return (None, None, spec[1]) if part == "a" else (spec[0],)


def _cut(size: int, axes: _Axes, mesh: Mesh) -> str | tuple[str, ...] | None:
    present = tuple(axis for axis in axes or () if axis in mesh.shape)
    if not present or size % prod(mesh.shape[axis] for axis in present):
        return None
    return present[0] if len(present) == 1 else present


def param_sharding(
    name: str, shape: Sequence[int], mesh: Mesh | Device | None
) -> NamedSharding | SingleDeviceSharding:
    """Return the parameter's sharding; on a device alone, all of it; None: the first local one."""
    if not isinstance(mesh, Mesh):
        return SingleDeviceSharding(jax.local_devices()[0] if mesh is None else mesh)
    return NamedSharding(mesh, partition_spec(name, shape, mesh))
