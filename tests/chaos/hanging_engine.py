"""P1 mains whose step never ends for one request, or takes long, while another thread computes."""

import hashlib
import threading
import time
from typing import Any

from mmjax.config.engine_config import EngineConfig
from mmjax.engine import process
from mmjax.engine.core import EngineCore

CULPRIT_TOKENS = 77
"""`max_tokens` of the request whose step does not go on."""
LONG_STEP_S = 12.0


def run_hanging_engine(config: EngineConfig, address_in: str, address_out: str) -> None:
    """Serve; the culprit's step sleeps."""
    _run(lambda: time.sleep(3600), config, address_in, address_out)


def run_locked_engine(config: EngineConfig, address_in: str, address_out: str) -> None:
    """Serve; the culprit's step waits for a lock that nobody releases."""
    lock = threading.Lock()
    lock.acquire()
    _run(lock.acquire, config, address_in, address_out)


def run_slow_engine(config: EngineConfig, address_in: str, address_out: str) -> None:
    """Serve; the culprit's first step computes for long."""
    end: list[float] = []

    def compute() -> None:
        end.append(time.monotonic() + LONG_STEP_S)
        while time.monotonic() < end[0]:
            sum(range(1000))

    _run(compute, config, address_in, address_out)


def _run(act: Any, *arguments: Any) -> None:
    dispatch, is_hanging = EngineCore._dispatch, threading.Event()

    def dispatch_or_act(core: EngineCore) -> Any:
        dispatched = dispatch(core)
        requests = [] if dispatched is None else dispatched.output.requests
        if any(one.request.sampling_params.max_tokens == CULPRIT_TOKENS for one in requests):
            is_hanging.set()
            act()
        return dispatched

    EngineCore._dispatch = dispatch_or_act  # type: ignore[method-assign]
    threading.Thread(target=_compute_from, args=[is_hanging], daemon=True).start()
    process.run_engine(*arguments)


def _compute_from(event: threading.Event) -> None:
    """Compute for ever, but not before the event: starts would take twice as long."""
    event.wait()
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**6)
