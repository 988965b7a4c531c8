"""P1 is started, watched, started again, and ended; nothing is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from mmjax.config.engine_config import EngineConfig, ModelConfig
from mmjax.frontend.engine_client.engine_process import EngineProcess, SpawnOptions
from mmjax.frontend.engine_client.supervisor import EngineStartError, Supervisor
from mmjax.frontend.engine_client.suspects import EngineExit
from mmjax.params.sampling_params import SamplingParams
from mmjax.transport.messages import EngineCoreRequest, EngineEvent, StepOutput

ECHO = "tests.echo_engine:run_echo_engine"
DEADLINE_S = 240.0


class Listener:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_ready = 0
        self.exits: list[EngineExit] = []

    def on_message(self, message: EngineEvent) -> None:
        assert isinstance(message, StepOutput)
        self.token_ids += [i for delta in message.deltas for i in delta.new_token_ids]

    @property
    def num_deaths(self) -> int:
        return len(self.exits)

    def on_exit(self, engine_exit: EngineExit) -> None:
        self.exits.append(engine_exit)

    def on_ready(self) -> None:
        self.num_ready += 1


def engine_config(mood: str = "") -> EngineConfig:
    model = ModelConfig(
        model="echo", path=Path("."), hf_config=mood, architecture="Echo", max_model_len=8
    )
    return EngineConfig(model=model)


@asynccontextmanager
async def started_supervisor(
    mood: str,
    *,
    main: str = ECHO,
    hang_timeout_s: float = 60.0,
    has_standby: bool = False,
    listener: Listener | None = None,
) -> AsyncIterator[tuple[Supervisor, Listener]]:
    supervisor = Supervisor(
        engine_config(mood),
        main=main,
        hang_timeout_s=hang_timeout_s,
        shutdown_timeout_s=1.0,
        has_standby=has_standby,
    )
    heard = listener or Listener()
    await supervisor.start(heard)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield supervisor, heard
    finally:
        await supervisor.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


def is_alive(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def echo_request() -> EngineCoreRequest:
    params = SamplingParams(max_tokens=3)
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=[4, 5, 6], sampling_params=params, eos_token_ids=[1]
    )


async def test_a_p1_that_compiles_ends_as_soon_as_it_is_told_to() -> None:
    """It waited for its programs, and was killed after 5 s."""
    main = "tests.echo_engine:run_compiling_engine"
    async with started_supervisor("", main=main) as (supervisor, _):
        await supervisor.wait_ready()
    assert supervisor._engine.process.exitcode == 0


async def test_a_life_a_crash_and_another_life() -> None:
    async with started_supervisor("") as (supervisor, listener):
        assert supervisor.state == "starting"
        assert not supervisor.is_healthy
        ready = await supervisor.wait_ready()
        assert ready.num_programs == 2
        supervisor.send(echo_request())
        await until(lambda: len(listener.token_ids) == 3)
        assert listener.token_ids == [4, 5, 6]
        await until(lambda: supervisor.heartbeat is not None)
        first_pid = supervisor.pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)
        await until(lambda: listener.num_deaths == 1)
        assert supervisor.state == "restarting"
        assert not supervisor.is_healthy
        # Into the void, or to the next one if that is on its way: it neither fails nor waits.
        supervisor.send(echo_request())
        await until(lambda: listener.num_ready == 2)
        assert supervisor.pid != first_pid
        assert not is_alive(first_pid)
        supervisor.send(echo_request())
        await until(lambda: len(listener.token_ids) >= 6)
        assert supervisor.num_restarts == 1


@pytest.mark.parametrize(
    ("mood", "words"),
    [
        ("refuses a flag", "^the flag is wrong$"),
        ("has a bug", "^KeyError: 'lost'$"),
        ("dies at start", "ended before it was ready; see its log"),
    ],
)
async def test_a_start_that_fails_says_why_and_is_not_repeated(
    mood: str, words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmjax.frontend.engine_client.supervisor.logger.propagate", True)
    async with started_supervisor(mood) as (supervisor, listener):
        with pytest.raises(EngineStartError, match=words):
            await supervisor.wait_ready()
        assert supervisor.state == "dead"
        assert not supervisor.is_healthy
        assert listener.num_deaths == 1
    assert supervisor.num_restarts == 0
    # What the caller is told is not logged as well.
    assert ("its last lines: " in caplog.text) == (mood == "dies at start")


async def test_a_first_start_that_someone_kills_is_repeated() -> None:
    async with started_supervisor("") as (supervisor, _):
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        await supervisor.wait_ready()
        assert supervisor.num_restarts == 1


async def test_a_p1_that_dies_while_it_is_started_again_is_started_again() -> None:
    async with started_supervisor("") as (supervisor, listener):
        await supervisor.wait_ready()
        for number in range(1, 4):
            dead = supervisor.pid
            assert dead is not None
            os.kill(dead, signal.SIGKILL)
            await until(lambda number=number: supervisor.num_restarts == number)
            await until(lambda dead=dead: supervisor.pid != dead)
        await supervisor.wait_ready()
        supervisor.send(echo_request())
        await until(lambda: len(listener.token_ids) == 3)


async def test_starts_that_come_to_nothing_are_paused_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mmjax.frontend.engine_client.liveness.MAX_FRUITLESS_STARTS", 1)
    monkeypatch.setattr("mmjax.frontend.engine_client.liveness.FIRST_PAUSE_S", 0.5)
    async with started_supervisor("") as (supervisor, listener):
        await supervisor.wait_ready()
        assert supervisor.retry_after_s is None
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: listener.num_deaths == 1)
        assert supervisor.state == "paused"
        assert supervisor.retry_after_s is not None
        await supervisor.wait_ready()
        assert supervisor.retry_after_s is None


async def test_the_next_p1_waits_already() -> None:
    async with started_supervisor("", has_standby=True) as (supervisor, listener):
        await supervisor.wait_ready()
        for number in (1, 2):
            assert supervisor._standby is not None
            waiting = supervisor._standby.process.pid
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda number=number: listener.num_ready == number + 1)
            assert supervisor.pid == waiting
        assert supervisor._standby is not None
        waiting = supervisor._standby.process.pid
    assert not is_alive(waiting)


async def test_a_crash_is_one_record_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    async with started_supervisor("slow") as (supervisor, listener):
        await supervisor.wait_ready()
        supervisor.send(replace(echo_request(), max_tokens=1000))
        await until(lambda: len(listener.token_ids) > 0)
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGSEGV)
        await until(lambda: listener.num_deaths == 1)
        assert listener.exits == [EngineExit(cause="crash", request_ids=("r",))]
    (record,) = (one for one in caplog.records if "ended by" in one.getMessage())
    text = record.getMessage()
    assert "signal SIGSEGV" in text
    assert "it computed r;" in text
    assert "Segmentation fault" in text
    assert "_run" in text, "where it struck"


def replace(request: EngineCoreRequest, *, max_tokens: int) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return msgspec.structs.replace(request, sampling_params=params)


async def test_CVE_2026_114051_silence_is_death() -> None:
    async with started_supervisor("falls silent", hang_timeout_s=0.2) as (supervisor, listener):
        await supervisor.wait_ready()
        await until(lambda: listener.num_deaths == 1)


def test_a_pause_of_p0_is_not_p1s_silence(tmp_path: Path) -> None:
    with start_parent(tmp_path, PAUSED_PARENT) as parent:
        assert parent.stdout is not None
        first_pid = parent.stdout.readline()
        os.kill(parent.pid, signal.SIGSTOP)
        time.sleep(3.0)  # three times as long as P1 may be silent
        os.kill(parent.pid, signal.SIGCONT)
        assert parent.stdout.readline() == f"0 deaths, {first_pid}"


PAUSED_PARENT = """
import asyncio, os
from mmjax.frontend.engine_client.supervisor import Supervisor
from tests.frontend.test_supervisor import ECHO, Listener, engine_config, until

async def main():
    listener = Listener()
    supervisor = Supervisor(engine_config(), main=ECHO, hang_timeout_s=1.0)
    await supervisor.start(listener)
    await supervisor.wait_ready()
    stopped = os.times().elapsed
    print(supervisor.pid, flush=True)
    # Through the pause, and for longer than a verdict on the silence takes.
    while os.times().elapsed - stopped < 3.0:
        await asyncio.sleep(0.01)
    await asyncio.sleep(1.5)
    print(f"{listener.num_deaths} deaths, {supervisor.pid}", flush=True)
    await supervisor.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


def start_parent(folder: Path, text: str) -> "subprocess.Popen[str]":
    """Run a P0 in a process of its own."""
    script = folder / "parent.py"
    script.write_text(text)
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        text=True,
    )


async def test_supervision_survives_what_the_listener_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Faulty(Listener):
        def on_exit(self, engine_exit: EngineExit) -> None:
            super().on_exit(engine_exit)
            raise ZeroDivisionError

    async with started_supervisor("", listener=Faulty()) as (supervisor, listener):
        await supervisor.wait_ready()
        for number in (1, 2):
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda number=number: listener.num_ready == number + 1)
            assert listener.num_deaths == number
        supervisor.send(echo_request())
        await until(lambda: len(listener.token_ids) == 3)
    assert caplog.text.count("could not be taken in") == 2


async def test_a_pipe_that_cannot_be_read_ends_that_life(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started_supervisor("") as (supervisor, listener):
        await supervisor.wait_ready()
        receiver = supervisor._engine.receiver
        assert receiver is not None

        async def fail() -> None:
            raise OSError("the pipe is broken")

        monkeypatch.setattr(receiver, "receive", fail)
        await until(lambda: listener.num_ready == 2)
        assert (listener.num_deaths, supervisor.num_restarts) == (1, 1)


async def test_a_p1_that_cannot_be_spawned_is_paused_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine that is out of memory may be short of processes, too, for a while."""
    monkeypatch.setattr("mmjax.frontend.engine_client.supervisor.FIRST_PAUSE_S", 0.5)
    spawn, num_failures = EngineProcess.spawn, 0

    def spawn_later(options: SpawnOptions) -> EngineProcess:
        nonlocal num_failures
        if num_failures == 2:
            return spawn(options)
        num_failures += 1
        raise OSError("no more processes")

    async with started_supervisor("") as (supervisor, listener):
        await supervisor.wait_ready()
        monkeypatch.setattr(EngineProcess, "spawn", spawn_later)
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: supervisor.state == "paused")
        assert supervisor.retry_after_s is not None
        # Once that it will come again, and once that it will not soon: nobody waits for ever.
        assert listener.num_deaths == 2
        supervisor.send(echo_request())
        await until(lambda: listener.num_ready == 2)
        assert supervisor.retry_after_s is None
        supervisor.send(echo_request())
        await until(lambda: len(listener.token_ids) == 3)
    assert caplog.text.count("no more processes") == 2


async def test_without_a_standby_p1_serves_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(options: SpawnOptions) -> EngineProcess:
        raise OSError("no more processes")

    async with started_supervisor("", has_standby=True) as (supervisor, listener):
        monkeypatch.setattr(EngineProcess, "spawn", fail)
        await supervisor.wait_ready()
        supervisor.send(echo_request())
        await until(lambda: len(listener.token_ids) == 3)
        assert listener.num_deaths == 0
    assert "no more processes" in caplog.text


async def test_a_p1_that_is_stopped_before_it_connects_is_ended() -> None:
    async with started_supervisor("") as (supervisor, _):
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGSTOP)
        async with asyncio.timeout(10.0):
            await supervisor.close()
        assert not is_alive(supervisor.pid)


@pytest.mark.parametrize("mood", ["", "dies at start"])
async def test_the_start_ends_with_an_event(mood: str) -> None:
    async with started_supervisor(mood) as (supervisor, _):
        assert supervisor.state == "starting"
        await supervisor.wait_started()
        assert supervisor.state == ("dead" if mood else "ready")


def test_no_orphan_and_no_folder_when_the_parent_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:  # a short path: sockets lie there
        monkeypatch.setenv("TMPDIR", folder)
        with start_parent(tmp_path, KILLED_PARENT) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert list(Path(folder).iterdir())
            parent.kill()
        deadline = time.monotonic() + DEADLINE_S
        while is_alive(pid) and not is_zombie(pid):
            assert time.monotonic() < deadline, "P1 outlived its parent"
            time.sleep(0.05)
        assert list(Path(folder).iterdir()) == []


KILLED_PARENT = """
import time
from mmjax.frontend.engine_client.supervisor import Supervisor
from tests.frontend.test_supervisor import ECHO, engine_config

if __name__ == "__main__":
    print(Supervisor(engine_config(), main=ECHO).pid, flush=True)
    time.sleep(600)
"""


def is_zombie(pid: int) -> bool:
    # Where nobody reaps orphans (a bare container), the dead stay in the table.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
