"""What an explanation says of a processed prompt, and the picture that a notebook shows of it."""

from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mmjax.frontend.prompt.explain import (
    Cell,
    Explanation,
    ItemExplanation,
    explain_prompt,
    to_cells,
)
from tests.families import gemma3
from tests.kit import draw

PROMPT = "<start_of_image> what <b>is</b>\n<start_of_image> it"


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    processor = gemma3.make_processor()
    prepared = processor.prepare(PROMPT, {"image": [draw(40, 30), draw(60, 60, seed=2)]})
    first, _ = prepared.mm_hashes["image"]
    cache: Any = SimpleNamespace(is_cached_item=lambda mm_hash: mm_hash == first)
    return explain_prompt(processor, prepared, cache)


def test_everything_that_processing_decided_is_there(explanation: Explanation):
    inputs = gemma3.make_processor().apply(PROMPT, {"image": [draw(40, 30), draw(60, 60, seed=2)]})
    assert explanation.prompt == PROMPT
    assert explanation.prompt_token_ids == inputs.prompt_token_ids
    assert len(explanation.tokens) == len(inputs.prompt_token_ids)
    assert "".join(explanation.tokens[-3:]) == " it"
    for index, item in enumerate(explanation.items):
        place = inputs.mm_placeholders["image"][index]
        assert (item.modality, item.index) == ("image", index)
        assert (item.offset, item.length) == (place.offset, place.length)
        assert place.is_embed is not None
        assert item.is_embed == place.is_embed.tolist()
        assert item.num_embeds == place.is_embed.sum() == 4
        assert item.mm_hash == item.identifier == inputs.mm_hashes["image"][index]
        assert item.tensors is not None
        assert item.tensors["pixel_values"].shapes == [[1, 3, 56, 56]]
        assert item.tensors["pixel_values"].dtype == "uint8"
        assert item.tensors["num_patches"].field == "batched"
    assert [item.cache for item in explanation.items] == ["hit", "miss"]


def test_plain_data_is_ready_for_json(explanation: Explanation):
    data = explanation.to_dict()
    assert data["items"][0]["tensors"]["pixel_values"]["field"] == "flat"
    assert data["encoder_prompt_token_ids"] is None


class Texts(HTMLParser):
    """Collects text and tags, and fails on what is not well formed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_picture_shows_runs_and_escapes_what_users_wrote(explanation: Explanation):
    page = Texts(explanation._repr_html_())
    assert page.texts.count("<image_soft_token> ×4") == 2
    assert {"<", "b", ">"} <= set(page.texts)
    assert set(page.tags) <= {"div", "b", "span", "table", "tr", "th", "td"}
    assert page.tags.count("b") == 1  # the title's: the user's own `<b>` is text
    assert "1 to 8" in page.texts


def test_a_prompt_cannot_write_markup():
    evil = '"><script>alert(1)</script>'
    explanation = Explanation(
        prompt=evil,
        prompt_token_ids=[1],
        tokens=[evil],
        encoder_prompt_token_ids=None,
        encoder_tokens=None,
        items=[_item(0, 1, mm_hash=evil, modality=evil)],
    )
    page = Texts(explanation._repr_html_())
    assert "script" not in page.tags


def test_encoder_prompts_are_drawn_with_their_items():
    explanation = Explanation(
        prompt="x",
        prompt_token_ids=[2],
        tokens=["</s>"],
        encoder_prompt_token_ids=[9, 9, 5],
        encoder_tokens=["<image>", "<image>", "x"],
        items=[_item(0, 2)],
    )
    texts = Texts(explanation._repr_html_()).texts
    assert "<image> ×2" in texts
    assert "Encoder prompt" in texts
    assert "Decoder prompt" in texts


def test_cells_join_only_equal_tokens_of_one_item():
    items = [_item(1, 3, is_embed=[True, True, False]), _item(4, 1)]
    cells = to_cells([7, 9, 9, 9, 9, 7, 7], list("abbbbcc"), items)
    assert cells == [
        Cell("a", 7, 0, 1, None, False),
        Cell("b", 9, 1, 2, 0, True),
        Cell("b", 9, 3, 1, 0, False),
        Cell("b", 9, 4, 1, 1, True),
        Cell("c", 7, 5, 1, None, False),
        Cell("c", 7, 6, 1, None, False),
    ]


def test_long_prompts_are_cut_and_counted():
    number = 5000
    explanation = Explanation(
        prompt=None,
        prompt_token_ids=list(range(number)),
        tokens=["w"] * number,
        encoder_prompt_token_ids=None,
        encoder_tokens=None,
        items=[],
    )
    html = explanation._repr_html_()
    assert "3000 more cells" in html
    assert html.count("<span") == 2000


def _item(
    offset: int,
    length: int,
    *,
    is_embed: list[bool] | None = None,
    mm_hash: str = "abc",
    modality: str = "image",
) -> ItemExplanation:
    return ItemExplanation(
        modality=modality,
        index=0,
        offset=offset,
        length=length,
        num_embeds=int(np.sum(is_embed)) if is_embed else length,
        is_embed=is_embed,
        mm_hash=mm_hash,
        identifier=mm_hash,
        cache="off",
        tensors=None,
    )
