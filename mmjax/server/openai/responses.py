"""OpenAI's responses, made from the frontend's outputs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from mmjax.frontend.engine_client.request_stream import RequestStream
from mmjax.frontend.output.outputs import (
    CompletionOutput,
    ItemOutput,
    Logprob,
    RequestOutput,
    SampleLogprobs,
)
from mmjax.frontend.output.token_bytes import REPLACEMENT, CharacterCounter, find_bytes
from mmjax.server.openai.tool_use import AnswerPiece, AnswerReader, CallPiece, join_calls

T = TypeVar("T")

Event = dict[str, Any]
"""One of a stream that names the types of its events."""


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = 0
    audio_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, kw_only=True):
    """One token at one position of a chat's logprobs."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    """The sampled token at one position, and the most probable ones beside it."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprob]


class TextLogprobs(msgspec.Struct, kw_only=True):
    """`logprobs` of a completion choice."""

    tokens: list[str]
    token_logprobs: list[float]
    """NaN, which is null in JSON, of a prompt's first token."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionCall(msgspec.Struct, kw_only=True):
    """`function` of a tool call; of a chunk: what it adds."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in an answer; of a chunk: what it adds to call `index`."""

    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionCall


class ChatAnswer(msgspec.Struct, kw_only=True):
    """`message` of a chat choice."""

    role: str = "assistant"
    content: str | None
    """None of an answer of calls alone."""
    refusal: None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """What the model thought before, where `--reasoning-parser` tells it apart; not OpenAI's."""
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """The same, under the name that vLLM had for it, and some clients read."""
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    parsed: Mapping[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Boxes and labels, where the model's answers hold such; not OpenAI's."""


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`delta` of a chat chunk's choice."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = []
    parsed: Mapping[str, Any] | None = None
    """As `ChatAnswer.parsed`, of the whole answer, in its last chunk."""


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of the `n` completions of a chat."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """What a chunk adds to one of the `n` completions of a chat."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET

    @property
    def says_something(self) -> bool:
        """Whether there is anything in it for a client."""
        delta = self.delta
        has_text = bool(delta.content or delta.reasoning or delta.tool_calls or delta.role)
        return has_text or bool(self.finish_reason or self.logprobs or self.token_ids)


class TextChoice(msgspec.Struct, kw_only=True):
    """One completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """With `token_ids`; of a stream, in the first chunk."""
    parsed: Mapping[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """As `ChatAnswer.parsed`; of a stream, in the last chunk."""
    prompt_logprobs: list[dict[int, Logprob] | None] | msgspec.UnsetType = msgspec.UNSET


class RequestMetrics(msgspec.Struct, kw_only=True):
    """`metrics`: vLLM's fields first, then a time for each further stage, and the caches."""

    time_to_first_token_ms: float
    """From the first step that held the request."""
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None
    """Without the first token; None if there is only one."""
    fetch_time_ms: float
    tokenize_time_ms: float
    decode_time_ms: float
    process_time_ms: float
    encode_time_ms: float
    prefill_time_ms: float
    total_time_ms: float
    """From the request's arrival to the last token."""
    num_cached_tokens: int
    """Tokens of the prompt that the prefix cache had."""
    items: list[ItemOutput]
    """The placeholder of each, and which caches had it; "hidden" where clients share them."""


class Answer(msgspec.Struct, kw_only=True):
    """A whole response, or one chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    metrics: RequestMetrics | msgspec.UnsetType = msgspec.UNSET
    """If the request asks; of a stream, in the last chunk."""
    prompt_logprobs: list[dict[int, Logprob] | None] | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """One model of /v1/models."""

    id: str
    created: int
    root: str
    max_model_len: int
    capabilities: dict[str, Any]
    object: str = "model"
    owned_by: str = "mmjax"
    parent: str | None = None
    """The model, of an adapter."""


class ModelList(msgspec.Struct, kw_only=True):
    """/v1/models."""

    data: list[ModelCard]
    object: str = "list"


class UsageCounter:
    """Counts the tokens of one response, over its prompts, completions and chunks."""

    def __init__(self) -> None:
        self._prompts: dict[str, RequestOutput] = {}
        self._num_completion_tokens = 0

    def metrics(self, *, n: int, hides_caches: bool) -> RequestMetrics:
        """Return the metrics of the only prompt, which had `n` completions."""
        (output,) = self._prompts.values()
        times, items = output.times, output.items
        # Without the first token of each.
        num_steps = self._num_completion_tokens - n
        is_rated = num_steps > 0 and times.generate > 0
        if hides_caches:
            hidden: Any = {"processing": "hidden", "encoding": "hidden"}
            items = [msgspec.structs.replace(item, **hidden) for item in items]
        return RequestMetrics(
            time_to_first_token_ms=_ms(times.encode + times.prefill),
            generation_time_ms=_ms(times.generate),
            queue_time_ms=_ms(times.queue),
            mean_itl_ms=_ms(times.generate / num_steps) if is_rated else None,
            tokens_per_second=round(num_steps / times.generate, 2) if is_rated else None,
            fetch_time_ms=_ms(times.fetch),
            tokenize_time_ms=_ms(times.tokenize),
            decode_time_ms=_ms(times.decode),
            process_time_ms=_ms(times.process),
            encode_time_ms=_ms(times.encode),
            prefill_time_ms=_ms(times.prefill),
            total_time_ms=_ms(times.last_token_at - times.arrived_at),
            num_cached_tokens=output.num_cached_tokens,
            items=items,
        )

    def add(self, output: RequestOutput) -> None:
        """Count what `output` adds."""
        self._prompts[output.request_id] = output
        self._num_completion_tokens += sum(len(item.token_ids) for item in output.outputs)

    def add_prompts(self, streams: Sequence[RequestStream]) -> None:
        """Count prompts that have no output yet."""
        for stream in streams:
            self.add(RequestOutput.of(stream.request))

    def usage(self) -> Usage:
        """Return the count so far."""
        prompts = self._prompts.values()
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in prompts)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(output.num_cached_tokens for output in prompts),
                image_tokens=sum(output.num_image_tokens for output in prompts),
                video_tokens=sum(output.num_video_tokens for output in prompts),
                audio_tokens=sum(output.num_audio_tokens for output in prompts),
            ),
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


class AnswerBuilder(ABC):
    """Fills an answer of another API than chat, piece by piece; a whole answer is one piece."""

    def __init__(self, reader: AnswerReader) -> None:
        self.usage = UsageCounter()
        self._reader = reader

    def take(self, output: RequestOutput) -> Iterator[Event]:
        """Count and add what a step gave; yield its events, which are for streams alone."""
        self.usage.add(output)
        for item in output.outputs:
            yield from self.add(item, self._reader.read(item))

    @abstractmethod
    def add(self, output: CompletionOutput, piece: AnswerPiece) -> Iterator[Event]:
        """Add what a step gave a completion, and the piece that was read of it."""


class ChoiceOptions(NamedTuple):
    """What a request wants in each choice."""

    num_top_logprobs: int = 0
    with_token_ids: bool = False
    names_token_ids: bool = False
    """Whether logprobs name tokens by their ids."""
    role: str = "assistant"
    """The role that a chat's answers have."""
    tokenizer: Any = None
    """HF's."""
    hidden_ids: Collection[int] = ()
    """Special tokens that an answer's text does not show."""

    def token_ids(self, output: CompletionOutput) -> list[int] | msgspec.UnsetType:
        """Return the token ids if the request wants them."""
        return output.token_ids if self.with_token_ids else msgspec.UNSET


def chat_choice(output: CompletionOutput, piece: AnswerPiece, options: ChoiceOptions) -> ChatChoice:
    """Return a finished choice, whose answer is `piece`."""
    calls = [_tool_call(call) for call in join_calls(piece.calls)]
    return ChatChoice(
        index=output.index,
        message=ChatAnswer(
            role=options.role,
            content=piece.text or (None if calls else ""),
            reasoning=piece.reasoning or msgspec.UNSET,
            reasoning_content=piece.reasoning or msgspec.UNSET,
            tool_calls=calls or msgspec.UNSET,
            parsed=given(output.parsed),
        ),
        logprobs=chat_logprobs(output.logprobs, options),
        finish_reason=piece.finish_reason,
        stop_reason=output.stop_reason,
        token_ids=options.token_ids(output),
    )


def chat_chunk_choice(
    output: CompletionOutput, piece: AnswerPiece, options: ChoiceOptions
) -> ChatChunkChoice:
    """Return what a step added to a choice, whose answer grew by `piece`."""
    is_finished = output.finish_reason is not None
    calls = [_tool_call(call, is_chunk=True) for call in piece.calls]
    return ChatChunkChoice(
        index=output.index,
        delta=ChatDelta(
            content=piece.text or None,
            reasoning=piece.reasoning or None,
            reasoning_content=piece.reasoning or None,
            tool_calls=calls,
            parsed=output.parsed,
        ),
        logprobs=chat_logprobs(output.logprobs, options),
        finish_reason=piece.finish_reason,
        stop_reason=output.stop_reason if is_finished else msgspec.UNSET,
        token_ids=options.token_ids(output),
    )


def _tool_call(call: CallPiece, *, is_chunk: bool = False) -> ToolCall:
    is_first = call.name is not None
    return ToolCall(
        index=call.index if is_chunk else msgspec.UNSET,
        id=call.id or msgspec.UNSET,
        type="function" if is_first else msgspec.UNSET,
        function=FunctionCall(name=call.name or msgspec.UNSET, arguments=call.arguments),
    )


def text_choice(
    output: CompletionOutput, options: ChoiceOptions, *, index: int, counter: CharacterCounter
) -> TextChoice:
    """Return a completion, or what a step added to the tokens that were counted."""
    return TextChoice(
        index=index,
        text=output.text,
        logprobs=text_logprobs(
            output.logprobs, options, counter, num_generated=len(output.token_ids)
        ),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        token_ids=options.token_ids(output),
        parsed=given(output.parsed),
    )


def given(value: T | None) -> T | msgspec.UnsetType:
    """Return the value of a field, which is left out where there is none."""
    return msgspec.UNSET if value is None else value


def chat_logprobs(logprobs: SampleLogprobs | None, options: ChoiceOptions) -> ChatLogprobs | None:
    """Return log-probabilities in chat's form."""
    if logprobs is None:
        return None
    content: list[TokenLogprob] = []
    for position in logprobs:
        sampled = _top_logprob(next(iter(position.items())), options)
        top = [_top_logprob(entry, options) for entry in _top_of(position, options)]
        content.append(TokenLogprob(**msgspec.structs.asdict(sampled), top_logprobs=top))
    return ChatLogprobs(content=content)


def text_logprobs(
    logprobs: SampleLogprobs | None,
    options: ChoiceOptions,
    counter: CharacterCounter,
    *,
    num_generated: int,
) -> TextLogprobs | None:
    """Return log-probabilities in completions' form, of an echoed prompt's tokens and further ones.

    All of a prompt's text is shown, of the answer's no `hidden_ids`.
    """
    if logprobs is None:
        return None
    num_echoed = len(logprobs) - num_generated
    shown = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for number, position in enumerate(logprobs):
        token_id, entry = next(iter(position.items()))
        shown.tokens.append(_token_name(token_id, entry, options))
        shown.token_logprobs.append(_finite(entry.logprob))
        top = {
            _token_name(one_id, one, options): _finite(one.logprob)
            for one_id, one in _top_of(position, options)
        }
        shown.top_logprobs.append(None if math.isnan(entry.logprob) else top)
        shown.text_offset.append(max(0, counter.count))
        if number < num_echoed or token_id not in options.hidden_ids:
            counter.add(_bytes_of(token_id, entry, options))
    return shown


def _top_of(
    position: Mapping[int, Logprob], options: ChoiceOptions
) -> Sequence[tuple[int, Logprob]]:
    # The sampled token is first, whether it is one of the most probable or not.
    num_top = options.num_top_logprobs
    top = [
        (token_id, entry)
        for token_id, entry in position.items()
        if entry.rank is not None and entry.rank <= num_top
    ]
    return sorted(top, key=lambda item: item[1].rank or 0)


def _top_logprob(entry: tuple[int, Logprob], options: ChoiceOptions) -> TopLogprob:
    token_id, logprob = entry
    return TopLogprob(
        token=_token_name(token_id, logprob, options),
        logprob=_finite(logprob.logprob),
        bytes=list(_bytes_of(token_id, logprob, options)),
    )


def _token_name(token_id: int, entry: Logprob, options: ChoiceOptions) -> str:
    return f"token_id:{token_id}" if options.names_token_ids else entry.decoded_token or ""


def _bytes_of(token_id: int, entry: Logprob, options: ChoiceOptions) -> bytes:
    text = entry.decoded_token or ""
    return find_bytes(options.tokenizer, token_id) if REPLACEMENT in text else text.encode()


def _finite(logprob: float) -> float:
    # JSON has no infinity; OpenAI's minimum is -9999.
    return max(logprob, -9999.0)
