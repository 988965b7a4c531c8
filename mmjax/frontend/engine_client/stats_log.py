"""A log line every few seconds while the engine is busy: throughput, queues, caches."""

import asyncio
from collections.abc import Callable

from mmjax.cache.media.lru import CacheInfo
from mmjax.system.logger import get_logger
from mmjax.transport.messages import Heartbeat

logger = get_logger(__name__)

INTERVAL_S = 10.0


class StatsLog:
    """Logs the difference of the engine's statistics to those of the last line."""

    def __init__(
        self,
        get_heartbeat: Callable[[], Heartbeat | None],
        get_mm_cache_info: Callable[[], CacheInfo] | None = None,
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`get_mm_cache_info` may block, and is called in a thread."""
        self._interval_s = interval_s
        self._get_heartbeat = get_heartbeat
        self._get_mm_cache_info = get_mm_cache_info
        self._last: Heartbeat | None = None
        self._last_mm = CacheInfo(0, 0)
        self._was_busy = False
        self._task: asyncio.Task[None] | None = None
        self._rates: dict[str, float] = {}

    def start(self) -> None:
        """Start to log, in the running event loop."""
        self._task = asyncio.create_task(self.run(), name="log-stats")

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def run(self) -> None:
        """Log until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                line = await self.make_line()
            except Exception:
                logger.exception("the engine's figures could not be read")
                continue
            if line is not None:
                logger.info(line)

    async def make_line(self) -> str | None:
        """Return the line for the time since the last call; None while idle or without statistics.

        The first idle call after a busy one gives a line, too. The hit rate of a cache without
        look-ups is repeated from the last line.
        """
        now, last = self._get_heartbeat(), self._last
        if now is None or (last is not None and now.time_s <= last.time_s):
            return None
        self._last = now
        if last is None or now.num_generation_tokens < last.num_generation_tokens:
            last = _new_engine(now.time_s - self._interval_s)
        seconds = now.time_s - last.time_s
        num_prompt = now.num_prompt_tokens - last.num_prompt_tokens
        num_generated = now.num_generation_tokens - last.num_generation_tokens
        is_busy = bool(num_prompt or num_generated or now.num_running or now.num_waiting)
        was_busy, self._was_busy = self._was_busy, is_busy
        if not (is_busy or was_busy):
            return None
        mm = self._last_mm
        if self._get_mm_cache_info is not None:
            mm = await asyncio.to_thread(self._get_mm_cache_info)
        rates = [
            self._rate("Prefix cache", _prefix_info(now) - _prefix_info(last)),
            self._rate("Processor cache", mm - self._last_mm),
            self._rate("Encoder cache", _encoder_info(now) - _encoder_info(last)),
        ]
        host = _host_info(now) - _host_info(last)
        if now.kv_offload_queries:
            rates.append(self._rate("Host memory", host))
        self._last_mm = mm
        figures = [
            f"Avg prompt throughput: {num_prompt / seconds:.1f} tokens/s",
            f"Avg generation throughput: {num_generated / seconds:.1f} tokens/s",
            f"Running: {now.num_running} reqs",
            f"Waiting: {now.num_waiting} reqs",
            f"KV cache usage: {now.kv_cache_usage:.1%}",
        ]
        return ", ".join(figures + rates)

    def _rate(self, name: str, info: CacheInfo) -> str:
        if info.total:
            self._rates[name] = info.hit_ratio
        return f"{name} hit rate: {self._rates.get(name, 0.0):.1%}"


def _new_engine(time_s: float) -> Heartbeat:
    return Heartbeat(
        num_running=0, num_waiting=0, kv_cache_usage=0.0, num_compilations=0, time_s=time_s
    )


def _prefix_info(heartbeat: Heartbeat) -> CacheInfo:
    return CacheInfo(heartbeat.prefix_cache_hits, heartbeat.prefix_cache_queries)


def _host_info(heartbeat: Heartbeat) -> CacheInfo:
    return CacheInfo(heartbeat.kv_offload_hits, heartbeat.kv_offload_queries)


def _encoder_info(heartbeat: Heartbeat) -> CacheInfo:
    return CacheInfo(heartbeat.encoder_cache_hits, heartbeat.encoder_cache_queries)
