"""What the context gives: the configuration, and HF's processor once for each set of kwargs."""

from typing import Any

import pytest
import transformers

from mmjax.processing import BaseProcessingInfo, InputProcessingContext
from mmjax.processing.context import _MAX_HF_PROCESSORS
from tests.families import gemma3


def test_a_wrong_config_type_is_named():
    context = InputProcessingContext(model_config=gemma3.model_config(), tokenizer=None)
    assert context.get_hf_config() is context.model_config.hf_config
    with pytest.raises(TypeError, match="is a `Gemma3Config`, expected `int`"):
        context.get_hf_config(int)


class HFProcessor:
    """It knows the kwargs that it was loaded with."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.kwargs = kwargs

    def __call__(self, text: str, num_crops: int = 1) -> None:
        raise NotImplementedError


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Count what is loaded: the kwargs of each load."""
    loaded: list[dict[str, Any]] = []

    def from_pretrained(path: Any, *, tokenizer: Any, **kwargs: Any) -> HFProcessor:
        loaded.append(kwargs)
        return HFProcessor(kwargs)

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", from_pretrained)
    return loaded


class Info(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> dict[str, int | None]:
        return {"image": None}


def make_info() -> Info:
    return Info(InputProcessingContext(model_config=gemma3.model_config(), tokenizer=None))


def test_the_hf_processor_is_loaded_once_for_its_kwargs(loads: list[dict[str, Any]]):
    info = make_info()
    size = {"height": 3, "width": 5}
    plain = info.get_hf_processor()
    first = info.get_hf_processor(num_crops=4, size=size)
    other = info.get_hf_processor(num_crops=16)
    assert loads == [{}, {"num_crops": 4, "size": size}, {"num_crops": 16}]
    assert [one.kwargs for one in (plain, first, other)] == loads
    assert info.get_hf_processor() is plain
    assert info.get_hf_processor(size=dict(size), num_crops=4) is first
    assert info.get_hf_processor(num_crops=16) is other
    assert len(loads) == 3
    assert make_info().get_hf_processor(num_crops=16) is not other


def test_the_hf_processors_that_are_kept_are_few(loads: list[dict[str, Any]]):
    info = make_info()
    plain = info.get_hf_processor()
    for number in range(100):
        info.get_hf_processor(num_crops=number)
    assert len(info.ctx._hf_processors) == _MAX_HF_PROCESSORS
    assert len(loads) == 101
    # The last ones are there, and so is the one without kwargs, which every request uses.
    assert info.get_hf_processor(num_crops=99).kwargs == {"num_crops": 99}
    assert info.get_hf_processor() is plain
    assert len(loads) == 101
    info.get_hf_processor(num_crops=0)
    assert len(loads) == 102


def test_a_wrong_processor_type_is_named(loads: list[dict[str, Any]]):
    ctx = make_info().ctx
    assert ctx.get_hf_processor(HFProcessor, num_crops=1) is ctx.get_hf_processor(num_crops=1)
    with pytest.raises(TypeError, match="is a `HFProcessor`, expected `int`"):
        ctx.get_hf_processor(int, num_crops=1)
    assert len(loads) == 1
