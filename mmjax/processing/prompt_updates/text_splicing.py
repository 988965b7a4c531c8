r"""Updates of a tokenized prompt whose target is several tokens, made in its text.

`<image>` as `<`, `image`, `>` has joined the words around it: `\n\n<image>` may be `\n`, `\n<`,
`image`, `>`. A reference that replaces text before it tokenizes then has other tokens around.
"""

from collections.abc import Callable
from typing import Any

from mmjax.processing.prompt_updates.matching import (
    MultiModalPromptUpdatesApplyResult,
    apply_text_matches,
)
from mmjax.processing.prompt_updates.updates import (
    MultiModalPromptUpdates,
    ResolvedPromptUpdate,
    as_ids,
)

_MARKS = range(0xE000, 0xF900)
"""Code points that no text is made of: one that the prompt lacks stands around a content."""


def has_long_target(mm_prompt_updates: MultiModalPromptUpdates) -> bool:
    """Whether a target is several tokens; all items of a modality are alike."""
    return any(
        isinstance(update.target, list) and len(update.target) > 1
        for items in mm_prompt_updates.values()
        for alternatives in items[:1]
        for update in alternatives
    )


def splice_in_text(
    prompt: list[int],
    mm_prompt_updates: MultiModalPromptUpdates,
    tokenizer: Any,
    *,
    before: str,
    after: str,
) -> tuple[list[int], MultiModalPromptUpdatesApplyResult] | None:
    """Replace in the text, and tokenize what stands between the contents; None if that is lossy.

    Args:
        prompt: Token ids; None is returned for those that their own text does not give back.
        mm_prompt_updates: Whose contents are written as they are.
        tokenizer: Of the model.
        before: A special token that ends a content: the words after it are tokenized so.
        after: A special token that begins a content.
    """
    text = tokenizer.decode(prompt)
    mark = next((mark for mark in map(chr, _MARKS) if mark not in text), None)
    if mark is None or as_ids(text, tokenizer) != prompt:
        return None
    contents: list[list[int]] = []
    marked = _map_updates(
        mm_prompt_updates, lambda update: _mark(update, mark, contents, tokenizer)
    )
    marked_text, result = apply_text_matches(text, marked, tokenizer)
    pieces = marked_text.split(mark)
    token_ids: list[int] = []
    for place, piece in enumerate(pieces):
        if place % 2:
            token_ids += contents[int(piece)]
            continue
        is_first, is_last = place == 0, place == len(pieces) - 1
        whole = as_ids(before * (not is_first) + piece + after * (not is_last), tokenizer)
        token_ids += whole[int(not is_first) : len(whole) - int(not is_last)]
    return token_ids, result


def _mark(
    update: ResolvedPromptUpdate, mark: str, contents: list[list[int]], tokenizer: Any
) -> ResolvedPromptUpdate:
    contents.append(as_ids(update.content.full, tokenizer))
    return update.with_content(f"{mark}{len(contents) - 1}{mark}")


def _map_updates(
    mm_prompt_updates: MultiModalPromptUpdates,
    change: Callable[[ResolvedPromptUpdate], ResolvedPromptUpdate],
) -> MultiModalPromptUpdates:
    return {
        modality: [[change(update) for update in alternatives] for alternatives in items]
        for modality, items in mm_prompt_updates.items()
    }
