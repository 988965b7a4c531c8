"""/v1/responses through the official client: whole, streamed, kept, gone on from."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from mmjax.errors import ResponseNotFoundError
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.server.openai.responses_api.response import ResponseObject
from mmjax.server.openai.responses_api.service import ResponseStore, StoredResponse
from tests.server.conftest import TOOLS, MakeServer, Server, http_scope, servers
from tests.server.test_app import PROMPT, data_url
from tests.server.test_openai_client import CALL, CALLS, MODES, TEXT_AMONG_CALLS

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
TIME = {"type": "function", "name": "get_time", "parameters": {"type": "object"}}
PICTURE = {"type": "input_image", "image_url": data_url(), "detail": "auto"}


@pytest.fixture(scope="module")
def module_servers(
    server_input_processor: InputProcessor, roomy_input_processor: InputProcessor
) -> Iterator[dict[str, Server]]:
    # Processors of their own: an engine that ends halts those that other tests share with it.
    own = [
        InputProcessor(one.model_config) for one in (server_input_processor, roomy_input_processor)
    ]
    with servers(*own) as make:
        yield {
            "plain": make(),
            "tools": make(**TOOLS),
        }


def create(server: Server, mode: str, fields: dict[str, Any]) -> tuple[Response, list[Any]]:
    """Return the response and, streamed, the events; check what is true of any stream."""
    events: list[Any] = []

    async def create_async() -> Any:
        async with server.async_openai() as client:
            made: Any = await client.responses.create(model="tiny", **fields)
            if "stream" not in mode:
                return made
            events.extend([event async for event in made])
            return events[-1].response

    fields = {**fields, "stream": True} if "stream" in mode else fields
    if "async" in mode:
        response = server.in_loop(create_async)
    elif "stream" in mode:
        events.extend(server.openai().responses.create(model="tiny", **fields))
        response = events[-1].response
    else:
        response = server.openai().responses.create(model="tiny", **fields)
    if events:
        check_events(events, response)
    return response, events


def check_events(events: list[Any], response: Response) -> None:
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert kinds.count("response.output_item.added") == len(response.output)
    assert kinds.count("response.output_item.done") == len(response.output)
    for index, item in enumerate(response.output):
        deltas = [e.delta for e in events if e.type.endswith(".delta") and e.output_index == index]
        whole = item.content[0].text if item.type == "message" else item.arguments  # type: ignore[union-attr]
        assert "".join(deltas) == whole
        assert item in [e.item for e in events if e.type == "response.output_item.done"]
        assert {
            e.item_id
            for e in events
            if getattr(e, "output_index", -1) == index and hasattr(e, "item_id")
        } <= {item.id}


def calls_of(response: Response) -> list[tuple[str, str]]:
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


@dataclass
class Case:
    name: str
    fields: dict[str, Any]
    check: Callable[[Any], Any]
    says: str | None = None
    server: str = "plain"


def content(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


ASKED = [
    {"role": "user", "content": "weather?"},
    {
        "type": "function_call",
        "call_id": "c1",
        "name": "get_weather",
        "arguments": '{"city": "Oslo"}',
    },
]
CASES = [
    Case("text", {"input": "a red circle"}, lambda r: r.output_text == PROMPT),
    Case("status", {"input": "a"}, lambda r: r.status == "completed" and r.error is None),
    Case("usage", {"input": "a"}, lambda r: r.usage.total_tokens == 2 * r.usage.input_tokens + 1),
    Case(
        "a message",
        {"input": [{"role": "user", "content": "a red circle"}]},
        lambda r: r.output_text == PROMPT,
    ),
    Case(
        "parts",
        {"input": content({"type": "input_text", "text": "a red circle"})},
        lambda r: r.output_text == PROMPT,
    ),
    Case(
        "instructions",
        {"input": "a", "instructions": "be short"},
        lambda r: r.output_text.startswith("user\nbe short") and r.instructions == "be short",
    ),
    Case(
        "a limit",
        {"input": "a", "max_output_tokens": 2},
        lambda r: r.status == "incomplete" and r.incomplete_details.reason == "max_output_tokens",
    ),
    Case(
        "a picture",
        {"input": content({"type": "input_text", "text": "What?"}, PICTURE)},
        lambda r: (
            "What?" in r.output_text and r.usage.input_tokens_details.to_dict()["image_tokens"] == 4
        ),
    ),
    Case("metadata", {"input": "a", "metadata": {"k": "v"}}, lambda r: r.metadata == {"k": "v"}),
    Case(
        "sampling",
        {"input": "a", "temperature": 0.5, "top_p": 0.5},
        lambda r: (r.temperature, r.top_p) == (0.5, 0.5),
    ),
    Case(
        "logprobs",
        {"input": "a", "top_logprobs": 1, "max_output_tokens": 3},
        lambda r: len(r.output[0].content[0].logprobs[-1].top_logprobs) == 1,
    ),
    Case(
        "an answer before",
        {
            "input": [
                *content({"type": "input_text", "text": "a"}),
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_1",
                    "status": "completed",
                    "content": [
                        {"type": "output_text", "text": "red", "annotations": [], "logprobs": []}
                    ],
                },
                {"role": "user", "content": "b"},
            ]
        },
        lambda r: "model\nred" in r.output_text,
    ),
    Case(
        "vLLM's extras",
        {"input": "a red circle", "extra_body": {"stop": "circle", "seed": 3}},
        lambda r: r.output_text == "user\na red ",
    ),
    Case(
        "nothing said",
        {"input": "a"},
        lambda r: r.output_text == "" and len(r.output) == 1,
        says="",
    ),
    Case(
        "a call",
        {"input": "a", "tools": [WEATHER]},
        lambda r: calls_of(r) == [("get_weather", '{"city": "Oslo"}')] and len(r.output) == 1,
        says=CALL,
        server="tools",
    ),
    Case(
        "text and calls",
        {"input": "a", "tools": [WEATHER, TIME]},
        lambda r: [i.type for i in r.output] == ["message", "function_call", "function_call"],
        says=CALLS,
        server="tools",
    ),
    Case(
        "one call",
        {"input": "a", "tools": [WEATHER, TIME], "parallel_tool_calls": False},
        lambda r: len(calls_of(r)) == 1,
        says=CALLS,
        server="tools",
    ),
    Case(
        "a call by name",
        {
            "input": "a",
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "name": "get_weather"},
        },
        lambda r: calls_of(r) == [("get_weather", "{}")],
        says="{}",
        server="tools",
    ),
    Case(
        # The stop string holds back what ends a call, which then comes with the text behind it.
        "text among calls",
        {
            "input": "a",
            "tools": [WEATHER, TIME],
            "extra_body": {"stop": ["}}\n</tool_call>. A "]},
        },
        lambda r: (
            [
                one.arguments if one.type == "function_call" else one.content[0].text
                for one in r.output
            ]
            == ['{"city": "Oslo"}', ". And:", "{}", "."]
        ),
        says=TEXT_AMONG_CALLS,
        server="tools",
    ),
    Case(
        "a call of a tool that is allowed",
        {
            "input": "a",
            "tools": [WEATHER, TIME],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "get_time"}],
            },
        },
        lambda r: calls_of(r) == [("get_time", "{}")] and r.tool_choice.mode == "auto",
        says=CALLS,
        server="tools",
    ),
    Case(
        "an answered call",
        {
            "input": [*ASKED, {"type": "function_call_output", "call_id": "c1", "output": "sun"}],
            "tools": [WEATHER],
        },
        lambda r: (
            '<tool_call>{"name": "get_weather"' not in r.output_text
            and "tool\nsun" in r.output_text
        ),
        server="tools",
    ),
    Case(
        "a call answered by a picture",
        {"input": [*ASKED, {"type": "function_call_output", "call_id": "c1", "output": [PICTURE]}]},
        lambda r: r.usage.input_tokens_details.to_dict()["image_tokens"] == 4,
        server="tools",
        says="ok",
    ),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_create(module_servers: dict[str, Server], case: Case, mode: str) -> None:
    server = module_servers[case.server]
    server.will_say(case.says)
    response, _ = create(server, mode, case.fields)
    assert case.check(response), response


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"role": "boss", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": [], "content": "a"}]}, "input[0].role"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
    (
        {"input": [{"role": "user", "content": "a", "shape": None, "colour": 1}]},
        "input[0].colour",
    ),
    ({"input": content({"type": "input_file", "file_id": "f"})}, "input[0].content[0].file_id"),
    ({"input": content({"type": "input_text", "text": 3})}, "input[0].content[0].text"),
    ({"input": content({**PICTURE, "image_url": "ftp://x"})}, "input[0].content[0].image_url"),
    ({"input": "a", "instructions": "a" * 40000}, "instructions"),
    ({"input": "red " * 400}, "input"),
    ({"input": "a", "previous_response_id": "resp_x"}, "previous_response_id"),
    ({"input": "a", "background": True}, "background"),
    ({"input": "a", "reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"input": "a", "truncation": "auto"}, "truncation"),
    ({"input": "a", "include": ["file_search_call.colour"]}, "include[0]"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "a", "temperature": -1}, "temperature"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    (
        {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": "colour"}}}},
        "text.format.schema",
    ),
    ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"input": "a", "text": {"format": {"type": "colour"}}}, "text.format.type"),
    ({"input": "a", "text": {"format": {"type": "text", "colour": 1}}}, "text.format.colour"),
    ({"input": "a", "conversation": "conv_1"}, "conversation"),
    ({"input": "a", "metadata": {"k": "v" * 513}}, "metadata.k"),
    ({"input": "a", "extra_body": {"colour": 1}}, "colour"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_refused(module_servers: dict[str, Server], fields: Any, param: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        module_servers["plain"].openai().responses.create(model="tiny", **fields)
    assert caught.value.status_code in (400, 404)
    assert caught.value.param == param, caught.value.message


def test_null_in_an_object_is_absent(server: Server) -> None:
    body = {"input": "a", "reasoning": {"effort": None, "summary": None}}
    assert server.http.post("/v1/responses", json=body).status_code == 200


def test_a_limit_of_calls_of_the_servers_own_tools_holds_anyway(server: Server) -> None:
    body = {"input": "a", "max_tool_calls": 3}
    assert server.http.post("/v1/responses", json=body).status_code == 200


# ---- what is kept ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_follow_up_knows_what_was_said(server: Server, stream: bool) -> None:
    client = server.openai()
    server.will_say("red")
    mode = "sync stream" if stream else "sync"
    first, _ = create(
        server,
        mode,
        {"input": content(PICTURE, {"type": "input_text", "text": "a"}), "instructions": "short"},
    )
    server.will_say(None)
    second = client.responses.create(model="tiny", input="b", previous_response_id=first.id)
    assert second.output_text == "user\n\n\n\n\na\nmodel\nred\nuser\nb\nmodel\n"
    assert second.previous_response_id == first.id
    usage: Any = second.usage
    assert usage.input_tokens_details.to_dict()["image_tokens"] == 4
    third = client.responses.create(model="tiny", input="c", previous_response_id=second.id)
    assert third.output_text.count("user\n") == 5  # two of them repeated by the echo


def test_it_can_be_read_again_and_deleted(server: Server) -> None:
    client = server.openai()
    made = client.responses.create(model="tiny", input="a red circle")
    again = client.responses.retrieve(
        made.id, include=["message.output_text.logprobs"], include_obfuscation=False
    )
    assert again.output_text == made.output_text == PROMPT
    (item,) = client.responses.input_items.list(made.id).data
    assert text_of(item) == "a red circle"
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


def text_of(item: Any) -> str:
    return item.content[0].text


def test_input_items_come_in_pages(server: Server) -> None:
    client = server.openai()
    given = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    made = client.responses.create(model="tiny", input=given)  # type: ignore[arg-type]
    pages = client.responses.input_items.list(made.id, order="asc", limit=2)
    assert pages.has_more
    assert [text_of(item) for item in pages] == ["a", "b", "c"]
    asked = ["message.input_image.image_url", "message.output_text.logprobs"]
    newest = client.responses.input_items.list(made.id, include=asked)  # type: ignore[arg-type]
    assert [text_of(item) for item in newest] == ["c", "b", "a"]
    for query in ("limit=0", "limit=a", "order=up", "after=x", "colour=red"):
        response = server.http.get(f"/v1/responses/{made.id}/input_items?{query}")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == query.partition("=")[0]


def test_what_is_not_to_be_kept_is_not(server: Server, make_server: MakeServer) -> None:
    made = server.openai().responses.create(model="tiny", input="a", store=False)
    with pytest.raises(openai.NotFoundError):
        server.openai().responses.retrieve(made.id)
    forgetful = make_server(max_num_stored_responses=0)
    made = forgetful.openai().responses.create(model="tiny", input="a")
    with pytest.raises(openai.NotFoundError):
        forgetful.openai().responses.retrieve(made.id)


def test_nobody_reads_anothers(make_server: MakeServer) -> None:
    server = make_server(api_keys=("alices", "bobs"))
    made = server.openai("alices").responses.create(model="tiny", input="a secret")
    bob = server.openai("bobs")
    for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        bob.responses.create(model="tiny", input="b", previous_response_id=made.id)
    assert caught.value.param == "previous_response_id"
    assert server.openai("alices").responses.retrieve(made.id).output_text


def test_a_stream_can_be_cancelled(server: Server) -> None:
    """The engine waits for the cancellation, however slow this machine is."""
    step = server.supervisor.engine.step
    num_steps = 0

    def step_once() -> list[Any]:
        nonlocal num_steps
        num_steps += 1
        return step() if num_steps == 1 else []

    server.supervisor.engine.step = step_once
    server.supervisor.delay_s = 0.005

    async def run() -> None:
        body = {"input": "a red circle", "stream": True}
        created = asyncio.Event()
        response_id = ""
        events: list[str] = []

        async def read() -> None:
            nonlocal response_id
            messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

            async def receive() -> Any:
                return messages.pop(0) if messages else await asyncio.Event().wait()

            async def send(message: Any) -> None:
                nonlocal response_id
                text = message.get("body", b"").decode()
                if '"id":"resp_' in text and not response_id:
                    response_id = "resp_" + text.partition('"id":"resp_')[2].partition('"')[0]
                    created.set()
                events.append(text)

            await server.app(http_scope("/v1/responses"), receive, send)

        reading = asyncio.create_task(read())
        await created.wait()
        async with server.async_openai() as client:
            running = await client.responses.retrieve(response_id)
            assert running.status == "in_progress"
            cancelled = await client.responses.cancel(response_id)
            assert cancelled.status == "cancelled"
            await reading
            assert (await client.responses.retrieve(response_id)).status == "cancelled"
            with pytest.raises(openai.BadRequestError):
                await client.responses.cancel(response_id)
            with pytest.raises(openai.BadRequestError):
                await client.responses.create(
                    model="tiny", input="b", previous_response_id=response_id
                )
        assert any('"status":"cancelled"' in text for text in events)

    server.in_loop(run)
    assert server.supervisor.engine.aborted


def test_a_stream_that_fails_says_so(make_server: MakeServer) -> None:
    server = make_server()
    server.end_behind_a_step()
    events = list(server.openai().responses.create(model="tiny", input="a red circle", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error is not None

    async def go_on() -> None:
        # The processor is that of other tests, and waits for its engine.
        server.supervisor.become_ready()

    server.in_loop(go_on)


def test_tokens_are_counted_before(module_servers: dict[str, Server]) -> None:
    server = module_servers["plain"]
    client = server.openai()
    server.will_say(None)
    counted = client.responses.input_tokens.count(model="tiny", input="a red circle")
    made = client.responses.create(model="tiny", input="a red circle")
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens


# ---- the store ---------------------------------------------------------------------------------


def stored(name: str, text: str = "", owner: str = "") -> StoredResponse:
    response = ResponseObject(
        id=name,
        created_at=0,
        metadata={},
        model="tiny",
        temperature=1.0,
        text={},
        tool_choice="auto",
        tools=[],
        top_p=1.0,
    )
    messages = [{"role": "user", "content": text}]
    return StoredResponse(response=response, owner=owner, input_items=[], messages=messages)


def test_the_store_is_bounded_in_number_and_in_size() -> None:
    store = ResponseStore(max_responses=2, max_bytes=10**6)
    for name in "abc":
        store.put(stored(name))
    with pytest.raises(ResponseNotFoundError):
        store.get("a", "")
    store.get("b", "")
    store.put(stored("d"))
    with pytest.raises(ResponseNotFoundError):
        store.get("c", "")  # b was read since
    small = ResponseStore(max_responses=100, max_bytes=3000)
    for number in range(20):
        small.put(stored(str(number), "x" * 500))
    assert sum(small.holds(str(number)) for number in range(20)) <= 5
    small.put(stored("large", "x" * 5000))
    assert not small.holds("large")
    assert small.holds("19")
