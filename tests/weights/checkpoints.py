"""Small safetensors directories by formula, and the trees that they fill."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from mmjax.layers.module import unflatten_params

SHAPES = {
    "language_model.embed_tokens.weight": (16, 8),
    "language_model.layers.0.self_attn.q_proj.weight": (8, 8),
    "language_model.layers.0.self_attn.o_proj.weight": (8, 8),
    "language_model.layers.0.mlp.up_proj.weight": (6, 8),
    "language_model.layers.0.mlp.fc1.bias": (4,),
    "language_model.norm.weight": (8,),
}


def abstract_tree(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: Any = jnp.float32
) -> dict[Any, Any]:
    return unflatten_params(
        {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    )


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: Any = np.float32
) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def write_checkpoint(
    path: Path, tensors: Mapping[str, np.ndarray], *, num_shards: int | None = None
) -> Path:
    """Write `tensors` as one file, or as `num_shards` files and an index."""
    path.mkdir(parents=True, exist_ok=True)
    if num_shards is None:
        save_file(dict(tensors), path / "model.safetensors")
        return path
    weight_map = {}
    for number in range(num_shards):
        name = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[number::num_shards])
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path
