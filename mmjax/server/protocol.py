"""OpenAI's requests as they come in: every field known, bounded, and meant as vLLM means it.

A field that mmjax cannot honour yet may only have the value that changes nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from mmjax.errors import RequestValueError
from mmjax.sampling_params import MAX_LOGPROBS, SamplingParams

T = TypeVar("T")

MAX_N = 64
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_PROMPTS = 64

Label = Annotated[str, Field(max_length=256)]
"""A short text that is only handed on."""

Text = Annotated[str, Field(max_length=32 * 2**20)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(max_length=2**20)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(_Strict):
    """`stream_options`."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_obfuscation: StrictBool = False


class ResponseFormat(_Strict):
    """`response_format`: text is what every answer is."""

    type: Literal["text"]


class GenerationRequest(_Strict):
    """What chat and completions have in common."""

    model: Label | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_N)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] = 0
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    include_stop_str_in_output: StrictBool = False
    ignore_eos: StrictBool = False
    skip_special_tokens: StrictBool = True
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    user: Label | None = None
    request_id: Label | None = None
    session_id: Label | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    return_token_ids: StrictBool | None = False
    add_special_tokens: StrictBool = False
    response_format: ResponseFormat | None = None
    mm_processor_kwargs: Annotated[dict[Label, Any], Field(max_length=64)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    """Seconds after which the request ends with 408, or an error event; the server's own limit
    holds as well."""
    priority: Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)] = 0
    # Known, and served only with the value that changes nothing.
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    length_penalty: float | None = 1.0
    logit_bias: dict[Label, float] | None = None
    spaces_between_special_tokens: StrictBool = True
    truncate_prompt_tokens: StrictInt | None = None
    prompt_logprobs: StrictInt | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[Label] | None = None
    best_of: StrictInt | None = None
    use_beam_search: StrictBool = False
    return_tokens_as_token_ids: StrictBool | None = None
    structured_outputs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0.0, None),
        "presence_penalty": (0.0, None),
        "repetition_penalty": (1.0, None),
        "length_penalty": (1.0, None),
        "logit_bias": (None, {}),
        "spaces_between_special_tokens": (True,),
        "truncate_prompt_tokens": (None,),
        "prompt_logprobs": (None,),
        "allowed_token_ids": (None,),
        "bad_words": (None, []),
        "best_of": (None, 1),
        "use_beam_search": (False,),
        "return_tokens_as_token_ids": (None, False),
        "structured_outputs": (None,),
        "media_io_kwargs": (None, {}),
    }
    """Field -> the values with which it changes nothing."""

    def check_supported(self) -> None:
        """Refuse fields that ask for what mmjax does not do yet."""
        for name, neutral in self.NEUTRAL.items():
            value = getattr(self, name)
            if not any(value == item and type(value) is type(item) for item in neutral):
                raise RequestValueError(f"`{name}` is not supported yet; leave it out", param=name)
        if self.stream_options is not None and not self.stream:
            raise RequestValueError(
                "`stream_options` needs `stream`: true; set it, or leave the options out",
                param="stream_options",
            )

    def to_sampling_params(
        self, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Return what the sampler is asked; fields that were not given take `defaults`."""
        return SamplingParams(
            n=self.n,
            temperature=_or(self.temperature, defaults.temperature),
            top_p=_or(self.top_p, defaults.top_p),
            top_k=_or(self.top_k, defaults.top_k),
            min_p=_or(self.min_p, defaults.min_p),
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=() if self.stop is None else self.stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens,
        )


class ChatMessage(_Strict):
    """One message; its content parts are read by `frontend.chat`, which names them in errors."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[str | dict[Label, Any]], Field(max_length=MAX_PARTS)] | None = (
        None
    )
    name: Label | None = None
    # What an assistant's message carries when a client sends it back; without calls it is empty.
    refusal: Text | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Label | None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template: Annotated[str, Field(max_length=1_000_000)] | None = None
    chat_template_kwargs: dict[Label, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Any = None
    reasoning_effort: Label | None = None
    echo: StrictBool = False
    documents: list[dict[str, Any]] | None = None
    metadata: dict[Label, Annotated[str, Field(max_length=512)]] | None = None
    store: StrictBool | None = None
    service_tier: Label | None = None
    modalities: list[Label] | None = None

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.NEUTRAL,
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "reasoning_effort": (None, "none"),
        "echo": (False,),
        "documents": (None, []),
        "store": (None, False),
        "service_tier": (None, "auto", "default"),
        "modalities": (None, ["text"]),
        "chat_template_kwargs": (None, {}),
        "add_special_tokens": (False,),
    }

    def check_supported(self) -> None:
        """Refuse fields that ask for what mmjax does not do yet, or that contradict each other."""
        super().check_supported()
        for index, message in enumerate(self.messages):
            if message.tool_calls or message.role == "tool":
                place = f"messages[{index}].{'tool_calls' if message.tool_calls else 'role'}"
                raise RequestValueError(
                    f"`{place}`: tools are not supported yet; leave such messages out", param=place
                )
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestValueError(
                "`continue_final_message` and `add_generation_prompt` exclude each other; "
                "set `add_generation_prompt` to false",
                param="continue_final_message",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestValueError(
                "`top_logprobs` needs `logprobs`: true; set it, or leave it out",
                param="top_logprobs",
            )

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Return what the sampler is asked; without a limit, as much as fits."""
        return self.to_sampling_params(
            defaults,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS)]
    )
    max_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = 16
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: StrictBool = True
    echo: StrictBool = False
    suffix: Text | None = None

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.NEUTRAL,
        "echo": (False,),
        "suffix": (None, ""),
    }

    def check_supported(self) -> None:
        """Refuse fields that ask for what mmjax does not do yet, and too many answers."""
        super().check_supported()
        if len(self.prompts()) * self.n > MAX_N:
            raise RequestValueError(
                f"`n` times the number of prompts is above {MAX_N}; send fewer at once",
                param="n",
            )

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and all(isinstance(item, int) for item in prompt):
            return [[item for item in prompt if isinstance(item, int)]]
        if not prompt:
            raise RequestValueError("`prompt` is empty; give at least one", param="prompt")
        return [item for item in prompt if not isinstance(item, int)]

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Return what the sampler is asked."""
        return self.to_sampling_params(defaults, max_tokens=self.max_tokens, logprobs=self.logprobs)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
