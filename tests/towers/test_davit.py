"""DaViT against HF's backbone, at sizes that fill no window."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.florence2.configuration_florence2 import Florence2VisionConfig
from transformers.models.florence2.modeling_florence2 import Florence2VisionBackbone

from mmjax.errors import CheckpointError
from mmjax.layers.module import bind, build_abstract
from mmjax.towers.davit import DavitConfig, DavitVisionTower
from tests.models.families.florence2 import VISION, fill
from tests.oracle import TOLERANCE, params_of

SIZES = [(24, 24), (21, 39)]


@pytest.fixture(scope="module")
def reference() -> Any:
    settings: dict[str, Any] = {**VISION, "depths": [1, 2]}
    model = Florence2VisionBackbone(Florence2VisionConfig(**settings)).eval()
    fill(model)
    return model


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_grids_are_hfs(reference: Any, height: int, width: int):
    config = DavitConfig.from_hf(reference.config)
    graphdef, abstract = build_abstract(DavitVisionTower, config, dtype=jnp.float32)
    params = params_of(reference, abstract, ())
    pixels = np.random.default_rng(0).standard_normal((2, 3, height, width)).astype(np.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(pixels)).last_hidden_state.permute(0, 2, 3, 1).numpy()
    ours = jax.jit(lambda p, x: bind(graphdef, p)(x))(params, pixels)
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE * max(1, np.abs(expected).max()))


def test_lists_of_other_lengths_are_refused():
    settings: dict[str, Any] = {**VISION, "depths": [1]}
    with pytest.raises(CheckpointError, match="their lengths differ: `depths` 1, `patch_size` 2"):
        DavitConfig.from_hf(Florence2VisionConfig(**settings))
