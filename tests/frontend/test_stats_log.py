"""One line while the engine is busy, one when it falls idle, none after that."""

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from mmjax.cache.media.lru import CacheInfo
from mmjax.frontend.engine_client.stats_log import StatsLog
from mmjax.transport.messages import Heartbeat

IDLE = Heartbeat(num_running=0, num_waiting=0, kv_cache_usage=0.0, num_compilations=0)


class Engine:
    def __init__(self) -> None:
        self.heartbeat: Heartbeat | None = None
        self.mm = CacheInfo(0, 0)

    def says(self, time_s: float, **figures: Any) -> None:
        self.heartbeat = msgspec.structs.replace(IDLE, time_s=time_s, **figures)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def log(engine: Engine) -> StatsLog:
    return StatsLog(lambda: engine.heartbeat, lambda: engine.mm)


def line_of(log: StatsLog) -> str | None:
    return asyncio.run(log.make_line())


def test_throughputs_queues_and_hit_rates(engine: Engine, log: StatsLog) -> None:
    assert line_of(log) is None
    engine.says(100.0)
    assert line_of(log) is None, "idle"
    engine.says(
        110.0,
        num_running=2,
        num_waiting=3,
        kv_cache_usage=0.25,
        num_prompt_tokens=1000,
        num_generation_tokens=55,
        prefix_cache_hits=250,
        prefix_cache_queries=1000,
        encoder_cache_hits=1,
        encoder_cache_queries=3,
    )
    engine.mm = CacheInfo(1, 2)
    assert line_of(log) == (
        "Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 5.5 tokens/s, "
        "Running: 2 reqs, Waiting: 3 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%, "
        "Processor cache hit rate: 50.0%, Encoder cache hit rate: 33.3%"
    )


def test_one_line_when_it_falls_idle_and_none_after(engine: Engine, log: StatsLog) -> None:
    done = {"num_prompt_tokens": 10, "num_generation_tokens": 20, "prefix_cache_queries": 10}
    engine.says(10.0, **done, prefix_cache_hits=5)
    line = line_of(log)
    assert line is not None
    assert "generation throughput: 2.0" in line, "the first figures, over one interval"
    assert line_of(log) is None, "the same figures: the engine has not spoken since"
    for seconds in (20.0, 30.0, 40.0):
        engine.says(seconds, **done, prefix_cache_hits=5)
        line = line_of(log)
        assert (line is not None) == (seconds == 20.0)
        if line is not None:
            assert "generation throughput: 0.0" in line
            assert "Prefix cache hit rate: 50.0%" in line, "nobody asked since"


def test_a_new_engine_counts_from_zero(engine: Engine, log: StatsLog) -> None:
    engine.says(10.0, num_generation_tokens=500)
    assert line_of(log) is not None
    engine.heartbeat = None
    assert line_of(log) is None
    engine.says(30.0, num_generation_tokens=30)
    line = line_of(log)
    assert line is not None
    assert "generation throughput: 3.0" in line


async def test_it_logs_on_until_cancelled(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmjax.frontend.engine_client.stats_log.logger.propagate", True)
    caplog.set_level(logging.INFO, "mmjax.frontend.engine_client.stats_log")

    num_calls = 0
    enough = asyncio.Event()

    def ask() -> Heartbeat | None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise RuntimeError("no figures")
        engine.says(float(num_calls), num_running=1)
        if num_calls == 4:
            enough.set()
        return engine.heartbeat

    task = asyncio.create_task(StatsLog(ask, interval_s=0.001).run())
    await asyncio.wait_for(enough.wait(), 60.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert "could not be read" in caplog.text
    assert caplog.text.count("Running: 1 reqs") >= 2
