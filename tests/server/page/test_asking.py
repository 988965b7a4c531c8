"""What may be asked with, and how answers are shown: videos, settings, reasoning, two answers."""

import json
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from mmjax.config.engine_config import LoRAConfig
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from tests.families.directories import edit_golden
from tests.processing.test_video_file import write_video
from tests.server.page.conftest import PHONE, WIDE, MakePlayground, Playground, answers
from tests.server.page.test_accessibility import find_faults
from tests.server.page.test_answers import find_boxes, writing_boxes

FINGER_PIXELS = 44


# ---- videos -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def video_processor(tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    """Of a family that takes videos."""
    folder = edit_golden("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return InputProcessor(load_model_config(str(folder), max_model_len=2048))


def test_a_video_is_asked_about(
    make_playground: MakePlayground, video_processor: InputProcessor
) -> None:
    playground = make_playground(processor=video_processor)
    page = playground.page
    attach = page.get_by_role("button", name="Add pictures and videos")
    expect(attach).to_be_visible()
    playground.pick("bars.mp4", "video/mp4", write_video(4, kind="mp4"))
    expect(page.locator("#drafts video")).to_have_js_property("videoWidth", 64)
    playground.ask("what moves")
    (request,) = playground.requests
    assert [one.modality for one in request.mm_features] == ["video"]
    page.get_by_role("button", name="Show bars.mp4").click()
    large = page.get_by_role("dialog", name="Picture").locator("video")
    expect(large).to_have_js_property("controls", True)
    page.keyboard.press("Escape")
    expect(large).to_have_count(0)
    playground.open_strip()
    expect(page.locator(".picture-cell")).to_contain_text("video 1")


def test_a_video_is_refused_where_the_model_takes_none(playground: Playground) -> None:
    page = playground.page
    expect(page.locator("#pictures-left")).to_be_visible()
    playground.pick("bars.mp4", "video/mp4", write_video(2, kind="mp4"))
    expect(page.locator("#hint")).to_have_text(
        "bars.mp4 is a video, and this model takes pictures alone."
    )
    expect(page.locator("#drafts li")).to_have_count(0)


# ---- settings -----------------------------------------------------------------------------------


def test_every_setting_reaches_the_engine(playground: Playground) -> None:
    page = playground.page
    page.get_by_role("button", name="Settings").click()
    values = {
        "frequency_penalty": "0.5",
        "presence_penalty": "-0.25",
        "repetition_penalty": "1.5",
        "min_p": "0.125",
        "Texts that end it": "END\n\\n\\n",
        "JSON schema that it follows": '{"type": "object", "properties": {}}',
    }
    for label, value in values.items():
        page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Done").click()
    playground.open()
    page.get_by_role("textbox", name="Message").fill("a star")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    playground.wait_for_answers(1)
    params = playground.requests[-1].sampling_params
    assert (params.frequency_penalty, params.presence_penalty) == (0.5, -0.25)
    assert (params.repetition_penalty, params.min_p) == (1.5, 0.125)
    assert params.structured_outputs is not None
    body = json.loads(sent.value.post_data or "")
    assert body["stop"] == ["END", "\n\n"]
    assert body["response_format"]["json_schema"]["schema"]["type"] == "object"
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Reset all but the prompt").click()
    page.keyboard.press("Escape")
    playground.ask("a star")
    params = playground.requests[-1].sampling_params
    assert (params.frequency_penalty, params.structured_outputs) == (0.0, None)


@pytest.mark.parametrize(("schema", "reason"), [("{", "is no JSON"), ("[]", "is no object")])
def test_a_schema_that_is_wrong_is_told_and_not_sent(
    playground: Playground, schema: str, reason: str
) -> None:
    page = playground.page
    page.get_by_role("button", name="Settings").click()
    field = page.get_by_label("JSON schema that it follows")
    field.fill(schema)
    field.blur()
    expect(page.locator("#schema-error")).to_contain_text(reason)
    page.get_by_role("button", name="Done").click()
    playground.send("a star")
    expect(page.locator("#hint")).to_contain_text(reason)
    expect(page.get_by_role("textbox", name="Message")).to_have_value("a star")
    assert not playground.requests
    page.get_by_role("button", name="Settings").click()
    field.fill("")
    field.blur()
    expect(page.locator("#schema-error")).to_be_hidden()
    page.keyboard.press("Escape")
    playground.ask("a star")
    expect(page.locator("#hint")).not_to_contain_text(reason)


# ---- answers ------------------------------------------------------------------------------------


def stream(*deltas: dict[str, Any]) -> str:
    """Return a stream of deltas."""
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    return "".join(f"data: {json.dumps(one)}\n\n" for one in [*chunks, end]) + "data: [DONE]\n\n"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_folded(playground: Playground, field: str) -> None:
    page = playground.page
    body = stream({field: "first <b>it</b>"}, {field: " is *red*"}, {"content": "red"})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    playground.ask("which")
    expect(answers(page)).to_have_text("red")
    thought = page.locator(".thought")
    expect(thought).to_be_hidden()
    page.locator(".reasoning summary").press("Enter")
    expect(thought).to_have_text("first <b>it</b> is red")
    expect(thought.locator("b")).to_have_count(0)
    page.unroute("**/v1/chat/completions")
    playground.ask("a star")
    sent = playground.decode(playground.requests[0].prompt_token_ids)
    assert "first" not in sent, "what it thought is not sent back"
    expect(page.locator(".reasoning").last).to_be_hidden()


def test_the_end_is_no_token_of_the_text(playground: Playground) -> None:
    page = playground.page
    playground.will_say("red")
    playground.ask("which")
    count = len(playground.engine.answer or [])
    name = "1 token and its end" if count == 1 else f"{count} tokens and their end"
    expect(page.locator(".summary")).to_contain_text(name)
    counted = """async (message) =>
      (await import("/page/thread/strip.js")).tokenCount(message)"""
    for count, finish, stop, expected in (
        (2, "stop", None, "1 token and its end"),
        (3, "stop", None, "2 tokens and their end"),
        (3, "stop", "END", "3 tokens"),
        (1, "length", None, "1 token"),
    ):
        message = {"usage": {"completion_tokens": count}, "finish": finish, "stop": stop}
        assert page.evaluate(counted, message) == expected


def test_what_opens_is_scrolled_into_view(playground: Playground) -> None:
    page = playground.page
    for text in ("a star " * 4, "a ring " * 4):
        playground.ask(text)
    playground.open_strip()
    page.wait_for_function(
        """() => {
          const {top, bottom} = document.querySelector("#thread").getBoundingClientRect();
          const box = [...document.querySelectorAll(".cost")].at(-1).getBoundingClientRect();
          return box.top >= top - 1 && (box.bottom <= bottom + 1 || box.top <= top + 1);
        }"""
    )


def test_points_are_found_and_drawn(playground: Playground) -> None:
    page = playground.page
    parsed = {"points": {"points": [[40, 50], [1, 1]], "labels": ["cat", "dog"], "images": [2, 1]}}
    assert find_boxes(page, parsed, number=2) == [("cat", [0.1, 0.25, 0.1, 0.25])]
    with writing_boxes(playground):
        playground.add("red")
        playground.ask('{"point_2d": [200, 200], "label": "cat"}')
    figure = page.get_by_role("figure")
    expect(figure.locator("circle")).to_have_attribute("cx", "64")
    expect(figure).to_contain_text("1 point found")


# ---- two answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_two_answers_stand_beside_each_other(
    make_playground: MakePlayground, size: tuple[int, int]
) -> None:
    lora = LoRAConfig(enable_lora=True, lora_modules=("boxed=/boxed",))
    playground = make_playground(lora=lora, size=size)
    page = playground.page
    playground.ask("a star")
    page.get_by_role("button", name="Compare").press("Enter")
    choice = page.get_by_label("Compare with")
    expect(choice).to_be_focused()
    choice.select_option(label="A new answer of boxed")
    page.get_by_label("Seed", exact=True).fill("7")
    page.keyboard.press("Enter")
    pair = page.locator(".pair")
    expect(pair.locator(".actions")).to_have_count(2)
    expect(pair.locator("h3")).to_have_text(["tiny, any seed", "boxed, seed 7"])
    expect(pair.locator(".text")).to_contain_text(["a star", "a star"])
    assert [one.lora_name for one in playground.requests] == [None, "boxed"]
    assert playground.requests[1].sampling_params.seed == 7
    left, right = (one.bounding_box() for one in pair.locator("ol > li").all())
    assert left is not None
    assert right is not None
    is_beside = right["x"] >= left["x"] + left["width"] and right["y"] == left["y"]
    assert is_beside == (size == WIDE)
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    assert find_faults(page) == []
    page.get_by_role("button", name="Keep the answer on the left").press("Enter")
    expect(pair).to_have_count(0)
    expect(page.get_by_role("group", name="Versions")).to_have_text("1/2")
    page.get_by_role("button", name="Compare").click()
    choice.select_option(label="Version 2: boxed, seed 7")
    expect(page.get_by_label("Seed", exact=True)).to_be_hidden()
    page.get_by_role("button", name="Show both").click()
    expect(pair.locator("h3")).to_have_text(["tiny, any seed", "boxed, seed 7"])
    assert len(playground.requests) == 2, "it was there already"
    page.get_by_role("button", name="Keep the answer on the right").click()
    expect(page.get_by_role("group", name="Versions")).to_have_text("2/2")


def test_an_answer_asked_before_the_models_are_known_names_its_model(
    make_playground: MakePlayground,
) -> None:
    playground = make_playground(lora=LoRAConfig(enable_lora=True, lora_modules=("boxed=/boxed",)))
    page = playground.page
    held: list[Route] = []
    page.route("**/v1/models", lambda route: held.append(route))
    page.reload()
    expect(page.locator("body[data-started]")).to_be_attached()
    playground.ask("a star")
    expect(page.locator("#model-box")).to_be_hidden()
    assert held
    page.unroute("**/v1/models")
    expect(page.locator("#model-box")).to_be_visible()
    page.get_by_role("button", name="Compare").click()
    page.get_by_label("Compare with").select_option(label="A new answer of boxed")
    page.get_by_role("button", name="Show both").click()
    expect(page.locator(".pair h3")).to_have_text(["tiny, any seed", "boxed, any seed"])


# ---- fingers ------------------------------------------------------------------------------------

TARGETS = """(least) =>
  [...document.querySelectorAll("button, summary, select, input, a, textarea")]
  .filter((node) => node.checkVisibility() && !node.closest("[inert], .skip, .hidden"))
  .map((node) => [node.getBoundingClientRect(), node.ariaLabel || node.textContent || node.id])
  .filter(([{ width, height }]) => width && Math.min(width, height) < least - 0.5)
  .map(([{ width, height }, name]) => `${name}: ${width} x ${height}`)"""


def too_small(page: Page) -> list[str]:
    return page.evaluate(TARGETS, FINGER_PIXELS)


def test_all_that_a_finger_meets_is_large_enough(make_playground: MakePlayground) -> None:
    playground = make_playground(size=PHONE)
    page = playground.page
    assert too_small(page) == []
    playground.add("red", "blue")
    assert too_small(page) == []
    playground.ask("a star")
    page.get_by_role("button", name="Answer again").click()
    expect(page.get_by_role("group", name="Versions")).to_have_text("2/2")
    playground.wait_for_answers(1)
    playground.open_strip()
    page.get_by_role("button", name="Compare").click()
    assert too_small(page) == []
    page.get_by_role("button", name="Edit the question").click()
    assert too_small(page) == []
    for name in ("Settings", "Ready"):
        page.get_by_role("button", name=name).click()
        assert too_small(page) == []
        page.keyboard.press("Escape")
    page.get_by_role("button", name="Show the list").click()
    assert too_small(page) == []
