"""Checks of prompts against items, before and after processing; and whose fault a failure is.

Each error says how to mend.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from mmjax.errors import (
    ConfigError,
    MMJaxError,
    ProcessingError,
    RequestRuntimeError,
    RequestTypeError,
    RequestValueError,
)
from mmjax.processing.context import BaseProcessingInfo
from mmjax.processing.hf_call import MM_KWARGS_PARAM
from mmjax.processing.prompt_updates.matching import (
    MultiModalPromptUpdatesApplyResult,
    count_token_matches,
    find_unapplied,
)
from mmjax.processing.tensors.inputs import MultiModalKwargsItems, MultiModalPlaceholders

T = TypeVar("T")

_MAX_NAMES_SHOWN = 8


class PromptUpdateError(RequestRuntimeError, AssertionError):
    """Placeholders in the prompt and items in the request do not go together: the client's fault.

    Where a client's prompt was found to have one placeholder for each item, a missing one is the
    family's own fault, and a ProcessingError.
    """


def validate_prompt(prompt: object, vocab_size: int, *, param: str = "prompt") -> None:
    """Refuse what is neither text that can be tokenized nor ids of the vocabulary."""
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestValueError(
                f"{param} has the lone surrogate {prompt[error.start]!r} at character "
                f"{error.start}; send valid Unicode",
                param=param,
            ) from error
        return
    if not isinstance(prompt, list):
        raise RequestTypeError(
            f"{param} has the type `{type(prompt).__name__}`; give a str or a list of token ids",
            param=param,
        )
    # Long prompts are checked at C's speed; only a wrong one is walked through.
    if not prompt or (
        set(map(type, prompt)) == {int} and 0 <= min(prompt) <= max(prompt) < vocab_size
    ):
        return
    for index, token_id in enumerate(prompt):
        if type(token_id) is not int:
            raise RequestTypeError(
                f"{param} token {index} is {token_id!r}; token ids are integers", param=param
            )
        if not 0 <= token_id < vocab_size:
            raise RequestValueError(
                f"{param} token {index} is {token_id}; token ids are 0 to {vocab_size - 1}",
                param=param,
            )


def validate_placeholder_counts(
    info: BaseProcessingInfo, prompt: str | list[int], mm_counts: Mapping[str, int]
) -> None:
    """Refuse a prompt with reserved tokens, or with other placeholders than the items need."""
    for token, token_id in info.get_reserved_tokens().items():
        if isinstance(prompt, str):
            place, unit = prompt.find(token), "character"
        else:
            place, unit = prompt.index(token_id) if token_id in prompt else -1, "token"
        if place >= 0:
            raise RequestValueError(
                f"prompt has `{token}` at {unit} {place}, which is reserved for the media's "
                f"embeddings; {_mend(info)}",
                param="prompt",
            )
    for modality in info.supported_mm_limits:
        placeholder = info.get_counted_placeholder(modality)
        if placeholder is None:
            continue  # nothing in the prompt stands for an item, or each has its own name
        if isinstance(prompt, str):
            num_placeholders = prompt.count(placeholder)
        else:
            num_placeholders = _count_in_tokens(info.get_tokenizer(), prompt, placeholder)
        num_items = mm_counts.get(modality, 0)
        if num_placeholders != num_items:
            given = f"{_count(num_items, modality)} {'was' if num_items == 1 else 'were'} given"
            mend = f"pass one {modality} for each"
            if num_placeholders < num_items:
                written = info.find_placeholder_str(modality, 1) or placeholder
                mend = f"write `{written}` where each {modality} stands"
            raise PromptUpdateError(
                f"prompt has {_count(num_placeholders, f'`{placeholder}` placeholder')} but "
                f"{given}; {mend}",
                param="prompt",
            )


def _count_in_tokens(tokenizer: Any, prompt: list[int], placeholder: str) -> int:
    target = tokenizer.encode(placeholder, add_special_tokens=False)
    if len(target) == 1:
        return count_token_matches(prompt, target)
    # Of several tokens, its outer ones may have joined the words around it.
    return tokenizer.decode(prompt).count(placeholder)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _mend(info: BaseProcessingInfo) -> str:
    placeholders = [info.find_placeholder_str(modality, 1) for modality in info.supported_mm_limits]
    known = " or ".join(f"`{placeholder}`" for placeholder in placeholders if placeholder)
    return f"write {known} where an item stands" if known else "leave it out"


def validate_mm_kwargs(mm_kwargs: MultiModalKwargsItems, mm_counts: Mapping[str, int]) -> None:
    """Check that processing gave tensors for every item."""
    for modality, num_items, found in _wrong_counts(mm_kwargs, mm_counts):
        raise ProcessingError(
            f"Expected there to be {num_items} {modality} items in keyword arguments "
            f"corresponding to {num_items} {modality} data items, but found {found}; "
            "`_call_hf_processor` and `_get_mm_fields_config` of the model must agree"
        )


def validate_mm_updates(
    mm_prompt_updates: Mapping[str, Sequence[Any]], mm_counts: Mapping[str, int]
) -> None:
    """Check that every item has a prompt update."""
    for modality, num_items, found in _wrong_counts(mm_prompt_updates, mm_counts):
        raise ProcessingError(
            f"Expected there to be {num_items} prompt updates corresponding to "
            f"{num_items} {modality} items, but instead found {found} prompt updates; "
            "`_get_prompt_updates` of the model must give one for each modality"
        )


def _wrong_counts(
    items: Mapping[str, Sequence[Any]], mm_counts: Mapping[str, int]
) -> Iterator[tuple[str, int, int]]:
    """Yield (modality, items of the request, those in `items`) where they differ."""
    for modality, expected in mm_counts.items():
        found = len(items.get(modality, ()))
        if found != expected:
            yield modality, expected, found


def missing_placeholder_error(
    info: BaseProcessingInfo, modality: str, message: str
) -> PromptUpdateError | ProcessingError:
    """Return the error for an item without its placeholder: the client's, or the family's own.

    A prompt in which placeholders are counted had as many as there are items.
    """
    placeholder = info.get_counted_placeholder(modality)
    if placeholder is None:
        mend = f"the prompt must have one placeholder for each {modality}"
        return PromptUpdateError(f"{message}; {mend}", param="prompt")
    return ProcessingError(
        f"{message}; the prompt has one `{placeholder}` for each {modality}: "
        "`_get_prompt_updates` of the model must find it"
    )


def validate_all_applied(
    info: BaseProcessingInfo, result: MultiModalPromptUpdatesApplyResult
) -> None:
    """Check that every item's update has found its place in the prompt."""
    unapplied = find_unapplied(result)
    if unapplied is not None:
        modality, index = unapplied
        raise missing_placeholder_error(
            info,
            modality,
            f"Failed to apply prompt replacement for mm_items[{modality!r}][{index}]",
        )


def validate_mm_placeholders(
    info: BaseProcessingInfo,
    placeholders: Mapping[str, Sequence[Any]],
    mm_counts: Mapping[str, int],
) -> None:
    """Check that every item has a placeholder in the updated prompt."""
    for modality, num_items, found in _wrong_counts(placeholders, mm_counts):
        raise missing_placeholder_error(
            info,
            modality,
            f"Expected there to be {num_items} prompt placeholders corresponding to "
            f"{num_items} {modality} items, but instead found {found} prompt placeholders",
        )


def validate_reserved_tokens(
    info: BaseProcessingInfo,
    prompt: str | list[int],
    token_ids: Sequence[int],
    ranges: MultiModalPlaceholders,
) -> None:
    """Check that reserved tokens stand where embeddings go, and nowhere else.

    Args:
        info: Whose reserved tokens.
        prompt: As it was given.
        token_ids: What became of it.
        ranges: The items' places in `token_ids`.
    """
    reserved = info.get_reserved_tokens()
    if not reserved:
        return
    num_reserved = sum(token_ids.count(token_id) for token_id in reserved.values())
    num_embeds = sum(one.get_num_embeds() for many in ranges.values() for one in many)
    if num_reserved == num_embeds:
        return
    names = ", ".join(f"`{token}`" for token in reserved)
    message = f"prompt has {num_reserved} of {names} but the media have {num_embeds} embeddings"
    # A tokenizer may read other texts than a token's own as that token.
    given = info.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    if set(reserved.values()).isdisjoint(given):
        raise ProcessingError(f"{message}; `_get_prompt_updates` of the model must agree with both")
    raise PromptUpdateError(f"{message}; {_mend(info)}", param="prompt")


def validate_num_embeds(
    info: BaseProcessingInfo, ranges: MultiModalPlaceholders, most_by_modality: Mapping[str, int]
) -> None:
    """Refuse an item with more embeddings than one of the size in `limit_mm_per_prompt`."""
    for modality, most in most_by_modality.items():
        for index, placeholder in enumerate(ranges.get(modality, ())):
            num_embeds = placeholder.get_num_embeds()
            if num_embeds > most:
                options = info.ctx.get_mm_config().media_options(modality).items()
                shown = ", ".join(f"{name} {value}" for name, value in options)
                raise RequestValueError(
                    f"{modality} {index} gives {num_embeds} embeddings, at most {most} are "
                    f"accepted: those of {shown}, which `--limit-mm-per-prompt` sets; send a "
                    f"smaller {modality}, or have the flag set higher",
                    param="multi_modal_data",
                )


def validate_limited_modalities(info: BaseProcessingInfo) -> None:
    """Raise ConfigError for a limit of a modality that the model does not take; 0 says so too."""
    mm = info.ctx.get_mm_config()
    for modality in mm.limit_mm_per_prompt:
        if modality not in info.supported_mm_limits and mm.limit(modality):
            known = ", ".join(f"`{name}`" for name in info.supported_mm_limits)
            raise ConfigError(
                f"`--limit-mm-per-prompt` limits `{modality}`, which this model does not take; it "
                f"takes {known}: leave the other out"
            )


def process_and_blame(
    process: Callable[[Mapping[str, object]], T], mm_kwargs: Mapping[str, object]
) -> T:
    """Return `process(mm_kwargs)`; a failure is the request's where its kwargs cause it, else ours.

    What else a client can cause is checked before, and is a RequestError already.
    """
    try:
        return process(mm_kwargs)
    except Exception as error:  # HF's code and families' may raise anything
        if isinstance(error, MMJaxError) and not isinstance(error, ProcessingError):
            raise
        is_by_kwargs = False
        with suppress(Exception):  # where it fails too, it is not the kwargs
            if mm_kwargs:
                process({})
                is_by_kwargs = True
        if is_by_kwargs:
            names = ", ".join(f"`{str(name)[:64]}`" for name in list(mm_kwargs)[:_MAX_NAMES_SHOWN])
            raise RequestValueError(
                f"mm_processor_kwargs cannot be applied: processing fails with {names}, and not "
                "without; correct the values, or leave them out",
                param=MM_KWARGS_PARAM,
            ) from error
        if isinstance(error, ProcessingError):
            raise
        raise ProcessingError(f"processing failed: {type(error).__name__}: {error}") from error
