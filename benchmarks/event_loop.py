"""Whether the server's event loop stays free: 64 requests with pictures at once, and one at a time.

`python -m benchmarks.event_loop`: starts the server with the embedded default, and prints

- how often its loop was late by more than 20 ms, by its own `/metrics`, while 64 clients send a
  photograph each, again and again;
- the times of `/health` meanwhile, asked for by another process, with and without the time in which
  the loop's thread was ready to run and had no core: 64 clients and an engine share the cores;
- how much longer a client waits for one token of a text than the engine takes for it.
"""

import argparse
import asyncio
import base64
import http.client
import json
import multiprocessing
import os
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.hostile import exchange
from benchmarks.pictures import photographs
from benchmarks.servers import Server, start_mmjax

_LATE_S = 0.02
_LATE_BUCKET = str(_LATE_S)
_TIMEOUT_S = 600.0
_TEXT = {"prompt": "What color is the circle?", "max_tokens": 1, "temperature": 0}


class Look(NamedTuple):
    """One request for `/health`."""

    seconds: float
    coreless_s: float
    """Of them, those in which the loop's thread, or the one who asked, waited for a core."""


def main() -> int:
    """Print the three tables."""
    options = _parse()
    with tempfile.TemporaryDirectory() as folder:
        seats = str(options.clients)
        server = start_mmjax(["--max-num-seqs", seats], Path(folder) / "log.txt")
        try:
            _one_token(server, options.texts)
            _pictures(server, options)
        finally:
            server.end()
    return 0


def _pictures(server: Server, options: argparse.Namespace) -> None:
    bodies = [_picture_body(data) for data in photographs(options.clients * options.rounds)]
    before = _figures(server)
    ours, theirs = multiprocessing.Pipe()
    prober = multiprocessing.get_context("spawn").Process(
        target=_probe, args=(server.port, server.process.pid, theirs), daemon=True
    )
    prober.start()
    ours.recv()
    start = time.perf_counter()
    statuses = asyncio.run(_send_all(server.port, bodies, options.clients))
    seconds = time.perf_counter() - start
    ours.send("stop")
    looks_at_health: list[Look] = ours.recv()
    prober.join()
    after = _figures(server)
    name = "mmjax:event_loop_lag_seconds"
    looks = after[f"{name}_count", ""] - before[f"{name}_count", ""]
    punctual = after[f"{name}_bucket", _LATE_BUCKET] - before[f"{name}_bucket", _LATE_BUCKET]
    mean_ms = 1e3 * (after[f"{name}_sum", ""] - before[f"{name}_sum", ""]) / max(1, looks)
    print(f"{len(bodies)} pictures from {options.clients} clients in {seconds:.1f} s: {statuses}")
    print(f"event loop: late by over 20 ms at {looks - punctual:.0f} of {looks:.0f} looks,")
    print(f"            by {mean_ms:.2f} ms on average")
    _print_health(looks_at_health)


def _print_health(looks: Sequence[Look]) -> None:
    """Print the times of `/health`, and what is left of them beside the waits for a core."""
    for seconds, name in (
        ([look.seconds for look in looks], "in all"),
        ([look.seconds - look.coreless_s for look in looks], "without waits for a core"),
    ):
        late = sum(one > _LATE_S for one in seconds)
        print(f"/health:    {_describe(seconds)}, {late} of {len(looks)} over 20 ms, {name}")


def _one_token(server: Server, number: int) -> None:
    client_s, before = [], _figures(server)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    for i in range(number + 5):
        if i == 5:
            # The first ones are no measure.
            client_s, before = [], _figures(server)
        body = json.dumps({**_TEXT, "prompt": f"{i}: {_TEXT['prompt']}"})
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", body, headers)
        connection.getresponse().read()
        client_s.append(time.perf_counter() - start)
    after = _figures(server)
    engine = "vllm:request_inference_time_seconds"
    seconds = after[f"{engine}_sum", ""] - before[f"{engine}_sum", ""]
    engine_ms = 1e3 * seconds / (after[f"{engine}_count", ""] - before[f"{engine}_count", ""])
    print(
        f"one token:  {_describe(client_s)} for the client, mean {engine_ms:.2f} ms in the engine"
    )


def _describe(seconds: Sequence[float]) -> str:
    p99 = quantiles(seconds, n=100, method="inclusive")[98]
    p50, p99, most = (1e3 * value for value in (median(seconds), p99, max(seconds)))
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {most:.2f} ms"


def _picture_body(data: bytes) -> bytes:
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is it?"},
    ]
    message = {"role": "user", "content": parts}
    return json.dumps({"messages": [message], "max_tokens": 4, "temperature": 0}).encode()


async def _send_all(port: int, bodies: Sequence[bytes], num_at_once: int) -> dict[str, int]:
    statuses: dict[str, int] = {}
    numbers = iter(bodies)

    async def be_a_client() -> None:
        for body in numbers:
            status = await exchange(port, "POST", "/v1/chat/completions", body, _TIMEOUT_S)
            statuses[status] = statuses.get(status, 0) + 1

    await asyncio.gather(*(be_a_client() for _ in range(num_at_once)))
    return statuses


def _probe(port: int, server_pid: int, pipe: Connection) -> None:
    """Ask for /health every 20 ms, on one connection, until told to stop."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    looks = []
    # The event loop's thread is the server's main one, whose id is its process's.
    pids = (server_pid, os.getpid())
    pipe.send("ready")
    while not pipe.poll(0.02):
        start, waited_s = time.perf_counter(), sum(map(_read_coreless_s, pids))
        connection.request("GET", "/health")
        connection.getresponse().read()
        seconds = time.perf_counter() - start
        looks.append(Look(seconds, sum(map(_read_coreless_s, pids)) - waited_s))
    pipe.recv()
    pipe.send(looks)


def _read_coreless_s(pid: int) -> float:
    """Return for how long a process's main thread was ready to run and had no core."""
    path = Path(f"/proc/{pid}/task/{pid}/schedstat")
    return int(path.read_text().split()[1]) * 1e-9


def _figures(server: Server) -> dict[tuple[str, str], float]:
    """Return the value of each series by its name and its bucket."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
        text = response.read().decode()
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="pictures of each client")
    parser.add_argument("--texts", type=int, default=100, help="requests with one token")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
