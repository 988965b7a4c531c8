"""InternVL beyond the laws: what is loaded and cut, what the engine must know, what is refused."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from mmjax.layers.module import build_abstract, flatten_params
from mmjax.models.host_inputs import EncoderSpec, byte_pixels
from mmjax.models.internvl.host_inputs import InternVLHostInputs
from mmjax.models.internvl.model import InternVLForConditionalGeneration
from mmjax.weights.sharding import param_sharding
from tests.families.internvl import SIDE, tiny_config


def test_a_state_that_nobody_reads_is_not_there():
    config = tiny_config(
        vision_feature_layer=-3, vision={"use_mean_pooling": False, "num_hidden_layers": 3}
    )
    _, abstract = build_abstract(InternVLForConditionalGeneration, config, dtype=np.float32)
    assert len(abstract["vision_tower"]["encoder"]["layers"]) == 1
    assert "layernorm" not in abstract["vision_tower"]


@pytest.mark.parametrize(
    ("version", "outer", "inner", "is_tied"),
    [
        (None, True, False, True),
        ("5.23.0", True, False, True),
        ("5.23.0", False, True, False),
        ("4.52.0.dev0", True, False, False),
        ("4.57.1", True, True, True),
    ],
)
def test_whose_key_ties_the_head(version: str | None, outer: bool, inner: bool, is_tied: bool):
    config = tiny_config(text={"tie_word_embeddings": inner}, tie_word_embeddings=outer)
    config.transformers_version = version
    _, abstract = build_abstract(InternVLForConditionalGeneration, config, dtype=np.float32)
    assert ("lm_head" not in abstract["language_model"]) == is_tied


def test_the_tower_is_whole_on_every_device():
    config = tiny_config(text={"model_type": "qwen3", "head_dim": 16})
    _, abstract = build_abstract(InternVLForConditionalGeneration, config, dtype=np.float32)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    cut = {
        name
        for name, leaf in flatten_params(abstract).items()
        if not param_sharding(name, leaf.shape, mesh).is_fully_replicated
    }
    assert {name.split(".")[0] for name in cut} == {"language_model"}
    assert len(cut) == 2 + 7 * config.text_config.num_hidden_layers


def test_what_the_engine_must_know_is_said():
    model = InternVLForConditionalGeneration(tiny_config(), dtype=np.float32)
    assert len(model.kv_cache_spec.layers) == 2
    assert model.modalities == ("image", "video")
    host_inputs = InternVLHostInputs(tiny_config(downsample_ratio=0.25))
    assert host_inputs.encoder_spec == EncoderSpec(
        inputs=byte_pixels("pixel_values", (3, SIDE, SIDE)), tokens_per_unit=1
    )
    for name in ("pixel_values", "pixel_values_videos"):
        units = host_inputs.units({name: np.zeros((2, 3, SIDE, SIDE), np.float32)})
        assert units["pixel_values"].shape == (2, 3, SIDE, SIDE)
