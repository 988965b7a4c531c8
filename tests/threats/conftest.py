"""The server over the echo engine, and processes that decode, for tests of threats."""

from collections.abc import Iterator

import pytest

from mmjax.decoders.decode_workers import DecodeWorkers
from tests.server.conftest import (
    make_server,
    roomy_input_processor,
    server,
    server_input_processor,
)

__all__ = ["make_server", "roomy_input_processor", "server", "server_input_processor"]


@pytest.fixture(scope="module")
def workers() -> Iterator[DecodeWorkers]:
    pool = DecodeWorkers(1, timeout_s=120.0, memory_bytes=2**28)
    yield pool
    pool.close()
