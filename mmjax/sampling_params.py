"""Sampling parameters, validated on construction."""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import msgspec
import numpy as np

from mmjax.errors import RequestTypeError, RequestValueError

MAX_LOGPROBS = 20
"""Maximum of `logprobs` (OpenAI's limit on `top_logprobs`)."""
MAX_NGRAM_SIZE = 32
"""Maximum of `no_repeat_ngram_size`: a step compares so many tokens at each place of a sequence."""


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must be, under vLLM's names; one of them."""

    json: str | None = None
    """A JSON schema."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's sampling parameters, as far as mmjax supports them.

    `temperature=0` is greedy, whatever the other fields are. `top_k` of 0 or -1 means "all".
    numpy's numbers are converted to Python's, and None to an empty list.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    """None: up to `max_model_len`."""
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of most probable tokens to return at each position, besides the sampled one."""
    skip_special_tokens: bool = True
    no_repeat_ngram_size: int = 0
    """So many tokens in a row never come twice, in prompt and answer together, as in HF's
    `generate`; 0: no limit. vLLM has no such field."""

    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name, to_type in _TYPES.items():
            msgspec.structs.force_setattr(self, name, to_type(name, getattr(self, name)))
        _check_ranges(self)

    @property
    def is_greedy(self) -> bool:
        """Whether sampling is greedy."""
        return self.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """Whether tokens are an argmax (`min_tokens` aside), and nothing else is asked for."""
        return self.is_greedy and self.logprobs is None and not self.no_repeat_ngram_size


def _to_number(name: str, value: Any) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise RequestTypeError(f"`{name}` is {value!r}; give a number", param=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestValueError(f"`{name}` is {value}; give a finite number", param=name)
    return number


def _to_integer(name: str, value: Any) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise RequestTypeError(f"`{name}` is {value!r}; give an integer", param=name)
    return operator.index(value)


def _to_optional_integer(name: str, value: Any) -> int | None:
    return None if value is None else _to_integer(name, value)


def _to_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise RequestTypeError(f"`{name}` is {value!r}; give True or False", param=name)
    return bool(value)


def _to_texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _to_tuple(name, value, "a string, or strings")
    for text in texts:
        if not isinstance(text, str):
            raise RequestTypeError(f"`{name}` holds {text!r}; give strings", param=name)
        if not text:
            raise RequestValueError(
                f"`{name}` holds an empty string; remove it: it would stop at once", param=name
            )
    return texts


def _to_integers(name: str, value: Any) -> tuple[int, ...]:
    integers = _to_tuple(name, value, "integers")
    for integer in integers:
        if isinstance(integer, bool | np.bool_) or not isinstance(integer, Integral):
            raise RequestTypeError(f"`{name}` holds {integer!r}; give integers", param=name)
    return tuple(map(operator.index, integers))


def _to_tuple(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise RequestTypeError(f"`{name}` is {value!r}; give {wanted}", param=name)
    return tuple(value)


_TYPES: dict[str, Callable[[str, Any], Any]] = {
    "n": _to_integer,
    "temperature": _to_number,
    "top_p": _to_number,
    "top_k": _to_integer,
    "min_p": _to_number,
    "seed": _to_optional_integer,
    "max_tokens": _to_optional_integer,
    "min_tokens": _to_integer,
    "stop": _to_texts,
    "stop_token_ids": _to_integers,
    "include_stop_str_in_output": _to_bool,
    "ignore_eos": _to_bool,
    "logprobs": _to_optional_integer,
    "skip_special_tokens": _to_bool,
    "no_repeat_ngram_size": _to_integer,
    "structured_outputs": lambda name, value: value,
}
"""Conversion of each field to its declared type, or an error."""


def _check_ranges(params: SamplingParams) -> None:
    limits: dict[str, tuple[float, float]] = {
        "n": (1, 64),
        "temperature": (0.0, 100.0),
        "top_p": (0.0, 1.0),
        "top_k": (-1, 2**31 - 1),
        "min_p": (0.0, 1.0),
        "seed": (-(2**63), 2**63 - 1),
        "max_tokens": (1, 2**31 - 1),
        "min_tokens": (0, 2**31 - 1),
        "logprobs": (0, MAX_LOGPROBS),
        "no_repeat_ngram_size": (0, MAX_NGRAM_SIZE),
    }
    for name, (low, high) in limits.items():
        value = getattr(params, name)
        if value is not None and not low <= value <= high:
            raise RequestValueError(
                f"`{name}` is {value}; it must lie in [{low}, {high}]", param=name
            )
    if params.top_p == 0.0:
        raise RequestValueError(
            "`top_p` is 0; it must be above 0 (use `temperature`=0 for greedy)", param="top_p"
        )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestValueError(
            f"`min_tokens` is {params.min_tokens}, above `max_tokens` ({params.max_tokens}); "
            "lower it",
            param="min_tokens",
        )
