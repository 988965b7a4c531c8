"""The header: model and adapters, the context, pictures that are left; the server's figures."""

import re
from dataclasses import replace

import pytest
from playwright.sync_api import expect

from mmjax.config.engine_config import LoRAConfig
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.transport.messages import Heartbeat
from tests.server.page.conftest import PHONE, MakePlayground, Playground, answers

MAX_TOKENS = 256


@pytest.fixture
def few_pictures(server_input_processor: InputProcessor) -> InputProcessor:
    """Takes two pictures."""
    config = server_input_processor.model_config
    mm = replace(config.mm, limit_mm_per_prompt={"image": 2})
    return InputProcessor(replace(config, mm=mm))


def test_an_adapter_is_chosen_and_kept(make_playground: MakePlayground) -> None:
    lora = LoRAConfig(enable_lora=True, lora_modules=("boxed=/boxed",))
    playground = make_playground(lora=lora)
    page = playground.page
    menu = page.get_by_role("combobox", name="Model")
    expect(menu.locator("optgroup")).to_have_count(2)
    expect(menu).to_have_value("tiny")
    playground.ask("a star")
    menu.select_option("boxed")
    playground.ask("a ring")
    playground.open()
    expect(menu).to_have_value("boxed")
    playground.ask("a circle")
    assert [one.lora_name for one in playground.requests] == [None, "boxed", "boxed"]


def test_a_server_of_one_model_offers_no_choice(playground: Playground) -> None:
    expect(playground.page.get_by_role("combobox", name="Model")).to_be_disabled()
    expect(playground.page.get_by_role("combobox", name="Model")).to_have_value("tiny")


def test_the_context_in_use_is_shown(playground: Playground) -> None:
    page = playground.page
    meter = page.get_by_role("meter", name="Context in use")
    expect(meter).to_be_hidden()
    playground.ask("a star")
    (request,) = playground.requests
    used = 2 * len(request.prompt_token_ids) + 1  # the prompt, its echo, the end
    expect(page.locator("#context-text")).to_have_text(f"{used} of {MAX_TOKENS} tokens")
    expect(meter).to_have_attribute("aria-valuenow", str(round(100 * used / MAX_TOKENS)))
    page.get_by_role("button", name="New conversation").click()
    expect(meter).to_be_hidden()


def test_pictures_that_are_left_are_counted(
    make_playground: MakePlayground, few_pictures: InputProcessor
) -> None:
    playground = make_playground(processor=few_pictures)
    left = playground.page.locator("#pictures-left")
    expect(left).to_have_text("2 pictures left")
    playground.add("red")
    expect(left).to_have_text("1 picture left")
    playground.ask("a star")
    expect(left).to_have_text("1 picture left")
    playground.add("green", "blue")
    expect(left).to_have_text("1 picture too many")
    playground.page.get_by_role("button", name="Remove blue.png").click()
    expect(left).to_have_text("0 pictures left")


def test_too_many_pictures_may_leave_out_the_oldest(
    make_playground: MakePlayground, few_pictures: InputProcessor
) -> None:
    playground = make_playground(processor=few_pictures)
    page = playground.page
    for color in ("red", "green", "blue"):
        playground.add(color)
        playground.ask(color)
    expect(page.get_by_role("alert")).to_contain_text("3 pictures to send, and this model takes 2")
    assert len(playground.requests) == 2, "what cannot be answered is not sent"
    page.get_by_role("button", name="Leave out the oldest").press("Enter")
    expect(page.get_by_role("alert")).to_have_count(0)
    playground.wait_for_answers(3)
    assert len(playground.requests[-1].mm_features) == 2
    divider = page.locator("#messages > li.divider")
    expect(divider).to_have_text("What stands above is no longer sent")
    expect(page.locator("#pictures-left")).to_have_text("0 pictures left")
    expect(page.locator("#messages > li").nth(2)).to_have_class("divider")
    # From now on by itself.
    playground.add("pink")
    playground.ask("pink")
    expect(page.get_by_role("alert")).to_have_count(0)
    assert len(playground.requests[-1].mm_features) == 2
    expect(page.locator("#messages > li").nth(4)).to_have_class("divider")


def test_too_many_pictures_may_go_on_in_a_new_conversation(
    make_playground: MakePlayground, few_pictures: InputProcessor
) -> None:
    playground = make_playground(processor=few_pictures, size=PHONE)
    page = playground.page
    playground.add("red", "green", "blue")
    playground.ask("which")
    expect(page.get_by_role("button", name="Leave out the oldest")).to_have_count(0)
    page.get_by_role("button", name="Ask in a new conversation, with the last picture").click()
    expect(page.get_by_role("button", name="Show blue.png")).to_be_visible()
    playground.wait_for_answers(1)
    expect(page.get_by_role("alert")).to_have_count(0)
    (request,) = playground.requests
    assert len(request.mm_features) == 1
    page.get_by_role("button", name="Show the list").click()
    expect(page.locator("#conversations li")).to_have_count(2)
    page.locator("#conversations li button").nth(3).click()
    expect(page.locator(".thumbnail img")).to_have_count(3)


def test_a_full_context_goes_on_without_the_oldest(playground: Playground) -> None:
    page = playground.page
    for _ in range(2):
        playground.ask("a star " * 12)
    playground.ask("a ring " * 36)
    expect(page.get_by_role("alert")).to_contain_text("context_length_exceeded")
    count = page.locator(".assistant").count()
    page.get_by_role("button", name="Leave out the oldest").click()
    expect(page.get_by_role("alert")).to_have_count(0)
    playground.wait_for_answers(count)
    expect(answers(page).last).to_contain_text("a ring")
    expect(page.locator("#messages > li.divider")).to_have_count(1)


def test_the_servers_figures_are_shown(playground: Playground) -> None:
    page = playground.page
    playground.supervisor.say_programs_left(2)
    playground.ask("a star")
    page.get_by_role("status").get_by_role("button").press("Enter")
    panel = page.get_by_role("dialog", name="The server")
    row = panel.locator("dl > div")
    expect(row.filter(has_text="Answers so far")).to_contain_text("1")
    expect(row.filter(has_text="KV cache in use")).to_contain_text("0 %")
    expect(row.filter(has_text="Pictures whose embeddings were found")).to_contain_text("none yet")
    running = row.filter(has_text="Requests that run").locator("dd").first
    expect(running).to_have_text("0")
    playground.supervisor.say_running(3)
    expect(running).to_have_text("3")  # at the next look
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    expect(page.get_by_role("status").get_by_role("button")).to_be_focused()


def test_where_pictures_were_found_is_shown(playground: Playground) -> None:
    """Of what the server was started with: the echo has none of it but what its heartbeat says."""
    page = playground.page
    page.get_by_role("status").get_by_role("button").click()
    panel = page.get_by_role("dialog", name="The server")
    expect(panel.get_by_text("On the device")).to_have_count(2)
    expect(panel.get_by_text("On disk")).to_have_count(0)
    expect(panel.get_by_text("worker")).to_have_count(0)
    playground.supervisor.heartbeat = Heartbeat(
        num_running=0,
        num_waiting=0,
        kv_cache_usage=0.0,
        num_compilations=0,
        encoder_cache_hits=7,
        encoder_disk_queries=9,
        encoder_disk_hits=3,
        encoder_disk_read_bytes=3 << 20,
        encoder_workers_items=5,
        encoder_workers_bytes=2 << 30,
        encoder_workers_alive=2,
        encoder_workers_retries=4,
        encoder_workers_fallbacks=6,
        kv_offload_queries=90,
        kv_offload_hits=64,
        kv_offload_restored_bytes=1 << 20,
        kv_files_hits=8,
        kv_files_read_bytes=5 << 19,
        prefix_cache_hits=1234,
    )
    expect(panel.get_by_text("From encode workers")).to_have_count(1)  # at the next look
    sections = [text.split("\n") for text in panel.locator("section").all_inner_texts()[2:5]]
    # The server is that of other tests, too, which may have sent pictures.
    sections[1][2] = re.sub(r"^\d+ items$", "0 items", sections[1][2])
    assert sections == [
        [
            "Pictures' embeddings, by where they were",
            *(
                "On the device",
                "7 items",
                "On disk",
                "3 items, 3.00 MiB",
                "From encode workers",
                "5 items, 2.00 GiB",
            ),
            *("Encode workers", "2", "Asked of a worker once more", "4"),
            *("Encoded here, for want of a worker", "6"),
        ],
        ["Pictures' pixels, by where they were", "In memory", "0 items"],
        [
            "The KV cache, by where it was",
            *("On the device", "1,234 tokens", "In host memory", "64 tokens, 1.00 MiB"),
            *("On disk", "8 blocks, 2.50 MiB"),
        ],
    ]


def test_figures_that_are_not_told_are_named_so(playground: Playground) -> None:
    page = playground.page
    page.route(
        "**/metrics",
        lambda route: route.fulfill(
            body="# HELP a b\nmmjax:programs 4\nmmjax:programs_left 1\n"
            'a:b{c="d e"} 1\na:b{c="f"} 2\n'
        ),
    )
    page.get_by_role("status").get_by_role("button").click()
    row = page.get_by_role("dialog", name="The server").locator("dl > div")
    expect(row.filter(has_text="KV cache in use")).to_contain_text("not told")
    expect(row.filter(has_text="Compiled")).to_contain_text("3 of 4")
    read = """async (text) => (await import("/page/server/panel.js")).readMetrics(text)"""
    assert page.evaluate(read, 'a:b{c="d"} 1\na:b 2') == {"a:b": 3}
