"""Content parts to prompts: every form, every limit, every mistake at its place."""

import base64
import io
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from mmjax import MULTIMODAL_REGISTRY
from mmjax.config.engine_config import ModelConfig
from mmjax.errors import RequestError
from mmjax.frontend.media.connector import MediaConnector
from mmjax.frontend.prompt.chat import ChatParser, ControlTokens
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.requests.prompts import PromptDict
from mmjax.frontend.requests.request import GenerateRequest
from mmjax.models.family import FamilyDummyInputs
from mmjax.models.gemma3.processor import (
    Gemma3MultiModalProcessor,
    Gemma3ProcessingInfo,
)
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.media.encoded import PixelRange
from tests.kit import IMAGE_START, draw

PLAIN = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"


def data_url(image: Image.Image | None = None, kind: str = "PNG") -> str:
    buffer = io.BytesIO()
    (image or draw(12, 8)).save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def with_parts(parser: ChatParser, **changes: Any) -> ChatParser:
    return replace(parser, parts=replace(parser.parts, **changes))


def with_media(parser: ChatParser, **settings: Any) -> ChatParser:
    mm = replace(parser.parts.connector.mm, **settings)
    return with_parts(parser, connector=MediaConnector(mm))


@pytest.fixture
def parser(input_processor: InputProcessor, monkeypatch: pytest.MonkeyPatch) -> ChatParser:
    monkeypatch.setitem(input_processor.info.allowed_mm_limits, "image", 3)
    return ChatParser.for_model(input_processor)


@pytest.fixture
def string_parser(parser: ChatParser, input_processor: InputProcessor) -> ChatParser:
    return replace(parser, template=ChatTemplate(PLAIN, input_processor.tokenizer))


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def image_part(**kwargs: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url()}, **kwargs}


def text_of(prompt: PromptDict) -> str:
    return prompt.get("prompt", "")


def images_of(prompt: PromptDict) -> list[Any]:
    return list((prompt.get("multi_modal_data") or {}).get("image", []))


def parse_and_decode(parser: ChatParser, messages: list[Any]) -> list[Image.Image]:
    """Go as far as processing goes with pictures that it has not seen."""
    return [image.decode().media for image in images_of(parser.parse(messages))]


def test_text_alone(parser: ChatParser) -> None:
    prompt = parser.parse([{"role": "user", "content": "red"}])
    assert text_of(prompt) == ("<bos><start_of_turn>user\nred<end_of_turn>\n<start_of_turn>model\n")
    assert prompt.get("add_special_tokens") is False
    assert "multi_modal_data" not in prompt


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": data_url()}},
        {"type": "image_url", "image_url": {"url": data_url(), "detail": "auto"}},
        {"type": "image_url", "image_url": data_url()},
        {"image_url": {"url": data_url()}},
        {"image_url": data_url()},
        {"type": "input_image", "image_url": data_url(), "detail": "auto"},
        {"type": "input_image", "input_image": data_url()},
        {"type": "image_url", "image_url": {"url": data_url(kind="JPEG")}},
        {"type": "image_url", "image_url": {"url": data_url(kind="WEBP")}},
    ],
)
def test_image_parts(part: dict[str, Any], parser: ChatParser) -> None:
    prompt = parser.parse(user("What color?", part))
    assert parse_and_decode(parser, user("What color?", part))[0].size == (12, 8)
    assert f"What color?{IMAGE_START}" in text_of(prompt)
    assert "multi_modal_uuids" not in prompt


def test_text_parts(parser: ChatParser) -> None:
    parts = ["a", {"type": "text", "text": "b"}, {"type": "input_text", "text": "c"}, {"text": "d"}]
    assert "user\nabcd<end_of_turn>" in text_of(parser.parse(user(*parts)))
    nothing = parser.parse(user({"type": "text", "text": None}, "a"))
    assert "user\na<end_of_turn>" in text_of(nothing)


def test_uuids_stand_beside_their_images(parser: ChatParser) -> None:
    prompt = parser.parse(
        user(
            image_part(uuid="a"),
            image_part(),
            {"type": "image_url", "image_url": None, "uuid": "c"},
        )
    )
    assert (prompt.get("multi_modal_uuids") or {}).get("image") == ["a", None, "c"]
    assert images_of(prompt)[2] is None


def test_images_count_over_all_messages(parser: ChatParser) -> None:
    conversation = [
        *user(image_part(), image_part()),
        {"role": "assistant", "content": "red"},
        *user("x", image_part(), image_part()),
    ]
    with pytest.raises(RequestError, match="At most 3") as caught:
        parser.parse(conversation)
    assert caught.value.param == "messages[2].content[2]"


def test_the_limit_is_that_of_any_prompt(
    parser: ChatParser, input_processor: InputProcessor
) -> None:
    with pytest.raises(RequestError) as of_prompt:
        input_processor.info.parse_mm_data({"image": [None] * 4})
    with pytest.raises(RequestError) as of_chat:
        parser.parse(user(*[image_part() for _ in range(4)]))
    assert str(of_prompt.value) in str(of_chat.value)
    assert "Got 4" in str(of_chat.value)


def test_the_limit_comes_before_the_decoder(
    parser: ChatParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[object] = []
    monkeypatch.setattr(
        "mmjax.frontend.media.connector.decode_data_url", lambda *a, **k: decoded.append(a) or b""
    )
    with pytest.raises(RequestError, match="At most 3"):
        parser.parse(user(*[image_part() for _ in range(1000)]))
    assert len(decoded) == 3


# ---- templates that want one text ----------------------------------------------------------------


def test_placeholders_go_before_the_text(string_parser: ChatParser) -> None:
    prompt = string_parser.parse(user("What", image_part(), "color?"))
    assert text_of(prompt) == f"[user] {IMAGE_START}\nWhat\ncolor?"
    prompt = string_parser.parse(user(image_part(), image_part(), "Which?"))
    assert text_of(prompt) == f"[user] {IMAGE_START}\n{IMAGE_START}\nWhich?"


def test_placeholders_that_are_there_stay(string_parser: ChatParser) -> None:
    prompt = string_parser.parse(user(f"Is {IMAGE_START} red?", image_part()))
    assert text_of(prompt) == f"[user] Is {IMAGE_START} red?"


@pytest.mark.parametrize(
    "parts", [(f"{IMAGE_START}{IMAGE_START}", image_part()), (f"a {IMAGE_START}",)]
)
def test_more_placeholders_than_images(string_parser: ChatParser, parts: tuple[Any, ...]) -> None:
    with pytest.raises(RequestError, match="Found more"):
        string_parser.parse(user(*parts))


@pytest.fixture
def registered(
    model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[str, int], str | None]], InputProcessor]:
    """Serve the tiny model by a class with a `get_placeholder_str` of its own."""
    monkeypatch.setattr(MULTIMODAL_REGISTRY, "_registered", {})

    class Info(Gemma3ProcessingInfo):
        @classmethod
        def get_placeholder_str(cls, modality: str, i: int) -> str | None:
            return None

    def make(get_placeholder_str: Callable[[str, int], str | None]) -> InputProcessor:
        body = {"get_placeholder_str": staticmethod(get_placeholder_str)}
        MULTIMODAL_REGISTRY.register_processor(
            Gemma3MultiModalProcessor, info=Info, dummy_inputs=FamilyDummyInputs
        )(type("Elsewhere", (), body))
        return InputProcessor(replace(model_config, architecture="Elsewhere"))

    return make


def image_alone(modality: str, i: int) -> str | None:
    if modality.startswith("image"):
        return IMAGE_START
    raise ValueError("Only image modality is supported")


def test_the_model_class_says_what_stands_for_an_image(
    registered: Callable[..., InputProcessor],
) -> None:
    input_processor = registered(image_alone)
    parser = ChatParser.for_model(input_processor)
    assert parser.placeholder("image", 1) == IMAGE_START
    assert parser.placeholder("audio", 1) is None
    parser = replace(parser, template=ChatTemplate(PLAIN, input_processor.tokenizer))
    prompt = parser.parse(user("What", image_part(), "color?"))
    assert text_of(prompt) == f"[user] {IMAGE_START}\nWhat\ncolor?"
    # Processing asks the same place: it counts placeholders.
    with pytest.raises(RequestError, match="1 `<start_of_image>` placeholder but 0 images"):
        input_processor.prepare(GenerateRequest("1", f"a {IMAGE_START}", SamplingParams()))
    input_processor.close()


def test_a_model_class_that_refuses_every_modality_takes_text(
    registered: Callable[..., InputProcessor],
) -> None:
    def refuse(modality: str, i: int) -> str | None:
        raise ValueError(f"{modality} is not supported")

    input_processor = registered(refuse)
    parser = ChatParser.for_model(input_processor)
    parser = replace(parser, template=ChatTemplate(PLAIN, input_processor.tokenizer))
    assert text_of(parser.parse(user("red"))) == "[user] red"
    # Nothing marks an image, as where the Info has no placeholder.
    assert text_of(parser.parse(user("red", image_part()))) == "[user] red"
    input_processor.close()


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "place", "match"),
    [
        (3, "messages[0].content[0]", "object or a text"),
        ({}, "messages[0].content[0].type", "Missing 'type'"),
        ({"type": "video_url", "video_url": {}}, "messages[0].content[0].type", "not supported"),
        ({"type": 3}, "messages[0].content[0].type", "Invalid 'type'"),
        ({"type": "text", "text": 3}, "messages[0].content[0].text", "must be a text"),
        ({"type": "text", "text": "\ud800"}, "messages[0].content[0].text", "Unicode"),
        ({"type": "text", "text": "a", "x": 1}, "messages[0].content[0].x", "unknown field"),
        (image_part(uuid=""), "messages[0].content[0].uuid", "1 to 128"),
        (image_part(uuid="x" * 129), "messages[0].content[0].uuid", "1 to 128"),
        (image_part(uuid="a\r\nb"), "messages[0].content[0].uuid", "printable"),
        ({"image_url": {"url": data_url(), "uuid": "a"}}, None, "stands beside it"),
        ({"image_url": {"url": data_url(), "detail": "max"}}, None, "detail"),
        ({"type": "text", "text": "a", "detail": "low"}, None, "no effect"),
        ({"type": "text", "text": "a", "image_url": data_url()}, None, "no effect"),
        ({"image_url": {}}, "messages[0].content[0].image_url.url", "is missing; give a URL"),
        ({"image_url": {"url": 3}}, "messages[0].content[0].image_url.url", "is no text but int"),
        ({"image_url": "http://me@example.com/a.png"}, None, "user or password"),
        ({"image_url": "HTTPS://example.com:22/a.png"}, None, "port 22"),
        ({"image_url": "ftp://x"}, None, "another scheme"),
        ({"image_url": "/etc/passwd"}, None, "another scheme"),
        ({"image_url": "data:image/png,abc"}, None, "base64"),
        ({"image_url": "data:image/png;base64"}, None, "','"),
        ({"image_url": "data:image/png;base64,!!!"}, None, "no image"),
        ({"image_url": "data:image/png;base64,AAAA"}, None, "no image"),
        ({"image_url": data_url()[:-40]}, None, "no image"),
        ({"type": "image_pil", "image_pil": "x"}, "messages[0].content[0].type", "LLM.chat"),
    ],
)
def test_bad_parts(part: Any, place: str | None, match: str, parser: ChatParser) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        parse_and_decode(parser, user(part))
    assert caught.value.status == (422 if match == "no image" else 400)
    assert caught.value.param is not None
    if place is not None:
        assert caught.value.param == place
    assert "0x" not in caught.value.message
    assert "<_io" not in caught.value.message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "a"}, "messages[0].role"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ("red", "messages[0]"),
    ],
)
def test_bad_messages(message: Any, param: str, parser: ChatParser) -> None:
    with pytest.raises(RequestError) as caught:
        parser.parse([message])
    assert caught.value.param == param


def test_no_messages(parser: ChatParser) -> None:
    with pytest.raises(RequestError, match="empty"):
        parser.parse([])


def ids_of(prompt: PromptDict) -> list[int]:
    return prompt.get("prompt_token_ids", [])


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_control_tokens_of_every_kind_are_text(
    role: str, parser: ChatParser, input_processor: InputProcessor
) -> None:
    tokenizer = input_processor.tokenizer
    expected = ids_of_turn(input_processor, role, "red")
    for token in tokenizer.all_special_tokens:
        for content in (f"a {token}", [{"type": "text", "text": f"{token}b"}]):
            message = {"role": role, "content": content, "name": token}
            if role == "tool":
                message["tool_call_id"] = token
            prompt = parser.parse([message, {"role": "user", "content": "red"}])
            special = [i for i in ids_of(prompt) if i in tokenizer.all_special_ids]
            assert special == expected
            assert token in tokenizer.decode(ids_of(prompt))
            assert "multi_modal_data" not in prompt


def ids_of_turn(input_processor: InputProcessor, role: str, text: str) -> list[int]:
    """Return the special tokens of two turns, as the template writes them."""
    parser = ChatParser.for_model(input_processor)
    turns = [
        {"role": role, "content": text, "tool_call_id": "1"},
        {"role": "user", "content": text},
    ]
    ids = input_processor.tokenizer.encode(text_of(parser.parse(turns)), add_special_tokens=False)
    return [i for i in ids if i in input_processor.tokenizer.all_special_ids]


def test_a_placeholder_that_somebody_wrote_binds_no_image(
    parser: ChatParser, input_processor: InputProcessor
) -> None:
    parts = [f"is {IMAGE_START} a word?", image_part(), IMAGE_START]
    prompt = parser.parse(user(*parts))
    request = input_processor.prepare(GenerateRequest("1", prompt, SamplingParams()))
    (place,) = request.prepared.mm_placeholders["image"]
    before = input_processor.tokenizer.decode(request.prompt_token_ids[: place.offset])
    behind = input_processor.tokenizer.decode(
        request.prompt_token_ids[place.offset + place.length :]
    )
    assert f"is {IMAGE_START} a word?" in before
    assert IMAGE_START in behind
    plain = input_processor.prepare(
        GenerateRequest("2", parser.parse(user("is it?", image_part())), SamplingParams())
    )
    assert request.num_embeds == plain.num_embeds


def test_control_tokens_in_tools_and_calls_are_text(
    string_parser: ChatParser, input_processor: InputProcessor
) -> None:
    template = ChatTemplate(
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson }}"
        "{% endfor %}",
        input_processor.tokenizer,
    )
    tooled = replace(string_parser, template=template, max_chars=10**6)
    for token in input_processor.tokenizer.all_special_tokens:
        schema = {"type": "object", "properties": {token: {"type": "string", "enum": [token]}}}
        tool = {"name": "f", "description": token, "parameters": schema}
        call = {"name": "f", "arguments": {token: token}}
        messages = [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": token, "type": "function", "function": call}],
            }
        ]
        prompt = tooled.parse(messages, tools=[{"type": "function", "function": tool}])
        assert not set(ids_of(prompt)) & set(input_processor.tokenizer.all_special_ids)
        assert input_processor.tokenizer.decode(ids_of(prompt)).count(token) == 6


def test_control_tokens_are_refused_where_prompts_must_be_text(
    parser: ChatParser, input_processor: InputProcessor
) -> None:
    textual = replace(parser, tokenize_pieces=None)
    for token in input_processor.tokenizer.all_special_tokens:
        with pytest.raises(RequestError) as caught:
            textual.parse(user(f"a {token}"))
        assert token in caught.value.message


def test_placeholders_may_stand_where_the_images_stood(string_parser: ChatParser) -> None:
    parser = replace(string_parser, interleaves=True)
    prompt = parser.parse(user("Is", image_part(), "or", image_part(), "red?"))
    assert text_of(prompt) == f"[user] Is\n{IMAGE_START}\nor\n{IMAGE_START}\nred?"
    with pytest.raises(RequestError, match="puts placeholders"):
        parser.parse(user(f"Is {IMAGE_START}", image_part()))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"messages": []}, "a field of its own"),
        ({"tokenize": True}, "a field of its own"),
        ({"stile": "terse"}, "asks for `style`"),
    ],
)
def test_options_that_a_template_does_not_ask_for(
    string_parser: ChatParser, input_processor: InputProcessor, options: Any, match: str
) -> None:
    template = ChatTemplate("{{ style }}{{ messages[0].content }}", input_processor.tokenizer)
    parser = replace(string_parser, template=template)
    assert text_of(parser.parse(user("a"), template_kwargs={"style": "terse"})) == "tersea"
    with pytest.raises(RequestError, match=match):
        parser.parse(user("a"), template_kwargs=options)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"function": {"name": "f", "arguments": "{"}}, "function.arguments"),
        ({"function": {"name": "f", "arguments": "[1]"}}, "function.arguments"),
        ({"function": {"name": "f", "arguments": "[" * 10000}}, "function.arguments"),
        ({"function": {"name": "", "arguments": "{}"}}, "function.name"),
        ({"function": {"name": "f g", "arguments": "{}"}}, "function.name"),
        ({"function": {"name": "f", "arguments": "{}", "x": 1}}, "function.x"),
        ({"function": None}, "function"),
        ({"type": "custom"}, "type"),
        ({"id": 3}, "id"),
    ],
)
def test_bad_calls(
    string_parser: ChatParser, input_processor: InputProcessor, changes: Any, param: str
) -> None:
    source = "{% for m in messages %}{{ m.tool_calls }}{% endfor %}"
    parser = replace(string_parser, template=ChatTemplate(source, input_processor.tokenizer))
    message = {"role": "assistant", "tool_calls": [{**CALL, **changes}]}
    with pytest.raises(RequestError) as caught:
        parser.parse([message])
    assert caught.value.param == f"messages[0].tool_calls[0].{param}"


@pytest.mark.parametrize("seam", ["", " ", "\n"])
def test_control_tokens_in_pieces_are_refused(parser: ChatParser, seam: str) -> None:
    with pytest.raises(RequestError, match="<start_of_turn>"):
        parser.parse(user(f"a <start_of{seam}", f"{seam}_turn>system"))


@pytest.mark.parametrize(
    ("pixel_range", "size"),
    [(PixelRange(most=24), (6, 4)), (PixelRange(least=384), (24, 16)), (PixelRange(), (12, 8))],
)
def test_detail_scales_an_image(
    parser: ChatParser,
    monkeypatch: pytest.MonkeyPatch,
    pixel_range: PixelRange,
    size: tuple[int, int],
) -> None:
    monkeypatch.setattr(parser.parts.info, "get_detail_range", lambda detail: pixel_range)
    for part in (
        {"image_url": {"url": data_url(), "detail": "low"}},
        {"type": "input_image", "image_url": data_url(), "detail": "low"},
    ):
        (image,) = parse_and_decode(parser, user(part))
        assert image.size == size
    (image,) = parse_and_decode(parser, user({"image_url": {"url": data_url(), "detail": "auto"}}))
    assert image.size == (12, 8)


@pytest.mark.parametrize("detail", ["auto", "low", "high", "original"])
def test_any_detail_holds_where_a_model_has_one_size(parser: ChatParser, detail: str) -> None:
    for part in (
        {"image_url": {"url": data_url(), "detail": detail}},
        {"type": "input_image", "image_url": data_url(), "detail": detail},
    ):
        (image,) = parse_and_decode(parser, user(part))
        assert image.size == (12, 8)


def test_too_large_an_image(parser: ChatParser) -> None:
    small = with_media(parser, max_image_pixels=95)
    with pytest.raises(RequestError, match="12x8") as caught:
        parse_and_decode(small, user(image_part()))
    assert caught.value.param == "messages[0].content[0].image_url.url"
    short = with_media(parser, max_image_bytes=10)
    with pytest.raises(RequestError, match="at most 10") as caught:
        short.parse(user(image_part()))
    assert caught.value.param == "messages[0].content[0].image_url.url"


def test_a_picture_is_decoded_when_it_is_used_and_once(
    parser: ChatParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = parser.parse(user("a", image_part()))
    (image,) = images_of(prompt)
    opened: list[object] = []
    open_image = Image.open
    monkeypatch.setattr(Image, "open", lambda *a, **k: opened.append(a) or open_image(*a, **k))
    assert image.decode() is image.decode()
    assert len(opened) == 1


def test_objects_where_they_are_allowed(parser: ChatParser) -> None:
    offline = with_parts(parser, are_objects_allowed=True)
    image = draw(5, 5)
    assert images_of(offline.parse(user({"type": "image_pil", "image_pil": image}))) == [image]
    with pytest.raises(RequestError, match="missing"):
        offline.parse(user({"type": "image_pil"}))
    known = offline.parse(user({"type": "image_pil", "image_pil": None, "uuid": "cat"}))
    assert images_of(known) == [None]
    assert known.get("multi_modal_uuids") == {"image": ["cat"]}


def test_continue_final_message(parser: ChatParser) -> None:
    conversation = [*user("What?"), {"role": "assistant", "content": "A red"}]
    prompt = parser.parse(conversation, add_generation_prompt=False, continue_final_message=True)
    assert text_of(prompt).endswith("A red")


def test_long_texts_are_refused_before_they_are_read(parser: ChatParser) -> None:
    messages = [
        {"role": "user", "content": "a" * 10_000},
        {"role": "user", "content": "a" * 10_000},
    ]
    with pytest.raises(RequestError, match="16384 characters") as caught:
        parser.parse(messages)
    assert caught.value.param == "messages[1]"


def test_control_tokens_are_found_fast() -> None:
    tokens = ControlTokens([f"<unused{i}>" for i in range(6000)])
    start = time.monotonic()
    assert tokens.find("<" * 200_000) is None
    assert tokens.find("a" * 2_000_000 + "<unused5999>") == "<unused5999>"
    assert time.monotonic() - start < 5.0
    assert ControlTokens([]).find("<a>") is None
    assert ControlTokens(["[a]", "<b>"]).find("x[a]<b>", allowed="[a]") == "<b>"


# ---- what an answer had, sent back ---------------------------------------------------------------

THINKING = (
    "{% for m in messages %}[{{ m.role }}{% if m.get('reasoning_content') %}"
    " ({{ m.reasoning_content }}){% endif %}] {{ m.content }}{% endfor %}"
)


def answered(**fields: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "red?"},
        {"role": "assistant", "content": "yes", **fields},
        {"role": "user", "content": "sure?"},
    ]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_reaches_a_template_that_asks_for_it(
    parser: ChatParser, input_processor: InputProcessor, name: str
) -> None:
    thinking = replace(parser, template=ChatTemplate(THINKING, input_processor.tokenizer))
    text = text_of(thinking.parse(answered(**{name: "it looks so"})))
    assert text == "[user] red?[assistant (it looks so)] yes[user] sure?"
    assert ids_of(thinking.parse(answered(**{name: IMAGE_START})))
    with pytest.raises(RequestError, match="`reasoning` and `reasoning_content`, and they differ"):
        thinking.parse(answered(reasoning="a", reasoning_content="b"))
    with pytest.raises(RequestError, match="must be a text") as caught:
        thinking.parse(answered(**{name: 5}))
    assert caught.value.param == f"messages[1].{name}"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "refusal"])
def test_what_the_template_has_no_place_for_is_refused_by_name(
    parser: ChatParser, name: str
) -> None:
    plain = text_of(parser.parse(answered()))
    for nothing in (None, ""):
        assert text_of(parser.parse(answered(**{name: nothing}))) == plain
    with pytest.raises(RequestError, match="no place for it; leave it out, or put its") as caught:
        parser.parse(answered(**{name: "I cannot"}))
    assert caught.value.param == f"messages[1].{name}"


def test_fields_that_nothing_reads_are_refused_by_name(parser: ChatParser) -> None:
    empty = {"tool_calls": [], "audio": None, "annotations": [], "function_call": None}
    assert text_of(parser.parse(answered(**empty))) == text_of(parser.parse(answered()))
    with pytest.raises(RequestError, match="sentiment` has no effect") as caught:
        parser.parse(answered(sentiment=["x"]))
    assert caught.value.param == "messages[1].sentiment"
    with pytest.raises(RequestError, match="no place for it") as caught:
        parser.parse(answered(tool_calls=[CALL]))
    assert caught.value.param == "messages[1].tool_calls"
