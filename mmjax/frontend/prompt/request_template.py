"""A chat template that came with a request: rendered in a process that can be killed.

No sandbox of Python's bounds time or memory: a loop, or `'a' * 10**9`, ends with the process.
"""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mmjax
from mmjax.errors import RequestValueError
from mmjax.frontend.prompt.chat_template import ChatTemplate

MAX_SOURCE_CHARS = 2**16

_MAX_BYTES = 384 * 2**20
"""Of the process's memory."""

_WORKER = "mmjax.frontend.prompt.template_worker"
_ROOT = str(Path(mmjax.__file__).parent.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """What one rendering may take."""

    timeout_s: float
    max_chars: int


class RequestTemplate(ChatTemplate):
    """A template that is not trusted, for the model's tokenizer."""

    def __init__(self, source: str, tokenizer: Any, limits: TemplateLimits) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise RequestValueError(
                f"`chat_template` has more than {MAX_SOURCE_CHARS} characters; shorten it",
                param="chat_template",
            )
        super().__init__(source, tokenizer)
        self._limits = limits

    def render(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text."""
        job = {
            "source": self.source,
            "continue_final_message": continue_final_message,
            "max_chars": self._limits.max_chars,
            "variables": {
                **self.tokenizer.special_tokens_map,
                **(options or {}),
                "messages": list(conversation),
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            },
        }
        answer = self._run(json.dumps(job).encode())
        if "text" not in answer:
            raise _refusal(answer["error"])
        return answer["text"]

    def _run(self, job: bytes) -> dict[str, str]:
        timeout_s = self._limits.timeout_s
        limits = [str(_MAX_BYTES), str(math.ceil(timeout_s))]
        try:
            # NOTE: what it writes is bounded in there: the template cannot write to stdout itself.
            done = subprocess.run(
                [sys.executable, "-B", "-s", "-P", "-m", _WORKER, *limits],
                input=job,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PYTHONPATH": _ROOT},
                timeout=timeout_s,
                check=False,
                # Ctrl-C is for the server, which drains.
                start_new_session=True,
            )
            return json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError):
            # Killed: by this process, or by its own limits.
            return {"error": "it takes too much time or memory"}


def _refusal(reason: str) -> RequestValueError:
    return RequestValueError(
        f"`chat_template` cannot be rendered: {reason}; change it", param="chat_template"
    )
