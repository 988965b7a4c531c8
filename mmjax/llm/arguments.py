"""What callers give to `LLM`, as lists of one entry a prompt."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import numpy as np

from mmjax.config.engine_config import SchedulerConfig, llm_settings, serve_settings
from mmjax.config.refused_flags import is_held, refusal_of
from mmjax.config.settings import Setting, nearest_name
from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.frontend.requests.prompts import PromptType
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.items.items import AudioProcessorItems, MultiModalDataItems
from mmjax.transport.messages import UpdateMode

T = TypeVar("T")

Messages = Sequence[Mapping[str, Any]]
"""One conversation."""


def check_mode(mode: str) -> None:
    """Raise ValueError unless it is one of `UpdateMode`."""
    if mode not in get_args(UpdateMode):
        raise ValueError(f"`mode` is {mode!r}; expected one of {', '.join(get_args(UpdateMode))}")


def check_level(level: int) -> None:
    """Raise ValueError unless it is one of `LLM.sleep`."""
    if level not in (1, 2):
        raise ValueError(f"`level` is {level!r}; expected 1 or 2")


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter: the name that it is known by, a number, and its directory or hub id.

    The same name with another number or directory is loaded anew.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not self.lora_name or not self.lora_path:
            raise RequestValueError("an adapter needs a name and a path", param="lora_request")


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""Adapters for one or several prompts."""


def parse_keywords(model: str | Path | None, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are given by keyword; TypeError for one that is none."""
    known = llm_settings()
    keywords = {
        name: value
        for name, value in keywords.items()
        if not is_held(f"--{name.replace('_', '-')}", value)
    }
    for name in keywords:
        if name not in known and name in serve_settings():
            raise TypeError(f"`{name}` is a setting of `mmjax.serve` alone; LLM does not take it")
        reason = refusal_of(f"--{name.replace('_', '-')}")
        if name not in known and reason is not None:
            raise TypeError(f"`{name}` is a setting of vLLM's that LLM does not take: {reason}")
        if name not in known:
            raise TypeError(f"LLM has no setting `{name}`; {nearest_name(name, known)}")
    given = {"model": None if model is None else str(model), **keywords}
    return {name: _parse(known[name], value) for name, value in given.items()}


def _parse(one: Setting, value: Any) -> Any:
    # One name of several may stand alone, as for vLLM.
    is_text_of_list = one.kind is tuple and isinstance(value, str)
    return one.parse_text(value) if is_text_of_list else one.parse(value)


def params_for(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, number: int
) -> Sequence[SamplingParams | None]:
    """Return the parameters of each prompt; None: the checkpoint's defaults."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * number
    if not isinstance(sampling_params, Sequence) or not all(
        isinstance(one, SamplingParams) for one in sampling_params
    ):
        raise RequestTypeError.about(
            "sampling_params",
            f"is a {type(sampling_params).__name__}; give a SamplingParams, as in "
            "SamplingParams(temperature=0), or a list of them",
        )
    return check_number(sampling_params, number, "sampling_params", "`sampling_params`")


def adapters_for(given: LoRARequests, number: int) -> Sequence[LoRARequest | None]:
    """Return the adapter of each prompt; None: the model alone.

    RequestValueError for two of one name: prompts that are asked together know theirs by it.
    """
    if given is None or isinstance(given, LoRARequest):
        return [given] * number
    if not isinstance(given, Sequence) or not all(
        one is None or isinstance(one, LoRARequest) for one in given
    ):
        raise RequestTypeError.about(
            "lora_request",
            f"is a {type(given).__name__}; give a LoRARequest, as in "
            'LoRARequest("poet", 1, "DIR"), or a list of them',
        )
    by_name: dict[str, LoRARequest] = {}
    for one in given:
        if one is not None and (other := by_name.setdefault(one.lora_name, one)) != one:
            raise RequestValueError.about(
                "lora_request",
                f"holds two adapters named {one.lora_name!r}: number {other.lora_int_id} of "
                f"{other.lora_path!r} and number {one.lora_int_id} of {one.lora_path!r}; give each "
                "a name of its own, or ask one after the other",
            )
    return check_number(given, number, "lora_request", "`lora_request`s")


def priorities_for(
    priority: Sequence[int] | None, number: int, scheduler: SchedulerConfig
) -> Sequence[int]:
    """Return the priority of each prompt; RequestValueError if the engine has no priorities."""
    if priority is None:
        return [0] * number
    if scheduler.scheduling_policy != "priority":
        raise RequestValueError.about(
            "priority",
            "is given, but this engine serves in the order of arrival; leave it out, or make the "
            'LLM with `scheduling_policy="priority"`',
        )
    return check_number(priority, number, "priority", "priorities")


def check_number(given: Sequence[T], number: int, param: str, what: str) -> Sequence[T]:
    """Return what was given for each prompt; RequestValueError if these are too few or many."""
    if len(given) != number:
        raise RequestValueError(
            f"there are {number} prompts and {len(given)} {what}; give one for each", param=param
        )
    return given


def as_prompts(prompts: PromptType | Iterable[PromptType]) -> list[PromptType]:
    """Return one or several prompts as a list."""
    if isinstance(prompts, str | Mapping):
        return [cast(PromptType, prompts)]
    # The bytes of a text are numbers, as token ids are.
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        kind = type(prompts).__name__
        raise RequestTypeError.about(
            "prompts", f"is a {kind}; give a text, a dict with `prompt`, or a list of them"
        )
    many = list(prompts)  # once: it may be a generator
    if many and all(isinstance(item, int) for item in many):
        return [cast(list[int], many)]
    return cast(list[PromptType], many)


def read_clip(mm_items: MultiModalDataItems) -> np.ndarray:
    """Return the samples of the only clip, float[T]; RequestValueError for none, or several."""
    clips = mm_items.get("audio", ())
    is_one = len(clips) == 1 and isinstance(clips, AudioProcessorItems)
    samples = clips[0] if is_one else None
    if not isinstance(samples, np.ndarray):
        raise RequestValueError.about(
            "audio",
            f"holds {'other things than samples' if len(clips) == 1 else f'{len(clips)} clips'}; "
            "give one clip: samples of one axis, a pair (samples, sampling rate), also of several "
            "channels, or a file",
        )
    return samples


def find_stream(given: T, part: type) -> tuple[T, bool]:
    """Return what was given, and whether it is an iterator over prompts, to be read one by one.

    One over the parts of a single prompt, of the type `part`, is read as a whole.
    """
    if not isinstance(given, Iterator):
        return given, False
    first = list(islice(given, 1))
    is_whole = bool(first) and isinstance(first[0], part)
    return cast(T, chain(first, given)), not is_whole


def check_one_for_all(**given: Any) -> None:
    """Raise RequestTypeError for a list of one entry a prompt where nobody knows their number."""
    for name, value in given.items():
        if isinstance(value, Sequence):
            raise RequestTypeError.about(
                name,
                "is a list, but the prompts come from an iterator, one by one; give one for all, "
                "or the prompts as a list",
            )


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of messages, not a prompt."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and bool(value) and all(isinstance(item, Mapping) for item in value)


def as_conversations(messages: Messages | Iterable[Messages]) -> list[Messages]:
    """Return one or several conversations as a list."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise RequestTypeError.about(
            "messages",
            f"is a {type(messages).__name__}; give a list of messages, as in "
            '[{"role": "user", "content": "..."}]',
        )
    many = list(messages)
    if not many:
        raise RequestValueError.about("messages", "is empty; give at least one")
    return [cast(Messages, many)] if is_conversation(many) else cast(list[Messages], many)
