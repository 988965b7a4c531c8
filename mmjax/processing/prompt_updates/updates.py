"""What an item does to the prompt: it replaces a target by placeholder tokens, or inserts them.

Before: `<bos> <image> what is it`. After a replacement of `<image>` by three of it:
`<bos> <image> <image> <image> what is it`, with `offset=1, length=3`.
"""

import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mmjax.processing.tensors.inputs import PlaceholderRange


@runtime_checkable
class Tokenizer(Protocol):
    """The two verbs of an HF tokenizer that matching needs."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Any, /) -> Any: ...


PromptSeq = str | list[int]

_UTF_32 = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"


@dataclass(frozen=True, slots=True, eq=False)
class PromptIndex:
    """A place in the prompt rather than a run of tokens; compared by identity."""

    get_match_index: Callable[[Tokenizer | None, PromptSeq, int], int | None]
    """(tokenizer, prompt, start_idx) -> index, or None where the place does not exist."""


class PromptIndexTargets:
    """The places that an update may name."""

    @staticmethod
    def start() -> PromptIndex:
        """Before the first token, even of an empty prompt."""
        return PromptIndex(lambda tokenizer, prompt, start_idx: 0 if start_idx == 0 else None)

    @staticmethod
    def prefix(seq: PromptSeq) -> PromptIndex:
        """After `seq`, if the prompt begins with it."""

        def get_match_index(
            tokenizer: Tokenizer | None, prompt: PromptSeq, start_idx: int
        ) -> int | None:
            if start_idx != 0:
                return None
            prefix = as_text(seq, tokenizer) if isinstance(prompt, str) else as_ids(seq, tokenizer)
            return len(prefix) if prompt[: len(prefix)] == prefix else None

        return PromptIndex(get_match_index)

    @staticmethod
    def end() -> PromptIndex:
        """After the last token."""
        return PromptIndex(lambda tokenizer, prompt, start_idx: len(prompt))


UpdateTarget = PromptSeq | PromptIndex


class UpdateMode(StrEnum):
    INSERT = "insert"
    REPLACE = "replace"


EmbedMask = np.ndarray


@dataclass(frozen=True, slots=True)
class PromptUpdateDetails:
    """The tokens that an update writes, and which of them take embeddings."""

    full: PromptSeq
    is_embed: Callable[[Tokenizer | None, PromptSeq], EmbedMask] | None = None
    """(tokenizer, full) -> bool[length]; None: every position."""

    @staticmethod
    def from_seq(seq: PromptSeq) -> "PromptUpdateDetails":
        return PromptUpdateDetails(full=seq)

    @staticmethod
    def select_text(seq: PromptSeq, embed_text: str) -> "PromptUpdateDetails":
        """Embed the positions of the tokens of `embed_text`."""

        def is_embed(tokenizer: Tokenizer | None, full: PromptSeq) -> EmbedMask:
            return np.isin(as_ids(full, tokenizer), as_ids(embed_text, tokenizer))

        return PromptUpdateDetails(full=seq, is_embed=is_embed)

    @staticmethod
    def select_token_id(seq: PromptSeq, embed_token_id: int) -> "PromptUpdateDetails":
        """Embed the positions of one token."""
        return PromptUpdateDetails.select_token_ids(seq, [embed_token_id])

    @staticmethod
    def select_token_ids(seq: PromptSeq, embed_token_ids: Sequence[int]) -> "PromptUpdateDetails":
        """Embed the positions of several tokens."""
        chosen = list(embed_token_ids)
        masks: list[EmbedMask] = []  # one at most: items of one size share their content

        def is_embed(tokenizer: Tokenizer | None, full: PromptSeq) -> EmbedMask:
            if full is not seq or isinstance(full, str):
                return np.isin(as_ids(full, tokenizer), chosen)
            if not masks:
                masks.append(np.isin(full, chosen))
                masks[0].flags.writeable = False
            return masks[0]

        return PromptUpdateDetails(full=seq, is_embed=is_embed)


PromptUpdateInfo = PromptSeq | PromptUpdateDetails
PromptUpdateContent = PromptUpdateInfo | Callable[[int], PromptUpdateInfo]
PromptUpdateTarget = UpdateTarget | Callable[[int], UpdateTarget]


class Match(NamedTuple):
    """A half-open range of the prompt; empty for a place."""

    start_idx: int
    end_idx: int


@dataclass(frozen=True, slots=True)
class ResolvedPromptUpdate:
    """An update for one item, its target and content computed."""

    modality: str
    item_idx: int
    mode: UpdateMode
    target: UpdateTarget
    content: PromptUpdateDetails

    def with_content(self, content: PromptUpdateInfo) -> "ResolvedPromptUpdate":
        return replace(self, content=_as_details(content))


MultiModalPromptUpdates = Mapping[str, Sequence[Sequence[ResolvedPromptUpdate]]]
"""Per modality, per item: alternatives, of which the first that matches is applied."""


@dataclass(frozen=True, slots=True)
class PromptUpdate(ABC):
    """An update for every item of a modality; target and content may depend on the item."""

    mode: ClassVar[UpdateMode]
    modality: str
    target: PromptUpdateTarget

    @property
    @abstractmethod
    def content(self) -> PromptUpdateContent: ...

    def resolve(self, item_idx: int) -> ResolvedPromptUpdate:
        """Compute target and content for one item."""
        target = self.target(item_idx) if callable(self.target) else self.target
        content = self.content(item_idx) if callable(self.content) else self.content
        return ResolvedPromptUpdate(
            self.modality, item_idx, self.mode, target, _as_details(content)
        )


@dataclass(frozen=True, slots=True)
class PromptInsertion(PromptUpdate):
    """Writes right after the target: `a [target] b` becomes `a [target] [insertion] b`."""

    mode = UpdateMode.INSERT
    insertion: PromptUpdateContent

    @property
    def content(self) -> PromptUpdateContent:
        return self.insertion


@dataclass(frozen=True, slots=True)
class PromptReplacement(PromptUpdate):
    """Writes in place of the target: `a [target] b` becomes `a [replacement] b`."""

    mode = UpdateMode.REPLACE
    replacement: PromptUpdateContent

    @property
    def content(self) -> PromptUpdateContent:
        return self.replacement


def resolve_updates(
    prompt_updates: Sequence[PromptUpdate], mm_item_counts: Mapping[str, int]
) -> dict[str, list[list[ResolvedPromptUpdate]]]:
    """Resolve each update for each item of its modality."""
    by_modality: dict[str, list[PromptUpdate]] = {}
    for update in prompt_updates:
        by_modality.setdefault(update.modality, []).append(update)
    return {
        modality: [
            [update.resolve(index) for update in updates]
            for index in range(mm_item_counts.get(modality, 0))
        ]
        for modality, updates in by_modality.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class PlaceholderFeaturesInfo:
    """An item's placeholder as it was found in a prompt."""

    modality: str
    item_idx: int
    start_idx: int
    tokens: list[int]
    is_embed: EmbedMask | None

    @property
    def length(self) -> int:
        return len(self.tokens)

    def to_range(self) -> PlaceholderRange:
        return PlaceholderRange(self.start_idx, self.length, self.is_embed)


def _as_details(content: PromptUpdateInfo) -> PromptUpdateDetails:
    return content if isinstance(content, PromptUpdateDetails) else PromptUpdateDetails(content)


def as_ids(seq: PromptSeq, tokenizer: Tokenizer | None) -> list[int]:
    """Return a sequence as token ids, encoded without special tokens."""
    if not isinstance(seq, str):
        return seq
    if tokenizer is None:
        raise ValueError(f"{seq[:40]!r} is text, and there is no tokenizer; pass `tokenizer`")
    return tokenizer.encode(seq, add_special_tokens=False)


def as_text(seq: PromptSeq, tokenizer: Tokenizer | None) -> str:
    """Return a sequence as text."""
    if isinstance(seq, str):
        return seq
    if tokenizer is None:
        raise ValueError(f"{seq[:10]} are token ids, and there is no tokenizer; pass `tokenizer`")
    return tokenizer.decode(seq)


def searchable(token_ids: Sequence[int]) -> str:
    """Return token ids as a str of one character each: `str.find` is linear in the worst case."""
    # Four times as fast as `chr` for each.
    return array("I", token_ids).tobytes().decode(_UTF_32, "surrogatepass")


def iter_token_matches(
    token_ids: list[int], match_ids: list[int], *, start_idx: int = 0
) -> Iterator[Match]:
    """Yield the non-overlapping matches, left to right; an empty pattern has none."""
    if start_idx < 0:
        raise ValueError(f"start_idx is {start_idx}; it must be non-negative")
    if not match_ids:
        return
    text, pattern = searchable(token_ids), searchable(match_ids)
    while (start := text.find(pattern, start_idx)) >= 0:
        start_idx = start + len(match_ids)
        yield Match(start, start_idx)


def replace_token_matches(
    token_ids: list[int], match_ids: list[int], new_ids: list[int]
) -> list[int]:
    """Return the prompt with every match replaced."""
    parts: list[int] = []
    end = 0
    for match in iter_token_matches(token_ids, match_ids):
        parts += token_ids[end : match.start_idx]
        parts += new_ids
        end = match.end_idx
    return parts + token_ids[end:]
