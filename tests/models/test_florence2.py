"""Florence-2 beyond the laws: what the engine must know, what is refused."""

from typing import Any

import jax
import numpy as np
import pytest
from transformers import Florence2Config

from mmjax.config.engine_config import MultiModalConfig
from mmjax.errors import RequestError
from mmjax.layers.module import bind, build_abstract
from mmjax.models.florence2.host_inputs import Florence2HostInputs
from mmjax.models.host_inputs import EncoderSpec
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import generate_reference
from mmjax.towers.davit import DavitConfig, DavitVisionTower
from tests.engine.tiny import answer_all
from tests.families import served_model
from tests.families.florence2 import draw_item, tiny_config
from tests.families.tiny import Media, TinyModel, Words
from tests.models.served import make_request, start_engine


def test_what_the_engine_must_know_is_said():
    config = tiny_config(vision={"image_size": [20, 37]})
    host_inputs = Florence2HostInputs(config)
    assert host_inputs.num_image_rows == 3 * 5 + 1
    assert host_inputs.max_encoder_len == 64
    pixels = draw_item(config, Media(0)).tensors["pixel_values"]
    units = host_inputs.units({"pixel_values": pixels})
    np.testing.assert_array_equal(units["pixel_values"], pixels[None])
    spec = host_inputs.encoder_spec
    assert isinstance(spec, EncoderSpec)
    assert spec.tokens_per_unit == 16


def test_the_longest_encoder_prompt_is_bounded():
    config = tiny_config(text={"max_position_embeddings": 4096})
    assert Florence2HostInputs(config).max_encoder_len == 1024


def ask_hf(model: TinyModel, sample: Sample) -> list[int]:
    """Return the eight tokens that HF's model answers."""
    return list(generate_reference(*model.family.torch_call(model.reference, sample), 8))


def test_the_tower_runs_once_for_three_prompts_about_an_image():
    model = served_model("florence2")
    core = start_engine(model)
    shapes: list[tuple[int, ...]] = []
    runner = core._runner
    encode = runner._run_encode

    def run_encode(call: Any) -> None:
        shapes.append(call.inputs["pixel_values"].shape)
        encode(call)

    # Not by `monkeypatch`, whose tests compile their engines' programs anew.
    runner._run_encode = run_encode
    for length in (2, 9, 20):
        sample = model.draw_sample([Media(71), Words(length, length)])
        (answer,) = answer_all(core, [make_request(f"{length}", sample, max_tokens=8)])
        assert answer == ask_hf(model, sample)
    assert shapes == [(2, 3, 24, 24)]  # beside padding, as in every small tower
    assert core.compilations == 0


def test_without_images_the_tower_is_left_out():
    model = served_model("florence2")
    core = start_engine(model, mm=MultiModalConfig(limit_mm_per_prompt={"image": 0}))
    assert core._runner.buckets.encode == ()
    assert "vision_tower" not in core.params
    text = model.draw_sample([Words(3, 7)])
    assert answer_all(core, [make_request("text", text, max_tokens=8)]) == [ask_hf(model, text)]
    image = model.draw_sample([Media(1), Words(3, 7)])
    with pytest.raises(RequestError, match="which this engine was started without"):
        core.add_request(make_request("image", image, max_tokens=8))


@pytest.mark.slow
@pytest.mark.as_served
def test_an_image_has_the_bits_that_it_has_alone_in_a_tower_of_the_published_size():
    config = DavitConfig.from_hf(Florence2Config().vision_config)
    graphdef, abstract = build_abstract(DavitVisionTower, config, dtype=np.float32)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: np.float32(0.05) * rng.standard_normal(x.shape, x.dtype), abstract
    )
    images = rng.normal(size=(4, 3, 768, 768)).astype(np.float32)
    encode = jax.jit(lambda pixels: bind(graphdef, params)(pixels))
    of_four = np.asarray(encode(images))
    for number in (1, 3):
        np.testing.assert_array_equal(np.asarray(encode(images[:number])), of_four[:number])
