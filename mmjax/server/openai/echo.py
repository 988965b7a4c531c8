"""`echo` of /v1/completions: the prompt before what was generated."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from mmjax.frontend.output.outputs import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    SampleLogprobs,
)


class PromptEcho:
    """Puts the prompts before their completions, once each."""

    def __init__(
        self,
        texts: Sequence[str],
        *,
        is_generating: bool,
        decode: Callable[[int], str] | None = None,
    ) -> None:
        """`texts`: of each prompt; without `is_generating` nothing but them is shown.

        `decode`: names a token, where the prompts' log-probabilities are shown, too.
        """
        self._texts = texts
        self._is_generating = is_generating
        self._decode = decode
        self._begun: set[tuple[int, int]] = set()
        self._logprobs: dict[int, SampleLogprobs] = {}
        """By prompt, an entry for each token; NaN where the model gives none."""
        self._held: dict[int, list[CompletionOutput]] = {}
        """By prompt, what came before the prompt's log-probabilities: they come but once."""

    def apply(self, number: int, output: RequestOutput) -> RequestOutput:
        """Return what is shown of an output of prompt `number`."""
        if self._decode is None:
            return self._shown(number, output, output.outputs)
        if output.prompt_logprobs is not None:
            self._logprobs[number] = [
                {token_id: Logprob(logprob=math.nan, decoded_token=self._decode(token_id))}
                if entry is None
                else entry
                for token_id, entry in zip(
                    output.prompt_token_ids, output.prompt_logprobs, strict=True
                )
            ]
        if number not in self._logprobs:
            self._held.setdefault(number, []).extend(output.outputs)
            return replace(output, outputs=[])
        return self._shown(number, output, [*self._held.pop(number, ()), *output.outputs])

    def find_start(self, number: int) -> int:
        """Return where the first token of prompt `number` begins in the text: 0, or before it.

        The token that a tokenizer itself puts first is in no text.
        """
        if not self._logprobs.get(number):
            return 0
        first = next(iter(self._logprobs[number][0].values()))
        token = first.decoded_token or ""
        return 0 if self._texts[number].startswith(token) else -len(token)

    def _shown(
        self, number: int, output: RequestOutput, items: Sequence[CompletionOutput]
    ) -> RequestOutput:
        return replace(output, outputs=[self._echoed(number, item) for item in items])

    def _echoed(self, number: int, item: CompletionOutput) -> CompletionOutput:
        if not self._is_generating:
            # The engine generates one token at least.
            logprobs = None if item.logprobs is None else []
            item = replace(item, text="", token_ids=[], finish_reason="length", stop_reason=None)
            item = replace(item, logprobs=logprobs)
        if (number, item.index) in self._begun:
            return item
        self._begun.add((number, item.index))
        item = replace(item, text=self._texts[number] + item.text)
        if self._decode is None:
            return item
        return replace(item, logprobs=[*self._logprobs[number], *(item.logprobs or ())])
