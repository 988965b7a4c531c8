"""Conversations in the original's formats, against its own way of writing them out."""

from collections.abc import Sequence
from typing import Any

import pytest

from mmjax.errors import RequestError
from mmjax.frontend.prompt.chat_template import ChatTemplate
from tests.processing.test_internvl import make_original

INTERNVL2 = (
    "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, "
    "是一个有用无害的人工智能助手。"
)
INTERNVL2_5 = (
    "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位"
    "联合开发的多模态大语言模型。"
)
GPT_OSS = (
    "You are InternVL, a large language model trained by Shanghai AI Laboratory.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2025-08-06\n\nReasoning: low\n\n"
    "# Valid channels: final. Channel must be included for every message."
)
CHANNEL = "<|channel|>final<|message|>"
"""What every answer begins with; the original lets the model write it."""
CHAT_ML = ("<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n")
FORMATS: dict[str | None, tuple[tuple[str, str, str], str, str]] = {
    "Hermes-2": (CHAT_ML, "<|im_end|>", INTERNVL2),
    "internlm2-chat": (CHAT_ML, "<|im_end|>", INTERNVL2),
    "phi3-chat": (("<|system|>\n", "<|user|>\n", "<|assistant|>\n"), "<|end|>", INTERNVL2),
    "internvl2_5": (CHAT_ML, "<|im_end|>\n", INTERNVL2_5),
    "internvl3_5_gpt_oss": (
        (
            "<|start|>system<|message|>",
            "<|start|>user<|message|>",
            f"<|start|>assistant{CHANNEL}",
        ),
        "<|end|>",
        GPT_OSS,
    ),
}
"""By `template`: starts of system, user and assistant; separator; system message."""


def write_as_original(
    name: str, turns: Sequence[tuple[str, str | None]], system: str | None
) -> str:
    """Return what `Conversation.get_prompt` of the style MPT gives; no text: the answer's turn."""
    (start, user, assistant), separator, default = FORMATS[name]
    text = start + (default if system is None else system) + separator
    for role, message in turns:
        text += {"user": user, "assistant": assistant}[role]
        text += "" if message is None else message + separator
    return text


def template_of(name: str | None) -> ChatTemplate:
    processor = make_original(**({} if name is None else {"template": name}))
    return ChatTemplate(processor.info.chat_template, processor.info.get_tokenizer())


def as_messages(
    turns: Sequence[tuple[str, str | None]], system: str | None
) -> list[dict[str, Any]]:
    messages = [{"role": role, "content": text} for role, text in turns if text is not None]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("system", [None, "Be \"short\".\n{{ '你' }}"])
def test_prompts_are_the_originals(name: str, system: str | None):
    template = template_of(name)
    assert template.content_format == "string"
    asked: list[tuple[str, str | None]] = [("user", "<image>\nWhat 'is' it?"), ("assistant", None)]
    again = [asked[0], ("assistant", 'A "cat".'), ("user", "Where?"), ("assistant", None)]
    for turns in (asked, again):
        found = template.render(as_messages(turns, system))
        assert found == write_as_original(name, turns, system)


def test_an_answer_that_is_there_gets_no_further_turn():
    turns = [("user", "What?"), ("assistant", "A cat.")]
    found = template_of("internvl2_5").render(as_messages(turns, None), add_generation_prompt=False)
    assert found == write_as_original("internvl2_5", turns, None)


@pytest.mark.parametrize("name", [None, "Hermes-2", "internlm2-chat", "internvl2_5"])
def test_answers_end_with_the_separator(name: str | None):
    """As in the original's `chat`, whatever the checkpoint's files name as EOS."""
    processor = make_original(**({} if name is None else {"template": name}))
    end = processor.info.get_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert list(processor.info.get_ending_token_ids()) == [end]


@pytest.mark.parametrize("name", ["phi3-chat", "vicuna_v1.1"])
def test_a_separator_that_is_no_token_ends_nothing(name: str):
    assert not make_original(template=name).info.get_ending_token_ids()


def test_a_config_without_a_format_gets_turns_alone():
    found = template_of(None).render([{"role": "user", "content": "What?"}])
    assert found == "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"


def test_roles_and_formats_that_are_not_known():
    with pytest.raises(RequestError, match="the role `tool` is unknown to InternVL"):
        template_of("internvl2_5").render([{"role": "tool", "content": "5"}])
    with pytest.raises(RequestError, match="no chat template"):
        template_of("vicuna_v1.1").render([{"role": "user", "content": "What?"}])
