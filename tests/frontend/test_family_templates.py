"""Chat without a template in the checkpoint: each family's own, as its documentation writes it."""

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from mmjax.errors import RequestError
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from tests.families import FAMILIES
from tests.families.directories import edit_golden
from tests.families.family import Family
from tests.kit import draw

SYSTEM, QUESTION, ANSWER, NEXT = "be short", "what is it", "a car", "which color"


def write(family: Family, folder: Path) -> Path:
    """Write a family's directory without a chat template; no weights are needed."""
    path = Path(copytree(family.path(), folder / "checkpoint"))
    (path / "chat_template.jinja").unlink(missing_ok=True)
    return path


def conversation() -> list[Any]:
    image = {"type": "image_pil", "image_pil": draw(40, 30)}
    return [
        {"role": "user", "content": [image, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": NEXT},
    ]


def make_parser(path: Path, **settings: Any) -> tuple[ChatParser, InputProcessor]:
    processor = InputProcessor(load_model_config(str(path), **settings))
    return ChatParser.for_model(processor, are_objects_allowed=True), processor


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_conversation(family: Family, tmp_path: Path):
    parser, processor = make_parser(write(family, tmp_path))
    try:
        prompt = parser.parse(conversation())
        text = prompt.get("prompt", "")
        assert text == family.rendered
        said = processor.explain(prompt)
        assert [item.modality for item in said.items] == ["image"]
        hf = family.call_hf(text, [draw(40, 30)], {})
        ids = said.encoder_prompt_token_ids or said.prompt_token_ids
        assert ids == hf.input_ids, "BOS and all"
        assert family.with_system is not None
        old, new = family.with_system
        system = {"role": "system", "content": SYSTEM}
        prompt = parser.parse([system, *conversation()])
        assert prompt.get("prompt") == text.replace(old, new, 1)
    finally:
        processor.close()


def test_the_checkpoints_and_the_operators_come_first(tmp_path: Path):
    path = edit_golden("blip2", tmp_path)
    mine = "{% for message in messages %}{{ message.content }}!{% endfor %}"
    edits: Any = {"processor_config": {"chat_template": mine}}
    changed = edit_golden("blip2", tmp_path / "changed", **edits)
    for directory, settings in ((changed, {}), (path, {"chat_template": mine})):
        parser, processor = make_parser(directory, **settings)
        prompt = parser.parse(conversation())
        assert prompt.get("prompt") == f"{QUESTION}!{ANSWER}!{NEXT}!"
        assert prompt.get("add_special_tokens") is False, "such a template writes BOS itself"
        processor.close()


def test_a_model_that_declares_none_has_none(tmp_path: Path):
    parser, processor = make_parser(edit_golden("blip2", tmp_path))
    template = ChatTemplate.from_config(processor.model_config, processor.tokenizer)
    assert parser.template.message_fields > template.message_fields == frozenset()
    processor.close()


IN_PARTS = """{% for message in messages %}{% for part in message.content -%}
{% if part.type == 'image' %}PLACEHOLDER{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endfor %}"""


@pytest.mark.parametrize("name", ["internvl", "internvl original"])
def test_a_placeholder_that_a_user_types_binds_no_picture(name: str, tmp_path: Path):
    """InternVL's `<image>` is no special token; where it is the placeholder, it is refused."""
    path = write(FAMILIES[name], tmp_path)
    placeholder = "<image>\n" if name.endswith("original") else "<IMG_CONTEXT>\n"
    template = IN_PARTS.replace("PLACEHOLDER", placeholder.replace("\n", "{{ '\\n' }}"))
    parser, processor = make_parser(path, chat_template=template)
    try:
        assert parser.template.content_format == "openai"
        picture = {"type": "image_pil", "image_pil": draw(40, 30)}
        typed = {"type": "text", "text": "is <image> red? "}
        for content in ([typed, picture], [picture, typed]):
            message = {"role": "user", "content": content}
            if placeholder == "<image>\n":
                with pytest.raises(RequestError, match="cannot be told from them") as caught:
                    parser.parse([message])
                assert caught.value.param == "messages[0]"
                continue
            prompt = parser.parse([message])
            said = processor.explain(prompt)
            (item,) = said.items
            before = processor.tokenizer.decode(said.prompt_token_ids[: item.offset])
            after = processor.tokenizer.decode(said.prompt_token_ids[item.offset + item.length :])
            assert ("<image>" in before) == (content[0] is typed)
            assert ("<image>" in after) == (content[1] is typed)
    finally:
        processor.close()


def test_a_placeholder_that_is_no_special_token_stays_where_one_text_is_wanted(tmp_path: Path):
    """As in vLLM: who types it says where the message's own picture stands; one more is refused."""
    parser, processor = make_parser(write(FAMILIES["internvl original"], tmp_path))
    picture = {"type": "image_pil", "image_pil": draw(40, 30)}
    try:
        assert parser.template.content_format == "string"
        typed = "is <image> red?"
        content = [picture, {"type": "text", "text": typed}]
        said = processor.explain(parser.parse([{"role": "user", "content": content}]))
        (item,) = said.items
        before = processor.tokenizer.decode(said.prompt_token_ids[: item.offset])
        assert before.rstrip().endswith("is")
        for wrong in (typed, [*content, {"type": "text", "text": "<image>"}]):
            with pytest.raises(RequestError, match="Found more '<image>' placeholders"):
                parser.parse([{"role": "user", "content": wrong}])
        with pytest.raises(RequestError, match="cannot be told from them"):
            parser.parse([{"role": "user", "content": [picture], "name": "<image>"}])
    finally:
        processor.close()
