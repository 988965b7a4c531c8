"""How templates are found and read, and what they may say."""

import json
from pathlib import Path
from typing import Any

import pytest

from mmjax.config.engine_config import ModelConfig
from mmjax.errors import ConfigError, RequestValueError
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.input_processor import InputProcessor
from tests.kit import GEMMA3_CHAT_TEMPLATE

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PLAIN, "string"),
        ("{{ messages[0]['content'] }}", "string"),
        ("{% for x in documents %}{{ x }}{% endfor %}" + PLAIN, "string"),
        ("{% for message in messages %}{% for", "string"),
        (GEMMA3_CHAT_TEMPLATE, "openai"),
        (
            "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% for p in m['content'] | list %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages[1:] %}{% set c = m.get('content') %}"
            "{% for p in c %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% set rest = messages[1:] %}{% for m in rest | reverse %}"
            "{% for p in m.content if p.type == 'text' %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ m.role }}{% endfor %}",
            "string",
        ),
        ("{% set content = messages[0].content %}{% for p in content %}{% endfor %}", "openai"),
        (
            "{% set ns = namespace(c=1) %}{% for m in messages %}{% set ns.c = m.content %}"
            "{% for p in ns.c %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% generation %}{% for p in m.content %}{% endfor %}"
            "{% endgeneration %}{% endfor %}",
            "openai",
        ),
    ],
)
def test_content_format_is_read_from_the_syntax_tree(source: str, expected: str) -> None:
    assert ChatTemplate(source, None).content_format == expected


def messages(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": role.upper()} for role in roles]


def test_render(input_processor: InputProcessor) -> None:
    template = ChatTemplate(PLAIN, input_processor.tokenizer)
    assert template.render(messages("user", "assistant")) == "user: USER\nassistant: ASSISTANT\n"


def test_a_refusal_of_the_template_is_shown(input_processor: InputProcessor) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    template = ChatTemplate(source, input_processor.tokenizer)
    with pytest.raises(RequestValueError, match="roles must alternate") as caught:
        template.render(messages("user"))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ undefined_thing.x }}",
        "{{ 1 / 0 }}",
        "{% for",
        "{{ messages[0].content | no_such_filter }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_other_failures_tell_nothing(source: str, input_processor: InputProcessor) -> None:
    template = ChatTemplate(source, input_processor.tokenizer)
    with pytest.raises(RequestValueError) as caught:
        template.render(messages("user"))
    assert "__" not in caught.value.message
    assert "/etc" not in caught.value.message


def test_no_template(input_processor: InputProcessor) -> None:
    with pytest.raises(RequestValueError, match="no chat template"):
        ChatTemplate(None, input_processor.tokenizer).render(messages("user"))


class Silent:
    """A tokenizer that knows no template."""

    chat_template = None


def config_of(path: Path, chat_template: str | None = None) -> ModelConfig:
    return ModelConfig(
        model="x",
        path=path,
        hf_config=None,
        architecture="X",
        max_model_len=8,
        chat_template=chat_template,
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", GEMMA3_CHAT_TEMPLATE),
        ("chat_template.json", json.dumps({"chat_template": GEMMA3_CHAT_TEMPLATE})),
        ("chat_template.json", json.dumps({"chat_template": {"default": GEMMA3_CHAT_TEMPLATE}})),
    ],
)
def test_templates_beside_the_processor(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert ChatTemplate.from_config(config_of(tmp_path), Silent()).content_format == "openai"


@pytest.mark.parametrize("as_file", [True, False])
def test_the_operators_template_wins(
    as_file: bool, tmp_path: Path, input_processor: InputProcessor
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(PLAIN)
    setting: Any = str(file) if as_file else PLAIN
    config = config_of(tmp_path, setting)
    template = ChatTemplate.from_config(config, input_processor.tokenizer)
    assert template.render(messages("user")) == "user: USER\n"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        ChatTemplate.from_config(config_of(tmp_path, "no/such/file"), Silent())


def test_the_names_that_a_template_asks_for(input_processor: InputProcessor) -> None:
    source = (
        "{% for m in messages %}{{ m.a }}{{ m['b'] }}{{ m.get('c', '') }}{{ 'd' }}"
        "{% if m.e is defined %}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source, input_processor.tokenizer).message_fields == {*"abce", "get"}
    for nothing in (None, "{% if %}"):
        assert ChatTemplate(nothing, input_processor.tokenizer).message_fields == frozenset()
