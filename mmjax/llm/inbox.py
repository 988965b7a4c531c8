"""Messages that the engine of this process has yet to take."""

from collections import deque
from collections.abc import Callable

from mmjax.engine.core import EngineCore
from mmjax.errors import MultiModalCacheMissError, RequestError
from mmjax.frontend.engine_client.committer import CommittedMessage, SenderCacheCommitter
from mmjax.frontend.engine_client.resend_queue import MAX_MISSES


class Inbox:
    """Committed messages to the engine, in order."""

    def __init__(
        self,
        committer: SenderCacheCommitter,
        engine: EngineCore,
        *,
        begin: Callable[..., object],
    ) -> None:
        """`begin` is called once with each request, and `stream`, before its first message."""
        self._committer = committer
        self._engine = engine
        self._begin = begin
        self.is_stream = False
        """Whether the requests' outputs are what each step adds."""
        self._committed: deque[CommittedMessage] = deque()
        self._num_to_come: dict[str, int] = {}
        """request_id -> messages that the engine has not received yet."""
        self._num_misses: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._committed)

    def put(self, committed: CommittedMessage) -> None:
        """Add a message; from any thread, under the committer's lock."""
        self._committed.append(committed)

    def take(self) -> None:
        """Add the next message to the engine; on a cache miss, commit and queue it again."""
        committed = self._committed.popleft()
        request = committed.request
        if request.request_id not in self._num_to_come:
            self._num_to_come[request.request_id] = len(request.messages)
            self._begin(request, stream=self.is_stream)
        try:
            self._engine.add_request(committed.message)
        except MultiModalCacheMissError as miss:
            self._send_again(committed, miss)
            return
        self._num_misses.pop(committed.message.request_id, None)
        self._num_to_come[request.request_id] -= 1
        if not self._num_to_come[request.request_id]:
            del self._num_to_come[request.request_id]
            request.release()

    def discard(self) -> None:
        """Drop all messages; only the engine's cache is updated, as the sender cache expects."""
        while self._committed:
            message = self._committed.popleft().message
            try:
                self._engine.add_request(message)
            except MultiModalCacheMissError as miss:
                self._committer.invalidate(miss.mm_hashes)
            except RequestError:
                continue
            self._engine.abort([message.request_id])
        self._num_to_come.clear()
        self._num_misses.clear()

    def _send_again(self, committed: CommittedMessage, miss: MultiModalCacheMissError) -> None:
        message_id = committed.message.request_id
        num_misses = self._num_misses[message_id] = self._num_misses.get(message_id, 0) + 1
        if num_misses > MAX_MISSES:
            raise RuntimeError(
                f"request {message_id} came {num_misses} times with all of its tensors, and still "
                f"the engine has {miss}; switch the cache off with `mm_processor_cache_gb=0`"
            ) from miss
        self._committer.invalidate(miss.mm_hashes)
        self._committer.commit(
            committed.request,
            self.put,
            indices=[committed.index],
            is_inline=num_misses >= MAX_MISSES,
        )
