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

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(RequestError):
    """The request was not finished by its deadline; nothing of it is left."""

    status = 408
    code = "request_timeout"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(
            message
            or "the request was not finished in time; ask for fewer tokens, try again when the "
            "server is less busy, or raise `timeout` (`--request-timeout` is the server's)",
            param="timeout",
        )


class EngineUnavailableError(RequestError):
    """The engine process restarts, or could not be brought back."""

    status = 503
    code = "engine_unavailable"


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
