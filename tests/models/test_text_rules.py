"""Decoders whose files join, turn or part what the tree has: as `save_pretrained` writes them."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mmjax.layers.module import flatten_params
from mmjax.weights.load import load_params
from tests.families.internvl import GPT_OSS, PHI3, QWEN3_MOE, TINY
from tests.families.tiny import TinyModel

SQUARE = {**GPT_OSS, "intermediate_size": 32}
"""Experts as wide as the decoder, as published: no shape tells that they are transposed."""
TEXTS = {"phi3": PHI3, "qwen3_moe": QWEN3_MOE, "gpt_oss": GPT_OSS, "gpt_oss square": SQUARE}


@pytest.mark.parametrize("name", TEXTS)
def test_files_are_read_as_the_module(name: str, tmp_path: Path):
    model = TinyModel(TINY, text=TEXTS[name])
    model.reference.save_pretrained(tmp_path)
    abstract: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params)
    loaded = flatten_params(load_params(tmp_path, abstract, model.rules))
    for path, expected in flatten_params(model.params).items():
        np.testing.assert_array_equal(loaded[path], expected, err_msg=path)
