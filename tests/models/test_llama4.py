"""Llama 4 beyond the laws: canvases, pixels in bfloat16, files of other layouts."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from mmjax.errors import RequestError
from mmjax.layers.module import build_abstract, flatten_params
from mmjax.models.llama4.host_inputs import normalize, to_bfloat16
from mmjax.models.llama4.processor import choose_canvas
from mmjax.processing.items.items import ImageSize
from mmjax.weights.files.safetensors import SINGLE_FILE
from mmjax.weights.load import load_params
from tests.families import FAMILIES
from tests.families.llama4 import PATCH, TINY, hf_processor, tiny_config
from tests.families.tiny import TinyModel

STACKED = re.compile(r"(.*feed_forward\.experts\.)(gate_up|down)_proj$")


@pytest.mark.parametrize("is_largest", [False, True])
@pytest.mark.parametrize("most", [1, 5, 16])
def test_canvases_are_hfs(most: int, is_largest: bool):
    theirs = type(hf_processor().image_processor)._preprocess.__globals__
    sides = hf_processor().image_processor.size
    found = theirs["find_supported_resolutions"](max_num_chunks=most, patch_size=sides)
    resolutions, side = torch.tensor(found), sides.height
    sizes = np.random.default_rng(0).integers(1, 12 * side, (100, 2)).tolist()
    whole = [(side * n, side * m) for n in range(1, 7) for m in range(1, 7)]
    for height, width in [*sizes, *whole, (1, 5000), (5000, 1)]:
        expected = theirs["get_best_fit"]((height, width), resolutions, is_largest)
        size = ImageSize(width=width, height=height)
        columns, rows = choose_canvas(size, most, side, is_largest=is_largest)
        assert [rows * side, columns * side] == expected.tolist(), size


def test_pixels_are_hfs_to_the_bit():
    every_byte = np.arange(256, dtype=np.float32)
    scaled = torch.tensor(every_byte).to(torch.bfloat16) * (1 / 255)
    half = torch.tensor(0.5, dtype=torch.bfloat16)
    expected = ((scaled - half) / half).float().numpy()
    np.testing.assert_array_equal(normalize(every_byte, to_bfloat16), expected)
    round_off = partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
    ours = jax.jit(partial(normalize, round_off=round_off))(every_byte)
    np.testing.assert_array_equal(np.asarray(ours), expected)


@pytest.mark.parametrize("inner", [True, False])
def test_the_decoders_own_key_ties_the_head(inner: bool):
    config = tiny_config(text={"tie_word_embeddings": inner}, tie_word_embeddings=not inner)
    reference = TINY.make_reference(config=config)
    head, table = reference.get_output_embeddings(), reference.get_input_embeddings()
    assert (head.weight is table.weight) == inner
    _, abstract = build_abstract(TINY.model_class, config, dtype=np.float32)
    assert ("lm_head" not in abstract["language_model"]) == inner


def test_a_prompt_writes_no_patches_of_its_own():
    with pytest.raises(RequestError, match=re.escape(PATCH)):
        FAMILIES["llama4"].make_processor().apply(f"what {PATCH} is it")


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"max_patches": 0}, "`max_patches` is 0"),
        ({"resize_to_max_canvas": 1}, "`resize_to_max_canvas` is 1"),
    ],
)
def test_kwargs_that_mean_nothing_are_refused(kwargs: dict[str, Any], match: str):
    processor = FAMILIES["llama4"].make_processor()
    with pytest.raises(RequestError, match=match):
        processor.info.get_image_processor().get_limits(kwargs)


def test_experts_one_by_one_are_those_of_the_stack(tmp_path: Path):
    """As what quantises experts as linear layers writes them."""
    model = TinyModel(TINY)
    model.reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    stacked = [match for name in tensors if (match := STACKED.fullmatch(name))]
    assert len(stacked) == 4
    for match in stacked:
        name, (prefix, kind) = match[0], match.groups()
        parts = ("gate", "up") if kind == "gate_up" else ("down",)
        for number, matrix in enumerate(tensors.pop(name)):
            for part, own in zip(parts, np.split(matrix, len(parts), axis=1), strict=True):
                tensors[f"{prefix}{number}.{part}_proj.weight"] = np.ascontiguousarray(own.T)
    save_file(tensors, tmp_path / SINGLE_FILE)
    abstract: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params)
    loaded = flatten_params(load_params(tmp_path, abstract, model.rules))
    for path, expected in flatten_params(model.params).items():
        np.testing.assert_array_equal(loaded[path], expected, err_msg=path)
