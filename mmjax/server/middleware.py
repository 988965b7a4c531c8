"""Middleware: the access log, the request's id, and what refuses requests before any work.

Each is a function that returns an ASGI application around another one.
"""

import asyncio
import hashlib
import hmac
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmjax.errors import CapacityError, ShuttingDownError
from mmjax.server.openai.errors import (
    LOGGED_STATE,
    JsonResponse,
    client_address,
    error_response,
    internal_error_body,
    plain_error_response,
    route_path,
)
from mmjax.server.openai.request_body import API_KEY_STATE
from mmjax.server.pages import PAGE_FILES
from mmjax.system.logger import REQUEST_ID, cut, get_logger

logger = get_logger(__name__)
access_logger = get_logger("uvicorn.access")
"""Has the level that uvicorn's own access lines would have."""

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", *PAGE_FILES})
"""Paths that need no API key."""

Refusal = Callable[[Scope], Response | None]
"""Returns the answer to a request that is refused; None: it is not."""

_MAX_REQUEST_ID_CHARS = 128
_MAX_ACCESS_FIELD_CHARS = 128
"""Limit on each part of an access line, such as the path, whose length clients choose."""


def log_access(
    app: ASGIApp, *, count: Callable[[int], None], quiet_paths: Collection[str]
) -> ASGIApp:
    """Count responses by their status, and log those that no line tells of yet.

    In place of uvicorn's access log, which would tell of an error a second time.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
                is_told = LOGGED_STATE in scope.get("state", {}) or route_path(scope) in quiet_paths
                if not is_told:
                    _log_access(scope, message["status"])
            await send(message)

        await app(scope, receive, note if scope["type"] == "http" else send)

    return call


def _log_access(scope: Scope, status: int) -> None:
    target = quote(scope["path"])
    if query := scope["query_string"]:
        target += "?" + query.decode("ascii", "backslashreplace")
    fields = (client_address(scope), scope["method"], target)
    fields = tuple(cut(field, _MAX_ACCESS_FIELD_CHARS) for field in fields)
    access_logger.info('%s - "%s %s HTTP/%s" %d', *fields, scope["http_version"], status)


def set_request_id(app: ASGIApp) -> ASGIApp:
    """Set X-Request-Id on every response, and answer and log unhandled exceptions.

    The id is the client's, if it sent a valid one. Outermost, so that every response has one.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
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
            await app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            # Only the server's shutdown cancels a request as a whole.
            logger.info("broken off: the time of the shutdown is over")
            if not has_started:
                await error_response(ShuttingDownError())(scope, receive, send_with_id)
        except Exception:
            logger.exception("a request failed by a fault of the server")
            if not has_started:
                response = JsonResponse(internal_error_body(), 500)
                await response(scope, receive, send_with_id)
        finally:
            REQUEST_ID.reset(token)

    return call


def _clients_id(scope: Scope) -> str:
    """Return the client's id; "" if it has none or an invalid one."""
    ids = [value for name, value in scope["headers"] if name == b"x-request-id"]
    text = ids[0].decode("latin-1") if len(ids) == 1 else ""
    is_sane = len(text) <= _MAX_REQUEST_ID_CHARS and text.isascii() and text.isprintable()
    return text if is_sane else ""


# ---- what refuses ---------------------------------------------------------------------------


def refuse(app: ASGIApp, refusal: Refusal) -> ASGIApp:
    """Answer a request with its refusal, if it has one."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        response = None if scope["type"] == "lifespan" else refusal(scope)
        await (response or app)(scope, receive, send)

    return call


def without_key(api_keys: Iterable[str]) -> Refusal:
    """Refuse what bears none of the keys, on every path but `OPEN_PATHS`, be it there or not."""
    digests = [bytes.fromhex(one) for one in key_digests(api_keys)]

    def is_allowed(scope: Scope) -> bool:
        if scope["type"] != "http":
            return False
        # The path that routes are matched by, not one rebuilt from the Host header.
        if route_path(scope) in OPEN_PATHS:
            return True
        headers = [pair for pair in scope["headers"] if pair[0] in (b"authorization", b"x-api-key")]
        if len(headers) != 1:
            return False
        name, value = headers[0]
        # Anthropic's clients send the key alone.
        scheme, _, key = (b"bearer", b"", value) if name == b"x-api-key" else value.partition(b" ")
        digest = _digest(key.strip())
        # Compares all keys, by digests of one length: the time is independent of the keys.
        matches = [hmac.compare_digest(digest, known) for known in digests]
        scope.setdefault("state", {})[API_KEY_STATE] = digest.hex()
        return scheme.lower() == b"bearer" and any(matches)

    def refusal(scope: Scope) -> Response | None:
        if is_allowed(scope):
            return None
        return plain_error_response(
            401,
            "the API key is missing or wrong; send `Authorization: Bearer <key>`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    return refusal


def key_digests(api_keys: Iterable[str]) -> list[str]:
    """Return what a request's state has of the key that it bears."""
    return [_digest(key.encode()).hex() for key in api_keys]


def above_headers(max_headers: int, max_bytes: int) -> Refusal:
    """Refuse too many headers, or too large ones.

    h11 limits the size too, but not of what comes in one piece.
    """

    def refusal(scope: Scope) -> Response | None:
        headers = scope["headers"] if scope["type"] == "http" else ()
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        if len(headers) <= max_headers and num_bytes <= max_bytes:
            return None
        return plain_error_response(
            431,
            f"the request has more than {max_headers} headers, or more than {max_bytes} bytes of "
            "them; send fewer",
            headers={"Connection": "close"},
        )

    return refusal


def without_room(check_room: Callable[[], None], paths: Collection[str]) -> Refusal:
    """Refuse work while there is no room for it.

    `check_room` raises CapacityError without room; `paths`: those that take a body.
    """

    def refusal(scope: Scope) -> Response | None:
        if scope["type"] == "http" and scope["method"] == "POST" and route_path(scope) in paths:
            try:
                check_room()
            except CapacityError as error:
                return error_response(error)
        return None

    return refusal


def limit_body(app: ASGIApp, max_bytes: int, by_path: Mapping[str, int]) -> ASGIApp:
    """Refuse bodies over a limit, by Content-Length, or as soon as they exceed it.

    `by_path`: paths with a limit of their own.
    """

    def explain(num_bytes: str, limit: int) -> str:
        mend = "send smaller images" if limit == max_bytes else "send several"
        return f"the body has {num_bytes} bytes, at most {limit} are accepted; {mend}"

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = {"Connection": "close"}
        limit = by_path.get(route_path(scope), max_bytes)
        if (declared := _declared_length(scope)) > limit:
            response = plain_error_response(413, explain(f"{declared}", limit), headers=headers)
            await response(scope, receive, send)
            return
        num_bytes = 0

        async def count() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit:
                text = explain(f"{num_bytes} or more", limit)
                raise HTTPException(413, text, headers=headers)
            return message

        await app(scope, count, send)

    return call


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            # Bounds the conversion: no body's length has more digits.
            return int(value[:20])
    return 0
