"""Chat templates of families whose checkpoints may have none: what stands around each message.

All of it is expressions of Jinja, over `message`, and over `part` within a content of parts.
"""


def write_turns(*, start: str, content: str, end: str = "''", answer: str, first: str = "") -> str:
    """Return the template of a conversation, message by message.

    Args:
        start: What stands before a message's content.
        content: The content: `message.content`, or what `write_parts` returns.
        end: What stands behind it.
        answer: What an answer begins with.
        first: A template of what stands before all messages.
    """
    body = content if content.startswith("{%") else f"{{{{- {content} -}}}}"
    return (
        f"{first}{{%- for message in messages -%}}{{{{- {start} -}}}}{body}{{{{- {end} -}}}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- {answer} -}}}}{{%- endif -%}}"
    )


def write_parts(text: str = "part.text", **media: str) -> str:
    """Return the template of a content's parts: `media` are what stands for one, by its type."""
    chosen = "".join(f"'{mark}' if part.type == '{kind}' else " for kind, mark in media.items())
    return f"{{%- for part in message.content -%}}{{{{- {chosen}{text} -}}}}{{%- endfor -%}}"


def write_chatml(content: str, first: str = "") -> str:
    """Return the template of Qwen's turns, and of many others'."""
    return write_turns(
        start=r"'<|im_start|>' + message.role + '\n'",
        content=content,
        end=r"'<|im_end|>\n'",
        answer=r"'<|im_start|>assistant\n'",
        first=first,
    )


GRANITE4_TURNS = write_turns(
    start="'<|start_of_role|>' + message.role + '<|end_of_role|>'",
    content=write_parts(image="<image>"),
    end=r"'<|end_of_text|>\n'",
    answer="'<|start_of_role|>assistant<|end_of_role|>'",
)
"""The template of Granite 4's turns, about images."""
QWEN_SYSTEM = (
    "{%- if messages[0].role != 'system' -%}"
    r"{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' -}}"
    "{%- endif -%}"
)
"""What Qwen's conversations begin with where nobody says otherwise."""
