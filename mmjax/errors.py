"""mmjax's exceptions, with their HTTP status.

A message says what is wrong, with the value, what was expected, and how to fix it.
"""

from collections.abc import Mapping
from typing import Any


class MMJaxError(Exception):
    """Base class of mmjax's exceptions."""


class RequestError(MMJaxError):
    """A request failed: the server answers it with `status`, and goes on with others."""

    status: int = 400
    code: str = "invalid_request_error"
    text: str = ""
    """The message, where none is given."""

    def __init__(
        self,
        message: str | None = None,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`param`: the field that is wrong; `retry_after_s`: when the request may succeed."""
        self.message = message or self.text
        super().__init__(self.message)
        self.param = param
        self.retry_after_s = retry_after_s

    @classmethod
    def about(cls, param: str, text: str) -> "RequestError":
        """Return the error of a field, whose name the message begins with."""
        return cls(f"`{param}` {text}", param=param)


class RequestValueError(RequestError, ValueError):
    """A field has an invalid value."""


class RequestTypeError(RequestError, TypeError):
    """A field has an invalid type."""


class ContextLengthError(RequestValueError):
    """A prompt that leaves the model no room for an answer."""

    code = "context_length_exceeded"
    """OpenAI's, by which clients know that fewer messages would do."""


class RequestKeyError(RequestError, KeyError):
    """The request lacks an item of a name."""

    def __str__(self) -> str:
        return self.message


class RequestRuntimeError(RequestError, RuntimeError):
    """The parts of a request contradict each other (placeholders, items, updates)."""


class ModelNotFoundError(RequestValueError):
    """The request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"


class ResponseNotFoundError(RequestValueError):
    """A response of `/v1/responses` that is not kept."""

    status = 404
    code = "response_not_found"


class AnswerNotHeldError(RequestValueError):
    """The rest of an answer that no replica holds (any more)."""

    status = 404
    code = "answer_not_held"
    text = (
        "the rest of this answer is not held (any more), and another one may differ; send the "
        "request without `Last-Event-ID`"
    )


class MediaError(RequestValueError):
    """Media that could not be fetched or decoded."""

    status = 422
    code = "unprocessable_media"


class MediaIdConflictError(RequestValueError):
    """A media id that was given with other content before."""

    status = 409
    code = "media_id_conflict"


class CapacityError(RequestError):
    """Too many requests at present; the same request may succeed later."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = 1.0
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)


class RequestTimeoutError(RequestError):
    """The request was not finished by its deadline, and was aborted."""

    status = 408
    code = "request_timeout"
    text = (
        "the request was not finished in time; ask for fewer tokens, try again when the server is "
        "less busy, or raise `timeout` (`--request-timeout` is the server's)"
    )

    def __init__(self, message: str | None = None, *, param: str | None = "timeout") -> None:
        super().__init__(message, param=param)


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
    """The server is shutting down, and accepts no requests."""

    status = 503
    code = "shutting_down"
    text = "the server is shutting down; send the request again in a moment"


class RequestCancelledError(RequestError):
    """The client disconnected while its request was processed."""

    status = 499  # nginx's, for a client that closed the connection
    code = "request_cancelled"
    text = "the client left; nothing more is done for this request"


class EngineUnavailableError(RequestError):
    """The engine process does not run, and is not about to."""

    status = 503
    code = "engine_unavailable"


class EncoderUnavailableError(RequestError):
    """No `encoder_workers` process encodes an item."""

    status = 503
    code = "encoder_unavailable"


class RequestQuarantinedError(RequestError):
    """The request, or one just like it, ended the engine process more than once."""

    status = 500
    code = "request_quarantined"
    text = (
        "the engine process ended whenever it computed this request, which is refused for now; "
        "change the prompt, its media or the sampling parameters, and tell the operator: the "
        "server's log says how the process ended"
    )


class InternalError(RequestError):
    """An internal error; the details are in the log, not in the message."""

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
    """Return an error that another process sent, of the class that declares `code`."""
    error = _error_class(code)(message, param=param)
    error.code, error.status = code, status
    if retry_after_s is not None:
        error.retry_after_s = retry_after_s
    return error


def _error_class(code: str) -> type[RequestError]:
    """Return the class that declares a code, or RequestError."""
    classes = [RequestError]
    for error_class in classes:
        if error_class.__dict__.get("code") == code:
            return error_class
        classes += error_class.__subclasses__()
    return RequestError


class MultiModalCacheMissError(MMJaxError):
    """P1 lacks the tensors of `mm_hashes`; P0 resends them, unseen by clients."""

    def __init__(self, mm_hashes: list[str]) -> None:
        super().__init__(f"no cached item for {len(mm_hashes)} hashes: {', '.join(mm_hashes)}")
        self.mm_hashes = mm_hashes


class ProcessingError(MMJaxError, RuntimeError, ValueError):
    """An internal error of a processor, HF's or a model's: 500, not the client's fault.

    Its text is for the log and for callers of `LLM`. vLLM raises RuntimeError or ValueError.
    """


class CheckpointError(MMJaxError):
    """An invalid checkpoint directory: a file, a key or a tensor is wrong."""


class SnapshotDamagedError(CheckpointError):
    """Files of a snapshot are not as they were written; `source`, `revision`: its checkpoint."""

    def __init__(self, message: str, *, source: str, revision: str | None) -> None:
        super().__init__(message)
        self.source = source
        self.revision = revision


class ConfigError(MMJaxError, ValueError):
    """An invalid setting (a flag, an argument of `LLM`)."""


def check_settings(
    settings: Any,
    expected: Mapping[str, Any],
    *,
    where: str = "processor_config.json",
    source: str = "config.json has",
) -> None:
    """Refuse a checkpoint whose files contradict each other, or a model; a key left out does not.

    Args:
        settings: A mapping, whose None is a key left out, or a config.
        expected: The only values that these keys may have.
        where: Whose settings they are.
        source: Where the expected ones come from.

    Raises:
        CheckpointError: With the first that differs.
    """
    for name, value in expected.items():
        if isinstance(settings, Mapping):
            found = value if settings.get(name) is None else settings[name]
        else:
            found = getattr(settings, name, value)
        if found != value:
            raise CheckpointError(
                f"`{name}` of {where} is {found!r}, but {source} {value!r}; make them equal"
            )
