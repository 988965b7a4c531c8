"""P1 is started, watched, started again, and ended; nothing is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mmjax.config import EngineConfig, ModelConfig
from mmjax.frontend.supervisor import EngineStartError, Supervisor
from mmjax.sampling_params import SamplingParams
from mmjax.transport.messages import CacheMiss, EngineCoreRequest, RequestFailed, StepOutput

ECHO = "tests.echo_engine:run_echo_engine"
DEADLINE_S = 60.0


class Listener:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_ready = 0
        self.num_deaths = 0

    def on_message(self, message: StepOutput | RequestFailed | CacheMiss) -> None:
        assert isinstance(message, StepOutput)
        self.token_ids += [i for delta in message.deltas for i in delta.new_token_ids]

    def on_death(self) -> None:
        self.num_deaths += 1

    def on_ready(self) -> None:
        self.num_ready += 1


def engine_config(mood: str = "") -> EngineConfig:
    model = ModelConfig(
        model="echo", path=Path("."), hf_config=mood, architecture="Echo", max_model_len=8
    )
    return EngineConfig(model=model)


def with_supervisor(
    mood: str,
    body: Callable[[Supervisor, Listener], Awaitable[None]],
    *,
    heartbeat_timeout_s: float = 60.0,
) -> Supervisor:
    supervisor = Supervisor(
        engine_config(mood),
        main=ECHO,
        heartbeat_timeout_s=heartbeat_timeout_s,
        shutdown_timeout_s=1.0,
    )
    listener = Listener()

    async def run() -> None:
        await supervisor.start(listener)
        try:
            await asyncio.wait_for(body(supervisor, listener), DEADLINE_S)
        finally:
            await supervisor.close()

    asyncio.run(run())
    assert not is_alive(supervisor.pid)
    return supervisor


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


def test_a_life_a_crash_and_another_life() -> None:
    async def body(supervisor: Supervisor, listener: Listener) -> None:
        assert supervisor.state == "starting"
        assert supervisor.is_healthy
        ready = await supervisor.wait_ready()
        assert ready.num_programs == 2
        await supervisor.send(echo_request())
        await until(lambda: len(listener.token_ids) == 3)
        assert listener.token_ids == [4, 5, 6]
        await until(lambda: supervisor.heartbeat is not None)
        first_pid = supervisor.pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)
        await until(lambda: listener.num_deaths == 1)
        assert supervisor.state == "restarting"
        assert not supervisor.is_healthy
        await supervisor.send(echo_request())  # into the void: it neither fails nor waits
        await until(lambda: listener.num_ready == 2)
        assert supervisor.pid != first_pid
        assert not is_alive(first_pid)
        await supervisor.send(echo_request())
        await until(lambda: len(listener.token_ids) == 6)
        assert supervisor.num_restarts == 1

    with_supervisor("", body)


def test_a_start_that_fails_is_not_repeated() -> None:
    async def body(supervisor: Supervisor, listener: Listener) -> None:
        with pytest.raises(EngineStartError):
            await supervisor.wait_ready()
        assert supervisor.state == "dead"
        assert not supervisor.is_healthy
        assert listener.num_deaths == 1

    assert with_supervisor("dies at start", body).num_restarts == 0


def test_silence_is_death() -> None:
    async def body(supervisor: Supervisor, listener: Listener) -> None:
        await supervisor.wait_ready()
        await until(lambda: listener.num_deaths == 1)

    with_supervisor("falls silent", body, heartbeat_timeout_s=0.2)


def test_no_orphan_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\n"
        "from tests.frontend.test_supervisor import ECHO, engine_config\n"
        "from mmjax.frontend.supervisor import Supervisor\n"
        "if __name__ == '__main__':\n"
        "    print(Supervisor(engine_config(), main=ECHO).pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + DEADLINE_S
    while is_alive(pid) and not is_zombie(pid):
        assert time.monotonic() < deadline, "P1 outlived its parent"
        time.sleep(0.05)


def is_zombie(pid: int) -> bool:
    # Where nobody reaps orphans (a bare container), the dead stay in the table.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
