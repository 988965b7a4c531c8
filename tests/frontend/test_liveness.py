"""A P1 that hangs is found; one that computes for long, or waits for the CPU, is not blamed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmjax.frontend.engine_client.liveness import (
    MAX_BUSY_SILENCE_S,
    MAX_TURN_S,
    NUM_LOSS_TICKS,
    EngineWatch,
    Fault,
    ProcessActivity,
)
from mmjax.transport.messages import Heartbeat, LoopState
from tests.frontend.test_silence import Clock

TIMEOUT_S = 7.0


def beat(**fields: float) -> Heartbeat:
    return Heartbeat(
        num_running=1,
        num_waiting=0,
        kv_cache_usage=0.0,
        num_compilations=0,
        loop=LoopState(**fields),  # type: ignore[arg-type]
    )


def check(
    watch: EngineWatch, here_sent: int = 0, here_received: int = 0, **loop: float
) -> Fault | None:
    return watch.check(beat(**loop), num_sent=here_sent, num_received=here_received)


@pytest.mark.parametrize(
    ("turn_s", "idle_s", "is_hang"),
    [
        (6.9, 6.9, False),
        (7.0, 7.0, True),
        (60.0, 0.0, False),  # a long step, or a compilation
        (60.0, 7.0, True),  # one that computed, and waits now
        (MAX_TURN_S, 0.0, True),
    ],
)
def test_a_step_that_waits_for_too_long_is_a_hang(
    turn_s: float, idle_s: float, is_hang: bool
) -> None:
    watch = EngineWatch(timeout_s=TIMEOUT_S)
    fault = check(watch, turn_s=turn_s, idle_s=idle_s)
    assert (fault is not None and fault.cause == "crash") == is_hang


def losses(beats: list[dict[str, int]]) -> int | None:
    """Return after how many heartbeats a loss is noticed."""
    watch = EngineWatch(timeout_s=TIMEOUT_S)
    for number, one in enumerate(beats):
        fault = check(watch, **one)
        watch.tick()
        if fault is not None:
            assert fault.cause == "lost_messages"
            return number
    return None


def test_what_p1_never_reads_is_lost() -> None:
    idle = [
        {"here_sent": 5, "here_received": 3, "num_sent": 3, "num_received": 4, "num_turns": turn}
        for turn in range(20)
    ]
    assert losses(idle) == NUM_LOSS_TICKS


def test_what_p1_has_not_had_time_to_read_is_not() -> None:
    one_long_step = [
        {"here_sent": 5, "here_received": 3, "num_sent": 3, "num_received": 4, "num_turns": 7}
        for _ in range(20)
    ]
    assert losses(one_long_step) is None
    slow = [
        {
            "here_sent": 50,
            "here_received": 3,
            "num_sent": 3,
            "num_received": turn,
            "num_turns": turn,
        }
        for turn in range(40)
    ]
    assert losses(slow) is None


def test_what_never_comes_from_p1_is_lost() -> None:
    beats = [
        {"here_sent": 5, "here_received": 2, "num_sent": 3, "num_received": 5, "num_turns": turn}
        for turn in range(20)
    ]
    assert losses(beats) == NUM_LOSS_TICKS
    late = [
        {
            "here_sent": 5,
            "here_received": turn,
            "num_sent": 50,
            "num_received": 5,
            "num_turns": turn,
        }
        for turn in range(40)
    ]
    assert losses(late) is None


# ---- silence -------------------------------------------------------------------------------------

SLEEPER = "import time; print(1, flush=True); time.sleep(600)"
WORKER = "print(1, flush=True)\nwhile True: pass"
READER = """
import ctypes, time
print(1, flush=True)
ctypes.CDLL(None).vfork()  # the parent waits as for a disk, until the child ends
time.sleep(600)
"""


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", request.param]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def silent_for(pid: int, seconds: float) -> Fault | None:
    """Return what a watch says of a process that has sent nothing for so long."""
    watch, clock = EngineWatch(timeout_s=TIMEOUT_S, pid=pid), Clock()
    watch.silence._clock, watch.silence._last_tick = clock, clock.now
    fault = None
    while clock.now < 100.0 + seconds and fault is None:
        clock.now += watch.silence.interval_s
        fault = watch.tick()
    return fault


def wait_for_state(pid: int, state: str) -> None:
    """Wait: a process that has said that it runs may not sleep yet."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        time.sleep(0.01)


@pytest.mark.parametrize("child", [SLEEPER], indirect=True)
def test_a_silent_process_that_does_nothing_hangs(child: "subprocess.Popen[str]") -> None:
    wait_for_state(child.pid, "S")
    assert silent_for(child.pid, TIMEOUT_S - 1) is None
    fault = silent_for(child.pid, TIMEOUT_S + 3)
    assert fault is not None
    assert fault.cause == "crash"


@pytest.mark.parametrize("child", [SLEEPER, WORKER], indirect=True)
def test_a_stopped_process_was_stopped_from_outside(child: "subprocess.Popen[str]") -> None:
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    fault = silent_for(child.pid, TIMEOUT_S + 3)
    assert fault is not None
    assert fault.cause == "killed"


@pytest.mark.parametrize("child", [WORKER], indirect=True)
def test_a_silent_process_that_computes_has_more_time(child: "subprocess.Popen[str]") -> None:
    assert silent_for(child.pid, MAX_BUSY_SILENCE_S - 2) is None
    assert silent_for(child.pid, MAX_BUSY_SILENCE_S + 3) is not None


@pytest.mark.parametrize("child", [READER], indirect=True)
def test_a_silent_process_that_waits_for_a_disk_has_more_time(
    child: "subprocess.Popen[str]",
) -> None:
    wait_for_state(child.pid, "D")
    assert silent_for(child.pid, MAX_BUSY_SILENCE_S - 2) is None
    assert silent_for(child.pid, MAX_BUSY_SILENCE_S + 3) is not None


def test_a_process_that_is_gone_does_nothing() -> None:
    assert not ProcessActivity(None).look()
