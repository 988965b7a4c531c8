"""Whose fault it is that processing failed: by its cause, not by the place where it showed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from mmjax.config.engine_config import MultiModalConfig
from mmjax.errors import (
    CheckpointError,
    ConfigError,
    MMJaxError,
    ProcessingError,
    RequestValueError,
)
from mmjax.processing.hf_call import MM_KWARGS_PARAM

T = TypeVar("T")

_MAX_NAMES_SHOWN = 8


def process_and_blame(
    process: Callable[[Mapping[str, object]], T], mm_kwargs: Mapping[str, object]
) -> T:
    """Return `process(mm_kwargs)`; where it fails, raise what `find_fault` says."""
    try:
        return process(mm_kwargs)
    except Exception as error:  # HF's code and families' may raise anything
        blamed = find_fault(error, mm_kwargs, lambda: process({}))
        if blamed is error:
            raise
        raise blamed from error


def find_fault(
    error: Exception, mm_kwargs: Mapping[str, object], process_without: Callable[[], Any]
) -> Exception:
    """Return the error to raise for `error`: the request's where its kwargs cause it, else ours.

    What else a client can cause is checked before, and is a RequestError already.

    Args:
        error: What HF's code or a family's raised.
        mm_kwargs: The request's own.
        process_without: Does the same work without them.
    """
    if isinstance(error, MMJaxError) and not isinstance(error, ProcessingError):
        return error
    if mm_kwargs:
        with suppress(Exception):  # where it fails too, it is not the kwargs
            process_without()
            names = ", ".join(f"`{str(name)[:64]}`" for name in list(mm_kwargs)[:_MAX_NAMES_SHOWN])
            return RequestValueError(
                f"mm_processor_kwargs cannot be applied: processing fails with {names}, and not "
                "without; correct the values, or leave them out",
                param=MM_KWARGS_PARAM,
            )
    if isinstance(error, ProcessingError):
        return error
    return ProcessingError(f"processing failed: {type(error).__name__}: {error}")


@contextmanager
def blaming_settings(mm: MultiModalConfig) -> Iterator[None]:
    """Make a ConfigError of whatever the body raises, where the operator has set how media are.

    The body processes dummy inputs: there is no client to blame.
    """
    try:
        yield
    except (CheckpointError, ConfigError):
        raise
    # Under settings that make no sense, anything may fail.
    except Exception as error:
        settings = _describe_settings(mm)
        if not settings:
            raise
        raise ConfigError(
            f"the model's largest input cannot be processed with {settings}: {error}; correct it, "
            "or leave it out"
        ) from error


def _describe_settings(mm: MultiModalConfig) -> str:
    limits = mm.limit_mm_per_prompt
    settings = {
        "--mm-processor-kwargs": dict(mm.mm_processor_kwargs),
        "--limit-mm-per-prompt": {m: dict(limits[m]) for m in limits if mm.media_options(m)},
    }
    return " and ".join(f"`{flag}` {value}" for flag, value in settings.items() if value)
