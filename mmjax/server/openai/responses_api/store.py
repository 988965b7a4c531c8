"""Responses that are kept in memory, for a while: to be read again, and to be gone on from."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmjax.errors import ResponseNotFoundError
from mmjax.server.openai.responses_api.conversation import Message
from mmjax.server.openai.responses_api.response import ResponseObject

_BYTES_PER_OBJECT = 64


@dataclass(slots=True, kw_only=True)
class StoredResponse:
    """A response with its conversation, which is a follow-up's history."""

    response: ResponseObject
    owner: str
    """Digest of the API key that made it; nobody else finds it."""
    input_items: list[dict[str, Any]]
    messages: list[Message]
    """All up to this response, its answer included once it is there; without `instructions`."""
    cancel: Callable[[], None] | None = None
    """Breaks a running response off."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer is there, and ended by itself."""
        return self.response.status in ("completed", "incomplete")

    @property
    def num_bytes(self) -> int:
        """Return about the size of what is kept."""
        return _size_of([self.messages, self.input_items, self.response.instructions])


class ResponseStore:
    """The latest responses, bounded in number and in size."""

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._num_bytes = 0

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._max_responses > 0

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, or what has become of it; drop the oldest ones for it."""
        response_id = stored.response.id
        self._drop(response_id)
        size = stored.num_bytes
        if size > self._max_bytes:
            return
        self._stored[response_id], self._sizes[response_id] = stored, size
        self._num_bytes += size
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))

    def get(self, response_id: str, owner: str, *, param: str | None = None) -> StoredResponse:
        """Return a response; ResponseNotFoundError if it is not kept, or is another's."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise ResponseNotFoundError(
                "there is no such response (any more): it was made with `store`: false, deleted, "
                "or dropped for newer ones",
                param=param,
            )
        self._stored.move_to_end(response_id)
        return stored

    def delete(self, response_id: str, owner: str) -> None:
        """Forget a response, and break it off if it is running."""
        stored = self.get(response_id, owner)
        self._drop(response_id)
        if stored.cancel is not None:
            stored.cancel()

    def holds(self, response_id: str) -> bool:
        """Return whether a response is kept."""
        return response_id in self._stored

    def _drop(self, response_id: str) -> None:
        if self._stored.pop(response_id, None) is not None:
            self._num_bytes -= self._sizes.pop(response_id)


def _size_of(value: Any) -> int:
    """Return about the bytes of JSON data in memory."""
    waiting, size = [value], 0
    while waiting:
        one = waiting.pop()
        size += _BYTES_PER_OBJECT
        if isinstance(one, str):
            size += len(one) if one.isascii() else 4 * len(one)
        elif isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
    return size
