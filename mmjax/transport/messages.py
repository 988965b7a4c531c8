"""What P0 and P1 say to each other, grouped by who receives it. Knows nothing of sockets."""

import msgspec

from mmjax.errors import InternalError, RequestError, make_request_error
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec
from mmjax.sampling_params import SamplingParams

# ---- to P1 -------------------------------------------------------------------------------------


class EngineCoreRequest(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """One request, processed: token ids with placeholders in place, and the items' tensors."""

    request_id: str
    prompt_token_ids: list[int]
    mm_features: list[MultiModalFeatureSpec] = []
    """Sorted by `mm_position.offset`; without data where P1 holds it, or an earlier one has it."""
    sampling_params: SamplingParams
    """Complete: with a seed, unless it is greedy."""
    eos_token_ids: list[int] = []
    """Tokens that end the text unless `ignore_eos`; the first is the tokenizer's own end."""
    arrival_time: float = 0.0
    deadline: float | None = None
    """By when it must be finished, on the machine's monotonic clock."""
    priority: int = 0
    cache_salt: str | None = None
    lora_name: str | None = None
    """The adapter to serve with."""
    encoder_prompt_token_ids: list[int] | None = None
    """An encoder-decoder model's encoder prompt, in which the features lie; None for the others."""


class AbortRequests(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """Forget these requests, wherever they are; unknown ids are ignored."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Leave the loop and end the process."""


EngineMessage = EngineCoreRequest | AbortRequests | Shutdown

# ---- to P0 -------------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities at one position: the sampled token first, then the most probable ones."""

    token_ids: list[int]
    logprobs: list[float]
    sampled_rank: int
    """1 for the most probable token of the vocabulary."""


class RequestOutputDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    """One entry per new token, where the request asked for them."""
    finish_reason: str | None = None
    """None while the request runs; "stop", "length" or "abort"."""
    stop_reason: int | None = None
    """The token that ended the text, unless it is the tokenizer's own end."""
    num_cached_tokens: int = 0


class StepOutput(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """What one engine step produced."""

    deltas: list[RequestOutputDelta]


class RequestFailed(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """This request cannot be served; the others go on."""

    request_id: str
    message: str
    param: str | None = None
    status: int = 500
    code: str = InternalError.code
    retry_after_s: float | None = None
    """When the same request may succeed, where that is known."""

    @classmethod
    def from_error(cls, request_id: str, error: RequestError) -> "RequestFailed":
        """Tell of an error that `to_error` makes again on the other side."""
        return cls(
            request_id=request_id,
            message=error.message,
            param=error.param,
            status=error.status,
            code=error.code,
            retry_after_s=getattr(error, "retry_after_s", None),
        )

    def to_error(self) -> RequestError:
        """Return the error as it was raised: class, status, code, field and time to wait."""
        return make_request_error(
            self.code,
            self.message,
            status=self.status,
            param=self.param,
            retry_after_s=self.retry_after_s,
        )


class CacheMiss(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """The request was not taken in: it names items that P1 does not hold. Send it with them."""

    request_id: str
    mm_hashes: list[str]


class Ready(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """P1 has warmed up."""

    num_kv_blocks: int
    num_programs: int
    """Compiled XLA programs: `encode`, `step` and `sample` over all buckets."""
    startup_seconds: dict[str, float] = {}


class Heartbeat(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """P1's loop is alive; sent at least once a second."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_compilations: int
    """Compilations since warm-up: 0 unless something is wrong."""
    time_s: float = 0.0
    """When these figures held, on P1's monotonic clock."""
    num_prompt_tokens: int = 0
    """Of all prompts that have given a token; those found in the prefix cache, too."""
    num_generation_tokens: int = 0
    prefix_cache_hits: int = 0
    """Prompt tokens that were found, of `prefix_cache_queries`."""
    prefix_cache_queries: int = 0
    encoder_cache_hits: int = 0
    """Items whose encoder output was found, of `encoder_cache_queries` that were needed."""
    encoder_cache_queries: int = 0


FrontendMessage = StepOutput | RequestFailed | CacheMiss | Ready | Heartbeat
