"""Room for requests is given once, however many ask for it at the same moment."""

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from mmjax.errors import CapacityError
from mmjax.frontend.engine_client.admission import Capacity

LIMIT = 100


def reserve_at_once(capacity: Capacity, num_threads: int) -> list[Callable[[], None]]:
    barrier = threading.Barrier(num_threads)
    got: list[Callable[[], None]] = []

    def reserve() -> None:
        barrier.wait()
        with suppress(CapacityError):
            got.append(capacity.reserve_tokens(40, lambda: 0))

    threads = [threading.Thread(target=reserve) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def test_prompts_that_are_checked_at_once_fit_together() -> None:
    for _ in range(50):
        assert len(reserve_at_once(Capacity(64, LIMIT), 8)) == 2


def test_reserved_and_waiting_tokens_count_together() -> None:
    capacity = Capacity(64, LIMIT)
    release_first = capacity.reserve_tokens(50, lambda: 0)
    with pytest.raises(CapacityError, match="60 of others wait"):
        capacity.reserve_tokens(41, lambda: 10)
    capacity.reserve_tokens(40, lambda: 10)()
    release_first()
    release_first()
    release_second = capacity.reserve_tokens(100, lambda: 0)
    with pytest.raises(CapacityError):
        capacity.reserve_tokens(1, lambda: 0)
    release_second()


def test_a_prompt_that_is_alone_may_be_longer() -> None:
    capacity = Capacity(64, LIMIT)
    capacity.reserve_tokens(10 * LIMIT, lambda: 0)
    with pytest.raises(CapacityError):
        capacity.reserve_tokens(1, lambda: 0)


def test_without_a_limit_nothing_is_counted() -> None:
    def never() -> int:
        raise AssertionError

    capacity = Capacity(64)
    for _ in range(10):
        capacity.reserve_tokens(10**9, never)


def test_room_is_looked_for_without_taking_it() -> None:
    capacity = Capacity(2)
    capacity.enter(1)
    for _ in range(5):
        capacity.check_room()
    assert capacity.num_seqs == 1
    capacity.enter(1)
    with pytest.raises(CapacityError):
        capacity.check_room()
