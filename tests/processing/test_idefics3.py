"""Idefics3's and SmolVLM's own kwargs."""

from typing import Any

import pytest

from mmjax.errors import RequestValueError
from tests.families.idefics3 import IDEFICS3, SIDE, SMOLVLM
from tests.kit import draw


@pytest.mark.parametrize("family", [IDEFICS3, SMOLVLM])
def test_max_image_size_may_be_the_towers(family: Any):
    """As vLLM's example for SmolVLM gives it to the whole server."""
    own = {"max_image_size": {"longest_edge": SIDE}}
    media = {"image": draw(90, 70)}
    plain = family.make_processor().apply(family.placeholder, media)
    asked = family.make_processor().apply(family.placeholder, media, own)
    served = family.make_processor(mm_processor_kwargs=own).apply(family.placeholder, media)
    assert asked.prompt_token_ids == served.prompt_token_ids == plain.prompt_token_ids


@pytest.mark.parametrize("size", [{"longest_edge": 2 * SIDE}, {"height": SIDE, "width": SIDE}, 32])
def test_other_tiles_are_refused(size: Any):
    asked = {"max_image_size": size}
    with pytest.raises(RequestValueError, match=f"takes tiles of {SIDE} pixels a side; leave it"):
        SMOLVLM.make_processor().apply(SMOLVLM.placeholder, {"image": draw(90, 70)}, asked)
