"""Sampling parameters, validated on construction."""

import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any, get_type_hints

import msgspec
import numpy as np

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.params.pooling_params import PoolingParams

MAX_LOGPROBS = 20
"""Maximum of `logprobs` (OpenAI's limit on `top_logprobs`)."""
MAX_NGRAM_SIZE = 64
"""Maximum of `no_repeat_ngram_size`: a step compares so many tokens at each place of a sequence."""
MAX_BIASES = 1024
"""Entries of `logit_bias`, as vLLM's; OpenAI takes 300."""
MAX_BAD_WORDS = 128
"""Texts of `bad_words`."""
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS
"""Sequences of tokens that they may stand for: a text has one more behind a space."""
MAX_STOP_TOKEN_IDS = 256
"""Ids of `stop_token_ids`."""
MAX_BAD_WORD_CHARS = 1024

LIMITS: Mapping[str, Mapping[str, int | float]] = {
    "n": {"ge": 1, "le": 64},
    "presence_penalty": {"ge": -2, "le": 2},
    "frequency_penalty": {"ge": -2, "le": 2},
    # Beyond them logits could overflow float32.
    "repetition_penalty": {"ge": 0.01, "le": 100},
    "temperature": {"ge": 0, "le": 100},
    "top_p": {"gt": 0, "le": 1},
    "top_k": {"ge": -1, "lt": 2**31},
    "min_p": {"ge": 0, "le": 1},
    "seed": {"ge": -(2**63), "lt": 2**63},
    "max_tokens": {"ge": 1, "lt": 2**31},
    "min_tokens": {"ge": 0, "lt": 2**31},
    "logprobs": {"ge": 0, "le": MAX_LOGPROBS},
    "prompt_logprobs": {"ge": 0, "le": MAX_LOGPROBS},
    "no_repeat_ngram_size": {"ge": 0, "le": MAX_NGRAM_SIZE},
    "no_repeat_ngram_window_size": {"ge": 0, "lt": 2**31},
    "logit_bias": {"max_length": MAX_BIASES},
    "stop_token_ids": {"max_length": MAX_STOP_TOKEN_IDS},
    "bad_words": {"max_length": MAX_BAD_WORDS},
}
"""The bounds of each field, as pydantic's `Field` takes them: the HTTP API's are these."""

MAX_CHOICES = 4096
"""Texts of a `choice`."""
MAX_GRAMMAR_CHARS = 2**16
"""Characters of a schema, a regex, a grammar, or all texts of a choice."""


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the answer must match: exactly one of the first five fields, which are vLLM's."""

    json: str | dict[str, Any] | None = None
    """A JSON schema; a dict becomes its text."""
    regex: str | None = None
    """A regex that the whole answer matches, in the syntax of Rust's `regex`."""
    choice: Sequence[str] | None = None
    """The texts that the answer may be."""
    grammar: str | None = None
    """A grammar in Lark's syntax, or GBNF, with the rule `start` or `root`."""
    json_object: bool | None = None
    """Whether the answer is any JSON object; False is None."""
    disable_any_whitespace: bool = False
    """Whether JSON has no white space between its parts."""
    disable_additional_properties: bool = False
    """Whether objects have no properties but those that the schema names."""
    whitespace_pattern: str | None = None
    """A regex of what may stand between parts of JSON."""

    def __post_init__(self) -> None:
        for name, to_type in _STRUCTURE_TYPES.items():
            path = f"structured_outputs.{name}"
            made = to_type(path, getattr(self, name))
            msgspec.structs.force_setattr(self, name, made)
            _check_number(path, _count_chars(made), MAX_GRAMMAR_CHARS, "characters")
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestValueError.about(
                "structured_outputs",
                f"has {' and '.join(given) or 'no structure'}; give one of {', '.join(_KINDS)}",
            )
        _check_number("structured_outputs.choice", len(self.choice or ()), MAX_CHOICES, "texts")
        unread = [name for name in _JSON_OPTIONS if getattr(self, name)]
        if unread and not self.kind.startswith("json"):
            raise RequestValueError.about(
                f"structured_outputs.{unread[0]}",
                f"is about JSON, and `{self.kind}` is not; leave it out",
            )

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)


_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


class TranscriptRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which tokens may come next in a transcript, as HF's `generate` of Whisper has it."""

    suppressed_token_ids: Sequence[int] = ()
    """Tokens that never come."""
    first_suppressed_token_ids: Sequence[int] = ()
    """Tokens that do not come first."""
    eos_token_id: int = 0
    """The end: ids below it are text."""
    timestamps_from: int | None = None
    """The token of 0.00 s, behind which those of later times are, the last of the vocabulary. The
    transcript begins with one, each but the first and the last stands twice, and they grow; where
    all of them together are more probable than the most probable other token, one of them is
    sampled. None: nothing is said of them."""
    last_first_timestamp: int | None = None
    """The last that may be the first one; None: any."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids that are named."""
        others = (self.eos_token_id, self.timestamps_from, self.last_first_timestamp)
        named = tuple(one for one in others if one is not None)
        return (*self.suppressed_token_ids, *self.first_suppressed_token_ids, *named)


class AlignmentRange(msgspec.Struct, frozen=True, kw_only=True):
    """Of which tokens and states an encoder-decoder's alignment is wanted."""

    first_token: int
    """Of the prompt's tokens the first; those behind it are, too."""
    num_states: int
    """Of the encoder's states the first ones."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """vLLM's sampling parameters, as far as mmjax supports them.

    `temperature=0` is greedy, whatever the other fields are. `top_k` of 0 or -1 means "all".
    numpy's numbers are converted to Python's, and None to an empty list.
    """

    n: int = 1
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer has; vLLM's, as the next two."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the answer has it."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that the prompt or the answer has, multiplies others."""
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
    prompt_logprobs: int | None = None
    """As `logprobs`, of each token of the prompt but the first; nothing of it is then taken from
    the prefix cache."""
    detokenize: bool = True
    """Whether the answer has a text; without it there are token ids alone."""
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    """Token id -> what is added to its logit, in [-100, 100]."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be sampled; None: all."""
    bad_words: Sequence[str] = ()
    """Texts whose last token is not sampled where it would complete them within the answer."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the answer must match."""
    no_repeat_ngram_size: int = 0
    """So many tokens in a row never come twice, in prompt and answer together, as in HF's
    `generate`; 0: no limit. vLLM has no such field."""
    no_repeat_ngram_window_size: int = 0
    """Of how many of the last tokens that holds, as of Unlimited-OCR in HF; 0: of all."""
    transcript: TranscriptRules | None = None
    """What an answer that is a transcript may hold; the routes of transcriptions set it."""
    alignment: AlignmentRange | None = None
    """How much the prompt's tokens attend to the encoder's states comes with the output; likewise
    set by those routes."""
    pooling: PoolingParams | None = None
    """The request is for vectors, and generates nothing; `LLM.embed` and the like set it."""

    def __post_init__(self) -> None:
        for (name, to_type), default in zip(_TYPES.items(), self.__struct_defaults__, strict=True):
            # Most fields have their default, which is of its type.
            if (given := getattr(self, name)) is not default:
                msgspec.structs.force_setattr(self, name, to_type(name, given))
        _check_ranges(self)

    @property
    def is_greedy(self) -> bool:
        """Whether sampling is greedy."""
        return self.temperature == 0.0

    @property
    def reads_prompt(self) -> bool:
        """Whether each token of the prompt gives something, so that all of it is computed."""
        reads_states = self.pooling is not None and self.pooling.reads_all
        return reads_states or self.prompt_logprobs is not None

    @property
    def is_plain(self) -> bool:
        """Whether tokens are an argmax (`min_tokens` aside), and nothing else is asked for."""
        return (
            self.is_greedy
            and self.logprobs is None
            and not self.no_repeat_ngram_size
            and not self.has_penalties
            and not self.logit_bias
            and not self.bad_words
            and self.allowed_token_ids is None
            and self.structured_outputs is None
            and self.transcript is None
        )

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)


def _to_number(name: str, value: Any) -> float:
    # What a number mostly is: its abstract classes take longer to ask than all else here.
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise RequestTypeError.about(name, f"is {value!r}; give a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestValueError.about(name, f"is {value}; give a finite number")
    return number


def _to_integer(name: str, value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise RequestTypeError.about(name, f"is {value!r}; give an integer")
    return operator.index(value)


def _to_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise RequestTypeError.about(name, f"is {value!r}; give True or False")
    return bool(value)


def _to_texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _to_tuple(name, value, "a string, or strings")
    for text in texts:
        if not isinstance(text, str):
            raise RequestTypeError.about(name, f"holds {text!r}; give strings")
        if not text:
            raise RequestValueError.about(name, "holds an empty string; remove it")
    return tuple(dict.fromkeys(texts))


def _to_choice(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    texts = _to_texts(name, value)
    if not texts:
        raise RequestValueError.about(name, "is empty; give texts to choose from")
    return texts


def _to_optional_text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestTypeError.about(name, f"is {value!r}; give a string")
    return value


def _to_schema(name: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise RequestTypeError.about(
            name, f"is {value!r}; give a JSON schema, as a dict or its text"
        )
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise RequestTypeError.about(name, "is not valid JSON; give a schema") from None


def _to_biases(name: str, value: Any) -> dict[int, float] | None:
    if not value and (value is None or isinstance(value, Mapping)):
        return None
    if not isinstance(value, Mapping):
        raise RequestTypeError.about(name, f"is {value!r}; give a dict of token ids")
    _check_length(name, value, "entries")
    biases: dict[int, float] = {}
    for key, number in value.items():
        bias = _to_number(name, number)
        if not -100 <= bias <= 100:
            raise RequestValueError.about(name, f"holds {bias}; give [-100, 100]")
        biases[_to_token_id(name, key)] = bias
    return biases


def _to_token_id(name: str, value: Any) -> int:
    # OpenAI's keys are JSON's, and so texts.
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 10:
        return int(value)
    return _to_integers(name, [value])[0]


def _to_allowed(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    token_ids = tuple(sorted(set(_to_integers(name, value))))
    if not token_ids:
        raise RequestValueError.about(
            name, "is empty: no token could be sampled; name some, or leave it out"
        )
    return token_ids


def _to_instance(kind: type, name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, kind):
        raise RequestTypeError.about(name, f"is {value!r}; give an instance of {kind.__name__}")
    return value


def _to_integers(name: str, value: Any) -> tuple[int, ...]:
    integers = _to_tuple(name, value, "integers")
    for integer in integers:
        if isinstance(integer, bool | np.bool_) or not isinstance(integer, Integral):
            raise RequestTypeError.about(name, f"holds {integer!r}; give integers")
    return tuple(map(operator.index, integers))


def _to_tuple(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise RequestTypeError.about(name, f"is {value!r}; give {wanted}")
    return tuple(value)


_OWN_TYPES = (StructuredOutputsParams, TranscriptRules, AlignmentRange, PoolingParams)
_TYPES_BY_ANNOTATION: dict[Any, Callable[[str, Any], Any]] = {
    int: _to_integer,
    int | None: lambda name, value: None if value is None else _to_integer(name, value),
    float: _to_number,
    bool: _to_bool,
    Sequence[str]: _to_texts,
    Sequence[int]: _to_integers,
    Sequence[int] | None: _to_allowed,
    Mapping[int, float] | None: _to_biases,
    **{kind | None: partial(_to_instance, kind) for kind in _OWN_TYPES},
}
_TYPES = {
    name: _TYPES_BY_ANNOTATION[annotation]
    for name, annotation in get_type_hints(SamplingParams).items()
}
"""Conversion of each field to its declared type, or an error."""

_STRUCTURE_TYPES: dict[str, Callable[[str, Any], Any]] = {
    "json": _to_schema,
    "regex": _to_optional_text,
    "choice": _to_choice,
    "grammar": _to_optional_text,
    "json_object": lambda name, value: None if value is None else _to_bool(name, value) or None,
    "disable_any_whitespace": _to_bool,
    "disable_additional_properties": _to_bool,
    "whitespace_pattern": _to_optional_text,
}


_RANGES = {
    name: (one.get("ge", one.get("gt", 0)), one["le"] if "le" in one else one["lt"] - 1)
    for name, one in LIMITS.items()
    if "max_length" not in one
}
"""Least and greatest value of each number."""


def _check_ranges(params: SamplingParams) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(params, name)
        if value is not None and not low <= value <= high:
            raise RequestValueError.about(name, f"is {value}; it must lie in [{low}, {high}]")
    if params.top_p == 0.0:
        raise RequestValueError.about(
            "top_p", "is 0; it must be above 0 (use `temperature`=0 for greedy)"
        )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestValueError.about(
            "min_tokens",
            f"is {params.min_tokens}, above `max_tokens` ({params.max_tokens}); lower it",
        )
    if params.stop and not params.detokenize:
        raise RequestValueError.about(
            "stop", "needs the text, and `detokenize` is False; leave one of them out"
        )
    if params.transcript is not None and params.structured_outputs is not None:
        raise RequestValueError.about(
            "transcript", "and `structured_outputs` both say what comes; give one of them"
        )
    _check_length("stop_token_ids", params.stop_token_ids, "ids")
    _check_length("bad_words", params.bad_words, "texts")
    _check_number(
        "bad_words", max(map(len, params.bad_words), default=0), MAX_BAD_WORD_CHARS, "characters"
    )


def _count_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(map(len, value)) if isinstance(value, tuple) else 0


def _check_length(name: str, values: Sequence[Any] | Mapping[Any, Any], things: str) -> None:
    _check_number(name, len(values), int(LIMITS[name]["max_length"]), things)


def _check_number(name: str, number: int, limit: int, things: str) -> None:
    if number > limit:
        raise RequestValueError.about(name, f"has {number} {things}; give at most {limit}")
