"""A P0 in this process and its P1, which the tests of this folder kill, stop and mislead."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mmjax.cache import config_with_directory, processor_cache_from_config
from mmjax.config.engine_config import EngineConfig, ModelConfig
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.engine_client.supervisor import ENGINE_MAIN, Supervisor
from mmjax.frontend.media_budget import as_engine_process_config
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.requests.request import GenerateRequest
from mmjax.params.sampling_params import SamplingParams
from mmjax.server.flags import parse_flags, to_engine_config
from tests.kit import IMAGE_START, draw

ECHO_MAIN = "tests.echo_engine:run_echo_engine"
DEADLINE_S = 250.0
"""Of a test's body; nothing waits for so long unless it would wait for ever."""


def default_config(*flags: str) -> EngineConfig:
    """Return the embedded default's configuration."""
    return as_engine_process_config(to_engine_config(parse_flags([*flags])))


def echo_config(model: ModelConfig, mood: str = "") -> EngineConfig:
    """Return the configuration of a P1 without a model."""
    return EngineConfig(model=replace(model, hf_config=mood))


class Answer(NamedTuple):
    """All that a stream said."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclass
class Service:
    """The client and the supervisor of one server."""

    client: AsyncEngineClient
    supervisor: Supervisor
    num_requests: int = 0

    async def ask(self, prompt: Any, params: SamplingParams) -> Answer:
        """Stream one answer."""
        self.num_requests += 1
        stream = await self.client.add_request(
            GenerateRequest(str(self.num_requests), prompt, params, stream=True)
        )
        text, token_ids, reason = "", [], None
        async for output in stream:
            for one in output.outputs:
                text += one.text
                token_ids += one.token_ids
                reason = one.finish_reason
        return Answer(text, tuple(token_ids), reason)

    @property
    def pid(self) -> int:
        """Process id of the present P1."""
        assert self.supervisor.pid is not None
        return self.supervisor.pid

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> float:
        """Kill P1; return the seconds until the next one is ready."""
        start, num_restarts = time.monotonic(), self.supervisor.num_restarts
        os.kill(self.pid, number)
        await self.until_ready(num_restarts + 1)
        return time.monotonic() - start

    async def until_ready(self, num_restarts: int) -> None:
        """Wait until a P1 is ready after so many restarts."""
        supervisor = self.supervisor
        await until(lambda: supervisor.num_restarts >= num_restarts and supervisor.state == "ready")

    @property
    def computed(self) -> tuple[str, ...]:
        """What P1 computes at the moment."""
        return self.supervisor._engine.read_computed()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for an event."""
    while not condition():
        await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    config: EngineConfig, input_processor: InputProcessor | None = None, **options: Any
) -> AsyncIterator[Service]:
    """Yield a service that is ready; `input_processor`: of another model than the engine's."""
    cache = None
    if input_processor is None:
        cache = processor_cache_from_config(config.model.mm)
        config = config.with_mm(config_with_directory(config.model.mm, cache))
        input_processor = InputProcessor(config.model, cache=cache)
    options = {"main": ENGINE_MAIN, "shutdown_timeout_s": 2.0, **options}
    supervisor = Supervisor(config, **options)
    client = AsyncEngineClient(input_processor, supervisor, config.scheduler)
    await client.start()
    try:
        await supervisor.wait_ready()
        yield Service(client, supervisor)
    finally:
        await client.close()


def question(number: int, picture: int | None = None) -> Any:
    """Return a prompt; the same numbers give the same one."""
    text = f"What is the color of number {number}? " * (1 + number % 4)
    if picture is None:
        return text
    image = draw(40 + picture % 5, 30, picture)
    return {"prompt": f"{IMAGE_START} {text}", "multi_modal_data": {"image": image}}


def params(number: int, max_tokens: int = 128) -> SamplingParams:
    """Return greedy and seeded parameters in turns."""
    drawn = {"temperature": 1.0, "seed": number, "top_p": 0.9}
    fields: dict[str, Any] = drawn if number % 2 else {"temperature": 0.0}
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)
