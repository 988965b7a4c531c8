"""Laws that every family's processor obeys: a new family adds a row to `FAMILIES`."""

from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.errors import CheckpointError, RequestError
from mmjax.models.registry import MODELS
from mmjax.parity.reference import make_pixels
from mmjax.processing import BaseMultiModalProcessor, MultiModalInputs
from mmjax.processing.encoder_budget import MultiModalProfiler
from mmjax.processing.prepared import PreparedInputs
from mmjax.processing.validation import validate_num_embeds
from tests.families import ALL_FAMILIES, FAMILIES
from tests.families.default_run import NEAR, mark, slow_unless
from tests.families.directories import edit_json, golden_processor
from tests.families.family import Family
from tests.families.retrieval import RETRIEVAL
from tests.kit import draw, num_examples

SIZES = [(1, 1), (37, 211), (640, 480), (2000, 300), (56, 56), (520, 260)]
FAMILY_ROWS = [pytest.param(family, id=name) for name, family in FAMILIES.items()]
SLOW_IF_NEAR = {name: slow_unless(name not in NEAR) for name in FAMILIES}
"""Processors of such rows are made of another row's parts: the default run compares them with HF's,
and asks the other rows what caches and budgets do."""
FAR_ROWS = [
    pytest.param(family, id=name, marks=SLOW_IF_NEAR[name]) for name, family in FAMILIES.items()
]
CASES = [
    pytest.param(family, kwargs, id=f"{name}-{'-'.join(kwargs) or 'plain'}")
    for name, family in FAMILIES.items()
    for kwargs in family.extra_kwargs
]
FAR_CASES = [
    pytest.param(
        family, kwargs, id=f"{name}-{'-'.join(kwargs) or 'plain'}", marks=SLOW_IF_NEAR[name]
    )
    for name, family in FAMILIES.items()
    for kwargs in family.extra_kwargs
]
NUM_IMAGES = [
    pytest.param(
        family,
        kwargs,
        number,
        id=f"{name}-{'-'.join(kwargs) or 'plain'}-{number}",
        # By default each size by itself, and beside others; with kwargs, which are of pictures,
        # beside others alone.
        marks=slow_unless(number == top or (not kwargs and number != 2)),
    )
    for name, family in FAMILIES.items()
    for kwargs in family.extra_kwargs
    for top in [min(3, family.max_images)]
    for number in range(top + 1)
]


def sizes_of(family: Family) -> list[tuple[int, int]]:
    return [size for size in SIZES if family.takes_size(*size)]


def make_cached(family: Family, capacity: int = 2**26) -> BaseMultiModalProcessor[Any]:
    return family.make_processor(processor_cache=MultiModalProcessorOnlyCache(capacity))


@cache
def make_once(family: Family) -> tuple[BaseMultiModalProcessor[Any], BaseMultiModalProcessor[Any]]:
    """Return a processor without a cache and one with."""
    return family.make_processor(), make_cached(family)


def assert_same(one: MultiModalInputs, other: MultiModalInputs) -> None:
    assert one.prompt_token_ids == other.prompt_token_ids
    assert one.encoder_prompt_token_ids == other.encoder_prompt_token_ids
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


def assert_embeds_where_hf_has_them(
    family: Family, processor: BaseMultiModalProcessor[Any], inputs: MultiModalInputs
) -> None:
    embedded = set(family.embed_token_ids(processor))
    token_ids = family.prompt_ids(inputs)
    if any(inputs.mm_placeholders.values()):
        wanted = [place for place, token_id in enumerate(token_ids) if token_id in embedded]
        assert soft_positions(inputs) == wanted


def test_every_architecture_is_under_the_laws():
    under = {family.architecture for family in ALL_FAMILIES.values()}
    # They answer nothing: `test_retrieval.py` has laws of their own.
    vectors = {row.model_class.__name__ for row in RETRIEVAL}
    assert under | vectors == MODELS.keys()


@pytest.mark.parametrize(("family", "kwargs", "num_images"), NUM_IMAGES)
def test_prompts_and_pixels_equal_hf(family: Family, kwargs: dict[str, Any], num_images: int):
    """Uncached text (HF updates the prompt), cached text and token ids (we do): all as HF."""
    uncached, cached = family.make_processor(), make_cached(family)
    tokenizer = uncached.info.get_tokenizer()
    sizes = sizes_of(family)
    # Each size by itself, and some beside others.
    for shift in range(0, len(sizes), 1 if num_images == 1 else 3):
        images = [draw(*sizes[(shift + i) % len(sizes)], seed=i) for i in range(num_images)]
        parts = [f"part {i} \n" * (i % 2) + family.placeholder for i in range(num_images)]
        prompt = "\n".join(["look", *parts, "what is it?"])
        hf = family.call_hf(prompt, images, kwargs)
        mm_data = {"image": images} if images else {}
        for processor, given_prompt in [
            (uncached, prompt),
            (uncached, tokenizer.encode(prompt)),
            (cached, prompt),
            (cached, tokenizer.encode(prompt)),
        ]:
            ours = processor.apply(given_prompt, mm_data, hf_processor_mm_kwargs=kwargs)
            assert family.prompt_ids(ours) == hf.input_ids
            assert_embeds_where_hf_has_them(family, uncached, ours)
            if images:
                assert_tensors_equal(family, ours, hf.tensors)


def assert_tensors_equal(family: Family, ours: MultiModalInputs, theirs: Any) -> None:
    sent = ours.mm_kwargs.get_data()
    data = make_pixels(sent, colours_last=family.colours_last)
    data = make_once(family)[0].info.reference_inputs(ours.prompt_token_ids, data)
    for key, tolerance in family.tensors.items():
        is_list = isinstance(data[key], list)  # of several sizes, which HF pads
        if "pixel_values" in key or key in ("images", "image_patches"):
            pixels = sent[key][0] if isinstance(sent[key], list) else sent[key]
            assert np.asarray(pixels).dtype == family.pixels_dtype
        for mine, whole in zip(data[key], theirs[key], strict=True) if is_list else ():
            own = whole[tuple(map(slice, mine.shape))]
            np.testing.assert_allclose(mine, own, rtol=0, atol=tolerance)
            assert np.count_nonzero(whole) == np.count_nonzero(own)
        if not is_list:
            assert np.shape(data[key]) == np.shape(theirs[key])
            np.testing.assert_allclose(data[key], theirs[key], rtol=0, atol=tolerance)


def on_white(image: Image.Image) -> Image.Image:
    """Return an image as RGB, what is transparent in it white."""
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def draw_in_modes() -> dict[str, Image.Image]:
    """Return images that are not RGB: a palette, greys, and what lets the page through."""
    image = draw(90, 70)
    alpha = Image.linear_gradient("L").resize(image.size)
    see_through, grey = image.copy(), image.convert("L")
    see_through.putalpha(alpha)
    grey_alpha, palette = grey.copy(), image.quantize(16)
    grey_alpha.putalpha(alpha)
    keyed = palette.copy()
    keyed.info["transparency"] = 3
    return {
        "palette": palette,
        "grey": grey,
        "bits": grey.convert("1"),
        "RGBA": see_through,
        "LA": grey_alpha,
        "palette with a transparent color": keyed,
    }


@pytest.mark.parametrize("family", FAMILY_ROWS)
def test_images_of_any_mode_are_hfs_of_the_image_on_white(family: Family):
    processor = family.make_processor()
    modes = draw_in_modes()
    assert on_white(modes["RGBA"]).tobytes() != modes["RGBA"].convert("RGB").tobytes()
    for image in modes.values():
        hf = family.call_hf(family.placeholder, [on_white(image)], {})
        ours = processor.apply(family.placeholder, {"image": image})
        assert family.prompt_ids(ours) == hf.input_ids
        assert_tensors_equal(family, ours, hf.tensors)


@pytest.mark.parametrize(
    ("family", "kwargs"),
    # Kwargs are in `test_prompts_and_pixels_equal_hf`; words are the same code with and without.
    [
        pytest.param(*one.values, id=one.id, marks=pytest.mark.slow if one.values[1] else ())
        for one in CASES
    ],
)
@settings(
    max_examples=num_examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data(), seed=st.integers(0, 3))
def test_any_words_around_pictures_give_hf_tokens(
    family: Family, kwargs: dict[str, Any], data: st.DataObject, seed: int
):
    words = st.lists(st.sampled_from(family.words), max_size=6).map("".join)
    pieces = data.draw(st.lists(words, min_size=1, max_size=min(3, family.max_images) + 1))
    prompt = family.placeholder.join(pieces)
    sizes = sizes_of(family)[-2:]
    images = [draw(*sizes[(seed + i) % 2], seed=i) for i in range(len(pieces) - 1)]
    mm_data = {"image": images} if images else {}
    hf = family.call_hf(prompt, images, kwargs)
    uncached, cached = make_once(family)
    text = uncached.apply(prompt, mm_data, hf_processor_mm_kwargs=kwargs)
    assert family.prompt_ids(text) == hf.input_ids
    assert_embeds_where_hf_has_them(family, uncached, text)
    token_ids = uncached.info.get_tokenizer().encode(prompt)
    assert_same(text, uncached.apply(token_ids, mm_data, hf_processor_mm_kwargs=kwargs))
    assert_same(text, cached.apply(prompt, mm_data, hf_processor_mm_kwargs=kwargs))
    assert_same(text, cached.apply(token_ids, mm_data, hf_processor_mm_kwargs=kwargs))


@pytest.mark.parametrize("family", FAR_ROWS)
@pytest.mark.parametrize("num_images", [0, 1])
def test_text_without_special_tokens_gives_the_same_on_every_path(family: Family, num_images: int):
    """A chat template writes them itself."""
    uncached, cached = family.make_processor(), make_cached(family)
    plain = {"add_special_tokens": False}
    prompt = f"look {family.placeholder * num_images}\nwhat"
    mm_data = {"image": [draw(60, 50)] * num_images} if num_images else {}
    token_ids = uncached.info.get_tokenizer().encode(prompt, **plain)
    text = uncached.apply(prompt, mm_data, tokenization_kwargs=plain)
    assert_same(text, uncached.apply(token_ids, mm_data))
    assert_same(text, cached.apply(token_ids, mm_data))
    assert_same(text, cached.apply(prompt, mm_data, tokenization_kwargs=plain))


@pytest.mark.parametrize(
    ("family", "kwargs", "capacity"),
    [
        pytest.param(
            *one.values,
            capacity,
            id=f"{capacity}-{one.id}",
            # What a cache has room for is the same code with and without kwargs.
            marks=(*one.marks, *([pytest.mark.slow] if one.values[1] and capacity < 2**26 else [])),
        )
        for capacity in (0, 50_000, 2**26)
        for one in FAR_CASES
    ],
)
def test_cold_warm_and_partly_warm_caches_agree(
    family: Family, kwargs: dict[str, Any], capacity: int
):
    """Also with a cache that holds nothing, or less than one request."""
    images = [draw(w, h, seed=i) for i, (w, h) in enumerate(sizes_of(family)[:3])]
    wanted = [images[0], images[1], images[0], images[2]][: family.max_images]
    prompt = "a\n".join([family.placeholder] * len(wanted))
    uncached = family.make_processor().apply(
        prompt, {"image": wanted}, hf_processor_mm_kwargs=kwargs
    )
    processor = make_cached(family, capacity)
    processor.apply(family.placeholder, {"image": images[1]}, hf_processor_mm_kwargs=kwargs)
    for _ in range(3):
        warm = processor.apply(prompt, {"image": wanted}, hf_processor_mm_kwargs=kwargs)
        assert_same(uncached, warm)


@pytest.mark.parametrize("family", FAR_ROWS)
def test_missing_items_go_to_hf_in_one_batch(family: Family, monkeypatch: pytest.MonkeyPatch):
    processor = make_cached(family)
    images = [draw(60 + i, 60, seed=i) for i in range(4)]
    numbers = [0, 1, 2, 3, 0][: family.max_images]
    prompt = family.placeholder * len(numbers)
    # In a prompt with as many: some models cut the only image of a prompt into tiles.
    processor.apply(prompt, {"image": [images[2]] * len(numbers)})
    calls = []
    call_hf = processor.info.ctx.call_hf_processor

    def count(hf_processor: Any, data: Any, kwargs: Any) -> Any:
        if "images" in data:  # the text goes there by itself
            calls.append(len(data["images"]))
        return call_hf(hf_processor, data, kwargs)

    monkeypatch.setattr(type(processor.info.ctx), "call_hf_processor", staticmethod(count))
    for _ in range(2):
        processor.apply(prompt, {"image": [images[number] for number in numbers]})
    # Neither the one that was held, nor the repeated one again.
    assert calls == [len({*numbers} - {2})]


@pytest.mark.parametrize(
    ("family", "mm"),
    [
        pytest.param(family, mm, id=f"{name}-{'-'.join(mm) or 'plain'}", marks=SLOW_IF_NEAR[name])
        for name, family in FAMILIES.items()
        for mm in family.mm_configs
    ],
)
def test_dummy_inputs_have_exactly_the_declared_maximum(family: Family, mm: dict[str, Any]):
    processor = family.make_processor(**mm)
    declared = processor.info.get_mm_max_tokens_per_item(4096)
    assert declared is not None
    for modality in processor.info.supported_mm_limits:
        profiler = MultiModalProfiler(processor)
        measured = profiler.measure_mm_max_tokens_per_item(4096, {modality: 1})
        assert measured[modality] == declared[modality]
        assert measured[modality] == profiler.get_mm_max_tokens_per_item(4096)[modality]


@pytest.mark.parametrize("family", FAR_ROWS)
@settings(max_examples=num_examples(20), deadline=None)
@given(width=st.integers(1, 1200), height=st.integers(1, 1200))
def test_no_picture_exceeds_the_declared_maximum(family: Family, width: int, height: int):
    if not family.takes_size(width, height):
        return
    processor = family.make_processor(trust_request_mm_kwargs=True)
    maximum = MultiModalProfiler(processor).get_mm_max_tokens_per_item(4096)
    for kwargs in family.extra_kwargs:
        inputs = processor.apply(
            family.placeholder, {"image": draw(width, height)}, hf_processor_mm_kwargs=kwargs
        )
        (placeholder,) = inputs.mm_placeholders["image"]
        assert placeholder.get_num_embeds() <= maximum["image"]


def plan(processor: BaseMultiModalProcessor[Any]) -> int:
    return MultiModalProfiler(processor).get_mm_max_tokens_per_item(4096)["image"]


def check_sizes(processor: BaseMultiModalProcessor[Any], prepared: PreparedInputs) -> None:
    described = MultiModalProfiler(processor).measure_described()
    validate_num_embeds(processor.info, prepared.mm_placeholders, described)


def is_tallest(family: Family, width: int) -> bool:
    """Return whether a narrower picture has more embeddings than one of this width."""
    return family.name == "hunyuan_vl" and width > 32  # each row has an embedding behind it


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=name, marks=mark("described sizes", name))
        for name, family in FAMILIES.items()
    ],
)
def test_the_size_that_an_operator_describes_is_what_is_planned_for(family: Family):
    """Dummies and budget follow it; a picture that gives more is refused, and told the flag."""
    for kwargs in family.extra_kwargs:
        plain = family.make_processor(mm_processor_kwargs=kwargs)
        for width, height in [(56, 56), (40, 42), (1, 1)]:
            options = {"count": 2, "width": width, "height": height}
            described = family.make_processor(
                mm_processor_kwargs=kwargs, limit_mm_per_prompt={"image": options}
            )
            MultiModalProfiler(described).check_settings()
            inputs = plain.apply(family.placeholder, {"image": draw(width, height)})
            num_embeds = inputs.mm_placeholders["image"][0].get_num_embeds()
            planned = plan(described)
            assert planned > num_embeds if is_tallest(family, width) else planned == num_embeds
            assert MultiModalProfiler(described).measure_mm_max_tokens_per_item(
                4096, {"image": 1}
            ) == {"image": planned}
            check_sizes(
                described, described.prepare(family.placeholder, {"image": draw(width, height)})
            )
            assert num_embeds <= plan(plain)


@pytest.mark.parametrize("family", FAR_ROWS)
def test_a_larger_picture_than_was_described_is_refused_by_the_flags_name(family: Family):
    options = {"width": 30, "height": 30}
    processor = family.make_processor(
        mm_processor_kwargs=family.extra_kwargs[-1], limit_mm_per_prompt={"image": options}
    )
    prepared = processor.prepare(family.placeholder, {"image": draw(1000, 400)})
    (placeholder,) = prepared.mm_placeholders["image"]
    if placeholder.get_num_embeds() <= plan(processor):
        check_sizes(processor, prepared)  # pictures of all sizes give as many
        alike = family.make_processor(mm_processor_kwargs=family.extra_kwargs[-1])
        assert plan(processor) == plan(alike)
        return
    with pytest.raises(RequestError, match=r"width 30, height 30, which `--limit-mm-per-") as e:
        check_sizes(processor, prepared)
    assert e.value.param == "multi_modal_data"
    assert e.value.status == 400


def test_qwen2_vl_of_small_pictures_needs_4_embeddings():
    limits = {"image": {"width": 56, "height": 56}, "video": {"num_frames": 4, "width": 56}}
    processor = FAMILIES["qwen2_vl"].make_processor(limit_mm_per_prompt=limits)
    plain = FAMILIES["qwen2_vl"].make_processor()
    assert MultiModalProfiler(processor).get_mm_max_tokens_per_item(4096)["image"] == 4
    assert MultiModalProfiler(plain).get_mm_max_tokens_per_item(4096)["image"] == 64
    video = MultiModalProfiler(processor).get_mm_max_tokens_per_item(4096)["video"]
    assert video < MultiModalProfiler(plain).get_mm_max_tokens_per_item(4096)["video"]
    assert MultiModalProfiler(processor).measure_mm_max_tokens_per_item(4096, {"video": 1}) == {
        "video": video
    }


@pytest.mark.parametrize("family", FAR_ROWS)
def test_what_a_trusted_request_may_ask_for_is_planned_for(family: Family):
    """As much as the checkpoint, whatever the operator's own kwargs lower; and no more."""
    operators: Any = {"mm_processor_kwargs": family.lowering_kwargs}
    trusting = family.make_processor(**operators, trust_request_mm_kwargs=True)
    alone = family.make_processor(**operators)
    assert plan(trusting) == plan(family.make_processor(trust_request_mm_kwargs=True))
    assert MultiModalProfiler(trusting).measure_mm_max_tokens_per_item(4096, {"image": 1}) == {
        "image": plan(trusting)
    }
    assert alone.info.get_planned_mm_kwargs() == {}
    if not family.lowering_kwargs:
        assert plan(alone) == plan(trusting)
        return
    assert plan(alone) < plan(trusting)
    largest = trusting.info.get_largest_mm_kwargs()
    dummy = trusting.dummy_inputs.get_dummy_mm_data(4096, {"image": 1})
    inputs = trusting.apply(family.placeholder, dummy, hf_processor_mm_kwargs=largest)
    assert inputs.mm_placeholders["image"][0].get_num_embeds() == plan(trusting)
    if (more := _more(largest)) == largest:  # of switches there is no more
        return
    with pytest.raises(RequestError, match="is planned for; lower it") as caught:
        trusting.apply(family.placeholder, dummy, hf_processor_mm_kwargs=more)
    assert str(caught.value.param).startswith("mm_processor_kwargs.")


def _more(kwargs: Any) -> Any:
    if isinstance(kwargs, dict):
        return {key: _more(value) for key, value in kwargs.items()}
    return kwargs if isinstance(kwargs, bool) else kwargs + 1


CONTRADICTIONS = [
    pytest.param(family, *one, id=f"{name}-{one[0]}-{'-'.join(one[1])}")
    for name, family in ALL_FAMILIES.items()
    for one in family.contradictions
]


@pytest.mark.parametrize(("family", "file", "edit", "says"), CONTRADICTIONS)
def test_files_that_contradict_each_other_are_refused(
    family: Family, file: str, edit: dict[str, Any], says: str, tmp_path: Path
):
    path = Path(copytree(family.path(), tmp_path / "model"))
    edit_json(path / f"{file}.json", edit)
    with pytest.raises(CheckpointError, match=says):
        golden_processor(family.name, path=path).info.get_hf_processor()
