"""Describe a processed prompt: text, token ids, placeholders, hashes, tensors. No inference.

Reads the caches without changing them. Knows nothing of HTTP or of the engine.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from mmjax.cache import BaseMultiModalProcessorCache
from mmjax.errors import RequestError
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

_COLORS = ("#bfdbfe", "#fde68a", "#bbf7d0", "#fbcfe8", "#ddd6fe", "#fed7aa", "#a5f3fc", "#e9d5ff")
"""Pale enough for black text; reused by further items."""
_MAX_CELLS = 2000
"""Further cells are counted, not drawn."""
_CELL = (
    "display:inline-block;padding:1px 4px;margin:1px;border-radius:3px;white-space:pre;"
    "border:1px solid #d4d4d8;color:#18181b;background:{color}"
)
_TABLE = "font:inherit;border-collapse:separate;border-spacing:0 2px"
_FIELD = "text-align:left;vertical-align:top;white-space:pre;padding:2px 8px"
_LEGEND = "<div>underlined: an embedding of the item in that colour stands there</div>"
_EMBED_MARK = "border-bottom:3px solid #2563eb;"


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
    """An encoder-decoder model's, whose items are in this prompt; None for other models."""
    encoder_tokens: list[str] | None
    items: list[ItemExplanation]
    """In the prompt's order."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return msgspec.to_builtins(self)

    def to_text(self) -> str:
        """Return lines for a terminal: the tokens, then a row for each item."""
        return "\n".join(_lines(self))

    def without_cache_states(self) -> "Explanation":
        """Return the explanation with every `cache` "hidden"."""
        items = [msgspec.structs.replace(item, cache="hidden") for item in self.items]
        return msgspec.structs.replace(self, items=items)

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: tokens as cells, placeholders in their items' colours."""
        return _draw(self)


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

    encoder_ids = prepared.encoder_prompt_token_ids
    tokenizer = processor.info.get_tokenizer()
    texts: dict[int, str] = {}

    def decode(token_ids: Sequence[int]) -> list[str]:
        for token_id in set(token_ids) - texts.keys():
            texts[token_id] = _decode_token(tokenizer, token_id)
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


def _decode_token(tokenizer: Any, token_id: int) -> str:
    """Return a token's text with its leading space, which decoding it alone would strip."""
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if isinstance(piece, str) and "\u2581" in piece:  # sentencepiece's space
        return piece.replace("\u2581", " ")
    return tokenizer.decode([token_id])


def _explain_item(
    prepared: PreparedInputs, item: RequestItem, cache: CacheState
) -> ItemExplanation:
    is_embed = prepared.mm_placeholders[item.modality][item.index].is_embed
    processed = prepared.fresh.get(item.mm_hash)
    return ItemExplanation(
        **{name: getattr(item, name) for name in PlacedItem.__struct_fields__},
        is_embed=None if is_embed is None else is_embed.tolist(),
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


# ---- as HTML: tokens in cells, each item's placeholder in its own colour ------------------------


class Cell(NamedTuple):
    """A run of equal tokens of one item, or of text."""

    text: str
    token_id: int
    start: int
    num_tokens: int
    item: int | None
    """Index in the list of items; None for text."""
    is_embed: bool


def _draw(explanation: Explanation) -> str:
    legend = _LEGEND if explanation.items else ""
    rows: list[str] = []
    has_encoder = explanation.encoder_prompt_token_ids is not None
    for is_encoder, num_tokens, cells in _prompts(explanation):
        name = "Encoder prompt" if is_encoder else "Decoder prompt" if has_encoder else "Prompt"
        rows += [f"<div><b>{name}</b>, {num_tokens} tokens</div>{legend}", _draw_cells(cells)]
        legend = ""
    if explanation.items:
        rows.append(_draw_items(explanation.items))
    body = "".join(rows)
    return f'<div style="font:13px/1.7 ui-monospace,monospace;color:#18181b">{body}</div>'


def _prompts(explanation: Explanation) -> Iterator[tuple[bool, int, list[Cell]]]:
    """Yield whether a prompt is an encoder's, which then has the items, its length and cells."""
    ids, items = explanation.encoder_prompt_token_ids, explanation.items
    if ids is not None:
        yield True, len(ids), to_cells(ids, explanation.encoder_tokens or (), items)
        items = []
    ids = explanation.prompt_token_ids
    yield False, len(ids), to_cells(ids, explanation.tokens, items)


def to_cells(
    token_ids: Sequence[int], tokens: Sequence[str], items: Sequence[ItemExplanation]
) -> list[Cell]:
    """Return the prompt as cells, runs of equal tokens joined."""
    owner: list[int | None] = [None] * len(token_ids)
    is_embed = [False] * len(token_ids)
    for number, item in enumerate(items):
        for place in range(item.length):
            owner[item.offset + place] = number
            is_embed[item.offset + place] = item.is_embed is None or item.is_embed[place]
    cells: list[Cell] = []
    for place, (token_id, text) in enumerate(zip(token_ids, tokens, strict=True)):
        last = cells[-1] if cells else None
        key = (token_id, owner[place], is_embed[place])
        if last and owner[place] is not None and key == (last.token_id, last.item, last.is_embed):
            cells[-1] = last._replace(num_tokens=last.num_tokens + 1)
        else:
            cells.append(Cell(text, token_id, place, 1, owner[place], is_embed[place]))
    return cells


def _draw_cells(cells: Sequence[Cell]) -> str:
    shown = "".join(_draw_cell(cell) for cell in cells[:_MAX_CELLS])
    more = f" and {len(cells) - _MAX_CELLS} more cells" if len(cells) > _MAX_CELLS else ""
    return f'<div style="margin:2px 0 8px">{shown}{more}</div>'


def _draw_cell(cell: Cell) -> str:
    style = _CELL.format(color=_color(cell.item)) + ";" + (_EMBED_MARK if cell.is_embed else "")
    text = escape(cell.text.replace("\n", "\u23ce") or "\u2205")
    times = f" &times;{cell.num_tokens}" if cell.num_tokens > 1 else ""
    last = cell.start + cell.num_tokens - 1
    places = f"{cell.start}" if cell.num_tokens == 1 else f"{cell.start} to {last}"
    return f'<span style="{style}" title="token {cell.token_id} at {places}">{text}{times}</span>'


def _color(item: int | None) -> str:
    return "#ffffff" if item is None else _COLORS[item % len(_COLORS)]


def _draw_items(items: Sequence[ItemExplanation]) -> str:
    head = "".join(
        f'<th style="{_FIELD}">{name}</th>'
        for name in ("item", "places", "embeddings", "hash", "cache", "tensors")
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="{_FIELD};background:{_color(number)};color:#18181b">{escape(value)}</td>'
            for value in _row(item)
        )
        + "</tr>"
        for number, item in enumerate(items)
    )
    return f'<table style="{_TABLE}">{head}{body}</table>'


def _row(item: ItemExplanation) -> Iterator[str]:
    yield f"{item.modality} {item.index}"
    yield f"{item.offset} to {item.offset + item.length - 1}"
    yield f"{item.num_embeds} of {item.length}"
    yield item.mm_hash[:16]
    yield item.cache
    yield "held by the engine" if item.tensors is None else "\n".join(_tell_tensors(item.tensors))


def _tell_tensors(tensors: Mapping[str, TensorExplanation]) -> Iterator[str]:
    for name, tensor in tensors.items():
        shapes = " ".join(str(tuple(shape)) for shape in tensor.shapes)
        yield f"{name} {shapes} {tensor.dtype}"


# ---- as lines: one for each token or run of equal tokens, one for each item ---------------------


def _lines(explanation: Explanation) -> Iterator[str]:
    for is_encoder, num_tokens, cells in _prompts(explanation):
        yield f"{'encoder ' if is_encoder else ''}prompt, {num_tokens} tokens"
        yield from _token_lines(cells, explanation.items)
    yield from map(_item_line, explanation.items)


def _token_lines(cells: Sequence[Cell], items: Sequence[ItemExplanation]) -> Iterator[str]:
    """Yield rows of place, token id and text, as `    5..20      7  '<image>' x16  image 0`."""
    for cell in cells:
        last = cell.start + cell.num_tokens - 1
        place = str(cell.start) if cell.num_tokens == 1 else f"{cell.start}..{last}"
        times = f" x{cell.num_tokens}" if cell.num_tokens > 1 else ""
        owner = ""
        if cell.item is not None:
            item = items[cell.item]
            kind = "embeddings" if cell.is_embed else "no embedding"
            owner = f"  {item.modality} {item.index}, {kind}"
        yield f"{place:>12} {cell.token_id:>8}  {cell.text!r}{times}{owner}"


def _item_line(item: ItemExplanation) -> str:
    shapes = ", ".join(_tell_tensors(item.tensors or {}))
    return (
        f"{item.modality} {item.index}: places {item.offset}..{item.offset + item.length - 1}, "
        f"{item.num_embeds} embeddings, hash {item.mm_hash[:16]}, {shapes or 'no tensors here'}"
    )
