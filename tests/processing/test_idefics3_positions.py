"""Idefics3's tiles: sides at which each patch has its own position in HF's float32."""

import numpy as np
import pytest
import torch

from mmjax.errors import CheckpointError
from mmjax.models.idefics3.host_inputs import Idefics3HostInputs, has_own_positions
from tests.families.idefics3 import tiny_config

PUBLISHED = (26, 27, 32)


def positions_of_hf(side: int) -> np.ndarray:
    """Return the position of each patch of a row, as `Idefics3VisionEmbeddings` finds it here."""
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    places = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor([side]))
    return torch.bucketize(places.clamp(max=1.0 - 1e-6), bounds, right=True).numpy()


def test_sides_that_are_taken_have_hfs_positions():
    taken = [side for side in range(1, 100) if has_own_positions(side)]
    assert {*PUBLISHED, *range(1, 19)} <= {*taken}
    for side in taken:
        np.testing.assert_array_equal(positions_of_hf(side), np.arange(side))


@pytest.mark.parametrize("side", [19, 25, 31])
def test_other_sides_are_refused(side: int):
    config = tiny_config(vision={"image_size": side * 4}, scale_factor=1)
    with pytest.raises(CheckpointError, match=f"give tiles of {side} patches a side"):
        Idefics3HostInputs(config)
