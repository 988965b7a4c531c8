"""What is done for a client ends when the client leaves."""

import asyncio
from collections.abc import Coroutine
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


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 30))


def test_work_is_cancelled_when_the_client_leaves() -> None:
    async def body() -> None:
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

    run(body())


def test_results_and_errors_come_through() -> None:
    async def body() -> None:
        connection = Connection()

        async def answer() -> int:
            return 7

        async def fail() -> int:
            raise KeyError("x")

        assert await while_connected(connection.request, answer()) == 7
        with pytest.raises(KeyError):
            await while_connected(connection.request, fail())

    run(body())
