"""Decoders whose files join, turn or part what the tree has: as `save_pretrained` writes them.

And what is read through the same rules: weights in 8 bits, adapters of joined projections.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mmjax.layers.module import flatten_params
from mmjax.layers.quantization import find_quantized
from mmjax.parity.arrays import PagedModel
from mmjax.parity.reference import generate_reference, run_reference
from mmjax.rounding import quantize_rows
from mmjax.weights.load import load_params
from tests.families.internvl import GPT_OSS, PHI3, QWEN3_MOE, TINY
from tests.families.tiny import TinyModel
from tests.models.adapters import make_adapter
from tests.oracle import assert_close

# PEFT asks HF's models for it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
SQUARE = {**GPT_OSS, "intermediate_size": 32}
"""Experts as wide as the decoder, as published: no shape tells that they are transposed."""
TEXTS = {"phi3": PHI3, "qwen3_moe": QWEN3_MOE, "gpt_oss": GPT_OSS, "gpt_oss square": SQUARE}
ATTENTION = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj)"
JOINED = r".*language_model.*\.(qkv_proj|o_proj|gate_up_proj|down_proj)"


@pytest.mark.parametrize("name", TEXTS)
def test_files_are_read_as_the_module(name: str, tmp_path: Path):
    model = TinyModel(TINY, text=TEXTS[name])
    model.reference.save_pretrained(tmp_path)
    abstract: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params)
    loaded = flatten_params(load_params(tmp_path, abstract, model.rules))
    for path, expected in flatten_params(model.params).items():
        np.testing.assert_array_equal(loaded[path], expected, err_msg=path)


@pytest.mark.parametrize("name", ["phi3", "gpt_oss"])
def test_linear_layers_are_rounded_part_by_part(name: str, tmp_path: Path):
    model = TinyModel(TINY, text=TEXTS[name])
    model.reference.save_pretrained(tmp_path)
    settings: Any = {"max_len": 256, "quantization": "int8"}
    model_class = model.family.model_class
    answers = PagedModel.from_directory(tmp_path, model_class, model.config, **settings)
    rounded = flatten_params(answers.params)
    quantized = find_quantized(rounded)
    assert "language_model.layers.1.self_attn.v_proj.weight" in quantized
    for path, expected in flatten_params(model.params).items():
        if path in quantized:
            whole, scale = quantize_rows(np.asarray(expected))
            np.testing.assert_array_equal(rounded[path], whole, err_msg=path)
            np.testing.assert_array_equal(rounded[quantized[path]], scale, err_msg=path)
    sample = model.draw_sample(TINY.prompts["two images"])
    module, inputs = TINY.torch_call(model.reference, sample)
    plain = run_reference(module, inputs, model.rules)["logits"]
    ours = answers.run(sample)["logits"]
    assert 0 < np.abs(ours - plain).max() < 0.2 * np.abs(plain).max()


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("phi3", JOINED),
        # Of matrices that are one by one in files, `test_lora.py` has adapters.
        pytest.param("gpt_oss", ATTENTION, marks=pytest.mark.slow),
    ],
)
def test_adapters_answer_as_pefts(name: str, targets: str, tmp_path: Path):
    model = TinyModel(TINY, text=TEXTS[name])
    adapter = make_adapter(model, tmp_path, target_modules=targets)
    paged = model.make_paged(model.params)
    paged.load_adapter(tmp_path)
    sample = model.draw_sample(TINY.prompts["two images"])
    module, inputs = TINY.torch_call(adapter.reference, sample)
    assert_close(paged.run(sample), run_reference(module, inputs, model.rules), 1e-4)
    tokens = paged.generate(sample, 24)
    assert tokens == generate_reference(module, inputs, 24)
    plain = generate_reference(*TINY.torch_call(model.reference, sample), 24)
    assert tokens != plain, "the adapter changes nothing"
