"""Text completions: prompts in, OpenAI's choices out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.output.outputs import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    SampleLogprobs,
)
from mmjax.frontend.output.token_bytes import CharacterCounter
from mmjax.frontend.requests.prompts import PromptDict
from mmjax.frontend.requests.request import PromptSource
from mmjax.server.openai.generation import (
    GenerationService,
    Run,
    choice_options,
    new_ids,
    prompt_token_ids,
    with_extras,
)
from mmjax.server.openai.protocol import CompletionRequest
from mmjax.server.openai.responses import ChoiceOptions, TextChoice, given, text_choice
from mmjax.server.openai.streaming import Outputs, while_connected
from mmjax.server.openai.structure import errors_of_format


class CompletionService:
    """Serves /v1/completions."""

    def __init__(self, client: AsyncEngineClient, generation: GenerationService) -> None:
        self._client = client
        self._generation = generation

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """Serve /v1/completions."""
        self._generation.check(request, body)
        params = body.sampling_params(self._generation.default_params)
        request_id, answer_id = new_ids("cmpl", body)
        prompts: list[PromptSource] = [_text_prompt(item, body) for item in body.prompts()]
        names = [f"prompt[{number}]" for number in range(len(prompts))] if len(prompts) > 1 else ()
        echo = await self._prompt_echo(request, body)
        with errors_of_format(body.has_schema):
            streams = await self._generation.submit(
                request, body, request_id, prompts, params, continues_prompt=True, names=names
            )
        processor = self._client.input_processor
        options = choice_options(body, body.logprobs, processor.tokenizer)
        if params.skip_special_tokens:
            options = options._replace(hidden_ids=processor.special_ids)
        choices = _TextChoices(body, options, echo)
        show = _show_all if echo is None else echo.apply
        shown = partial(_one_by_one, show=show)
        run = Run(streams=streams, choices=choices.of, show=show, shown=shown)
        return await self._generation.answer(request, body, run, answer_id, "text_completion")

    async def _prompt_echo(self, request: Request, body: CompletionRequest) -> "PromptEcho | None":
        if not body.echo:
            return None
        texts = [
            prompt
            if isinstance(prompt, str)
            else await while_connected(request, self._client.detokenize(prompt))
            for prompt in body.prompts()
        ]
        decode = self._client.input_processor.tokenizer.decode
        return PromptEcho(
            texts,
            is_generating=body.max_tokens != 0,
            decode=decode if body.echoes_logprobs else None,
        )


class _TextChoices:
    """Makes choices of the outputs of one request's prompts."""

    def __init__(
        self, body: CompletionRequest, options: ChoiceOptions, echo: "PromptEcho | None"
    ) -> None:
        self._body = body
        self._options = options
        self._echo = echo
        self._counters: dict[int, CharacterCounter] = {}
        """Index of a choice that has begun -> where its next token begins in the text."""

    def of(self, number: int, output: RequestOutput) -> list[TextChoice]:
        return [self._make(number, output, item) for item in output.outputs]

    def _make(self, number: int, output: RequestOutput, item: CompletionOutput) -> TextChoice:
        body, index = self._body, number * self._body.n + item.index
        is_first = index not in self._counters
        if is_first:
            start = 0 if self._echo is None else self._echo.find_start(number)
            self._counters[index] = CharacterCounter(start)
        choice = text_choice(item, self._options, index=index, counter=self._counters[index])
        if is_first:
            choice.prompt_token_ids = prompt_token_ids(body, output)
        if item.index == 0 and body.prompt_logprobs is not None:
            choice.prompt_logprobs = given(output.prompt_logprobs)
        return choice


def _show_all(_: int, output: RequestOutput) -> RequestOutput:
    return output


async def _one_by_one(
    outputs: Outputs, show: Callable[[int, RequestOutput], RequestOutput]
) -> Outputs:
    """Yield what is shown, so that an event tells of what one step added to one answer."""
    try:
        async for number, output in outputs:
            shown = show(number, output)
            for item in shown.outputs:
                yield number, replace(shown, outputs=[item])
            if not shown.outputs:
                yield number, shown
    finally:
        await outputs.aclose()


def _text_prompt(prompt: str | list[int], body: CompletionRequest) -> PromptDict:
    if isinstance(prompt, str):
        made: PromptDict = {"prompt": prompt, "add_special_tokens": body.add_special_tokens}
    else:
        made = {"prompt_token_ids": prompt}
    return with_extras(made, body)


class PromptEcho:
    """`echo`: puts the prompts before their completions, once each."""

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
