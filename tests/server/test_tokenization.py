"""/tokenize, /detokenize, /docs and the schema."""

from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import jsonschema
import pytest

from mmjax.errors import RequestError
from tests.kit import IMAGE_SOFT
from tests.server.conftest import TOOLS, MakeServer, Server
from tests.server.test_app import image_message
from tests.server.test_bad_input import error_of
from tests.server.test_openai_client import WEATHER


def tokenize(server: Server, **body: Any) -> Any:
    return server.http.post("/tokenize", json=body)


def test_a_text(server: Server) -> None:
    answer = tokenize(server, prompt="a red circle", return_token_strs=True).json()
    tokenizer = server.engine_client.input_processor.tokenizer
    assert answer["tokens"] == tokenizer.encode("a red circle")
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 256
    assert answer["token_strs"][0] == "<bos>"
    bare = tokenize(server, prompt="a red circle", add_special_tokens=False).json()
    assert bare["tokens"] == answer["tokens"][1:]
    assert bare["token_strs"] is None
    assert tokenize(server, prompt="", add_special_tokens=False).json()["tokens"] == []


def test_a_conversation_is_what_chat_makes_of_it(server: Server) -> None:
    answer = tokenize(server, messages=[image_message()], return_token_strs=True).json()
    chat = server.chat(messages=[image_message()], return_token_ids=True).json()
    assert answer["tokens"] == chat["prompt_token_ids"]
    assert answer["token_strs"].count(IMAGE_SOFT) == 4
    plain = tokenize(server, messages=[image_message()], add_generation_prompt=False).json()
    assert plain["count"] < answer["count"]


@pytest.mark.parametrize("reads_calls", [True, False])
def test_tools_are_part_of_a_conversation(make_server: MakeServer, reads_calls: bool) -> None:
    """Also where the server could not read the model's calls."""
    server = make_server(**{**TOOLS, "enable_auto_tool_choice": reads_calls})
    messages = [{"role": "user", "content": "a"}]
    bare = tokenize(server, messages=messages).json()["count"]
    assert tokenize(server, messages=messages, tools=[WEATHER]).json()["count"] > bare + 50


def test_what_is_too_long_is_counted_all_the_same(server: Server) -> None:
    assert tokenize(server, prompt="red " * 400).json()["count"] > 256
    messages = [{"role": "user", "content": "red " * 400}]
    assert tokenize(server, messages=messages).json()["count"] > 256
    assert error_of(tokenize(server, prompt="red " * 100_000))["param"] == "prompt"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "a", "colour": 1}, "colour"),
        ({"prompt": "a", "model": "gpt"}, "model"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"messages": [3]}, "messages[0]"),
    ],
)
def test_mistakes_name_their_field(server: Server, body: dict[str, Any], param: str) -> None:
    response = tokenize(server, **body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_and_back(server: Server) -> None:
    ids = tokenize(server, prompt="a red circle").json()["tokens"]
    answer = server.http.post("/detokenize", json={"tokens": ids}).json()
    assert answer == {"prompt": "<bos>a red circle"}
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    for tokens in ([-1], [10**6], ["a"], 3):
        response = server.http.post("/detokenize", json={"tokens": tokens})
        assert error_of(response)["param"].startswith("tokens")


class Page(HTMLParser):
    """What a page refers to, and which of its elements run code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.active: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag in ("script", "iframe", "object") or any(name.startswith("on") for name, _ in attrs):
            self.active.append(tag)


def test_the_docs_need_nothing_from_outside(server: Server) -> None:
    response = server.http.get("/docs")
    assert response.status_code == 200
    page = Page(response.text)
    assert page.links == ["/openapi.json"]
    assert page.active == []
    assert "default-src 'none'" in response.headers["content-security-policy"]
    for route in ("/v1/chat/completions", "/v1/responses", "/tokenize"):
        assert route in response.text
    assert "tool_choice" in response.text


def test_the_docs_can_be_left_out_and_are_guarded(make_server: MakeServer) -> None:
    silent = make_server(disable_fastapi_docs=True)
    guarded = make_server(api_keys=("secret",))
    for path in ("/docs", "/openapi.json"):
        assert silent.http.get(path).status_code == 404
        assert guarded.http.get(path).status_code == 401


def test_the_schema_describes_every_route(server: Server) -> None:
    schema = server.http.get("/openapi.json").json()
    assert {
        *("/v1/chat/completions", "/v1/chat/completions/render", "/v1/completions"),
        *("/v1/responses", "/v1/responses/{response_id}", "/v1/models", "/tokenize"),
        *("/detokenize", "/health", "/ready", "/version"),
    } <= schema["paths"].keys()


def every_error(kind: type[RequestError] = RequestError) -> Iterator[type[RequestError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from every_error(one)


def test_the_schema_describes_every_error(server: Server) -> None:
    schema = server.http.get("/openapi.json").json()
    # 499 is for the log: nobody is there to read it.
    statuses = {*(str(one.status) for one in every_error()), "401", "413", "431"} - {"499"}
    for operations in schema["paths"].values():
        for operation in operations.values():
            assert statuses <= operation["responses"].keys()
    response = server.http.post("/tokenize", json={})
    assert response.status_code == 400
    components = {"components": schema["components"]}
    jsonschema.validate(response.json(), {"$ref": "#/components/schemas/ErrorBody", **components})


def test_the_schema_says_where_null_is_the_default(server: Server) -> None:
    fields = server.http.get("/openapi.json").json()["components"]["schemas"]
    echo, number = (fields["CompletionRequest"]["properties"][name] for name in ("echo", "n"))
    assert {"type": "null"} in echo["anyOf"]
    assert {"type": "null"} in number["anyOf"]
    assert (echo["default"], number["default"]) == (False, 1)


def test_the_schema_describes_streams(server: Server) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    for route in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        content = paths[route]["post"]["responses"]["200"]["content"]
        assert {"application/json", "text/event-stream"} == content.keys()


def test_a_wrong_method_is_told_all_that_an_address_takes(server: Server) -> None:
    response = server.http.put("/v1/responses/0")
    assert response.status_code == 405
    assert response.headers["allow"] == "DELETE, GET"
    assert response.headers["content-type"] == "application/json"
