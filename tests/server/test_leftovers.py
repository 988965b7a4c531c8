"""What killed processes leave in shared memory is removed by the next start; nothing else is."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kit import draw
from tests.server.test_wire import CHAT, PROMPTLY_S, Wire
from tests.test_serve import message_about

SHM = ("--mm-processor-cache-type", "shm", "--mm-processor-cache-gb", "0.01")


@pytest.fixture
def start(tiny_gemma3: Path) -> Iterator[Any]:
    servers: list[Wire] = []

    def start(*argv: str, **options: bool) -> Wire:
        servers.append(Wire(str(tiny_gemma3), *argv, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.served.end()


def segments_of(wire: Wire) -> list[Path]:
    """Return its files; their names begin with P0's process id."""
    folder = Path(f"/dev/shm/mmjax-{os.geteuid()}")
    return sorted(folder.glob(f"{wire.served.process.pid}-*"))


def engine_of(wire: Wire) -> psutil.Process:
    pids = wire.served.wait_for(r"(?s).*engine process \(pid (\d+)\): weights")
    return psutil.Process(int(pids.group(1)))


def ask(wire: Wire) -> None:
    assert wire.ask("POST", CHAT, {"messages": [message_about(draw(30, 20, 1), "red")]})[0] == 200


def test_segments_do_not_outlive_the_next_start(start: Any) -> None:
    living, killed = start(*SHM), start(*SHM)
    for wire in (living, killed):
        ask(wire)
        assert len(segments_of(wire)) == 1
    # P1 alone: P0 keeps its segment, and the next P1 reads it.
    engine_of(killed).kill()
    killed.served.wait_for("ended by signal SIGKILL")
    children = psutil.Process(killed.served.process.pid).children(recursive=True)
    # Both, so that nobody is left to tidy up.
    for process in (*children, psutil.Process(killed.served.process.pid)):
        process.send_signal(signal.SIGKILL)
    killed.served.process.wait(PROMPTLY_S)
    assert not psutil.wait_procs(children, timeout=PROMPTLY_S)[1]
    # Of any type of cache. A server of another test that starts meanwhile tidies up as well.
    start()
    assert segments_of(killed) == []
    assert len(segments_of(living)) == 1
    ask(living)
    living.served.process.send_signal(signal.SIGTERM)
    assert living.served.process.wait(PROMPTLY_S) == 0
    assert segments_of(living) == []


def test_nothing_outlives_a_killed_server(start: Any) -> None:
    wire = start(has_standby=True)
    ask(wire)
    children = psutil.Process(wire.served.process.pid).children(recursive=True)
    assert len(children) > 1
    wire.served.process.kill()
    assert not psutil.wait_procs(children, timeout=PROMPTLY_S)[1]
