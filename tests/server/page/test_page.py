"""The page as a person uses it: pictures, questions, answers, conversations."""

import re

import pytest
from playwright.sync_api import expect

from mmjax.frontend.prompt.input_processor import InputProcessor
from tests.server.page.conftest import (
    PHONE,
    WAIT_S,
    MakePlayground,
    Playground,
    answers,
    make_png,
)


def test_a_dropped_picture_is_asked_about(playground: Playground) -> None:
    page = playground.page
    playground.add("red")
    playground.ask("what color is the circle")
    expect(page.locator("#drafts img")).to_have_count(0)
    expect(page.get_by_role("button", name="Show red.png")).to_be_visible()
    expect(answers(page)).to_contain_text("what color is the circle")
    expect(page.locator(".summary")).to_contain_text("tokens/s")
    expect(page.get_by_role("heading", level=1)).to_have_text("what color is the circle")
    (request,) = playground.requests
    assert len(request.mm_features) == 1


def test_the_strip_shows_tokens_caches_and_times(playground: Playground) -> None:
    page = playground.page
    playground.add("red")
    playground.ask("a star")
    playground.open_strip()
    cost = page.locator("details.cost")
    rows = cost.locator(".stages th")
    assert rows.all_inner_texts()[:8] == [
        *("fetch", "tokenize", "decode", "process", "queue", "encode", "prefill", "generate")
    ]
    expect(cost.locator(".stages")).to_contain_text("ms in all")
    (request,) = playground.requests
    (feature,) = request.mm_features
    length = feature.mm_position.length
    expect(cost.locator(".picture-cell")).to_contain_text(f"image 1: {length} tokens")
    expect(cost.locator(".picture-cell")).to_contain_text("pixels: computed")
    expect(cost.locator(".picture-cell img")).to_have_count(1)
    expect(cost.locator(".strip .token.cached")).to_have_count(3)
    num_tokens = len(request.prompt_token_ids)
    expect(cost.locator(".strip > .token")).to_have_count(num_tokens - length)
    expect(cost.locator(".legend")).to_contain_text("prefix cache: 3")


def test_several_pictures_by_paste_and_picker(playground: Playground) -> None:
    page = playground.page
    playground.paste("red", "blue")
    expect(page.locator("#drafts img")).to_have_count(2)
    playground.pick("green.png", "image/png", make_png("green"))
    expect(page.locator("#drafts img")).to_have_count(3)
    page.get_by_role("button", name="Remove blue.png").click()
    expect(page.locator("#drafts img")).to_have_count(2)
    playground.ask("which")
    (request,) = playground.requests
    assert len(request.mm_features) == 2


def test_a_file_that_is_no_picture_is_refused(playground: Playground) -> None:
    playground.pick("notes.png", "image/png", b"no picture")
    hint = playground.page.locator("#hint")
    expect(hint).to_contain_text("notes.png is no picture")
    expect(playground.page.locator("#drafts img")).to_have_count(0)
    playground.add("red")
    expect(hint).to_have_text("Enter sends, Shift and Enter begins a line")


def test_an_answer_streams_and_is_stopped(playground: Playground) -> None:
    page = playground.page
    playground.engine.num_steps_left = 4
    playground.send("a red circle and a blue star")
    expect(answers(page)).to_have_text("use")
    expect(page.locator(".assistant .actions")).to_have_count(0)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".note")).to_have_text("Stopped.")
    assert playground.engine.has_aborted.wait(WAIT_S)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    playground.engine.num_steps_left = None
    playground.ask("and a ring")
    assert len(playground.requests) == 2


def test_a_reload_keeps_conversations(playground: Playground) -> None:
    page = playground.page
    playground.add("red")
    playground.ask("a star")
    page.get_by_role("button", name="New conversation").click()
    playground.ask("a ring")
    rows = page.locator("#conversations li")
    expect(rows).to_have_count(2)
    playground.open()
    expect(answers(page)).to_contain_text("a ring")
    page.get_by_role("button", name="a star", exact=True).click()
    expect(answers(page)).to_contain_text("a star")
    thumbnail = page.locator(".thumbnail img")
    expect(thumbnail).to_have_js_property("naturalWidth", 320)
    playground.ask("again")  # the picture is sent once more
    assert len(playground.requests[-1].mm_features) == 1

    page.get_by_role("button", name="Rename \u201ca star\u201d").click()
    page.get_by_role("textbox", name="Title").fill("stars")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("stars")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete \u201ca ring\u201d").click()
    expect(rows).to_have_count(1)
    playground.open()
    expect(rows).to_have_text(["stars"])


def test_dark_follows_the_system_and_a_switch(make_playground: MakePlayground) -> None:
    playground = make_playground(scheme="dark")
    page = playground.page

    def is_dark() -> bool:
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", color))) < 384

    switch = page.get_by_role("button", name="Dark colours")
    assert is_dark()
    expect(switch).to_have_attribute("aria-pressed", "true")
    switch.click()
    assert not is_dark()
    playground.open()
    assert not is_dark()
    expect(switch).to_have_attribute("aria-pressed", "false")


def test_a_phone(make_playground: MakePlayground) -> None:
    playground = make_playground(size=PHONE)
    page = playground.page
    playground.add("red")
    playground.ask("a very long question about a red circle and a blue star")
    playground.open_strip()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    widths = page.evaluate(
        "[...document.querySelectorAll('#thread, #bar, #composer, .cost')]"
        ".map((node) => node.getBoundingClientRect().right)"
    )
    assert max(widths) <= PHONE[0]
    expect(page.locator("#sidebar")).to_be_hidden()
    page.get_by_role("button", name="Show the list of conversations").press("Enter")
    expect(page.locator("#sidebar")).to_be_visible()
    expect(page.get_by_role("button", name="Close the list of conversations")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#sidebar")).to_be_hidden()
    expect(page.get_by_role("button", name="Show the list of conversations")).to_be_focused()


def test_the_keyboard_alone(playground: Playground) -> None:
    page = playground.page
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the message box")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    page.keyboard.type("a star")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and a ring")
    page.keyboard.press("Enter")
    playground.wait_for_answers(1)
    expect(page.locator(".bubble")).to_have_text("a star\nand a ring")
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    seen = []
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        seen.append(
            page.evaluate("document.activeElement.ariaLabel || document.activeElement.innerText")
        )
        if seen[-1] == "Settings":
            break
    for name in (
        "Tokens, caches and times",
        "Answer again",
        "Copy the answer",
        "Edit the question",
    ):
        assert name in seen, seen
    assert seen[-1] == "Settings"
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Settings")).to_be_hidden()
    expect(page.get_by_role("button", name="Settings")).to_be_focused()


def test_an_error_says_what_the_server_said(playground: Playground) -> None:
    page = playground.page
    playground.ask("a star " * 300)
    error = page.get_by_role("alert")
    expect(error).to_contain_text("tokens")
    expect(error).to_contain_text("400")
    expect(error).to_contain_text("messages")
    playground.ask("a star")
    expect(answers(page).last).to_contain_text("a star")
    assert (
        playground.requests[-1].prompt_token_ids.count(playground.requests[-1].prompt_token_ids[0])
        == 1
    ), "what failed is not sent again"


def test_a_server_that_is_gone_is_told(playground: Playground) -> None:
    page = playground.page
    page.route("**/v1/chat/completions", lambda route: route.abort())
    playground.ask("a star")
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Answer again").click()
    expect(answers(page)).to_contain_text("a star")


def test_an_api_key_is_asked_for_once_and_kept(make_playground: MakePlayground) -> None:
    """And what was asked without it is asked again by itself."""
    playground = make_playground(api_keys=("secret",))
    page = playground.page
    status = page.get_by_role("status")
    expect(status).to_have_text("Needs an API key")
    playground.send("a star")
    dialog = page.get_by_role("dialog", name="This server needs an API key")
    expect(dialog.get_by_label("Key")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("does not take the key")
    expect(status).to_have_text("Needs an API key")
    page.keyboard.type("secret")
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("a star")
    playground.wait_for_answers(1)
    expect(page.locator(".error")).to_have_count(0)
    expect(status).to_have_text("Ready")
    playground.open()
    playground.ask("a ring")
    expect(answers(page).last).to_contain_text("a ring")
    expect(dialog).to_be_hidden()


def test_who_gives_no_key_is_asked_again_on_demand_alone(make_playground: MakePlayground) -> None:
    playground = make_playground(api_keys=("secret",))
    page = playground.page
    playground.send("a star")
    dialog = page.get_by_role("dialog", name="This server needs an API key")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("alert")).to_contain_text("the API key is missing or wrong")
    page.get_by_role("button", name="Needs an API key").click()
    dialog.get_by_label("Key").fill("secret")
    page.get_by_role("button", name="Use this key").click()
    expect(page.get_by_role("status")).to_have_text("Ready")
    page.get_by_role("button", name="Answer again").click()
    expect(answers(page)).to_contain_text("a star")


def test_settings_reach_the_engine(playground: Playground) -> None:
    page = playground.page
    page.get_by_role("button", name="Settings").click()
    values = {"Temperature": "0.5", "top_p": "0.9", "top_k": "7", "max_tokens": "5", "seed": "11"}
    for label, value in values.items():
        page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Done").click()
    playground.open()
    playground.ask("a star and a ring")
    params = playground.requests[-1].sampling_params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert (params.max_tokens, params.seed) == (5, 11)
    expect(page.locator(".note")).to_have_text("The answer reached its limit of tokens.")


def test_the_start_is_shown(make_playground: MakePlayground) -> None:
    playground = make_playground(is_started_ready=False)
    status = playground.page.get_by_role("status")
    expect(status).to_have_text("Starting: the model is loaded and compiled")
    playground.supervisor.say_programs_left(3)
    playground.supervisor.call(playground.supervisor.become_ready)
    expect(status).to_have_text("Ready, 3 left to compile")
    playground.supervisor.say_programs_left(0)
    expect(status).to_have_text("Ready")


def test_the_tasks_of_a_model_are_offered(
    server_input_processor: InputProcessor,
    make_playground: MakePlayground,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = {"Objects": "<OD>", "Find a phrase": "find {a green car} here"}
    monkeypatch.setattr(server_input_processor.info, "tasks", tasks)
    playground = make_playground(size=PHONE)
    page = playground.page
    offered = page.get_by_role("group", name="What this model was trained to do")
    expect(offered.get_by_role("button")).to_have_text(list(tasks))
    offered.get_by_role("button", name="Find a phrase").click()
    page.keyboard.type("a star")
    expect(page.get_by_role("textbox", name="Message")).to_have_value("find a star here")
    offered.get_by_role("button", name="Objects").click()
    page.keyboard.press("Enter")
    playground.wait_for_answers(1)
    expect(page.locator(".bubble")).to_have_text("<OD>")


def test_a_model_without_tasks_offers_none(playground: Playground) -> None:
    expect(playground.page.locator("#status-dot")).to_be_visible()
    expect(playground.page.locator("#tasks button")).to_have_count(0)
