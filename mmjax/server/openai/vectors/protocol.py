"""What /v1/embeddings, /pooling, /rerank and /score take; names are OpenAI's, Jina's and vLLM's."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, Tag

from mmjax.errors import RequestValueError
from mmjax.params.pooling_params import MAX_DIMENSIONS, PoolingParams, PoolingTask
from mmjax.server.openai.protocol import (
    MAX_MESSAGES,
    ChatCompletionRequest,
    ChatMessage,
    Content,
    GenerationRequest,
    Label,
    ObjectsByName,
    PromptRequest,
    Prompts,
    Strict,
    Template,
    Text,
    TokenIds,
    each_prompt,
    form_of,
    shared_fields,
)

MAX_INPUTS = 2048
"""As many as OpenAI takes: clients send a thousand texts of an index at once."""
MAX_DOCUMENTS = 1024
_PAIRS = (
    *(("text_1", "text_2"), ("queries", "documents"), ("queries", "items")),
    ("data_1", "data_2"),
)
_FIELDS_OF_MESSAGES = (
    *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
    "media_io_kwargs",
)

_many = Field(max_length=MAX_INPUTS, fail_fast=True)
Input = Prompts[Annotated[list[Text], _many], Annotated[list[TokenIds], _many]]


class ContentParam(Strict):
    """A text, or parts as a message has them."""

    content: Content


Document = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[ContentParam, Tag("<object>")],
    form_of("a text or an object with `content`"),
]
Documents = Annotated[list[Document], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]

Side = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[ContentParam, Tag("<object>")]
    | Annotated[Documents, Tag("<list>")],
    form_of("a text or an object with `content`, or a list"),
]


class VectorRequest(PromptRequest):
    """Fields that all of them have."""

    use_activation: StrictBool | None = None

    def to_generation(self) -> GenerationRequest:
        """Return what the requests to the engine have of other routes."""
        return GenerationRequest(**shared_fields(self, GenerationRequest))

    @property
    def has_special_tokens(self) -> bool:
        """Whether the tokenizer adds its own to a text."""
        return True

    def to_pooling(self) -> PoolingParams:
        """Return what becomes of each prompt; scores are of vectors of length 1."""
        return PoolingParams(use_activation=True)


class EmbeddingRequest(VectorRequest):
    """POST /v1/embeddings."""

    input: Input | None = None
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
        | None
    ) = None
    """vLLM's, in place of `input`: one prompt, with pictures."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[StrictInt, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    add_special_tokens: StrictBool | None = None
    """By default: of `input` yes, of `messages`, whose template writes them, no."""
    # Of `messages`, as chat's, but that no answer is begun unless a request asks for it.
    add_generation_prompt: StrictBool = False
    continue_final_message: StrictBool = False
    chat_template: Template | None = None
    chat_template_kwargs: Annotated[dict[Label, Any], Field(fail_fast=True)] | None = None
    media_io_kwargs: ObjectsByName | None = None

    def to_generation(self) -> GenerationRequest:
        if self.messages is not None:
            return ChatCompletionRequest(**shared_fields(self, ChatCompletionRequest))
        for name in _FIELDS_OF_MESSAGES:
            if getattr(self, name):
                raise RequestValueError.about(
                    name, "belongs to `messages`; leave it out, or send messages"
                )
        return super().to_generation()

    @property
    def has_special_tokens(self) -> bool:
        return self.add_special_tokens is not False

    def prompts(self) -> list[str | list[int]]:
        """Return those of `input`, one by one; none where there are `messages`."""
        if (self.input is None) == (self.messages is None):
            raise RequestValueError.about(
                "input", "or `messages` is what becomes vectors; give one, and not both"
            )
        return [] if self.input is None else each_prompt(self.input, "input")

    def to_pooling(self) -> PoolingParams:
        return PoolingParams(
            task="embed", dimensions=self.dimensions, use_activation=self.use_activation
        )


class PoolingRequest(EmbeddingRequest):
    """POST /pooling."""

    task: PoolingTask | None = None

    def to_pooling(self) -> PoolingParams:
        return PoolingParams(
            task=self.task, dimensions=self.dimensions, use_activation=self.use_activation
        )


class RerankRequest(VectorRequest):
    """POST /rerank."""

    query: Document
    documents: Documents
    top_n: Annotated[StrictInt, Field(ge=0, lt=2**31)] = 0
    """How many are told, the best ones; 0: all."""
    return_documents: StrictBool = True


class ScoreRequest(VectorRequest):
    """POST /score: one to one, or the first to each of many, by any pair of vLLM's names."""

    text_1: Side | None = None
    text_2: Side | None = None
    queries: Side | None = None
    documents: Side | None = None
    items: Side | None = None
    data_1: Side | None = None
    data_2: Side | None = None
    encoding_format: Literal["float"] | None = None
    """No effect: a score is a number."""

    def pair(self) -> tuple[str, str]:
        """Return which of the pairs is given; RequestValueError for another number of fields."""
        names = {name for pair in _PAIRS for name in pair}
        given = {name for name in names if getattr(self, name) is not None}
        for first, second in _PAIRS:
            if given == {first, second}:
                return first, second
        raise RequestValueError.about(
            "text_1",
            "and `text_2` are what is compared, or one of "
            + ", ".join(f"`{first}` and `{second}`" for first, second in _PAIRS[1:])
            + "; give one pair",
        )
