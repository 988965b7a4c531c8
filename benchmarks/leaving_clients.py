"""Clients that leave before their answer: at each stage that a connection can end in."""

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from benchmarks.http_load import make_head, read_chunks, read_status

PATIENCE_S = 1800.0
"""How long a client that waits for the server waits."""
_LONGEST_WAIT_S = 0.4
_SMALL_BUFFER = 2048


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    head: bytes
    body: bytes
    rng: random.Random

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


async def _before_the_headers(one: _Connection) -> None:
    await asyncio.sleep(0)


async def _in_the_headers(one: _Connection) -> None:
    await one.send(one.head[: one.rng.randrange(1, len(one.head))])


async def _in_the_body(one: _Connection) -> None:
    await one.send(one.head + one.body[: one.rng.randrange(1, len(one.body))])


async def _behind_the_body(one: _Connection) -> None:
    await one.send(one.head + one.body)


async def _while_it_waits(one: _Connection) -> None:
    """Reach any of: decode, process, the queue, encode, prefill."""
    await one.send(one.head + one.body)
    await asyncio.sleep(one.rng.uniform(0, _LONGEST_WAIT_S))


async def _half_open(one: _Connection) -> None:
    """Send no more, and wait for what the server does."""
    await one.send(one.head + one.body)
    one.writer.write_eof()
    await one.reader.read()


async def _at_the_first_token(one: _Connection) -> None:
    await _behind_the_body(one)
    await _read(one, num_chunks=1)


async def _in_the_stream(one: _Connection) -> None:
    await _behind_the_body(one)
    await _read(one, num_chunks=one.rng.randrange(2, 8))


async def _reading_slowly(one: _Connection) -> None:
    """Read byte by byte, from a small buffer."""
    await _behind_the_body(one)
    for _ in range(one.rng.randrange(1, 6)):
        await one.reader.read(1)
        await asyncio.sleep(0.05)


async def _read(one: _Connection, *, num_chunks: int) -> None:
    await read_status(one.reader)
    async for _ in read_chunks(one.reader):
        num_chunks -= 1
        if not num_chunks:
            return


STAGES: Mapping[str, Callable[[_Connection], Awaitable[None]]] = {
    "before the headers": _before_the_headers,
    "in the headers": _in_the_headers,
    "in the body": _in_the_body,
    "behind the body": _behind_the_body,
    "while it waits": _while_it_waits,
    "half-open": _half_open,
    "at the first token": _at_the_first_token,
    "in the stream": _in_the_stream,
    "reading slowly": _reading_slowly,
}
"""Where a client leaves. From "at the first token" on, the request must be a stream."""


async def leave(
    port: int, stage: str, body: bytes, rng: random.Random, *, path: str = "/v1/chat/completions"
) -> None:
    """Begin a request, and end its connection at a stage; TimeoutError after `PATIENCE_S`."""
    size = _SMALL_BUFFER if stage == "reading slowly" else None
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await _connect(port, size)
        try:
            # The server may be the first to end the connection.
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                one = _Connection(reader, writer, make_head(port, body, path=path), body, rng)
                await STAGES[stage](one)
        finally:
            writer.transport.abort()


async def _connect(
    port: int, receive_bytes: int | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if receive_bytes is None:
        return await asyncio.open_connection("127.0.0.1", port)
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Before it connects, so that the server is told a small window.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        return await asyncio.open_connection(sock=connection, limit=receive_bytes)
    except BaseException:
        connection.close()
        raise
