"""OpenAI's responses, made from the frontend's outputs."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from mmjax.frontend.output.outputs import CompletionOutput, Logprob, RequestOutput, SampleLogprobs


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int = 0
    image_tokens: int = 0


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
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatAnswer(msgspec.Struct, kw_only=True):
    """`message` of a chat choice."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None
    parsed: Mapping[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Boxes and labels, where the model's answers hold such; not OpenAI's."""


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`delta` of a chat chunk's choice."""

    role: str | None = None
    content: str | None = None
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


class TextChoice(msgspec.Struct, kw_only=True):
    """One completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    parsed: Mapping[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """As `ChatAnswer.parsed`; of a stream, in the last chunk."""
    prompt_logprobs: list[dict[int, Logprob] | None] | msgspec.UnsetType = msgspec.UNSET


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
    parent: None = None


class ModelList(msgspec.Struct, kw_only=True):
    """/v1/models."""

    data: list[ModelCard]
    object: str = "list"


class UsageCounter:
    """Counts the tokens of one response, over its prompts, completions and chunks."""

    def __init__(self) -> None:
        self._prompts: dict[str, RequestOutput] = {}
        self._num_completion_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """Count what `output` adds."""
        self._prompts[output.request_id] = output
        self._num_completion_tokens += sum(len(item.token_ids) for item in output.outputs)

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
            ),
        )


class ChoiceOptions(NamedTuple):
    """What a request wants in each choice."""

    num_top_logprobs: int = 0
    with_token_ids: bool = False

    def token_ids(self, output: CompletionOutput) -> list[int] | msgspec.UnsetType:
        """Return the token ids if the request wants them."""
        return output.token_ids if self.with_token_ids else msgspec.UNSET


def chat_choice(output: CompletionOutput, options: ChoiceOptions) -> ChatChoice:
    """Return a finished choice."""
    return ChatChoice(
        index=output.index,
        message=ChatAnswer(content=output.text, parsed=_parsed(output)),
        logprobs=chat_logprobs(output.logprobs, options.num_top_logprobs),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        token_ids=options.token_ids(output),
    )


def chat_chunk_choice(output: CompletionOutput, options: ChoiceOptions) -> ChatChunkChoice:
    """Return what a step added to a choice."""
    is_finished = output.finish_reason is not None
    return ChatChunkChoice(
        index=output.index,
        delta=ChatDelta(content=output.text or None, parsed=output.parsed),
        logprobs=chat_logprobs(output.logprobs, options.num_top_logprobs),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason if is_finished else msgspec.UNSET,
        token_ids=options.token_ids(output),
    )


def text_choice(
    output: CompletionOutput, options: ChoiceOptions, *, index: int, offset: int
) -> TextChoice:
    """Return a completion, or what a step added to it after `offset` characters."""
    return TextChoice(
        index=index,
        text=output.text,
        logprobs=text_logprobs(output.logprobs, options.num_top_logprobs, offset),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        token_ids=options.token_ids(output),
        parsed=_parsed(output),
    )


def prompt_logprobs(
    output: RequestOutput,
) -> list[dict[int, Logprob] | None] | msgspec.UnsetType:
    """Return those of a prompt's tokens, as vLLM's, if the request wants them."""
    return msgspec.UNSET if output.prompt_logprobs is None else output.prompt_logprobs


def _parsed(output: CompletionOutput) -> Mapping[str, Any] | msgspec.UnsetType:
    return msgspec.UNSET if output.parsed is None else output.parsed


def chat_logprobs(logprobs: SampleLogprobs | None, num_top: int) -> ChatLogprobs | None:
    """Return log-probabilities in chat's form."""
    if logprobs is None:
        return None
    content: list[TokenLogprob] = []
    for position in logprobs:
        entries = list(position.values())
        sampled = _top_logprob(entries[0])
        content.append(
            TokenLogprob(
                token=sampled.token,
                logprob=sampled.logprob,
                bytes=sampled.bytes,
                top_logprobs=[_top_logprob(entry) for entry in _top_of(entries, num_top)],
            )
        )
    return ChatLogprobs(content=content)


def text_logprobs(
    logprobs: SampleLogprobs | None, num_top: int, offset: int
) -> TextLogprobs | None:
    """Return log-probabilities in completions' form."""
    if logprobs is None:
        return None
    shown = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for position in logprobs:
        entries = list(position.values())
        text = entries[0].decoded_token or ""
        top = _top_of(entries, num_top)
        shown.tokens.append(text)
        shown.token_logprobs.append(_finite(entries[0].logprob))
        shown.top_logprobs.append({e.decoded_token or "": _finite(e.logprob) for e in top})
        shown.text_offset.append(offset)
        offset += len(text)
    return shown


def _top_of(entries: list[Logprob], num_top: int) -> list[Logprob]:
    # The sampled token is first, whether it is one of the most probable or not.
    top = [entry for entry in entries if entry.rank is not None and entry.rank <= num_top]
    return sorted(top, key=lambda entry: entry.rank or 0)


def _top_logprob(entry: Logprob) -> TopLogprob:
    text = entry.decoded_token or ""
    return TopLogprob(token=text, logprob=_finite(entry.logprob), bytes=list(text.encode()))


def _finite(logprob: float) -> float:
    # JSON has no infinity; OpenAI's minimum is -9999.
    return max(logprob, -9999.0)
