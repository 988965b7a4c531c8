"""The page loses no answer: versions, answers in the background, broken connections, files."""

import json
import re
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from tests.server.page.conftest import WAIT_S, Playground, answers


def rows(page: Page) -> Any:
    return page.locator("#conversations li")


# ---- versions -----------------------------------------------------------------------------------


def test_an_edited_question_stands_beside_the_old_one(playground: Playground) -> None:
    page = playground.page
    playground.add("red", "blue")
    playground.ask("first words")
    playground.ask("second words")
    page.get_by_role("button", name="Edit the question").first.click()
    page.get_by_role("button", name="Remove blue.png").click()
    page.get_by_role("textbox", name="Edit the question").fill("other words")
    page.get_by_role("button", name="Send again").click()
    playground.wait_for_answers(1)
    expect(answers(page)).to_contain_text("other words")
    versions = page.get_by_role("group", name="Versions")
    expect(versions).to_have_text("2/2")
    expect(versions.get_by_role("button", name="Next version")).to_be_disabled()

    before = versions.get_by_role("button", name="Previous version")
    before.press("Enter")
    expect(page.locator(".bubble")).to_have_text(["first words", "second words"])
    expect(versions).to_have_text("1/2")
    expect(versions.get_by_role("button", name="Next version")).to_be_focused()
    playground.open()
    expect(page.locator(".bubble")).to_have_text(["first words", "second words"])
    page.get_by_role("button", name="Next version").click()
    expect(page.locator(".bubble")).to_have_text(["other words"])
    playground.ask("third words")
    sent = [len(request.mm_features) for request in playground.requests]
    assert sent == [2, 2, 1, 1], "each question goes with those that are shown above it"


def test_a_page_left_in_the_moment_of_a_choice_keeps_it(playground: Playground) -> None:
    page = playground.page
    playground.add("red", "blue")
    playground.ask("a star")
    page.get_by_role("button", name="Answer again").click()
    expect(page.get_by_role("group", name="Versions")).to_have_text("2/2")
    playground.wait_for_answers(1)
    page.evaluate(
        "document.querySelector('[aria-label=\"Previous version\"]').click(); location.reload()"
    )
    expect(page.locator("body[data-started]")).to_be_attached()
    expect(page.get_by_role("group", name="Versions")).to_have_text("1/2")
    expect(page.locator(".user img")).to_have_count(2)


def test_another_answer_stands_beside_the_old_one(playground: Playground) -> None:
    page = playground.page
    playground.ask("a star")
    playground.ask("a ring")
    page.get_by_role("button", name="Answer again").first.click()
    expect(page.get_by_role("group", name="Versions")).to_have_text("2/2")
    playground.wait_for_answers(1)
    first, _, again = playground.requests
    assert again.prompt_token_ids == first.prompt_token_ids
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".bubble")).to_have_text(["a star", "a ring"])


def test_an_answer_that_failed_without_a_word_leaves_no_version(playground: Playground) -> None:
    page = playground.page
    page.route("**/v1/chat/completions", lambda route: route.abort())
    playground.ask("a star")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Answer again").click()
    expect(answers(page)).to_contain_text("a star")
    playground.wait_for_answers(1)
    expect(page.get_by_role("group", name="Versions")).to_have_count(0)


# ---- answers in the background ------------------------------------------------------------------


def test_an_answer_goes_on_while_another_conversation_is_open(playground: Playground) -> None:
    page = playground.page
    playground.engine.num_steps_left = 4
    playground.send("a red circle and a blue star")
    expect(answers(page)).to_have_text("use")
    page.get_by_role("button", name="New conversation").click()
    expect(rows(page).first.get_by_role("button").first).to_contain_text("(is answered)")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    playground.engine.num_steps_left = None
    expect(rows(page).first.get_by_role("button").first).not_to_contain_text("(is answered)")
    playground.ask("a ring")
    assert not playground.engine.has_aborted.is_set()
    rows(page).get_by_text("a red circle").click()
    expect(answers(page)).to_contain_text("a blue star")
    expect(page.locator(".note")).to_have_count(0)


def test_a_conversation_that_is_deleted_takes_its_answer_along(playground: Playground) -> None:
    page = playground.page
    playground.engine.num_steps_left = 4
    playground.send("a red circle and a blue star")
    expect(answers(page)).to_have_text("use")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete \u201ca red circle").click()
    assert playground.engine.has_aborted.wait(WAIT_S)
    playground.engine.num_steps_left = None
    playground.ask("a ring")
    expect(rows(page)).to_have_text(["a ring"])
    playground.open()
    expect(rows(page)).to_have_text(["a ring"])


def test_what_is_written_stays_with_its_conversation(playground: Playground) -> None:
    page = playground.page
    playground.ask("a star")
    box = page.get_by_role("textbox", name="Message")
    playground.add("red")
    box.fill("half a question")
    page.get_by_role("button", name="New conversation").click()
    expect(box).to_have_value("")
    expect(page.locator("#drafts img")).to_have_count(0)
    rows(page).get_by_text("a star").click()
    expect(box).to_have_value("half a question")
    expect(page.locator("#drafts img")).to_have_count(1)
    playground.open()
    expect(box).to_have_value("half a question")


# ---- broken connections -------------------------------------------------------------------------


def test_a_server_that_is_killed_reads_as_a_broken_connection(playground: Playground) -> None:
    page = playground.page
    playground.engine.num_steps_left = 8
    playground.send("a red circle and a blue star")
    begun = re.compile(r"^user\sa red\s*$")
    expect(answers(page)).to_have_text(begun)
    port = playground.kill_server()
    expect(page.get_by_role("alert")).to_contain_text("The connection broke off")
    expect(answers(page)).to_have_text(begun)

    go_on = page.get_by_role("button", name="Go on with this answer")
    go_on.click()
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")
    expect(answers(page)).to_have_text(begun)
    playground.restart_server(port)
    go_on.click()
    expect(page.get_by_role("alert")).to_have_count(0)
    playground.wait_for_answers(1)
    (request,) = playground.requests
    ending = playground.decode(request.prompt_token_ids)
    assert ending.rstrip().endswith("model\nuser\na red"), "the answer goes on from what there was"
    expect(answers(page)).to_have_text(
        re.compile(r"^user\sa red.*a red circle and a blue star", re.S)
    )


IS_WRITTEN = """() => new Promise((resolve) => {
  indexedDB.open("mmjax", 1).onsuccess = ({ target }) => {
    const store = target.result.transaction("conversations").objectStore("conversations");
    store.getAll().onsuccess = (event) => {
      target.result.close();
      resolve(JSON.stringify(event.target.result).includes("user\\\\na "));
    };
  };
})"""
"""Whether an answer that begins so is in the browser's database."""


def test_a_page_that_is_closed_keeps_what_there_was(playground: Playground) -> None:
    page = playground.page
    playground.engine.num_steps_left = 8
    playground.send("a red circle and a blue star")
    expect(answers(page)).to_have_text(re.compile("user"))
    page.wait_for_timeout(1100)  # what comes after a second is written down with all before it
    playground.engine.num_steps_left = 2
    expect(answers(page)).to_have_text(re.compile(r"user\sa r"))
    page.wait_for_function(IS_WRITTEN)  # the browser writes when it has time
    playground.open()
    expect(page.locator(".note")).to_have_text("The page was closed during this answer.")
    expect(answers(page)).to_have_text(re.compile(r"user\sa "))
    playground.engine.num_steps_left = None
    page.get_by_role("button", name="Go on with this answer").click()
    expect(page.locator(".note")).to_have_count(0)
    playground.wait_for_answers(1)


# ---- files --------------------------------------------------------------------------------------


def test_conversations_are_exported_and_imported(playground: Playground, tmp_path: Path) -> None:
    page = playground.page
    playground.add("red")
    playground.ask("a star")
    page.get_by_role("button", name="Answer again").click()
    expect(page.get_by_role("group", name="Versions")).to_have_text("2/2")
    playground.wait_for_answers(1)
    page.get_by_role("button", name="New conversation").click()
    playground.ask("a ring")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    path = tmp_path / "conversations.json"
    download.value.save_as(path)
    assert download.value.suggested_filename == "mmjax-conversations.json"

    other = page.context.browser
    assert other is not None
    fresh = other.new_context().new_page()
    fresh.goto(playground.url)
    expect(fresh.locator("body[data-started]")).to_be_attached()
    fresh.locator("#import-file").set_input_files(path)
    expect(rows(fresh)).to_have_text(["a ring", "a star"])
    rows(fresh).get_by_text("a star").click()
    expect(fresh.get_by_role("group", name="Versions")).to_have_text("2/2")
    expect(fresh.locator(".thumbnail img")).to_have_js_property("naturalWidth", 320)
    fresh.locator("details.cost summary").click()
    expect(fresh.locator(".picture-cell img")).to_have_count(1)
    # Once more: what is there already stays as it is.
    fresh.locator("#import-file").set_input_files(path)
    expect(rows(fresh)).to_have_count(4)
    fresh.reload()
    expect(rows(fresh)).to_have_count(4)
    rows(fresh).get_by_text("a star").last.click()
    expect(fresh.locator(".thumbnail img")).to_have_js_property("naturalWidth", 320)
    fresh.context.close()


def exported(*messages: dict[str, Any], **fields: Any) -> str:
    conversation = {"title": "t", "chosen": {}, "messages": list(messages), **fields}
    return json.dumps(
        {"format": "mmjax conversations", "version": 1, "conversations": [conversation]}
    )


PICTURE = {"id": "p", "name": "x"}
QUESTION = {"id": "1", "parent": "", "role": "user", "text": "a", "pictures": []}


NO_EXPORTS = {
    "{": "it is no JSON",
    "[]": "it is no file of this page",
    '{"format": "mmjax conversations", "version": 2}': "this page reads 1",
    '{"format": "mmjax conversations", "version": 1}': "a list is missing",
    exported(QUESTION, QUESTION): "two of its messages have one id",
    exported({**QUESTION, "parent": "9"}): "follows one that is not in it",
    exported({**QUESTION, "role": "system"}): "neither a question nor an answer",
    exported({**QUESTION, "pictures": [PICTURE]}): "data of the picture",
    exported(
        {**QUESTION, "pictures": [PICTURE]}, files={"p": "data:text/html;base64,aaaa"}
    ): "are no picture",
}


def test_a_file_that_is_no_export_is_refused(playground: Playground) -> None:
    page = playground.page
    box = page.locator("#import-file")

    def import_text(text: str) -> None:
        file: Any = {"name": "x.json", "mimeType": "application/json", "buffer": text.encode()}
        box.set_input_files([file])

    for text, reason in NO_EXPORTS.items():
        import_text(text)
        expect(page.locator("#import-problem")).to_contain_text(reason)
        expect(page.locator("#import-problem")).to_contain_text("x.json was not imported")
    expect(rows(page)).to_have_count(0)
    import_text(exported(QUESTION))
    expect(page.locator("#import-problem")).to_be_hidden()
    expect(rows(page)).to_have_count(1)


def test_the_search_finds_titles_and_texts(playground: Playground) -> None:
    page = playground.page
    search = page.get_by_role("searchbox", name="Search conversations")
    expect(search).to_be_hidden()
    for text in ("a star", "a ring", "a red circle"):
        page.get_by_role("button", name="New conversation").click()
        playground.ask(text)
    search.fill("RING a")
    expect(rows(page)).to_have_text(["a ring"])
    expect(page.get_by_role("button", name="Export these")).to_be_enabled()
    search.fill("model")  # of each answer: an echo of the prompt
    expect(rows(page)).to_have_count(3)
    search.fill("zebra")
    expect(rows(page)).to_have_count(0)
    expect(page.get_by_text("No conversation has these words.")).to_be_visible()
    search.fill("")
    expect(rows(page)).to_have_count(3)


def test_lists_of_earlier_pages_are_read(playground: Playground) -> None:
    page = playground.page
    page.evaluate(
        """async () => {
          const { writeConversation } = await import("/page/conversation/store.js");
          const messages = [
            {role: "user", text: "old question", pictures: []},
            {role: "assistant", text: "old answer", state: "done"},
          ];
          await writeConversation({id: "1", title: "old", updated: 1, messages}, []);
        }"""
    )
    playground.open()
    rows(page).get_by_text("old").click()
    expect(answers(page)).to_have_text("old answer")
    playground.ask("a star")
    assert "old answer" in playground.decode(playground.requests[0].prompt_token_ids)
