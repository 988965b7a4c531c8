"""The client admits, streams, aborts, and survives what the engine does."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mmjax.config import MultiModalConfig, SchedulerConfig
from mmjax.errors import (
    CapacityError,
    EngineUnavailableError,
    MediaError,
    MediaIdConflictError,
    RequestError,
    RequestTimeoutError,
    RequestTypeError,
)
from mmjax.frontend.engine_client.client import AsyncEngineClient, RequestStream
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.sampling_params import SamplingParams
from tests.echo_engine import REFUSED_TOKEN, EchoEngine, EchoSupervisor

ENDLESS = SamplingParams(ignore_eos=True, max_tokens=None)


def with_client(
    input_processor: InputProcessor,
    body: Callable[[AsyncEngineClient, EchoSupervisor], Awaitable[None]],
    *,
    scheduler: SchedulerConfig | None = None,
    max_start_wait_s: float = 60.0,
    **supervisor_fields: Any,
) -> None:
    async def run() -> None:
        supervisor = EchoSupervisor(**supervisor_fields)
        client = AsyncEngineClient(
            input_processor,
            supervisor,
            scheduler or SchedulerConfig(),
            max_start_wait_s=max_start_wait_s,
        )
        await client.start()
        try:
            await asyncio.wait_for(body(client, supervisor), 60.0)
        finally:
            await client.close()

    asyncio.run(run())


async def text_of(stream: RequestStream) -> str:
    return "".join([output.outputs[0].text async for output in stream])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_generate_streams_what_was_added(input_processor: InputProcessor) -> None:
    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        outputs: list[RequestOutput] = []
        async for output in client.generate("r", "a red circle", SamplingParams(max_tokens=64)):
            outputs.append(output)
        assert "".join(output.outputs[0].text for output in outputs) == "a red circle"
        assert outputs[-1].finished
        assert client.num_requests == 0

    with_client(input_processor, body)


def test_many_at_once_do_not_mix(input_processor: InputProcessor) -> None:
    texts = [f"red {i} circle" for i in range(20)]

    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        async def ask(i: int) -> str:
            params = SamplingParams(max_tokens=64)
            return await text_of(
                await client.add_request(str(i), texts[i], params, stream=i % 2 == 0)
            )

        assert await asyncio.gather(*(ask(i) for i in range(20))) == texts

    with_client(input_processor, body, delay_s=0.001)


def test_leaving_early_aborts(input_processor: InputProcessor) -> None:
    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        outputs = client.generate("r", "red", ENDLESS)
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]
        await until(lambda: supervisor.engine.aborted == ["r"])
        assert client.num_requests == 0
        finished = await client.add_request("s", "red", SamplingParams(max_tokens=2))
        await text_of(finished)
        finished.close()
        await asyncio.sleep(0.02)
        assert supervisor.engine.aborted == ["r"], "a finished request is not aborted"

    with_client(input_processor, body, delay_s=0.001)


def test_prompts_may_be_made_in_the_pool(input_processor: InputProcessor) -> None:
    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        params = SamplingParams(max_tokens=64)
        assert await text_of(await client.add_request("r", lambda: "red", params)) == "red"

        def fail() -> str:
            raise RequestError("no", param="messages")

        with pytest.raises(RequestError, match="no"):
            await client.add_request("s", fail, params)
        assert client.num_requests == 0

    with_client(input_processor, body)


def test_what_the_engine_refuses(input_processor: InputProcessor) -> None:
    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        good = await client.add_request("a", "red", ENDLESS)
        bad = await client.add_request("b", [5, REFUSED_TOKEN], SamplingParams(n=2))
        with pytest.raises(RequestError, match="does not like") as caught:
            await text_of(bad)
        assert (caught.value.status, caught.value.param) == (400, "prompt")
        assert await text_of(good)

    with_client(input_processor, body)


def test_a_fault_in_one_text_is_that_requests_alone(
    input_processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        params = SamplingParams(max_tokens=64)
        process = client._output_processor.process

        def fail_on_bad(deltas: Any) -> Any:
            if deltas[0].request_id == "bad":
                raise ZeroDivisionError("at 0x7fffdeadbeef")
            return process(deltas)

        monkeypatch.setattr(client._output_processor, "process", fail_on_bad)
        bad = await client.add_request("bad", "red", params)
        good = await client.add_request("good", "circle", params)
        with pytest.raises(RequestError) as caught:
            await text_of(bad)
        assert caught.value.status == 500
        assert "0x" not in caught.value.message
        assert await text_of(good) == "circle"

    with_client(input_processor, body, delay_s=0.01)


def test_too_many_get_429_before_any_work(input_processor: InputProcessor) -> None:
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=1)

    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        streams = [await client.add_request(str(i), "red", ENDLESS) for i in range(2)]

        def never() -> str:
            raise AssertionError("processed a request that is over the limit")

        with pytest.raises(CapacityError):
            await client.add_request("x", never, ENDLESS)
        for stream in streams:
            stream.close()
        await text_of(await client.add_request("y", "red", SamplingParams(max_tokens=2)))

    with_client(input_processor, body, scheduler=scheduler, delay_s=0.01)


def test_every_sequence_counts_until_its_request_ends(input_processor: InputProcessor) -> None:
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_queued_reqs=4)

    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        three = SamplingParams(n=3, ignore_eos=True, max_tokens=None)
        first = await client.add_request("a", "red", three)
        second = await client.add_request("b", "red", three)
        with pytest.raises(CapacityError, match="holds 6 sequences and takes 6"):
            await client.add_request("c", "red", ENDLESS)
        with pytest.raises(RequestError, match="`n` is 7") as caught:
            await client.add_request("d", "red", SamplingParams(n=7))
        assert (caught.value.status, caught.value.param) == (400, "n")
        first.close()
        (await client.add_request("e", "red", three)).close()
        second.close()
        assert (client.num_requests, client.num_seqs) == (0, 0)

    with_client(input_processor, body, scheduler=scheduler, delay_s=0.01)


ERRORS = [
    RequestError("no", param="prompt"),
    RequestTypeError("no", param="n"),
    MediaError("no", param="multi_modal_data"),
    MediaIdConflictError("no", param="multi_modal_uuids"),
    CapacityError("no", retry_after_s=7.0),
    RequestTimeoutError(),
    EngineUnavailableError("no"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_the_engine_is_the_same_error_here(
    input_processor: InputProcessor, error: RequestError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: EchoEngine, request: Any) -> None:
        raise error

    monkeypatch.setattr(EchoEngine, "add_request", refuse)

    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        stream = await client.add_request("r", "red", ENDLESS)
        with pytest.raises(RequestError) as caught:
            await text_of(stream)
        found = caught.value
        assert (found.status, found.code) == (error.status, error.code)
        assert (found.message, found.param) == (error.message, error.param)
        assert getattr(found, "retry_after_s", None) == getattr(error, "retry_after_s", None)
        assert isinstance(found, CapacityError) == isinstance(error, CapacityError)

    with_client(input_processor, body, mm=MultiModalConfig(mm_processor_cache_gb=0.0))


def test_a_request_waits_for_the_start(input_processor: InputProcessor) -> None:
    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        early = asyncio.create_task(client.add_request("r", "red", SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.05)
        assert not early.done()
        assert client.num_requests == 1
        supervisor.become_ready()
        await text_of(await early)

    with_client(input_processor, body, is_started_ready=False)


def test_a_start_that_takes_too_long_is_503(input_processor: InputProcessor) -> None:
    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        with pytest.raises(EngineUnavailableError, match="starting"):
            await client.add_request("r", "red", SamplingParams())
        assert client.num_requests == 0

    with_client(input_processor, body, is_started_ready=False, max_start_wait_s=0.1)


def test_a_crash_replays_what_has_shown_nothing(input_processor: InputProcessor) -> None:
    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        shown = await client.add_request("shown", "red", ENDLESS, stream=True)
        await anext(shown)
        supervisor.delay_s = 1000.0  # from the next one on, a step never ends
        await asyncio.sleep(0.1)
        waiting = await client.add_request("waiting", "red", SamplingParams(max_tokens=64))
        supervisor.die(restarts=True)
        with pytest.raises(EngineUnavailableError, match="restarts"):
            await text_of(shown)
        supervisor._task.cancel()
        supervisor.delay_s = 0.0
        await supervisor.start(client)
        assert await text_of(waiting) == "red"
        assert [request.request_id for request in supervisor.engine.added] == ["waiting"]

    with_client(input_processor, body, delay_s=0.01)


def test_a_request_is_replayed_once(input_processor: InputProcessor) -> None:
    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        poison = await client.add_request("poison", "red", ENDLESS)
        supervisor.die(restarts=True)
        supervisor.become_ready()
        supervisor.die(restarts=True)
        with pytest.raises(EngineUnavailableError):
            await text_of(poison)

    with_client(input_processor, body, delay_s=1000.0)


def test_a_dead_engine_answers_all(input_processor: InputProcessor) -> None:
    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        stream = await client.add_request("r", "red", ENDLESS)
        supervisor.die(restarts=False)
        with pytest.raises(EngineUnavailableError, match="restarted"):
            await text_of(stream)
        with pytest.raises(EngineUnavailableError):
            await client.add_request("s", "red", ENDLESS)

    with_client(input_processor, body, delay_s=1000.0)


def test_waiting_tokens_are_limited(input_processor: InputProcessor) -> None:
    """A prompt behind others is refused; alone it is admitted, however long."""

    async def body(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
        prompt, params = "red circle " * 10, SamplingParams(max_tokens=2)
        first = await client.add_request("a", prompt, params)
        with pytest.raises(CapacityError, match="--max-num-queued-tokens"):
            await client.add_request("b", prompt, params)
        assert client.num_requests == 1
        first.close()
        (await client.add_request("c", prompt, params)).close()

    scheduler = SchedulerConfig(max_num_queued_tokens=8)
    with_client(input_processor, body, scheduler=scheduler, delay_s=3600)
