"""`echo` of /v1/completions: the prompt's text before what was generated."""

from collections.abc import Sequence
from dataclasses import replace

from mmjax.frontend.output.outputs import CompletionOutput, RequestOutput


class PromptEcho:
    """Puts the prompts' texts before their completions, once each."""

    def __init__(self, texts: Sequence[str], *, is_generating: bool) -> None:
        """`texts`: of each prompt; without `is_generating` nothing but them is shown."""
        self._texts = texts
        self._is_generating = is_generating
        self._begun: set[tuple[int, int]] = set()

    def apply(self, number: int, output: RequestOutput) -> RequestOutput:
        """Return what is shown of an output of prompt `number`."""
        return replace(output, outputs=[self._shown(number, item) for item in output.outputs])

    def _shown(self, number: int, item: CompletionOutput) -> CompletionOutput:
        if not self._is_generating:
            # The engine generates one token at least.
            item = replace(item, text="", token_ids=[], finish_reason="length", stop_reason=None)
        if (number, item.index) in self._begun:
            return item
        self._begun.add((number, item.index))
        return replace(item, text=self._texts[number] + item.text)
