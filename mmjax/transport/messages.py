"""Messages between P0 and P1, grouped by their receiver."""

from typing import Literal

import msgspec

from mmjax.errors import InternalError, RequestError, make_request_error
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec
from mmjax.system.request_times import RequestTimes

MESSAGES_LOST_STATUS = 75
"""P1's exit status where messages to it were lost (EX_TEMPFAIL of sysexits.h)."""

# ---- to P1 -------------------------------------------------------------------------------------


class EngineCoreRequest(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """A processed request: token ids with expanded placeholders, and the items' features."""

    request_id: str
    prompt_token_ids: list[int]
    mm_features: list[MultiModalFeatureSpec] = []
    """Sorted by `mm_position.offset`; without data that P1 holds or an earlier feature has."""
    sampling_params: SamplingParams
    """Complete: with a seed, unless it is greedy."""
    eos_token_ids: list[int] = []
    """Tokens that end the text unless `ignore_eos`; the first is the tokenizer's EOS."""
    deadline: float | None = None
    """By when it must be finished, in `time.monotonic()` seconds; None: no limit."""
    priority: int = 0
    cache_salt: str | None = None
    lora_name: str | None = None
    """The LoRA adapter, or None."""
    encoder_prompt_token_ids: list[int] | None = None
    """An encoder-decoder model's encoder prompt, with the placeholders; None for other models."""
    bad_words_token_ids: list[list[int]] = []
    """What the sampling parameters' `bad_words` stand for."""
    grammar: str | None = None
    """What their `structured_outputs` stand for, in llguidance's form."""
    output_token_ids: list[int] = []
    """Tokens that another P1 has generated for it: it goes on after them, as after a preemption,
    and says nothing again of what came with the first token."""


class AbortRequests(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """Abort requests, waiting or running; unknown ids are ignored."""

    request_ids: list[str]


class LoadAdapter(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """Load a LoRA adapter; requests that are sent behind it may name it."""

    lora_name: str
    lora_path: str
    """A directory, which both processes see."""


class UnloadAdapter(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """Forget a LoRA adapter; unfinished requests that name it go on."""

    lora_name: str


ControlAction = Literal["sleep", "wake_up", "pause", "resume", "load_weights"]
UpdateMode = Literal["wait", "keep", "abort"]
"""What becomes of requests in work when the engine as a whole is changed."""


class ControlEngine(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """Change the engine as a whole, between two steps; answered by `EngineChanged`."""

    number: int
    """Of the answer."""
    action: ControlAction
    mode: UpdateMode = "wait"
    level: int = 1
    """Of `sleep`: 2 frees the weights, too."""
    path: str | None = None
    """Of `load_weights`: a checkpoint's directory, which both processes see; None: the weights of
    the start stay, and get `weights_version`."""
    weights_version: int | None = None
    """That the loaded weights get, which the last process had; None: one more than the last."""
    weights_mark: str = ""
    """`EngineChanged.weights_mark` of the directory as the last process read it."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """End the engine process."""


EngineMessage = (
    EngineCoreRequest | AbortRequests | LoadAdapter | UnloadAdapter | ControlEngine | Shutdown
)

# ---- to P0 -------------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities at one position: the sampled token first, then the most probable ones."""

    token_ids: list[int]
    logprobs: list[float]
    sampled_rank: int
    """1 for the most probable token of the vocabulary."""


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """How much tokens attend to an encoder's states, by the heads that align."""

    weights: bytes
    """float32, little-endian."""
    shape: tuple[int, int, int]
    """Heads, tokens, states."""


class Vectors(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt has become, for a request with `pooling`."""

    width: int
    data: bytes
    """float32[vectors, width]"""

    def __post_init__(self) -> None:
        if self.width < 1 or len(self.data) % (4 * self.width):
            raise ValueError(f"{len(self.data)} bytes are no float32 vectors of {self.width}")


class RequestOutputDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a step added to one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    """One entry per new token, if the request asked for them."""
    finish_reason: str | None = None
    """None while the request runs; "stop", "length" or "abort"."""
    stop_reason: int | None = None
    """The stop token that ended the text; None for the tokenizer's EOS."""
    num_cached_tokens: int = 0
    times: RequestTimes | None = None
    """P1's stages, with the first token."""
    encoded: list[str] = []
    """Identifiers of the items that were encoded for it, with the first token; the others' outputs
    were cached, or not needed."""
    found_on_disk: list[str] = []
    """Likewise of those whose outputs were read from `encoder_cache_dir`."""
    encoded_apart: list[str] = []
    """Likewise of those whose outputs `encoder_workers` gave."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With the first token: of each of the prompt's, None for the first, or if it has no logit."""
    alignment: Alignment | None = None
    """With the first token, if the request asked for it."""
    weights_version: int = 0
    """Of the weights that the tokens were sampled with; each update's is one more."""
    vectors: Vectors | None = None
    """Of a prompt that was to become some, at its end: there are no tokens then."""


class StepOutput(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """The outputs of one engine step."""

    deltas: list[RequestOutputDelta]


class RequestFailed(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """A request failed; the others continue."""

    request_id: str
    message: str
    param: str | None = None
    status: int = 500
    code: str = InternalError.code
    retry_after_s: float | None = None
    """Seconds after which the same request may succeed, if known."""

    @classmethod
    def from_error(cls, request_id: str, error: RequestError) -> "RequestFailed":
        """Return the message of an error, which `to_error` restores."""
        return cls(
            request_id=request_id,
            message=error.message,
            param=error.param,
            status=error.status,
            code=error.code,
            retry_after_s=getattr(error, "retry_after_s", None),
        )

    def to_error(self) -> RequestError:
        """Return the error: class, status, code, field and time to wait."""
        return make_request_error(
            self.code,
            self.message,
            status=self.status,
            param=self.param,
            retry_after_s=self.retry_after_s,
        )


class CacheMiss(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """A request was not admitted: P1 lacks the tensors of these items. Send it again with them."""

    request_id: str
    mm_hashes: list[str]


class AdapterLoaded(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """An adapter was loaded, or could not be."""

    lora_name: str
    error: RequestFailed | None = None
    """Why it could not; the name is free again."""


class EngineChanged(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """A `ControlEngine` was done, or refused, and what the engine is like since."""

    number: int
    error: RequestFailed | None = None
    weights_version: int
    weights_mark: str = ""
    """Tells the files of the present weights from others that may be written to their directory."""
    lacks_weights: bool = False
    """Whether it is awake, and computes nothing until weights are given."""
    is_sleeping: bool
    is_paused: bool


STEP_TOKEN_BOUNDS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Upper bounds of `Heartbeat.step_token_counts`."""

MEMORY_CAUSES = (
    "weights",
    "kv_cache",
    "draft_model",
    "encoder_outputs",
    "hidden_states",
    "adapters",
    "processed_items",
    "kv_offload",
    "rest",
)
"""The keys of `Heartbeat.memory_bytes`."""

MAX_LISTED_LORAS = 64
"""Names of adapters in a heartbeat."""


class Ready(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """P1 accepts requests; programs that are left are compiled meanwhile."""

    num_kv_blocks: int
    block_size: int = 0
    """Tokens of a block."""
    num_programs: int
    """XLA programs: `encode`, `step` and `sample` over all buckets."""
    num_programs_left: int = 0
    """How many of them are not compiled yet."""
    startup_seconds: dict[str, float] = {}


class LoopState(msgspec.Struct, kw_only=True, frozen=True):
    """What P1's loop does, as another of its threads sees it."""

    num_turns: int = 0
    """Turns of the loop; each reads all messages, and runs a step if there is work."""
    turn_s: float = 0.0
    """Age of the current turn, in seconds in which the process was not stopped."""
    idle_s: float = 0.0
    """Its last seconds, in which no thread of the step computed or waited for a CPU."""
    num_received: int = 0
    """Messages of P0 that were read."""
    num_sent: int = 0
    """Messages to P0 without heartbeats."""


class Heartbeat(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """P1 is alive, with its statistics; sent at least once a second."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_compilations: int
    """Compilations that a step waited for since warm-up: 0 unless something is wrong."""
    num_programs_left: int = 0
    """Programs that are not compiled yet."""
    time_s: float = 0.0
    """Time of the statistics, in P1's `time.monotonic()` seconds."""
    num_prompt_tokens: int = 0
    """Prompt tokens of all requests with a first token, also those found in the prefix cache."""
    num_generation_tokens: int = 0
    prefix_cache_hits: int = 0
    """Prompt tokens found in the prefix cache, of `prefix_cache_queries`."""
    prefix_cache_queries: int = 0
    kv_offload_hits: int = 0
    """Tokens whose KV blocks host memory had, of `kv_offload_queries` that the device had not."""
    kv_offload_queries: int = 0
    kv_offload_copied_bytes: int = 0
    """Of evicted KV blocks that were copied to host memory, ..."""
    kv_offload_restored_bytes: int = 0
    """... and back."""
    kv_offload_copied_s: float = 0.0
    """Seconds of the engine's thread that the former took, ..."""
    kv_offload_restored_s: float = 0.0
    """... and the latter."""
    kv_files_hits: int = 0
    """KV blocks that were read from a directory, ..."""
    kv_files_misses: int = 0
    """... and prefixes, of the first block that is not there."""
    kv_files_read_bytes: int = 0
    kv_files_written_bytes: int = 0
    encoder_cache_hits: int = 0
    """Encoder outputs found in the cache, of `encoder_cache_queries`."""
    encoder_cache_queries: int = 0
    encoder_disk_hits: int = 0
    """Encoder outputs that were not in the cache and found on disk, of `encoder_disk_queries`."""
    encoder_disk_queries: int = 0
    encoder_disk_read_bytes: int = 0
    encoder_disk_written_bytes: int = 0
    encoder_workers_items: int = 0
    """Items whose outputs workers gave."""
    encoder_workers_bytes: int = 0
    """Of these."""
    encoder_workers_wait_s: float = 0.0
    """Seconds from asking to having, added over these."""
    encoder_workers_retries: int = 0
    """Items that were asked for once more, since a worker was lost or slow."""
    encoder_workers_refused: int = 0
    """Answers of workers that were not what was asked for."""
    encoder_workers_fallbacks: int = 0
    """Items that this engine encoded, since no worker answered."""
    encoder_workers_alive: int = 0
    encoder_cache_usage: float = 0.0
    """Referenced share of the encoder cache, between 0 and 1."""
    num_preemptions: int = 0
    num_drafts: int = 0
    """Guesses that were verified, of several tokens each (`--speculative-config`)."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """The right ones among these."""
    num_step_tokens: int = 0
    """Tokens that all steps computed."""
    step_token_counts: list[int] = []
    """Steps of at most so many tokens as `STEP_TOKEN_BOUNDS` say, and larger ones; not summed."""
    running_loras: list[str] = []
    """Adapters that requests run with, at most `MAX_LISTED_LORAS`."""
    waiting_loras: list[str] = []
    """Those that requests wait with, as many of them."""
    memory_bytes: dict[str, int] = {}
    """P1's resident memory by cause (`MEMORY_CAUSES`); empty where it is not known."""
    loop: LoopState = LoopState()


EngineEvent = StepOutput | RequestFailed | CacheMiss | AdapterLoaded | EngineChanged
"""What P1 says about requests, adapters or itself, beside that it is there."""
FrontendMessage = EngineEvent | Ready | Heartbeat
