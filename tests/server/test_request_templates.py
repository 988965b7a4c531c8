"""Chat templates of requests: rendered apart, in bounded time and memory."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mmjax.errors import RequestError
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.prompt.request_template import (
    MAX_SOURCE_CHARS,
    RequestTemplate,
    TemplateRenderer,
)
from mmjax.server.openai.chat_completions import MAX_WAITING
from tests.kit import GEMMA3_CHAT_TEMPLATE
from tests.server.conftest import TOOLS_TEMPLATE, MakeServer, servers
from tests.server.test_bad_input import error_of

BOMBS = {
    "a long loop": "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "loops in loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "much memory": "{{ 'a' * 10**9 }}",
    "a large number": "{{ 9 ** (9 ** 9) }}",
    "a long text": "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
    "much memory by a filter": "{{ 'a' | center(10**10) }}",
    "much memory by a list": "{{ ([0] * 10**9) | length }}",
    "endless calls": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}
CONVERSATION = [{"role": "user", "content": [{"type": "text", "text": "a red circle"}]}]


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(timeout_s=60.0, max_chars=10_000)
    yield renderer
    renderer.close()


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_CVE_2026_115911_bombs_end_and_the_others_are_served(
    make_server: MakeServer, source: str
) -> None:
    server = make_server(trust_request_chat_template=True, chat_template_render_timeout_s=1.0)

    async def run() -> list[Any]:
        async with server.async_openai() as client:

            async def ask(**fields: Any) -> Any:
                return await client.chat.completions.with_raw_response.create(
                    model="tiny", messages=[{"role": "user", "content": "a"}], **fields
                )

            bombs = [
                asyncio.create_task(ask(extra_body={"chat_template": source})) for _ in range(3)
            ]
            others = [await ask() for _ in range(3)]
            assert all(other.status_code == 200 for other in others)
            return await asyncio.gather(*bombs, return_exceptions=True)

    for error in server.in_loop(run):
        assert error.status_code == 400
        assert error.param == "chat_template"
    assert server.engine_client.num_requests == 0


def test_too_many_that_wait_are_told_to_come_again(make_server: MakeServer) -> None:
    server = make_server(trust_request_chat_template=True, chat_template_render_timeout_s=1.0)
    body = {"chat_template": BOMBS["loops in loops"]}

    async def run() -> list[Any]:
        async with server.async_openai() as client:
            asking = [
                client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "a"}], extra_body=body
                )
                for _ in range(MAX_WAITING + 4)
            ]
            tasks = [asyncio.create_task(one) for one in asking]
            done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in rest:
                task.cancel()
            return await asyncio.gather(*done, *rest, return_exceptions=True)

    statuses = [getattr(error, "status_code", None) for error in server.in_loop(run)]
    assert 429 in statuses


@pytest.mark.parametrize("source", [GEMMA3_CHAT_TEMPLATE, TOOLS_TEMPLATE])
@pytest.mark.parametrize("continues", [False, True])
def test_it_renders_as_transformers_does(
    server_input_processor: InputProcessor, renderer: TemplateRenderer, source: str, continues: bool
) -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "be short"}]},
        *CONVERSATION,
        {"role": "assistant", "content": [{"type": "text", "text": "it is <b> 'é' "}]},
    ]
    options: dict[str, Any] = {
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "tools": [{"type": "function", "function": {"name": "f", "description": "é <&>"}}],
    }
    ours = RequestTemplate(source, server_input_processor.tokenizer, renderer).render(
        conversation, **options
    )
    theirs = ChatTemplate(source, server_input_processor.tokenizer).render(conversation, **options)
    assert ours == theirs


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{% if %}", "no valid template"),
        ("{{ messages.__class__.__mro__ }}", "no valid template"),
        ("{{ messages[0].nothing.more }}", "no valid template"),
        ("{{ 1 // 0 }}", "cannot render"),
        ("{{ 'a' * 20000 }}", "too long"),
    ],
)
def test_what_goes_wrong_is_said(
    server_input_processor: InputProcessor, renderer: TemplateRenderer, source: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        RequestTemplate(source, server_input_processor.tokenizer, renderer).render(CONVERSATION)
    assert caught.value.param == "chat_template"
    assert "/" not in caught.value.message


def test_a_long_source_is_not_even_parsed(
    server_input_processor: InputProcessor, renderer: TemplateRenderer
) -> None:
    with pytest.raises(RequestError, match="shorten it"):
        RequestTemplate("{{ 1 }}" * MAX_SOURCE_CHARS, server_input_processor.tokenizer, renderer)
    deep = "{{" + "(" * 30000 + "1" + ")" * 30000 + "}}"
    with pytest.raises(RequestError):
        RequestTemplate(deep, server_input_processor.tokenizer, renderer).render(CONVERSATION)


def test_CVE_2026_115911_it_is_refused_unless_it_is_trusted(make_server: MakeServer) -> None:
    server = make_server()
    for fields in ({"chat_template": "x"}, {"chat_template_kwargs": {"style": "terse"}}):
        error = error_of(server.chat(**fields))
        assert error["param"] == next(iter(fields))
        assert "--trust-request-chat-template" in error["message"]
    for path in ("/v1/chat/completions/render", "/tokenize"):
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}
        assert error_of(server.http.post(path, json=body))["param"] == "chat_template"


def test_CVE_2026_115918_no_route_takes_a_template_or_its_options_unasked(
    make_server: MakeServer, server_input_processor: InputProcessor
) -> None:
    pooling = replace(server_input_processor.model_config, runner="pooling")
    of_vectors = InputProcessor(pooling)
    with servers(of_vectors, of_vectors) as make_vector_server:
        check_templates(make_server, make_vector_server)


def check_templates(make_server: MakeServer, make_vector_server: MakeServer) -> None:
    of_text, of_vectors = (
        (make(), make(trust_request_chat_template=True))
        for make in (make_server, make_vector_server)
    )
    schema = of_text[0].app.openapi()
    found = set()
    for path, routes in schema["paths"].items():
        body = routes.get("post", {}).get("requestBody", {}).get("content", {})
        reference = body.get("application/json", {}).get("schema", {}).get("$ref", "")
        fields = schema["components"]["schemas"].get(reference.rpartition("/")[2], {})
        has_messages = "messages" in fields.get("properties", {})
        messages = {"messages": [{"role": "user", "content": "a"}]}
        said: dict[str, Any] = messages if has_messages else {"input": "a"}
        said |= {"max_tokens": 1} if "max_tokens" in fields.get("required", ()) else {}
        closed, opened = of_vectors if path in ("/v1/embeddings", "/pooling") else of_text
        for name in {"chat_template", "chat_template_kwargs"} & fields.get("properties", {}).keys():
            found.add((path, name))
            value = "{{ 'a' * 10**9 }}" if name == "chat_template" else {"style": "terse"}
            assert error_of(closed.http.post(path, json={**said, name: value}))["param"] == name
            if name == "chat_template_kwargs":
                for reserved in ("tokenize", "chat_template", "messages", "return_tensors"):
                    asked = {**said, name: {reserved: True}}
                    error = error_of(opened.http.post(path, json=asked))
                    assert error["param"] == f"{name}.{reserved}"
    known = {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/pooling"}
    known.add("/tokenize")
    assert known <= {path for path, _ in found}


def test_what_is_true_or_false_needs_no_trust(make_server: MakeServer) -> None:
    """As Qwen's and GLM's cards ask for it, of every server."""
    source = (
        TOOLS_TEMPLATE + "{% if enable_thinking is defined %}on: {{ enable_thinking }}{% endif %}"
    )
    server = make_server(chat_template=source)
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    assert "on: False" in server.chat(**options).json()["choices"][0]["message"]["content"]
    body = {"messages": [{"role": "user", "content": "a"}]}
    counts = [
        server.http.post("/tokenize", json={**body, **more}).json()["count"]
        for more in ({}, options)
    ]
    assert counts[0] < counts[1]
    for value in (0, 1, "false", [], {"a": False}):
        refused = server.chat(chat_template_kwargs={"enable_thinking": value})
        assert error_of(refused)["param"] == "chat_template_kwargs"
