"""The page over real servers, from the command to the answer."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.server.page.conftest import Playground
from tests.test_serve import FEW, SMALL, Served


def test_it_answers_about_a_drawn_picture(make_page: Callable[..., Page]) -> None:
    served = Served(*FEW, "--precompile", "none")
    try:
        url = served.wait_for(r"http://127\.0\.0\.1:\d+")[0]
        served.wait_for("ready")
        playground = Playground(make_page(), f"{url}/").open()
        page = playground.page
        page.get_by_role("button", name="Try it with a drawn picture").click()
        expect(page.locator("#drafts img")).to_have_count(1)
        page.keyboard.press("Enter")
        playground.wait_for_answers(1)
        expect(page.locator(".assistant .text")).to_have_text("red")
        playground.open_strip()
        cell = page.locator(".picture-cell")
        expect(cell).to_contain_text("embeddings: computed")
        expect(page.locator(".stages tr:not(.unused) th")).to_contain_text(
            ["fetch", "tokenize", "decode", "process", "queue", "encode", "prefill", "generate"]
        )
        page.get_by_role("button", name="Answer again").click()
        playground.wait_for_answers(1)
        playground.open_strip()
        expect(cell).to_contain_text("pixels: processor cache")
        expect(cell).not_to_contain_text("embeddings: computed")
        go_on_from_the_limit(playground)
    finally:
        served.end()


def go_on_from_the_limit(playground: Playground) -> None:
    """What goes on from an answer's last token is what the whole answer has there."""
    page = playground.page
    set_limit(page, "")
    playground.ask("Describe the picture.")
    text = page.locator(".assistant .text").last
    whole = text.inner_text()
    assert len(whole.split()) > 4, whole
    set_limit(page, "4")
    page.get_by_role("button", name="Answer again").last.click()
    expect(page.locator(".note")).to_have_text("The answer reached its limit of tokens.")
    begun = text.inner_text()
    assert whole.startswith(begun)
    set_limit(page, "")
    page.get_by_role("button", name="Go on with this answer").click()
    playground.wait_for_answers(2)
    expect(text).to_have_text(whole)


def set_limit(page: Page, num_tokens: str) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("max_tokens").fill(num_tokens)
    page.get_by_role("button", name="Done").click()


@pytest.mark.slow  # two starts of a server; the page's side of it is in test_nothing_is_lost.py
def test_an_answer_goes_on_after_its_server_was_killed(
    make_page: Callable[..., Page], tiny_gemma3: Path
) -> None:
    # Its answers are noise without an end: there is time to kill it.
    arguments = (str(tiny_gemma3), *SMALL, "--max-model-len", "2048")
    served = Served(*arguments)
    try:
        url = served.wait_for(r"http://127\.0\.0\.1:\d+")[0]
        served.wait_for("ready")
        playground = Playground(make_page(), f"{url}/").open()
        page = playground.page
        set_limit(page, "4")
        playground.ask("What is there?")  # compiles
        set_limit(page, "1500")
        playground.send("And what is not?")
        text = page.locator(".assistant .text").last
        expect(text).to_have_text(re.compile(r"\S"))
        expect(text.locator(".waiting")).to_have_count(0)
        served.end()
        expect(page.get_by_role("alert")).to_contain_text("The connection broke off")
        begun = text.inner_text()
        assert begun
        served = Served(*arguments, port=int(url.rpartition(":")[2]))
        served.wait_for(url)
        served.wait_for("ready")
        page.get_by_role("button", name="Go on with this answer").last.click()
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(page.get_by_text("The answer reached its limit of tokens.")).to_have_count(2)
        assert len(text.inner_text()) > len(begun)
        assert text.inner_text().startswith(begun)
    finally:
        served.end()
