"""Errors as OpenAI's error body, without Python's messages."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from mmjax.config.engine_config import serve_settings
from mmjax.errors import (
    BodyTimeoutError,
    RequestCancelledError,
    RequestError,
    RequestQuarantinedError,
    ShuttingDownError,
)
from mmjax.system.logger import REQUEST_ID, get_logger

logger = get_logger(__name__)

_TYPE_BY_STATUS: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_ANTHROPIC_TYPES: Mapping[str, str] = {"server_error": "api_error"}
MESSAGES_PATH = "/v1/messages"
"""Below it are Anthropic's bodies."""
_HTTP_MESSAGES: Mapping[int, str] = {
    400: "the body cannot be read; send one JSON object",
    403: "clients with other API keys share this server, and must not see this; start it with one",
    404: "there is nothing at this address; see `/v1/models`, `/v1/chat/completions`",
    405: "this address does not take this method",
}
_ROUTES_WITH_A_FLAG: Mapping[str, str] = {
    **dict.fromkeys(
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "--allow-runtime-lora-updating"
    ),
    **dict.fromkeys(
        (
            "/update_weights",
            "/sleep",
            "/wake_up",
            "/pause",
            "/resume",
            "/is_sleeping",
            "/is_paused",
        ),
        "--allow-engine-control",
    ),
    **dict.fromkeys(("/v1/files", "/v1/batches"), "--batch-dir"),
}
"""Path -> the flag without which nothing is there, nor below it."""
_RETRY_AFTER_S = 5
_MAX_LOGGED_CHARS = 200
LOGGED_STATE = "is_logged"
"""Entry of a request's state once a line of the log tells of its response."""
_QUOTED = re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\"")


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`error` of OpenAI's error body."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error body."""

    error: ErrorInfo


def error_body(error: RequestError) -> ErrorBody:
    """Return the body of a request's error; an internal error's names the request's id."""
    if error.status == 500 and not isinstance(error, RequestQuarantinedError):
        return internal_error_body()
    return _make_body(error.status, error.message, error.code, error.param)


def messages_error(info: ErrorInfo) -> dict[str, Any]:
    """Return Anthropic's error body."""
    kind = _ANTHROPIC_TYPES.get(info.type, info.type)
    error = {"type": kind, "message": info.message, "param": info.param, "code": info.code}
    return {"type": "error", "error": error, "request_id": REQUEST_ID.get()}


def internal_error_body() -> ErrorBody:
    """Return the body of an internal error: the details are in the log."""
    message = f"the server failed on this request (id {REQUEST_ID.get()}); its log says why"
    return _make_body(500, message, "internal_error")


def _make_body(status: int, message: str, code: str, param: str | None = None) -> ErrorBody:
    kind = _TYPE_BY_STATUS.get(status, "invalid_request_error")
    return ErrorBody(ErrorInfo(message=message, type=kind, param=param, code=code))


class JsonResponse(Response):
    """A Struct, or plain data, as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class ErrorResponse(JsonResponse):
    """A response that logs its error, without values that the client sent."""

    def __init__(
        self, status: int, body: ErrorBody, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(body, status, headers)
        self._info = body.error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Log, then send."""
        info = self._info
        scope.setdefault("state", {})[LOGGED_STATE] = True
        logger.info(
            "%s - %d for %s %s: %s%s: %s",
            _printable(client_address(scope)),
            self.status_code,
            _printable(scope["method"]),
            _printable(scope["path"]),
            info.code,
            f" at {_printable(info.param)}" if info.param else "",
            _without_values(info.message),
        )
        if route_path(scope).startswith(MESSAGES_PATH):
            self.body = self.render(messages_error(info))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: RequestError) -> ErrorResponse:
    """Return the response to a request's error."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    elif error.status == 503:
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    elif error.status == 408 or isinstance(error, RequestQuarantinedError):
        # OpenAI's clients retry these, which would time out again, or be refused.
        headers["x-should-retry"] = "false"
    if isinstance(error, BodyTimeoutError | ShuttingDownError):
        # The rest of the body is not read.
        headers["Connection"] = "close"
    return ErrorResponse(error.status, error_body(error), headers)


def plain_error_response(
    status: int,
    message: str | None = None,
    *,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ErrorResponse:
    """Return the response to an error of which the status is known, and perhaps a message."""
    message = message or _HTTP_MESSAGES.get(status, "this request cannot be served")
    return ErrorResponse(status, _make_body(status, message, code or f"http_{status}"), headers)


def install_error_handlers(app: FastAPI) -> None:
    """Install handlers that answer all errors with OpenAI's body.

    Coroutines, since functions would run in a thread. Unhandled exceptions are answered by
    `set_request_id`.
    """

    @app.exception_handler(RequestError)
    async def _request_error(request: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(ClientDisconnect)
    async def _client_gone(request: Request, error: ClientDisconnect) -> Response:
        return error_response(RequestCancelledError())

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if error.status_code == 405:
            # Starlette names those of the first route alone.
            headers["Allow"] = ", ".join(_methods_at(request))
        # Of a body that is too large the detail is ours.
        message = error.detail if error.status_code == 413 else None
        if allowed := headers.get("Allow"):
            message = f"this address does not take this method; it takes {allowed}"
        path = route_path(request.scope)
        if error.status_code == 404 and (flag := _flag_of(path)):
            message = f"this server does not offer `{path}`; start it with `{flag}`"
        return plain_error_response(error.status_code, message, headers=headers)


def _flag_of(path: str) -> str | None:
    parts = path.split("/")
    return _ROUTES_WITH_A_FLAG.get("/".join(parts[:3])) or _ROUTES_WITH_A_FLAG.get(path)


def client_address(scope: Scope) -> str:
    """Return who sent a request; "-" for a Unix domain socket's client."""
    return ":".join(map(str, scope.get("client") or "-"))


def route_path(scope: Scope) -> str:
    """Return the path that routes are matched by: without the prefix of `--root-path`."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def _methods_at(request: Request) -> list[str]:
    """Return the methods that an address takes, by all its routes."""
    routes = request.app.routes
    matching = [one for one in routes if one.matches(request.scope)[0] is not Match.NONE]
    return sorted({name for one in matching for name in getattr(one, "methods", None) or ()})


def _without_values(message: str) -> str:
    """Return a message without its quoted parts, which may be values that the client sent.

    Names of flags stay: they are mmjax's own, and what the operator has to give.
    """
    return _printable(_QUOTED.sub(_hide, message[: 2 * _MAX_LOGGED_CHARS]))


def _hide(quoted: re.Match[str]) -> str:
    return quoted[0] if quoted[0].strip("`") in _list_flags() else "`...`"


@cache
def _list_flags() -> frozenset[str]:
    return frozenset(one.flag for one in serve_settings().values())


def _printable(text: str) -> str:
    text = text[:_MAX_LOGGED_CHARS]
    return text if text.isprintable() else ascii(text)
