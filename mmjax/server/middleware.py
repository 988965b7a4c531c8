"""Middleware: the access log, the request's id, the API key, the size of the body, and room."""

import asyncio
import hashlib
import hmac
import uuid
from collections.abc import Callable, Collection, Iterable
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmjax.errors import CapacityError, ShuttingDownError
from mmjax.server.openai.errors import (
    LOGGED_STATE,
    client_address,
    error_response,
    internal_error_body,
    json_response,
    plain_error_response,
)
from mmjax.server.playground import PAGE_FILES
from mmjax.system.logger import REQUEST_ID, cut, get_logger

logger = get_logger(__name__)
access_logger = get_logger("uvicorn.access")
"""Has the level that uvicorn's own access lines would have."""

OPEN_PATHS = frozenset({"/health", "/ready", "/version", *PAGE_FILES})
"""Paths that need no API key."""


API_KEY_STATE = "api_key_digest"
"""Entry of a request's state with the digest of its API key."""

_MAX_REQUEST_ID_CHARS = 128
_MAX_ACCESS_FIELD_CHARS = 128
"""Limit on each part of an access line, such as the path, whose length clients choose."""


class AccessMiddleware:
    """Counts responses by their status, and logs those that no line tells of yet.

    In place of uvicorn's access log, which would tell of an error a second time.
    """

    def __init__(
        self, app: ASGIApp, *, count: Callable[[int], None], quiet_paths: Collection[str]
    ) -> None:
        self._app = app
        self._count = count
        self._quiet_paths = frozenset(quiet_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and count."""

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(message["status"])
                self._log(scope, message["status"])
            await send(message)

        await self._app(scope, receive, note if scope["type"] == "http" else send)

    def _log(self, scope: Scope, status: int) -> None:
        if LOGGED_STATE in scope.get("state", {}) or scope["path"] in self._quiet_paths:
            return
        target = quote(scope["path"])
        if query := scope["query_string"]:
            target += "?" + query.decode("ascii", "backslashreplace")
        fields = (client_address(scope), scope["method"], target)
        fields = tuple(cut(field, _MAX_ACCESS_FIELD_CHARS) for field in fields)
        access_logger.info('%s - "%s %s HTTP/%s" %d', *fields, scope["http_version"], status)


class RequestIdMiddleware:
    """Sets X-Request-Id on every response, and answers and logs unhandled exceptions.

    The id is the client's, if it sent a valid one. Outermost, so that every response has one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; answer unhandled exceptions with a 500."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _clients_id(scope) or uuid.uuid4().hex
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                header = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        token = REQUEST_ID.set(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            # Only the server's shutdown cancels a request as a whole.
            logger.info("broken off: the time of the shutdown is over")
            if not has_started:
                await error_response(ShuttingDownError())(scope, receive, send_with_id)
        except Exception:
            logger.exception("a request failed by a fault of the server")
            if not has_started:
                response = json_response(internal_error_body(), 500)
                await response(scope, receive, send_with_id)
        finally:
            REQUEST_ID.reset(token)


def _clients_id(scope: Scope) -> str:
    """Return the client's id; "" if it has none or an invalid one."""
    ids = [value for name, value in scope["headers"] if name == b"x-request-id"]
    text = ids[0].decode("latin-1") if len(ids) == 1 else ""
    is_sane = len(text) <= _MAX_REQUEST_ID_CHARS and text.isascii() and text.isprintable()
    return text if is_sane else ""


class KeyMiddleware:
    """Requires an API key on every path but `OPEN_PATHS`, whether it exists or not."""

    def __init__(self, app: ASGIApp, api_keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        response = plain_error_response(
            401,
            "the API key is missing or wrong; send `Authorization: Bearer <key>`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await response(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["type"] != "http":
            return False
        # The path that routes are matched by, not one rebuilt from the Host header.
        if scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS:
            return True
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(headers) != 1:
            return False
        scheme, _, key = headers[0].partition(b" ")
        digest = _digest(key.strip())
        # Compares all keys, by digests of one length: the time is independent of the keys.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        scope.setdefault("state", {})[API_KEY_STATE] = digest.hex()
        return scheme.lower() == b"bearer" and any(matches)


class BodyLimitMiddleware:
    """Refuses bodies over a limit, by Content-Length, or as soon as they exceed it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, counting bytes, or answer 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (num_declared := _declared_length(scope)) > self._max_bytes:
            response = plain_error_response(
                413,
                self._explain(f"{num_declared}"),
                code="http_413",
                headers={"Connection": "close"},
            )
            await response(scope, receive, send)
            return
        num_bytes = 0

        async def count() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                detail = self._explain(f"{num_bytes} or more")
                raise HTTPException(413, detail, headers={"Connection": "close"})
            return message

        await self._app(scope, count, send)

    def _explain(self, num_bytes: str) -> str:
        most = self._max_bytes
        return f"the body has {num_bytes} bytes, at most {most} are accepted; send smaller images"


class RoomMiddleware:
    """Refuses work that there is no room for, before anything is spent on it."""

    def __init__(
        self, app: ASGIApp, *, check_room: Callable[[], None], paths: Collection[str]
    ) -> None:
        """`check_room` raises CapacityError without room; `paths`: those that take a body."""
        self._app = app
        self._check_room = check_room
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 429."""
        if scope["type"] == "http" and scope["method"] == "POST" and self._is_work(scope):
            try:
                self._check_room()
            except CapacityError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_work(self, scope: Scope) -> bool:
        return scope["path"].removeprefix(scope.get("root_path", "")) in self._paths


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            # Bounds the conversion: no body's length has more digits.
            return int(value[:20])
    return 0
