"""A P1 in a process of its own, which dies and forgets: the clients of P0 notice nothing."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from mmjax.cache import config_with_directory, processor_cache_from_config
from mmjax.config.engine_config import EngineConfig, ModelConfig, MultiModalConfig, SchedulerConfig
from mmjax.errors import RequestQuarantinedError
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.engine_client.supervisor import Supervisor
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.requests.request import GenerateRequest
from mmjax.params.sampling_params import SamplingParams
from mmjax.transport.codec import encode
from mmjax.transport.messages import EngineCoreRequest, EngineMessage
from tests.echo_engine import DEATH_TOKEN, FORGET_TOKEN
from tests.frontend.test_drift import ITEM_BYTES, MESSAGE_BYTES, Oracle

MAIN = "tests.echo_engine:run_item_engine"
CONFIGS = {
    "lru": MultiModalConfig(mm_processor_cache_type="lru"),
    "small lru": MultiModalConfig(mm_processor_cache_gb=1.5 * ITEM_BYTES / 2**30),
    "shm": MultiModalConfig(mm_processor_cache_type="shm", mm_processor_cache_gb=2**-7),
    "small shm": MultiModalConfig(
        mm_processor_cache_type="shm", mm_processor_cache_gb=2.5 * ITEM_BYTES / 2**30
    ),
    "processor only": MultiModalConfig(mm_processor_cache_type="processor_only"),
    "none": MultiModalConfig(mm_processor_cache_gb=0.0),
}
# By default a P1 dies beside a shared cache that evicts; other tests of this file, and the storms
# of `test_drift.py`, have the cache that both processes mirror.
EVERY_CONFIG = [
    pytest.param(mm, id=name, marks=() if name == "small shm" else pytest.mark.slow)
    for name, mm in CONFIGS.items()
]


class Service:
    """P0 and P1, and the questions that are asked of them."""

    def __init__(self, client: AsyncEngineClient, supervisor: Supervisor, oracle: Oracle) -> None:
        self.client = client
        self.supervisor = supervisor
        self.oracle = oracle
        self.sent: list[EngineCoreRequest] = []
        self.num_bytes: list[int] = []
        self._num_requests = 0

    async def ask(self, *pictures: int, n: int = 1, last_token: int = 50) -> None:
        """Ask for what P1 sees; it must be what there is to see."""
        self._num_requests += 1
        params = SamplingParams(temperature=0.0, max_tokens=64, n=n)
        prompt: Any = self.oracle.prompt(pictures, last_token)
        stream = await self.client.add_request(
            GenerateRequest(f"{self._num_requests}", prompt, params)
        )
        outputs = [output async for output in stream]
        answers = [item.token_ids for item in outputs[-1].outputs]
        assert answers == [self.oracle.answer(pictures)] * n

    def kill(self) -> None:
        assert self.supervisor.pid is not None
        os.kill(self.supervisor.pid, signal.SIGKILL)

    async def until_ready_again(self, num_restarts: int) -> None:
        while self.supervisor.num_restarts < num_restarts or self.supervisor.state != "ready":
            await asyncio.sleep(0.02)


@asynccontextmanager
async def started_service(
    model_config: ModelConfig, mm: MultiModalConfig
) -> AsyncIterator[Service]:
    model_config = replace(model_config, mm=mm)
    cache = processor_cache_from_config(mm)
    engine_config = EngineConfig(model=model_config).with_mm(config_with_directory(mm, cache))
    supervisor = Supervisor(engine_config, main=MAIN, shutdown_timeout_s=1.0)
    oracle = Oracle(model_config)
    processor = InputProcessor(model_config, cache=cache)
    client = AsyncEngineClient(processor, supervisor, SchedulerConfig())
    service = Service(client, supervisor, oracle)
    send = supervisor.send

    def send_and_measure(message: EngineMessage) -> None:
        if isinstance(message, EngineCoreRequest):
            service.sent.append(message)
            service.num_bytes.append(sum(len(bytes(frame)) for frame in encode(message)))
        send(message)

    client.requests._send = send_and_measure
    await client.start()
    try:
        async with asyncio.timeout(120.0):
            yield service
    finally:
        await client.close()
        processor.close()


@pytest.mark.parametrize("mm", EVERY_CONFIG)
async def test_p1_forgets_and_dies_between_and_during_requests(
    model_config: ModelConfig, mm: MultiModalConfig
) -> None:
    async with started_service(model_config, mm) as service:
        for _ in range(2):
            await asyncio.gather(service.ask(1), service.ask(2, 1, 1), service.ask(3, n=2))
        forgetting = [FORGET_TOKEN if number % 3 == 0 else 50 for number in range(12)]
        await asyncio.gather(
            *(service.ask(number % 4, 2, last_token=last) for number, last in enumerate(forgetting))
        )
        service.kill()
        while service.supervisor.state == "ready":
            await asyncio.sleep(0.001)
        await service.until_ready_again(1)
        asked = [
            asyncio.create_task(service.ask(*pictures, n=1 + len(pictures)))
            for pictures in ((1, 2), (3,), (4, 4), (5, 1), (2,), (6,))
        ]
        num_sent = len(service.sent)
        while len(service.sent) < num_sent + 3:
            await asyncio.sleep(0.001)
        service.kill()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [result for result in results if result is not None] == []
        await asyncio.gather(*(service.ask(number % 7, 2) for number in range(8)))
        assert service.supervisor.num_restarts == 2


@pytest.mark.slow
async def test_a_request_that_kills_p1_does_so_twice_and_fails_alone(
    model_config: ModelConfig,
) -> None:
    async with started_service(model_config, CONFIGS["lru"]) as service:
        with pytest.raises(RequestQuarantinedError):
            await service.ask(1, last_token=DEATH_TOKEN)
        with pytest.raises(RequestQuarantinedError):
            await service.ask(1, last_token=DEATH_TOKEN)
        await service.until_ready_again(2)
        await service.ask(1, 2)
        assert service.supervisor.num_restarts == 2


async def test_a_repeated_picture_crosses_as_a_handle(model_config: ModelConfig) -> None:
    async with started_service(model_config, CONFIGS["shm"]) as service:
        for _ in range(3):
            await service.ask(1, 2, 3)
        assert max(service.num_bytes) < 500 + 3 * 1000


async def test_a_picture_crosses_once_and_malformed_frames_are_refused(
    model_config: ModelConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    async with started_service(model_config, CONFIGS["lru"]) as service:
        for _ in range(3):
            await service.ask(1, 2, 3)
        first, second, third = service.num_bytes
        assert first > 3 * ITEM_BYTES
        assert second == third
        assert second < MESSAGE_BYTES, "hashes, places, token ids, settings"
        sender = service.supervisor._engine.sender
        assert sender is not None
        good = [bytes(frame) for frame in encode(service.sent[0])]
        for frames in (
            [b"\x80\x04."],
            good[:1],
            [good[0][:-1], *good[1:]],
            [good[0], *(frame[:-1] for frame in good[1:])],
            [good[0].replace(b"pixel_values", b"pixel\xffvalues"), *good[1:]],
            [os.urandom(1000) for _ in range(5)],
        ):
            await sender._socket.send_multipart(frames)
        pid = service.supervisor.pid
        await asyncio.gather(service.ask(1), service.ask(2))
        assert service.supervisor.pid == pid
        assert service.supervisor.num_restarts == 0
    assert capfd.readouterr().err.count("dropped a malformed message") == 6
