"""What clients see over HTTP, of mmjax, vLLM and llama.cpp in one run.

`python -m benchmarks.serving MODEL [--peer VENV] [--peer-llamacpp PROGRAM --gguf FOLDER]
[--dtype float32 bfloat16] [--quantization none int8] [--at-once 1 8 32] [--rates 0.5]
[--rounds 3]`: starts a server for each program and kind of weights, and lets them take turns,
round by round, with the same requests. Each is one picture and a question about it, with an answer
of a fixed number of tokens; pictures are new, or of four that were asked about before. A closed
loop keeps so many requests at once; an open one sends so many a second, at random times. The client
has a process of its own. Prints a table, and writes OUT.json (every sample), OUT.md and OUT.svg.
"""

import argparse
import base64
import json
import multiprocessing
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks import http_load
from benchmarks.bars import Bar, Panel, draw
from benchmarks.http_load import Load, Sample
from benchmarks.pictures import photographs
from benchmarks.servers import Server, start_llamacpp, start_mmjax, start_vllm

NUM_REPEATED = 4
OURS = "mmjax"
Pictures = Literal["new", "known"]


class Case(NamedTuple):
    """One row of the table, for each server."""

    pictures: Pictures
    num_at_once: int = 0
    """Of a closed loop; 0: `rate`."""
    rate: float = 0.0
    """Requests a second of an open loop."""

    @property
    def load(self) -> str:
        """The load in words."""
        return f"{self.num_at_once} at once" if self.num_at_once else f"{self.rate:g} a second"


@dataclass(frozen=True)
class Asked:
    """What the command line asks of every request."""

    max_tokens: int
    side: int
    num_requests: int


@dataclass
class Rounds:
    """The samples of one server in one case."""

    samples: list[list[Sample]] = field(default_factory=list)
    """By round."""

    def quantile(self, metric: Callable[[Sample], float], share: float) -> float:
        """Return a quantile over the samples of all rounds."""
        return float(np.quantile([metric(one) for part in self.samples for one in part], share))

    def medians(self, metric: Callable[[Sample], float]) -> list[float]:
        """Return each round's median."""
        return [statistics.median(map(metric, part)) for part in self.samples]

    @property
    def rates(self) -> list[float]:
        """Return each round's answers a second."""
        return [
            len(part) / (max(one.last_token_s for one in part) - min(one.sent_s for one in part))
            for part in self.samples
        ]


METRICS: Mapping[str, Callable[[Sample], float]] = {
    "TTFT": lambda sample: 1e3 * sample.ttft_s,
    "TPOT": lambda sample: 1e3 * sample.tpot_s,
    "E2E": lambda sample: 1e3 * sample.e2e_s,
}
"""In milliseconds."""

Results = dict[Case, dict[str, Rounds]]
"""Case -> server -> its samples."""


# ---- requests ------------------------------------------------------------------------------------


def make_bodies(case: Case, asked: Asked, first: int) -> list[bytes]:
    """Return a round's requests; `first` is the number of the first, over the whole run."""
    count = max(asked.num_requests, case.num_at_once)
    if case.pictures == "known":
        pictures = known_pictures(asked) * (count // NUM_REPEATED + 1)
    else:
        pictures = photographs(count, asked.side, asked.side, seed=first + 1)
    return [make_body(pictures[n], first + n, asked.max_tokens) for n in range(count)]


def known_pictures(asked: Asked) -> list[bytes]:
    """Return the pictures that are asked about again and again."""
    return photographs(NUM_REPEATED, asked.side, asked.side)


def make_body(picture: bytes, number: int, max_tokens: int) -> bytes:
    """Return a request about a JPEG; the question is another for each `number`."""
    url = "data:image/jpeg;base64," + base64.b64encode(picture).decode()
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": f"Describe the picture number {number} in a few words, please."},
    ]
    return json.dumps(
        {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


def make_load(case: Case, bodies: Sequence[bytes], port: int, seed: int) -> Load:
    """Return the load of one round; an open loop's arrivals are a Poisson process."""
    if case.num_at_once:
        return Load(port, bodies, num_at_once=case.num_at_once)
    chooser = random.Random(seed)
    gaps = [chooser.expovariate(case.rate) for _ in bodies]
    return Load(port, bodies, arrivals_s=[float(at) for at in np.cumsum(gaps)])


# ---- the race ------------------------------------------------------------------------------------


def race(
    servers: Mapping[str, Server], cases: Sequence[Case], rounds: int, asked: Asked
) -> Iterator[Results]:
    """Let the servers take turns in every case; yield what there is behind each turn of all."""
    results: Results = {}
    # A process that has nothing of the servers' start in it, and is there before the first clock.
    context = multiprocessing.get_context("spawn")
    total = (rounds * len(cases) + 1) * len(servers)
    with (
        ProcessPoolExecutor(1, mp_context=context) as client,
        tqdm(total=total, desc="Rounds", unit="round", disable=None) as bar,
    ):
        for name, server in servers.items():
            bar.set_postfix_str(f"{name}, warming up")
            _warm_up(client, server, cases, asked)
            bar.update()
        for number, case in product(range(rounds), cases):
            first = 10**6 * (number + 1) + 10**3 * cases.index(case)
            bodies = make_bodies(case, asked, first)
            for name, server in servers.items():
                bar.set_postfix_str(f"{name}, {case.pictures} pictures, {case.load}")
                load = make_load(case, bodies, server.port, seed=first)
                samples = client.submit(http_load.run, load).result()
                results.setdefault(case, {}).setdefault(name, Rounds()).samples.append(samples)
                bar.update()
            yield results


def _warm_up(
    client: ProcessPoolExecutor, server: Server, cases: Sequence[Case], asked: Asked
) -> None:
    """Ask about the known pictures, and then as many at once as any case does."""
    known = [make_body(one, n, asked.max_tokens) for n, one in enumerate(known_pictures(asked))]
    client.submit(http_load.run, Load(server.port, known, num_at_once=1)).result()
    most = max(case.num_at_once for case in cases) or NUM_REPEATED
    bodies = make_bodies(Case("new", num_at_once=most), asked, 10**5)
    client.submit(http_load.run, Load(server.port, bodies, num_at_once=most)).result()


def start_servers(stack: ExitStack, flags: argparse.Namespace, folder: Path) -> dict[str, Server]:
    """Start all servers, one after the other; `stack` ends them."""
    servers = {}
    for name, start in list_starts(flags).items():
        server = start(folder / f"{name}.log")
        stack.callback(server.end)
        servers[name] = server
        print(f"{name} started in {server.start_s:.1f} s", file=sys.stderr, flush=True)
    return servers


def list_starts(flags: argparse.Namespace) -> dict[str, Callable[[Path], Server]]:
    """Return, by the server's name, what starts it with a file for its log."""
    most = max(flags.at_once)
    sizes = ["--max-model-len", str(flags.max_model_len), "--max-num-seqs", str(most)]
    starts: dict[str, Callable[[Path], Server]] = {}
    for dtype in flags.dtype:
        arguments = [*sizes, "--dtype", dtype]
        for kind in flags.quantization:
            chosen = arguments if kind == "none" else [*arguments, "--quantization", kind]
            name = f"{OURS} {dtype}" if kind == "none" else f"{OURS} {dtype} {kind}"
            starts[name] = partial(start_mmjax, chosen, model=flags.model)
        if flags.peer:
            starts[f"vLLM {dtype}"] = partial(start_vllm, flags.peer, arguments, model=flags.model)
    for kind in flags.gguf_kinds if flags.peer_llamacpp else ():
        files = (flags.peer_llamacpp, flags.gguf, kind)
        starts[f"llama.cpp {kind}"] = partial(start_llamacpp, *files, num_at_once=most)
    return starts


# ---- reports -------------------------------------------------------------------------------------


def table(results: Results) -> str:
    """Return a Markdown table, a row for each case and server."""
    head = [*(f"{name} ms: p50, p99" for name in METRICS), "answers/s", "of the best peer"]
    lines = [
        "| pictures | load | server | " + " | ".join(head) + " |",
        "|---" * (3 + len(head)) + "|",
    ]
    for case, by_server in results.items():
        for name, rounds in by_server.items():
            cells = [
                f"{rounds.quantile(metric, 0.5):.1f}, {rounds.quantile(metric, 0.99):.1f}"
                for metric in METRICS.values()
            ]
            ratios = ", ".join(f"{what} {ratio:.2f}x" for what, ratio in _ratios(name, by_server))
            cells += [f"{statistics.median(rounds.rates):.2f}", ratios or "-"]
            lines.append(f"| {case.pictures} | {case.load} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def memory_table(servers: Mapping[str, Server]) -> str:
    """Return a Markdown table of each server's start and peak memory."""
    lines = ["| server | start s | peak memory MB |", "|---|---|---|"]
    lines += [
        f"| {name} | {server.start_s:.1f} | {server.peak_memory_bytes / 1e6:,.0f} |"
        for name, server in servers.items()
    ]
    return "\n".join(lines) + "\n"


def _ratios(name: str, by_server: Mapping[str, Rounds]) -> Iterator[tuple[str, float]]:
    """Yield how many times as fast as the best peer a server of ours is: medians over rounds."""
    peers = [rounds for other, rounds in by_server.items() if not other.startswith(OURS)]
    if not peers or not name.startswith(OURS):
        return
    for what, metric in METRICS.items():
        best = map(min, zip(*(peer.medians(metric) for peer in peers), strict=True))
        ours = by_server[name].medians(metric)
        yield what, statistics.median(b / o for b, o in zip(best, ours, strict=True))
    best = map(max, zip(*(peer.rates for peer in peers), strict=True))
    pairs = zip(by_server[name].rates, best, strict=True)
    yield "answers/s", statistics.median(o / b for o, b in pairs)


def plot(results: Results, title: str) -> str:
    """Return an SVG: a row for new pictures and one for known ones, a panel for each metric."""
    rows = []
    for pictures in dict.fromkeys(case.pictures for case in results):
        chosen = {case: part for case, part in results.items() if case.pictures == pictures}
        panels = [
            Panel(
                f"{name} in ms, {pictures} pictures: median, p99",
                {
                    case.load: {
                        server: Bar(rounds.quantile(metric, 0.5), rounds.quantile(metric, 0.99))
                        for server, rounds in part.items()
                    }
                    for case, part in chosen.items()
                },
            )
            for name, metric in METRICS.items()
        ]
        answers = {
            case.load: {name: Bar(statistics.median(one.rates)) for name, one in part.items()}
            for case, part in chosen.items()
        }
        rows.append([*panels, Panel(f"answers a second, {pictures} pictures", answers)])
    series = list(dict.fromkeys(name for part in results.values() for name in part))
    return draw(rows, series, title)


def to_json(results: Results, servers: Mapping[str, Server]) -> dict[str, Any]:
    """Return all that was measured, and where."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return {
        "command": sys.argv[1:],
        "commit": commit.stdout.strip(),
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "start_s": {name: server.start_s for name, server in servers.items()},
        "peak_bytes": {name: server.peak_memory_bytes for name, server in servers.items()},
        "cases": [
            {
                **case._asdict(),
                "server": name,
                "rounds": [[sample._asdict() for sample in part] for part in rounds.samples],
            }
            for case, by_server in results.items()
            for name, rounds in by_server.items()
        ],
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a checkpoint's directory")
    parser.add_argument("--peer", type=Path, help="vLLM's virtual environment, or its interpreter")
    parser.add_argument("--peer-llamacpp", type=Path, help="llama.cpp's llama-server")
    parser.add_argument("--gguf", type=Path, help="a folder: text-KIND.gguf, mmproj.gguf")
    parser.add_argument("--gguf-kinds", nargs="+", default=["bf16"], help="bf16, q8_0, q4_0")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--quantization", nargs="+", default=["none"], help="of mmjax")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rates", type=float, nargs="*", default=[0.5], help="of open loops")
    parser.add_argument("--pictures", nargs="+", choices=["new", "known"], default=["new", "known"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16, help="of a round, at least")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--side", type=int, default=512, help="of a picture, in pixels")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("serving"))
    flags = parser.parse_args()
    if flags.peer_llamacpp and not flags.gguf:
        parser.error("--peer-llamacpp needs --gguf, the folder with the model's GGUF files")
    return flags


def main() -> None:
    """Start, race, and report."""
    flags = _parse()
    # The servers are no part of this process's group: they end by the stack alone.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    asked = Asked(flags.max_tokens, flags.side, flags.requests)
    loads = [{"num_at_once": n} for n in flags.at_once] + [{"rate": r} for r in flags.rates]
    cases = [Case(pictures, **load) for pictures in flags.pictures for load in loads]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = start_servers(stack, flags, Path(folder))
        for results in race(servers, cases, flags.rounds, asked):
            write_report(results, servers, flags)
    print(flags.out.with_suffix(".md").read_text())


def write_report(
    results: Results, servers: Mapping[str, Server], flags: argparse.Namespace
) -> None:
    """Write what was measured so far: a race takes long, and may be ended before its last round."""
    text = f"{table(results)}\n{memory_table(servers)}"
    title = f"{Path(flags.model).name}, answers of {flags.max_tokens} tokens"
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.with_suffix(".json").write_text(json.dumps(to_json(results, servers)))
    flags.out.with_suffix(".md").write_text(text)
    flags.out.with_suffix(".svg").write_text(plot(results, title))


if __name__ == "__main__":
    main()
