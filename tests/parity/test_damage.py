"""Weights that are not the checkpoint's: parity says NO, and names the module that they change."""

from typing import Any

import pytest

from mmjax.models.model_source import load_model_config
from mmjax.parity.__main__ import _draw_video
from mmjax.parity.case import Case, Parity
from mmjax.parity.compare import TOLERANCE, format_summary
from tests.families import FAMILIES
from tests.kit import draw


@pytest.fixture(scope="module")
def parity() -> Parity:
    """A random SmolVLM2 on both sides."""
    return Parity(load_model_config(str(FAMILIES["smolvlm"].checkpoint)), max_len=512)


def make_case(parity: Parity, media: str) -> Case:
    if media == "video":
        prompt = parity.write_prompt("what is it", 0, num_videos=1)
        return Case(name=media, prompt=prompt, videos=[_draw_video()])
    return Case(name=media, prompt=parity.write_prompt("what is it", 1), images=[draw(60, 40)])


@pytest.mark.parametrize("media", ["image", "video"])
def test_right_weights_are_within_tolerance(parity: Parity, media: str):
    report = parity.run(make_case(parity, media), max_tokens=8)
    assert report.is_within(TOLERANCE), report
    assert "multi_modal_projector" in [one.name for one in report.differences]


@pytest.mark.parametrize("media", ["image", "video"])
@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("vision_tower.encoder.layers.1", ("self_attn.q_proj", "self_attn.k_proj")),
        ("language_model.layers.1", ("mlp.gate_proj", "mlp.up_proj")),
    ],
)
def test_two_swapped_tensors_are_found(
    parity: Parity, module: str, names: tuple[str, str], media: str
):
    parts: Any = parity.ours.params
    for key in module.split("."):
        parts = parts[int(key) if key.isdecimal() else key]
    outer = parts[names[0].split(".")[0]]
    one, other = (name.split(".")[1] for name in names)
    outer[one], outer[other] = outer[other], outer[one]
    try:
        report = parity.run(make_case(parity, media), max_tokens=1)
    finally:
        outer[one], outer[other] = outer[other], outer[one]
    first = report.first_out_of(TOLERANCE)
    assert first is not None
    assert first.name == module
    assert format_summary([report], TOLERANCE).endswith("parity: NO (tolerance 0.0001)")
