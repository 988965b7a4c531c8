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
from tests.kit import draw
from tests.models.directories import write_internvl_original, write_qwen_vl
from tests.processing.families import FAMILIES, gemma3
from tests.processing.families.family import edit_golden
from tests.processing.families.llava import write_pixtral

SYSTEM, QUESTION, ANSWER, NEXT = "be short", "what is it", "a car", "which color"
CHATML = (
    "<|im_start|>user\n{image}what is it<|im_end|>\n"
    "<|im_start|>assistant\na car<|im_end|>\n"
    "<|im_start|>user\nwhich color<|im_end|>\n"
    "<|im_start|>assistant\n"
)
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
RENDERED = {
    "blip2": "Question: what is it Answer: a car Question: which color Answer:",
    "chameleon": "<image>\nwhat is it<reserved08706>a car<reserved08706>which color",
    "deepseek_vl2": (
        "<|User|>: <image>\nwhat is it\n\n<|Assistant|>:a car<｜end▁of▁sentence｜>"
        "<|User|>: which color\n\n<|Assistant|>:"
    ),
    "florence2": "which color",
    "fuyu": "what is it\na car\nwhich color\n",
    "gemma3": (
        "<start_of_turn>user\n<start_of_image>what is it<end_of_turn>\n"
        "<start_of_turn>model\na car<end_of_turn>\n"
        "<start_of_turn>user\nwhich color<end_of_turn>\n"
        "<start_of_turn>model\n"
    ),
    "internvl": CHATML.format(image="<IMG_CONTEXT>\n"),
    "internvl, original": CHATML.format(image="<image>\n"),
    "llava": "USER: <image>\nwhat is it ASSISTANT: a car</s>USER: which color ASSISTANT:",
    "molmo": "User: what is it Assistant: a car User: which color Assistant:",
    "pixtral": "[INST][IMG]what is it[/INST]a car</s>[INST]which color[/INST]",
    "qwen_vl": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        + CHATML.format(image="Picture 1: <img></img>\n")
    ),
    "qwen2_vl": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + CHATML.format(image=VISION)
    ),
}
WITH_SYSTEM = {
    "blip2": ("Question: what", "be short Question: what"),
    "chameleon": ("<image>", "be short<reserved08706><image>"),
    "deepseek_vl2": ("", "be short\n\n"),
    "florence2": ("", ""),
    "fuyu": ("what", "be short\nwhat"),
    "gemma3": ("user\n<start_of_image>", "user\nbe short\n\n<start_of_image>"),
    "internvl": ("", "<|im_start|>system\nbe short<|im_end|>\n"),
    "internvl, original": ("", "<|im_start|>system\nbe short<|im_end|>\n"),
    "llava": ("USER: <", "be short USER: <"),
    "molmo": ("User: what", "User: be short\n\nwhat"),
    "pixtral": ("[INST]which", "[INST]be short\n\nwhich"),
    "qwen_vl": ("You are a helpful assistant.", "be short"),
    "qwen2_vl": ("You are a helpful assistant.", "be short"),
}
"""What of the above a system's message changes: this, and to what."""


def write(name: str, folder: Path) -> Path:
    """Write a family's directory without a chat template; no weights are needed."""
    if name == "internvl, original":
        return write_internvl_original(folder)
    if name == "qwen_vl":
        return write_qwen_vl(folder)
    if name == "gemma3":
        path = Path(copytree(gemma3.directory(), folder / name))
    else:
        path = write_pixtral(folder) if name == "pixtral" else edit_golden(name, folder)
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


@pytest.mark.parametrize("name", RENDERED)
def test_a_conversation(name: str, tmp_path: Path):
    parser, processor = make_parser(write(name, tmp_path))
    try:
        prompt = parser.parse(conversation())
        text = prompt.get("prompt", "")
        assert text == RENDERED[name]
        said = processor.explain(prompt)
        assert [item.modality for item in said.items] == ["image"]
        if name in FAMILIES:
            hf = FAMILIES[name].call_hf(text, [draw(40, 30)], {})
            ids = said.encoder_prompt_token_ids or said.prompt_token_ids
            assert ids == hf.input_ids, "BOS and all"
        old, new = WITH_SYSTEM[name]
        system = {"role": "system", "content": SYSTEM}
        prompt = parser.parse([system, *conversation()])
        assert prompt.get("prompt") == text.replace(old, new, 1)
    finally:
        processor.close()


def test_every_family_has_a_case():
    assert RENDERED.keys() == WITH_SYSTEM.keys() > FAMILIES.keys()


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


@pytest.mark.parametrize("name", ["internvl", "internvl, original"])
def test_a_placeholder_that_a_user_types_binds_no_picture(name: str, tmp_path: Path):
    """InternVL's `<image>` is no special token; where it is the placeholder, it is refused."""
    path = write(name, tmp_path)
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
    parser, processor = make_parser(write("internvl, original", tmp_path))
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
