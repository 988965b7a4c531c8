"""What a server does when ten times as many ask as it can answer.

`python -m benchmarks.overload [--times 10] [--seconds 60] [server arguments]`: starts the server
with the embedded default, or as the server's arguments say (a model first, then its flags),
measures its peak (as many clients as it runs sequences, each with a request about a new picture as
soon as its last one is answered), and then sends requests at ten times that rate, at random times,
from another process. Prints how fast the excess is refused, how much is answered meanwhile, and a
verdict; exits with 1 if it is not as docs/reliability.md promises.
"""

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import count, cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from benchmarks.http_load import make_head, read_chunks
from benchmarks.mixed_requests import MixedClient, chat_about, make_picture
from benchmarks.servers import Server, start_mmjax

MAX_REFUSAL_S = 0.05
MIN_GOODPUT = 0.95
NUM_SEQS = 8
NUM_QUEUED = 24
SETTINGS = (
    *("--max-model-len", "512", "--max-num-seqs", str(NUM_SEQS)),
    *("--max-num-queued-reqs", str(NUM_QUEUED)),
)
_TIMEOUT_S = 120.0
_NUM_BODIES = 512
_MAX_PEAK_REQUESTS = 10**6
"""Numbers of pictures that are kept for each load."""
_NUMBER = b"numbered!"
"""Behind a picture's file, where decoders do not look: a number of its own makes it a new one."""


class Answer(NamedTuple):
    """One request's; times in seconds since the load began."""

    sent_s: float
    ended_s: float
    status: int
    """0: there was none."""
    has_retry_after: bool


class Load(NamedTuple):
    """Requests to send; the bodies again and again, each time numbered anew."""

    port: int
    bodies: Sequence[bytes]
    first_number: int
    seconds: float
    num_at_once: int = 0
    """Of a closed loop; 0: an open one."""
    rate: float = 0.0
    """Requests a second of an open loop."""


def make_bodies(seed: int) -> list[bytes]:
    """Return requests about pictures, each with room for its number."""
    rng = random.Random(seed)
    return [
        json.dumps(
            chat_about([_with_room(make_picture(rng))], ignore_eos=True, max_tokens=16)
        ).encode()
        for _ in range(_NUM_BODIES)
    ]


def _with_room(url: str) -> str:
    head, _, encoded = url.partition(",")
    data = base64.b64decode(encoded)
    # Whole groups of three bytes before the number, so that its text is its own.
    data += bytes(-len(data) % 3)
    return f"{head},{base64.b64encode(data + _NUMBER).decode()}"


def number_body(body: bytes, number: int) -> bytes:
    """Return the request with a picture that no other number has."""
    digits = base64.b64encode(b"%09d" % number)
    return body.replace(base64.b64encode(_NUMBER), digits)


def run(load: Load) -> list[Answer]:
    """Send the load, and wait for all answers."""
    return asyncio.run(_closed_loop(load) if load.num_at_once else _open_loop(load))


def _numbered(load: Load) -> Iterator[bytes]:
    numbers = count(load.first_number)
    return (number_body(body, number) for body, number in zip(cycle(load.bodies), numbers))


async def _closed_loop(load: Load) -> list[Answer]:
    start, answers = time.perf_counter(), []
    bodies = _numbered(load)

    async def be_a_client() -> None:
        while time.perf_counter() - start < load.seconds:
            answers.append(await _ask(load.port, next(bodies), start))

    await asyncio.gather(*(be_a_client() for _ in range(load.num_at_once)))
    return answers


async def _open_loop(load: Load) -> list[Answer]:
    rng, start, at_s, tasks = random.Random(0), time.perf_counter(), 0.0, []
    bodies = _numbered(load)
    while (at_s := at_s + rng.expovariate(load.rate)) < load.seconds:
        await asyncio.sleep(start + at_s - time.perf_counter())
        tasks.append(asyncio.create_task(_ask(load.port, next(bodies), start)))
    return await asyncio.gather(*tasks)


async def _ask(port: int, body: bytes, start: float) -> Answer:
    sent_s, head = time.perf_counter() - start, b""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(make_head(port, body) + body)
                head = await reader.readuntil(b"\r\n\r\n")
                async for _ in read_chunks(reader):
                    pass
            finally:
                writer.transport.abort()
    except (OSError, asyncio.IncompleteReadError):  # TimeoutError is an OSError
        head = b""
    status = int(head.split(b" ", 2)[1]) if head else 0
    has_retry_after = b"\r\nretry-after:" in head.lower()
    return Answer(sent_s, time.perf_counter() - start, status, has_retry_after)


def count_decoded(server: Server) -> float:
    """Return how many requests have had a picture decoded."""
    answer = asyncio.run(MixedClient(server.port).expect_200("GET", "/metrics"))
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            if sample.name == "mmjax:image_decode_time_seconds_count":
                return sample.value
    raise ValueError("the server has no metric of decoded pictures")


def goodput(answers: Sequence[Answer], seconds: float) -> float:
    """Return the answers a second behind the first one, and behind a tenth of the time.

    Before, the queue fills, or a slow model is still at its first ones.
    """
    ends_s = [one.ended_s for one in answers if one.status == 200 and one.ended_s < seconds]
    first_s = max(seconds / 10, min(ends_s, default=seconds))
    num_behind = sum(end_s > first_s for end_s in ends_s)
    return num_behind / (seconds - first_s) if num_behind else 0.0


def report(
    answers: Sequence[Answer], *, peak: float, seconds: float, num_decoded: float
) -> tuple[str, bool]:
    """Return a text, and whether the promises hold."""
    refused = [one for one in answers if one.status == 429]
    times_s = [one.ended_s - one.sent_s for one in refused] or [float("inf")]
    p99_s = float(np.quantile(times_s, 0.99))
    share = goodput(answers, seconds) / peak
    statuses = Counter(one.status for one in answers)
    checks = {
        f"refused in {1e3 * np.median(times_s):.1f} ms (median), {1e3 * p99_s:.1f} ms (p99); "
        f"at most {1e3 * MAX_REFUSAL_S:.0f} ms": p99_s <= MAX_REFUSAL_S,
        "every refusal has a Retry-After": all(one.has_retry_after for one in refused),
        f"goodput {share:.3f} of the peak of {peak:.2f} answers a second; "
        f"at least {MIN_GOODPUT}": share >= MIN_GOODPUT,
        f"answers are 200 or 429: {dict(statuses)}": set(statuses) <= {200, 429},
        f"{num_decoded:.0f} requests had pictures decoded, and {statuses[200]} were answered": (
            num_decoded == statuses[200]
        ),
    }
    lines = [f"{'ok    ' if passed else 'FAILED'} {text}" for text, passed in checks.items()]
    return "\n".join(lines), all(checks.values())


def main() -> int:
    """Measure, and judge."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--times N] [--seconds S] [--peak-seconds S] [server arguments]",
        epilog="All other arguments go to `python -m mmjax.serve`: a model, and any of its flags.",
        # Else a shortened flag of the server's would be taken for one of these.
        allow_abbrev=False,
    )
    parser.add_argument("--times", type=float, default=10.0, help="the peak")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--peak-seconds", type=float, default=60.0)
    flags, arguments = parser.parse_known_args()
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=context) as client,
        tqdm(total=3, desc="Overload", unit="load", disable=None) as bar,
    ):
        # The client stands for other machines: what it measures must not be its own waiting for a
        # core. So it is started first, and the server gives way to it.
        client.submit(os.getpid).result()
        os.nice(5)
        server = start_mmjax([*SETTINGS, *arguments], Path(folder) / "log")
        try:
            bodies = make_bodies(0)
            answers: list[Answer] = []
            for number, seconds in ((0, 5.0), (1, flags.peak_seconds)):
                load = Load(
                    server.port, bodies, number * _MAX_PEAK_REQUESTS, seconds, num_at_once=NUM_SEQS
                )
                answers = client.submit(run, load).result()
                bar.update()
            peak = goodput(answers, flags.peak_seconds)
            bar.set_postfix_str(f"peak {peak:.2f} answers a second")
            before = count_decoded(server)
            first = 2 * _MAX_PEAK_REQUESTS
            load = Load(server.port, bodies, first, flags.seconds, rate=flags.times * peak)
            answers = client.submit(run, load).result()
            bar.update()
            num_decoded = count_decoded(server) - before
        finally:
            server.end()
    text, is_good = report(answers, peak=peak, seconds=flags.seconds, num_decoded=num_decoded)
    print(text)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
