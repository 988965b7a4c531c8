"""Every way to fail, as OpenAI's error body. Says what the client did, never what Python said."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mmjax.errors import CapacityError, RequestError
from mmjax.logger import get_logger

logger = get_logger(__name__)

_TYPE_BY_STATUS: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_HTTP_MESSAGES: Mapping[int, str] = {
    400: "the body cannot be read; send one JSON object",
    404: "there is nothing at this address; see `/v1/models`, `/v1/chat/completions`",
    405: "this address does not take this method",
    413: "the body is larger than this server takes; send smaller or fewer images",
}
_RETRY_AFTER_S = 5
_MAX_ERRORS_SHOWN = 3

_UNION_MARKS = frozenset({"str", "constrained-str", "int", "float", "bool", "dict", "none"})
"""What pydantic puts into a place to say which member of a union it tried."""


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The inside of an error body."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error body."""

    error: ErrorInfo


def error_body(error: RequestError) -> ErrorBody:
    """Return the body of a request's error."""
    kind = _TYPE_BY_STATUS.get(error.status, "invalid_request_error")
    return ErrorBody(
        ErrorInfo(message=error.message, type=kind, param=error.param, code=error.code)
    )


def internal_error_body() -> ErrorBody:
    """Return the body for a fault of ours: it tells nothing, the log does."""
    return ErrorBody(
        ErrorInfo(
            message="the server failed on this request; its log says why",
            type="server_error",
            param=None,
            code="internal_error",
        )
    )


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return `body` (a Struct, or plain data) as JSON."""
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def error_response(error: RequestError) -> Response:
    """Return the response to a request's error."""
    headers = {}
    if isinstance(error, CapacityError):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    elif error.status == 503:
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    elif error.status == 408:
        # OpenAI's clients send a 408 again by themselves: it would run into its time again.
        headers["x-should-retry"] = "false"
    return json_response(error_body(error), error.status, headers)


def plain_error_response(
    status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error that no RequestError stands for."""
    info = ErrorInfo(
        message=message,
        type=_TYPE_BY_STATUS.get(status, "invalid_request_error"),
        param=None,
        code=code,
    )
    return json_response(ErrorBody(info), status, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Give every error path of `app` the same body."""

    @app.exception_handler(RequestError)
    def _request_error(request: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    def _validation_error(request: Request, error: RequestValidationError) -> Response:
        return validation_response(error.errors())

    @app.exception_handler(HTTPException)
    def _http_error(request: Request, error: HTTPException) -> Response:
        status = error.status_code
        message = _HTTP_MESSAGES.get(status, "this request cannot be served")
        return plain_error_response(
            status, message, code=f"http_{status}", headers=error.headers or {}
        )

    @app.exception_handler(Exception)
    def _internal_error(request: Request, error: Exception) -> Response:
        return json_response(internal_error_body(), 500)


def validation_response(errors: Sequence[Mapping[str, Any]]) -> Response:
    """Return a 400 that names the fields; pydantic's own messages hold no values."""
    shown: list[str] = []
    params: list[str] = []
    for error in errors:
        param = field_path(error["loc"])
        message = _validation_message(param, error)
        # The members of a union fail at one place each: the first of them speaks.
        if param not in params:
            params.append(param)
            shown.append(message)
    text = "; ".join(shown[:_MAX_ERRORS_SHOWN])
    if len(shown) > _MAX_ERRORS_SHOWN:
        text += f"; and {len(shown) - _MAX_ERRORS_SHOWN} more"
    info = ErrorInfo(
        message=text,
        type="invalid_request_error",
        param=(params[0] or None) if params else None,
        code="invalid_request_error",
    )
    return json_response(ErrorBody(info), 400)


def field_path(loc: Sequence[str | int]) -> str:
    """Return pydantic's place as a client writes it: `messages[0].content`."""
    path = ""
    for step in loc[1:] if loc and loc[0] == "body" else loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step in _UNION_MARKS or not step.replace("_", "").replace("-", "").isalnum():
            continue
        else:
            path += f".{step}" if path else step
    return path[:256]


def _validation_message(param: str, error: Mapping[str, Any]) -> str:
    match error["type"]:
        case "extra_forbidden":
            return f"`{param}` is not a field that mmjax knows; remove it"
        case "missing":
            return f"`{param}` is missing; give it" if param else "the body is missing; give one"
        case "json_invalid":
            return "the body is not valid JSON"
        case "model_attributes_type" | "dict_type" if not param:
            return "the body must be a JSON object, sent with `Content-Type: application/json`"
    text = error["msg"]
    return f"`{param}`: {text[:1].lower()}{text[1:]}"
