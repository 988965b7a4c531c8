"""Several processes under `jax.distributed` as one replica's engine: P1, and its workers.

A call is computed by all of them or by none: where one has ended, the others wait in it. So
whenever one ends, all end and meet again; the replica's P0 then goes on with its requests, as after
any restart of P1. Knows nothing of where the workers run.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from mmjax.config.engine_config import EngineConfig
from mmjax.frontend.engine_client.engine_process import EngineProcess, SpawnOptions
from mmjax.frontend.media_budget import as_engine_process_config
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

_WORKER_MAIN = "mmjax.engine.process:run_follower"
"""By name, since importing it would load jax here."""
_END_TIMEOUT_S = 5.0
"""That a worker has to end by itself, after P1 has told it."""


class WorkerProcess:
    """A worker on this host."""

    def __init__(self, config: EngineConfig) -> None:
        """`config`: P1's, but for the process's id."""
        self._config = as_engine_process_config(config)
        self._process: EngineProcess | None = None

    @property
    def pid(self) -> int | None:
        """Its process id; None if it was not started."""
        return None if self._process is None else self._process.process.pid

    def restart(self) -> None:
        """Start it; end the one before, which waits for a P1 that is no more."""
        self.end(timeout_s=0.0)
        options = SpawnOptions(
            main=_WORKER_MAIN,
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
class Worker(Protocol):
    """A worker, wherever it runs; ConnectionError while its host cannot be reached."""

    async def restart(self) -> None:
        """Start it; end the one before."""
        ...

    async def is_alive(self) -> bool:
        """Whether it runs."""
        ...

    async def end(self) -> None:
        """End it."""
        ...


class WorkerGroup:
    """Keeps P1 and its workers together."""

    def __init__(
        self,
        supervisor: Any,
        workers: Sequence[Worker],
        *,
        interval_s: float = 0.5,
        unreachable_s: float = 60.0,
    ) -> None:
        """Start nothing yet.

        Args:
            supervisor: P1's.
            workers: Those that follow it.
            interval_s: Seconds between two looks at them.
            unreachable_s: After which a host that cannot be reached counts as lost.
        """
        self._supervisor = supervisor
        self._workers = workers
        self._interval_s = interval_s
        self._unreachable_s = unreachable_s
        self._unreachable_since: float | None = None
        self._num_restarts = -1
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start the workers, and watch them, in the running event loop."""
        self._task = asyncio.create_task(self._watch(), name="watch-workers")

    async def close(self) -> None:
        """End the workers, after P1."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        ending = [asyncio.create_task(worker.end()) for worker in self._workers]
        for failure in await asyncio.gather(*ending, return_exceptions=True):
            if isinstance(failure, Exception):
                logger.error("a worker could not be ended", exc_info=failure)

    def check(self) -> None:
        """Raise RuntimeError if a host is lost: then another replica must take this one's place."""
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
        num_restarts = self._supervisor.num_restarts
        if num_restarts != self._num_restarts:
            await self._all(worker.restart() for worker in self._workers)
            self._num_restarts = num_restarts
        elif self._supervisor.state == "ready":
            alive = await self._all(worker.is_alive() for worker in self._workers)
            # Before it is ready P1 itself waits for the others, and says what is wrong.
            if not all(alive) and self._supervisor.state == "ready":
                self._supervisor.replace("has lost a process that followed it")

    async def _all(self, calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Wait for calls of all members; then raise the first error."""
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return cast(list[T], results)
