"""Whose fault a failure is: a client is told what he can mend, and nothing that HF or we did."""

from contextlib import suppress
from typing import Any

import pytest
from PIL import Image
from transformers import BatchFeature

from mmjax.errors import ConfigError, ProcessingError, RequestError, RequestValueError
from mmjax.processing import (
    BaseMultiModalProcessor,
    PromptReplacement,
    PromptUpdateDetails,
    PromptUpdateError,
)
from mmjax.processing.encoder_budget import MultiModalProfiler
from tests.families import FAMILIES
from tests.families.family import Family
from tests.kit import draw
from tests.processing.test_processor import SOFT, FakeHFProcessor, Info, cache, make

FAMILY_ROWS = [pytest.param(family, id=name) for name, family in FAMILIES.items()]
INSIDES = "HF's own words, at 0x7f3a"


class Broken(FakeHFProcessor):
    """Fails on every picture."""

    def __call__(self, *args: Any, images: Any = None, **kwargs: Any) -> BatchFeature:
        if images is not None:
            raise KeyError(INSIDES)
        return super().__call__(*args, **kwargs)


class PickyOverScale(FakeHFProcessor):
    def __call__(self, *args: Any, scale: Any = 1, **kwargs: Any) -> BatchFeature:
        if scale != 1:
            raise TypeError(INSIDES)
        return super().__call__(*args, **kwargs)


class Counting(Info):
    """Counts `[img]` in the prompt before anything else."""

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return "[img]"


def make_with(hf: type[FakeHFProcessor], **changes: Any) -> Any:
    processor = make(**changes)
    vars(processor.info).update(_hf_processor=hf(applies_updates=True))
    return processor


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"scale": 1}])
def test_what_hf_raises_over_a_sound_request_is_the_servers_fault(
    is_cached: bool, kwargs: dict[str, Any]
):
    processor = make_with(Broken, processor_cache=cache() if is_cached else None)
    with pytest.raises(ProcessingError, match="Failed to apply Broken on data=") as caught:
        processor.apply("[img]", {"image": draw(2, 2)}, hf_processor_mm_kwargs=kwargs)
    assert not isinstance(caught.value, RequestError)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("is_cached", [False, True])
def test_what_fails_only_with_the_requests_kwargs_is_its_fault(is_cached: bool):
    processor = make_with(PickyOverScale, processor_cache=cache() if is_cached else None)
    with pytest.raises(RequestValueError, match="fails with `scale`, and not without") as caught:
        processor.apply("[img]", {"image": draw(2, 2)}, hf_processor_mm_kwargs={"scale": 5})
    assert caught.value.param == "mm_processor_kwargs"
    assert INSIDES not in caught.value.message
    assert INSIDES in str(caught.value.__cause__)  # for the log


def test_a_familys_own_failure_is_the_servers_fault():
    def fail(self: Any, *args: Any) -> Any:
        raise IndexError(INSIDES)

    processor = make(_get_prompt_updates=fail)
    with pytest.raises(ProcessingError, match="IndexError") as caught:
        processor.apply("[img]", {"image": draw(2, 2)})
    assert isinstance(caught.value.__cause__, IndexError)


@pytest.mark.parametrize("is_cached", [False, True])
def test_an_update_that_finds_nothing_in_a_counted_prompt_is_the_familys(is_cached: bool):
    wrong = [PromptReplacement("image", "[other]", PromptUpdateDetails.from_seq([SOFT] * 7))]
    processor = make(cache() if is_cached else None, updates=wrong)
    with pytest.raises(PromptUpdateError) as theirs:
        processor.apply("no tag", {"image": draw(2, 2)})
    assert theirs.value.param == "prompt"
    processor.info.__class__ = Counting
    with pytest.raises(PromptUpdateError, match="0 `\\[img\\]` placeholders but 1 image") as theirs:
        processor.apply("no tag", {"image": draw(2, 2)})
    with pytest.raises(ProcessingError, match="`_get_prompt_updates` of the model must find it"):
        processor.apply("[img]", {"image": draw(2, 2)})


def test_reserved_tokens_that_a_family_wrote_are_not_the_clients():
    class Reserving(Info):
        def get_reserved_tokens(self) -> Any:
            return {"<image_soft_token>": SOFT}

    one_of_two = PromptUpdateDetails.select_token_id([SOFT, SOFT, 7], 7)
    processor = make(cache(), updates=[PromptReplacement("image", "[img]", one_of_two)])
    processor.info.__class__ = Reserving
    with pytest.raises(ProcessingError, match=r"2 of `<image_soft_token>` but .* 1 embeddings"):
        processor.apply("[img]", {"image": draw(2, 2)})
    with pytest.raises(RequestValueError, match="reserved"):
        processor.apply("[img]<image_soft_token>", {"image": draw(2, 2)})


@pytest.mark.parametrize("family", FAMILY_ROWS)
def test_no_picture_makes_a_family_fail(family: Family):
    """Every size and mode is processed, or refused as the client's before HF sees it."""
    processor = family.make_processor()
    for size in [(1, 1), (1, 700), (700, 1), (2, 399), (201, 1), (200, 1), (3, 5)]:
        expect_no_fault(processor, family, draw(*size))
    for mode in ("1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr", "HSV", "I", "I;16", "F"):
        expect_no_fault(processor, family, Image.new(mode, (40, 30)))


def expect_no_fault(
    processor: BaseMultiModalProcessor[Any], family: Family, picture: Image.Image
) -> None:
    with suppress(RequestError):
        processor.apply(family.placeholder or "a", {"image": picture})


@pytest.mark.parametrize("family", FAMILY_ROWS)
def test_an_operators_kwargs_that_hf_refuses_fail_at_the_start(family: Family):
    for kwargs in ({"size": "huge"}, {"images_kwargs": {"max_patches": "x"}}, {"images_kwargs": 5}):
        processor = family.make_processor(mm_processor_kwargs=kwargs)
        with pytest.raises(ConfigError, match="--mm-processor-kwargs"):
            MultiModalProfiler(processor).check_settings()


def test_without_settings_a_failure_at_the_start_is_no_settings_fault():
    with pytest.raises(ProcessingError):
        MultiModalProfiler(make_with(Broken)).check_settings()
    MultiModalProfiler(make()).check_settings()
