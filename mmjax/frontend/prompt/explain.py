"""Describe a processed prompt: text, token ids, placeholders, hashes, tensors. No inference.

Reads the caches without changing them. Knows nothing of HTTP or of the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from mmjax.cache import BaseMultiModalProcessorCache
from mmjax.errors import RequestError
from mmjax.frontend.prompt.explanation_views import draw_explanation, write_explanation
from mmjax.frontend.requests.request import PlacedItem, RequestItem, list_items
from mmjax.processing.prepared import PreparedInputs
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.tensors.fields import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFlatField,
    MultiModalSharedField,
)
from mmjax.processing.tensors.inputs import MultiModalKwargsItem

CacheState = Literal["hit", "miss", "off", "hidden"]

_FIELD_NAMES: Mapping[type[BaseMultiModalField], str] = {
    MultiModalBatchedField: "batched",
    MultiModalFlatField: "flat",
    MultiModalSharedField: "shared",
}


class TensorExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One processed tensor of one item."""

    shapes: list[list[int]]
    """One shape; several for a ragged list of arrays."""
    dtype: str
    field: str
    """How items are sliced from the batch: "batched", "flat" or "shared"."""


class ItemExplanation(PlacedItem, frozen=True, kw_only=True):
    """One item: its placeholder, its identity, its tensors."""

    is_embed: list[bool] | None
    """Which of the `length` positions take an embedding; None: all."""
    mm_hash: str
    identifier: str
    cache: CacheState
    """Whether the processor cache had the item before this call; "off": there is no cache;
    "hidden": clients share it, and none may learn what others have sent."""
    tensors: dict[str, TensorExplanation] | None
    """None if the item was given by id only, and only the engine has its tensors."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A processed prompt; notebooks show it as HTML."""

    prompt: str | None
    """The tokenized text; None if token ids were given."""
    prompt_token_ids: list[int]
    tokens: list[str]
    """The text of each token."""
    encoder_prompt_token_ids: list[int] | None
    """Of encoder-decoder models, whose items are in this prompt."""
    encoder_tokens: list[str] | None
    items: list[ItemExplanation]
    """In the prompt's order."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return msgspec.to_builtins(self)

    def to_text(self) -> str:
        """Return lines for a terminal: the tokens, then a row for each item."""
        return write_explanation(self)

    def without_cache_states(self) -> "Explanation":
        """Return the explanation with every `cache` "hidden"."""
        items = [msgspec.structs.replace(item, cache="hidden") for item in self.items]
        return msgspec.structs.replace(self, items=items)

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: tokens as cells, placeholders in their items' colours."""
        return draw_explanation(self)


def explain_prompt(
    processor: BaseMultiModalProcessor[Any],
    prepared: PreparedInputs,
    cache: BaseMultiModalProcessorCache | None,
) -> Explanation:
    """Describe a prepared prompt, including the tensors of cached items."""
    hashes = {mm_hash for many in prepared.mm_hashes.values() for mm_hash in many}
    held = {mm_hash for mm_hash in hashes if cache is not None and cache.is_cached_item(mm_hash)}
    for mm_hash in sorted(hashes - prepared.fresh.keys()):
        # An item given by id only has no data here.
        with suppress(RequestError):
            prepared = processor.rebuild(prepared, [mm_hash])

    def cache_state(mm_hash: str) -> CacheState:
        if cache is None:
            return "off"
        return "hit" if mm_hash in held else "miss"

    decode_token = partial(_decode_token, processor.info.get_tokenizer())
    return explain_prepared(prepared, decode_token=decode_token, cache_state=cache_state)


def _decode_token(tokenizer: Any, token_id: int) -> str:
    """Return a token's text with its leading space, which decoding it alone would strip."""
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if isinstance(piece, str) and "\u2581" in piece:  # sentencepiece's space
        return piece.replace("\u2581", " ")
    return tokenizer.decode([token_id])


def explain_prepared(
    prepared: PreparedInputs,
    *,
    decode_token: Callable[[int], str],
    cache_state: Callable[[str], CacheState],
) -> Explanation:
    """Describe a prepared prompt.

    Args:
        prepared: With the tensors of every item that has data in `fresh`.
        decode_token: Token id -> its text.
        cache_state: mm_hash -> its state in the processor cache before the call.
    """
    encoder_ids = prepared.encoder_prompt_token_ids
    texts: dict[int, str] = {}

    def decode(token_ids: Sequence[int]) -> list[str]:
        for token_id in set(token_ids) - texts.keys():
            texts[token_id] = decode_token(token_id)
        return [texts[token_id] for token_id in token_ids]

    return Explanation(
        prompt=prepared.prompt,
        prompt_token_ids=list(prepared.prompt_token_ids),
        tokens=decode(prepared.prompt_token_ids),
        encoder_prompt_token_ids=None if encoder_ids is None else list(encoder_ids),
        encoder_tokens=None if encoder_ids is None else decode(encoder_ids),
        items=[
            _explain_item(prepared, item, cache_state(item.mm_hash))
            for item in list_items(prepared)
        ],
    )


def _explain_item(
    prepared: PreparedInputs, item: RequestItem, cache: CacheState
) -> ItemExplanation:
    is_embed = prepared.mm_placeholders[item.modality][item.index].is_embed
    processed = prepared.fresh.get(item.mm_hash)
    return ItemExplanation(
        **{name: getattr(item, name) for name in PlacedItem.__struct_fields__},
        is_embed=None if is_embed is None else is_embed.tolist(),
        mm_hash=item.mm_hash,
        identifier=item.mm_hash,
        cache=cache,
        tensors=None if processed is None else _explain_tensors(processed[0]),
    )


def _explain_tensors(item: MultiModalKwargsItem) -> dict[str, TensorExplanation]:
    return {
        key: TensorExplanation(
            shapes=[list(array.shape) for array in _arrays(elem.data)],
            dtype=", ".join(sorted({array.dtype.name for array in _arrays(elem.data)})),
            field=_FIELD_NAMES[type(elem.field)],
        )
        for key, elem in item.items()
    }


def _arrays(data: Any) -> list[np.ndarray]:
    if isinstance(data, list | tuple):
        return [array for part in data for array in _arrays(part)]
    return [np.asarray(data)]
