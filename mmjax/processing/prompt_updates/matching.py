"""Applies resolved updates to a prompt, and finds their placeholders in one: tokens in, tokens out.

Linear in the prompt and in the items: a target that many items share is searched once.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mmjax.processing.prompt_updates.updates import (
    Match,
    MultiModalPromptUpdates,
    PlaceholderFeaturesInfo,
    PromptIndex,
    PromptSeq,
    ResolvedPromptUpdate,
    Tokenizer,
    UpdateMode,
    as_ids,
    as_text,
    searchable,
)

_MARKS = range(0xE000, 0xF900)
"""Code points that no text is made of: one that the prompt lacks stands around a content."""

MultiModalPromptUpdatesApplyResult = Mapping[str, list[int | None]]
"""Per modality, per item: the index of the alternative that was applied, or None."""


def apply_token_matches(
    prompt: list[int],
    mm_prompt_updates: MultiModalPromptUpdates,
    tokenizer: Tokenizer | None = None,
) -> tuple[list[int], MultiModalPromptUpdatesApplyResult]:
    """Apply the updates that match a tokenized prompt."""
    plan = _plan_updates(_Finder(prompt, tokenizer), mm_prompt_updates)
    tokens: list[int] = []
    for part in _splice(prompt, plan):
        tokens += as_ids(part, tokenizer)
    return tokens, _result_of(plan, mm_prompt_updates)


def apply_text_matches(
    prompt: str,
    mm_prompt_updates: MultiModalPromptUpdates,
    tokenizer: Tokenizer | None = None,
) -> tuple[str, MultiModalPromptUpdatesApplyResult]:
    """Apply the updates that match a prompt of text."""
    plan = _plan_updates(_Finder(prompt, tokenizer), mm_prompt_updates)
    text = "".join(as_text(part, tokenizer) for part in _splice(prompt, plan))
    return text, _result_of(plan, mm_prompt_updates)


class _Finder:
    """Finds targets at or after a cursor that only moves forward; remembers per target."""

    def __init__(self, prompt: PromptSeq, tokenizer: Tokenizer | None) -> None:
        self.prompt = prompt
        self._tokenizer = tokenizer
        self._text = prompt if isinstance(prompt, str) else searchable(prompt)
        self._patterns: dict[object, str] = {}
        self._found: dict[str, int] = {}

    def find_target(self, update: ResolvedPromptUpdate, cursor: int) -> Match | None:
        target = update.target
        if isinstance(target, PromptIndex):
            index = target.get_match_index(self._tokenizer, self.prompt, cursor)
            # A place before the cursor has been passed: it must not move the cursor back.
            return None if index is None or index < cursor else Match(index, index)
        pattern = self.pattern_of(target)
        if not pattern:
            is_text_start = isinstance(self.prompt, str) and cursor == 0
            return Match(0, 0) if is_text_start else None
        start = self.find(pattern, cursor)
        return None if start < 0 else Match(start, start + len(pattern))

    def pattern_of(self, seq: PromptSeq) -> str:
        """Return the sequence in the prompt's own alphabet."""
        key = seq if isinstance(seq, str) else (id(seq), len(seq))
        pattern = self._patterns.get(key)
        if pattern is None:
            if isinstance(self.prompt, str):
                pattern = as_text(seq, self._tokenizer)
            else:
                pattern = searchable(as_ids(seq, self._tokenizer))
            self._patterns[key] = pattern
        return pattern

    def find(self, pattern: str, cursor: int) -> int:
        """Return the first occurrence at or after `cursor`, or -1."""
        found = self._found.get(pattern, -2)
        if found == -2 or -1 < found < cursor:
            found = self._found[pattern] = self._text.find(pattern, cursor)
        return found


class _Applied(NamedTuple):
    match: Match
    priority: int
    """The item's place in (modality order, item order)."""
    update: ResolvedPromptUpdate
    alternative: int


@dataclass(slots=True)
class _Queue:
    """Items whose alternatives have the same modes and targets; only the first one competes."""

    items: deque[tuple[int, Sequence[ResolvedPromptUpdate]]] = field(default_factory=deque)

    @property
    def priority(self) -> int:
        return self.items[0][0]

    def first_match(
        self, finder: _Finder, cursor: int, mode: UpdateMode | None = None
    ) -> tuple[int, Match] | None:
        """Return the first alternative (of `mode`) that matches, and its match."""
        for alternative, update in enumerate(self.items[0][1]):
            if mode is None or update.mode is mode:
                match = finder.find_target(update, cursor)
                if match is not None:
                    return alternative, match
        return None

    def apply_first(self, alternative: int, match: Match) -> _Applied:
        priority, updates = self.items.popleft()
        return _Applied(match, priority, updates[alternative], alternative)


def _make_queues(mm_prompt_updates: MultiModalPromptUpdates) -> list[_Queue]:
    queues: dict[object, _Queue] = {}
    priority = 0
    for items in mm_prompt_updates.values():
        for alternatives in items:
            signature = tuple((update.mode, _target_key(update)) for update in alternatives)
            queues.setdefault(signature, _Queue()).items.append((priority, alternatives))
            priority += 1
    return list(queues.values())


def _target_key(update: ResolvedPromptUpdate) -> object:
    return tuple(update.target) if isinstance(update.target, list) else update.target


def _plan_updates(finder: _Finder, mm_prompt_updates: MultiModalPromptUpdates) -> list[_Applied]:
    """Decide which alternative goes where, in rounds, left to right.

    A round has one mode: that of the earliest item that matches. All insertions of a round are
    applied (those that share a target, back to back); of the replacements, those at a place,
    and the leftmost other one.
    """
    queues = _make_queues(mm_prompt_updates)
    plan: list[_Applied] = []
    cursor = 0
    while queues:
        candidates = [(queue, queue.first_match(finder, cursor)) for queue in queues]
        # A queue that matches nowhere from here on never will again.
        found = {queue.priority: (queue, match) for queue, match in candidates if match is not None}
        if not found:
            break
        earliest, (alternative, _) = found[min(found)]
        queues = [queue for queue, _ in found.values()]
        is_insertion = earliest.items[0][1][alternative].mode is UpdateMode.INSERT
        apply_round = _insert_round if is_insertion else _replace_round
        applied = sorted(apply_round(queues, finder, cursor), key=lambda one: one[:2])
        plan += applied
        cursor = applied[-1].match.end_idx
        queues = [queue for queue in queues if queue.items]
    return plan


def _insert_round(queues: Iterable[_Queue], finder: _Finder, cursor: int) -> list[_Applied]:
    applied = []
    for queue in queues:
        found = queue.first_match(finder, cursor, UpdateMode.INSERT)
        while found is not None and queue.items:
            applied.append(queue.apply_first(*found))
    return applied


def _replace_round(queues: Iterable[_Queue], finder: _Finder, cursor: int) -> list[_Applied]:
    applied = []
    leftmost: tuple[Match, int, _Queue, int] | None = None
    for queue in queues:
        found = queue.first_match(finder, cursor, UpdateMode.REPLACE)
        if found is None:
            continue
        alternative, match = found
        if match.start_idx == match.end_idx:
            while queue.items:
                applied.append(queue.apply_first(alternative, match))
        elif leftmost is None or (match, queue.priority) < leftmost[:2]:
            leftmost = (match, queue.priority, queue, alternative)
    if leftmost is not None:
        match, _, queue, alternative = leftmost
        applied.append(queue.apply_first(alternative, match))
    return applied


def _splice(prompt: PromptSeq, plan: Sequence[_Applied]) -> list[PromptSeq]:
    """Return the updated prompt in pieces."""
    pieces: list[PromptSeq] = []
    end = 0
    for applied in plan:
        match = applied.match
        keep_until = match.end_idx if applied.update.mode is UpdateMode.INSERT else match.start_idx
        pieces.append(prompt[end : max(end, keep_until)])
        pieces.append(applied.update.content.full)
        end = max(end, match.end_idx)
    pieces.append(prompt[end:])
    return pieces


def _result_of(
    plan: Iterable[_Applied], mm_prompt_updates: MultiModalPromptUpdates
) -> MultiModalPromptUpdatesApplyResult:
    result: dict[str, list[int | None]] = {
        modality: [None] * len(items) for modality, items in mm_prompt_updates.items()
    }
    # By priority.
    places = [(m, index) for m, items in mm_prompt_updates.items() for index in range(len(items))]
    for applied in plan:
        modality, index = places[applied.priority]
        result[modality][index] = applied.alternative
    return result


def find_unapplied(result: MultiModalPromptUpdatesApplyResult) -> tuple[str, int] | None:
    """Return (modality, index) of the first item without an applied update; None: all have one."""
    for modality, alternatives in result.items():
        for index, alternative in enumerate(alternatives):
            if alternative is None:
                return modality, index
    return None


def find_mm_placeholders(
    prompt: list[int],
    mm_prompt_updates: MultiModalPromptUpdates,
    tokenizer: Tokenizer | None = None,
) -> Mapping[str, list[PlaceholderFeaturesInfo]]:
    """Find the items' contents in an updated prompt: left to right, each modality in item order."""
    finder = _Finder(prompt, tokenizer)
    found: dict[str, list[PlaceholderFeaturesInfo]] = {}
    next_item = dict.fromkeys(mm_prompt_updates, 0)
    cursor = 0
    while True:
        best: tuple[int, ResolvedPromptUpdate, int] | None = None
        for modality, items in mm_prompt_updates.items():
            if next_item[modality] >= len(items):
                continue
            for update in items[next_item[modality]]:
                pattern = finder.pattern_of(update.content.full)
                start = finder.find(pattern, cursor) if pattern else -1
                if start >= 0 and (best is None or start < best[0]):
                    best = (start, update, len(pattern))
        if best is None:
            return found
        start, update, length = best
        is_embed = update.content.is_embed
        found.setdefault(update.modality, []).append(
            PlaceholderFeaturesInfo(
                modality=update.modality,
                item_idx=next_item[update.modality],
                start_idx=start,
                tokens=prompt[start : start + length],
                is_embed=None if is_embed is None else is_embed(tokenizer, update.content.full),
            )
        )
        next_item[update.modality] += 1
        cursor = start + length


def count_token_matches(prompt: list[int], target: list[int]) -> int:
    """Return how often `target` stands in `prompt`, not overlapping itself."""
    return searchable(prompt).count(searchable(target)) if target else 0


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
    r"""Replace in the text, and tokenize what stands between the contents; None if that is lossy.

    For a target of several tokens: `<image>` as `<`, `image`, `>` has joined the words around it.
    `\n\n<image>` may be `\n`, `\n<`, `image`, `>`. A reference that replaces text before it
    tokenizes then has other tokens around.

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

    def write_mark(update: ResolvedPromptUpdate) -> ResolvedPromptUpdate:
        contents.append(as_ids(update.content.full, tokenizer))
        return update.with_content(f"{mark}{len(contents) - 1}{mark}")

    marked = {
        modality: [[write_mark(update) for update in alternatives] for alternatives in items]
        for modality, items in mm_prompt_updates.items()
    }
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
