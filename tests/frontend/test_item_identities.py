"""What items are called on their way to P1, with and without caches that ask for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmjax.config.engine_config import MultiModalConfig
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.requests.request import GenerateRequest
from mmjax.models.model_source import load_model_config
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing import MultiModalHasher
from tests.kit import IMAGE_START, draw
from tests.processing.test_media import encode

PICTURE = encode(draw(8, 8))


Make = Callable[..., InputProcessor]


@pytest.fixture
def make(tiny_gemma3: Path) -> Make:
    """Return a function that makes an input processor with or without caches."""

    def make(*, cache_gb: float, enable_prefix_caching: bool) -> InputProcessor:
        mm = MultiModalConfig(mm_processor_cache_gb=cache_gb)
        config = load_model_config(str(tiny_gemma3), max_model_len=128, mm=mm)
        return InputProcessor(config, enable_prefix_caching=enable_prefix_caching)

    return make


def names(processor: InputProcessor, *uuids: str | None) -> list[str | None]:
    """Process the same picture for each uuid; return what each is called."""
    prompt: Any = {
        "prompt": IMAGE_START * len(uuids),
        "multi_modal_data": {"image": [PICTURE] * len(uuids)},
        "multi_modal_uuids": {"image": list(uuids)},
    }
    request = processor.process(GenerateRequest("r", prompt, SamplingParams(temperature=0.0)))
    return [feature.mm_hash for feature in request.messages[0].mm_features]


@pytest.mark.parametrize(
    ("cache_gb", "enable_prefix_caching"), [(1.0, False), (0.0, True), (1.0, True)]
)
def test_a_cache_asks_for_contents(make: Make, cache_gb: float, enable_prefix_caching: bool):
    processor = make(cache_gb=cache_gb, enable_prefix_caching=enable_prefix_caching)
    first, again, named = names(processor, None, None, "mine")
    assert first == again
    assert first == names(processor, None)[0]
    assert named == "mine"


def test_without_caches_nothing_is_hashed(make: Make, monkeypatch: pytest.MonkeyPatch):
    processor = make(cache_gb=0.0, enable_prefix_caching=False)
    monkeypatch.setattr(MultiModalHasher, "hash_kwargs", None)
    monkeypatch.setattr(MultiModalHasher, "digest_file", None)
    first, second, named = names(processor, None, None, "mine")
    assert str(first).startswith("r")
    assert str(first).endswith("-image-0")
    assert str(second).endswith("-image-1")
    assert named == "mine"
    assert not {first, second} & set(names(processor, None, None)), "nor is a name used again"
