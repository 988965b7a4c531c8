"""Answers on the page: Markdown as nodes, boxes on the picture; nothing of a model is HTML."""

from typing import Any

from playwright.sync_api import Page, Route, expect

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


def find_boxes(page: Page, text: str, **facts: Any) -> list[tuple[str, list[float]]]:
    """Return each box: its label, and left, top, right, bottom; of a point, both are the same."""
    given = {"text": text, "picture": {"width": 400, "height": 200}, **facts}
    found = call(page, "boxes", "findBoxes", given)
    return [
        (one["label"], [round(n, 3) for n in (*one["points"][0], *one["points"][-2:][0])])
        for one in found
    ]


def test_boxes_of_every_form_are_found(playground: Playground) -> None:
    page = playground.page
    parsed = {"<OD>": {"bboxes": [[40, 20, 200, 100]], "labels": ["cat"]}}
    assert find_boxes(page, "cat", parsed=parsed) == [("cat", [0.1, 0.1, 0.5, 0.5])]
    qwen2 = (
        "<|object_ref_start|>the cat<|object_ref_end|><|box_start|>(100,200),(300,400)<|box_end|>"
    )
    assert find_boxes(page, qwen2) == [("the cat", [0.1, 0.2, 0.3, 0.4])]
    assert find_boxes(page, "the cat(100,200),(300,400)") == [("the cat", [0.1, 0.2, 0.3, 0.4])]
    locs = "<loc0256><loc0128><loc0512><loc1024> a dog ; <loc0000><loc0000><loc0512><loc0512> cat"
    assert find_boxes(page, locs) == [
        ("a dog", [0.125, 0.25, 1.0, 0.5]),
        ("cat", [0.0, 0.0, 0.5, 0.5]),
    ]
    # 200 embeddings of 400 x 200: 20 columns and 10 rows of 28 pixels.
    json = '```json\n[{"bbox_2d": [56, 28, 280, 140], "label": "cat"}]\n```'
    for unit in ("pixels", None):
        found = find_boxes(page, json, item={"num_embeds": 200}, unit=unit)
        assert found == [("cat", [0.1, 0.1, 0.5, 0.5])]


def test_boxes_in_thousandths_are_of_the_pictures_sides(playground: Playground) -> None:
    """Whatever the picture was resized to."""
    page, facts = playground.page, {"unit": "thousandths", "item": {"num_embeds": 200}}
    qwen3 = '```json\n[{"bbox_2d": [100, 200, 300, 1000], "label": "cat"}]\n```'
    assert find_boxes(page, qwen3, **facts) == [("cat", [0.1, 0.2, 0.3, 1.0])]
    glm = "the cats: <|begin_of_box|>[[100, 200,300,400], [0,0,500,999]]<|end_of_box|>."
    assert find_boxes(page, glm, **facts) == [
        ("", [0.1, 0.2, 0.3, 0.4]),
        ("", [0.0, 0.0, 0.5, 0.999]),
    ]
    assert find_boxes(page, "<|begin_of_box|>12<|end_of_box|> of [1,2,3,4]", **facts) == []


def test_the_page_reads_boxes_in_the_unit_of_the_models_card(playground: Playground) -> None:
    page = playground.page

    def answer(route: Route) -> None:
        card = route.fetch().json()
        card["data"][0]["capabilities"]["box_unit"] = "thousandths"
        route.fulfill(json=card)

    page.route("**/v1/models", answer)
    playground.open()
    playground.add("red")
    playground.ask('{"bbox_2d": [100, 200, 300, 400], "label": "cat"}')
    polygon = page.get_by_role("figure").locator("polygon")
    expect(polygon).to_have_attribute("points", "32,48 96,48 96,96 32,96")


def test_other_texts_hold_no_boxes(playground: Playground) -> None:
    for text in ("f(1,2),(3)", "(3,4),(1,2)", "(1,2),(3000,4)", '[{"bbox_2d": "no"}]', "[{]}", ""):
        assert find_boxes(playground.page, text) == [], text


def test_fields_that_are_no_boxes_hold_none(playground: Playground) -> None:
    for value in (1, None, [1], [None], [["a", "b", "c", "d"]], {"a": 1}, [[[1]]]):
        parsed = {"<OD>": dict.fromkeys(("bboxes", "quad_boxes", "polygons", "points"), value)}
        assert find_boxes(playground.page, "", parsed=parsed) == [], value
    for parsed in ({"a": 1}, {"a": None}, {"a": {"bboxes": [[1, 2, 3, 4]], "labels": None}}):
        assert len(find_boxes(playground.page, "", parsed=parsed)) <= 1


def test_boxes_are_drawn_on_the_picture(playground: Playground) -> None:
    page = playground.page
    playground.add("red")
    playground.ask("circle(100,200),(300,400)")
    figure = page.get_by_role("figure")
    expect(figure.locator("polygon")).to_have_count(1)
    expect(figure.locator("polygon")).to_have_attribute("points", "32,48 96,48 96,96 32,96")
    expect(figure.locator("img")).to_have_js_property("naturalWidth", 320)
    expect(figure).to_contain_text("1 object found")
