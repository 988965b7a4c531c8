"""Requests are processed at the same time, and noted and sent one after the other."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from mmjax.cache import MultiModalProcessorSenderCache, MultiModalReceiverCache
from mmjax.config.engine_config import ModelConfig, MultiModalConfig, SchedulerConfig
from mmjax.engine.scheduling.admission import resolve_features
from mmjax.errors import MultiModalCacheMissError, RequestError
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.prompt.committer import CommittedMessage
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.requests.request import GenerateRequest
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.context import InputProcessingContext
from mmjax.transport.codec import decode, encode
from mmjax.transport.messages import CacheMiss, EngineCoreRequest
from tests.echo_engine import EchoSupervisor, item_tokens
from tests.frontend.test_drift import GREEDY, ITEM_BYTES, Oracle, mm_config

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def oracle(model_config: ModelConfig) -> Oracle:
    return Oracle(model_config)


def processor_of(model_config: ModelConfig, mm: MultiModalConfig) -> InputProcessor:
    return InputProcessor(replace(model_config, mm=mm))


# ---- at the same time ----------------------------------------------------------------------------


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> threading.Barrier:
    """Two calls of HF's processor with pictures, each of which waits for the other."""
    barrier = threading.Barrier(2, timeout=DEADLINE_S)
    call = InputProcessingContext.call_hf_processor

    def call_together(self: Any, hf_processor: Any, data: Any, kwargs: Any) -> Any:
        if "images" in data:
            barrier.wait()
        return call(self, hf_processor, data, kwargs)

    monkeypatch.setattr(InputProcessingContext, "call_hf_processor", call_together)
    return barrier


def test_two_threads_have_their_own_processors(
    model_config: ModelConfig, oracle: Oracle, meeting: threading.Barrier
) -> None:
    processor = processor_of(model_config, mm_config(10))
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(processor.process, GenerateRequest(f"{n}", oracle.prompt((n,)), GREEDY))
            for n in (1, 2)
        ]
        requests = [job.result(DEADLINE_S) for job in jobs]
    first, second = processor._pool._idle
    assert first.info.get_tokenizer() is not second.info.get_tokenizer()
    assert first.info.get_hf_processor() is not second.info.get_hf_processor()
    assert first.cache is second.cache is processor.cache
    assert first.item_hasher is second.item_hasher
    assert all(request.messages[0].mm_features[0].data is not None for request in requests)


async def test_the_client_processes_two_at_once_off_the_loop(
    model_config: ModelConfig, oracle: Oracle, meeting: threading.Barrier
) -> None:
    """And the engine answers a third meanwhile."""
    async with asyncio.timeout(DEADLINE_S):
        supervisor = EchoSupervisor(delay_s=0.001)
        client = AsyncEngineClient(
            processor_of(model_config, mm_config(10)), supervisor, SchedulerConfig()
        )
        await client.start()
        endless = SamplingParams(ignore_eos=True, max_tokens=None)
        text = await client.add_request(GenerateRequest("text", "red", endless, stream=True))
        await anext(text)
        prompts: list[Any] = [oracle.prompt((n,)) for n in (1, 2)]
        alone = asyncio.create_task(client.add_request(GenerateRequest("1", prompts[0], GREEDY)))
        while meeting.n_waiting == 0:
            await asyncio.sleep(0.001)
        for _ in range(3):
            await anext(text)
        assert not alone.done()
        streams = [await client.add_request(GenerateRequest("2", prompts[1], GREEDY)), await alone]
        for stream in streams:
            assert [output async for output in stream]
        text.close()
        await client.close()


# ---- one after the other -------------------------------------------------------------------------


class Mirror:
    """P1's cache, fed by what is committed, in that order."""

    def __init__(self, mm: MultiModalConfig, oracle: Oracle) -> None:
        self.cache = MultiModalReceiverCache(int(mm.mm_processor_cache_gb * 2**30))
        self._oracle = oracle
        self.num_seen = 0

    def take(self, committed_message: CommittedMessage) -> None:
        message = decode([bytes(frame) for frame in encode(committed_message.message)])
        assert isinstance(message, EngineCoreRequest)
        features = resolve_features(message.mm_features, self.cache)
        pictures = tuple(map(int, committed_message.request.request_id.split()))
        assert item_tokens(features) == self._oracle.answer(pictures)
        self.num_seen += 1


@pytest.mark.parametrize("capacity", [0.3, 1, 2.5, 4, 50])
@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_many_threads_never_miss(
    model_config: ModelConfig, oracle: Oracle, capacity: float, count: int
) -> None:
    """Prepared in any order, some given up and some refused: P1 holds what each message says."""
    mm = mm_config(capacity)
    processor, mirror = processor_of(model_config, mm), Mirror(mm, oracle)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        pictures = tuple(rng.randrange(6) for _ in range(rng.choice((1, 2, 3, 4))))
        prompt: Any = oracle.prompt(pictures)
        name = " ".join(map(str, pictures))
        params = replace_n(rng.choice((1, 1, 3)))
        if rng.random() < 0.1:
            prompt["prompt_token_ids"] += [50] * 200
            with pytest.raises(RequestError):
                processor.process(GenerateRequest(name, prompt, params), on_commit=mirror.take)
            return
        request = processor.prepare(GenerateRequest(name, prompt, params))
        if rng.random() < 0.9:
            processor.committer.commit(request, mirror.take)

    with ThreadPoolExecutor(3) as pool:
        for _ in pool.map(work, range(count)):
            pass
    assert isinstance(processor.cache, MultiModalProcessorSenderCache)
    assert processor.cache.order == mirror.cache.order
    assert processor.cache.currsize == mirror.cache.currsize <= capacity * ITEM_BYTES
    assert mirror.num_seen > count // 2


def replace_n(n: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, n=n)


def test_what_the_cache_lost_meanwhile_is_processed_again(
    model_config: ModelConfig, oracle: Oracle
) -> None:
    processor = processor_of(model_config, mm_config(10))
    processor.process(GenerateRequest("first", oracle.prompt((1, 2)), GREEDY))
    request = processor.prepare(GenerateRequest("second", oracle.prompt((2, 3)), GREEDY))
    assert len(request.prepared.fresh) == 1
    assert processor.cache is not None
    processor.cache.clear_cache()
    processor.committer.commit(request)
    features = resolve_features(request.messages[0].mm_features, None)
    assert item_tokens(features) == oracle.answer((2, 3))
    assert len(request.prepared.fresh) == 2


def test_a_request_whose_item_is_gone_is_refused_before_any_note(
    model_config: ModelConfig, oracle: Oracle
) -> None:
    processor = processor_of(model_config, mm_config(10))
    named: Any = {**oracle.prompt((1,)), "multi_modal_uuids": {"image": ["mine"]}}
    processor.process(GenerateRequest("first", named, GREEDY))
    prompt: Any = {**oracle.prompt((2, 3)), "multi_modal_uuids": {"image": [None, "mine"]}}
    prompt["multi_modal_data"]["image"][1] = None
    request = processor.prepare(GenerateRequest("second", prompt, GREEDY))
    processor.committer.invalidate(["mine"], epoch=0)
    assert isinstance(processor.cache, MultiModalProcessorSenderCache)
    order = processor.cache.order
    committed: list[CommittedMessage] = []
    with pytest.raises(RequestError, match="data is not provided"):
        processor.committer.commit(request, committed.append)
    assert processor.cache.order == order
    assert not committed


def test_a_released_request_can_be_sent_again(model_config: ModelConfig, oracle: Oracle) -> None:
    for mm in (mm_config(10), mm_config(10, "processor_only"), mm_config(0)):
        processor = processor_of(model_config, mm)
        request = processor.process(GenerateRequest("r", oracle.prompt((1, 2)), GREEDY))
        request.release()
        assert not request.prepared.fresh
        assert not request.messages[0].mm_features
        processor.committer.reset_engine()
        processor.committer.commit(request)
        features = resolve_features(request.messages[0].mm_features, None)
        assert item_tokens(features) == oracle.answer((1, 2))


@pytest.mark.parametrize("cache_type", ["lru", "shm", "processor_only"])
def test_an_inline_message_counts_on_nobody(
    model_config: ModelConfig, oracle: Oracle, cache_type: Any
) -> None:
    processor = processor_of(model_config, mm_config(50, cache_type))
    try:
        processor.process(GenerateRequest("first", oracle.prompt((1, 2)), GREEDY))
        request = processor.prepare(GenerateRequest("r", oracle.prompt((2, 1, 1)), GREEDY))
        processor.committer.commit(request, is_inline=True)
        has_data = [one.data is not None for one in request.messages[0].mm_features]
        assert has_data == [True, True, False], "each picture once"
        features = resolve_features(request.messages[0].mm_features, None)
        assert item_tokens(features) == oracle.answer((2, 1, 1))
    finally:
        processor.close()


def test_a_new_engine_holds_nothing(model_config: ModelConfig, oracle: Oracle) -> None:
    processor = processor_of(model_config, mm_config(10))
    committed: list[CommittedMessage] = []
    on_commit: Callable[[CommittedMessage], None] = committed.append
    for n in range(3):
        processor.process(GenerateRequest(f"{n}", oracle.prompt((1,)), GREEDY), on_commit=on_commit)
        if n == 1:
            processor.committer.reset_engine()
    assert [d.epoch for d in committed] == [0, 0, 1]
    has_data = [d.message.mm_features[0].data is not None for d in committed]
    assert has_data == [True, False, True]
    with pytest.raises(MultiModalCacheMissError):
        resolve_features(committed[1].message.mm_features, None)


@contextmanager
def held(lock: Any) -> Iterator[Callable[[], bool]]:
    """Have a thread hold a lock for 10 s at most; yields what says whether it still does."""
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_end.wait(10.0)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        yield thread.is_alive
    finally:
        may_end.set()
        thread.join()


async def test_the_loop_never_waits_for_a_commit(model_config: ModelConfig, oracle: Oracle) -> None:
    """As long as a thread copies a large item, the engine is read, and ends, and starts again."""
    mm = mm_config(10)
    async with asyncio.timeout(DEADLINE_S):
        supervisor = EchoSupervisor(mm=mm)
        client = AsyncEngineClient(processor_of(model_config, mm), supervisor, SchedulerConfig())
        await client.start()
        first: Any = oracle.prompt((1, 2))
        stream = await client.add_request(GenerateRequest("first", first, GREEDY))
        request = stream.request
        mm_hashes = list(request.prepared.mm_hashes["image"])
        with held(client.input_processor.committer._lock) as is_held:
            client.on_message(CacheMiss(request_id="gone", mm_hashes=mm_hashes))
            client.requests._note(
                partial(client.input_processor.committer.revert, request.messages[0])
            )
            supervisor.die(restarts=True)
            supervisor.become_ready()
            assert is_held(), "the loop waited"
        for number in range(3):
            again = await client.add_request(GenerateRequest(f"{number}", first, GREEDY))
            outputs = [output async for output in again]
            assert outputs[-1].outputs[0].token_ids == oracle.answer((1, 2))
        await client.close()


def test_what_an_engine_lacked_before_its_end_is_nothing_of_the_next(
    model_config: ModelConfig, oracle: Oracle
) -> None:
    processor = processor_of(model_config, mm_config(10))
    committer = processor.committer
    committer.reset_engine()
    epochs = [committer.epoch]
    request = processor.process(GenerateRequest("r", oracle.prompt((1,)), GREEDY))
    hashes = list(request.prepared.mm_hashes["image"])
    assert processor.cache is not None
    committer.invalidate(hashes, epoch=epochs[0] - 1)
    assert processor.cache.is_cached(hashes) == [True]
    committer.invalidate(hashes, epoch=epochs[0])
    assert processor.cache.is_cached(hashes) == [False]


def test_what_was_not_sent_is_taken_back(model_config: ModelConfig, oracle: Oracle) -> None:
    for cache_type in ("lru", "shm"):
        processor = processor_of(model_config, mm_config(50, cache_type))
        request = processor.process(GenerateRequest("r", oracle.prompt((1, 2)), GREEDY))
        processor.committer.revert(request.messages[0])
        assert processor.cache is not None
        assert processor.cache.is_cached(list(request.prepared.mm_hashes["image"])) == [False] * 2
        processor.close()
