"""Requests with much to decode have their own threads, so that others do not wait for them."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from mmjax.config.engine_config import SchedulerConfig
from mmjax.errors import RequestCancelledError
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.media import connector
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.prompt.processor_pool import RequestThreads
from mmjax.frontend.requests.request import GenerateRequest
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing import MediaLimits, processor
from mmjax.processing.media import encoded
from mmjax.processing.media.decode_budget import Cancellation, split_by_bytes
from mmjax.processing.media.encoded import EncodedImage
from mmjax.system.loop_calls import LoopCalls
from tests.echo_engine import EchoSupervisor
from tests.kit import draw
from tests.processing.test_media import encode


@asynccontextmanager
async def started_threads(num_workers: int = 2) -> AsyncIterator[RequestThreads]:
    threads = RequestThreads(num_workers, LoopCalls(asyncio.get_running_loop()))
    try:
        async with asyncio.timeout(60.0):
            yield threads
    finally:
        threads.close()


class Heavy:
    """A job that ends when it is told to."""

    def __init__(self, threads: RequestThreads) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.cancellation = Cancellation()
        self.task = asyncio.create_task(threads.run(self._run, self.cancellation, is_heavy=True))

    def _run(self) -> str:
        self.has_begun.set()
        assert self.may_end.wait(60)
        return "heavy"


async def run_light(threads: RequestThreads) -> None:
    assert await threads.run(lambda: "light", Cancellation()) == "light"


async def wait_for(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 60)


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_light_work_passes_any_number_of_heavy_jobs(num_workers: int) -> None:
    async with started_threads(num_workers) as threads:
        jobs = [Heavy(threads) for _ in range(5)]
        await wait_for(jobs[0].has_begun)
        for _ in range(10):
            await run_light(threads)
        assert not any(job.task.done() for job in jobs)
        for job in jobs:
            job.may_end.set()
        assert await asyncio.gather(*(job.task for job in jobs)) == ["heavy"] * 5


async def test_heavy_jobs_are_done_in_their_order() -> None:
    async with started_threads() as threads:
        jobs = [Heavy(threads) for _ in range(3)]
        for number, job in enumerate(jobs):
            await wait_for(job.has_begun)
            await run_light(threads)
            later = jobs[number + 1 :]
            assert not any(other.has_begun.is_set() for other in later)
            job.may_end.set()
        assert await asyncio.gather(*(job.task for job in jobs)) == ["heavy"] * 3


async def test_a_cancelled_heavy_job_never_begins() -> None:
    async with started_threads() as threads:
        first, second, third = (Heavy(threads) for _ in range(3))
        await wait_for(first.has_begun)
        second.cancellation.set()
        for job in (first, second, third):
            job.may_end.set()
        assert await first.task == "heavy"
        with pytest.raises(RequestCancelledError):
            await second.task
        assert await third.task == "heavy"
        assert not second.has_begun.is_set()


@pytest.mark.parametrize("is_heavy", [False, True])
async def test_errors_come_through(is_heavy: bool) -> None:
    def fail() -> None:
        raise KeyError("x")

    async with started_threads() as threads:
        with pytest.raises(KeyError):
            await threads.run(fail, Cancellation(), is_heavy=is_heavy)


async def test_a_text_passes_pictures_whose_client_leaves(
    input_processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests with six pictures each hold no text up, and stop where they are cancelled."""
    monkeypatch.setattr(connector, "MAX_BATCH_BYTES", 0)
    one_by_one = partial(split_by_bytes, max_bytes=1)
    monkeypatch.setattr(processor, "split_by_bytes", one_by_one)
    decoded: list[bytes] = []
    has_begun, may_go_on = threading.Event(), threading.Event()
    load = encoded.decode_image

    def wait_and_load(data: bytes, *args: Any, **kwargs: Any) -> Any:
        decoded.append(data)
        has_begun.set()
        assert may_go_on.wait(60)
        return load(data, *args, **kwargs)

    monkeypatch.setattr(encoded, "decode_image", wait_and_load)

    def prompt(seed: int) -> Any:
        files = [
            EncodedImage(encode(draw(20, 20, seed=seed + index)), MediaLimits())
            for index in range(6)
        ]
        return {"prompt": "<start_of_image>" * 6, "multi_modal_data": {"image": files}}

    async with asyncio.timeout(60):
        client = AsyncEngineClient(input_processor, EchoSupervisor(), SchedulerConfig())
        await client.start()
        params = SamplingParams(max_tokens=8)
        heavy = [
            asyncio.create_task(
                client.add_request(GenerateRequest(f"h{seed}", prompt(seed), params))
            )
            for seed in (10, 20)
        ]
        await wait_for(has_begun)
        for number in range(5):
            stream = await client.add_request(GenerateRequest(f"t{number}", "a red circle", params))
            assert [output async for output in stream][-1].finished
        assert len(decoded) == 1
        for task in heavy:
            task.cancel()
        await asyncio.gather(*heavy, return_exceptions=True)
        assert client.num_requests == 0
        may_go_on.set()
        # One that comes now finds the lane free: nothing of the others is decoded.
        await (await client.add_request(GenerateRequest("p", prompt(30), params))).__anext__()
        assert len(decoded) == 1 + 6
        await client.close()


def test_what_is_cached_is_no_work(
    input_processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where caches know it by more than its content, nobody can tell before it is hashed."""
    monkeypatch.setattr(connector, "MAX_BATCH_BYTES", 0)
    picture = EncodedImage(encode(draw(21, 22, seed=77)), MediaLimits())
    prompt: Any = {"prompt": "<start_of_image>", "multi_modal_data": {"image": [picture]}}
    is_heavy: Any = input_processor.connector.is_heavy
    assert is_heavy(prompt)
    salted = {**prompt, "cache_salt": "mine"}
    for one in (prompt, salted):
        with input_processor._pool.borrow() as processor:
            salt = one.get("cache_salt")
            processor.apply("<start_of_image>", {"image": [picture]}, cache_salt=salt)
        assert not is_heavy(one)
        assert is_heavy(salted) == (one is prompt)
    for name, value in (("cache_salt", "theirs"), ("multi_modal_uuids", {"image": ["cat"]})):
        assert is_heavy({**prompt, name: value})
    broken = EncodedImage(b"no picture", MediaLimits())
    assert not is_heavy({**prompt, "multi_modal_data": {"image": [broken]}})
    assert not is_heavy("a text")


async def test_jobs_that_never_start_end_with_the_threads() -> None:
    async with started_threads() as threads:
        heavy = Heavy(threads)
        await wait_for(heavy.has_begun)
        waiting = asyncio.create_task(threads.run(lambda: 1, Cancellation(), is_heavy=True))
        await asyncio.sleep(0)
        threads.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        heavy.may_end.set()
        assert await heavy.task == "heavy"
