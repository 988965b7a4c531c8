"""Processor kwargs that nothing knows are refused by name, whoever sends them."""

from typing import Any

import pytest

from mmjax.errors import ConfigError, RequestError, RequestValueError
from mmjax.processing.encoder_budget import MultiModalProfiler
from mmjax.processing.hf_call import (
    check_ceilings,
    check_known_kwargs,
    list_known_kwargs,
)
from tests.families import FAMILIES
from tests.families.family import Family
from tests.kit import draw

FAMILY_ROWS = [pytest.param(family, id=name) for name, family in FAMILIES.items()]
KNOWN = {
    "": frozenset({"return_for_text"}),
    "images_kwargs": frozenset({"do_pan_and_scan", "size"}),
    "videos_kwargs": frozenset(),
}


@pytest.mark.parametrize(
    ("kwargs", "path", "hint"),
    [
        ({"do_pan_and_scn": True}, "do_pan_and_scn", "do you mean `do_pan_and_scan`?"),
        ({"images_kwargs": {"sise": 1}}, "images_kwargs.sise", "do you mean `size`?"),
        ({"videos_kwargs": {"fps": 1}}, "videos_kwargs.fps", "known are `do_pan_and_scan`, `ret"),
        ({"size": 1, "x" * 500: 1}, "x" * 64, "known are"),
    ],
)
def test_the_nearest_known_name_is_offered(kwargs: dict[Any, Any], path: str, hint: str):
    with pytest.raises(RequestValueError) as caught:
        check_known_kwargs(kwargs, KNOWN)
    assert caught.value.param == f"mm_processor_kwargs.{path}"
    assert f"`{path}`, which this model's processor does not know; {hint}" in caught.value.message


def test_what_is_known_passes():
    known = {"size": 1, "images_kwargs": {"size": 1}, "return_for_text": 1, "videos_kwargs": {}}
    check_known_kwargs(known, KNOWN)
    with pytest.raises(RequestValueError, match=r"`a`, .* does not know; it takes none"):
        check_known_kwargs({"a": 1}, {"": frozenset()})


def test_a_signature_says_what_is_known():
    def closed(text: str, images: Any = None, *, scale: int = 1) -> None: ...
    def opened(text: str, **kwargs: Any) -> None: ...

    assert list_known_kwargs(closed) == {"": {"scale"}}
    assert list_known_kwargs(opened) is None
    check_known_kwargs({"anything": 1}, None)


@pytest.mark.parametrize("family", FAMILY_ROWS)
def test_a_request_with_an_unknown_kwarg_is_refused(family: Family):
    processor = family.make_processor(trust_request_mm_kwargs=True)
    for kwargs, path in (
        ({"do_pan_and_scn": True}, "do_pan_and_scn"),
        ({"images_kwargs": {"do_normalise": True}}, "images_kwargs.do_normalise"),
        ({"audio_kwargs": {"sampling_rate": 1}}, "audio_kwargs.sampling_rate"),
        ({"device": "cuda"}, "device"),
    ):
        with pytest.raises(RequestValueError, match=f"`{path}`, which this model's") as caught:
            processor.apply(
                family.placeholder or "a", {"image": draw(9, 9)}, hf_processor_mm_kwargs=kwargs
            )
        assert caught.value.param == f"mm_processor_kwargs.{path}"


@pytest.mark.parametrize("family", FAMILY_ROWS)
def test_an_operators_unknown_kwarg_ends_the_start(family: Family):
    for limits in ({}, {"image": 0, "video": 0}):
        processor = family.make_processor(
            mm_processor_kwargs={"do_pan_and_scn": True}, limit_mm_per_prompt=limits
        )
        with pytest.raises(ConfigError, match=r"`--mm-processor-kwargs`: .*`do_pan_and_scn`"):
            MultiModalProfiler(processor).check_settings()


@pytest.mark.parametrize("family", FAMILY_ROWS)
def test_what_a_family_tells_to_be_largest_is_known(family: Family):
    processor = family.make_processor(trust_request_mm_kwargs=True)
    processor.info.check_mm_kwargs(processor.info.get_largest_mm_kwargs())


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"max": 11}, "max"),
        ({"images_kwargs": {"max": 10**30}}, "images_kwargs.max"),
        ({"size": {"width": 31}}, "size.width"),
        ({"images_kwargs": {"size": {"width": 31}}}, "images_kwargs.size.width"),
        ({"videos_kwargs": {"pixels": 6}}, "videos_kwargs.pixels"),
        ({"pixels": 8}, "pixels"),
    ],
)
def test_GHSA_gx7p_2j49_hfq4_numbers_above_the_ceilings_are_refused(
    kwargs: dict[str, Any], name: str
):
    largest = {
        **{"max": 10, "is_on": True, "size": {"height": 20, "width": 30}},
        **{"images_kwargs": {"pixels": 7}, "videos_kwargs": {"pixels": 5}},
    }
    check_ceilings(largest, largest)
    check_ceilings({"max": 3, "is_on": 2, "pixels": 7, "other": 10**9, "size": 5}, largest)
    with pytest.raises(RequestError, match=f"`{name}` is .* is planned for") as caught:
        check_ceilings(kwargs, largest)
    assert caught.value.param == f"mm_processor_kwargs.{name}"
