"""LLaVA beyond the laws: what is loaded, what the engine must know, what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.errors import CheckpointError
from mmjax.layers.module import build_abstract, flatten_params
from mmjax.models.host_inputs import EncoderSpec, PackedEncoderSpec, byte_pixels
from mmjax.models.llava.model import LlavaForConditionalGeneration as Model
from mmjax.models.pixtral.model import PixtralForConditionalGeneration as Pixtral
from tests.families.llava import PIXTRAL_SETTINGS, tiny_config


@pytest.mark.parametrize("tower", ["clip", "siglip"])
def test_what_nobody_reads_is_not_there(tower: str):
    config = tiny_config(tower=tower)
    _, abstract = build_abstract(Model, config, dtype=jnp.float32)
    names = flatten_params(abstract)
    layers = {name.split(".")[3] for name in names if ".encoder.layers." in name}
    assert layers == {"0", "1"}
    assert not any("post_layernorm" in name for name in names)


def test_what_the_engine_must_know_is_said():
    config = tiny_config()
    host_inputs = Model.host_inputs(config)
    assert host_inputs.encoder_spec == EncoderSpec(
        inputs=byte_pixels("pixel_values", (3, 28, 28)), tokens_per_unit=16
    )
    units = host_inputs.units({"pixel_values": np.zeros((3, 28, 28), np.float32)})
    assert units["pixel_values"].shape == (1, 3, 28, 28)
    assert Model.sees == "past"


def test_pixtrals_patches_are_packed():
    host_inputs = Pixtral.host_inputs(tiny_config(**PIXTRAL_SETTINGS))
    assert host_inputs.encoder_spec == PackedEncoderSpec(
        inputs={**byte_pixels("pixel_values", (3 * 7 * 7,)), "places": ((2,), "int32")},
        patches_per_token=1,
    )
    pixels = np.arange(3 * 14 * 21, dtype=np.float32).reshape(3, 14, 21)
    units = host_inputs.units({"pixel_values": pixels})
    assert units["places"].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    np.testing.assert_array_equal(units["pixel_values"][5].reshape(3, 7, 7), pixels[:, 7:, 14:])


def test_pixtrals_features_are_all_read():
    config = tiny_config(tower="pixtral")
    match = "`vision_feature_select_strategy` .* 'default'; it must be `full` with a `pixtral`"
    with pytest.raises(CheckpointError, match=match):
        build_abstract(Pixtral, config, dtype=jnp.float32)
    with pytest.raises(CheckpointError, match=match):
        Pixtral.host_inputs(config)
