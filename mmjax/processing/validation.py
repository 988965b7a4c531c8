"""Checks of prompts against items, before and after processing; each says how to mend."""

from collections.abc import Mapping, Sequence
from typing import Any

from mmjax.errors import RequestRuntimeError, RequestTypeError, RequestValueError
from mmjax.processing.context import BaseProcessingInfo
from mmjax.processing.inputs import MultiModalKwargsItems, MultiModalPlaceholders
from mmjax.processing.prompt_matching import count_token_matches


class PromptUpdateError(RequestRuntimeError, AssertionError):
    """Placeholders in the prompt and items in the request do not go together."""


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
            raise PromptUpdateError(
                f"prompt has {_count(num_placeholders, f'`{placeholder}` placeholder')} but "
                f"{_count(num_items, modality)} {'was' if num_items == 1 else 'were'} given; "
                f"pass one {modality} for each",
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
    placeholders = [info.get_placeholder_str(modality, 1) for modality in info.supported_mm_limits]
    known = " or ".join(f"`{placeholder}`" for placeholder in placeholders if placeholder)
    return f"write {known} where an item stands" if known else "leave it out"


def validate_mm_kwargs(mm_kwargs: MultiModalKwargsItems, mm_counts: Mapping[str, int]) -> None:
    """Check that processing gave tensors for every item."""
    for modality, num_items in mm_counts.items():
        found = len(mm_kwargs.get(modality, []))
        if found != num_items:
            raise RequestRuntimeError(
                f"Expected there to be {num_items} {modality} items in keyword arguments "
                f"corresponding to {num_items} {modality} data items, but found {found}; "
                "`_call_hf_processor` and `_get_mm_fields_config` of the model must agree",
                param="multi_modal_data",
            )


def validate_mm_updates(
    mm_prompt_updates: Mapping[str, Sequence[Any]], mm_counts: Mapping[str, int]
) -> None:
    """Check that every item has a prompt update."""
    for modality, num_items in mm_counts.items():
        found = len(mm_prompt_updates.get(modality, []))
        if found != num_items:
            raise RequestRuntimeError(
                f"Expected there to be {num_items} prompt updates corresponding to "
                f"{num_items} {modality} items, but instead found {found} prompt updates; either "
                "`_get_prompt_updates` of the model gives none, or you forgot to include input "
                "placeholder tokens in the prompt",
                param="prompt",
            )


def validate_mm_placeholders(
    placeholders: Mapping[str, Sequence[Any]], mm_counts: Mapping[str, int]
) -> None:
    """Check that every item has a placeholder in the updated prompt."""
    for modality, num_items in mm_counts.items():
        found = len(placeholders.get(modality, []))
        if found != num_items:
            raise PromptUpdateError(
                f"Expected there to be {num_items} prompt placeholders corresponding to "
                f"{num_items} {modality} items, but instead found {found} prompt placeholders; "
                "write one placeholder for each item into the prompt",
                param="prompt",
            )


def validate_reserved_tokens(
    info: BaseProcessingInfo, token_ids: Sequence[int], ranges: MultiModalPlaceholders
) -> None:
    """Check that reserved tokens stand where embeddings go, and nowhere else."""
    reserved = info.get_reserved_tokens()
    if not reserved:
        return
    num_reserved = sum(token_ids.count(token_id) for token_id in reserved.values())
    num_embeds = sum(one.get_num_embeds() for many in ranges.values() for one in many)
    if num_reserved != num_embeds:
        names = ", ".join(f"`{token}`" for token in reserved)
        raise PromptUpdateError(
            f"prompt has {num_reserved} of {names} but the media have {num_embeds} embeddings; "
            f"{_mend(info)}",
            param="prompt",
        )
