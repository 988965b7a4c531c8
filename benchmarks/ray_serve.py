"""Two replicas of the embedded default on Ray Serve: hit rates, deaths, updates, scaling, latency.

`python -m benchmarks.ray_serve [--only NAME ...] [--mode front header] [--out FILE.json]`, in an
environment with `mmjax[ray]`. Each experiment counts what its clients lost, and compares texts with
those of one server. Prints each figure as it comes, for docs/scaling.md.
"""

import argparse
import asyncio
import base64
import io
import json
import platform
import random
import statistics
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
from PIL import Image

from benchmarks.ray_cluster import RayCluster, wait_until
from benchmarks.servers import start_mmjax

_TIMEOUT_S = 300.0
_MAX_TRIES = 5
SERVER_ARGS = {"precompile": "all", "max_num_seqs": 16}
REPLICA_ARGS = {**SERVER_ARGS, "num_cpus": 1}


def picture(seed: int, pixels: int = 64) -> str:
    """Return a picture that no other seed has, as a data URL."""
    noise = np.random.default_rng(seed).integers(0, 256, (pixels, pixels, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def question(text: str, url: str | None = None) -> dict[str, Any]:
    """Return a user's message."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if url is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {"role": "user", "content": parts}


@dataclass
class Answer:
    """What a client got."""

    text: str = ""
    error: str = ""
    is_whole: bool = False
    """Whether the stream came to its end."""
    num_chunks: int = 0
    last_event: str = ""
    """The `id` of the last one, if they have some."""


async def stream(
    client: httpx2.AsyncClient,
    body: Mapping[str, Any],
    on_chunk: Callable[[], None] = lambda: None,
    headers: Mapping[str, str] | None = None,
    answer: Answer | None = None,
) -> Answer:
    """Ask for a stream, and read it; errors are in the answer. `answer`: what came before."""
    answer = Answer() if answer is None else answer
    number = ""
    try:
        async with client.stream(
            "POST", "/v1/chat/completions", json={**body, "stream": True}, headers=headers
        ) as response:
            if response.status_code != 200:
                await response.aread()
                answer.error = f"{response.status_code}: {response.text[:200]}"
                return answer
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    number = line.removeprefix("id: ")
                elif line.startswith("data: "):
                    _take(answer, line)
                    answer.last_event = number
                on_chunk()
    except httpx2.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def resumed(
    client: httpx2.AsyncClient, body: Mapping[str, Any], on_chunk: Callable[[], None]
) -> Answer:
    """Ask for a stream, and for the rest of it when it is cut, as docs/scaling.md says."""
    answer, headers = Answer(), {"idempotency-key": uuid.uuid4().hex}
    for number in range(_MAX_TRIES):
        await asyncio.sleep(0.5 * number)
        answer.error = ""
        await stream(client, body, on_chunk, headers, answer)
        if answer.is_whole:
            break
        if answer.last_event:
            headers["last-event-id"] = answer.last_event
    return answer


async def not_streamed(
    client: httpx2.AsyncClient, body: Mapping[str, Any], on_chunk: Callable[[], None]
) -> Answer:
    """Ask as OpenAI's client does by itself."""
    # An own name of the engine's, which this client does not know.
    known = {name: value for name, value in body.items() if name != "ignore_eos"}
    url = f"{str(client.base_url).rstrip('/')}/v1"
    try:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as own:
            model = (await own.models.list()).data[0].id
            for _ in range(4):
                on_chunk()
            answer = await own.chat.completions.create(
                model=model, **known, extra_body={"ignore_eos": True}
            )
    except openai.OpenAIError as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    return Answer(answer.choices[0].message.content or "", is_whole=True)


def _take(answer: Answer, line: str) -> None:
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        answer.is_whole = not answer.error
    elif data.startswith("{"):
        event = json.loads(data)
        answer.error = answer.error or json.dumps(event.get("error") or "").strip('"')
        for choice in event.get("choices", ()):
            answer.text += choice["delta"].get("content") or ""
            answer.num_chunks += 1


def _client(url: str) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=256)
    return httpx2.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits)


# ---- hit rates ----------------------------------------------------------------------------------


@dataclass
class HitRates:
    """Shares of look-ups that were hits."""

    num_images: int = 0
    num_known_images: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def processor(self) -> float:
        """Of images in the processor cache."""
        return self.num_known_images / max(1, self.num_images)

    @property
    def prefix(self) -> float:
        """Of prompt tokens in the prefix cache."""
        return self.num_cached_tokens / max(1, self.num_tokens)

    def add(self, answer: Mapping[str, Any]) -> None:
        """Count one answer."""
        usage = answer["usage"]
        self.num_tokens += usage["prompt_tokens"]
        self.num_cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        for item in answer["metrics"]["items"]:
            self.num_images += 1
            self.num_known_images += item["processing"] == "processor_cache"


async def hit_rates(
    url: str,
    *,
    num_chats: int = 60,
    num_at_once: int = 4,
    seed: int = 0,
    sends_session: bool = True,
) -> HitRates:
    """Hold chats of two turns, each about a picture of its own, in random order."""
    rates, turns = HitRates(), Counter[int]()
    histories: dict[int, list[dict[str, Any]]] = {}
    order = [chat for chat in range(num_chats) for _ in range(2)]
    random.Random(seed).shuffle(order)
    locks = [asyncio.Lock() for _ in range(num_chats)]
    queue = iter(order)

    async def turn(client: httpx2.AsyncClient, chat: int) -> None:
        async with locks[chat]:
            turns[chat] += 1
            messages = histories.setdefault(chat, [])
            first = picture(1000 * seed + chat) if turns[chat] == 1 else None
            messages.append(question("what is it?" if first else "which color?", first))
            headers = {"x-session-id": f"chat {seed} {chat}"} if sends_session else {}
            body = {"messages": messages, "max_tokens": 8, "temperature": 0, "return_metrics": True}
            response = await client.post("/v1/chat/completions", json=body, headers=headers)
            response.raise_for_status()
            answer = response.json()
            messages.append(answer["choices"][0]["message"])
            rates.add(answer)

    async with _client(url) as client:

        async def work() -> None:
            for chat in queue:
                await turn(client, chat)

        await asyncio.gather(*(work() for _ in range(num_at_once)))
    return rates


# ---- deaths -------------------------------------------------------------------------------------


def long_bodies(number: int, *, max_tokens: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Return chats with long answers: greedy and seeded ones, with and without a picture."""
    return [
        {
            "messages": [
                question(f"number {i}: what is it?", picture(seed + i) if i % 2 else None)
            ],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            **({"temperature": 0} if i % 4 < 2 else {"temperature": 1.0, "seed": i}),
        }
        for i in range(number)
    ]


@dataclass
class Losses:
    """What clients lost."""

    num_requests: int = 0
    lost: list[str] = field(default_factory=list)
    """The errors of requests without a whole answer."""
    num_different: int = 0
    """Whole answers with another text than undisturbed."""
    seconds: float = 0.0

    def add(self, answer: Answer, expected: str | None) -> None:
        """Count one answer; `expected`: the undisturbed text."""
        self.num_requests += 1
        if not answer.is_whole:
            self.lost.append(answer.error or "cut off")
        elif expected is not None and answer.text != expected:
            self.num_different += 1


async def undisturbed(url: str, bodies: list[dict[str, Any]]) -> list[str]:
    """Return the texts that a server gives."""
    async with _client(url) as client:
        found = await asyncio.gather(*(stream(client, body) for body in bodies))
    assert all(one.is_whole for one in found), [one.error for one in found]
    return [one.text for one in found]


async def kill_under_streams(
    cluster: RayCluster,
    which: str,
    bodies: list[dict[str, Any]],
    expected: list[str],
    ask: Callable[..., Awaitable[Answer]] = stream,
) -> Losses:
    """SIGKILL a replica's P0 or P1, or a front, when half of the streams have shown some text."""
    losses, progress = Losses(), Counter[int]()
    started = time.monotonic()

    async def kill() -> None:
        while sum(count >= 4 for count in progress.values()) < len(bodies) / 2:
            await asyncio.sleep(0.01)
        if which == "front":
            (await asyncio.to_thread(cluster.fronts))[0].kill()
        else:
            getattr((await asyncio.to_thread(cluster.replicas))[0], which).kill()

    async with _client(cluster.url) as client:
        killing = asyncio.create_task(kill())
        found = await asyncio.gather(
            *(ask(client, body, lambda i=i: progress.update([i])) for i, body in enumerate(bodies))
        )
        await killing
    for answer, text in zip(found, expected, strict=True):
        losses.add(answer, text)
    losses.seconds = time.monotonic() - started
    return losses


# ---- updates and scaling ------------------------------------------------------------------------


async def under_load(
    url: str,
    bodies: list[dict[str, Any]],
    expected: list[str],
    change: Callable[[], Awaitable[None]],
    *,
    num_at_once: int = 4,
) -> Losses:
    """Ask again and again while `change` runs."""
    losses, is_over, started = Losses(), asyncio.Event(), time.monotonic()

    async def ask(client: httpx2.AsyncClient, first: int) -> None:
        number = first
        while not is_over.is_set():
            index = number % len(bodies)
            headers = {"x-session-id": f"chat {index}"}
            losses.add(await stream(client, bodies[index], headers=headers), expected[index])
            number += num_at_once

    async with _client(url) as client:
        asking = [asyncio.create_task(ask(client, i)) for i in range(num_at_once)]
        try:
            await change()
        finally:
            is_over.set()
        await asyncio.gather(*asking)
    losses.seconds = time.monotonic() - started
    return losses


async def update(cluster: RayCluster, args: Mapping[str, Any]) -> None:
    """Deploy again, with other settings; wait until the old replicas are gone."""
    old = {one.p0.pid for one in await asyncio.to_thread(cluster.replicas)}
    cluster.begin_deploy(args)
    await asyncio.to_thread(cluster.wait_deployed)

    def are_gone() -> bool:
        return not old & {one.p0.pid for one in cluster.replicas()}

    await asyncio.to_thread(wait_until, are_gone)


# ---- latency ------------------------------------------------------------------------------------


async def latencies(url: str, *, number: int = 60, pixels: int | None = None) -> list[float]:
    """Return the seconds of requests for one token, one after the other."""
    found: list[float] = []
    async with _client(url) as client:
        for i in range(number + 5):
            seen = None if pixels is None else picture(7_000_000 + i, pixels)
            body = {"messages": [question("?", seen)], "max_tokens": 1, "temperature": 0}
            start = time.perf_counter()
            (await client.post("/v1/chat/completions", json=body)).raise_for_status()
            found.append(time.perf_counter() - start)
    # The first ones open connections.
    return found[5:]


# ---- the report ---------------------------------------------------------------------------------


@contextmanager
def one_server(folder: Path) -> Iterator[str]:
    """Serve at a port, without Ray."""
    flags = [part for name, value in SERVER_ARGS.items() for part in _flag(name, value)]
    server = start_mmjax(flags, folder / "server.log")
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.end()


def _flag(name: str, value: Any) -> list[str]:
    # `start_mmjax` gives it itself.
    return [] if name == "precompile" else [f"--{name.replace('_', '-')}", str(value)]


def cluster_of(folder: Path, mode: str, **args: Any) -> RayCluster:
    """Start replicas in a cluster of their own."""
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    settings = {"mode": mode, "num_replicas": 2, **REPLICA_ARGS, **args}
    return RayCluster(settings, port=port, log=folder / f"ray_{mode}.log")


EXPERIMENTS = ("hits", "latency", "p1", "p0", "update", "scale", "front")


CLIENTS = {
    "streams": stream,
    "streams with a key": resumed,
    "OpenAI's client, not streamed": not_streamed,
}


class Report:
    """What was measured, printed as it comes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.figures: dict[str, Any] = {}

    def add(self, name: str, figure: Any) -> None:
        """Add a figure."""
        self.figures[name] = figure
        print(f"{self.name}: {name}: {figure}", flush=True)


async def _measure_both(url: str, report: Report, only: Sequence[str]) -> None:
    """Measure what one server and a cluster have alike."""
    if "hits" in only:
        # Not 0: the streams' pictures are known already.
        rates = [await hit_rates(url, seed=seed) for seed in (1, 2)]
        report.add("processor", [round(one.processor, 3) for one in rates])
        report.add("prefix", [round(one.prefix, 3) for one in rates])
    if "latency" in only:
        for name, pixels in (("text", None), ("picture", 210)):
            times = await latencies(url, pixels=pixels)
            report.add(f"p50 {name}, ms", round(1e3 * statistics.median(times), 1))


def _told(losses: Losses) -> str:
    lost = f"{len(losses.lost)} of {losses.num_requests} lost"
    why = "".join(f"; {reason}" for reason in sorted(set(losses.lost))[:3])
    return f"{lost}, {losses.num_different} other texts, {losses.seconds:.0f} s{why}"


async def _measure_cluster(
    folder: Path,
    report: Report,
    bodies: list[dict[str, Any]],
    texts: list[str],
    only: Sequence[str],
) -> None:
    mode = report.name
    if "front" in only and mode == "front":
        with cluster_of(folder, mode, num_fronts=2) as cluster:
            for name, ask in CLIENTS.items():
                losses = await kill_under_streams(cluster, "front", bodies, texts, ask)
                report.add(f"SIGKILL of one of two fronts, {name}", _told(losses))
                await asyncio.to_thread(wait_until, lambda: len(cluster.fronts()) == 2)
    if set(only) - {"scale", "front"}:
        with cluster_of(folder, mode) as cluster:
            for which in ("p1", "p0"):
                if which in only:
                    losses = await kill_under_streams(cluster, which, bodies, texts)
                    report.add(f"SIGKILL of a {which.upper()}", _told(losses))
                    await asyncio.to_thread(cluster.wait_for_replicas, 2)
            await _measure_both(cluster.url, report, only)
            if "update" in only:
                args = {"mode": mode, "num_replicas": 2, **REPLICA_ARGS, "max_num_seqs": 8}
                change = under_load(cluster.url, bodies, texts, lambda: update(cluster, args))
                report.add("rolling update", _told(await change))
    if "scale" in only:
        scaling = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1.0}
        args = {**scaling, "downscale_delay_s": 5.0, "max_num_seqs": 2, "target_num_waiting": 2.0}
        with cluster_of(folder, mode, **args) as cluster:
            report.add("1 to 2 to 1 replicas", _told(await scale(cluster, bodies, texts)))


async def scale(cluster: RayCluster, bodies: list[dict[str, Any]], texts: list[str]) -> Losses:
    """Let so many ask that a second replica comes, then so few that it goes."""

    def comes() -> Awaitable[None]:
        return asyncio.to_thread(cluster.wait_for_replicas, 2)

    def goes() -> Awaitable[None]:
        return asyncio.to_thread(cluster.wait_for_replicas, 1)

    busy = await under_load(cluster.url, bodies, texts, comes, num_at_once=12)
    quiet = await under_load(cluster.url, bodies, texts, goes, num_at_once=1)
    return Losses(
        busy.num_requests + quiet.num_requests,
        busy.lost + quiet.lost,
        busy.num_different + quiet.num_different,
        busy.seconds + quiet.seconds,
    )


async def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", nargs="+", default=["front", "header"])
    parser.add_argument("--only", nargs="+", default=EXPERIMENTS, choices=EXPERIMENTS)
    parser.add_argument("--num-streams", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bodies = long_bodies(options.num_streams)
    reports = [Report("one server"), *map(Report, options.mode)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with one_server(folder) as url:
            texts = await undisturbed(url, bodies)
            await _measure_both(url, reports[0], options.only)
        for report in reports[1:]:
            await _measure_cluster(folder, report, bodies, texts, options.only)
    found: dict[str, Any] = {report.name: report.figures for report in reports}
    found["machine"] = {"cpu": platform.processor() or platform.machine()}
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
