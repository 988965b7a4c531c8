"""The client admits, streams, aborts, and survives what the engine does."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mmjax.config.engine_config import MultiModalConfig, SchedulerConfig
from mmjax.errors import (
    CapacityError,
    EngineUnavailableError,
    MediaError,
    MediaIdConflictError,
    RequestError,
    RequestQuarantinedError,
    RequestTimeoutError,
    RequestTypeError,
)
from mmjax.frontend.engine_client.client import AsyncEngineClient, PendingRequest
from mmjax.frontend.engine_client.request_stream import RequestStream
from mmjax.frontend.engine_client.suspects import EngineExit
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.frontend.prompt.committer import CommittedMessage
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.requests.request import GenerateRequest
from mmjax.params.sampling_params import SamplingParams
from mmjax.transport.messages import EngineMessage
from tests.echo_engine import REFUSED_TOKEN, EchoEngine, EchoSupervisor

ENDLESS = SamplingParams(ignore_eos=True, max_tokens=None)


@asynccontextmanager
async def started_client(
    input_processor: InputProcessor,
    *,
    scheduler: SchedulerConfig | None = None,
    max_start_wait_s: float = 60.0,
    **supervisor_fields: Any,
) -> AsyncIterator[tuple[AsyncEngineClient, EchoSupervisor]]:
    supervisor = EchoSupervisor(**supervisor_fields)
    client = AsyncEngineClient(
        input_processor,
        supervisor,
        scheduler or SchedulerConfig(),
        max_start_wait_s=max_start_wait_s,
    )
    await client.start()
    try:
        async with asyncio.timeout(60.0):
            yield client, supervisor
    finally:
        await client.close()


async def add(client: AsyncEngineClient, *args: Any, **fields: Any) -> RequestStream:
    return await client.add_request(GenerateRequest(*args, **fields))


async def text_of(stream: RequestStream) -> str:
    return "".join([output.outputs[0].text async for output in stream])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def test_generate_streams_what_was_added(input_processor: InputProcessor) -> None:
    async with started_client(input_processor) as (client, _):
        outputs: list[RequestOutput] = []
        params = SamplingParams(max_tokens=64)
        request = GenerateRequest("r", "a red circle", params, stream=True)
        async for output in await client.add_request(request):
            outputs.append(output)
        assert "".join(output.outputs[0].text for output in outputs) == "a red circle"
        assert outputs[-1].finished
        assert client.num_requests == 0


async def test_many_at_once_do_not_mix(input_processor: InputProcessor) -> None:
    texts = [f"red {i} circle" for i in range(20)]
    async with started_client(input_processor, delay_s=0.001) as (client, _):

        async def ask(i: int) -> str:
            params = SamplingParams(max_tokens=64)
            return await text_of(await add(client, str(i), texts[i], params, stream=i % 2 == 0))

        assert await asyncio.gather(*(ask(i) for i in range(20))) == texts


async def test_leaving_early_aborts(input_processor: InputProcessor) -> None:
    async with started_client(input_processor, delay_s=0.001) as (client, supervisor):
        outputs = await add(client, "r", "red", ENDLESS, stream=True)
        await anext(outputs)
        outputs.close()
        await until(lambda: supervisor.engine.aborted == ["r"])
        assert client.num_requests == 0
        finished = await add(client, "s", "red", SamplingParams(max_tokens=2))
        await text_of(finished)
        finished.close()
        await asyncio.sleep(0.02)
        assert supervisor.engine.aborted == ["r"], "a finished request is not aborted"


async def test_prompts_may_be_made_in_the_pool(input_processor: InputProcessor) -> None:
    async with started_client(input_processor) as (client, _):
        params = SamplingParams(max_tokens=64)
        assert await text_of(await add(client, "r", lambda: "red", params)) == "red"

        def fail() -> str:
            raise RequestError("no", param="messages")

        with pytest.raises(RequestError, match="no"):
            await add(client, "s", fail, params)
        assert client.num_requests == 0


async def test_what_the_engine_refuses(input_processor: InputProcessor) -> None:
    async with started_client(input_processor) as (client, _):
        good = await add(client, "a", "red", ENDLESS)
        bad = await add(client, "b", [5, REFUSED_TOKEN], SamplingParams(n=2))
        with pytest.raises(RequestError, match="does not like") as caught:
            await text_of(bad)
        assert (caught.value.status, caught.value.param) == (400, "prompt")
        assert await text_of(good)


async def test_a_fault_in_one_text_is_that_requests_alone(
    input_processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started_client(input_processor, delay_s=0.01) as (client, _):
        params = SamplingParams(max_tokens=64)
        process = client.requests.outputs.process

        def fail_on_bad(delta: Any, outputs: Any) -> None:
            if delta.request_id == "bad":
                raise ZeroDivisionError("at 0x7fffdeadbeef")
            process(delta, outputs)

        monkeypatch.setattr(client.requests.outputs, "process", fail_on_bad)
        bad = await add(client, "bad", "red", params)
        good = await add(client, "good", "circle", params)
        with pytest.raises(RequestError) as caught:
            await text_of(bad)
        assert caught.value.status == 500
        assert "0x" not in caught.value.message
        assert await text_of(good) == "circle"


async def test_too_many_get_429_before_any_work(input_processor: InputProcessor) -> None:
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=1)
    async with started_client(input_processor, scheduler=scheduler, delay_s=0.01) as (client, _):
        streams = [await add(client, str(i), "red", ENDLESS) for i in range(2)]

        def never() -> str:
            raise AssertionError("processed a request that is over the limit")

        with pytest.raises(CapacityError):
            await add(client, "x", never, ENDLESS)
        for stream in streams:
            stream.close()
        await text_of(await add(client, "y", "red", SamplingParams(max_tokens=2)))


async def test_every_sequence_counts_until_its_request_ends(
    input_processor: InputProcessor,
) -> None:
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_queued_reqs=4)
    async with started_client(input_processor, scheduler=scheduler, delay_s=0.01) as (client, _):
        three = SamplingParams(n=3, ignore_eos=True, max_tokens=None)
        first = await add(client, "a", "red", three)
        second = await add(client, "b", "red", three)
        with pytest.raises(CapacityError, match="holds 6 sequences and takes 6"):
            await add(client, "c", "red", ENDLESS)
        with pytest.raises(RequestError, match="`n` is 7") as caught:
            await add(client, "d", "red", SamplingParams(n=7))
        assert (caught.value.status, caught.value.param) == (400, "n")
        first.close()
        (await add(client, "e", "red", three)).close()
        second.close()
        assert (client.num_requests, client.capacity.num_seqs) == (0, 0)


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
async def test_an_error_of_the_engine_is_the_same_error_here(
    input_processor: InputProcessor, error: RequestError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: EchoEngine, request: Any) -> None:
        raise error

    monkeypatch.setattr(EchoEngine, "add_request", refuse)
    async with started_client(input_processor, mm=MultiModalConfig(mm_processor_cache_gb=0.0)) as (
        client,
        _,
    ):
        stream = await add(client, "r", "red", ENDLESS)
        with pytest.raises(RequestError) as caught:
            await text_of(stream)
        found = caught.value
        assert (found.status, found.code) == (error.status, error.code)
        assert (found.message, found.param) == (error.message, error.param)
        assert getattr(found, "retry_after_s", None) == getattr(error, "retry_after_s", None)
        assert isinstance(found, CapacityError) == isinstance(error, CapacityError)


async def test_a_request_waits_for_the_start(input_processor: InputProcessor) -> None:
    async with started_client(input_processor, is_started_ready=False) as (client, supervisor):
        early = asyncio.create_task(add(client, "r", "red", SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.05)
        assert not early.done()
        assert client.num_requests == 1
        supervisor.become_ready()
        await text_of(await early)


async def test_a_start_that_takes_too_long_is_503(input_processor: InputProcessor) -> None:
    async with started_client(input_processor, is_started_ready=False, max_start_wait_s=0.1) as (
        client,
        _,
    ):
        with pytest.raises(EngineUnavailableError, match="starting"):
            await add(client, "r", "red", SamplingParams())
        assert client.num_requests == 0


TEXT = "a red circle and a blue square with four corners"
TEXT_IDS_PARAMS: dict[str, SamplingParams] = {
    "plain": SamplingParams(max_tokens=64),
    "two": SamplingParams(max_tokens=64, n=2, temperature=1.0, seed=5),
    "stop string": SamplingParams(max_tokens=64, stop=["blue sq"]),
    "stop string included": SamplingParams(
        max_tokens=64, stop=["square"], include_stop_str_in_output=True
    ),
    "logprobs": SamplingParams(max_tokens=64, logprobs=2),
    "length": SamplingParams(max_tokens=7),
    "no text": SamplingParams(max_tokens=64, detokenize=False),
}


def joined(outputs: list[RequestOutput], n: int) -> list[Any]:
    """Return what a stream said of each sequence."""
    parts = [
        [one for output in outputs for one in output.outputs if one.index == i] for i in range(n)
    ]
    return [
        (
            "".join(one.text for one in mine),
            [token_id for one in mine for token_id in one.token_ids],
            [entry for one in mine for entry in one.logprobs or ()],
            (mine[-1].finish_reason, mine[-1].stop_reason, mine[-1].cumulative_logprob),
        )
        for mine in parts
    ]


async def revive(client: AsyncEngineClient, supervisor: EchoSupervisor) -> None:
    supervisor.health = True
    supervisor.become_ready()


def allow_one_step(engine: EchoEngine) -> None:
    """Let the engine compute once, for requests: the test may be slower than it."""
    step, seen = engine.step, engine.num_steps
    engine.step = lambda: step() if engine.running and engine.num_steps == seen else []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("params", TEXT_IDS_PARAMS.values(), ids=TEXT_IDS_PARAMS)
async def test_a_restart_after_every_token_changes_nothing(
    input_processor: InputProcessor, params: SamplingParams, stream: bool
) -> None:
    async with started_client(input_processor, delay_s=0.002) as (client, supervisor):

        async def ask(request_id: str) -> list[RequestOutput]:
            handle = await add(client, request_id, TEXT, params, stream=stream)
            return [output async for output in handle]

        expected = await ask("whole")
        allow_one_step(supervisor.engine)
        asked = asyncio.create_task(ask("broken"))
        num_deaths = 0
        while not asked.done():
            seen = supervisor.engine.num_steps
            await until(lambda seen=seen: supervisor.engine.num_steps > seen or asked.done())
            supervisor.die(restarts=True)
            num_deaths += 1
            allow_one_step(supervisor.engine)
            await revive(client, supervisor)
        assert num_deaths >= 5
        assert joined(await asked, params.n) == joined(expected, params.n)
        assert (await asked)[-1].num_cached_tokens == expected[-1].num_cached_tokens
        assert client.num_requests == 0


async def test_requests_that_come_during_a_restart_wait(input_processor: InputProcessor) -> None:
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=2)
    async with started_client(input_processor, scheduler=scheduler) as (client, supervisor):
        supervisor.die(restarts=True)
        params = SamplingParams(max_tokens=64)
        waiting = [await add(client, f"{i}", "red", params) for i in range(3)]
        with pytest.raises(CapacityError):
            await add(client, "too many", "red", params)
        assert not supervisor.engine.added
        await revive(client, supervisor)
        assert [await text_of(one) for one in waiting] == ["red"] * 3


async def test_deadlines_count_on_during_a_restart(
    input_processor: InputProcessor,
) -> None:
    async with started_client(input_processor, delay_s=0.002) as (client, supervisor):
        begun = await add(
            client, "begun", "red", ENDLESS, stream=True, deadline=time.monotonic() + 3600
        )
        await anext(begun)
        assert begun.expiry is not None
        assert 3000 < begun.expiry.when() - asyncio.get_running_loop().time() < 3602
        supervisor.die(restarts=True)
        client._end("begun", RequestTimeoutError())
        late = await add(client, "late", "red", ENDLESS, deadline=time.monotonic() + 0.001)
        for stream in (begun, late):
            with pytest.raises(RequestTimeoutError):
                await text_of(stream)
        assert client.num_requests == 0
        await revive(client, supervisor)
        assert await text_of(await add(client, "s", "red", SamplingParams())) == "red"
        assert [request.request_id for request in supervisor.engine.added] == ["s"]


async def test_who_leaves_during_a_restart_is_forgotten(input_processor: InputProcessor) -> None:
    async with started_client(input_processor, delay_s=0.002) as (client, supervisor):
        stream = await add(client, "r", "red", ENDLESS, stream=True)
        await anext(stream)
        supervisor.die(restarts=True)
        stream.close()
        await revive(client, supervisor)
        assert await text_of(await add(client, "s", "red", SamplingParams())) == "red"
        assert [request.request_id for request in supervisor.engine.added] == ["s"]


def crash(*request_ids: str) -> EngineExit:
    return EngineExit(cause="crash", request_ids=request_ids)


async def test_a_request_that_crashes_twice_fails_alone_and_is_refused_after_that(
    input_processor: InputProcessor,
) -> None:
    async with started_client(input_processor, delay_s=1000.0) as (client, supervisor):
        params = SamplingParams(max_tokens=64)
        good = await add(client, "good", TEXT, params)
        poison = await add(client, "poison", "red", SamplingParams(n=2, temperature=1.0))
        await until(lambda: len(supervisor.engine.added) == 3)
        supervisor.die(restarts=True, engine_exit=crash("good", "poison-0", "poison-1"))
        await revive(client, supervisor)
        # The first suspect is there alone, until it has a token; so is the second, then.
        await until(lambda: "good" in {one.request_id for one in supervisor.engine.added})
        new = await add(client, "new", "red", params)
        send, tried = client.requests._send, []

        def send_and_crash(message: EngineMessage) -> None:
            send(message)
            if getattr(message, "request_id", "") == "poison-1":
                tried.extend(one.request_id for one in supervisor.engine.added)
                supervisor.die(restarts=True, engine_exit=crash("good", "poison-0"))

        client.requests._send = send_and_crash
        # A token of the first of its two answers would clear it before the second is sent.
        allow_one_step(supervisor.engine)
        supervisor.delay_s = 0.0
        supervisor.wake()
        await until(lambda: supervisor.state == "restarting")
        assert tried == ["good", "poison-0", "poison-1"]
        client.requests._send = send
        await revive(client, supervisor)
        with pytest.raises(RequestQuarantinedError) as caught:
            await text_of(poison)
        assert caught.value.status == 500
        assert await text_of(good) == TEXT
        assert await text_of(new) == "red"
        for name in ("again", "and again"):
            with pytest.raises(RequestQuarantinedError):
                await add(client, name, "red", SamplingParams(n=2, temperature=1.0))
        assert await text_of(await add(client, "other", "red", SamplingParams())) == "red"
        assert client.num_requests == 0


async def test_tokens_of_another_engine_are_gone_on_after(input_processor: InputProcessor) -> None:
    async with started_client(input_processor) as (client, supervisor):
        for name, params in TEXT_IDS_PARAMS.items():
            handle = await add(client, name, TEXT, params, stream=True)
            outputs = [output async for output in handle]
            whole = joined(outputs, params.n)
            for cut in range(1, len(whole[0][1]) + 1):
                told = [
                    [one for output in outputs for one in output.outputs if one.index == i][:cut]
                    for i in range(params.n)
                ]
                ids = [[t for one in mine for t in one.token_ids] for mine in told]
                rest = await add(
                    client, f"{name} {cut}", TEXT, params, stream=True, generated_token_ids=ids
                )
                outputs = [output async for output in rest]
                again = joined(outputs, params.n)
                # First what it brought, event by event as it was told.
                for i, mine in enumerate(told):
                    items = [one for output in outputs for one in output.outputs if one.index == i]
                    assert [(one.text, one.token_ids) for one in items[: len(mine)]] == [
                        (one.text, one.token_ids) for one in mine
                    ]
                for new, all_ in zip(again, whole, strict=True):
                    assert new[:2] == all_[:2]
                    assert new[3][:2] == all_[3][:2]
        assert client.num_requests == 0
        assert not supervisor.engine.running


async def test_a_whole_answer_has_the_tokens_of_the_other_engine(
    input_processor: InputProcessor,
) -> None:
    async with started_client(input_processor) as (client, _):
        ids = input_processor.tokenize(TEXT)
        handle = await add(
            client, "r", TEXT, SamplingParams(max_tokens=64), generated_token_ids=[ids[:5]]
        )
        assert await text_of(handle) == TEXT


@pytest.mark.parametrize("generated", [[[5]], [[5], [10**7]], [[5], [-1]]])
async def test_tokens_that_no_engine_gave_are_refused(
    input_processor: InputProcessor, generated: list[list[int]]
) -> None:
    async with started_client(input_processor) as (client, _):
        with pytest.raises(RequestError) as caught:
            await add(client, "r", TEXT, SamplingParams(n=2), generated_token_ids=generated)
        assert caught.value.param == "generated_token_ids"


async def test_a_paused_engine_refuses_at_once_and_says_for_how_long(
    input_processor: InputProcessor,
) -> None:
    async with started_client(input_processor, delay_s=1000.0) as (client, supervisor):
        stream = await add(client, "r", "red", ENDLESS)
        supervisor.retry_after_s = 9.0
        supervisor.die(restarts=True, state="paused")
        for wait in (text_of(stream), add(client, "s", "red", ENDLESS)):
            with pytest.raises(EngineUnavailableError, match="again and again") as caught:
                await wait
            assert caught.value.retry_after_s == 9.0


async def test_a_request_that_a_pause_refused_in_part_is_refused(
    input_processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause ends between the commits of its two sequences."""
    async with started_client(input_processor) as (client, supervisor):
        on_committed = client._on_committed

        def change(pending: PendingRequest, committed: CommittedMessage) -> None:
            supervisor.state = "restarting" if committed.index else "paused"
            on_committed(pending, committed)

        monkeypatch.setattr(client, "_on_committed", change)
        with pytest.raises(EngineUnavailableError):
            await add(client, "r", "red", SamplingParams(n=2, max_tokens=2))
        assert client.num_requests == 0


async def test_a_dead_engine_answers_all(input_processor: InputProcessor) -> None:
    async with started_client(input_processor, delay_s=1000.0) as (client, supervisor):
        stream = await add(client, "r", "red", ENDLESS)
        supervisor.die(restarts=False)
        with pytest.raises(EngineUnavailableError, match="restarted"):
            await text_of(stream)
        with pytest.raises(EngineUnavailableError):
            await add(client, "s", "red", ENDLESS)


async def test_waiting_tokens_are_limited(input_processor: InputProcessor) -> None:
    """A prompt behind others is refused; alone it is admitted, however long."""
    scheduler = SchedulerConfig(max_num_queued_tokens=8)
    async with started_client(input_processor, scheduler=scheduler, delay_s=3600) as (client, _):
        prompt, params = "red circle " * 10, SamplingParams(max_tokens=2)
        first = await add(client, "a", prompt, params)
        with pytest.raises(CapacityError, match="--max-num-queued-tokens"):
            await add(client, "b", prompt, params)
        assert client.num_requests == 1
        first.close()
        (await add(client, "c", prompt, params)).close()
