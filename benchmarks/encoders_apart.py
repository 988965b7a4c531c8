"""Two engines with one encode worker beside one server that encodes itself: answers a second.

python -m benchmarks.encoders_apart [MODEL] [--requests 16] [--at-once 8] [--rounds 3] [--dtype D]

All share this machine's processors. Each round asks one server about new pictures, then two engines
about the same ones, and then each engine about those that the other was asked about: the worker has
their rows, and encodes nothing.
"""

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks import http_load
from benchmarks.http_load import Load
from benchmarks.pictures import photographs
from benchmarks.servers import start_mmjax
from benchmarks.serving import make_body

SIDE = 512


class Client:
    """Sends requests from processes that have nothing of the servers in them."""

    def __init__(self, num_at_once: int, stack: ExitStack) -> None:
        self._num_at_once = num_at_once
        context = multiprocessing.get_context("spawn")
        self._processes = stack.enter_context(context.Pool(2))
        self._threads = stack.enter_context(ThreadPoolExecutor(2))

    def rate(self, ports: Sequence[int], bodies: Sequence[bytes]) -> float:
        """Divide requests among servers; return the answers a second of all."""
        at_once = max(1, self._num_at_once // len(ports))
        loads = [
            (Load(port, bodies[place :: len(ports)], num_at_once=at_once),)
            for place, port in enumerate(ports)
        ]
        start = time.perf_counter()
        list(self._threads.map(lambda load: self._processes.apply(http_load.run, load), loads))
        return len(bodies) / (time.perf_counter() - start)


def start_all(stack: ExitStack, folder: Path, flags: argparse.Namespace) -> tuple[int, list[int]]:
    """Start everything; return the port of the server that encodes, and of both engines."""
    chosen = [] if flags.model is None else [flags.model]
    settings = ["--dtype", flags.dtype, "--max-model-len", str(flags.max_model_len)]
    address = f"unix://{folder}/encoder"
    command = [sys.executable, "-m", "mmjax", "encode-worker", *chosen, "--listen", address]
    with (folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen([*command, *settings], stdout=log, stderr=subprocess.STDOUT)
    stack.callback(worker.wait)
    stack.callback(worker.terminate)
    ports = []
    for name in ("alone", "first", "second"):
        apart = [] if name == "alone" else ["--encoder-workers", address]
        server = start_mmjax([*settings, *apart], folder / f"{name}.log", model=flags.model)
        stack.callback(server.end)
        ports.append(server.port)
        print(f"{name} started in {server.start_s:.0f} s", file=sys.stderr, flush=True)
    return ports[0], ports[1:]


def main() -> None:
    """Print medians over the rounds, and their ratios to one server's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", help="default: the embedded one")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--dtype", default="auto")
    flags = parser.parse_args()
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        alone, engines = start_all(stack, folder, flags)
        client = Client(flags.at_once, stack)
        for number in range(flags.rounds + 1):
            pictures = photographs(flags.requests, SIDE, SIDE, seed=number)
            bodies = [make_body(one, n, flags.max_tokens) for n, one in enumerate(pictures)]
            row = {
                "one server": client.rate([alone], bodies),
                "two engines and a worker": client.rate(engines, bodies),
                "the same pictures at the other engine": client.rate(engines[::-1], bodies),
            }
            for name, rate in row.items() if number else ():  # the first round warms up
                rates.setdefault(name, []).append(rate)
    for name, values in rates.items():
        ratio = statistics.median(map(float.__truediv__, values, rates["one server"]))
        print(f"{statistics.median(values):6.2f} answers/s  {ratio:5.2f}  {name}")


if __name__ == "__main__":
    main()
