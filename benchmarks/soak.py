"""Whether a server stays as it is: mixed requests for as long as wanted, and its engine killed.

`python -m benchmarks.soak [--minutes 30] [--restarts 6] [--out soak] [--FLAG ... of mmjax.serve]`:
starts the server with the embedded default, and has clients send pictures that are new or known,
streams, bad input, and requests that they leave (`benchmarks/mixed_requests.py`), one after another
with pauses. At random moments P1 gets SIGKILL. Every so often the clients rest: then nothing may be
held that a request held, and memory, descriptors, threads and segments are compared with what they
were behind the warm-up. Prints a verdict, and writes OUT.svg and OUT.json; exits with 1 if anything
grew, was answered wrongly, or was left behind.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from benchmarks.mixed_requests import MixedClient, UnavailableError, WrongAnswerError
from benchmarks.process_figures import find_engine, measure_processes, measure_segments
from benchmarks.servers import Server, start_mmjax
from benchmarks.soak_report import (
    Record,
    Sample,
    find_unexpected_lines,
    judge,
    plot,
    report,
    to_json,
)

SMALL_CACHES = (
    *("--max-model-len", "512", "--max-num-seqs", "8", "--max-num-batched-tokens", "128"),
    *("--mm-processor-cache-gb", "0.01", "--max-num-stored-responses", "64"),
    *("--precompile", "smallest"),
)
"""So that every cache is full, and throws things out, before anything is judged."""

LAST_KILL = 0.6
"""The share of the time behind which P1 lives on."""
LAST_RESTS = 3
"""Of that P1, at least; a slow machine gets more time for them."""

_SAMPLE_S = 2.0
_IDLE_S = 600.0
_READY_S = 1800.0
_END_S = 60.0
_MIB = 2**20
_HELD = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "mmjax:encoder_cache_usage_perc",
    "mmjax:num_requests_processing",
)
"""Metrics that are 0 while nobody asks for anything."""


class Soak:
    """One run against one server."""

    def __init__(self, server: Server, *, seconds: float, num_kills: int, seed: int) -> None:
        self.record = Record()
        self._server = server
        self._seconds = seconds
        self._rng = random.Random(seed)
        kill_times = (self._rng.uniform(0.1, LAST_KILL) for _ in range(num_kills))
        self._kills_at_s = sorted(share * seconds for share in kill_times)
        self._rest_every_s = min(45.0, max(8.0, seconds / 12))
        self._client = MixedClient(server.port)
        self._start = time.monotonic()
        self._may_send = asyncio.Event()
        self._num_talking = 0
        self._restarting_since: float | None = None
        self._num_rests = 0
        """Since P1 was killed last."""
        self._ready_again_at = -1.0

    async def run(self, *, num_clients: int, pause_s: float) -> None:
        """Let the clients talk until the time is over."""
        await self._wait_compiled()
        self._start = time.monotonic()
        self._may_send.set()
        tasks = [
            asyncio.create_task(self._talk(random.Random(self._rng.random()), pause_s))
            for _ in range(num_clients)
        ]
        tasks.append(asyncio.create_task(self._sample_often()))
        tasks.append(asyncio.create_task(self._kill_engines()))
        try:
            await self._rest_often(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._start

    # ---- clients --------------------------------------------------------------------------------

    async def _talk(self, rng: random.Random, pause_s: float) -> None:
        while True:
            await self._may_send.wait()
            self._num_talking += 1
            try:
                await self._talk_once(rng)
            finally:
                self._num_talking -= 1
            await asyncio.sleep(rng.expovariate(1 / pause_s))

    async def _talk_once(self, rng: random.Random) -> None:
        record, begun_s = self.record, self._now_s
        try:
            outcome = await self._client.send_any(rng)
            record.outcomes.append((self._now_s, outcome))
        except UnavailableError as error:
            if self._restarting_since is not None or begun_s <= self._ready_again_at:
                record.lost.append((self._now_s, str(error)))
            else:
                self._note_wrong(str(error))
        except WrongAnswerError as error:
            self._note_wrong(str(error))

    def _note_wrong(self, what: str) -> None:
        self.record.wrong.append((self._now_s, what))
        tqdm.write(f"after {self._now_s:.0f} s: {what[:300]}", sys.stderr)

    # ---- figures --------------------------------------------------------------------------------

    async def _sample_often(self) -> None:
        while True:
            if self._may_send.is_set():
                await self._sample(is_quiet=False)
            await asyncio.sleep(_SAMPLE_S)

    async def _sample(self, *, is_quiet: bool) -> None:
        pid, at_s = self._server.process.pid, self._now_s
        processes = await asyncio.to_thread(measure_processes, pid)
        segments = measure_segments(pid)
        num_restarts = len(self.record.kills_s)
        self.record.samples.append(Sample(at_s, processes, segments, is_quiet, num_restarts))

    async def _rest_often(self, tasks: Sequence["asyncio.Task[None]"]) -> None:
        """Rest every so often, and at the end; raises what a task raised."""
        with tqdm(total=round(self._seconds), desc="Soaking", unit="s", disable=None) as bar:
            while (left_s := self._seconds - self._now_s) > 0 or self._num_rests < LAST_RESTS:
                rest_at_s = self._now_s + min(self._rest_every_s, max(left_s, 1.0))
                while (rest_s := rest_at_s - self._now_s) > 0:
                    done, _ = await asyncio.wait(
                        tasks, timeout=min(1.0, rest_s), return_when=asyncio.FIRST_EXCEPTION
                    )
                    for task in done:
                        task.result()
                    self._show(bar)
                async with self._resting():
                    await self._sample(is_quiet=True)

    @asynccontextmanager
    async def _resting(self) -> AsyncIterator[None]:
        self._may_send.clear()
        while self._num_talking or self._restarting_since is not None:
            await asyncio.sleep(0.05)
        await self._wait_compiled()
        held = await self._wait_idle()
        if held:
            self.record.not_idle.append(f"after {self._now_s:.0f} s: {held}")
        yield
        self._num_rests += 1
        self._may_send.set()

    async def _wait_idle(self) -> dict[str, float]:
        """Wait until nothing is held; return what still is after `_IDLE_S`."""
        end = time.monotonic() + _IDLE_S
        while True:
            metrics = await self._read_metrics()
            held = {name: metrics[name] for name in _HELD if metrics[name]}
            if not held or time.monotonic() > end:
                return held
            await asyncio.sleep(0.2)

    async def _read_metrics(self) -> dict[str, float]:
        text = (await self._client.expect_200("GET", "/metrics")).body.decode()
        families = text_string_to_metric_families(text)
        return {sample.name: sample.value for family in families for sample in family.samples}

    async def _is_compiled(self) -> bool:
        return (await self._read_metrics()).get("mmjax:programs_left", 1) == 0

    async def _wait_compiled(self) -> None:
        end = time.monotonic() + _READY_S
        while not await self._is_compiled():
            assert time.monotonic() < end, f"programs are not compiled after {_READY_S:.0f} s"
            await asyncio.sleep(0.2)

    # ---- kills ----------------------------------------------------------------------------------

    async def _kill_engines(self) -> None:
        for at_s in self._kills_at_s:
            await asyncio.sleep(max(0.0, at_s - self._now_s))
            # What is held while P1 is not there is known to nobody.
            await self._may_send.wait()
            pid = find_engine(self._server.process.pid)
            assert pid is not None, "the server has no engine"
            self._restarting_since = self._now_s
            self.record.kills_s.append(self._now_s)
            os.kill(pid, signal.SIGKILL)
            await self._wait_ready(len(self.record.kills_s))
            self._num_rests = 0
            self._ready_again_at, self._restarting_since = self._now_s, None

    async def _wait_ready(self, num_restarts: int) -> None:
        end = time.monotonic() + _READY_S
        while True:
            metrics = await self._read_metrics()
            answer = await self._client.exchange("GET", "/ready")
            if metrics["mmjax:engine_restarts_total"] >= num_restarts and answer.status == 200:
                return
            assert time.monotonic() < end, f"no engine {_READY_S:.0f} s after it was killed"
            await asyncio.sleep(0.1)

    def _show(self, bar: Any) -> None:
        record = self.record
        last = record.samples[-1].processes.values() if record.samples else ()
        rss = sum(one.rss_bytes for one in last) / _MIB
        bar.set_postfix_str(
            f"{len(record.outcomes)} conversations, {len(record.wrong)} wrong, "
            f"{len(record.lost)} lost to {len(record.kills_s)} kills, {rss:.0f} MiB",
            refresh=False,
        )
        bar.update(min(round(self._now_s), bar.total) - bar.n)


# ---- the run -------------------------------------------------------------------------------------


def run(
    arguments: Sequence[str],
    folder: Path,
    *,
    seconds: float,
    num_kills: int,
    num_clients: int = 6,
    pause_s: float = 1.0,
    seed: int = 0,
) -> Record:
    """Start a server in `folder`, soak it, end it; return what was seen."""
    # What it makes among temporary files is seen there at its end.
    temporary = folder / "t"
    temporary.mkdir()
    server = start_mmjax(
        [*SMALL_CACHES, *arguments], folder / "log", env={"TMPDIR": str(temporary)}
    )
    try:
        soak = Soak(server, seconds=seconds, num_kills=num_kills, seed=seed)
        asyncio.run(soak.run(num_clients=num_clients, pause_s=pause_s))
        soak.record.left_behind += end_and_list_left(server)
    finally:
        server.end()
    record = soak.record
    record.exit_code = server.process.returncode
    # Other libraries have folders of their own there.
    record.left_behind += [path.name for path in temporary.glob("mmjax-*")]
    record.log_lines = find_unexpected_lines(server.log.read_text())
    return record


def end_and_list_left(server: Server) -> list[str]:
    """Send SIGTERM, and return what is still there when P0 is not."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(_END_S)
    # Python's resource tracker ends last, and would then tell of what nobody has freed.
    _, left = psutil.wait_procs(children, timeout=_END_S)
    segments = measure_segments(server.process.pid)
    return [f"process {one.pid}" for one in left] + ["a segment"] * segments.num_files


def main() -> int:
    """Soak, judge, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--restarts", type=int, default=6, help="how often P1 is killed")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--pause", type=float, default=1.0, help="of a client, seconds on average")
    parser.add_argument("--max-growth-mib", type=float, default=16.0, help="of each part's memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("soak"))
    flags, arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        record = run(
            arguments,
            Path(folder),
            seconds=60 * flags.minutes,
            num_kills=flags.restarts,
            num_clients=flags.clients,
            pause_s=flags.pause,
            seed=flags.seed,
        )
    checks = judge(record, seconds=60 * flags.minutes, max_growth_bytes=_MIB * flags.max_growth_mib)
    title = f"mmjax.serve under {flags.clients} clients; dashed: P1 was killed"
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.with_suffix(".svg").write_text(plot(record, title))
    flags.out.with_suffix(".json").write_text(json.dumps(to_json(record)))
    print(report(record, checks, 60 * flags.minutes))
    return 0 if all(check.is_passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
