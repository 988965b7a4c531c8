"""A network of our own, with traps that note whoever connects to what is not allowed.

Names resolve as a test says, and public addresses lead to a site on loopback.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpcore2
import pytest

from mmjax.config.engine_config import MultiModalConfig
from mmjax.errors import RequestError
from mmjax.frontend.media import http
from mmjax.frontend.media.connector import MediaConnector

PUBLIC = "93.184.215.14"
"""An address that passes; the fake network leads it to the site."""
OTHER_PUBLIC = "2606:2800:21f:cb07:6820:80da:af6b:8b2c"

Pieces = Callable[[str], Sequence[bytes | float]]
"""(request head) -> what the site sends: bytes, and pauses in seconds (inf: for ever)."""


def answer(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    """Return a whole HTTP response; `_` in names is `-`."""
    fields = {"Content-Length": str(len(body)), **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body


def redirect(location: str, status: str = "302 Found") -> bytes:
    return answer(b"", status, Location=location)


_TLS = b"\x16"
"""The first byte of a handshake."""


@dataclass
class Network:
    """What was resolved and dialled."""

    names: Mapping[str, Sequence[Sequence[str]]]
    """Name -> the addresses that each look-up gives; the last is repeated."""
    site: Pieces
    resolved: list[str] = field(default_factory=list)
    dialled: list[tuple[str, int]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    """Request heads that the site got."""
    serving: list[Any] = field(default_factory=list)
    """The tasks that answer."""

    def look_up(self, host: str, port: int, **kwargs: Any) -> list[Any]:
        """Do what `socket.getaddrinfo` does, without a name server."""
        self.resolved.append(host)
        if host in self.names:
            turns = self.names[host]
            addresses = turns[min(self.resolved.count(host), len(turns)) - 1]
            return [(0, 0, 0, "", (address, port)) for address in addresses]
        return _getaddrinfo(host, port, flags=socket.AI_NUMERICHOST, **kwargs)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request of the site's."""
        self.serving.append(asyncio.current_task())
        with closing(writer), suppress(OSError, asyncio.IncompleteReadError):
            first = await reader.readexactly(1)
            if first == _TLS:  # there is no certificate for it
                return
            head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.heads.append(head)
            for piece in self.site(head):
                if isinstance(piece, bytes):
                    writer.write(piece)
                    await writer.drain()
                elif piece == float("inf"):
                    await reader.read()
                else:
                    await asyncio.sleep(piece)


_getaddrinfo = socket.getaddrinfo


class _Dialler(httpcore2.AsyncNetworkBackend):
    """Notes what is dialled; what is public leads to the site, all else is really dialled."""

    def __init__(self, network: Network, port: int) -> None:
        self._network, self._port = network, port
        self._real: Any = httpcore2.AnyIOBackend()

    async def connect_tcp(self, host: str, port: int, *args: Any, **options: Any) -> Any:
        self._network.dialled.append((host, port))
        if host in (PUBLIC, OTHER_PUBLIC):
            return await self._real.connect_tcp("127.0.0.1", self._port)
        return await self._real.connect_tcp(host, port, *args, **options)


class Fetched(NamedTuple):
    """What came of one URL."""

    outcome: bytes | RequestError
    dialled: list[tuple[str, int]]
    heads: list[str]


@asynccontextmanager
async def connected(network: Network, connector: MediaConnector) -> AsyncIterator[None]:
    """Have a connector dial into `network`, whose site listens meanwhile."""
    server = await asyncio.start_server(network.serve, "127.0.0.1", 0)
    connector._fetcher._backend._dialler = _Dialler(network, server.sockets[0].getsockname()[1])
    try:
        yield
    finally:
        server.close()
        # Each ends with its connection, which the fetcher has closed.
        await asyncio.gather(*network.serving, return_exceptions=True)


def fetch_each(
    urls: Iterable[str], network: Network, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> list[Fetched]:
    """Fetch URLs as a request's media are, one after another."""
    connector = MediaConnector(MultiModalConfig(**settings))

    async def fetch_one(url: str) -> bytes:
        pending = connector.open_image(url, "messages[0].content[0].image_url.url")
        async with connector.fetched({"multi_modal_data": {"image": [pending]}}) as prompt:
            assert isinstance(prompt, dict)
            (image,) = (prompt.get("multi_modal_data") or {})["image"]
        return image.original_bytes

    async def run() -> list[Fetched]:
        found = []
        async with connected(network, connector):
            for url in urls:
                num_dialled, num_heads = len(network.dialled), len(network.heads)
                try:
                    outcome: bytes | RequestError = await fetch_one(url)
                except RequestError as error:
                    outcome = error
                done = network.dialled[num_dialled:], network.heads[num_heads:]
                found.append(Fetched(outcome, *done))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(http.socket, "getaddrinfo", network.look_up)
        found = asyncio.run(run())
    connector.close()
    assert connector.num_held_bytes == 0
    return found


def fetch(url: str, network: Network, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> bytes:
    """Fetch one URL; return the bytes, or raise what a client would be told."""
    ((outcome, _, _),) = fetch_each([url], network, monkeypatch, **settings)
    if isinstance(outcome, RequestError):
        raise outcome
    return outcome


class Trap:
    """A listener that must never be connected to."""

    def __init__(self, family: socket.AddressFamily, address: str) -> None:
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((address, 0))
        self._listener.listen()
        self.port: int = self._listener.getsockname()[1]

    def has_caught(self) -> bool:
        """Return whether anybody has connected: the kernel queues it before anyone accepts."""
        self._listener.settimeout(0)
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return False
        connection.close()
        return True

    def close(self) -> None:
        self._listener.close()


@contextmanager
def traps() -> Iterator[list[Trap]]:
    """Yield listening traps on loopback, and fail where somebody connected to one."""
    with ExitStack() as stack:
        listening = [Trap(socket.AF_INET, "127.0.0.1")]
        if socket.has_ipv6:
            with suppress(OSError):
                listening.append(Trap(socket.AF_INET6, "::1"))
        for trap in listening:
            stack.callback(trap.close)
        yield listening
        assert not any(trap.has_caught() for trap in listening), "a trap was connected to"
