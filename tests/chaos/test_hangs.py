"""A P1 that is stopped, or says nothing, is replaced; one that is busy is not."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mmjax.errors import RequestQuarantinedError
from mmjax.frontend.engine_client.liveness import Fault
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.params.sampling_params import SamplingParams
from tests.chaos.hanging_engine import CULPRIT_TOKENS, LONG_STEP_S
from tests.chaos.service import (
    DEADLINE_S,
    ECHO_MAIN,
    default_config,
    echo_config,
    params,
    question,
    serving,
    until,
)
from tests.chaos.test_kills import FEW, ask_all, until_tokens

HANG_S = 5.0
ENDLESS = SamplingParams(ignore_eos=True, max_tokens=60)


async def test_a_p1_that_is_stopped_is_replaced(input_processor: InputProcessor) -> None:
    async with asyncio.timeout(DEADLINE_S):
        config = echo_config(input_processor.model_config, "slow")
        async with serving(config, input_processor, main=ECHO_MAIN, hang_timeout_s=4.0) as service:
            expected = await service.ask("a red circle", ENDLESS)
            asked = asyncio.create_task(service.ask("a red circle", ENDLESS))
            await until(lambda: bool(service.computed))
            stopped = service.pid
            os.kill(stopped, signal.SIGSTOP)
            await until(lambda: service.supervisor.num_restarts == 1)
            assert service.pid != stopped
            assert await asked == expected
            assert service.supervisor.state == "ready"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_default_engine_that_is_stopped_is_replaced() -> None:
    """Prints after how long."""
    async with asyncio.timeout(DEADLINE_S):
        async with serving(default_config()) as service:
            expected = await service.ask(question(2), params(2))
            loop = asyncio.get_running_loop()
            for number in range(2):
                asked = asyncio.create_task(service.ask(question(2), params(2)))
                await until(lambda: bool(service.computed))
                start = loop.time()
                os.kill(service.pid, signal.SIGSTOP)
                await until(lambda: service.supervisor.state != "ready")
                print(f"\nfound after {loop.time() - start:.1f} s")
                await service.until_ready(number + 1)
                assert await asked == expected


HANGING_MAINS = ("run_hanging_engine", pytest.param("run_locked_engine", marks=pytest.mark.slow))


@contextmanager
def busy_machine(num_processes: int) -> Iterator[None]:
    """Run processes that compute for ever."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


BUSY = pytest.mark.parametrize("num_busy", [0, pytest.param(20, marks=pytest.mark.slow)])


@BUSY
@pytest.mark.parametrize("main", HANGING_MAINS)
async def test_a_request_whose_step_hangs_while_others_compute_is_found_alone(
    main: str, num_busy: int, tiny_gemma3: Path
) -> None:
    """Prints after how long."""
    async with asyncio.timeout(DEADLINE_S):
        config = default_config(str(tiny_gemma3), *FEW, "--precompile", "none")
        main_path = f"tests.chaos.hanging_engine:{main}"
        async with serving(config, main=main_path, hang_timeout_s=HANG_S) as service:
            expected = await ask_all(service, range(3), 40)
            faults, replace = [], service.supervisor._replace

            def note_and_replace(fault: Fault) -> None:
                faults.append(fault.text)
                replace(fault)

            service.supervisor._replace = note_and_replace  # type: ignore[method-assign]
            with busy_machine(num_busy):
                asked = asyncio.create_task(ask_all(service, range(3), 40))
                await until_tokens(service, 6)
                culprit = asyncio.create_task(service.ask(question(9), params(9, CULPRIT_TOKENS)))
                for number in range(1, 3):
                    await until(lambda: service.supervisor.state != "ready")
                    start = time.monotonic()
                    await service.until_ready(number)
                    print(f"\nit {faults[-1]}; ready again after {time.monotonic() - start:.1f} s")
                with pytest.raises(RequestQuarantinedError):
                    await culprit
            assert await asked == expected
            assert service.supervisor.num_restarts == 2


@BUSY
@pytest.mark.slow
async def test_a_step_that_computes_for_long_is_no_hang(num_busy: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        config = default_config(*FEW, "--precompile", "none")
        main = "tests.chaos.hanging_engine:run_slow_engine"
        async with serving(config, main=main, hang_timeout_s=HANG_S) as service:
            start = time.monotonic()
            with busy_machine(num_busy):
                answer = await service.ask(question(9), params(9, CULPRIT_TOKENS))
            assert len(answer.token_ids) == CULPRIT_TOKENS
            assert time.monotonic() - start > LONG_STEP_S
            assert service.supervisor.num_restarts == 0
