"""Weights that are read again, of a directory whose files are quantised by another method."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedConfig

from mmjax.engine.model import iter_own_params
from mmjax.layers.cpu.groups import Layout
from tests.models.test_published_quantized import write_tensors
from tests.weights.packers import GPTQ, pack_gptq

WEIGHT = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)


def test_weights_that_are_read_again_are_read_by_their_own_method(tmp_path: Path):
    make: Any = PreTrainedConfig
    began: Any = SimpleNamespace(
        model=SimpleNamespace(hf_config=make(quantization_config=GPTQ), parts={}),
        use_tqdm=False,
    )
    model_class = SimpleNamespace(rules=lambda hf_config: ())
    arrays = Layout(code="uint4", group_size=32, has_zero=True).describe(WEIGHT.shape)
    tree = {"layer": {f"weight{name}": jax.ShapeDtypeStruct(*one) for name, one in arrays.items()}}
    zeros = []
    # Their zeros differ by one in the files.
    for kind in ("gptq", "gptq_v2", None):
        folder = tmp_path / str(kind)
        folder.mkdir()
        packed = pack_gptq(WEIGHT, v2=kind == "gptq_v2")
        tensors = {f"layer.{name}": one for name, one in packed.tensors.items()}
        write_tensors(folder / "model.safetensors", tensors)
        settings = {"quantization_config": {**GPTQ, "checkpoint_format": kind}} if kind else {}
        (folder / "config.json").write_text(json.dumps(settings))
        device = jax.devices()[0]
        leaves = dict(iter_own_params(began, model_class, (), device, tree, folder))
        zeros.append(leaves["layer.weight_zero"])
    np.testing.assert_array_equal(zeros[0], zeros[1])
    np.testing.assert_array_equal(zeros[0], zeros[2])
