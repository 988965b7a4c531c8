"""P0 and P1 may come to differ in what they hold: no client ever sees it."""

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import pytest

from mmjax.cache import (
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    ShmObjectStoreSenderCache,
    config_with_directory,
    processor_cache_from_config,
)
from mmjax.config.engine_config import ModelConfig, MultiModalConfig, SchedulerConfig
from mmjax.engine.scheduling.admission import resolve_features
from mmjax.errors import EngineUnavailableError, RequestError
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.requests.request import GenerateRequest
from mmjax.params.sampling_params import SamplingParams
from tests.cache.shm_kit import num_mapped
from tests.echo_engine import FORGET_TOKEN, REFUSED_TOKEN, EchoSupervisor, item_tokens
from tests.kit import IMAGE_START, draw

ITEM_BYTES = 3 * 56 * 56 + 3 * 3 * 4 + 8
"""What one processed picture of the tiny model takes: bytes, their affine map, a count."""
MESSAGE_BYTES = 1500
"""More than a message takes beside the tensors of an item."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)

CacheType = Literal["lru", "shm", "processor_only"]


def mm_config(capacity_items: float, cache_type: CacheType = "lru") -> MultiModalConfig:
    return MultiModalConfig(
        mm_processor_cache_gb=capacity_items * ITEM_BYTES / 2**30,
        mm_processor_cache_type=cache_type,
    )


class Oracle:
    """What each prompt's items are without any cache."""

    def __init__(self, model_config: ModelConfig) -> None:
        mm = MultiModalConfig(mm_processor_cache_gb=0.0)
        self._processor = InputProcessor(replace(model_config, mm=mm))
        self.boi = self._processor.tokenizer.convert_tokens_to_ids(IMAGE_START)
        self.answer = cache(self._answer)

    def prompt(self, pictures: tuple[int, ...], last_token: int = 50) -> Any:
        ids = [2, *(token for _ in pictures for token in (self.boi, 60)), last_token]
        images = [draw(20 + picture, 30, picture) for picture in pictures]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}

    def _answer(self, pictures: tuple[int, ...]) -> list[int]:
        request = self._processor.process(GenerateRequest("oracle", self.prompt(pictures), GREEDY))
        return item_tokens(resolve_features(request.messages[0].mm_features, None))


@pytest.fixture(scope="module")
def oracle(model_config: ModelConfig) -> Oracle:
    return Oracle(model_config)


@dataclass
class Run:
    """One client and one engine in this process; the bridge between them is the real codec."""

    client: AsyncEngineClient
    supervisor: EchoSupervisor
    oracle: Oracle
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    num_answers: int = 0
    num_requests: int = 0

    async def ask(self, *pictures: int, n: int = 1, last_token: int = 50) -> None:
        """Ask for what P1 sees; it must be what there is to see."""
        self.num_requests += 1
        params = replace_n(n)
        prompt = self.oracle.prompt(pictures, last_token)
        stream = await self.client.add_request(
            GenerateRequest(f"{self.num_requests}", prompt, params)
        )
        outputs = [output async for output in stream]
        assert [item.token_ids for item in outputs[-1].outputs] == [
            self.oracle.answer(pictures)
        ] * n
        self.num_answers += 1

    @property
    def p0(self) -> MultiModalProcessorSenderCache:
        cache = self.client.input_processor.cache
        assert isinstance(cache, MultiModalProcessorSenderCache)
        return cache

    @property
    def p1(self) -> MultiModalReceiverCache:
        cache = self.supervisor.engine.cache
        assert isinstance(cache, MultiModalReceiverCache)
        return cache

    def check_mirrors(self) -> None:
        cache = self.client.input_processor.cache
        if isinstance(cache, ShmObjectStoreSenderCache):
            self.supervisor.engine.added.clear()
            gc.collect()
            assert num_mapped(cache.path) == 0, "all that was read was given back"
            return
        assert self.p0.order == self.p1.order
        assert self.p0.currsize == self.p1.currsize

    async def settle(self) -> None:
        """Wait until nothing is on its way."""
        while self.client.num_requests or self.supervisor.engine.running:
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.02)

    def die(self) -> None:
        self.supervisor.die(restarts=True)

    def revive(self) -> None:
        self.supervisor.health = True
        self.supervisor.become_ready()


def replace_n(n: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=64, n=n)


@asynccontextmanager
async def started_run(
    model_config: ModelConfig,
    oracle: Oracle,
    mm: MultiModalConfig,
    *,
    num_workers: int = 2,
    enable_prefix_caching: bool = True,
    timeout_s: float = 60.0,
) -> AsyncIterator[Run]:
    cache = processor_cache_from_config(mm)
    supervisor = EchoSupervisor(mm=config_with_directory(mm, cache))
    processor = InputProcessor(
        replace(model_config, mm=mm), cache=cache, enable_prefix_caching=enable_prefix_caching
    )
    client = AsyncEngineClient(processor, supervisor, SchedulerConfig(), num_workers=num_workers)
    await client.start()
    try:
        async with asyncio.timeout(timeout_s):
            yield Run(client, supervisor, oracle)
    finally:
        await client.close()
        processor.close()


# ---- the bridge carries an item once -------------------------------------------------------------


async def test_a_repeated_picture_does_not_cross_the_bridge(
    model_config: ModelConfig, oracle: Oracle
) -> None:
    async with started_run(model_config, oracle, mm_config(10)) as run:
        for _ in range(3):
            await run.ask(1)
        first, *others = run.supervisor.num_bytes
        assert first > ITEM_BYTES
        assert all(other < MESSAGE_BYTES for other in others)
        run.check_mirrors()
        await run.ask(2, 1, 2, n=3)
        assert run.supervisor.num_bytes[3] < 1.1 * first, "one new picture, sent once"
        assert all(other < MESSAGE_BYTES for other in run.supervisor.num_bytes[4:])
        run.check_mirrors()


@pytest.mark.parametrize(
    ("mm", "enable_prefix_caching", "num_items"),
    [
        (mm_config(10, "processor_only"), False, 1),
        (mm_config(0), True, 1),
        (mm_config(0), False, 2),
    ],
)
async def test_without_a_cache_in_p1_a_picture_crosses_with_every_message(
    model_config: ModelConfig,
    oracle: Oracle,
    mm: MultiModalConfig,
    enable_prefix_caching: bool,
    num_items: int,
) -> None:
    """Without any cache nothing is hashed, so that nobody knows that the two are one."""
    async with started_run(
        model_config, oracle, mm, enable_prefix_caching=enable_prefix_caching
    ) as run:
        for _ in range(2):
            await run.ask(1, 1, n=2)
        assert len(run.supervisor.num_bytes) == 4
        for size in run.supervisor.num_bytes:
            assert 0 < size - num_items * ITEM_BYTES < num_items * MESSAGE_BYTES


# ---- drift heals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0.5, 1, 2.5, 10])
async def test_an_engine_that_forgets(
    model_config: ModelConfig, oracle: Oracle, capacity: float
) -> None:
    async with started_run(model_config, oracle, mm_config(capacity)) as run:
        await run.ask(1, 2)
        run.p1.clear_cache()
        await run.ask(1, 3, 2)
        for _ in range(5):
            await asyncio.gather(
                run.ask(1), run.ask(2, n=2), run.ask(3, 1, 3, last_token=FORGET_TOKEN)
            )
        await run.settle()
        assert run.num_answers == 17


async def test_a_miss_is_healed_in_one_round(model_config: ModelConfig, oracle: Oracle) -> None:
    async with started_run(model_config, oracle, mm_config(10)) as run:
        await run.ask(1, 2, 3)
        run.supervisor.num_bytes.clear()
        run.p1.clear_cache()
        await run.ask(3, 2, 1, 4)
        assert len(run.supervisor.num_bytes) == 2
        assert run.supervisor.num_bytes[1] < 3 * (ITEM_BYTES + MESSAGE_BYTES), (
            "the fourth is there already"
        )
        run.check_mirrors()


async def test_the_last_round_counts_on_no_cache(
    model_config: ModelConfig, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of P1's that keeps nothing, where P0 believes that it keeps all."""
    async with started_run(model_config, oracle, mm_config(10)) as run:
        await run.ask(1, 2)
        monkeypatch.setattr(run.p1._cache, "put_if_fits", lambda *_: False)
        run.p1.clear_cache()
        run.supervisor.num_bytes.clear()
        await asyncio.gather(*(run.ask(1, 2, 3) for _ in range(4)))
        await run.ask(2, 1)


async def test_a_uuid_that_cannot_be_made_again_fails_alone(
    model_config: ModelConfig, oracle: Oracle
) -> None:
    async with started_run(model_config, oracle, mm_config(10)) as run:
        prompt = oracle.prompt((1,))
        named: Any = {**prompt, "multi_modal_uuids": {"image": ["mine"]}}
        bare: Any = {**named, "multi_modal_data": {"image": [None]}}
        for number, known in enumerate((named, bare)):
            stream = await run.client.add_request(GenerateRequest(f"known {number}", known, GREEDY))
            outputs = [output async for output in stream]
            assert outputs[-1].outputs[0].token_ids == oracle.answer((1,))
        run.p1.clear_cache()
        stream = await run.client.add_request(GenerateRequest("lost", bare, GREEDY))
        other = asyncio.create_task(run.ask(2, 3))
        with pytest.raises(RequestError, match="data is not provided") as caught:
            _ = [output async for output in stream]
        assert caught.value.status == 400
        await other
        with pytest.raises(RequestError, match="data is not provided"):
            await run.client.add_request(GenerateRequest("unknown", bare, GREEDY))
        await run.settle()


async def test_GHSA_ph3r_5jfg_f84f_refused_and_aborted_requests_leave_the_mirrors_equal(
    model_config: ModelConfig, oracle: Oracle
) -> None:
    async with started_run(model_config, oracle, mm_config(2.5)) as run:
        for number in range(12):
            with pytest.raises(RequestError, match="does not like"):
                await run.ask(number % 5, number % 3, n=2, last_token=REFUSED_TOKEN)
            too_long = oracle.prompt((number % 7,))
            too_long["prompt_token_ids"] += [50] * 200
            with pytest.raises(RequestError, match="128"):
                await run.client.add_request(GenerateRequest(f"long {number}", too_long, GREEDY))
            task = asyncio.create_task(run.ask(number % 4, number % 6))
            await asyncio.sleep(0.001 * (number % 4))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await run.settle()
            run.check_mirrors()
        assert len(run.p0.order) == 2


async def test_a_restart_during_requests(model_config: ModelConfig, oracle: Oracle) -> None:
    async with started_run(model_config, oracle, mm_config(10)) as run:
        await run.ask(1, 2)
        asked = [
            asyncio.create_task(run.ask(*pictures, n=n))
            for pictures, n in (((1,), 1), ((2, 1), 3), ((3,), 1), ((3, 2), 2))
        ]
        await asyncio.sleep(0.004)
        run.die()
        await asyncio.sleep(0.02)
        run.revive()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [result for result in results if result is not None] == []
        await run.settle()
        run.check_mirrors()


# ---- all at once, at random ----------------------------------------------------------------------


class Storm:
    """Many clients, while all goes wrong that can."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run = run
        self.rng = random.Random(seed)

    async def client(self) -> None:
        """Ask one thing; whatever happens to the engine, the answer is right."""
        rng, run = self.rng, self.run
        pictures = tuple(rng.randrange(8) for _ in range(rng.choice((1, 1, 2, 3))))
        n = rng.choice((1, 1, 1, 2, 3))
        match rng.randrange(10):
            case 0:
                with pytest.raises(RequestError, match="does not like"):
                    await self._persist(run.ask, *pictures, n=n, last_token=REFUSED_TOKEN)
            case 1:
                task = asyncio.create_task(self._persist(run.ask, *pictures, n=n))
                await asyncio.sleep(rng.random() * 0.02)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            case 2:
                await self._persist(run.ask, *pictures, n=n, last_token=FORGET_TOKEN)
            case _:
                await self._persist(run.ask, *pictures, n=n)

    async def _persist(
        self, ask: Callable[..., Awaitable[None]], *args: Any, **kwargs: Any
    ) -> None:
        """Retry after a CapacityError, which has nothing to do with the caches."""
        while True:
            while self.run.supervisor.state != "ready":
                await asyncio.sleep(0.005)
            try:
                return await ask(*args, **kwargs)
            except EngineUnavailableError:
                if self.run.supervisor.state == "ready":
                    raise

    async def weather(self) -> None:
        while True:
            await asyncio.sleep(self.rng.random() * 0.1)
            if self.rng.random() < 0.5 and self.run.supervisor.engine.cache is not None:
                self.run.supervisor.engine.cache.clear_cache()
            else:
                self.run.die()
                await asyncio.sleep(self.rng.random() * 0.03)
                self.run.revive()


@pytest.mark.parametrize(
    ("cache_type", "capacity"),
    [("lru", 0.5), ("lru", 1.5), ("lru", 3.2), ("lru", 100), ("shm", 2.5), ("shm", 100)],
)
@pytest.mark.parametrize(
    "count", [60, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_a_storm(
    model_config: ModelConfig,
    oracle: Oracle,
    cache_type: CacheType,
    capacity: float,
    count: int,
) -> None:
    limits: Any = {"num_workers": 3, "timeout_s": 600}
    mm = mm_config(capacity, cache_type)
    async with started_run(model_config, oracle, mm, **limits) as run:
        storm = Storm(run, seed=int(capacity * 10) + count)
        weather = asyncio.create_task(storm.weather())
        waiting = [storm.client for _ in range(count)]
        while waiting:
            batch = [waiting.pop()() for _ in range(min(len(waiting), 20))]
            await asyncio.gather(*batch)
        weather.cancel()
        await asyncio.gather(weather, return_exceptions=True)
        if run.supervisor.state != "ready":
            run.revive()
        await run.settle()
        for picture in range(8):
            await run.ask(picture)
        for pictures in ((0,), (1, 2), (3,)):
            await run.ask(*pictures)
        await run.settle()
        run.check_mirrors()
        assert run.num_answers > count // 2
