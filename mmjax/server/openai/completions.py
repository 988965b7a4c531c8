"""Text completions: prompts in, OpenAI's choices out."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.frontend.output.token_bytes import CharacterCounter
from mmjax.frontend.requests.prompts import PromptDict
from mmjax.frontend.requests.request import PromptSource
from mmjax.server.openai.continuation import new_hex
from mmjax.server.openai.echo import PromptEcho
from mmjax.server.openai.errors import json_response
from mmjax.server.openai.generation import GenerationService, gather, prompt_token_ids, with_extras
from mmjax.server.openai.protocol import CompletionRequest
from mmjax.server.openai.responses import (
    Answer,
    ChoiceOptions,
    TextChoice,
    UsageCounter,
    prompt_logprobs,
    text_choice,
)
from mmjax.server.openai.streaming import begin, while_connected
from mmjax.server.openai.structure import errors_of_format


class CompletionService:
    """Serves /v1/completions."""

    def __init__(self, client: AsyncEngineClient, generation: GenerationService) -> None:
        self._client = client
        self._generation = generation

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """Serve /v1/completions."""
        self._generation.check(request, body)
        params = body.sampling_params(self._generation.default_params)
        request_id = f"cmpl-{new_hex()}"
        answer_id = request_id if body.request_id is None else f"cmpl-{body.request_id}"
        prompts: list[PromptSource] = [_text_prompt(item, body) for item in body.prompts()]
        echo = await self._prompt_echo(request, body)
        with errors_of_format(body.response_format is not None):
            streams = await self._generation.submit(
                request, body, request_id, prompts, params, continues_prompt=True
            )
        new_answer = self._generation.answer_factory(body, answer_id, "text_completion", False)
        options = ChoiceOptions(
            body.logprobs or 0,
            bool(body.return_token_ids),
            bool(body.return_tokens_as_token_ids),
            tokenizer=self._client.input_processor.tokenizer,
        )
        if body.stream:
            chunks = await begin(request, streams, partial(_echoed, echo=echo))
            events = self._text_events(body, chunks, new_answer, options, echo)
            return self._generation.event_stream(events, streams)
        outputs, usage = await gather(request, streams, echo)
        choices = [
            text_choice(
                item,
                options,
                index=number * body.n + item.index,
                counter=_begin_text(echo, number),
            )
            for number, output in enumerate(outputs)
            for item in output.outputs
        ]
        for number, output in enumerate(outputs):
            if body.prompt_logprobs is not None:
                choices[number * body.n].prompt_logprobs = prompt_logprobs(output)
            for choice in choices[number * body.n : (number + 1) * body.n]:
                choice.prompt_token_ids = prompt_token_ids(body, output)
        metrics = self._generation.metrics(body, usage)
        return json_response(new_answer(choices=choices, usage=usage.usage(), metrics=metrics))

    async def _prompt_echo(self, request: Request, body: CompletionRequest) -> PromptEcho | None:
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

    async def _text_events(
        self,
        body: CompletionRequest,
        outputs: AsyncGenerator[tuple[int, RequestOutput], None],
        new_answer: Callable[..., Answer],
        options: ChoiceOptions,
        echo: PromptEcho | None,
    ) -> AsyncGenerator[Answer, None]:
        usage = UsageCounter()
        stream_options = body.stream_options
        is_usage_continuous = bool(stream_options and stream_options.continuous_usage_stats)
        counters: dict[int, CharacterCounter] = {}
        try:
            async for number, output in outputs:
                usage.add(output)
                choices: list[TextChoice] = []
                for item in output.outputs:
                    index = number * body.n + item.index
                    is_first = index not in counters
                    if is_first:
                        counters[index] = _begin_text(echo, number)
                    choice = text_choice(item, options, index=index, counter=counters[index])
                    if is_first:
                        choice.prompt_token_ids = prompt_token_ids(body, output)
                    choices.append(choice)
                if not choices:
                    continue
                yield new_answer(
                    choices=choices,
                    usage=usage.usage() if is_usage_continuous else msgspec.UNSET,
                )
        finally:
            await outputs.aclose()
        for answer in self._generation.closing(body, usage, new_answer):
            yield answer


def _begin_text(echo: PromptEcho | None, number: int) -> CharacterCounter:
    return CharacterCounter(0 if echo is None else echo.find_start(number))


async def _echoed(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None], echo: PromptEcho | None
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    try:
        async for number, output in outputs:
            shown = output if echo is None else echo.apply(number, output)
            # One by one, so that an event tells of one answer, and of what one step added to it.
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
