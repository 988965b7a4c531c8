"""The official client, sync and async, whole and streamed: one table, four ways."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from mmjax.frontend.prompt.input_processor import InputProcessor
from tests.server.conftest import TOOLS, TOOLS_TEMPLATE, Server, servers
from tests.server.test_app import PROMPT, data_url, image_message

MODES = ("sync", "sync stream", "async", "async stream")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NO_TIME = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
CALLS = f'Let me see.\n{CALL}\n<tool_call>{{"name": "get_time", "arguments": {{}}}}</tool_call>'
TEXT_AMONG_CALLS = f"{CALL}. And:\n{NO_TIME}."

THINKING_TEMPLATE = TOOLS_TEMPLATE + "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
"""Opens the reasoning, as those of Qwen's Thinking models."""


@pytest.fixture(scope="module")
def servers_by_name(
    server_input_processor: InputProcessor, roomy_input_processor: InputProcessor
) -> Iterator[dict[str, Server]]:
    with servers(server_input_processor, roomy_input_processor) as make:
        yield {
            "plain": make(),
            "tools": make(**TOOLS, trust_request_chat_template=True),
            "thinking": make(
                is_roomy=True,
                trusts_mm_kwargs=True,  # so that it has a processor of its own
                chat_template=THINKING_TEMPLATE,
                enable_auto_tool_choice=True,
                reasoning_parser="qwen3",
            ),
        }


@dataclass
class Seen:
    """What came back, whichever way it came."""

    texts: dict[int, str] = field(default_factory=dict)
    thoughts: dict[int, str] = field(default_factory=dict)
    """By choice, of those with any."""
    calls: dict[int, list[list[str]]] = field(default_factory=dict)
    """By choice: name and arguments of each call."""
    call_ids: list[str] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    usage: Any = None
    ids: set[str] = field(default_factory=set)
    extra: dict[str, Any] = field(default_factory=dict)

    def add_call(self, choice: int, index: int, call: Any) -> None:
        known = self.calls.setdefault(choice, [])
        if index == len(known):
            assert call.type == "function"
            self.call_ids.append(call.id)
            known.append([call.function.name, ""])
        known[index][1] += call.function.arguments or ""

    def add(self, item: Any) -> None:
        """Add a chat's or a completion's whole answer, or a chunk."""
        self.ids.add(item.id)
        self.usage = getattr(item, "usage", None) or self.usage
        self.extra |= item.model_extra or {}
        for choice in item.choices:
            part = getattr(choice, "message", None) or getattr(choice, "delta", None)
            text = choice.text if part is None else part.content
            self.texts[choice.index] = self.texts.get(choice.index, "") + (text or "")
            thought = getattr(part, "reasoning", None)
            assert thought == getattr(part, "reasoning_content", None)
            if thought:
                self.thoughts[choice.index] = self.thoughts.get(choice.index, "") + thought
            for place, call in enumerate(getattr(part, "tool_calls", None) or ()):
                self.add_call(choice.index, getattr(call, "index", place) or 0, call)
            if choice.finish_reason is not None:
                self.reasons[choice.index] = choice.finish_reason
            if choice.logprobs is not None:
                many = getattr(choice.logprobs, "content", None) or choice.logprobs.tokens
                self.logprobs.setdefault(choice.index, []).extend(many)


def look(server: Server, mode: str, create: Callable[[Any], Any], fields: dict[str, Any]) -> Seen:
    """Call `create(client)` the way `mode` says."""
    seen = Seen()
    if "stream" in mode:
        fields = {"stream": True, "stream_options": {"include_usage": True}, **fields}

    async def look_async() -> None:
        async with server.async_openai() as client:
            result = await create(client)(model="tiny", **fields)
            if "stream" not in mode:
                seen.add(result)
                return
            async for chunk in result:
                seen.add(chunk)

    if "async" in mode:
        server.in_loop(look_async)
        return seen
    result = create(server.openai())(model="tiny", **fields)
    for item in result if "stream" in mode else [result]:
        seen.add(item)
    return seen


@dataclass
class Case:
    """A request and what must be true of its answer."""

    name: str
    fields: dict[str, Any]
    check: Callable[[Seen], Any]
    server: str = "plain"
    says: str | None = None


def said(*texts: str) -> Callable[[Seen], bool]:
    return lambda seen: seen.texts == dict(enumerate(texts))


def user(content: Any = "a red circle") -> list[Any]:
    return [{"role": "user", "content": content}]


def chat(name: str, check: Callable[[Seen], Any], **fields: Any) -> Case:
    says, server = fields.pop("says", None), fields.pop("server", "plain")
    return Case(name, {"messages": user(), **fields}, check, server, says)


def with_tools(name: str, check: Callable[[Seen], Any], **fields: Any) -> Case:
    return chat(name, check, **{"server": "tools", "tools": [WEATHER, TIME], **fields})


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    """Return a `tool_choice` of those `tools` alone."""
    names = [{"type": "function", "function": {"name": tool["function"]["name"]}} for tool in tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}


def thinking(name: str, check: Callable[[Seen], Any], **fields: Any) -> Case:
    return chat(f"thinking, {name}", check, **{"server": "thinking", **fields})


ANSWERED = [
    *user("weather?"),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
            }
        ],
    },
]
OSLO = ["get_weather", '{"city": "Oslo"}']

CHATS = [
    chat("text", said(PROMPT)),
    chat("several choices", said(PROMPT, PROMPT), n=2),
    chat("usage", lambda s: s.usage.total_tokens == 2 * s.usage.prompt_tokens + 1),
    chat("cached tokens", lambda s: s.usage.prompt_tokens_details.cached_tokens == 3),
    chat("usage of two", lambda s: s.usage.completion_tokens == 6, n=2, max_tokens=3),
    chat("one id", lambda s: len(s.ids) == 1),
    chat("a stop string", said("user\na red "), stop="circle"),
    chat("stop strings", said("user\na red "), stop=["circle", "square"]),
    chat("why it stopped", lambda s: s.reasons == {0: "stop"}),
    chat("a limit", lambda s: s.reasons == {0: "length"}, max_tokens=2),
    chat("the newer limit", lambda s: s.usage.completion_tokens == 2, max_completion_tokens=2),
    chat("sampling", said(PROMPT), temperature=0.5, top_p=0.9, seed=7),
    chat("a label", said(PROMPT), user="somebody"),
    chat("logprobs", lambda s: len(s.logprobs[0]) == 3, logprobs=True, max_tokens=3),
    chat(
        "top logprobs",
        lambda s: all(len(one.top_logprobs) == 2 for one in s.logprobs[0]),
        logprobs=True,
        top_logprobs=2,
        max_tokens=3,
    ),
    chat(
        "token ids as tokens",
        lambda s: all(one.token.startswith("token_id:") for one in s.logprobs[0]),
        logprobs=True,
        max_tokens=3,
        extra_body={"return_tokens_as_token_ids": True},
    ),
    chat(
        "an id of the client's",
        lambda s: s.ids == {"chatcmpl-mine-7"},
        extra_body={"request_id": "mine-7"},
    ),
    chat("parts", said(PROMPT), messages=user([{"type": "text", "text": "a red circle"}])),
    chat("a picture", lambda s: "What color?" in s.texts[0], messages=[image_message()]),
    chat(
        "a picture's tokens",
        lambda s: s.usage.prompt_tokens_details.to_dict()["image_tokens"] == 4,
        messages=[image_message()],
    ),
    chat(
        "a picture, as finely as it is",
        lambda s: s.reasons == {0: "stop"},
        messages=user(
            [{"type": "image_url", "image_url": {"url": data_url(), "detail": "auto"}}, "a red"]
        ),
    ),
    chat(
        "a system message",
        lambda s: s.texts[0].startswith("user\nbe short"),
        messages=[{"role": "system", "content": "be short"}, *user()],
    ),
    chat(
        "turns",
        lambda s: "model\nred" in s.texts[0],
        messages=[*user(), {"role": "assistant", "content": "red"}, *user("and?")],
    ),
    chat(
        "an answer to go on with",
        lambda s: s.texts[0].endswith("it is"),
        messages=[*user(), {"role": "assistant", "content": "it is"}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    ),
    chat(
        "an answer that is repeated",
        lambda s: s.texts[0].startswith("it is red"),
        says=" red",
        messages=[*user(), {"role": "assistant", "content": "it is"}],
        extra_body={
            "continue_final_message": True,
            "add_generation_prompt": False,
            "echo": True,
        },
    ),
    chat(
        "no prompt for an answer",
        said("user\na red circle\n"),
        extra_body={"add_generation_prompt": False},
    ),
    chat("an emoji", said("🔴 rød"), says="🔴 rød"),
    chat("nothing said", said(""), says=""),
    thinking(
        "then an answer",
        lambda s: s.thoughts == {0: "a < b?\n"} and s.texts == {0: "\n\nRed."},
        says="a < b?\n</think>\n\nRed.",
    ),
    thinking(
        "of two choices",
        lambda s: s.thoughts == {0: "so", 1: "so"} and s.texts == {0: "Red", 1: "Red"},
        says="so</think>Red",
        n=2,
    ),
    thinking(
        "not shown",
        lambda s: s.thoughts == {} and s.texts == {0: "Red"},
        says="so</think>Red",
        extra_body={"include_reasoning": False},
    ),
    thinking(
        "cut off", lambda s: s.thoughts == {0: "so </th"} and s.texts == {0: ""}, says="so </th"
    ),
    thinking(
        "then a call",
        lambda s: s.thoughts == {0: "so"} and s.calls == {0: [OSLO]} and s.texts == {0: ""},
        says=f"so</think>{CALL}",
        tools=[WEATHER, TIME],
    ),
    thinking(
        "not where a structure holds",
        lambda s: s.thoughts == {} and s.calls == {0: [OSLO]},
        says='[{"name": "get_weather", "parameters": {"city": "Oslo"}}]',
        tools=[WEATHER, TIME],
        tool_choice="required",
    ),
    with_tools("no call", said("It is sunny."), says="It is sunny."),
    with_tools("a call", lambda s: s.calls == {0: [OSLO]} and s.texts == {0: ""}, says=CALL),
    with_tools("why a call stopped", lambda s: s.reasons == {0: "tool_calls"}, says=CALL),
    with_tools("why no call stopped", lambda s: s.reasons == {0: "stop"}, says="no"),
    with_tools(
        "two calls",
        lambda s: (
            s.calls == {0: [OSLO, ["get_time", "{}"]]}
            and s.texts == {0: "Let me see."}
            and len(set(s.call_ids)) == 2
        ),
        says=CALLS,
    ),
    with_tools(
        "one call at most", lambda s: s.calls == {0: [OSLO]}, says=CALLS, parallel_tool_calls=False
    ),
    with_tools("calls of two choices", lambda s: s.calls == {0: [OSLO], 1: [OSLO]}, says=CALL, n=2),
    with_tools(
        "one of the tools that are allowed",
        lambda s: s.calls == {0: [OSLO]} and s.reasons == {0: "tool_calls"},
        says=f"{NO_TIME}{CALL}{NO_TIME}",
        tool_choice=allowed("auto", WEATHER),
    ),
    with_tools(
        "none of the tools that are allowed",
        lambda s: s.calls == {} and s.reasons == {0: "stop"},
        says=NO_TIME,
        tool_choice=allowed("auto", WEATHER),
    ),
    with_tools(
        "tools that are allowed, and the prompt",
        lambda s: "get_time" in s.texts[0] and "get_weather" not in s.texts[0],
        tool_choice=allowed("auto", TIME),
    ),
    with_tools(
        "a call of an allowed tool that is wanted",
        lambda s: s.calls == {0: [OSLO]} and s.reasons == {0: "tool_calls"},
        says='[{"name": "get_weather", "parameters": {"city": "Oslo"}}]',
        tool_choice=allowed("required", WEATHER),
    ),
    with_tools("no calls wanted", said(CALL), says=CALL, tool_choice="none"),
    with_tools(
        "a call that is wanted",
        lambda s: s.calls == {0: [OSLO]} and s.reasons == {0: "tool_calls"},
        says='[{"name": "get_weather", "parameters": {"city": "Oslo"}}]',
        tool_choice="required",
    ),
    with_tools(
        "a call by name",
        lambda s: s.calls == {0: [OSLO]} and s.reasons == {0: "stop"},
        says='{"city": "Oslo"}',
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    ),
    with_tools(
        "a call that is cut off",
        lambda s: s.reasons == {0: "length"} and s.calls[0][0][0] == "get_weather",
        says=CALL,
        max_tokens=60,
    ),
    with_tools(
        "an answered call",
        lambda s: '<tool_call>{"name": "get_weather"' in s.texts[0] and "tool\nsun" in s.texts[0],
        messages=[*ANSWERED, {"role": "tool", "tool_call_id": "1", "content": "sun"}],
        tool_choice="none",
    ),
    with_tools(
        "a call answered by a picture",
        lambda s: s.usage.prompt_tokens_details.to_dict()["image_tokens"] == 4,
        messages=[*ANSWERED, {**image_message(), "role": "tool", "tool_call_id": "1"}],
    ),
    chat(
        "a template of the request's",
        said("hello a red circle"),
        server="tools",
        extra_body={
            "chat_template": "hello {{ messages[0].content[0].text or messages[0].content }}"
        },
    ),
    chat(
        "an option of the template's",
        lambda s: "style: terse" in s.texts[0],
        server="tools",
        extra_body={"chat_template_kwargs": {"style": "terse"}},
    ),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CHATS, ids=lambda case: case.name)
def test_chat(servers_by_name: dict[str, Server], case: Case, mode: str) -> None:
    server = servers_by_name[case.server]
    server.will_say(case.says)
    seen = look(server, mode, lambda client: client.chat.completions.create, case.fields)
    assert case.check(seen), seen


def text(name: str, check: Callable[[Seen], Any], **fields: Any) -> Case:
    says = fields.pop("says", None)
    return Case(name, {"prompt": "a red circle", "max_tokens": 64, **fields}, check, "plain", says)


IDS = [7, 300, 301]
TEXTS = [
    text("text", said("a red circle")),
    text(
        "several",
        said("a star", "a star", "a square", "a square"),
        prompt=["a star", "a square"],
        n=2,
    ),
    text("token ids", lambda s: s.usage.prompt_tokens == 3, prompt=IDS),
    text("lists of token ids", lambda s: s.usage.prompt_tokens == 6, prompt=[IDS, IDS]),
    text("a limit", lambda s: s.reasons == {0: "length"}, max_tokens=2),
    text("logprobs", lambda s: len(s.logprobs[0]) == 3, logprobs=2, max_tokens=3),
    text("echo", said("a red circle is"), echo=True, says=" is"),
    text("echo of two", said("a is", "b is"), echo=True, says=" is", prompt=["a", "b"]),
    text("echo of ids", lambda s: s.texts[0].endswith(" is"), echo=True, says=" is", prompt=IDS),
    text("echo alone", said("a red circle"), echo=True, max_tokens=0),
    text(
        "what echo alone counts", lambda s: s.usage.completion_tokens == 0, echo=True, max_tokens=0
    ),
    text("a stop string", said("a red "), stop="circle"),
    text("an id", lambda s: s.ids == {"cmpl-mine"}, extra_body={"request_id": "mine"}),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", TEXTS, ids=lambda case: case.name)
def test_completions(servers_by_name: dict[str, Server], case: Case, mode: str) -> None:
    server = servers_by_name[case.server]
    server.will_say(case.says)
    seen = look(server, mode, lambda client: client.completions.create, case.fields)
    assert case.check(seen), seen


NO_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
ERRORS: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str]] = {
    "another model": ({"model": "gpt-4"}, openai.NotFoundError, "model"),
    "a wrong number": ({"temperature": -1}, openai.BadRequestError, "temperature"),
    "no picture": (
        {"messages": user([NO_PICTURE])},
        openai.UnprocessableEntityError,
        "messages[0].content[0].image_url.url",
    ),
}
"""One of each of the client's classes; `test_bad_input.py` has every mistake."""


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("fields", "kind", "param"), ERRORS.values(), ids=ERRORS)
def test_errors(
    servers_by_name: dict[str, Server],
    fields: dict[str, Any],
    kind: type[openai.APIStatusError],
    param: str,
    mode: str,
) -> None:
    server = servers_by_name["plain"]
    body: dict[str, Any] = {"model": "tiny", "messages": user(), **fields}

    async def create() -> None:
        async with server.async_openai() as client:
            await client.chat.completions.create(**body)

    def create_in_mode() -> Any:
        if mode == "async":
            return server.in_loop(create)
        return server.openai().chat.completions.create(**body)

    with pytest.raises(kind) as caught:
        create_in_mode()
    assert caught.value.param == param, caught.value.message
    assert caught.value.request_id


def test_models(servers_by_name: dict[str, Server]) -> None:
    server = servers_by_name["plain"]

    async def list_async() -> list[str]:
        async with server.async_openai() as client:
            return [model.id async for model in client.models.list()]

    client = server.openai()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert server.in_loop(list_async) == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_the_clients_own_accumulator(servers_by_name: dict[str, Server]) -> None:
    server = servers_by_name["tools"]
    server.will_say(CALLS)
    with server.openai().chat.completions.stream(
        model="tiny",
        messages=user(),
        tools=[WEATHER, TIME],  # type: ignore[list-item]
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Oslo"}, {}]


def test_request_ids_go_both_ways(servers_by_name: dict[str, Server]) -> None:
    client = servers_by_name["plain"].openai()
    raw = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=user(),
        extra_headers={"X-Request-Id": "mine-1"},
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().choices[0].message.content
