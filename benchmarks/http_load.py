"""A client that streams chat answers, and notes when each part of them came.

Imports nothing of this repository and nothing large: it runs in a process of its own, beside the
server that it measures.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

TIMEOUT_S = 600.0


class Load(NamedTuple):
    """Requests, and when to send them."""

    port: int
    bodies: Sequence[bytes]
    num_at_once: int = 0
    """Of a closed loop: as many clients send a request as soon as their last one is answered."""
    arrivals_s: Sequence[float] = ()
    """Of an open loop: when each request is sent, whatever happens to the others."""


class Sample(NamedTuple):
    """One answer; times in seconds since the load began."""

    sent_s: float
    first_chunk_s: float
    """The first event of the stream, which may have no token yet."""
    first_token_s: float
    last_token_s: float
    num_tokens: int
    """As the server counts them."""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time per output token behind the first."""
        return (self.last_token_s - self.first_token_s) / max(1, self.num_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.last_token_s - self.sent_s


def run(load: Load) -> list[Sample]:
    """Send all requests; return their samples, in the order of `load.bodies`."""
    return asyncio.run(_open_loop(load) if load.arrivals_s else _closed_loop(load))


async def _closed_loop(load: Load) -> list[Sample]:
    samples: dict[int, Sample] = {}
    numbers: Iterator[int] = iter(range(len(load.bodies)))
    start = time.perf_counter()

    async def be_a_client() -> None:
        for number in numbers:
            samples[number] = await _ask(load.port, load.bodies[number], start)

    await asyncio.gather(*(be_a_client() for _ in range(load.num_at_once)))
    return [samples[number] for number in range(len(load.bodies))]


async def _open_loop(load: Load) -> list[Sample]:
    start = time.perf_counter()

    async def send(body: bytes, at_s: float) -> Sample:
        await asyncio.sleep(start + at_s - time.perf_counter())
        return await _ask(load.port, body, start)

    pairs = zip(load.bodies, load.arrivals_s, strict=True)
    return await asyncio.gather(*(send(body, at_s) for body, at_s in pairs))


async def _ask(port: int, body: bytes, start: float) -> Sample:
    """Send one request on a connection of its own, and read its stream to the end."""
    sent_s = time.perf_counter() - start
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(make_head(port, body) + body)
            status = await read_status(reader)
            received = [(time.perf_counter() - start, chunk) async for chunk in read_chunks(reader)]
        finally:
            writer.transport.abort()
    text = b"".join(chunk for _, chunk in received)
    if status != 200:
        raise RuntimeError(f"the server answered {status}: {text.decode(errors='replace')[:2000]}")
    # Decoded behind the stream's end, so that the times hold none of it.
    return _to_sample(sent_s, [(at_s, event) for at_s, chunk in received for event in _data(chunk)])


def make_head(
    port: int, body: bytes, *, method: str = "POST", path: str = "/v1/chat/completions"
) -> bytes:
    """Return a request's line and headers; the server closes the connection behind its answer."""
    return (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()


async def read_status(reader: asyncio.StreamReader) -> int:
    """Read an answer's head, and return its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1])


async def read_chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the chunks of a chunked body; another body as one, with what looks like no size."""
    while line := await reader.readline():
        try:
            size = int(line, 16)
        except ValueError:
            yield line + await reader.read()
            return
        if not size:
            return
        yield (await reader.readexactly(size + 2))[:-2]


def _data(chunk: bytes) -> list[Any]:
    lines = chunk.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def _to_sample(sent_s: float, events: Sequence[tuple[float, Any]]) -> Sample:
    if errors := [event["error"] for _, event in events if "error" in event]:
        raise RuntimeError(f"the server ended a stream: {errors[0]}")
    answers = [(at_s, event["choices"][0]) for at_s, event in events if event["choices"]]
    # The one with the role has no token, if its content is empty.
    tokens = [
        at_s
        for at_s, choice in answers
        if choice["delta"].get("content") or "role" not in choice["delta"]
    ]
    usage = next(event["usage"] for _, event in reversed(events) if event.get("usage"))
    return Sample(sent_s, answers[0][0], tokens[0], tokens[-1], usage["completion_tokens"])
