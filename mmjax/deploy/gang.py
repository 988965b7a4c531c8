"""Several processes under `jax.distributed` as one replica's engine: its P1, and those that follow.

A call is computed by all of them or by none: where one has ended, the others wait in it. So
whenever one ends, all end and meet again; the replica's P0 then goes on with its requests, as after
any restart of P1. Knows nothing of where the followers run.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from mmjax.config.engine_config import EngineConfig
from mmjax.frontend.engine_client.engine_process import EngineProcess, SpawnOptions
from mmjax.frontend.engine_client.supervisor import EngineState
from mmjax.frontend.media_budget import with_encoder_budget
from mmjax.models.registry import with_model_class
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

_FOLLOWER_MAIN = "mmjax.engine.process:run_follower"
"""By name, since importing it would load jax here."""
_END_TIMEOUT_S = 5.0
"""That a follower has to end by itself, after P1 has told it."""


class Follower:
    """A process that follows P1, on this host."""

    def __init__(self, config: EngineConfig) -> None:
        """`config`: P1's, but for the process's id."""
        # As P0 does for P1: shapes follow from it.
        with_class = replace(config, model=with_model_class(config.model))
        self._config = with_encoder_budget(with_class)
        self._process: EngineProcess | None = None

    @property
    def pid(self) -> int | None:
        """Its process id; None if it was not started."""
        return None if self._process is None else self._process.process.pid

    def restart(self) -> None:
        """Start it; end the one before, which waits for a P1 that is no more."""
        self.end(timeout_s=0.0)
        options = SpawnOptions(
            main=_FOLLOWER_MAIN,
            log_level=self._config.log_level,
            log_format=self._config.log_format,
        )
        self._process = EngineProcess.spawn(options)
        self._process.configure(self._config)

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.process.is_alive()

    def end(self, *, timeout_s: float = _END_TIMEOUT_S) -> None:
        """End it; blocks."""
        process, self._process = self._process, None
        if process is not None:
            process.end(timeout_s)
            process.close()


@runtime_checkable
class Member(Protocol):
    """A follower, wherever it runs; ConnectionError while its host cannot be reached."""

    async def restart(self) -> None:
        """Start it; end the one before."""
        ...

    async def is_alive(self) -> bool:
        """Whether it runs."""
        ...

    async def end(self) -> None:
        """End it."""
        ...


@runtime_checkable
class Leader(Protocol):
    """The supervisor of P1, for its gang."""

    state: EngineState
    num_restarts: int

    def replace(self, reason: str) -> None:
        """End P1, so that the next one starts."""
        ...


class Gang:
    """Keeps P1 and its followers together."""

    def __init__(
        self,
        leader: Leader,
        members: Sequence[Member],
        *,
        interval_s: float = 0.5,
        unreachable_s: float = 60.0,
    ) -> None:
        """Start nothing yet.

        Args:
            leader: P1's supervisor.
            members: The followers.
            interval_s: Seconds between two looks at them.
            unreachable_s: After which a host that cannot be reached counts as lost.
        """
        self._leader = leader
        self._members = members
        self._interval_s = interval_s
        self._unreachable_s = unreachable_s
        self._unreachable_since: float | None = None
        self._num_restarts = -1
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start the followers, and watch them, in the running event loop."""
        self._task = asyncio.create_task(self._watch(), name="watch-gang")

    async def close(self) -> None:
        """End the followers, after P1."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        ending = [asyncio.create_task(member.end()) for member in self._members]
        for failure in await asyncio.gather(*ending, return_exceptions=True):
            if isinstance(failure, Exception):
                logger.error("a process of the gang could not be ended", exc_info=failure)

    def check(self) -> None:
        """Raise RuntimeError if a host is lost: then another gang must take this one's place."""
        since = self._unreachable_since
        if since is not None and time.monotonic() > since + self._unreachable_s:
            raise RuntimeError("a host of this replica cannot be reached")

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
                self._unreachable_since = None
            except ConnectionError as error:
                if self._unreachable_since is None:
                    self._unreachable_since = time.monotonic()
                    logger.error("a host of this replica cannot be reached: %s", error)
            except Exception:
                logger.exception("the processes of this replica could not be looked after")
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> None:
        num_restarts = self._leader.num_restarts
        if num_restarts != self._num_restarts:
            await self._all(member.restart() for member in self._members)
            self._num_restarts = num_restarts
        elif self._leader.state == "ready":
            alive = await self._all(member.is_alive() for member in self._members)
            # Before it is ready P1 itself waits for the others, and says what is wrong.
            if not all(alive) and self._leader.state == "ready":
                self._leader.replace("has lost a process that followed it")

    async def _all(self, calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Wait for calls of all members; then raise the first error."""
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return cast(list[T], results)
