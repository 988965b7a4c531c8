"""The routes, without HTTP: a body goes the way that it goes from a client, and so its answer."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from mmjax.errors import CapacityError, EngineUnavailableError, RequestError, RequestValueError
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.server.batches.journal import LineResponse
from mmjax.server.openai.continuation import new_hex
from mmjax.server.openai.errors import error_body, internal_error_body
from mmjax.server.openai.request_body import API_KEY_STATE, RequestReader
from mmjax.server.openai.streaming import STAYS
from mmjax.system.logger import REQUEST_ID, get_logger

logger = get_logger(__name__)

LAST_PRIORITY = 2**31 - 1
"""Of a server's batches, where requests have priorities: all others come first."""

_SHARE_OF_SEQS = 0.75
"""Where they have none: what a batch leaves free of the sequences that run, others find at once."""

_LOOK_S = 0.02
_MAX_WAIT_S = 30.0


class Route(NamedTuple):
    """What serves a path."""

    model: type[BaseModel]
    serve: Callable[[Request, Any], Coroutine[Any, Any, Response]]


class Endpoints:
    """The routes of one application that batches may name."""

    def __init__(
        self, client: AsyncEngineClient, reader: RequestReader, routes: Mapping[str, Route]
    ) -> None:
        self._client = client
        self._reader = reader
        self._routes = routes
        self._turn = asyncio.Lock()

    @property
    def max_in_work(self) -> int:
        """How many lines that give way are in work: those that run, and as many behind them."""
        return 2 * self._client.max_num_seqs

    async def answer(
        self, url: str, body: bytes, *, owner: str = "", gives_way: bool = False
    ) -> LineResponse:
        """Return what a route answers; wait as long as there is no room for a request.

        Args:
            url: The route's path.
            body: As a client would send it.
            owner: The digest of the API key that it is sent with.
            gives_way: Whether other requests come first.

        Raises:
            EngineUnavailableError: The engine will not come back.
        """
        request_id = f"req_{new_hex()}"
        token = REQUEST_ID.set(request_id)
        try:
            while True:
                await self._wait_for_room(gives_way)
                try:
                    status, data = await self._try(url, body, owner, gives_way)
                except (CapacityError, EngineUnavailableError) as error:
                    if self._client.supervisor.state == "dead":
                        raise
                    await asyncio.sleep(min(error.retry_after_s or 1.0, _MAX_WAIT_S))
                else:
                    return LineResponse(status, request_id, msgspec.Raw(data))
        finally:
            REQUEST_ID.reset(token)

    async def _try(self, url: str, body: bytes, owner: str, gives_way: bool) -> tuple[int, bytes]:
        """Return the status and the body; an error that time may mend is raised."""
        try:
            response = await self._serve(url, body, owner, gives_way)
        except (CapacityError, EngineUnavailableError):
            raise
        except RequestError as error:
            return error.status, msgspec.json.encode(error_body(error))
        except Exception:
            logger.exception("a line of a batch failed by a fault of the server")
            return 500, msgspec.json.encode(internal_error_body())
        return response.status_code, bytes(response.body)

    async def _serve(self, url: str, body: bytes, owner: str, gives_way: bool) -> Response:
        route = self._routes[url]
        request = _request(url, owner)
        fields = await self._reader.read_line(body, route.model)
        if getattr(fields, "stream", False):
            raise RequestValueError.about("stream", "is true, but a batch has whole answers")
        has_priorities = self._client.scheduling_policy == "priority"
        if gives_way and has_priorities and not getattr(fields, "priority", 0):
            fields = fields.model_copy(update={"priority": LAST_PRIORITY})
        return await route.serve(request, fields)

    async def _wait_for_room(self, gives_way: bool) -> None:
        """Wait while others need the engine, and for ever once the server drains."""
        if not gives_way:
            return
        # One line at a time looks.
        async with self._turn:
            while self._reader.is_stopping or not self._has_room():
                await asyncio.sleep(_LOOK_S)

    def _has_room(self) -> bool:
        limit = self._client.max_num_seqs
        if self._client.scheduling_policy == "priority":
            return self._client.capacity.num_seqs < self.max_in_work
        # None waits in the engine, where others would stand behind it.
        return self._client.capacity.num_seqs < max(1, int(_SHARE_OF_SEQS * limit))


def _request(path: str, owner: str) -> Request:
    """Return the request of a client that never leaves, whose body is read already."""
    return Request(
        {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [],
            "state": {API_KEY_STATE: owner},
            STAYS: True,
        }
    )
