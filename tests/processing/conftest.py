"""A family's processor, for the tests of a module that names its row of the table as `FAMILY`."""

from typing import Any

import pytest

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache


@pytest.fixture(params=["uncached", "cached"])
def processor(request: pytest.FixtureRequest) -> Any:
    cache = MultiModalProcessorOnlyCache(2**26) if request.param == "cached" else None
    return request.module.FAMILY.make_processor(processor_cache=cache)


def both_kinds(processor: Any, prompt: str) -> list[Any]:
    """Return a prompt as text and as token ids."""
    return [prompt, processor.info.get_tokenizer().encode(prompt)]
