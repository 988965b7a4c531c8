"""Threads call into an event loop: in order, in their own context, and many by one wake-up."""

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import pytest

from mmjax.system.loop_calls import LoopCalls

NAME: ContextVar[str] = ContextVar("name", default="")


def in_threads(*jobs: Callable[[], None]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_all_calls_of_many_threads_are_made_in_each_ones_order() -> None:
    num_threads, num_calls = 8, 2000
    seen: list[tuple[int, int]] = []

    async def body() -> None:
        calls, has_all = LoopCalls(asyncio.get_running_loop()), asyncio.Event()

        def note(thread: int, number: int) -> None:
            seen.append((thread, number))
            if len(seen) == num_threads * num_calls:
                has_all.set()

        def work(thread: int) -> None:
            for number in range(num_calls):
                calls.call(note, thread, number)

        jobs = [lambda thread=thread: work(thread) for thread in range(num_threads)]
        await asyncio.to_thread(in_threads, *jobs)
        await asyncio.wait_for(has_all.wait(), 60.0)

    asyncio.run(body())
    for thread in range(num_threads):
        assert [number for one, number in seen if one == thread] == list(range(num_calls))


async def test_calls_before_the_loop_looks_wake_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    loop = asyncio.get_running_loop()
    calls, num_wakes, wake = LoopCalls(loop), 0, loop.call_soon_threadsafe

    def count(*args: Any) -> Any:
        nonlocal num_wakes
        num_wakes += 1
        return wake(*args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    for turn in range(1, 3):
        # The loop cannot look meanwhile: this is its thread.
        for number in range(5):
            calls.call(seen.append, number)
        await asyncio.sleep(0)
        assert (num_wakes, len(seen)) == (turn, 5 * turn)


async def test_a_call_has_its_threads_context_and_its_fault_stops_no_other() -> None:
    seen: list[str] = []
    faults: list[dict[str, Any]] = []

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, fault: faults.append(fault))
    calls = LoopCalls(loop)

    def call(name: str) -> None:
        NAME.set(name)
        calls.call(lambda: seen.append(NAME.get()))
        calls.call(lambda: 1 / 0)  # pyrefly: ignore[division-by-zero]

    for name in ("a", "b"):
        copy_context().run(call, name)
    await asyncio.sleep(0)
    assert seen == ["a", "b"]
    assert [type(one["exception"]) for one in faults] == [ZeroDivisionError] * 2


def test_a_closed_loop_is_called_no_more() -> None:
    loop = asyncio.new_event_loop()
    calls = LoopCalls(loop)
    loop.close()
    calls.call(pytest.fail)
