"""The outputs of a request, under vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from mmjax.frontend.output.output_html import draw_output
from mmjax.frontend.requests.request import ProcessedRequest, RequestItem
from mmjax.processing.items.items import MultiModalDataItems
from mmjax.processing.tensors.inputs import MultiModalInputs
from mmjax.system.request_times import RequestTimes


@dataclass(slots=True, kw_only=True)
class Logprob:
    """The log-probability of one token at one position."""

    logprob: float
    rank: int | None = None
    """1 for the most probable token of the vocabulary."""
    decoded_token: str | None = None


SampleLogprobs = list[dict[int, Logprob]]
"""One entry per output token: the sampled token first, then the most probable ones."""


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of the `n` completions of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    """None while it runs; "stop", "length" or "abort"."""
    stop_reason: int | str | None = None
    """The stop string or token that ended it; None for the tokenizer's EOS."""
    parsed: Mapping[str, Any] | None = None
    """What the model's processor makes of a finished answer, as boxes; None: it is text alone."""
    weights_version: int = 0
    """Of the weights that the last token was sampled with: how often they were changed before."""
    weights_versions: list[int] | None = None
    """One per token, where the weights were changed between them; None: all are of the last's."""

    def finished(self) -> bool:
        """Return whether the completion is finished."""
        return self.finish_reason is not None


class ItemOutput(RequestItem, frozen=True, kw_only=True):
    """One item of a prompt, and which caches had it."""

    encoding: Literal["prefix_cache", "encoder_cache", "disk", "worker", "computed"]
    """Where its embeddings came from; none were needed with the prefix cache."""


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request and its completions: all so far, or, streaming, what a step added."""

    request_id: str
    prompt: str | None
    """The given text; None for token ids."""
    prompt_token_ids: list[int]
    """With placeholders expanded."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry per token of the prompt, if they were asked for; None for the first, and for one
    that the model cannot give (an image's). Streaming, in the first output."""
    alignment: np.ndarray | None = field(default=None, repr=False, compare=False)
    """float32[heads, tokens, states]: how much the prompt's tokens attend to the encoder's states,
    if the sampling parameters ask for it."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_image_tokens: int = 0
    """Prompt positions that hold embeddings of images."""
    num_video_tokens: int = 0
    """Prompt positions that hold embeddings of videos."""
    num_audio_tokens: int = 0
    """Prompt positions that hold embeddings of audio."""
    items: list[ItemOutput] = field(default_factory=list)
    """In the prompt's order; once it is finished."""
    times: RequestTimes = field(default_factory=RequestTimes)
    mm_items: MultiModalDataItems | None = field(default=None, repr=False, compare=False)
    """The prompt's media as they came; once it is finished."""
    multi_modal_inputs: MultiModalInputs | None = field(default=None, repr=False, compare=False)
    """With `return_mm_inputs`, the prompt as the engine computed it: token ids, placeholders, and
    the items' tensors (which cannot be written); once it is finished."""

    vectors: np.ndarray | None = field(default=None, repr=False, compare=False)
    """float32[vectors, D]: of a request for vectors, what its prompt has become."""

    @classmethod
    def of(cls, request: ProcessedRequest, **fields: Any) -> "RequestOutput":
        """Return an output of a request; without `fields`, that before its first token."""
        return cls(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            num_image_tokens=request.num_embeds["image"],
            num_video_tokens=request.num_embeds["video"],
            num_audio_tokens=request.num_embeds["audio"],
            **fields,
        )

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the pictures and the answers."""
        return draw_output(self)


class NewTokens(NamedTuple):
    """The tokens that a step gave one sequence of a request."""

    request: ProcessedRequest
    num_tokens: int
    is_first: bool
    interval_s: float
    """Since the sequence's last tokens; of the first ones, since the request came."""


class FinishedSequence(NamedTuple):
    """One sequence of a request that came to its end."""

    request: ProcessedRequest
    request_id: str
    """The sequence's."""
    finish_reason: str
    text: str
    num_tokens: int
    num_cached_tokens: int
    first_token_at: float
    """In `time.monotonic()` seconds, as `last_token_at`."""
    last_token_at: float
    is_last: bool
    """Whether all other sequences of the request have ended."""
    max_num_tokens: int
    """Of all sequences of the request, until now."""
