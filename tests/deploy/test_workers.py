"""Several processes as one engine: where one ends, all meet again, and nothing is lost."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from mmjax.config.engine_config import ServerConfig
from mmjax.deploy.config import read_deployment, settings_of_process
from mmjax.deploy.replica import Replica
from mmjax.deploy.workers import WorkerGroup, WorkerProcess
from mmjax.frontend.engine_client.supervisor import EngineState
from mmjax.server.flags import to_engine_config


@dataclass
class Leader:
    """A supervisor that only counts."""

    state: EngineState = "starting"
    num_restarts: int = 0
    reason: str = ""

    def replace(self, reason: str) -> None:
        self.reason, self.state = reason, "restarting"

    def restart(self) -> None:
        """Start the next P1."""
        self.num_restarts += 1


@dataclass
class Fake:
    """A worker that only counts."""

    num_starts: int = 0
    is_there: bool = True
    is_reached: bool = True
    has_ended: bool = False

    async def restart(self) -> None:
        if not self.is_reached:
            raise ConnectionError("no route")
        self.num_starts += 1
        self.is_there = True

    async def is_alive(self) -> bool:
        if not self.is_reached:
            raise ConnectionError("no route")
        return self.is_there

    async def end(self) -> None:
        self.has_ended = True


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not is_true():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def watched(
    *, unreachable_s: float = 60.0
) -> AsyncIterator[tuple[Leader, list[Fake], WorkerGroup]]:
    """Watch a group of three."""
    leader, members = Leader(), [Fake(), Fake()]
    group = WorkerGroup(leader, members, interval_s=0.001, unreachable_s=unreachable_s)
    group.open()
    try:
        await until(lambda: all(one.num_starts == 1 for one in members))
        yield leader, members, group
    finally:
        await group.close()
    assert all(one.has_ended for one in members)


async def test_followers_start_again_with_every_p1() -> None:
    async with watched() as (leader, members, _):
        for number in (2, 3):
            leader.restart()
            await until(lambda number=number: all(one.num_starts == number for one in members))


async def test_p1_ends_with_a_follower_and_all_meet_again() -> None:
    async with watched() as (leader, members, _):
        leader.state = "ready"
        members[1].is_there = False
        await until(lambda: leader.reason != "")
        assert "follow" in leader.reason
        assert members[0].num_starts == 1, "not before the next P1 is there to meet"
        leader.restart()
        await until(lambda: all(one.num_starts == 2 for one in members))


async def test_p1_that_starts_says_itself_what_is_wrong() -> None:
    """Ended by a signal it would start again and again, whatever its settings."""
    async with watched() as (leader, members, _):
        members[0].is_there = False
        await asyncio.sleep(0.05)
        assert leader.reason == ""


async def test_a_lost_host_makes_the_replica_unhealthy() -> None:
    async with watched(unreachable_s=0.1) as (leader, members, group):
        leader.state = "ready"
        members[0].is_reached = False
        await asyncio.sleep(0.01)
        group.check()
        await asyncio.sleep(0.2)
        with pytest.raises(RuntimeError, match="cannot be reached"):
            group.check()
        members[0].is_reached = True
        await asyncio.sleep(0.05)
        group.check()


# ---- with real processes ------------------------------------------------------------------------


class LocalWorker:
    """A worker on this host."""

    def __init__(self, follower: WorkerProcess) -> None:
        self.follower = follower

    async def restart(self) -> None:
        await asyncio.to_thread(self.follower.restart)

    async def is_alive(self) -> bool:
        return self.follower.is_alive()

    async def end(self) -> None:
        await asyncio.to_thread(self.follower.end)


BODIES = [
    {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 12,
        "ignore_eos": True,
        "temperature": temperature,
        "seed": 3,
    }
    for text in ("a red circle", "what is it?")
    for temperature in (0, 1)
]


@asynccontextmanager
async def replica_of(
    checkpoint: Path, num_processes: int
) -> AsyncIterator[tuple[Replica, list[WorkerProcess], httpx2.AsyncClient]]:
    """Start a replica of so many processes; yield it, its followers and a client."""
    args = {
        "model": str(checkpoint),
        **{"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 64},
        **{"tensor_parallel_size": 2, "distributed_num_processes": num_processes},
    }
    server = read_deployment(args).server
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{one.getsockname()[1]}"
    configs = [
        to_engine_config(settings_of_process(server, coordinator=place, process_id=number))
        for number in range(num_processes)
    ]
    followers = [await asyncio.to_thread(WorkerProcess, config) for config in configs[1:]]
    members = [LocalWorker(follower) for follower in followers]
    settings = ServerConfig(enable_standby_engine=False)
    replica = await Replica.start("one", configs[0], settings, members)
    try:
        transport = httpx2.ASGITransport(app=replica.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://one") as http:
            yield replica, followers, http
    finally:
        await replica.close()
        assert not any(follower.is_alive() for follower in followers)


async def texts_of(http: httpx2.AsyncClient) -> list[str]:
    answers = await asyncio.gather(
        *(http.post("/v1/chat/completions", json=body, timeout=500.0) for body in BODIES)
    )
    return [
        answer.raise_for_status().json()["choices"][0]["message"]["content"] for answer in answers
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_two_processes_are_one_replica_that_outlives_either(tiny_gemma3: Path) -> None:
    """SIGKILL of the follower, and of P1, under requests: each gets the undisturbed text."""
    async with replica_of(tiny_gemma3, 1) as (_, _, http):
        expected = await texts_of(http)
    async with replica_of(tiny_gemma3, 2) as (replica, (follower,), http):
        assert await texts_of(http) == expected
        for number, victim in enumerate((lambda: follower.pid, lambda: replica.supervisor.pid)):
            asking = asyncio.create_task(texts_of(http))
            await asyncio.sleep(0.05)
            pid = victim()
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert await asking == expected
            assert replica.supervisor.num_restarts == number + 1
            assert follower.is_alive()
            replica.check_health()
