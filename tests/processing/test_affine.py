"""Pixels as bytes and an affine map, against HF's own float32 pixels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_transforms import normalize, rescale
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mmjax.cache.media.processor_cache import get_item_size
from mmjax.errors import ProcessingError, RequestError
from mmjax.models.host_inputs import AFFINE, EncoderSpec, HostInputs, byte_pixels
from mmjax.params.sampling_params import SamplingParams
from mmjax.parity.reference import make_pixels
from mmjax.processing.image_processors.affine import (
    _Unresized,
    apply_affine,
    keep_bytes,
    make_affine,
)
from mmjax.processing.tensors.fields import MultiModalFieldElem
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from mmjax.transport.codec import encode
from mmjax.transport.messages import EngineCoreRequest
from tests.families import FAMILIES
from tests.kit import draw

PUBLISHED: dict[str, dict[str, Any]] = {
    "CLIP": {
        "rescale_factor": 1 / 255,
        "mean": [0.48145466, 0.4578275, 0.40821073],
        "std": [0.26862954, 0.26130258, 0.27577711],
    },
    "ImageNet": {
        "rescale_factor": 1 / 255,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    },
    "SigLIP": {"rescale_factor": 1 / 255, "mean": 0.5, "std": 0.5},
    "Chameleon": {"rescale_factor": 0.0078, "mean": [1.0] * 3, "std": [1.0] * 3},
    "none": {"rescale_factor": 1.0, "mean": 0.0, "std": 1.0},
}
EVERY_BYTE = np.tile(np.arange(256, dtype=np.uint8), (3, 1))[:, None]  # C Y X
UNITS = st.floats(0.1, 1.0)


def floats_of_hf(rescale_factor: float, mean: Any, std: Any) -> np.ndarray:
    kinds: dict[str, Any] = {"data_format": "channels_first", "input_data_format": "channels_first"}
    scaled = rescale(EVERY_BYTE, rescale_factor, **kinds)
    return normalize(scaled, mean, std, **kinds)


def pixels_of(constants: dict[str, Any]) -> np.ndarray:
    return apply_affine(EVERY_BYTE[None], make_affine(**constants)[None, ..., None])[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_byte_becomes_hfs_pixel(name: str):
    ours = pixels_of(PUBLISHED[name])
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, floats_of_hf(**PUBLISHED[name]), rtol=0, atol=1e-6)


@settings(max_examples=300, deadline=None)
@given(mean=st.tuples(UNITS, UNITS, UNITS), std=st.tuples(UNITS, UNITS, UNITS))
def test_pixels_are_as_near_to_the_definition_as_hfs(mean: Any, std: Any):
    """Where deviations are small pixels are large, and so is what float32 makes of them."""
    constants = {"rescale_factor": 1 / 255, "mean": list(mean), "std": list(std)}
    exact = (EVERY_BYTE[:, 0] / 255 - np.array(mean)[:, None]) / np.array(std)[:, None]
    errors = [
        np.abs(pixels[:, 0] - exact).max()
        for pixels in (pixels_of(constants), floats_of_hf(**constants))
    ]
    assert errors[0] <= max(errors[1], 1e-6)


@pytest.mark.parametrize("colours_last", [False, True])
def test_the_bits_are_the_same_in_every_program(colours_last: bool):
    """Numpy's, one unit's, many units' and a fused program's: a product of bytes is exact."""
    rng = np.random.default_rng(0)
    shape = (7, 5, 3) if colours_last else (7, 3, 5)
    pixels = rng.integers(0, 256, shape, np.uint8)
    affine = make_affine(**PUBLISHED["ImageNet"])[None, :, None, :]
    affine = affine if colours_last else affine.swapaxes(2, 3)
    affine = np.repeat(affine, len(pixels), 0)
    wanted = apply_affine(pixels, affine)
    fused = jax.jit(lambda x, map_: apply_affine(x, map_) + jnp.float32(0))
    for count in (1, 2, 7):
        made = fused(pixels[:count], affine[:count])
        np.testing.assert_array_equal(np.asarray(made), wanted[:count])


def test_padding_is_zero():
    inputs = byte_pixels("pixel_values", (3, 2, 2))
    empty = {name: np.zeros((4, *shape), dtype) for name, (shape, dtype) in inputs.items()}
    assert not apply_affine(empty["pixel_values"], empty[AFFINE]).any()


@pytest.mark.parametrize(
    "constants",
    [{"std": 0.0}, {"mean": float("nan")}, {"std": [1.0, 0.0, 1.0]}, {"rescale_factor": 1e40}],
)
def test_constants_that_make_no_pixels_are_refused(constants: dict[str, Any]):
    with pytest.raises(ValueError, match="give finite numbers, and no deviation of 0"):
        make_affine(**constants)


def test_as_many_constants_as_colours():
    with pytest.raises(ValueError, match=r"the mean of pixels is \[1.0\]; give one number, or thr"):
        make_affine(mean=[1.0])


class Units(HostInputs):
    encoder_spec = EncoderSpec(inputs=byte_pixels("pixel_values", (3, 2, 2)), tokens_per_unit=1)

    def units(self, item: Any) -> Any:
        return {"pixel_values": item["pixel_values"]}


def test_a_unit_has_its_items_map():
    pixels = np.zeros((5, 3, 2, 2), np.uint8)
    affine = make_affine(mean=0.5)
    for key in ("image_affine", "video_affine"):
        inputs = Units(None).encoder_inputs({"pixel_values": pixels, key: affine})
        assert inputs[AFFINE].shape == (5, 3, 3, 1)
        np.testing.assert_array_equal(inputs[AFFINE][4, ..., 0], affine)


def test_floats_and_pixels_without_a_map_are_refused():
    pixels = np.zeros((5, 3, 2, 2), np.float32)
    with pytest.raises(TypeError, match="pixels are float32; the model takes them as uint8"):
        Units(None).encoder_inputs({"pixel_values": pixels, "image_affine": make_affine()})
    with pytest.raises(KeyError, match="image_affine, video_affine comes beside the pixels"):
        Units(None).encoder_inputs({"pixel_values": pixels.astype(np.uint8)})


# ---- what crosses, and under a request's own constants -------------------------------------------

KEEPING = [family for family in FAMILIES.values() if family.pixels_dtype == "uint8"]


@pytest.mark.parametrize("family", KEEPING, ids=lambda family: family.name)
def test_an_item_is_a_quarter_of_its_float_pixels(family: Any):
    """896 x 896 pixels, or what the family makes of them."""
    inputs = family.make_processor().apply(family.placeholder, {"image": draw(896, 896)})
    item = inputs.mm_kwargs.get_item("image", 0)
    sent = dict(item.get_data())
    floats = make_pixels(sent, colours_last=family.colours_last)
    for name in [name for name in floats if floats[name] is sent.get(name)]:
        del floats[name], sent[name]  # places, which are no pixels
    num_bytes, num_before = (
        sum(np.asarray(tensor).nbytes for tensor in tensors.values()) for tensors in (sent, floats)
    )
    assert num_bytes <= 0.27 * num_before


def test_the_bridge_and_the_caches_have_a_quarter_of_the_bytes():
    inputs = FAMILIES["gemma3"].make_processor().apply("<start_of_image>", {"image": draw(60, 90)})
    item = inputs.mm_kwargs.get_item("image", 0)
    floats = MultiModalKwargsItem(
        {
            key: MultiModalFieldElem(data=data, field=item[key].field)
            for key, data in make_pixels(item.get_data()).items()
        }
    )
    (place,) = inputs.mm_placeholders["image"]

    def count_sent(data: Any) -> int:
        feature = MultiModalFeatureSpec(
            data=data, modality="image", identifier="a", mm_position=place, mm_hash="a"
        )
        request = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=inputs.prompt_token_ids,
            mm_features=[feature],
            sampling_params=SamplingParams(),
        )
        return sum(len(frame) for frame in encode(request))

    assert count_sent(item) <= 0.27 * count_sent(floats)
    assert get_item_size(item) <= 0.27 * get_item_size(floats)


REQUESTS = (
    {"do_normalize": False},
    {"do_rescale": False},
    {"do_rescale": False, "do_normalize": False},
    {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.9, 0.8, 0.7]},
    {"rescale_factor": 1 / 127.5, "image_mean": 1.0, "image_std": 1.0},
    {"images_kwargs": {"do_normalize": False}},
    {"do_resize": False, "do_center_crop": False},
)


@pytest.mark.parametrize("kwargs", REQUESTS, ids=str)
@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_a_requests_constants_are_hfs(name: str, kwargs: dict[str, Any]):
    family = FAMILIES[name]
    processor = family.make_processor()
    side = processor.info.get_hf_config().vision_config.image_size
    image = draw(side, side)
    prompt = family.placeholder
    if name == "gemma3":
        kwargs = {key: value for key, value in kwargs.items() if key != "do_center_crop"}
    wanted = family.call_hf(prompt, [image], kwargs).tensors["pixel_values"]
    inputs = processor.apply(prompt, {"image": image}, hf_processor_mm_kwargs=kwargs)
    pixels = make_pixels(inputs.mm_kwargs.get_data())["pixel_values"]
    # As large as 255 where they are not rescaled: then 1e-6 of that.
    np.testing.assert_allclose(pixels, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kwargs", [{"image_std": [0.0, 1.0, 1.0]}, {"image_mean": [0.5]}])
def test_a_request_whose_constants_make_no_pixels_is_wrong(kwargs: dict[str, Any]):
    family = FAMILIES["llava"]
    with pytest.raises((RequestError, ProcessingError)) as caught:
        family.make_processor().apply(
            family.placeholder, {"image": draw(9, 9)}, hf_processor_mm_kwargs=kwargs
        )
    assert isinstance(caught.value, RequestError)
    assert caught.value.param == "mm_processor_kwargs"


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 200), height=st.integers(1, 200), crops=st.booleans())
def test_bytes_are_what_hf_has_before_it_rescales(width: int, height: int, crops: bool):
    """Bit for bit, though HF makes arrays of an image, and images of these, and ours does not."""
    settings_: dict[str, Any] = {"size": {"shortest_edge": 20}, "do_center_crop": crops}
    settings_ |= {"crop_size": {"height": 20, "width": 20}, "return_tensors": "np"}
    image = draw(width, height)
    ours = keep_bytes(CLIPImageProcessorPil)()([image], **settings_)
    plain: dict[str, Any] = {"do_rescale": False, "do_normalize": False}
    wanted = CLIPImageProcessorPil()([image], **settings_, **plain)["pixel_values"]
    assert ours["pixel_values"].dtype == wanted.dtype == np.uint8
    np.testing.assert_array_equal(ours["pixel_values"], wanted)


def test_a_resized_image_is_pillows_with_its_colours_one_after_the_other():
    """HF puts the colours first: of an array that has them beside each other it makes a copy."""
    pixels = np.random.default_rng(0).integers(0, 256, (37, 61, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    resized = np.array(_Unresized(image).resize((23, 19), resample=Image.Resampling.BICUBIC))
    assert np.array_equal(resized, np.asarray(image.resize((23, 19), Image.Resampling.BICUBIC)))
    assert np.moveaxis(resized, -1, 0).flags.c_contiguous
