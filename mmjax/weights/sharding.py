"""Where a parameter's slices lie on a mesh, decided by its name and shape.

The plan is Megatron's (arXiv 1909.08053, section 3) and HF's `tp_plan`: a block's first product
is cut by outputs, its second by inputs, so that one sum over "model" ends each half of a block.
"""

import re
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

DATA_AXIS = "data"
MODEL_AXIS = "model"
"""Names of a mesh's axes. Parameters are replicated over "data"."""

_SPECS: Sequence[tuple[str, tuple[str | None, ...]]] = (
    (r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj|fc1)\.weight$", (MODEL_AXIS, None)),
    (r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj|fc1)\.bias$", (MODEL_AXIS,)),
    (r"\.(o_proj|down_proj|out_proj|fc2)\.weight$", (None, MODEL_AXIS)),
    (r"(^|\.)(embed_tokens|lm_head)\.weight$", (MODEL_AXIS, None)),
)


def partition_spec(name: str, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Return how the parameter `name` is cut; an axis that does not divide is replicated."""
    for pattern, spec in _SPECS:
        if re.search(pattern, name) and len(spec) == len(shape):
            axes = [
                axis if axis is not None and size % mesh.shape.get(axis, 1) == 0 else None
                for axis, size in zip(spec, shape, strict=True)
            ]
            return PartitionSpec(*(axis if axis in mesh.shape else None for axis in axes))
    return PartitionSpec()


def param_sharding(
    name: str, shape: Sequence[int], mesh: Mesh | None
) -> NamedSharding | SingleDeviceSharding:
    """Return the parameter's sharding; without a mesh, the first local device."""
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(mesh, partition_spec(name, shape, mesh))
