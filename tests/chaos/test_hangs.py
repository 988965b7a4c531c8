"""A P1 that is stopped, or says nothing, is replaced; one that is busy is not."""

import asyncio
import os
import signal

import pytest

from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.sampling_params import SamplingParams
from tests.chaos.service import (
    ECHO_MAIN,
    default_config,
    echo_config,
    params,
    question,
    run,
    serving,
    until,
)

ENDLESS = SamplingParams(ignore_eos=True, max_tokens=60)


def test_a_p1_that_is_stopped_is_replaced(input_processor: InputProcessor) -> None:
    async def body() -> None:
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

    run(body)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_default_engine_that_is_stopped_is_replaced() -> None:
    """Prints after how long."""

    async def body() -> None:
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

    run(body)
