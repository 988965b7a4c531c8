"""A processed prompt as HTML and as lines: tokens in cells or rows, each item's placeholder marked.

No scripts; all text from the prompt is escaped.
"""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

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


class Cell(NamedTuple):
    """A run of equal tokens of one item, or of text."""

    text: str
    token_id: int
    start: int
    num_tokens: int
    item: int | None
    """Index in the list of items; None for text."""
    is_embed: bool


def draw_explanation(explanation: Any) -> str:
    """Return the HTML of an `Explanation`."""
    legend = _LEGEND if explanation.items else ""
    rows = [_title("Prompt", len(explanation.prompt_token_ids)) + legend]
    is_encoder = explanation.encoder_prompt_token_ids is not None
    if is_encoder:
        rows = [_title("Encoder prompt", len(explanation.encoder_prompt_token_ids)) + legend]
        cells = to_cells(
            explanation.encoder_prompt_token_ids, explanation.encoder_tokens, explanation.items
        )
        rows.append(_draw_cells(cells))
        rows.append(_title("Decoder prompt", len(explanation.prompt_token_ids)))
    items = () if is_encoder else explanation.items
    rows.append(_draw_cells(to_cells(explanation.prompt_token_ids, explanation.tokens, items)))
    if explanation.items:
        rows.append(_draw_items(explanation.items))
    body = "".join(rows)
    return f'<div style="font:13px/1.7 ui-monospace,monospace;color:#18181b">{body}</div>'


def to_cells(token_ids: Sequence[int], tokens: Sequence[str], items: Sequence[Any]) -> list[Cell]:
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


def _title(name: str, count: int) -> str:
    return f"<div><b>{name}</b>, {count} tokens</div>"


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


def _draw_items(items: Sequence[Any]) -> str:
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


def _row(item: Any) -> Iterator[str]:
    yield f"{item.modality} {item.index}"
    yield f"{item.offset} to {item.offset + item.length - 1}"
    yield f"{item.num_embeds} of {item.length}"
    yield item.mm_hash[:16]
    yield item.cache
    if item.tensors is None:
        yield "held by the engine"
    else:
        yield "\n".join(
            f"{key} {' '.join(str(tuple(shape)) for shape in tensor.shapes)} {tensor.dtype}"
            for key, tensor in item.tensors.items()
        )


# ---- as lines -----------------------------------------------------------------------------------


def write_explanation(explanation: Any) -> str:
    """Return the text of an `Explanation`."""
    return "\n".join(_lines(explanation))


def _lines(explanation: Any) -> Iterator[str]:
    items = explanation.items
    if explanation.encoder_prompt_token_ids is not None:
        yield f"encoder prompt, {len(explanation.encoder_prompt_token_ids)} tokens"
        ids, tokens = explanation.encoder_prompt_token_ids, explanation.encoder_tokens
        yield from _token_lines(to_cells(ids, tokens, items), items)
        items = ()
    yield f"prompt, {len(explanation.prompt_token_ids)} tokens"
    cells = to_cells(explanation.prompt_token_ids, explanation.tokens, items)
    yield from _token_lines(cells, items)
    yield from map(_item_line, explanation.items)


def _token_lines(cells: Sequence[Cell], items: Sequence[Any]) -> Iterator[str]:
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


def _item_line(item: Any) -> str:
    tensors = item.tensors or {}
    shapes = ", ".join(
        f"{name} {' '.join(str(tuple(shape)) for shape in tensor.shapes)} {tensor.dtype}"
        for name, tensor in tensors.items()
    )
    return (
        f"{item.modality} {item.index}: places {item.offset}..{item.offset + item.length - 1}, "
        f"{item.num_embeds} embeddings, hash {item.mm_hash[:16]}, {shapes or 'no tensors here'}"
    )
