"""Weights go back into files of the layout that they came from, whatever the rules made of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mmjax.errors import CheckpointError
from mmjax.layers.module import build_abstract, flatten_params, unflatten_params
from mmjax.models.interface import build_model
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import load_model_class
from mmjax.weights.files.safetensors import INDEX_FILE
from mmjax.weights.load import load_params
from mmjax.weights.rules import (
    Rule,
    RuleTypes,
    Split,
    Squeeze,
    Stack,
    Transposition,
    Turn,
)
from mmjax.weights.save import save_params
from tests.families import FAMILIES

DOWN_TO_A_FEW = ["deepseek_vl2", "gemma3", "internvl", "qwen3_vl_moe"]
"""Families whose rules cut, stack, turn and tie; the others' are among these."""


def changed(leaves: dict[str, Any]) -> dict[str, Any]:
    """Return other values, each of its own."""
    return {
        name: jnp.asarray(leaf) + (1 + number % 7) / 8
        for number, (name, leaf) in enumerate(sorted(leaves.items()))
    }


def load(path: Path) -> tuple[dict[str, Any], Sequence[RuleTypes]]:
    config = load_model_config(str(path))
    model_class: Any = load_model_class(config.architecture)
    rules = model_class.rules(config.hf_config)
    _, abstract = build_abstract(build_model, model_class, config.hf_config, dtype=jnp.float32)
    return flatten_params(load_params(path, abstract, rules, use_tqdm=False)), rules


@pytest.mark.parametrize("name", DOWN_TO_A_FEW)
def test_what_is_written_is_read_again(name: str, tmp_path: Path):
    source = FAMILIES[name].checkpoint
    leaves, rules = load(source)
    new = changed(leaves)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_params(unflatten_params(new), source, tmp_path, rules)
    again, _ = load(tmp_path)
    assert again.keys() == new.keys()
    for one, array in new.items():
        np.testing.assert_allclose(again[one], array, err_msg=one, rtol=0, atol=4e-3)
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    assert {n: (a.shape, a.dtype) for n, a in before.items()} == {
        n: (a.shape, a.dtype) for n, a in after.items()
    }


RULES = (
    Split(r"^qkv$", ["q", "k"], [2, 1]),
    Split(r"^both$", ["gate", "up"], [3, 3], of_stack=True, is_interleaved=True),
    Stack(r"^expert\.(?P<index>\d)$", "experts"),
    Rule(r"^turned$", "matrix", Transposition()),
    Rule(r"^one$", "none", Squeeze()),
    Rule(r"^unread$", None),
)
SHAPES = {
    "qkv": (6, 2),
    "both": (2, 6, 5),
    "expert.0": (2, 3),
    "expert.1": (2, 3),
    "turned": (4, 3),
    "one": (1, 3),
    "unread": (2,),
}
TREE = {
    "q": (4, 2),
    "k": (2, 2),
    "gate": (2, 3, 5),
    "up": (2, 3, 5),
    "experts": (2, 2, 3),
    "matrix": (3, 4),
    "none": (3,),
}


def write_source(folder: Path, **more: np.ndarray) -> Path:
    folder.mkdir()
    chance = np.random.default_rng(0)
    tensors = {n: chance.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
    save_file(tensors | more, folder / "model.safetensors")
    return folder


def test_each_change_is_undone(tmp_path: Path):
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    abstract = {n: jnp.zeros(s, jnp.float32) for n, s in TREE.items()}
    new = changed(flatten_params(load_params(source, abstract, RULES, use_tqdm=False)))
    save_params(new, source, out, RULES)
    again = load_params(out, abstract, RULES, use_tqdm=False)
    for name, array in new.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    np.testing.assert_array_equal(after["unread"], before["unread"])


@pytest.mark.parametrize(
    ("more", "extra", "message"),
    [
        ({"codes": np.zeros(3, np.int8)}, {}, "`codes` .* is I8: weights that are quantised"),
        (
            {},
            {"none": np.zeros(4, np.int8)},
            "1 tensors of the tree, such as `none`, are quantised",
        ),
        ({}, {"another": np.zeros(2)}, "no place for 1 tensors of the tree: `another`"),
        # One number would be written to all three places.
        ({}, {"none": np.zeros(1)}, r"`none` .* \(1,\), .* `one` of shape \(1, 3\)"),
        ({}, {"k": np.zeros((4, 2))}, r"`k` .* \(4, 2\), .* `qkv` of shape \(6, 2\)"),
        ({}, {"experts": np.zeros((2, 3))}, r"`experts` .* \(2, 3\), .* `expert.0`"),
    ],
)
def test_it_is_refused_before_anything_is_written(
    more: dict[str, np.ndarray], extra: dict[str, Any], message: str, tmp_path: Path
):
    source, out = write_source(tmp_path / "source", **more), tmp_path / "out"
    out.mkdir()
    with pytest.raises(CheckpointError, match=message):
        save_params({n: np.zeros(s) for n, s in TREE.items()} | extra, source, out, RULES)
    assert not [*out.iterdir()]


def test_a_change_that_is_any_function_is_refused_before_any_file_is_written(tmp_path: Path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    files = {"qkv": "1.safetensors", "one": "2.safetensors"}
    for name, file in files.items():
        save_file({name: np.zeros(SHAPES[name], np.float32)}, source / file)
    (source / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    rules = (Rule("^one$", "none", Turn(np.sin)), *RULES)
    with pytest.raises(CheckpointError, match="cannot be undone"):
        save_params({n: np.zeros(TREE[n]) for n in ("q", "k", "none")}, source, out, rules)
    assert not [*out.iterdir()]
