"""Errors that are not OpenAI's, such as those of Ray's proxy, as OpenAI's error body.

Ray's proxy answers by itself where a router or a replica dies (500, "Internal Server Error"), none
is there (503), all are full (429) or its own time is over (408), in plain text. It takes
`ray_middlewares` by the environment: `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`.
"""

from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmjax.errors import (
    CapacityError,
    EngineUnavailableError,
    InternalError,
    RequestError,
    RequestTimeoutError,
)
from mmjax.server.openai.errors import error_response, plain_error_response

_RETRY_AFTER_S = 1.0
_MAX_DIGITS = 6


def replace_plain_errors(app: ASGIApp) -> ASGIApp:
    """Replace the bodies of errors that are not JSON; answer a 503 where there is no answer."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        has_started, replaced = False, None

        async def send_but_plain_errors(message: Message) -> None:
            nonlocal has_started, replaced
            if message["type"] == "http.response.start":
                has_started = True
                replaced = message if _is_plain_error(message) else None
            if replaced is None:
                await send(message)

        await app(scope, receive, send_but_plain_errors)
        if replaced is not None:
            response = _response(replaced["status"], Headers(raw=replaced["headers"]))
        elif has_started:
            return
        else:
            response = _response(503, {})
        await response(scope, receive, send)

    return call


def ray_middlewares() -> list[Middleware]:
    """Return what Ray's proxy puts around its application."""
    return [Middleware(replace_plain_errors)]


def _is_plain_error(start: Message) -> bool:
    kind = Headers(raw=start.get("headers", [])).get("content-type", "")
    return start["status"] >= 400 and not kind.startswith("application/json")


def _response(status: int, headers: Mapping[str, str]) -> Any:
    error = _error(status, headers)
    response = plain_error_response(status) if error is None else error_response(error)
    if "x-request-id" in headers:
        response.headers["x-request-id"] = headers["x-request-id"]
    return response


def _error(status: int, headers: Mapping[str, str]) -> RequestError | None:
    given = headers.get("retry-after", "")
    retry_after_s = float(given) if given.isdecimal() and len(given) <= _MAX_DIGITS else None
    match status:
        case 408:
            return RequestTimeoutError()
        case 429:
            return CapacityError(
                "too many requests wait; send it again in a moment",
                retry_after_s=retry_after_s or _RETRY_AFTER_S,
            )
        case 500:
            return InternalError("")
        case 502 | 503 | 504:
            return EngineUnavailableError(
                "the process that had this request has ended, or none is there; send it again",
                retry_after_s=retry_after_s or _RETRY_AFTER_S,
            )
        case _:
            return None
