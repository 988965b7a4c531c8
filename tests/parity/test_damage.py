"""Weights that are not the checkpoint's: parity says NO, and names the module that they change.

Of every family's tiny checkpoint: two tensors of one shape change places in the last block of the
language model, and in a block of the tower. By default of one family with tiles and videos.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmjax.layers.module import flatten_params, unflatten_params
from mmjax.models.model_source import load_model_config
from mmjax.parity.__main__ import _draw_clip, _draw_video
from mmjax.parity.case import Case, Parity
from mmjax.parity.compare import TOLERANCE, format_summary
from tests.families import ALL_FAMILIES, CLIP_FAMILIES, FAMILIES
from tests.families.default_run import mark
from tests.families.directories import made_once, save_weights
from tests.families.family import Family
from tests.families.florence2 import fill as fill_florence2
from tests.kit import draw

pytestmark = pytest.mark.filterwarnings(
    # PaliGemma's processor of HF makes numpy's array of a tensor.
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)
_BLOCK = re.compile(r"^.*(?:layers?|blocks|encoder_layers)\.\d+(?=\.)")


def media_of(family: Family) -> tuple[str, ...]:
    if family.name in CLIP_FAMILIES:
        return ("audio",)
    return ("image", "video") if family.video else ("image",)


# Each family that HF has, with each of its media.
CASES = [
    pytest.param(
        family,
        media,
        id=f"{name}-{media}",
        marks=mark("damage that parity names", name),
    )
    for name, family in ALL_FAMILIES.items()
    for media in media_of(family)
    if family.has_reference
]


def write_loud(path: Path) -> Path:
    """Write a Florence-2 in which rounding does not grow beyond the tolerance."""
    return save_weights(FAMILIES["florence2"].write(path), fill_florence2)


@cache
def load(family: Family) -> Parity:
    """Return a family's random checkpoint on both sides."""
    is_bart = family.name == "florence2"
    path = made_once(write_loud)() if is_bart else family.checkpoint
    parity = Parity(load_model_config(str(path)), max_len=64 if is_bart else 1024)
    if family.tiny is not None:
        family.tiny.mend(parity.reference)  # where HF's class errs, as `mmjax.parity` says
    return parity


def make_case(parity: Parity, media: str) -> Case:
    if media == "video":
        prompt = parity.write_prompt("what is it", 0, num_videos=1)
        return Case(name=media, prompt=prompt, videos=[_draw_video()])
    if media == "audio":
        prompt = parity.write_prompt("what is it", 0, num_clips=1)
        return Case(name=media, prompt=prompt, clips=[_draw_clip(0, parity)])
    return Case(name=media, prompt=parity.write_prompt("what is it", 1), images=[draw(60, 40)])


def find_blocks(leaves: Mapping[str, Any], media: str) -> Iterator[str]:
    """Yield the last block of the language model, and the first one of each other stack.

    Of two towers the one that takes the media.
    """
    blocks = [found.group() for found in map(_BLOCK.search, leaves) if found]
    of_text = [block for block in blocks if block.startswith("language_model.")]
    yield of_text[-1]
    stacks: dict[str, str] = {}
    for block in blocks:
        if block not in of_text and block.startswith("audio_tower.") == (media == "audio"):
            stacks.setdefault(block.partition(".")[0], block)
    yield from stacks.values()


def swap(leaves: Mapping[str, Any], block: str) -> dict[str, Any]:
    """Return the leaves, of which two of a block have changed places: matrices if it has two."""
    own = {name: leaf for name, leaf in leaves.items() if name.startswith(f"{block}.")}
    pairs = [
        (one, other)
        for one, other in combinations(own, 2)
        if own[one].shape == own[other].shape and not np.array_equal(own[one], own[other])
    ]
    one, other = max(pairs, key=lambda pair: own[pair[0]].ndim)
    return {**leaves, one: leaves[other], other: leaves[one]}


@pytest.mark.parametrize(("family", "media"), CASES)
def test_right_weights_are_within_tolerance(family: Family, media: str):
    parity = load(family)
    report = parity.run(make_case(parity, media), max_tokens=8)
    assert report.is_within(TOLERANCE), report
    assert {*family.probed} <= {one.name for one in report.differences}
    assert format_summary([report], TOLERANCE).endswith("parity: yes (tolerance 0.0001)")


@pytest.mark.parametrize(("family", "media"), CASES)
def test_two_swapped_tensors_are_found(family: Family, media: str):
    parity = load(family)
    case, right = make_case(parity, media), parity.ours.params
    leaves = flatten_params(right)
    for block in find_blocks(leaves, media):
        parity.ours.params = unflatten_params(swap(leaves, block))
        try:
            report = parity.run(case, max_tokens=1)
        finally:
            parity.ours.params = right
        first = report.first_out_of(TOLERANCE)
        assert first is not None, block
        names = [one.name for one in report.differences]
        if block in names:
            assert first.name == block
        elif names[0] == "language_model.layers.0":  # nothing of a tower of clips has HF's shape
            assert media == "audio"
            assert first.name == names[0]
        else:  # of another shape in HF's tower, as what it pads
            assert first.name.startswith(("vision_tower.", *family.probed))
        assert format_summary([report], TOLERANCE).endswith("parity: NO (tolerance 0.0001)")
