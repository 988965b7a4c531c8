"""What a replica holds of its answers, how much of it, and for how long."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest

from mmjax.deploy.held import MAX_UNREAD, HeldAnswers, held_key
from mmjax.deploy.replica import (
    ForwardedRequest,
    NotHeld,
    ResponseEnd,
    ResponseHead,
    ResponseItem,
    ResponsePart,
)

NOT_HELD = [NotHeld("a")]


@dataclass
class Steady:
    """A replica that answers each request with some parts, one whenever `go_on` is called."""

    name: str = "a"
    status: int = 200
    is_whole: bool = True
    num_parts: int = 3
    part: bytes = b"part"
    num_computed: int = 0
    num_cancelled: int = 0
    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    async def respond(self, request: ForwardedRequest) -> AsyncGenerator[ResponseItem, None]:
        self.num_computed += 1
        try:
            yield ResponseHead(self.name, self.status, [])
            for _ in range(self.num_parts):
                await self.permits.acquire()
                yield ResponsePart(self.part, None)
            yield ResponseEnd(self.is_whole)
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise

    def go_on(self, number: int = 1000) -> None:
        for _ in range(number):
            self.permits.release()


def holder(replica: Steady, *, seconds: float = 60.0, max_bytes: int = 2**20) -> HeldAnswers:
    return HeldAnswers(replica.name, replica.respond, seconds=seconds, max_bytes=max_bytes)


def asked(key: str | None = "k", *, is_search: bool = False) -> ForwardedRequest:
    body = b"{}"
    return ForwardedRequest("POST", "/", b"", [], body, "key", 0, held_key=key, is_search=is_search)


async def read(
    held: HeldAnswers, request: ForwardedRequest, number: int | None = None
) -> list[ResponseItem]:
    """Read so many items, or all, and leave."""
    found: list[ResponseItem] = []
    async with aclosing(held.respond(request)) as items:
        if number == 0:
            return found
        async for item in items:
            found.append(item)
            if len(found) == number:
                break
    return found


async def until_idle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_two_readers_get_all_of_one_answer() -> None:
    async with asyncio.timeout(30.0):
        replica = Steady()
        held = holder(replica)
        first = asyncio.create_task(read(held, asked()))
        await until_idle()
        second = asyncio.create_task(read(held, asked(is_search=True)))
        replica.go_on()
        assert await first == await second
        assert len(await first) == 5
        assert replica.num_computed == 1
        await held.close()


async def test_it_is_computed_on_where_nobody_reads_it() -> None:
    async with asyncio.timeout(30.0):
        replica = Steady()
        held = holder(replica)
        assert len(await read(held, asked(), 1)) == 1
        replica.go_on()
        await until_idle()
        assert len(await read(held, asked(is_search=True))) == 5
        assert replica.num_cancelled == 0
        await held.close()


@pytest.mark.parametrize("is_over", [False, True])
async def test_it_is_dropped_in_time(is_over: bool) -> None:
    async with asyncio.timeout(30.0):
        replica = Steady()
        held = holder(replica, seconds=0.05)
        if is_over:
            replica.go_on()
        await read(held, asked(), None if is_over else 1)
        await asyncio.sleep(0.2)
        assert await read(held, asked(is_search=True)) == NOT_HELD
        assert replica.num_cancelled == (not is_over)


async def test_the_time_does_not_run_while_it_is_read() -> None:
    async with asyncio.timeout(30.0):
        replica = Steady()
        held = holder(replica, seconds=0.05)
        await read(held, asked(), 1)
        reading = asyncio.create_task(read(held, asked(is_search=True)))
        await asyncio.sleep(0.2)
        replica.go_on()
        assert len(await reading) == 5
        await held.close()


async def test_only_so_many_are_computed_for_nobody() -> None:
    async with asyncio.timeout(30.0):
        replica = Steady()
        held = holder(replica)
        for number in range(MAX_UNREAD + 3):
            await read(held, asked(str(number)), 1)
        await until_idle()
        assert replica.num_cancelled == 3
        assert await read(held, asked("2", is_search=True)) == NOT_HELD
        replica.go_on()
        assert len(await read(held, asked("3", is_search=True))) == 5
        await held.close()


async def test_the_oldest_that_nobody_reads_is_dropped_first() -> None:
    async with asyncio.timeout(30.0):
        replica = Steady(part=b"x" * 1000)
        # Of two answers, not of three.
        held = holder(replica, max_bytes=30_000)
        replica.go_on()
        async with aclosing(held.respond(asked("read"))) as reading:
            await anext(reading)
            for key in ("old", "new"):
                await read(held, asked(key))
            assert await read(held, asked("old", is_search=True)) == NOT_HELD
            assert len(await read(held, asked("new", is_search=True))) == 5
            assert len(await read(held, asked("read", is_search=True))) == 5
        await held.close()


async def test_one_that_is_too_large_is_given_whole_and_not_held() -> None:
    async with asyncio.timeout(30.0):
        replica = Steady(num_parts=50, part=b"x" * 1000)
        held = holder(replica, max_bytes=20_000)
        replica.go_on()
        assert len(await read(held, asked())) == 52
        assert await read(held, asked(is_search=True)) == NOT_HELD
        # And nobody computes it where its one reader leaves.
        slow = Steady(num_parts=50, part=b"x" * 10_000)
        held = holder(slow, max_bytes=20_000)
        slow.go_on(2)
        await read(held, asked(), 3)
        await until_idle()
        assert slow.num_cancelled == 1


@pytest.mark.parametrize("replica", [{"status": 429}, {"is_whole": False}], ids=["error", "lost"])
async def test_what_failed_is_not_held(replica: dict[str, Any]) -> None:
    async with asyncio.timeout(30.0):
        failing = Steady(**replica)
        failing.go_on()
        held = holder(failing)
        assert len(await read(held, asked())) == 5
        assert await read(held, asked(is_search=True)) == NOT_HELD


@pytest.mark.parametrize("how", ["no key", "nothing is held"])
async def test_nothing_is_held_where_nobody_comes_again(how: str) -> None:
    async with asyncio.timeout(30.0):
        replica = Steady()
        held = holder(replica, seconds=0.0 if how == "nothing is held" else 60.0)
        await read(held, asked(None if how == "no key" else "k"), 1)
        assert await read(held, asked(is_search=True)) == NOT_HELD


async def test_closing_ends_what_is_computed() -> None:
    async with asyncio.timeout(30.0):
        replica = Steady()
        held = holder(replica)
        await read(held, asked(), 1)
        await held.close()
        assert replica.num_cancelled == 1


def test_a_key_is_of_one_client_and_one_request() -> None:
    request = asked(None)
    headers = {"idempotency-key": "k", "authorization": "Bearer a"}
    keys = [
        held_key(headers, request),
        held_key({**headers, "authorization": "Bearer b"}, request),
        held_key({**headers, "idempotency-key": "l"}, request),
        # Not one text of both.
        held_key({"idempotency-key": "kBearer", "authorization": " a"}, request),
        held_key(headers, request._replace(path="/v1")),
        held_key(headers, request._replace(query_string=b"a=1")),
        held_key(headers, request._replace(body=b"[]")),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert held_key(headers, request._replace(key="another try")) == keys[0]
    assert held_key({"authorization": "Bearer a"}, request) is None
    assert held_key({**headers, "idempotency-key": ""}, request) is None
    assert held_key(headers, request._replace(method="GET")) is None
