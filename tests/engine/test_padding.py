"""What of each bucket was padding, by hand, and in an engine's log at its end."""

import logging

import pytest

from mmjax.engine.device.padding import PaddingCounter
from mmjax.engine.scheduling.buckets import StepBucket
from tests.engine.tiny import drain, message, tiny_engine


def test_shares_are_of_all_rows_of_a_bucket() -> None:
    counter, small, large = PaddingCounter(), StepBucket(4, 4, 1), StepBucket(64, 4, 64)
    for bucket, num_tokens in ((small, 4), (small, 3), (large, 33), (small, 3)):
        counter.add(bucket, num_tokens)
    assert counter.share(small) == pytest.approx(2 / 12)
    assert counter.share(large) == pytest.approx(31 / 64)
    assert counter.share(StepBucket(16, 4, 16)) == 0
    assert counter.describe() == [
        "steps of 4 tokens x 4 requests: 3, 17% padding",
        "steps of 64 tokens x 4 requests: 1, 48% padding",
    ]


def test_an_engine_tells_it_once_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    core = tiny_engine()
    core.add_request(message("one", [[5] * 24], max_tokens=3))
    drain(core)
    with caplog.at_level(logging.INFO, "mmjax"):
        core.close()
        core.close()
    told = [record.getMessage() for record in caplog.records if "padding" in record.getMessage()]
    assert told == [
        "steps of 1 tokens x 1 requests: 2, 0% padding",
        "steps of 32 tokens x 4 requests: 1, 25% padding",
    ]
