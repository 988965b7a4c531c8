"""Answers on the page: Markdown as nodes, boxes on the picture; nothing of a model is HTML."""

from typing import Any
from unittest.mock import patch

from playwright.sync_api import Page, expect

from mmjax.processing.answers import JSON_IN_THOUSANDTHS
from tests.server.page.conftest import Playground

MARKDOWN = {
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "a **b** *c* `d<e`": "<p>a <strong>b</strong> <em>c</em> <code>d&lt;e</code></p>",
    "[a](javascript:alert(1))": "<p>[a](javascript:alert(1))</p>",
    "![a](https://b.c/d)": '<p>!<a href="https://b.c/d" ',
    "# A\n\ntext\nmore": "<h3>A</h3><p>text\nmore</p>",
    "- a\n- b\n  - c": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "> a\n> b": "<blockquote><p>a\nb</p></blockquote>",
    "```py\n<b>\n**x**\n```": "<code>&lt;b&gt;\n**x**</code></pre>",
    "```\nopen": "<code>open</code></pre>",
    "|a|b|\n|-|-|\n|c|d|": "<tbody><tr><td>c</td><td>d</td></tr></tbody>",
    "---": "<hr>",
    "2 * 3 * 4 and snake_case_name": "<p>2 * 3 * 4 and snake_case_name</p>",
}


def call(page: Page, module: str, function: str, argument: Any) -> Any:
    """Call a function of one of the page's modules."""
    return page.evaluate(
        """async ([module, name, argument]) => (await import(module))[name](argument)""",
        [f"/page/thread/{module}.js", function, argument],
    )


def test_markdown_is_nodes_and_html_is_text(playground: Playground) -> None:
    drawn = playground.page.evaluate(
        """async (texts) => {
          const { markdown } = await import("/page/thread/markdown.js");
          return texts.map((text) => {
            const node = document.createElement("div");
            node.append(...markdown(text));
            return node.innerHTML;
          });
        }""",
        list(MARKDOWN),
    )
    for (text, expected), found in zip(MARKDOWN.items(), drawn, strict=True):
        assert expected in found, text


def test_html_in_an_answer_is_shown_as_text(playground: Playground) -> None:
    playground.ask("<img src=x onerror=alert(1)>")
    text = playground.page.locator(".assistant .text")
    expect(text).to_contain_text("img src=x onerror=alert(1)")
    expect(text.locator("img")).to_have_count(0)


def find_boxes(page: Page, parsed: Any, number: int = 1) -> list[tuple[str, list[float]]]:
    """Return each box: its label, and left, top, right and bottom; of a point, both are the same.

    In a picture of 400 x 200 pixels.
    """
    facts = {"parsed": parsed, "picture": {"width": 400, "height": 200}, "number": number}
    return [
        (one["label"], [round(n, 3) for n in (*one["points"][0], *one["points"][-2:][0])])
        for one in call(page, "boxes", "findBoxes", facts)
    ]


def writing_boxes(playground: Playground) -> Any:
    """Have the model be one that writes boxes and points in JSON."""
    assert playground.processor is not None
    return patch.object(playground.processor.info, "answer_form", JSON_IN_THOUSANDTHS, create=True)


def test_boxes_are_fractions_of_the_picture(playground: Playground) -> None:
    page = playground.page
    for parsed in (
        {"<OD>": {"bboxes": [[40, 20, 200, 100]], "labels": ["cat"]}},
        {"a": {"quad_boxes": [[40, 20, 200, 20, 200, 100, 40, 100]], "labels": ["cat"]}},
        {"a": {"polygons": [[[40, 20, 200, 100, 1, 1]]], "polygons_labels": ["cat"]}},
    ):
        assert find_boxes(page, parsed) == [("cat", [0.1, 0.1, 0.5, 0.5])]
    for nothing in (None, {}, {"<CAPTION>": "a cat"}):
        assert find_boxes(page, nothing) == []


def test_fields_that_are_no_boxes_hold_none(playground: Playground) -> None:
    for value in (1, None, [1], [None], [["a", "b", "c", "d"]], {"a": 1}, [[[1]]]):
        parsed = {"<OD>": dict.fromkeys(("bboxes", "quad_boxes", "polygons", "points"), value)}
        assert find_boxes(playground.page, parsed) == [], value
    for parsed in ({"a": 1}, {"a": None}, {"a": {"bboxes": [[1, 2, 3, 4]], "labels": None}}):
        assert len(find_boxes(playground.page, parsed)) <= 1


def test_boxes_are_drawn_on_the_picture(playground: Playground) -> None:
    page = playground.page
    with writing_boxes(playground):
        playground.add("red")
        playground.ask('{"bbox_2d": [100, 200, 300, 400], "label": "circle"}')
    figure = page.get_by_role("figure")
    expect(figure.locator("polygon")).to_have_count(1)
    expect(figure.locator("polygon")).to_have_attribute("points", "32,48 96,48 96,96 32,96")
    expect(figure.locator("img")).to_have_js_property("naturalWidth", 320)
    expect(figure).to_contain_text("1 object found")
