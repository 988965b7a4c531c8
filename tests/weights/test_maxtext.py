"""MaxText's own checkpoints are read as the HF checkpoints that it made them of."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.convert import main
from mmjax.errors import CheckpointError
from mmjax.layers.module import Params, build_abstract, flatten_params
from mmjax.models.interface import build_model
from mmjax.models.llava.model import LlavaForConditionalGeneration
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import load_model_class
from mmjax.weights.load import load_params
from mmjax.weights.maxtext import is_maxtext, open_maxtext
from mmjax.weights.rules import Rule, RuleTypes, Turn, map_tensor
from mmjax.weights.snapshot import load_snapshot

GOLDEN = Path(__file__).parent.parent / "golden_maxtext"
CHECKPOINTS = {
    "Gemma 3, scanned": ("gemma3", "scanned/0"),
    "Gemma 3": ("gemma3", "unscanned/0/items"),
    "Qwen3-VL": ("qwen3_vl", "unscanned/0"),
    "Qwen3-VL, scanned": ("qwen3_vl_not_fed", "scanned/0"),
}
NUM_GEMMA_ROWS = 64
"""Of the table of tokens, in MaxText."""


def describe(family: str) -> tuple[Any, Any, Params]:
    """Return the model's class, its configuration and its tree."""
    config = load_model_config(str(GOLDEN / family))
    model_class: Any = load_model_class(config.architecture)
    _, abstract = build_abstract(build_model, model_class, config.hf_config, dtype=jnp.float32)
    return model_class, config.hf_config, abstract


@cache
def load_both(family: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return HF's parameters and MaxText's, by names in the tree."""
    model_class, hf_config, abstract = describe(family)
    ways = (
        (GOLDEN / family, model_class.rules(hf_config)),
        (GOLDEN / family / folder, model_class.maxtext_rules(hf_config)),
    )
    hf, maxtext = (load_params(path, abstract, rules, use_tqdm=False) for path, rules in ways)
    return flatten_params(hf), flatten_params(maxtext)


def check(hf: dict[str, Any], maxtext: dict[str, Any]) -> None:
    assert hf.keys() == maxtext.keys()
    for name, array in hf.items():
        ours, theirs = np.asarray(maxtext[name]), np.asarray(array)
        if name == "language_model.embed_tokens.weight":
            ours, theirs = ours[:NUM_GEMMA_ROWS], theirs[:NUM_GEMMA_ROWS]
        # A scale is stored with one added, and the table multiplied.
        np.testing.assert_allclose(ours, theirs, err_msg=name, rtol=0, atol=3e-7)


@pytest.mark.parametrize(
    ("family", "folder"),
    [
        # A layer in each array takes seconds longer, and the default run has two of them scanned.
        pytest.param(*one, id=name, marks=() if "scanned" in name else pytest.mark.slow)
        for name, one in CHECKPOINTS.items()
    ],
)
def test_it_is_the_checkpoint_that_it_was_made_of(family: str, folder: str):
    check(*load_both(family, folder))


def test_rows_that_it_lacks_are_zeros():
    _, maxtext = load_both("gemma3", "scanned/0")
    table = np.asarray(maxtext["language_model.embed_tokens.weight"])
    assert np.any(table[NUM_GEMMA_ROWS - 1])
    assert len(table) > NUM_GEMMA_ROWS
    assert not np.any(table[NUM_GEMMA_ROWS:])


def rename(arrays: dict[str, Any], rules: Sequence[RuleTypes]) -> dict[str, Any]:
    """Return a trainer's arrays under the tree's names."""
    renamed = {}
    for name, array in arrays.items():
        for new, change in map_tensor(name, rules):
            assert isinstance(change, Turn)
            renamed[new] = change.apply(array)
    return renamed


def test_the_rules_take_a_trainers_arrays_on_its_devices():
    model_class, hf_config, _ = describe("gemma3")
    with open_maxtext(GOLDEN / "gemma3" / "scanned/0") as tensors:
        arrays = {
            name: jnp.asarray(one.read((slice(None),) * len(one.shape)))
            for name, one in tensors.items()
        }
    renamed = rename(arrays, model_class.maxtext_rules(hf_config))
    _, maxtext = load_both("gemma3", "scanned/0")
    assert renamed.keys() == maxtext.keys()
    for name, array in renamed.items():
        assert isinstance(array, jnp.ndarray)
        np.testing.assert_allclose(array, maxtext[name], rtol=0, atol=1e-7)


def test_convert_makes_a_snapshot_of_it(tmp_path: Path):
    source, step = GOLDEN / "qwen3_vl_not_fed", GOLDEN / "qwen3_vl_not_fed/scanned/0"
    assert main([str(source), str(tmp_path / "out"), "--maxtext", str(step)]) == 0
    _, _, abstract = describe("qwen3_vl_not_fed")
    hf, _ = load_both("qwen3_vl_not_fed", "scanned/0")
    check(hf, flatten_params(load_snapshot(tmp_path / "out", abstract)))
    assert (tmp_path / "out" / "config.json").is_file()


def test_what_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(GOLDEN / "gemma3"), str(tmp_path / "out"), "--maxtext", str(tmp_path)]) == 1
    assert "is no checkpoint of MaxText's; give the directory of a step" in capsys.readouterr().err
    assert not is_maxtext(GOLDEN / "gemma3")


def test_layers_of_another_number_are_named():
    model_class, hf_config, _ = describe("gemma3")
    hf_config.text_config.num_hidden_layers = 20
    hf_config.text_config.layer_types = (hf_config.text_config.layer_types * 2)[:20]
    _, abstract = build_abstract(build_model, model_class, hf_config, dtype=jnp.float32)
    rules = model_class.maxtext_rules(hf_config)
    with pytest.raises(CheckpointError, match=r"must have shape .*got \(16, 2, 24\)"):
        load_params(GOLDEN / "gemma3" / "scanned/0", abstract, rules, use_tqdm=False)


def test_a_family_without_rules_says_which_have_some():
    with pytest.raises(CheckpointError, match="it reads those of Gemma 3 and Qwen3-VL"):
        LlavaForConditionalGeneration.maxtext_rules(None)


def test_an_index_is_that_of_the_second_axis():
    whole = np.arange(24).reshape(2, 3, 4)
    turn = Turn(lambda array: array.T, index=1, count=3)
    np.testing.assert_array_equal(turn.apply(whole), whole[:, 1].T)
    assert turn.is_fit(whole.shape)
    assert not turn.is_fit((2, 4, 4))
    ((name, change),) = map_tensor("a", [Rule("^a$", "b", Turn(np.negative))])
    assert (name, change.apply(whole)[0, 0, 1] if isinstance(change, Turn) else None) == ("b", -1)
