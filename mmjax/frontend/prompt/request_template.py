"""A chat template that came with a request: rendered in a process that can be killed."""

import json
from collections.abc import Mapping
from typing import Any

from mmjax.decoders.worker_pool import WorkerError, WorkerPool
from mmjax.errors import InternalError, RequestValueError
from mmjax.frontend.prompt.chat_template import ChatTemplate

MAX_SOURCE_CHARS = 2**16
NUM_RENDERED_AT_ONCE = 2

_MAX_BYTES = 384 * 2**20
"""What rendering may take."""


class TemplateRenderer:
    """Renders templates that are not trusted, each in a process that has rendered no other."""

    def __init__(self, *, timeout_s: float, max_chars: int) -> None:
        """Start nothing. One rendering may take `timeout_s` and write `max_chars` characters."""
        self._max_chars = max_chars
        self._workers = WorkerPool(
            "template",
            NUM_RENDERED_AT_ONCE,
            timeout_s=timeout_s,
            memory_bytes=_MAX_BYTES,
            is_fresh=True,
        )

    def render(self, job: Mapping[str, Any]) -> str:
        """Return a template's text; RequestValueError says what is wrong with it."""
        data = json.dumps({**job, "max_chars": self._max_chars}).encode()
        try:
            answer = json.loads(self._workers.run_text("template", data))
        except WorkerError as error:
            if error.reason == "start":
                raise InternalError("the process that renders templates did not start") from None
            answer = {"error": "it takes too much time or memory"}
        if "text" in answer:
            return answer["text"]
        raise RequestValueError.about(
            "chat_template", f"cannot be rendered: {answer['error']}; change it"
        )

    def close(self) -> None:
        """End the processes."""
        self._workers.close()


class RequestTemplate(ChatTemplate):
    """A template that is not trusted, for the model's tokenizer."""

    def __init__(self, source: str, tokenizer: Any, renderer: TemplateRenderer) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise RequestValueError.about(
                "chat_template", f"has more than {MAX_SOURCE_CHARS} characters; shorten it"
            )
        super().__init__(source, tokenizer)
        self._renderer = renderer

    def _render(
        self,
        conversation: list[dict[str, Any]],
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        job = {
            "source": self.source,
            "continue_final_message": continue_final_message,
            "variables": {
                **self.tokenizer.special_tokens_map,
                **variables,
                "messages": conversation,
                "documents": None,
            },
        }
        return self._renderer.render(job)
