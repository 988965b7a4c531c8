"""What is done for a client ends when the client leaves."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from mmjax.errors import RequestCancelledError
from mmjax.server.openai.streaming import while_connected


class Connection:
    """A request whose client leaves when it is told to."""

    def __init__(self) -> None:
        self.is_left = asyncio.Event()
        self.request = Request({"type": "http"}, self._receive)

    async def _receive(self) -> Any:
        await self.is_left.wait()
        return {"type": "http.disconnect"}


async def test_work_is_cancelled_when_the_client_leaves() -> None:
    async with asyncio.timeout(30):
        connection = Connection()
        ended: list[str] = []

        async def work() -> None:
            connection.is_left.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")

        with pytest.raises(RequestCancelledError):
            await while_connected(connection.request, work())
        assert ended == ["cancelled"]


async def test_results_and_errors_come_through() -> None:
    async with asyncio.timeout(30):
        connection = Connection()

        async def answer() -> int:
            return 7

        async def fail() -> int:
            raise KeyError("x")

        assert await while_connected(connection.request, answer()) == 7
        with pytest.raises(KeyError):
            await while_connected(connection.request, fail())


async def test_whoever_cancels_the_caller_cancels_the_work() -> None:
    async with asyncio.timeout(30):
        for also_leaves in (False, True):
            connection, began = Connection(), asyncio.Event()

            async def work(began: asyncio.Event = began) -> None:
                began.set()
                await asyncio.Event().wait()

            calling = asyncio.create_task(while_connected(connection.request, work()))
            await began.wait()
            if also_leaves:
                connection.is_left.set()
                await asyncio.sleep(0)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling


async def test_a_caller_goes_on_after_its_client_has_left() -> None:
    async with asyncio.timeout(30):
        connection = Connection()
        connection.is_left.set()
        for _ in range(2):
            with pytest.raises(RequestCancelledError):
                await while_connected(connection.request, asyncio.sleep(10))
        calling = asyncio.current_task()
        assert calling is not None
        assert calling.cancelling() == 0
        async with asyncio.timeout(10):
            await asyncio.sleep(0)


async def test_a_result_of_the_moment_in_which_the_client_leaves_is_no_cancellation_later() -> None:
    async with asyncio.timeout(30):
        connection = Connection()

        async def work() -> int:
            connection.is_left.set()
            return 7

        assert await while_connected(connection.request, work()) == 7
        for _ in range(3):
            await asyncio.sleep(0)
