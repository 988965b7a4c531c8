"""OpenAI's request bodies, with vLLM's extra fields; every field is bounded.

A field that mmjax does not support may only have the value that has no effect; one whose every
value holds here is taken as it is. Validation of lists and dicts stops at their first error, and a
union's member is chosen before it is validated, so that a wrong request costs no more than a right
one.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    StrictBool,
    StrictFloat,
    StrictInt,
    Tag,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from mmjax.errors import RequestValueError
from mmjax.params.sampling_params import LIMITS, MAX_BAD_WORD_CHARS, SamplingParams
from mmjax.server.openai.request_body import unknown_fields_error
from mmjax.server.openai.structure import read_structure

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_PROMPTS = 64

Label = Annotated[str, Field(max_length=256)]
"""A short text without effect, or passed through."""

Text = Annotated[str, Field(max_length=32 * 2**20)]
RequestLabel = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
"""Part of an answer's id; without spaces or control characters, as it goes into logs."""

MetadataValue = Annotated[str, Field(max_length=512)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(max_length=2**20, fail_fast=True)]
Labels = Annotated[list[Label], Field(fail_fast=True)]
Object = Annotated[dict[str, Any], Field(fail_fast=True)]
Objects = Annotated[list[Object], Field(fail_fast=True)]
ObjectsByName = Annotated[dict[Label, Object], Field(max_length=64, fail_fast=True)]
Template = Annotated[str, Field(max_length=1_000_000)]


def bounded(name: str, **other: Any) -> Any:
    """Return the bounds of a sampling parameter, with `other` ones in place of its own."""
    bounds: dict[str, Any] = {**LIMITS[name], **other}
    return Field(**bounds, fail_fast=True) if "max_length" in bounds else Field(**bounds)


def tag_of(value: Any) -> str | None:
    """Return the union member of `value`: a text, a list or an object."""
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, list):
        return "<list>"
    return "<object>" if isinstance(value, dict) else None


def prompt_tag(value: Any) -> str | None:
    """Return the form of a prompt, by its first element."""
    match value:
        case [int(), *_]:
            return "<token ids>"
        case [[*_], *_]:
            return "<lists of token ids>"
        case _:
            return tag_of(value)


def form_of(words: str, tag: Callable[[Any], str | None] = tag_of) -> Discriminator:
    """Return what chooses a union's member by the form of a value, which `words` describe."""
    return Discriminator(
        tag, custom_error_type="form", custom_error_message=f"input should be {words}"
    )


Stop = Annotated[
    Annotated[StopText, Tag("<text>")]
    | Annotated[list[StopText], Field(max_length=64, fail_fast=True), Tag("<list>")],
    form_of("a text or a list of texts"),
]
Part = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[dict[Label, Any], Field(fail_fast=True), Tag("<object>")],
    form_of("an object or a text"),
]
Content = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<list>")],
    form_of("a text or a list of parts"),
]
TextsT = TypeVar("TextsT")
ManyIdsT = TypeVar("ManyIdsT")
Prompts = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[TokenIds, Tag("<token ids>")]
    | Annotated[TextsT, Tag("<list>")]
    | Annotated[ManyIdsT, Tag("<lists of token ids>")],
    form_of("a text or a list of token ids, or a list of these", prompt_tag),
]
"""One or several: a text, token ids, and lists of either, which have a limit."""
_few = Field(max_length=MAX_PROMPTS, fail_fast=True)
Prompt = Prompts[Annotated[list[Text], _few], Annotated[list[TokenIds], _few]]


def each_prompt(given: str | list[Any], name: str) -> list[Any]:
    """Return the prompts of a field one by one; RequestValueError for none."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestValueError.about(name, "is empty; give at least one")
    # All elements were checked to be of one kind.
    return [given] if isinstance(given[0], int) else given


_NULL: Mapping[str, str] = {"type": "null"}


class Strict(BaseModel):
    """An object without other fields than its own; a field that is null is one that is absent."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        """Refuse unknown fields with one error for all of them; pydantic makes one for each.

        Clients write null for what they leave to the server, also of fields that are another's.
        """
        if not isinstance(data, dict):
            return data
        known = cls.__pydantic_fields__
        given = {
            name: value
            for name, value in data.items()
            if value is not None or (name in known and known[name].is_required())
        }
        if not given.keys() <= known.keys():
            raise unknown_fields_error([name for name in given if name not in known], known)
        return given

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        resolved = handler.resolve_ref_schema(schema)
        resolved["additionalProperties"] = dict(_NULL)
        fields = resolved.get("properties", {})
        required = {name for name, field in cls.__pydantic_fields__.items() if field.is_required()}
        for name in fields.keys() - required:
            if _NULL in fields[name].get("anyOf", ()):
                continue
            default = {"default": fields[name].pop("default")} if "default" in fields[name] else {}
            fields[name] = {"anyOf": [fields[name], _NULL], **default}
        return schema


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def shared_fields(
    body: BaseModel, model: type[BaseModel], *, but: Collection[str] = ()
) -> dict[str, Any]:
    """Return the fields of a body that are given and that `model` has, too, except for `but`."""
    names = model.model_fields.keys() - but
    return {name: value for name, value in body if name in names and value is not None}


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_obfuscation: StrictBool = False


class ResponseFormat(Strict):
    """`response_format`; `structure.py` reads its schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Object | None = None


class PromptRequest(Strict):
    """Fields of every route that takes prompts."""

    model: Label | None = None
    user: Label | None = None
    request_id: RequestLabel | None = None
    """Part of the answer's id, and nothing else: requests are known by ids of the server's."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    mm_processor_kwargs: (
        Annotated[dict[Label, Any], Field(max_length=64, fail_fast=True)] | None
    ) = None
    timeout: Annotated[StrictFloat, Field(gt=0, le=86400)] | None = None
    """Seconds after which the request ends with 408, or an error event; the server's own limit
    holds as well."""
    priority: Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)] = 0
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    """How many of the last tokens are kept of a prompt without media; -1: as many as fit."""


class GenerationRequest(PromptRequest):
    """Fields that chat and completions share."""

    n: Annotated[StrictInt, bounded("n")] = 1
    temperature: Annotated[StrictFloat, bounded("temperature")] | None = None
    top_p: Annotated[StrictFloat, bounded("top_p")] | None = None
    top_k: Annotated[StrictInt, bounded("top_k")] | None = None
    min_p: Annotated[StrictFloat, bounded("min_p")] | None = None
    no_repeat_ngram_size: Annotated[StrictInt, bounded("no_repeat_ngram_size")] | None = None
    """HF's; neither OpenAI nor vLLM has it."""
    no_repeat_ngram_window_size: (
        Annotated[StrictInt, bounded("no_repeat_ngram_window_size")] | None
    ) = None
    frequency_penalty: Annotated[StrictFloat, bounded("frequency_penalty")] | None = None
    presence_penalty: Annotated[StrictFloat, bounded("presence_penalty")] | None = None
    repetition_penalty: Annotated[StrictFloat, bounded("repetition_penalty")] | None = None
    logit_bias: Annotated[dict[Label, StrictFloat], bounded("logit_bias")] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[BadWord], bounded("bad_words")] | None = None
    structured_outputs: Object | None = None
    prompt_logprobs: Annotated[StrictInt, bounded("prompt_logprobs")] | None = None
    seed: Annotated[StrictInt, bounded("seed")] | None = None
    max_tokens: Annotated[StrictInt, bounded("max_tokens")] | None = None
    min_tokens: Annotated[StrictInt, bounded("min_tokens")] = 0
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], bounded("stop_token_ids")] | None = None
    include_stop_str_in_output: StrictBool = False
    ignore_eos: StrictBool = False
    skip_special_tokens: StrictBool = True
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    """No effect: a hint for servers with several caches."""
    session_id: Label | None = None
    return_token_ids: StrictBool | None = False
    return_metrics: StrictBool | None = False
    """Whether the answer tells its times and caches; vLLM has a flag of the server for it."""
    return_tokens_as_token_ids: StrictBool | None = None
    """Whether logprobs name tokens as `token_id:7`, not by their text."""
    add_special_tokens: StrictBool = False
    response_format: ResponseFormat | None = None
    media_io_kwargs: ObjectsByName | None = None
    # Not supported: only the value without effect is allowed.
    length_penalty: StrictFloat | None = 1.0
    spaces_between_special_tokens: StrictBool = True
    best_of: StrictInt | None = None
    use_beam_search: StrictBool = False

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "length_penalty": (1.0, None),
        "spaces_between_special_tokens": (True,),
        "best_of": (None, 1),
        "use_beam_search": (False,),
    }
    """Field -> its values without effect."""

    def check_supported(self) -> None:
        """Refuse fields that mmjax does not support."""
        for name, neutral in self.NEUTRAL.items():
            if name not in self.model_fields_set:
                # Its default has no effect.
                continue
            value = getattr(self, name)
            # The best `n` of `n` are all of them.
            held = (*neutral, self.n) if name == "best_of" else neutral
            if not any(value == item and type(value) is type(item) for item in held):
                raise RequestValueError.about(name, "is not supported yet; leave it out")
        if self.stream_options is not None and not self.stream:
            raise RequestValueError.about(
                "stream_options", "needs `stream`: true; set it, or leave the options out"
            )
        if self.truncate_prompt_tokens == 0:
            raise RequestValueError.about(
                "truncate_prompt_tokens", "is 0, which leaves no prompt; give a number, or -1"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise RequestValueError.about(
                "prompt_logprobs", "are not streamed; leave them or `stream` out"
            )

    @property
    def has_schema(self) -> bool:
        """Whether it is `response_format` that has the schema of the answer."""
        return self.response_format is not None and self.response_format.type == "json_schema"

    def to_sampling_params(
        self, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Return the sampling parameters; fields that were not given take `defaults`."""
        given = {name: value for name in _SHARED if (value := getattr(self, name)) is not None}
        structure = read_structure(
            self.structured_outputs,
            None if self.response_format is None else self.response_format.model_dump(),
        )
        return msgspec.structs.replace(
            defaults,
            **given,
            structured_outputs=structure,
            max_tokens=max_tokens,
            logprobs=logprobs,
        )


_SHARED = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationRequest.__pydantic_fields__
    and name not in ("structured_outputs", "max_tokens", "logprobs")
)
"""Fields of a body that are those of SamplingParams, and need nothing else."""


class ChatMessage(Strict):
    """One message; `frontend.prompt.chat` parses its content parts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Label | None = None
    # Fields of an assistant's message that a client sends back.
    refusal: Text | None = None
    tool_calls: Objects | None = None
    tool_call_id: Label | None = None
    """The call that a message of the role `tool` answers."""
    function_call: None = None
    audio: None = None
    cache_control: Annotated[Object | None, Field(exclude=True)] = None
    """No effect, as of a part: all prompts are cached."""
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    parsed: Annotated[Any, Field(exclude=True)] = None
    """No effect: what the server, or OpenAI's `parse`, made of `content`."""


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[StrictInt, bounded("max_tokens")] | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[StrictInt, bounded("logprobs")] | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template: Template | None = None
    chat_template_kwargs: Annotated[dict[Label, Any], Field(fail_fast=True)] | None = None
    tools: Objects | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    functions: Objects | None = None
    function_call: Any = None
    reasoning_effort: ReasoningEffort | None = None
    """For a chat template that asks for it; no effect where none does."""
    include_reasoning: StrictBool | None = None
    """vLLM's: false leaves a model's reasoning out, where `--reasoning-parser` tells it apart."""
    echo: StrictBool = False
    documents: Objects | None = None
    metadata: Annotated[dict[Label, MetadataValue], Field(fail_fast=True)] | None = None
    store: StrictBool | None = None
    service_tier: Label | None = None
    modalities: Labels | None = None
    verbosity: Label | None = None
    audio: Object | None = None
    prediction: Object | None = None
    """No effect: it may make an answer come sooner, and never another one."""
    moderation: Object | None = None
    web_search_options: Object | None = None
    prompt_cache_options: Object | None = None
    prompt_cache_retention: Label | None = None

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.NEUTRAL,
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "documents": (None, []),
        "modalities": (None, ["text"]),
        "verbosity": (None, "medium"),
        "audio": (None,),
        "moderation": (None,),
        "web_search_options": (None,),
    }

    def check_supported(self) -> None:
        """Refuse fields that mmjax does not support, or that contradict each other."""
        super().check_supported()
        for index, message in enumerate(self.messages):
            _check_tool_fields(message, f"messages[{index}]")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestValueError.about(
                "continue_final_message",
                "and `add_generation_prompt` exclude each other; set `add_generation_prompt` to "
                "false",
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestValueError.about(
                "top_logprobs", "needs `logprobs`: true; set it, or leave it out"
            )

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Return the sampling parameters; without a limit, `max_tokens` is None."""
        return self.to_sampling_params(
            defaults,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[StrictInt, bounded("max_tokens", ge=0)] | None = 16
    """0 with `echo` alone: the prompt comes back, and nothing is generated."""
    logprobs: Annotated[StrictInt, bounded("logprobs")] | None = None
    add_special_tokens: StrictBool = True
    echo: StrictBool = False
    suffix: Text | None = None

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.NEUTRAL,
        "suffix": (None, ""),
        "media_io_kwargs": (None, {}),
    }

    def check_supported(self) -> None:
        """Refuse fields that mmjax does not support, and too many completions."""
        super().check_supported()
        if self.return_metrics and len(self.prompts()) > 1:
            raise RequestValueError.about(
                "return_metrics",
                "is about one prompt; send the prompts one by one, or leave it out",
            )
        if self.echo and self.truncate_prompt_tokens is not None:
            raise RequestValueError(
                "`echo` shows the prompt as it was sent; leave `truncate_prompt_tokens` out",
                param="truncate_prompt_tokens",
            )
        if self.max_tokens == 0 and not self.echo:
            raise RequestValueError.about(
                "max_tokens", "is 0, which needs `echo`: true; set it, or ask for a token"
            )
        if len(self.prompts()) * self.n > (most := LIMITS["n"]["le"]):
            raise RequestValueError.about(
                "n", f"times the number of prompts is above {most}; send fewer at once"
            )

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one."""
        return each_prompt(self.prompt, "prompt")

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Return the sampling parameters."""
        # The engine generates one token at least; without `max_tokens` it is left out.
        max_tokens = 1 if self.max_tokens == 0 else self.max_tokens
        params = self.to_sampling_params(defaults, max_tokens=max_tokens, logprobs=self.logprobs)
        if not self.echoes_logprobs or self.prompt_logprobs is not None:
            return params
        return msgspec.structs.replace(params, prompt_logprobs=self.logprobs)

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the prompt's log-probabilities stand before the answer's."""
        return self.echo and self.logprobs is not None


def _check_tool_fields(message: ChatMessage, place: str) -> None:
    """Refuse tool calls of anybody but the assistant, and answers to no call."""
    if message.tool_calls and message.role != "assistant":
        raise RequestValueError.about(
            f"{place}.tool_calls", "is the assistant's alone; leave it out"
        )
    if message.tool_call_id is not None and message.role != "tool":
        raise RequestValueError.about(
            f"{place}.tool_call_id", "belongs to messages of the role `tool`; leave it out"
        )
    if message.role == "tool" and message.tool_call_id is None:
        raise RequestValueError.about(
            f"{place}.tool_call_id", "is missing; give the id of the call that is answered"
        )
