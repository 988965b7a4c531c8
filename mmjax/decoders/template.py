"""Render a chat template that a request brought: in a process of its own, with jinja2 alone.

No sandbox of Python's bounds time or memory: a loop, or `'a' * 10**9`, ends with the process.
"""

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class _TooLongError(Exception):
    """The template wrote more than it may."""


class GenerationTag(jinja2.ext.Extension):
    """HF's `{% generation %}` tag, which is replaced by its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        """Return the body between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_job(data: bytes) -> bytes:
    """Return `{"text": ...}`, or what is wrong as `{"error": ...}`; both sides are JSON."""
    return json.dumps(_answer(json.loads(data))).encode()


def _answer(job: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": _render(job)}
    except _TooLongError:
        return {"error": "it writes too long a text"}
    except (MemoryError, OverflowError):
        return {"error": "it needs too much memory"}
    except jinja2.TemplateError as error:
        is_own = type(error) is jinja2.TemplateError and error.message
        return {"error": str(error.message) if is_own else "it is no valid template"}
    except Exception:  # a template's code may raise anything
        return {"error": "it cannot render these messages"}


def _render(job: dict[str, Any]) -> str:
    """Return the text of a template, in the environment that transformers gives to it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    known: dict[str, Any] = environment.globals
    known |= {"raise_exception": _refuse, "strftime_now": _now}
    for name in ("lipsum", "cycler", "joiner"):
        known.pop(name, None)
    template = environment.from_string(job["source"])
    messages = job["variables"]["messages"]
    if job["continue_final_message"]:
        _mark_end(messages[-1])
    pieces: list[str] = []
    num_chars = 0
    for piece in template.generate(**job["variables"]):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > job["max_chars"]:
            raise _TooLongError
    text = "".join(pieces)
    return _cut_at_mark(text) if job["continue_final_message"] else text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _mark_end(message: dict[str, Any]) -> None:
    """Mark where the final message ends, as transformers does."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_MARK
        return
    texts = [part for part in content or () if "text" in part]
    if not texts:
        _refuse("the final message has no text to continue")
    texts[-1]["text"] += _CONTINUE_MARK


def _cut_at_mark(text: str) -> str:
    place = text.rfind(_CONTINUE_MARK.strip())
    if place < 0:
        _refuse("the final message is not in the text, and cannot be continued")
    is_kept_whole = text[place:].startswith(_CONTINUE_MARK)
    return text[:place] if is_kept_whole else text[:place].rstrip()
