"""The page over the model that comes with mmjax, from the command to the answer."""

from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.server.page.conftest import Playground
from tests.test_serve import FEW, Served


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
