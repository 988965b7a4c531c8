"""What a server's other users notice while eight clients send the worst bodies that they can.

`python -m benchmarks.hostile [--only SHAPE ...]`: starts the server with the embedded default, and
prints for each shape of body: the times of `/health` and of a small text request meanwhile, the
memory of the HTTP process, what its log grew by, and at the end how long SIGTERM takes.
"""

import argparse
import asyncio
import base64
import io
import json
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.servers import Server, start_mmjax

_MIB = 2**20
_PATIENCE_S = 1.0
"""How long a hostile client waits for its answer before it leaves."""
_PIECE = 2**16
_SMALL = {"prompt": "What color is the circle?", "max_tokens": 4, "temperature": 0}


def _unknown_keys() -> bytes:
    return json.dumps({"messages": [], **{f"k{i}": 0 for i in range(40_000)}}).encode()


def _unknown_keys_large() -> bytes:
    return json.dumps({"messages": [], **{f"k{i:06}": "x" * 8 for i in range(10**6)}}).encode()


def _brackets() -> bytes:
    return b"[" * (28 * _MIB)


def _closed_brackets() -> bytes:
    return b'{"messages": ' + b"[" * (14 * _MIB) + b"]" * (14 * _MIB) + b"}"


def _wrong_types() -> bytes:
    return b'{"prompt": [' + b",".join([b'"x"', b"1.5", b"null", b"{}"] * 10**6) + b"]}"


def _texts() -> bytes:
    return b'{"prompt": [' + b",".join([b'"x"'] * (7 * 10**6)) + b"]}"


def _logit_bias() -> bytes:
    return json.dumps({**_SMALL, "logit_bias": {f"a{i}": "x" for i in range(10**5)}}).encode()


def _messages() -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}] * 10_000}).encode()


def _wrong_messages() -> bytes:
    return json.dumps({"messages": [{"role": 1, "content": [{}, 5]}] * 500_000}).encode()


def _pictures() -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": _large_png(i)}} for i in range(16)]
    return json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()


def _large_png(number: int) -> str:
    """Return a picture of 50 megapixels, the default limit of one, as a data URL."""
    file = io.BytesIO()
    Image.new("RGB", (8_000, 6_250), (255, 0, number)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
SHAPES: Mapping[str, tuple[str, Callable[[], bytes]]] = {
    "40,000 unknown keys": (_CHAT, _unknown_keys),
    "10^6 unknown keys": (_CHAT, _unknown_keys_large),
    "open brackets": (_CHAT, _brackets),
    "closed brackets": (_CHAT, _closed_brackets),
    "wrong types": (_TEXT, _wrong_types),
    "7 * 10^6 texts": (_TEXT, _texts),
    "logit_bias": (_TEXT, _logit_bias),
    "10,000 messages": (_CHAT, _messages),
    "wrong messages": (_CHAT, _wrong_messages),
    "16 pictures": (_CHAT, _pictures),
}
"""Name -> (path, body)."""


@dataclass(slots=True)
class Observed:
    """What was seen while one shape was sent."""

    health_s: list[float] = field(default_factory=list)
    text_s: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0


async def exchange(port: int, method: str, path: str, body: bytes, timeout_s: float) -> str:
    """Send one request on a connection of its own; return its status, or how it ended."""
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = (
                f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode())
            for start in range(0, len(body), _PIECE):
                writer.write(body[start : start + _PIECE])
                await writer.drain()
            line = await reader.readline()
            await reader.read()
            return line.split(b" ")[1].decode() if line else "closed"
    except TimeoutError:
        return "left"
    except OSError:
        return "reset"
    finally:
        if writer is not None:
            writer.transport.abort()


async def attack(port: int, bodies: list[tuple[str, bytes]], rounds: int) -> Counter[str]:
    """Be as many hostile clients as there are bodies; return how their requests ended."""
    statuses: Counter[str] = Counter()

    async def send(path: str, body: bytes) -> None:
        for _ in range(rounds):
            statuses[await exchange(port, "POST", path, body, _PATIENCE_S)] += 1

    await asyncio.gather(*(send(path, body) for path, body in bodies))
    return statuses


def _attack(pipe: Connection, port: int, names: list[str], num_clients: int, rounds: int) -> None:
    """Attack from a process of its own, so that who looks on is not held up by its work."""
    made = [(path, make()) for path, make in map(SHAPES.__getitem__, names)]
    bodies = [made[i % len(made)] for i in range(max(num_clients, len(made)))]
    pipe.send(None)
    pipe.recv()
    pipe.send(asyncio.run(attack(port, bodies, rounds)))


async def _probe_health(port: int, observed: Observed) -> None:
    while True:
        with _timed(observed.health_s):
            await exchange(port, "GET", "/health", b"", 120.0)
        await asyncio.sleep(0.02)


async def _probe_text(port: int, observed: Observed) -> None:
    body = json.dumps(_SMALL).encode()
    while True:
        with _timed(observed.text_s):
            status = await exchange(port, "POST", _TEXT, body, 120.0)
        assert status == "200", f"a small request got {status}"
        await asyncio.sleep(0.2)


@contextmanager
def _timed(times: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:  # what is not answered when the watch ends counts as well
        times.append(time.perf_counter() - start)


async def _watch_memory(server: Server, observed: Observed) -> None:
    while True:
        observed.peak_bytes = max(observed.peak_bytes, server.memory_bytes)
        await asyncio.sleep(0.05)


async def observe(server: Server, work: Callable[[], Counter[str]]) -> Observed:
    """Look on while `work` runs in a thread, and shortly after."""
    observed = Observed()
    watching = [
        asyncio.create_task(_probe_health(server.port, observed)),
        asyncio.create_task(_probe_text(server.port, observed)),
        asyncio.create_task(_watch_memory(server, observed)),
    ]
    observed.statuses = await asyncio.to_thread(work)
    # What those left behind that are gone is part of it.
    await asyncio.sleep(3.0)
    for task in watching:
        task.cancel()
    for result in await asyncio.gather(*watching, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    return observed


def look_on(server: Server, names: list[str], num_clients: int, rounds: int) -> Observed:
    """Have clients send the shapes `names`, and return what the others noticed."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_attack, args=(theirs, server.port, names, num_clients, rounds)
    )
    process.start()
    ours.recv()  # the bodies are made

    def work() -> Counter[str]:
        ours.send(None)
        return ours.recv()

    seen = asyncio.run(observe(server, work))
    process.join()
    return seen


@contextmanager
def _half_sent(port: int) -> Iterator[None]:
    import socket

    connections = []
    for _ in range(4):
        connection = socket.create_connection(("127.0.0.1", port))
        head = f"POST {_CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{{"
        connection.sendall(head.encode())
        connections.append(connection)
    try:
        yield
    finally:
        for connection in connections:
            connection.close()


def _ms(seconds: list[float], share: float) -> str:
    return f"{np.quantile(seconds, share) * 1000:.0f}" if seconds else "-"


def _row(name: str, seen: Observed, memory: tuple[int, int], log_bytes: int) -> str:
    before, after = (number // _MIB for number in memory)
    num_requests = max(1, seen.statuses.total())
    statuses = ", ".join(f"{n} {status}" for status, n in seen.statuses.most_common())
    return (
        f"| {name} | {statuses} | {_ms(seen.health_s, 0.5)}, {_ms(seen.health_s, 0.99)}, "
        f"{_ms(seen.health_s, 1)} | {_ms(seen.text_s, 0.5)}, {_ms(seen.text_s, 1)} | {before}, "
        f"{seen.peak_bytes // _MIB}, {after} | {log_bytes // num_requests} |"
    )


def main() -> None:
    """Print a table, a row a shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*SHAPES, "all at once"], help="shapes")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4, help="requests of each client")
    flags, arguments = parser.parse_known_args()
    wanted = flags.only or [*SHAPES, "all at once"]
    with tempfile.TemporaryDirectory() as folder:
        server = start_mmjax(arguments, Path(folder) / "log")
        print("| shape | answers | /health ms: median, p99, most | text ms: median, most |", end="")
        print(" P0 MiB: before, peak, after | log bytes a request |\n|---|---|---|---|---|---|")
        asyncio.run(observe(server, Counter))  # everything is loaded from here on
        for name in wanted:
            names = [*SHAPES] if name == "all at once" else [name]
            before, log_before = server.memory_bytes, server.log_bytes
            seen = look_on(server, names, flags.clients, flags.rounds)
            time.sleep(5.0)
            memory = (before, server.memory_bytes)
            print(_row(name, seen, memory, server.log_bytes - log_before), flush=True)
        with _half_sent(server.port):
            time.sleep(0.2)
            print(f"\nSIGTERM with four half-sent bodies: {server.end():.1f} s", flush=True)


if __name__ == "__main__":
    main()
