"""Random parameters have the shapes, dtypes and places of those of files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mmjax.layers.module import build_abstract, flatten_params
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from mmjax.models.interface import build_model
from mmjax.weights.dummy import make_dummy_params
from mmjax.weights.sharding import param_sharding
from tests.engine.tiny import tiny_config


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_dummies_are_what_the_tree_has(quantization: str | None):
    parts = (Gemma3ForConditionalGeneration, tiny_config(), None, quantization)
    _, abstract = build_abstract(build_model, *parts, dtype=jnp.dtype(jnp.bfloat16))
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    made = flatten_params(make_dummy_params(abstract, mesh=mesh, left_out=["vision_tower"]))
    expected = {
        name: leaf
        for name, leaf in flatten_params(abstract).items()
        if not name.startswith("vision_tower.")
    }
    assert made.keys() == expected.keys()
    for name, leaf in made.items():
        assert (leaf.shape, leaf.dtype) == (expected[name].shape, expected[name].dtype), name
        assert leaf.sharding == param_sharding(name, leaf.shape, mesh), name
        if not name.endswith("_scale"):
            assert len(np.unique(np.asarray(leaf).astype(np.float32))) > 1, name
    # No two are alike, and they are the same whenever they are drawn.
    again = flatten_params(make_dummy_params(abstract, mesh=mesh))
    names = [name for name in made if name.endswith(("up_proj.weight", "gate_proj.weight"))]
    assert len({np.asarray(made[name]).tobytes() for name in names}) == len(names)
    assert all((made[name] == again[name]).all() for name in names)
