"""docs/getting_started.md says what a model needs: the sizes of its table follow from configs."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest

from mmjax.cli.models import _FORMS
from mmjax.layers.module import bind, build_abstract
from mmjax.models.interface import build_model
from tests.models.test_full_size import Checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "getting_started.md"
ROW = re.compile(
    r"^\| `(\S+)` \| (?:yes|no) \| ([\d.]+) B \|" + r" ([\d.]+) GiB \|" * 4, re.MULTILINE
)
NAMES = {
    "HuggingFaceTB/SmolVLM2-256M-Video-Instruct": "smolvlm SmolVLM2 256M",
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": "smolvlm SmolVLM2 500M",
    "Qwen/Qwen3-VL-2B-Instruct": "qwen3_vl 2B",
    "Qwen/Qwen2.5-VL-3B-Instruct": "qwen2_5_vl 3B",
    "google/gemma-3-4b-it": "gemma3 4b",
    "Qwen/Qwen3-VL-4B-Instruct": "qwen3_vl 4B",
    "Qwen/Qwen3-VL-8B-Instruct": "qwen3_vl 8B",
}
"""Models of the table -> their rows of `published.json`."""
ROWS = {name: sizes for name, *sizes in ROW.findall(PAGE.read_text(encoding="utf-8"))}
FIRST = "HuggingFaceTB/SmolVLM2-256M-Video-Instruct"


def gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def find_sizes(checkpoint: Checkpoint) -> list[str]:
    weights: dict[str, int] = {}
    cache = 0
    for form, (dtype, quantization) in _FORMS.items():
        module: Any = checkpoint.model_class
        graphdef, params = build_abstract(
            build_model, module, checkpoint.make_config(), None, quantization, dtype=dtype
        )
        weights[form] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
        cache = 8192 * bind(graphdef, params).kv_cache_spec.width * 2
    order = ("bfloat16", "float32", "int8")
    return [*(gib(weights[form]) for form in order), gib(cache)]


def test_the_table_has_the_models_that_are_checked() -> None:
    assert ROWS.keys() == NAMES.keys()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == FIRST else pytest.mark.slow) for name in NAMES],
)
def test_a_row_says_what_its_model_needs(name: str) -> None:
    checkpoint = Checkpoint(NAMES[name])
    parameters, *sizes = ROWS[name]
    assert sizes == find_sizes(checkpoint)
    assert parameters == f"{checkpoint.row['num_parameters'] / 1e9:.2f}"
