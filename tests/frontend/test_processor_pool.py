"""Private processors: lent, given back, and made without holding anybody up."""

import threading
from typing import Any

import pytest

from mmjax.config.engine_config import ModelConfig
from mmjax.frontend.prompt import processor_pool
from mmjax.frontend.prompt.processor_pool import ProcessorPool

DEADLINE_S = 60.0


def test_a_processor_is_given_back_while_another_is_made(
    model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ProcessorPool(model_config, None)
    is_making, may_make = threading.Event(), threading.Event()
    make = processor_pool.create_processor

    def make_slowly(*args: Any, **kwargs: Any) -> Any:
        is_making.set()
        assert may_make.wait(DEADLINE_S)
        return make(*args, **kwargs)

    monkeypatch.setattr(processor_pool, "create_processor", make_slowly)
    second: list[Any] = []

    def borrow_second() -> None:
        with pool.borrow() as processor:
            second.append(processor)

    def give_back_and_borrow() -> None:
        with pool.borrow() as first:
            thread = threading.Thread(target=borrow_second)
            thread.start()
            assert is_making.wait(DEADLINE_S)
        with pool.borrow() as again:
            assert again is first
        has_returned.set()
        may_make.set()
        thread.join(DEADLINE_S)

    has_returned = threading.Event()
    worker = threading.Thread(target=give_back_and_borrow)
    worker.start()
    try:
        assert has_returned.wait(10.0), "giving back waited for a processor that is made"
    finally:
        may_make.set()
        worker.join(DEADLINE_S)
    assert second[0] is not pool.first
    assert len(pool._idle) == 2
