"""Clips on the page: recorded by a fake microphone, picked, played, asked about."""

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from tests.families.directories import edit_json
from tests.families.qwen2_audio import write_files
from tests.processing.test_audio_file import tones, write_audio
from tests.server.page.conftest import MakePlayground, Playground, find_chromium

RECORD, END = "Record sound", "End the recording"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One whose microphone hears beeps, and may be listened to."""
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
    fakes = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), args=[*arguments, *fakes]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def hears(tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    """Of a family that hears clips, of twenty seconds at most."""
    folder = write_files(tmp_path_factory.mktemp("clips"))
    edit_json(folder / "preprocessor_config.json", {"chunk_length": 20})
    edit_json(folder / "config.json", {"audio_config.max_source_positions": 1000})
    return InputProcessor(load_model_config(str(folder), max_model_len=1024))


def heard(playground: Playground) -> list[Any]:
    return playground.requests[-1].mm_features


def test_a_recorded_clip_is_asked_about(
    make_playground: MakePlayground, hears: InputProcessor
) -> None:
    playground = make_playground(processor=hears)
    page = playground.page
    expect(page.get_by_role("heading", name="Ask about a clip")).to_be_visible()
    expect(page.get_by_role("button", name="Add sound")).to_be_visible()
    page.get_by_role("button", name=RECORD).click()
    expect(page.get_by_role("button", name=END)).to_be_visible()
    page.wait_for_timeout(1500)
    page.get_by_role("button", name=END).click()
    expect(page.get_by_role("button", name=RECORD)).to_be_visible()
    expect(page.locator("#drafts audio")).to_have_count(1)
    playground.ask("what is heard")
    (clip,) = heard(playground)
    assert clip.modality == "audio"
    assert clip.mm_position.get_num_embeds() > 20, "a second or more"
    player = page.locator(".user audio")
    assert player.evaluate("async (one) => { one.muted = true; await one.play(); return true; }")
    playground.open_strip()
    expect(page.locator(".picture-cell")).to_contain_text("audio 1")
    expect(page.locator(".picture-cell")).to_contain_text("spectrogram")


def test_a_picked_clip_stays_with_its_conversation(
    make_playground: MakePlayground, hears: InputProcessor
) -> None:
    playground = make_playground(processor=hears)
    page = playground.page
    playground.pick("tone.wav", "audio/wav", write_audio(tones(48_000, 0.4)))
    expect(page.locator("#drafts audio")).to_have_count(1)
    playground.ask("what is heard")
    first = heard(playground)[0].mm_hash
    page.reload()
    expect(page.locator(".user audio")).to_have_count(1)
    playground.ask("and what else")
    assert [one.mm_hash for one in heard(playground)] == [first]


def test_a_clip_that_is_picked_before_the_model_is_known_is_kept(
    make_playground: MakePlayground, hears: InputProcessor
) -> None:
    playground = make_playground(processor=hears)
    page, held = playground.page, list[Route]()
    page.route("**/v1/models", lambda route: held.append(route))
    page.reload()
    expect(page.locator("body[data-started]")).to_be_attached()
    playground.pick("tone.wav", "audio/wav", write_audio(tones(48_000, 0.4)))
    expect(page.locator("#drafts audio")).to_have_count(1)
    assert held
    page.unroute("**/v1/models")
    expect(page.locator("#model-box")).to_be_visible()
    playground.ask("what is heard")
    assert [one.modality for one in heard(playground)] == ["audio"]


def test_what_the_model_does_not_take_is_said(
    make_playground: MakePlayground, hears: InputProcessor
) -> None:
    page = make_playground(processor=hears).page
    expect(page.get_by_role("button", name="Add sound")).to_be_visible()
    files: Any = {"name": "red.png", "mimeType": "image/png", "buffer": b"x"}
    page.locator("#files").set_input_files([files])
    expect(page.locator("#hint")).to_have_text(
        "red.png is a picture, and this model takes sound alone."
    )


def test_a_clip_is_refused_where_the_model_takes_pictures(playground: Playground) -> None:
    page: Page = playground.page
    expect(page.locator("#pictures-left")).to_be_visible()
    expect(page.locator("#record")).to_be_hidden()
    playground.pick("tone.wav", "audio/wav", b"RIFF")
    expect(page.locator("#hint")).to_have_text(
        "tone.wav is a clip, and this model takes pictures alone."
    )
