"""What axe finds on the page, in light and dark, wide and narrow: nothing serious."""

import json
from typing import Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page, expect

from tests.server.page.conftest import PHONE, WIDE, MakePlayground

GRAVE = {"serious", "critical"}


def find_faults(page: Page) -> list[str]:
    """Return axe's serious and critical findings."""
    page.evaluate(AXE_SCRIPT)
    results: dict[str, Any] = page.evaluate("axe.run()")
    assert len(results["passes"]) > 10, "axe has looked at nothing"
    return [
        json.dumps([one["id"], [node["html"] for node in one["nodes"]]])
        for one in results["violations"]
        if one["impact"] in GRAVE
    ]


@pytest.mark.parametrize(
    ("scheme", "size"),
    [
        ("dark", PHONE),
        ("light", WIDE),
        # Slow: each looks ten times; the two above see every colour, and both layouts.
        pytest.param("light", PHONE, marks=pytest.mark.slow),
        pytest.param("dark", WIDE, marks=pytest.mark.slow),
    ],
)
def test_axe_finds_no_serious_fault(
    make_playground: MakePlayground, scheme: str, size: tuple[int, int]
) -> None:
    playground = make_playground(scheme=scheme, size=size)
    page = playground.page
    page.emulate_media(
        reduced_motion="reduce", color_scheme="dark" if scheme == "dark" else "light"
    )
    assert find_faults(page) == []
    playground.add("red", "blue")
    assert find_faults(page) == []
    playground.ask("`a` **b** (100,200),(300,400)")
    playground.open_strip()
    playground.ask("<end_of_turn>")
    assert find_faults(page) == []
    page.get_by_role("button", name="Answer again").first.click()
    playground.wait_for_answers(1)
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("button", name="Edit the question").last.click()
    assert find_faults(page) == []
    for name in ("Settings", "Ready"):
        page.get_by_role("button", name=name).click()
        expect(page.locator("dialog[open]")).to_be_visible()
        assert find_faults(page) == []
        page.keyboard.press("Escape")
    if size == PHONE:
        page.get_by_role("button", name="Show the list of conversations").click()
        assert find_faults(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_where_a_key_is_asked_for(
    make_playground: MakePlayground, scheme: str
) -> None:
    page = make_playground(scheme=scheme, size=PHONE, api_keys=("secret",)).page
    expect(page.locator("#status[data-state=key]")).to_be_visible()
    page.get_by_role("textbox", name="Message").fill("a star")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-error")).to_be_visible()
    assert find_faults(page) == []


def test_axe_would_find_a_fault(make_playground: MakePlayground) -> None:
    page = make_playground().page
    page.evaluate("document.getElementById('send').removeAttribute('aria-label')")
    assert any("button-name" in fault for fault in find_faults(page))


def test_who_wants_less_motion_gets_none(make_playground: MakePlayground) -> None:
    playground = make_playground(is_started_ready=False)
    page = playground.page
    moves = "getComputedStyle(document.getElementById('status-dot')).animationName"
    expect(page.locator("#status[data-state=busy]")).to_be_visible()
    assert page.evaluate(moves) == "pulse"
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(moves) == "none"
