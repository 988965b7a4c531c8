"""Every exception that mmjax raises on purpose, and the HTTP status that each one means.

Form of a message: what is wrong, with the value; what was expected; how to mend it.
"""


class MMJaxError(Exception):
    """Root of mmjax's own exceptions."""


class RequestError(MMJaxError):
    """A client's mistake: the server answers with `status`, and serves the others on."""

    status: int = 400
    code: str = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestValueError(RequestError, ValueError):
    """A field has a value that it may not have."""


class RequestTypeError(RequestError, TypeError):
    """A field has a type that it may not have."""


class RequestKeyError(RequestError, KeyError):
    """A name is asked for that the request does not carry."""

    def __str__(self) -> str:
        return self.message


class RequestRuntimeError(RequestError, RuntimeError):
    """The parts of a request contradict each other (placeholders, items, updates)."""


class ModelNotFoundError(RequestValueError):
    """The request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"


class MediaError(RequestValueError):
    """Media that could not be fetched or decoded."""

    status = 422
    code = "unprocessable_media"


class MediaIdConflictError(RequestValueError):
    """A media id that came with another content before."""

    status = 409
    code = "media_id_conflict"


class CapacityError(RequestError):
    """No room for the request at present; the same request may succeed later."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(RequestError):
    """The request was not finished by its deadline; nothing of it is left."""

    status = 408
    code = "request_timeout"

    def __init__(self, message: str | None = None, *, param: str | None = "timeout") -> None:
        super().__init__(
            message
            or "the request was not finished in time; ask for fewer tokens, try again when the "
            "server is less busy, or raise `timeout` (`--request-timeout` is the server's)",
            param=param,
        )


class BodyTimeoutError(RequestError):
    """A client stopped sending in the middle of its request."""

    status = 408
    code = "request_timeout"

    def __init__(self, silence_s: float) -> None:
        super().__init__(
            f"nothing of the body came for {silence_s:g} s; send it whole, with a Content-Length "
            "that is its length"
        )


class ShuttingDownError(RequestError):
    """The server ends, and begins nothing any more."""

    status = 503
    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("the server is shutting down; send the request again in a moment")


class RequestCancelledError(RequestError):
    """The client left while its request was processed; nobody reads the answer."""

    status = 499  # nginx's, for a client that closed the connection
    code = "request_cancelled"

    def __init__(self) -> None:
        super().__init__("the client left; nothing more is done for this request")


class EngineUnavailableError(RequestError):
    """The engine process restarts, or could not be brought back."""

    status = 503
    code = "engine_unavailable"


class InternalError(RequestError):
    """A fault of ours; the log says what, the message does not."""

    status = 500
    code = "internal_error"


def make_request_error(
    code: str,
    message: str,
    *,
    status: int,
    param: str | None = None,
    retry_after_s: float | None = None,
) -> RequestError:
    """Return an error as another process told it, of the class that `code` belongs to."""
    error_class = _error_class(code)
    if issubclass(error_class, CapacityError) and retry_after_s is not None:
        error: RequestError = error_class(message, param=param, retry_after_s=retry_after_s)
    else:
        error = error_class(message, param=param)
    error.code, error.status = code, status
    return error


def _error_class(code: str) -> type[RequestError]:
    """Return the class that declares a code; RequestError for a code that none declares."""
    classes = [RequestError]
    for error_class in classes:
        if error_class.__dict__.get("code") == code:
            return error_class
        classes += error_class.__subclasses__()
    return RequestError


class MultiModalCacheMissError(MMJaxError):
    """P1 lacks the tensors of `mm_hashes`; P0 resends them, and no client sees it."""

    def __init__(self, mm_hashes: list[str]) -> None:
        super().__init__(f"no cached item for {len(mm_hashes)} hashes: {', '.join(mm_hashes)}")
        self.mm_hashes = mm_hashes


class ProcessingError(MMJaxError, RuntimeError, ValueError):
    """A fault of a processor's, HF's or a family's own: the server's (500), never the client's.

    Its text is for the log and for `LLM`'s caller. vLLM has a RuntimeError or a ValueError here.
    """


class CheckpointError(MMJaxError):
    """A checkpoint directory that cannot be served: a file, a key or a tensor is wrong."""


class ConfigError(MMJaxError, ValueError):
    """An operator's setting that cannot hold (a flag, an argument of `LLM`)."""
