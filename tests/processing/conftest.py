"""A family's processor, of the module's row of the table, `FAMILY`; a process that decodes."""

from collections.abc import Iterator
from typing import Any

import pytest

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.decoders.decode_workers import DecodeWorkers


@pytest.fixture(params=["uncached", "cached"])
def processor(request: pytest.FixtureRequest) -> Any:
    cache = MultiModalProcessorOnlyCache(2**26) if request.param == "cached" else None
    return request.module.FAMILY.make_processor(processor_cache=cache)


@pytest.fixture(scope="module")
def workers() -> Iterator[DecodeWorkers]:
    pool = DecodeWorkers(1, timeout_s=120.0, memory_bytes=2**29)
    yield pool
    pool.close()


def both_kinds(processor: Any, prompt: str) -> list[Any]:
    """Return a prompt as text and as token ids."""
    return [prompt, processor.info.get_tokenizer().encode(prompt)]
