"""An engine's log at its end tells what of each bucket was padding."""

import logging

import pytest

from tests.engine.tiny import drain, message, tiny_engine


def test_an_engine_tells_it_once_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    core = tiny_engine(max_num_batched_tokens=16)
    core.add_request(message("one", [[5] * 24], max_tokens=3))
    drain(core)
    with caplog.at_level(logging.INFO, "mmjax"):
        core.close()
        core.close()
    told = [record.getMessage() for record in caplog.records if "padding" in record.getMessage()]
    assert told == [
        "steps of 1 tokens x 1 requests: 2, 0% padding",
        "steps of 16 tokens x 4 requests: 2, 25% padding",
    ]
