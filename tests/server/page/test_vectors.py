"""The page of a server of vectors: what it is for, and no chat."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace

import httpx2
import pytest
from playwright.sync_api import Page, expect

from mmjax.frontend.prompt.input_processor import InputProcessor
from tests.families.directories import made_once
from tests.families.retrieval import COLQWEN2
from tests.server.page.conftest import PHONE, WIDE, MakePlayground, Playground
from tests.server.page.test_accessibility import find_faults
from tests.test_serve_vectors import serving


@pytest.fixture
def of_vectors(server_input_processor: InputProcessor) -> InputProcessor:
    config = server_input_processor.model_config
    return InputProcessor(replace(config, runner="pooling", served_model_name=("it's tiny",)))


@pytest.mark.parametrize(("scheme", "size"), [("dark", PHONE), ("light", WIDE)])
def test_it_says_what_it_is_for_and_has_no_chat(
    make_playground: MakePlayground,
    of_vectors: InputProcessor,
    scheme: str,
    size: tuple[int, int],
) -> None:
    page = make_playground(processor=of_vectors, scheme=scheme, size=size).page
    expect(page.get_by_role("heading", name="This server gives vectors")).to_be_visible()
    expect(page.get_by_text("it's tiny makes a vector of a text or a picture")).to_be_visible()
    for role, name in (
        ("textbox", "Message"),
        ("button", "Send"),
        ("button", "New conversation"),
        ("button", "Try it with a drawn picture"),
        ("link", "Skip to the message box"),
        ("navigation", "Conversations"),
    ):
        expect(page.get_by_role(role, name=name)).to_be_hidden()
    wide = """[...document.querySelectorAll("body *")].map((one) => [one.id || one.className,
        one.getBoundingClientRect().right]).filter(([, right]) => right > innerWidth)"""
    assert page.evaluate(wide) == [], "nothing is cut off"
    assert find_faults(page) == []
    for command in page.locator(".command pre").all_inner_texts():
        assert json.loads(shlex.split(command)[-1])["model"] == "it's tiny"
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_role("textbox", name="API key")).to_be_visible()
    expect(page.get_by_role("textbox", name="System prompt")).to_be_hidden()
    assert find_faults(page) == []


def test_its_commands_are_answered(make_page: Callable[..., Page]) -> None:
    """Those of a model that has a vector for each token, which /v1/embeddings refuses."""
    with serving(made_once(COLQWEN2.write)()) as client:
        playground = Playground(make_page(), f"{client.base_url}/")
        page = playground.open().page
        expect(page.get_by_text("a vector of each token")).to_be_visible()
        commands = [shlex.split(one) for one in page.locator(".command pre").all_inner_texts()]
        addresses = [command[1] for command in commands]
        assert [one.rpartition("/")[2] for one in addresses] == ["pooling", "rerank", "score"]
        for command in commands:
            headers = {"Content-Type": "application/json"}
            found = httpx2.post(command[1], content=command[-1], headers=headers, timeout=300)
            assert found.status_code == 200, found.text
