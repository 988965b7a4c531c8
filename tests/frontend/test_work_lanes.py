"""Requests with much to decode have their own threads, so that others do not wait for them."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from mmjax.config.engine_config import SchedulerConfig
from mmjax.errors import RequestCancelledError
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.prompt import work_lanes
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.prompt.work_lanes import MAX_LIGHT_BYTES, WorkLanes
from mmjax.processing import missing_items
from mmjax.processing.media import encoded
from mmjax.processing.media.decode_budget import Cancellation, DecodeControl, split_by_bytes
from mmjax.requests.sampling_params import SamplingParams
from tests.echo_engine import EchoSupervisor
from tests.kit import draw
from tests.processing.test_media import encode


def with_lanes(body: Callable[[WorkLanes], Awaitable[None]], num_workers: int = 2) -> None:
    async def run() -> None:
        lanes = WorkLanes(num_workers)
        try:
            await asyncio.wait_for(body(lanes), 60.0)
        finally:
            lanes.close()

    asyncio.run(run())


class Heavy:
    """A job that decodes much, and ends when it is told to."""

    def __init__(self, num_bytes: int = MAX_LIGHT_BYTES + 1) -> None:
        self.num_bytes = num_bytes
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, control: DecodeControl) -> str:
        control.admit(self.num_bytes)
        self.has_begun.set()
        assert self.may_end.wait(60)
        control.cancellation.check()
        return "heavy"


def light(control: DecodeControl) -> str:
    control.admit(MAX_LIGHT_BYTES)
    return "light"


async def wait_for(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 60)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_light_work_passes_any_number_of_heavy_jobs(num_workers: int) -> None:
    async def body(lanes: WorkLanes) -> None:
        jobs = [Heavy() for _ in range(5)]
        running = [asyncio.create_task(lanes.run(job, Cancellation())) for job in jobs]
        await wait_for(jobs[0].has_begun)
        for _ in range(10):
            assert await lanes.run(light, Cancellation()) == "light"
        assert not any(task.done() for task in running)
        for job in jobs:
            job.may_end.set()
        assert await asyncio.gather(*running) == ["heavy"] * 5

    with_lanes(body, num_workers)


def test_heavy_jobs_are_done_in_their_order() -> None:
    async def body(lanes: WorkLanes) -> None:
        jobs = [Heavy() for _ in range(3)]
        running = []
        for job in jobs:
            running.append(asyncio.create_task(lanes.run(job, Cancellation())))
            await lanes.run(light, Cancellation())
        for number, job in enumerate(jobs):
            await wait_for(job.has_begun)
            assert [other.has_begun.is_set() for other in jobs[number + 1 :]] == [False] * (
                2 - number
            )
            job.may_end.set()
        assert await asyncio.gather(*running) == ["heavy"] * 3

    with_lanes(body)


def test_a_cancelled_heavy_job_never_begins() -> None:
    async def body(lanes: WorkLanes) -> None:
        first, second, third = Heavy(), Heavy(), Heavy()
        running = asyncio.create_task(lanes.run(first, Cancellation()))
        await wait_for(first.has_begun)
        cancellation = Cancellation()
        waiting = asyncio.create_task(lanes.run(second, cancellation))
        await lanes.run(light, Cancellation())
        cancellation.set()
        first.may_end.set()
        third.may_end.set()
        assert await running == "heavy"
        with pytest.raises(RequestCancelledError):
            await waiting
        assert await lanes.run(third, Cancellation()) == "heavy"
        assert not second.has_begun.is_set()

    with_lanes(body)


def test_errors_come_through() -> None:
    def fail(num_bytes: int, control: DecodeControl) -> None:
        control.admit(num_bytes)
        raise KeyError("x")

    async def body(lanes: WorkLanes) -> None:
        for num_bytes in (0, MAX_LIGHT_BYTES + 1):
            with pytest.raises(KeyError):
                await lanes.run(partial(fail, num_bytes), Cancellation())

    with_lanes(body)


def test_a_text_passes_pictures_whose_client_leaves(
    input_processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests with six pictures each hold no text up, and stop where they are cancelled."""
    monkeypatch.setattr(work_lanes, "MAX_LIGHT_BYTES", 0)
    one_by_one = partial(split_by_bytes, max_bytes=1)
    monkeypatch.setattr(missing_items, "split_by_bytes", one_by_one)
    decoded: list[bytes] = []
    has_begun, may_go_on = threading.Event(), threading.Event()
    load = encoded.load_image_bytes

    def wait_and_load(data: bytes, *args: Any, **kwargs: Any) -> Any:
        decoded.append(data)
        has_begun.set()
        assert may_go_on.wait(60)
        return load(data, *args, **kwargs)

    monkeypatch.setattr(encoded, "load_image_bytes", wait_and_load)

    def prompt(seed: int) -> Any:
        files = [encode(draw(20, 20, seed=seed + index)) for index in range(6)]
        return {"prompt": "<start_of_image>" * 6, "multi_modal_data": {"image": files}}

    async def body() -> None:
        client = AsyncEngineClient(input_processor, EchoSupervisor(), SchedulerConfig())
        await client.start()
        params = SamplingParams(max_tokens=8)
        heavy = [
            asyncio.create_task(client.add_request(f"h{seed}", prompt(seed), params))
            for seed in (10, 20)
        ]
        await wait_for(has_begun)
        for number in range(5):
            stream = await client.add_request(f"t{number}", "a red circle", params)
            assert [output async for output in stream][-1].finished
        assert len(decoded) == 1
        for task in heavy:
            task.cancel()
        await asyncio.gather(*heavy, return_exceptions=True)
        assert client.num_requests == 0
        may_go_on.set()
        # One that comes now finds the lane free: nothing of the others is decoded.
        await (await client.add_request("p", prompt(30), params)).__anext__()
        assert len(decoded) == 1 + 6
        await client.close()

    asyncio.run(asyncio.wait_for(body(), 60))
