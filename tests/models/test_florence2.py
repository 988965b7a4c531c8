"""Florence-2 beyond the laws: what the engine must know, what is refused."""

from typing import Any

import numpy as np
import pytest

from mmjax.errors import CheckpointError
from mmjax.models.florence2.host_inputs import Florence2HostInputs
from mmjax.models.florence2.model import Florence2ForConditionalGeneration as Model
from tests.models.families.family import Media
from tests.models.families.florence2 import draw_item, tiny_config


def test_what_the_engine_must_know_is_said():
    config = tiny_config(vision={"image_size": [20, 37]})
    host_inputs = Florence2HostInputs(config)
    assert host_inputs.num_image_rows == 3 * 5 + 1
    assert host_inputs.max_encoder_len == 64
    pixels = draw_item(config, Media(0)).tensors["pixel_values"]
    token_ids = [4, *[config.image_token_id] * 16, 5]
    units, count = host_inputs.encoder_input(token_ids, [{"pixel_values": pixels}])
    assert count == len(token_ids)
    assert {name: value.shape for name, value in units.items()} == {
        "token_ids": (1, 64),
        "image_rows": (1, 64),
        "pixel_values": (1, 3, 20, 37),
    }
    assert units["image_rows"][0].tolist() == [-1, *range(16), -1, *[-1] * 46]
    assert units["token_ids"][0, 18:].tolist() == [-1] * 46
    np.testing.assert_array_equal(units["pixel_values"][0], pixels)
    with pytest.raises(ValueError, match="15 places for 16 rows"):
        host_inputs.encoder_input(token_ids[2:], [{"pixel_values": pixels}])


def test_the_longest_encoder_prompt_is_bounded():
    config = tiny_config(text={"max_position_embeddings": 4096})
    assert Florence2HostInputs(config).max_encoder_len == 1024


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vision": {"projection_dim": 16}}, "`vision_config.projection_dim` is 16"),
        ({"text": {"tie_word_embeddings": False}}, "`text_config.tie_word_embeddings` is false"),
        ({"text": {"max_position_embeddings": 10}}, "is 10 tokens, and the encoder takes 10"),
        ({"vision": {"max_position_embeddings": 2}}, "pictures of 24x24 pixels make 3 columns"),
        ({"vision": {"num_heads": [2]}}, "`num_heads` 1"),
        ({"vision": {"activation_function": "mish"}}, "activation `mish` is unknown"),
        ({"vision": {"image_size": None}}, "the image processor's configuration in ``"),
        ({"text": {"model_type": "llama"}}, "`text_config.model_type` is `llama`"),
    ],
)
def test_what_a_config_cannot_have_is_named(settings: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        Model(tiny_config(**settings), dtype=np.dtype(np.float32))
