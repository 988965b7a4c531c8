"""Waiting for an engine that starts, and until a deadline."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mmjax.errors import (
    EngineUnavailableError,
    RequestTimeoutError,
)
from mmjax.frontend.engine_client.supervisor import EngineLink


async def wait_for_start(supervisor: EngineLink, max_wait_s: float, deadline: float | None) -> None:
    """Wait while the first P1 compiles; EngineUnavailableError or a timeout after that.

    During a restart nobody waits here: the prompt is processed meanwhile.
    """
    if supervisor.state == "starting":
        time_left = math.inf if deadline is None else deadline - time.monotonic()
        try:
            async with asyncio.timeout(min(max_wait_s, time_left)):
                await supervisor.wait_started()
        except TimeoutError:
            if time_left <= max_wait_s:
                raise RequestTimeoutError from None
    if supervisor.state not in ("ready", "restarting"):
        raise unavailable(supervisor)


@asynccontextmanager
async def until(deadline: float | None) -> AsyncIterator[None]:
    """Raise RequestTimeoutError at the deadline."""
    if deadline is None:
        yield
        return
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            yield
    except TimeoutError:
        raise RequestTimeoutError from None


def unavailable(supervisor: EngineLink) -> EngineUnavailableError:
    """Return the error that says why the engine takes no request."""
    text = {
        "starting": "the engine is still starting; try again in a few seconds",
        "restarting": "the engine restarts; try again in a few seconds",
        "paused": "the engine process ended again and again, and is started next after a pause; "
        "the server's log says how it ended",
        "dead": "the engine could not be brought back; the server must be restarted",
        "ready": "the engine was lost during this request; try again",
    }
    return EngineUnavailableError(text[supervisor.state], retry_after_s=supervisor.retry_after_s)
