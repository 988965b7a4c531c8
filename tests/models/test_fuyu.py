"""Fuyu beyond the laws: embeddings, refusals, the published size, cut weights, a directory."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh
from transformers import AutoConfig

from mmjax.layers.attention.kv_cache import KVCacheSpec
from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.models.fuyu.model import FuyuForCausalLM
from mmjax.models.host_inputs import PackedEncoderSpec, byte_pixels
from mmjax.parity.arrays import PagedModel
from mmjax.parity.reference import make_pixels
from mmjax.weights.sharding import param_sharding
from tests.families import served_model
from tests.families.fuyu import draw_item, tiny_config
from tests.families.tiny import Media


def test_embeddings_are_hfs():
    model = served_model("fuyu")
    reference = model.reference
    item = draw_item(model.config, Media(0)).tensors
    patches = make_pixels(item, colours_last=True)["image_patches"]
    with torch.no_grad():
        expected = reference.model.get_image_features(torch.tensor(patches)[None])
    graphdef, _ = build_abstract(FuyuForCausalLM, reference.config, dtype=jnp.float32)
    rows = bind(graphdef, model.params).embed_multimodal(
        jnp.asarray(patches), jnp.zeros(15, jnp.int32)
    )
    np.testing.assert_allclose(rows, expected.last_hidden_state[0], atol=2e-6)


def test_what_the_engine_must_know_is_said():
    config = tiny_config()
    host_inputs = FuyuForCausalLM.host_inputs(config)
    assert host_inputs.encoder_spec == PackedEncoderSpec(
        inputs=byte_pixels("image_patches", (75,), colours_last=True), patches_per_token=1
    )
    item = draw_item(config, Media(0)).tensors
    assert host_inputs.units(item)["image_patches"].shape == (15, 75)
    assert host_inputs.embed_rows(item) is None
    spec = FuyuForCausalLM(config, dtype=jnp.float32).kv_cache_spec
    assert spec == KVCacheSpec.alike(2, num_kv_heads=4, head_dim=8)


# ---- devices -------------------------------------------------------------------------------------


def test_each_of_four_devices_holds_a_head_and_its_part_of_the_mlp():
    _, abstract = build_abstract(FuyuForCausalLM, tiny_config(), dtype=jnp.float32)
    params, mesh = flatten_params(abstract), Mesh(np.array(jax.devices()), ("model",))
    layer = "language_model.layers.0."
    expected = {
        "self_attn.q_proj.bias": (8,),
        "self_attn.v_proj.weight": (8, 32),
        "self_attn.o_proj.weight": (32, 8),
        "mlp.fc1.weight": (16, 32),
        "mlp.fc1.bias": (16,),
        "mlp.fc2.weight": (32, 16),
    }
    for name, shape in expected.items():
        whole = params[layer + name].shape
        assert param_sharding(layer + name, whole, mesh).shard_shape(whole) == shape, name


def test_what_save_pretrained_writes_is_loaded(tmp_path: Path):
    model = served_model("fuyu")
    model.reference.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"]
    ours = PagedModel.from_directory(
        tmp_path, FuyuForCausalLM, AutoConfig.from_pretrained(tmp_path), max_len=64
    )
    expected, got = flatten_params(model.params), flatten_params(ours.params)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)
