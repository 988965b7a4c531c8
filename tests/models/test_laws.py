"""Laws that every family's processor obeys, over the registry: a new family adds a row."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmjax.cache.processor_cache import MultiModalProcessorOnlyCache
from mmjax.models.registry import MODELS
from mmjax.processing import MultiModalInputs
from tests.kit import draw
from tests.processing import gemma3

SIZES = [(1, 1), (37, 211), (640, 480), (56, 56), (520, 260)]
CROPS = {"do_pan_and_scan": True}


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """What the laws need to know of a family."""

    make_processor: Callable[..., Any]
    hf_processor: Callable[[], Any]
    placeholder: str
    extra_kwargs: tuple[dict[str, Any], ...] = ()
    """Processor kwargs under which the laws must hold too."""


FAMILIES = {
    "Gemma3ForConditionalGeneration": Family(
        make_processor=gemma3.make_processor,
        hf_processor=gemma3.hf_processor,
        placeholder="<start_of_image>",
        extra_kwargs=({}, CROPS),
    )
}
CASES = [
    pytest.param(family, kwargs, id=f"{name}-{'-'.join(kwargs) or 'plain'}")
    for name, family in FAMILIES.items()
    for kwargs in family.extra_kwargs
]

words = st.sampled_from(
    ["what", " ", "\n", "\n\n", "the car", "Here", " Here", "ü日", "\t", "!", "  ", "<eos>"]
)
texts = st.lists(words, max_size=6).map("".join)


def expect_hf(family: Family, prompt: str, images: list[Any], kwargs: dict[str, Any]) -> Any:
    return family.hf_processor()(
        text=prompt, images=images or None, return_tensors="np", **(kwargs if images else {})
    )


@cache
def make_once(family: Family) -> tuple[Any, Any]:
    """Return a processor without a cache and one with."""
    warm = MultiModalProcessorOnlyCache(2**26)
    return family.make_processor(), family.make_processor(processor_cache=warm)


def assert_same(one: MultiModalInputs, other: MultiModalInputs) -> None:
    assert one.prompt_token_ids == other.prompt_token_ids
    assert one.mm_placeholders == other.mm_placeholders
    assert one.mm_hashes == other.mm_hashes
    assert one.mm_kwargs == other.mm_kwargs


def soft_positions(inputs: MultiModalInputs) -> list[int]:
    """Where embeddings go, by the ranges, in prompt order of each item."""
    return [
        position
        for ranges in inputs.mm_placeholders.values()
        for one in ranges
        for start, end in one.extract_embeds_range()
        for position in range(start, end + 1)
    ]


def test_every_family_is_under_the_laws():
    assert FAMILIES.keys() == MODELS.keys()


@pytest.mark.parametrize(("family", "kwargs"), CASES)
@pytest.mark.parametrize("num_images", range(4))
def test_prompts_and_pixels_equal_hf(family: Family, kwargs: dict[str, Any], num_images: int):
    """Uncached text (HF updates the prompt), cached text and token ids (we do): all as HF."""
    uncached = family.make_processor()
    cached = family.make_processor(processor_cache=MultiModalProcessorOnlyCache(2**26))
    tokenizer = uncached.info.get_tokenizer()
    for shift in range(len(SIZES)):
        images = [draw(*SIZES[(shift + i) % len(SIZES)], seed=i) for i in range(num_images)]
        parts = [f"part {i} \n" * (i % 2) + family.placeholder for i in range(num_images)]
        prompt = "\n".join(["look", *parts, "what is it?"])
        hf = expect_hf(family, prompt, images, kwargs)
        mm_data = {"image": images} if images else {}
        for processor, given_prompt in [
            (uncached, prompt),
            (uncached, tokenizer.encode(prompt)),
            (cached, prompt),
            (cached, tokenizer.encode(prompt)),
        ]:
            ours = processor.apply(given_prompt, mm_data, hf_processor_mm_kwargs=kwargs)
            assert ours.prompt_token_ids == hf["input_ids"][0].tolist()
            assert soft_positions(ours) == np.flatnonzero(hf["token_type_ids"][0]).tolist()
            if images:
                pixels = ours.mm_kwargs.get_data()["pixel_values"]
                np.testing.assert_array_equal(pixels, hf["pixel_values"])


@pytest.mark.parametrize(("family", "kwargs"), CASES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pieces=st.lists(texts, min_size=1, max_size=4), seed=st.integers(0, 3))
def test_any_words_around_pictures_give_hf_tokens(
    family: Family, kwargs: dict[str, Any], pieces: list[str], seed: int
):
    prompt = family.placeholder.join(pieces)
    images = [draw(*SIZES[-1 - (seed + i) % 2], seed=i) for i in range(len(pieces) - 1)]
    mm_data = {"image": images} if images else {}
    hf = expect_hf(family, prompt, images, kwargs)
    uncached, cached = make_once(family)
    text = uncached.apply(prompt, mm_data, hf_processor_mm_kwargs=kwargs)
    assert text.prompt_token_ids == hf["input_ids"][0].tolist()
    assert soft_positions(text) == np.flatnonzero(hf["token_type_ids"][0]).tolist()
    token_ids = uncached.info.get_tokenizer().encode(prompt)
    assert_same(text, uncached.apply(token_ids, mm_data, hf_processor_mm_kwargs=kwargs))
    assert_same(text, cached.apply(prompt, mm_data, hf_processor_mm_kwargs=kwargs))
    assert_same(text, cached.apply(token_ids, mm_data, hf_processor_mm_kwargs=kwargs))


@pytest.mark.parametrize(("family", "kwargs"), CASES)
@pytest.mark.parametrize("capacity", [0, 50_000, 2**26])
def test_cold_warm_and_partly_warm_caches_agree(
    family: Family, kwargs: dict[str, Any], capacity: int
):
    """Also with a cache that holds nothing, or less than one request."""
    images = [draw(w, h, seed=i) for i, (w, h) in enumerate(SIZES[:3])]
    prompt = "a\n".join([family.placeholder] * 4)
    request = {"image": [images[0], images[1], images[0], images[2]]}
    uncached = family.make_processor().apply(prompt, request, hf_processor_mm_kwargs=kwargs)
    processor = family.make_processor(processor_cache=MultiModalProcessorOnlyCache(capacity))
    processor.apply(family.placeholder, {"image": images[1]}, hf_processor_mm_kwargs=kwargs)
    for _ in range(3):
        assert_same(uncached, processor.apply(prompt, request, hf_processor_mm_kwargs=kwargs))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_missing_items_go_to_hf_in_one_batch(family: Family, monkeypatch: pytest.MonkeyPatch):
    processor = family.make_processor(processor_cache=MultiModalProcessorOnlyCache(2**26))
    images = [draw(20 + i, 20, seed=i) for i in range(4)]
    prompt = family.placeholder * 5
    request = {"image": [*images, images[0]]}
    processor.apply(family.placeholder, {"image": images[2]})
    calls = []
    call_hf = processor.info.ctx.call_hf_processor

    def count(hf_processor: Any, data: Any, kwargs: Any) -> Any:
        calls.append(len(data.get("images", [])))
        return call_hf(hf_processor, data, kwargs)

    monkeypatch.setattr(type(processor.info.ctx), "call_hf_processor", staticmethod(count))
    processor.apply(prompt, request)
    processor.apply(prompt, request)
    assert calls == [3]  # neither the one that was held, nor the repeated one again


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(
    "mm", [{}, {"mm_processor_kwargs": CROPS}, {"trust_request_mm_kwargs": True}]
)
def test_dummy_inputs_have_exactly_the_declared_maximum(family: Family, mm: dict[str, Any]):
    processor = family.make_processor(**mm)
    counts = dict.fromkeys(processor.info.supported_mm_limits, 1)
    measured = processor.measure_mm_max_tokens_per_item(4096, counts)
    assert measured == processor.get_mm_max_tokens_per_item()
    assert measured == processor.info.get_mm_max_tokens_per_item()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@settings(max_examples=20, deadline=None)
@given(width=st.integers(1, 1200), height=st.integers(1, 1200))
def test_no_picture_exceeds_the_declared_maximum(family: Family, width: int, height: int):
    processor = family.make_processor(trust_request_mm_kwargs=True)
    maximum = processor.get_mm_max_tokens_per_item()
    for kwargs in family.extra_kwargs:
        inputs = processor.apply(
            family.placeholder, {"image": draw(width, height)}, hf_processor_mm_kwargs=kwargs
        )
        (placeholder,) = inputs.mm_placeholders["image"]
        assert placeholder.get_num_embeds() <= maximum["image"]
