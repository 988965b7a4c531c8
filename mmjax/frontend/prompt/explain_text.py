"""A processed prompt as lines: one for each token or run of equal tokens, one for each item."""

from collections.abc import Iterator, Sequence
from typing import Any

from mmjax.frontend.prompt.explain_html import Cell, to_cells


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
