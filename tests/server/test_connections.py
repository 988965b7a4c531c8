"""Limits of connections over real sockets, around an application that always says the same."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from mmjax.server.connections import LimitedProtocol, limited_protocol
from mmjax.server.middleware import above_headers, refuse
from tests.server.conftest import MakeServer

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[int]:
    """Yield the port of a server."""
    limits = {"max_connections": 8, "head_timeout_s": 0.0, **limits}
    size = limits.pop("max_head_bytes", 2048)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            answer,
            http=limited_protocol(**limits),
            h11_max_incomplete_event_size=size,
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
        )
    )
    # Not `serve`, which would take the process's signals.
    task = asyncio.create_task(server._serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()


async def read_all(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_connections_above_the_limit_are_closed_and_the_others_served() -> None:
    async with serving(max_connections=2) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in held:
            writer.write(REQUEST)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert await read_all(port, REQUEST) == b""
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        # The server learns of it in its own time.
        while not await read_all(
            port, REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        ):
            await asyncio.sleep(0.01)


async def test_headers_that_never_end_are_given_up() -> None:
    async with serving(head_timeout_s=0.05) as port:
        assert await read_all(port, b"") == b""
        assert await read_all(port, b"GET / HTTP/1.1\r\nHos") == b""
        # Also those of a second request.
        begun = await read_all(port, REQUEST + b"GET / HTTP/1.1\r\nHos")
        assert begun.count(b"HTTP/1.1 200") == 1


async def test_large_headers_are_refused() -> None:
    async with serving(max_head_bytes=2048) as port:
        bomb = REQUEST[:-2] + b"X: " + b"y" * 5000
        assert (await read_all(port, bomb)).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nowhere"])
def test_many_headers_are_refused(make_server: MakeServer, path: str) -> None:
    server = make_server(h11_max_header_count=20)
    response = server.http.get(path, headers={f"x-{i}": "1" for i in range(30)})
    assert response.status_code == 431
    assert response.json()["error"]["code"] == "http_431"
    assert response.headers["x-request-id"]
    large = server.http.get(path, headers={"x-large": "1" * 70_000})
    assert large.json()["error"]["code"] == "http_431"
    assert server.http.get("/health").status_code == 200


async def test_the_counter_passes_other_scopes_on() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    limited = refuse(app, above_headers(max_headers=1, max_bytes=1))

    await limited({"type": "lifespan"}, nothing, nothing)
    assert seen == ["lifespan"]


def test_a_large_body_is_read_in_pieces_that_do_not_hold_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 pictures at once, 1 ms for each 256 KiB, held it for 60 ms."""
    sizes: list[int] = []
    read = LimitedProtocol.data_received

    def record(self: LimitedProtocol, data: bytes) -> None:
        sizes.append(len(data))
        read(self, data)

    monkeypatch.setattr(LimitedProtocol, "data_received", record)
    body = bytes(2**21)
    head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"

    async def run() -> bytes:
        async with serving() as port:
            return await read_all(port, f"{head}Connection: close\r\n\r\n".encode() + body)

    assert b"\r\n\r\n2\r\nok\r\n" in asyncio.run(run())
    assert max(sizes) <= 2**16
