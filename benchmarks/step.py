"""What a step costs: the host's part, and prompts and decoding beside other programs.

`python -m benchmarks.step [--peer PYTHON] [--rounds 5] [--cores N] [--dtype bfloat16]
[--only host|prefill|decode]` prints the tables. The host's part is that of 64 running requests.
Prompts and decoding, behind 600 tokens, are of a Gemma 3 decoder (18 layers of width 640, 262,208
tokens) in `--dtype`; HF transformers, and vLLM where `PYTHON` has it, get the same weights and take
turns with mmjax in the same run, each in a process of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.step_model import make_engine, make_request, text_config, write_checkpoint

CONTEXT = 600
BATCHES = (1, 8)
PROMPTS = (10, 30, 60, 120, 250)


class Stopwatch:
    """Adds up, step by step, the wall time inside of functions that it wraps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Time `owner.method` under `name`."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        setattr(owner, method, timed)


def measure_host(num_running: int, num_steps: int) -> None:
    """Print where the host's time goes while `num_running` requests decode.

    The model is narrow and deep: a short step on the device, and as many arrays to pass as a large
    one has. Overlap is off: on a CPU both would share the cores, and each would slow the other;
    so they do in `dispatch` (the transfer and the calls of `step` and `sample`), for the device
    begins before the last of them.
    """
    text = text_config(vocab_size=1024, hidden_size=64, intermediate_size=64, head_dim=16)
    core = make_engine(
        text, max_num_seqs=num_running, max_num_batched_tokens=num_running, async_scheduling=False
    )
    for number in range(num_running):
        core.add_request(make_request(number, 8, num_steps + 60))
    while core.stats().num_waiting:
        core.step()
    for _ in range(20):
        core.step()
    watch = Stopwatch()
    watch.wrap(core._scheduler, "schedule", "schedule")
    watch.wrap(core._runner._builder, "build", "build")
    watch.wrap(core._runner, "dispatch", "build and dispatch")
    watch.wrap(core._runner, "read", "read (waits for the device)")
    watch.wrap(core._scheduler, "update_from_output", "update")
    rows: dict[str, list[float]] = defaultdict(list)
    for _ in range(num_steps):
        watch.seconds.clear()
        start = time.perf_counter()
        deltas = core.step()
        total = time.perf_counter() - start
        assert len(deltas) == num_running
        parts = dict(watch.seconds)
        parts["dispatch"] = parts.pop("build and dispatch") - parts["build"]
        parts["other"] = total - sum(parts.values())
        read, calls = parts["read (waits for the device)"], parts["dispatch"]
        parts["outside the device calls"] = total - read - calls
        for name, seconds in parts.items():
            rows[name].append(seconds * 1e6)
    print(f"host time of a step, {num_running} running requests, microseconds (median, p90):")
    for name, values in rows.items():
        ordered = sorted(values)
        print(
            f"  {name:28} {statistics.median(ordered):8.0f} {ordered[len(ordered) * 9 // 10]:8.0f}"
        )


class Worker:
    """One program in a process of its own."""

    def __init__(self, python: str, kind: str, checkpoint: str, dtype: str, num_cores: int) -> None:
        script = Path(__file__).with_name("step_worker.py")
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:num_cores]))
        self._process = subprocess.Popen(
            ["taskset", "-c", cores, python, str(script), kind, checkpoint, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if kind != "mmjax" else None,
            text=True,
            env=_environment(kind, num_cores),
        )

    def run(self, batch: int, context: int, tokens: int) -> dict[str, float]:
        """Return `first_s` and `decode_s` of `batch` prompts and `tokens` more for each."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        task = {"batch": batch, "context": context, "tokens": tokens}
        print(json.dumps(task), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _environment(kind: str, num_cores: int) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": f"{num_cores}"}
    if kind == "mmjax":
        environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    return environment


@contextmanager
def running_workers(peer: str | None, dtype: str, num_cores: int) -> Iterator[dict[str, Worker]]:
    """Start all programs over one checkpoint; end them behind the block."""
    with tempfile.TemporaryDirectory() as checkpoint:
        write_checkpoint(Path(checkpoint))
        pythons = {"mmjax": sys.executable, "hf": sys.executable}
        if peer is not None:
            pythons["vllm"] = peer
        workers = {
            name: Worker(python, name, checkpoint, dtype, num_cores)
            for name, python in pythons.items()
        }
        yield workers
        for worker in workers.values():
            worker.close()


def measure_prefill(workers: Mapping[str, Worker], rounds: int) -> None:
    """Print the time to the first token of one prompt, and the best other's over mmjax's."""
    print(f"milliseconds to the first token of one prompt, median of {rounds} rounds:")
    for length in PROMPTS:
        task = {"batch": 1, "context": length, "tokens": 1}
        medians = {name: _median(runs, "first_s") for name, runs in _race(workers, rounds, task)}
        best = min(value for name, value in medians.items() if name != "mmjax")
        cells = ", ".join(f"{name} {1e3 * value:.1f}" for name, value in medians.items())
        print(f"  {length} tokens: {cells}; best other / mmjax: {best / medians['mmjax']:.2f}")


def measure_decode(workers: Mapping[str, Worker], rounds: int, tokens: int) -> None:
    """Print decoded tokens a second of all programs, and mmjax's share of the best other."""
    print(f"decoded tokens/s behind {CONTEXT} tokens, median of {rounds} rounds:")
    for batch in BATCHES:
        task = {"batch": batch, "context": CONTEXT, "tokens": tokens}
        races = _race(workers, rounds, task)
        speeds = {name: batch * tokens / _median(runs, "decode_s") for name, runs in races}
        best = max(value for name, value in speeds.items() if name != "mmjax")
        cells = ", ".join(f"{name} {value:.1f}" for name, value in speeds.items())
        ratio = speeds["mmjax"] / best
        print(f"  batch {batch}: {cells}; mmjax / best other: {ratio:.2f}", flush=True)


def _race(
    workers: Mapping[str, Worker], rounds: int, task: dict[str, int]
) -> Iterable[tuple[str, list[dict[str, float]]]]:
    """Let the programs take turns, after one that does not count."""
    for worker in workers.values():
        worker.run(**{**task, "tokens": 2})
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name, worker in workers.items():
            runs[name].append(worker.run(**task))
    return runs.items()


def _median(runs: Iterable[Mapping[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peer", default=None, help="an interpreter that has vLLM")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="decoded in a round")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", choices=("host", "prefill", "decode"), default=None)
    flags = parser.parse_args()
    if flags.only in (None, "host"):
        measure_host(64, 200)
    if flags.only != "host":
        with running_workers(flags.peer, flags.dtype, flags.cores) as workers:
            if flags.only != "decode":
                measure_prefill(workers, flags.rounds)
            if flags.only != "prefill":
                measure_decode(workers, flags.rounds, flags.tokens)


if __name__ == "__main__":
    main()
