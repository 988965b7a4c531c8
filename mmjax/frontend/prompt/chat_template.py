"""The model's chat template: its source, its content format, and rendering."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from mmjax.config.engine_config import ModelConfig
from mmjax.errors import ConfigError, RequestValueError
from mmjax.frontend.prompt.template_syntax import (
    ContentFormat,
    detect_content_format,
    find_member_names,
    find_variables,
)


class ChatTemplate:
    """One chat template with its content format."""

    def __init__(
        self,
        source: str | None,
        tokenizer: Any,
        *,
        add_special_tokens: bool = False,
        content_format: ContentFormat | None = None,
    ) -> None:
        """`content_format` None: detected."""
        self.source = source
        self.tokenizer = tokenizer
        self.content_format: ContentFormat = content_format or detect_content_format(source or "")
        self.message_fields = find_member_names(source or "")
        """All member names in the template: other fields of a message have no effect."""
        self.variables = find_variables(source or "")
        """What the template expects to be given: `messages`, `tools`, its own options."""
        self.add_special_tokens = add_special_tokens
        """Whether the tokenizer adds BOS to what it renders; else the template writes it."""

    @staticmethod
    def from_config(
        model_config: ModelConfig, tokenizer: Any, *, family_source: str | None = None
    ) -> "ChatTemplate":
        """Return the operator's template, else the checkpoint's, else `family_source`.

        The checkpoint's is the tokenizer's, or in a file of HF's processors.
        """
        source = _read_operators(model_config.chat_template)
        if source is None:
            source = _default_of(tokenizer.chat_template)
        source = source or _read_directory(model_config.path)
        chosen = model_config.chat_template_content_format
        content_format = None if chosen == "auto" else chosen
        if source is None and family_source is not None:
            return ChatTemplate(
                family_source, tokenizer, add_special_tokens=True, content_format=content_format
            )
        return ChatTemplate(source, tokenizer, content_format=content_format)

    def with_source(self, source: str) -> "ChatTemplate":
        """Return another template for the same tokenizer."""
        return ChatTemplate(source, self.tokenizer)

    def render(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text; `options` are the template's own variables."""
        if self.source is None:
            raise RequestValueError(
                "this model has no chat template; use /v1/completions, or start the server with "
                "`--chat-template`",
                param="messages",
            )
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in conversation],
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=None if tools is None else [dict(tool) for tool in tools],
                **(options or {}),
            )
        except jinja2.TemplateError as error:
            raise RequestValueError(
                f"the chat template refuses these messages: {_reason(error)}", param="messages"
            ) from error
        except Exception as error:  # a template's code may raise anything
            raise RequestValueError(
                "the chat template cannot render these messages; do their roles alternate, "
                "beginning with `user`?",
                param="messages",
            ) from error


def _reason(error: jinja2.TemplateError) -> str:
    # Only the template's own messages (raise_exception); other errors may show internals.
    if type(error) is jinja2.TemplateError and error.message:
        return error.message
    return "it failed; check the roles and the content of the messages"


# ---- sources -----------------------------------------------------------------------------------


def _read_operators(chat_template: str | None) -> str | None:
    """Return the template of the operator's setting: a file's path, or the template."""
    if chat_template is None:
        return None
    if any(mark in chat_template for mark in "{\n"):
        return chat_template
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"`chat_template` is {chat_template!r}: no file that can be read, and no template "
            "either; give one of the two"
        ) from error


def _default_of(template: Any) -> str | None:
    if isinstance(template, Mapping):
        return template.get("default")
    return template


def _read_directory(path: Path) -> str | None:
    """Return the template of a checkpoint directory, from the files of HF's processors."""
    jinja_file = path / "chat_template.jinja"
    if jinja_file.is_file():
        return jinja_file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "processor_config.json"):
        json_file = path / name
        if json_file.is_file():
            settings = json.loads(json_file.read_text(encoding="utf-8"))
            source = _default_of(settings.get("chat_template"))
            if source is not None:
                return source
    return None
