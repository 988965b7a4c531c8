"""What a caller may ask of the sampler; validated once, when it is made."""

import math
from collections.abc import Sequence

import msgspec

from mmjax.errors import RequestTypeError, RequestValueError

MAX_LOGPROBS = 20
"""The most alternatives that one position may report (OpenAI's limit for `top_logprobs`)."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's sampling parameters, as far as mmjax serves them.

    `temperature=0` is greedy, whatever the other fields say. `top_k` of 0 or -1 means "all".
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    """None: as many as `max_model_len` leaves."""
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many alternatives to report at each position, beside the sampled token."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_types(self)
        _check_ranges(self)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        msgspec.structs.force_setattr(self, "stop", stop)
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids))
        if any(not text for text in stop):
            raise RequestValueError(
                "`stop` holds an empty string; remove it: it would stop at once", param="stop"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken at every position."""
        return self.temperature == 0.0


_NUMBERS = ("temperature", "top_p", "min_p")
_INTEGERS = ("n", "top_k", "min_tokens")
_OPTIONAL_INTEGERS = ("seed", "max_tokens", "logprobs")


def _check_types(params: SamplingParams) -> None:
    for name in _NUMBERS:
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestTypeError(f"`{name}` is {value!r}; give a number", param=name)
        if not math.isfinite(value):
            raise RequestValueError(f"`{name}` is {value}; give a finite number", param=name)
    for name in (*_INTEGERS, *_OPTIONAL_INTEGERS):
        value = getattr(params, name)
        if value is None and name in _OPTIONAL_INTEGERS:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestTypeError(f"`{name}` is {value!r}; give an integer", param=name)


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
