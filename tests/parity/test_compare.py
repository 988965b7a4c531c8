"""The report: what counts as apart, what is named first, what a reader sees."""

from typing import Any

import numpy as np
import pytest

from mmjax.parity.compare import CaseReport, compare, format_case, format_summary

REFERENCE = {"layers.0": np.full((2, 3), 1000.0), "logits": np.zeros((2, 4))}


def report(changes: dict[str, Any] | None = None, **kwargs: Any) -> CaseReport:
    ours = {**{name: value.copy() for name, value in REFERENCE.items()}, **(changes or {})}
    kwargs = {
        **{"name": "case", "num_prompt_tokens": 2, "num_images": 0},
        **{"token_ids": (1, 2), "reference_token_ids": (1, 2)},
        **kwargs,
    }
    return CaseReport(differences=compare(ours, REFERENCE), **kwargs)


def test_equal_is_within():
    assert report().is_within(0.0)


def test_states_are_measured_by_their_size_and_logits_are_not():
    near = report({"layers.0": REFERENCE["layers.0"] + 0.09})
    assert near.is_within(1e-4)
    far = report({"layers.0": REFERENCE["layers.0"] + 0.11})
    first = far.first_out_of(1e-4)
    assert first is not None
    assert first.name == "layers.0"
    assert not report({"logits": REFERENCE["logits"] + 2e-4}).is_within(1e-4)


@pytest.mark.parametrize(
    "logits", [np.full((2, 4), np.nan), np.zeros((2, 3))], ids=["nan", "other shape"]
)
def test_what_cannot_be_compared_is_out(logits: np.ndarray):
    assert not report({"logits": logits}).is_within(1e3)


def test_a_module_that_ours_lacks_is_out():
    (only,) = compare({}, {"layers.0": np.zeros(1)})
    assert not only.is_within(1e9)


@pytest.mark.parametrize(
    "changes", [{"token_ids": (1, 3)}, {"token_ids": (1,)}, {"is_prompt_equal": False}]
)
def test_tokens_and_prompts_count(changes: dict[str, Any]):
    assert not report(**changes).is_within(1e-4)


def test_the_table_marks_the_first_bad_layer_and_token():
    bad = report({"layers.0": np.zeros((2, 3))}, token_ids=(1, 3), is_prompt_equal=False)
    text = format_case(bad, 1e-4)
    assert "layers.0   1.00e+03   1.00e+03   1.00e+03  (2, 3)  <- out of tolerance" in text
    assert "greedy tokens differ from place 1 on: ours [3], reference [2]" in text
    assert "different prompt token ids" in text


def test_the_summary_has_a_line_a_case_and_a_verdict():
    lines = format_summary([report(), report({"layers.0": np.zeros((2, 3))})], 1e-4).splitlines()
    assert lines[1].split() == ["case", "0.00e+00", "0.00e+00", "same", "-"]
    assert lines[2].split() == ["case", "0.00e+00", "1.00e+03", "same", "layers.0"]
    assert lines[3] == "parity: NO (tolerance 0.0001)"
    assert format_summary([report()], 1e-4).endswith("parity: yes (tolerance 0.0001)")
