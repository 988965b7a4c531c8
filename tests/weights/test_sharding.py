"""The plan of slices: by name, by divisibility, by the mesh's axes."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec, SingleDeviceSharding

from mmjax.weights.sharding import param_sharding, partition_spec


def make_mesh(data: int, model: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))


@pytest.mark.parametrize(
    ("name", "shape", "spec"),
    [
        ("language_model.layers.3.self_attn.q_proj.weight", (8, 6), ("model", None)),
        ("language_model.layers.3.self_attn.o_proj.weight", (6, 8), (None, "model")),
        ("language_model.layers.3.mlp.down_proj.weight", (6, 8), (None, "model")),
        ("language_model.decoder.layers.0.fc1.bias", (8,), ("model",)),
        ("language_model.decoder.layers.0.fc2.bias", (8,), ()),
        ("language_model.decoder.layers.0.fc2.weight", (6, 8), (None, "model")),
        ("vision_tower.encoder.layers.0.mlp.fc1.weight", (8, 6), ()),
        ("vision_tower.encoder.layers.0.self_attn.q_proj.weight", (8, 8), ()),
        ("language_model.embed_tokens.weight", (12, 6), ("model", None)),
        ("lm_head.weight", (12, 6), ("model", None)),
        ("language_model.layers.3.self_attn.q_norm.weight", (8,), ()),
        ("vision_tower.embeddings.patch_embedding.weight", (8, 3, 4, 4), ()),
        ("multi_modal_projector.mm_input_projection_weight", (8, 8), ()),
        ("language_model.layers.3.self_attn.k_proj.weight", (6, 8), (None, None)),
    ],
)
def test_the_plan(name: str, shape: tuple[int, ...], spec: tuple[str | None, ...]):
    assert partition_spec(name, shape, make_mesh(1, 4)) == PartitionSpec(*spec)


GROUPED = ("data", "model", "group")


@pytest.mark.parametrize(
    ("name", "shape", "spec"),
    [
        ("language_model.layers.3.self_attn.q_proj.weight", (8, 6), (("model", "group"), None)),
        ("language_model.layers.3.self_attn.q_proj.bias", (8,), (("model", "group"),)),
        ("language_model.layers.3.self_attn.k_proj.weight", (4, 6), ("model", None)),
        ("language_model.layers.3.self_attn.v_proj.bias", (4,), ("model",)),
        ("language_model.layers.3.self_attn.o_proj.weight", (6, 8), (None, ("model", "group"))),
        ("lm_head.weight", (12, 6), (("model", "group"), None)),
        ("lm_head.weight", (14, 6), (None, None)),
    ],
)
def test_a_group_shares_its_key_value_heads(
    name: str, shape: tuple[int, ...], spec: tuple[str | None, ...]
):
    mesh = Mesh(np.array(jax.devices()).reshape(1, 2, 2), GROUPED)
    assert partition_spec(name, shape, mesh) == PartitionSpec(*spec)


def test_each_device_gets_its_part_and_no_more():
    mesh = Mesh(np.array(jax.devices()).reshape(1, 2, 2), GROUPED)
    name = "language_model.layers.0.self_attn.{}_proj.weight"
    wide = param_sharding(name.format("q"), (8, 6), mesh).shard_shape((8, 6))
    narrow = param_sharding(name.format("k"), (4, 6), mesh).shard_shape((4, 6))
    assert (wide, narrow) == ((2, 6), (2, 6))


def test_a_mesh_without_a_model_axis_replicates():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert partition_spec("lm_head.weight", (12, 6), mesh) == PartitionSpec(None, None)


def test_no_mesh_is_one_device():
    assert isinstance(param_sharding("lm_head.weight", (12, 6), None), SingleDeviceSharding)
