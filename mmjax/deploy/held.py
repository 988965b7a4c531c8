"""Answers that a replica holds for a while: a client whose router has died comes again for them.

A request with an `Idempotency-Key` is computed apart from who reads it. The same request with the
same key, at any router, is given what there is of its answer, and then the rest.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from blake3 import blake3

from mmjax.deploy.replica import (
    ForwardedRequest,
    NotHeld,
    ResponseEnd,
    ResponseHead,
    ResponseItem,
    ResponsePart,
)

MAX_UNREAD = 16
"""Answers that are computed while nobody reads them, at most: their clients may never come."""

_BYTES_PER_ITEM = 512
_BYTES_PER_BODY_BYTE = 4
"""Memory of an event for each byte of it; its mark has the same as objects."""


def held_key(headers: Mapping[str, str], request: ForwardedRequest) -> str | None:
    """Return what an answer is held by; None if the client gave no `Idempotency-Key`.

    Nobody gets the answer to another request, or one that was made with another API key.
    """
    given = headers.get("idempotency-key")
    if not given or request.method != "POST":
        return None
    digest = blake3()
    authorization = headers.get("authorization", "")
    for part in (given, authorization, request.path, request.query_string, request.body):
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8) + data)
    return digest.hexdigest()


class HeldAnswers:
    """A replica that holds what clients may come again for.

    For `seconds` after the last one has read it, and at most `max_bytes` of all of them.
    """

    def __init__(
        self,
        name: str,
        respond: Callable[[ForwardedRequest], AsyncGenerator[ResponseItem, None]],
        *,
        seconds: float,
        max_bytes: int,
    ) -> None:
        """`name`: the replica's; `respond`: `Replica.respond` of it."""
        self._name = name
        self._respond = respond
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._answers: dict[str, _Answer] = {}
        """The oldest first."""
        self._num_bytes = 0

    async def respond(self, request: ForwardedRequest) -> AsyncGenerator[ResponseItem, None]:
        """Yield the response, as `Replica.respond` does, or NotHeld."""
        if request.is_search:
            answer = self._answers.get(request.held_key or "")
            if answer is None:
                yield NotHeld(self._name)
                return
            items = self._read(answer)
        else:
            items = self._respond(request)
            # What goes on with another replica's stream lacks its beginning.
            if self._seconds and request.held_key and not (request.sent and request.sent.last):
                items = self._read(self._hold(request.held_key, items))
        async with aclosing(items):
            async for item in items:
                yield item

    async def close(self) -> None:
        """Drop all."""
        tasks = [answer.task for answer in self._answers.values()]
        for answer in list(self._answers.values()):
            self._drop(answer)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _hold(self, key: str, items: AsyncGenerator[ResponseItem, None]) -> "_Answer":
        if key in self._answers:
            self._drop(self._answers[key])
        answer = self._answers[key] = _Answer(key)
        answer.task = asyncio.create_task(self._compute(answer, items))
        return answer

    async def _compute(self, answer: "_Answer", items: AsyncGenerator[ResponseItem, None]) -> None:
        try:
            async with aclosing(items):
                async for item in items:
                    answer.add(item)
                    self._count(answer, item)
        finally:
            answer.end()

    async def _read(self, answer: "_Answer") -> AsyncGenerator[ResponseItem, None]:
        answer.num_readers += 1
        answer.stop_timer()
        try:
            async with aclosing(answer.read()) as items:
                async for item in items:
                    yield item
        finally:
            answer.num_readers -= 1
            if not answer.num_readers:
                self._leave(answer)

    def _leave(self, answer: "_Answer") -> None:
        """Hold an answer that nobody reads any more for a while."""
        if not answer.is_held:
            answer.task.cancel()
            return
        loop = asyncio.get_running_loop()
        answer.timer = loop.call_later(self._seconds, self._drop, answer)
        unread = [one for one in self._answers.values() if one.timer and not one.is_over]
        for one in unread[:-MAX_UNREAD]:
            self._drop(one)

    def _count(self, answer: "_Answer", item: ResponseItem) -> None:
        if _is_failure(item):
            self._drop(answer)
        if not answer.is_held:
            return
        length = len(item.body) if isinstance(item, ResponsePart) else 0
        size = _BYTES_PER_ITEM + _BYTES_PER_BODY_BYTE * length
        answer.num_bytes += size
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            answers = self._answers.values()
            self._drop(next((one for one in answers if one.timer), next(iter(answers))))

    def _drop(self, answer: "_Answer") -> None:
        """Hold an answer no more; who reads it gets all of it."""
        if not answer.is_held:
            return
        del self._answers[answer.key]
        self._num_bytes -= answer.num_bytes
        answer.is_held = False
        answer.stop_timer()
        if not answer.num_readers:
            answer.task.cancel()


class _Answer:
    """An answer, as far as it is there."""

    task: asyncio.Task[None]
    """Computes it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.num_bytes = self.num_readers = 0
        self.timer: asyncio.TimerHandle | None = None
        self.is_held, self.is_over = True, False
        self._items: list[ResponseItem] = []
        self._has_more = asyncio.Event()

    def add(self, item: ResponseItem) -> None:
        self._items.append(item)
        self._wake()

    def end(self) -> None:
        self.is_over = True
        self._wake()

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    async def read(self) -> AsyncGenerator[ResponseItem, None]:
        """Yield all of it, from the beginning."""
        number = 0
        while True:
            if not self.is_held and self.num_readers == 1:
                # Nobody comes for these again.
                del self._items[:number]
                number = 0
            if number < len(self._items):
                number += 1
                yield self._items[number - 1]
            elif self.is_over:
                return
            else:
                await self._has_more.wait()

    def _wake(self) -> None:
        self._has_more.set()
        self._has_more = asyncio.Event()


def _is_failure(item: ResponseItem) -> bool:
    """Whether an answer is none that anybody should get again."""
    if isinstance(item, ResponseHead):
        return item.status >= 400
    return isinstance(item, ResponseEnd) and not item.is_whole
