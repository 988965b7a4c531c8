"""Messages of the role `developer`: a template that does not know it has them as the system's."""

from typing import Any

import pytest

from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.pixtral.processor import CHAT_TEMPLATE as PIXTRAL
from mmjax.processing.chat_turns import QWEN_SYSTEM, write_chatml, write_parts

QWEN = write_chatml(write_parts(), first=QWEN_SYSTEM)
KNOWING = """{% for message in messages %}
{%- if message.role in ['system', 'developer'] %}[{{ message.role }}]{% endif %}
{%- for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"""
MESSAGES: Any = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": "hello"},
]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PIXTRAL, "[INST]be brief\n\nhello[/INST]"),
        (QWEN, "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"),
        (KNOWING, "[developer]be briefhello"),
    ],
)
def test_nothing_is_left_out(input_processor: InputProcessor, source: str, expected: str) -> None:
    template = ChatTemplate(source, input_processor.tokenizer)
    parser = ChatParser.for_model(input_processor)
    prompt = parser.parse(MESSAGES, template=template, add_generation_prompt=False)
    assert prompt.get("prompt") == expected
