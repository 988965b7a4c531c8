"""Conversation formats of the original layout, by the key `template` of its config.json.

The original keeps them in code (`conversation.py`, separator style MPT), not in a Jinja template.
BOS is left to the tokenizer, as there: InternLM2's writes one, Qwen2's none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

_SYSTEM_2 = (
    "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, "
    "是一个有用无害的人工智能助手。"
)
_SYSTEM_2_5 = (
    "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位"
    "联合开发的多模态大语言模型。"
)

_SYSTEM_GPT_OSS = (
    "You are InternVL, a large language model trained by Shanghai AI Laboratory.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2025-08-06\n\nReasoning: low\n\n"
    "# Valid channels: final. Channel must be included for every message."
)

_SOURCE = """\
{%- set starts = {'system': SYSTEM, 'user': USER, 'assistant': ASSISTANT} -%}
{%- if messages[0].role != 'system' and DEFAULT -%}
    {{- SYSTEM + DEFAULT + END -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role not in starts -%}
        {{- raise_exception('the role `' + message.role + '` is unknown to InternVL') -}}
    {%- endif -%}
    {{- starts[message.role] + message.content + END -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- ASSISTANT -}}
{%- endif -%}
"""
"""Names in capitals stand for the fields of `_Format`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """What stands before and behind the messages of each role."""

    system: str = "<|im_start|>system\n"
    user: str = "<|im_start|>user\n"
    assistant: str = "<|im_start|>assistant\n"
    end: str
    default: str
    """The system message of a conversation that begins with none; empty: none."""

    def to_jinja(self) -> str:
        """Return the format as a chat template over messages whose content is text."""
        source = _SOURCE
        for field in fields(self):
            literal = json.dumps(getattr(self, field.name), ensure_ascii=False)
            source = source.replace(field.name.upper(), literal)
        return source


_FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "Hermes-2": _Format(end="<|im_end|>", default=_SYSTEM_2),
        "internlm2-chat": _Format(end="<|im_end|>", default=_SYSTEM_2),
        "phi3-chat": _Format(
            system="<|system|>\n",
            user="<|user|>\n",
            assistant="<|assistant|>\n",
            end="<|end|>",
            default=_SYSTEM_2,
        ),
        "internvl2_5": _Format(end="<|im_end|>\n", default=_SYSTEM_2_5),
        "internvl3_5_gpt_oss": _Format(
            system="<|start|>system<|message|>",
            user="<|start|>user<|message|>",
            # NOTE: the original lets the model write the channel, of which its system message
            # allows this one alone: here an answer is its text and no more.
            assistant="<|start|>assistant<|channel|>final<|message|>",
            end="<|end|>",
            default=_SYSTEM_GPT_OSS,
        ),
    }
)
_PLAIN = _Format(end="<|im_end|>\n", default="")
"""The format where config.json names none."""


def find_chat_template(name: str | None) -> str | None:
    """Return the Jinja source of a format by its name; None: it is not known."""
    if name is None:
        return _PLAIN.to_jinja()
    known = _FORMATS.get(name)
    return None if known is None else known.to_jinja()
