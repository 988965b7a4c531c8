"""Whether killing the engine process again and again loses a request, or changes an answer.

`python -m benchmarks.kills [--kills 200] [--clients 32] [--FLAG ... of mmjax.serve]`: each client
asks the embedded default one question, always the same: about a text or pictures, greedy or
seeded, with a grammar, stop strings, several answers, as a stream or whole. First nobody disturbs
them; then P1 gets SIGKILL at random moments, and every answer must be what it was. Meanwhile
another process asks for `/health`. Prints what was found; exits with 1 if an answer was lost or is
another one.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.hostile import exchange
from benchmarks.mixed_requests import Answer, MixedClient, chat_about, make_picture
from benchmarks.process_figures import find_engine
from benchmarks.servers import Server, start_mmjax

_CHAT = "/v1/chat/completions"
_READY_S = 300.0
_MAX_PAUSE_S = 2.0
"""Between an engine that is ready and its end, at most."""
_NUM_TOKENS = 96

KINDS: Sequence[dict[str, Any]] = (
    {"stream": True, "temperature": 0},
    {"stream": True, "temperature": 1, "top_p": 0.9},
    {"stream": False, "temperature": 0},
    {"stream": True, "temperature": 1, "n": 2},
    {"stream": True, "temperature": 0, "frequency_penalty": 0.5, "min_tokens": 8},
    {"stream": True, "temperature": 1, "stop": ["green", "."], "logprobs": True},
    {"stream": False, "temperature": 1, "structured_outputs": {"regex": "[a-z ]{40,60}"}},
    {"stream": True, "temperature": 1, "structured_outputs": {"choice": ["one red", "two blue"]}},
)
"""Fields of requests; a client's number gives its kind and how many pictures it asks about."""


@dataclass(slots=True)
class Found:
    """What the clients saw."""

    num_answers: int = 0
    wrong: list[str] = field(default_factory=list)


def make_body(number: int) -> dict[str, Any]:
    """Return the request of one client, always the same."""
    rng = random.Random(number)
    fields = KINDS[number % len(KINDS)]
    if not {"stop", "structured_outputs"} & fields.keys():
        fields = {**fields, "ignore_eos": True}
    pictures = [make_picture(rng) for _ in range(number // len(KINDS) % 3)]
    return chat_about(pictures, max_tokens=_NUM_TOKENS, seed=number, **fields)


def read_answer(answer: Answer) -> list[tuple[str, str]]:
    """Return the text and the finish reason of each choice, streamed or not."""
    events = answer.events or [answer.fields]
    parts: dict[int, list[str]] = {}
    reasons: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        said = choice.get("delta") or choice.get("message") or {}
        parts.setdefault(choice["index"], []).append(said.get("content") or "")
        reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"], "")
    return [("".join(parts[index]), reasons[index]) for index in sorted(parts)]


async def _ask(port: int, number: int) -> Any:
    """Return an answer, or what came instead."""
    try:
        answer = await MixedClient(port).exchange("POST", _CHAT, make_body(number))
        if answer.status != 200:
            return f"{answer.status}: {answer.body.decode()[:200]}"
        return read_answer(answer)
    except (KeyError, ValueError, ConnectionError, asyncio.IncompleteReadError) as error:
        return repr(error)


async def _ask_until_told(pipe: Connection, port: int, num_clients: int) -> Found:
    expected = await asyncio.gather(*(_ask(port, number) for number in range(num_clients)))
    found, is_over = Found(), asyncio.Event()
    found.wrong += [f"undisturbed: {one}" for one in expected if isinstance(one, str)]

    async def be_a_client(number: int) -> None:
        while not is_over.is_set():
            answer = await _ask(port, number)
            found.num_answers += 1
            if answer != expected[number]:
                found.wrong.append(f"{number}: {answer!r}, undisturbed {expected[number]!r}")

    pipe.send(None)
    clients = [asyncio.create_task(be_a_client(number)) for number in range(num_clients)]
    await asyncio.to_thread(pipe.recv)
    is_over.set()
    await asyncio.gather(*clients)
    return found


def _be_clients(pipe: Connection, port: int, num_clients: int) -> None:
    pipe.send(asyncio.run(_ask_until_told(pipe, port, num_clients)))


async def _probe_health(port: int, times: list[float]) -> None:
    while True:
        start = time.perf_counter()
        await exchange(port, "GET", "/health", b"", 120.0)
        times.append(time.perf_counter() - start)
        await asyncio.sleep(0.02)


async def _kill(server: Server, number: int) -> float:
    """Kill P1 for the `number`th time; return the seconds until the next one is ready."""
    start = time.perf_counter()
    pid = find_engine(server.process.pid)
    assert pid is not None, "the server has no engine"
    os.kill(pid, signal.SIGKILL)
    client = MixedClient(server.port)
    while time.perf_counter() - start < _READY_S:
        await asyncio.sleep(0.05)
        metrics = (await client.exchange("GET", "/metrics")).body.decode()
        has_ended = re.search(rf"^mmjax:engine_restarts_total\S* {number}\.0$", metrics, re.M)
        if has_ended and (await client.exchange("GET", "/ready")).status == 200:
            return time.perf_counter() - start
    raise SystemExit(f"no engine {_READY_S:.0f} s after kill {number}; see {server.log}")


async def _kill_often(server: Server, num_kills: int) -> tuple[list[float], list[float]]:
    """Return the seconds until each next engine was ready, and those of `/health`."""
    rng, health_s, ready_s = random.Random(0), [], []
    probing = asyncio.create_task(_probe_health(server.port, health_s))
    for number in tqdm(range(1, num_kills + 1), desc="Killing", unit="kill"):
        await asyncio.sleep(rng.uniform(0.0, _MAX_PAUSE_S))
        ready_s.append(await _kill(server, number))
    probing.cancel()
    return ready_s, health_s


def run(server: Server, *, num_kills: int, num_clients: int) -> tuple[Found, str]:
    """Kill P1 under clients; return what these saw, and the figures."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_be_clients, args=(theirs, server.port, num_clients), daemon=True
    )
    process.start()
    ours.recv()  # every answer is known
    ready_s, health_s = asyncio.run(_kill_often(server, num_kills))
    ours.send(None)
    found: Found = ours.recv()
    process.join()
    return found, (
        f"{num_kills} kills, {found.num_answers} answers, {len(found.wrong)} lost or other\n"
        f"ready again after {np.median(ready_s):.1f} s (median; {min(ready_s):.1f} to "
        f"{max(ready_s):.1f})\n/health: median {np.median(health_s) * 1000:.0f} ms, p99 "
        f"{np.quantile(health_s, 0.99) * 1000:.0f} ms, most {max(health_s) * 1000:.0f} ms"
    )


def main() -> int:
    """Start, kill, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--clients", type=int, default=32)
    flags, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = ["--max-num-seqs", "32", "--precompile", "smallest", *arguments]
        server = start_mmjax(settings, Path(folder) / "log")
        try:
            found, figures = run(server, num_kills=flags.kills, num_clients=flags.clients)
        finally:
            server.end()
    print(figures)
    for line in found.wrong[:20]:
        print(line[:500])
    return 1 if found.wrong or found.num_answers < flags.clients else 0


if __name__ == "__main__":
    sys.exit(main())
